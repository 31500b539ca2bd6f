//! Cross entropy.
