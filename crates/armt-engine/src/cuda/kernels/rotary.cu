// Rotary embedding.
