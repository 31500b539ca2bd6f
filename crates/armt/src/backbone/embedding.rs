//! Tokens and learned positions, for a segment that may have memory tokens around it.

use std::sync::Arc;

use armt_engine::{Param, Tape, Tensor, ops};

use super::architecture::{Architecture, Positions};
use crate::compute::Compute;
use crate::error::Result;
use crate::weights::{Fill, Maker};

/// Positions that a segment has beside those of its own tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Around {
    /// Before its tokens.
    pub before: usize,
    /// After them.
    pub after: usize,
    /// Whether they have rows of their own in a table of learned positions: the first and the last.
    pub wrapped: bool,
}

impl Around {
    /// Both sides together.
    pub fn total(&self) -> usize {
        self.before + self.after
    }
}

/// Tables of tokens and positions.
pub struct Embedding {
    /// `[V, d]`.
    pub tokens: Param,
    /// Learned positions, with rows for what is around a segment where that is wrapped.
    pub positions: Option<Param>,
    around: Around,
    compute: Arc<Compute>,
}

impl Embedding {
    /// Fresh tables.
    pub fn new(make: &mut Maker, architecture: &Architecture, around: Around) -> Result<Self> {
        let (d, normal) = (architecture.width, Fill::Normal(architecture.init));
        let tokens = make.param("embed", &[architecture.vocab, d], normal)?;
        let positions = match architecture.positions {
            Positions::Learned(rows) => {
                let rows = rows + if around.wrapped { around.total() } else { 0 };
                Some(make.param("positions", &[rows, d], normal)?)
            }
            Positions::Rotary(_) => None,
        };
        Ok(Embedding { tokens, positions, around, compute: make.compute().clone() })
    }

    /// Embeddings of ids of any shape.
    pub fn embed(&self, tape: &Tape, ids: &Tensor) -> Result<Tensor> {
        Ok(ops::embedding(&tape.param(&self.tokens), ids)?)
    }

    /// Adds learned positions, the same for all texts. Rotary models have none to add.
    pub fn add_positions(&self, tape: &Tape, x: &Tensor, positions: &[i32]) -> Result<Tensor> {
        let Some(table) = &self.positions else { return Ok(x.clone()) };
        let ids = self.compute.constant(positions, &[positions.len()])?;
        Ok(ops::add(x, &ops::embedding(&tape.param(table), &ids)?)?)
    }

    /// Rows of the table of positions for a segment: what is before, padding, `text` tokens, what is after.
    pub fn segment_positions(&self, text: usize, pad: usize) -> Vec<i32> {
        let Around { before, after, wrapped } = self.around;
        let (first, last) = match &self.positions {
            Some(table) if wrapped => (before, table.value().dims()[0] - after),
            _ => (before, before + text),
        };
        let run = |from: usize, n: usize| (from..from + n).map(|p| p as i32);
        run(0, before).chain(std::iter::repeat_n(0, pad)).chain(run(first, text)).chain(run(last, after)).collect()
    }

    /// Its parameters.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.tokens).chain(&self.positions)
    }
}
