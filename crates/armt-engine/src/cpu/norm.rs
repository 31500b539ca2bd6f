//! Norms over rows.
