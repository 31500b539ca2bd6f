//! Associative retrieval.
