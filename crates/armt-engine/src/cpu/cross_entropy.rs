//! Cross entropy over rows.
