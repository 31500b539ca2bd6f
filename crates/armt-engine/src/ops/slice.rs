//! A range of one axis, copied out.
