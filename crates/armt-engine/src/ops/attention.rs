//! Causal attention within one segment.
