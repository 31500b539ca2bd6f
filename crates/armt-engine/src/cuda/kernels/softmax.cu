// Softmax over rows.
