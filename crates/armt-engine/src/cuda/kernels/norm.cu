// Layer norm and RMS norm.
