//! The transformer without a memory: a table of tokens, a stack of blocks, a head. Parameters of layers are stacked on a leading axis
//! `[L, ...]`, so that any range of layers can run as one batched block.

pub mod architecture;
pub mod block;
mod embedding;
pub mod families;
mod head;
mod rotary;

use std::sync::Arc;

pub use architecture::Architecture;
pub use block::{Attend, Blocks, Cache, Padding};
pub use embedding::{Around, Embedding};
pub use head::Head;

use armt_engine::Param;

/// Embedding, blocks and head.
pub struct Backbone {
    /// What it is made of.
    pub architecture: Arc<Architecture>,
    /// Tokens and positions.
    pub embedding: Embedding,
    /// The layers. Shared, because a block that is computed again on the way back holds on to them.
    pub blocks: Arc<Blocks>,
    /// The last norm and the logits.
    pub head: Head,
}

impl Backbone {
    /// The output table: the head's own, or the embedding.
    pub fn output_table(&self) -> &Param {
        self.head.table.as_ref().unwrap_or(&self.embedding.tokens)
    }
}
