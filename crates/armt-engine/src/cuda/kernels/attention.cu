// Causal attention.
