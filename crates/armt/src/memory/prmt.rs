//! PRMT: each layer has memory tokens of its own, M `[m, d]`, which go to the same layer of the next segment.
//!
//! ```text
//! first and last m rows of x <- M;   y = block(x);   M <- last m rows of y
//! ```

use std::ops::Range;

use armt_engine::{Param, Tape, Tensor, ops};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{expect_tokens, keys_of, read};
use super::{Memory, MemoryKind, Settings, Step};
use crate::backbone::block::last_rows;
use crate::backbone::{Architecture, Around};
use crate::error::Result;
use crate::state::{Begins, Extent, LayerState, PartLayout, PartType, State, StateLayout};
use crate::weights::{EntryList, Fill, Layout, Maker};

pub(super) const KIND: MemoryKind = MemoryKind { name: "prmt", settings: read::<Prmt> };

/// PRMT's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prmt {
    /// Memory tokens of each layer.
    pub tokens: usize,
    /// GPT-2 only: memory tokens have position rows of their own. Off by default.
    #[serde(default)]
    pub wrap_pos: bool,
}

impl Settings for Prmt {
    fn kind(&self) -> &'static str {
        KIND.name
    }

    fn around(&self) -> Around {
        Around { before: self.tokens, after: self.tokens, wrapped: self.wrap_pos }
    }

    fn wrapping(&self) -> (&'static str, &'static str) {
        ("memory_cell.model.", "layer.")
    }

    fn check(&self, _: &Architecture) -> Result<()> {
        expect_tokens(self.tokens)
    }

    fn keys(&self) -> Map<String, Value> {
        keys_of(self)
    }

    fn build(&self, make: &mut Maker, a: &Architecture, _: usize) -> Result<Box<dyn Memory>> {
        let learned = make.param("layer_memory", &[a.layers, self.tokens, a.width], Fill::Normal(1.0))?;
        Ok(Box::new(PrmtMemory { learned }))
    }
}

struct PrmtMemory {
    /// The memory before the first segment, `[L, m, d]`.
    learned: Param,
}

impl Memory for PrmtMemory {
    fn layout(&self) -> StateLayout {
        let dims = self.learned.value().dims();
        let shape = vec![Extent::Size(dims[0]), Extent::Texts, Extent::Size(dims[1]), Extent::Size(dims[2])];
        let memory = PartLayout { name: "memory", shape, dtype: PartType::Computed };
        StateLayout { kind: KIND.name, parts: vec![memory], begins: Begins::Absent }
    }

    fn params(&self) -> Vec<&Param> {
        vec![&self.learned]
    }

    fn layer_entries<'a>(&'a self, list: &mut EntryList<'a>, prefix: &str, l: usize) {
        let shape = vec![1, self.learned.value().dims()[1], self.learned.value().dims()[2]];
        list.layer(format!("{prefix}memory"), &self.learned, l, shape, Layout::Plain);
    }

    fn begin(&self, tape: &Tape, state: &State, layers: Range<usize>, _: Option<usize>) -> Result<Vec<Tensor>> {
        match state.get("memory") {
            Some(memory) => Ok(vec![ops::rows(memory, layers)?]),
            None => Ok(vec![spread(&tape.param_rows(&self.learned, layers)?, state.texts())?]),
        }
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, mut memory: LayerState) -> Result<(Tensor, LayerState)> {
        let rows = memory.rows(&step.layers);
        let m = ops::rows(&memory.tensors[0], rows.clone())?;
        let (tokens, t) = (m.dims()[2], x.dims()[2]);
        let x = ops::concat(&[&m, &ops::narrow(x, 2, tokens, t - 2 * tokens)?, &m], 2)?;
        let y = step.block(&x)?;
        memory.replace(&rows, vec![last_rows(&y, tokens)?])?;
        Ok((y, memory))
    }

    fn look(&self, _: &Step<'_>, x: &Tensor, memory: &LayerState, from: usize) -> Result<Tensor> {
        if from > 0 {
            return Ok(x.clone());
        }
        let m = &memory.tensors[0];
        let before = m.dims()[2];
        Ok(ops::concat(&[m, &ops::narrow(x, 2, before, x.dims()[2] - before)?], 2)?)
    }
}

/// `[n, m, d]` repeated for each text: `[n, B, m, d]`.
fn spread(m: &Tensor, texts: usize) -> Result<Tensor> {
    let (n, tokens, d) = (m.dims()[0], m.dims()[1], m.dims()[2]);
    let one = ops::reshape(m, [n, 1, tokens, d])?;
    Ok(ops::concat(&vec![&one; texts], 1)?)
}
