//! Judging models: exact match, memory capacity, reports and plots.

pub mod capacity;
pub mod plot;
pub mod results;
pub mod retrieval;
