//! Layer norm and RMS norm with gains per group.
