//! Judging models: exact match, memory capacity, reports and plots.
