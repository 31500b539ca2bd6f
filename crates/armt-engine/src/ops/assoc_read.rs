//! The associative read.
