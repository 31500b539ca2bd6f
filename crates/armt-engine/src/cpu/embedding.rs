//! Rows of a table.
