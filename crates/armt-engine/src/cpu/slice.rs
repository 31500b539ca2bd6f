//! Moving ranges of an axis.
