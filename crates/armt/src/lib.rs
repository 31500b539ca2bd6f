//! The Associative Recurrent Memory Transformer (arXiv 2407.04841). The models come next; what they stand on is [`engine`].

pub use armt_engine as engine;
