//! The associative write.
