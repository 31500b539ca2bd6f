//! The associative memory.
