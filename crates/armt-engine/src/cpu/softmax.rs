//! Softmax over rows.
