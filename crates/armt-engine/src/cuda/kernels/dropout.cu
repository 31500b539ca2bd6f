// Dropout.
