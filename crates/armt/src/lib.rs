//! The Associative Recurrent Memory Transformer (arXiv 2407.04841).

pub mod checkpoint;
pub mod config;
mod error;
pub mod generate;
pub mod memory;
pub mod model;
pub mod random;
pub mod reader;
pub mod schedule;
pub mod segment;
pub mod text;

pub use armt_engine as engine;
pub use config::Config;
pub use error::{Error, Result};
pub use memory::MemoryState;
pub use model::Model;
