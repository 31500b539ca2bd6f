//! What a model keeps between segments: the state as a value, and how a layer reads and writes its part of it.

mod associative;
mod file;
mod layer;
mod state;

pub(crate) use layer::{Kind, LayerMemory, last_rows};
pub use state::{Content, MemoryState};
