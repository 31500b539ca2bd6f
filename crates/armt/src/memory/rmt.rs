//! RMT: memory tokens around a segment's own; the last layer's outputs of those after it, normed, are the next segment's memory tokens.
//!
//! So the state is not a layer's: it goes through the top, and segments cannot overlap.

use std::ops::Range;

use armt_engine::{Tape, Tensor, ops};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{expect_tokens, keys_of, read};
use super::{Memory, MemoryKind, Settings, Step};
use crate::backbone::{Architecture, Around, Backbone};
use crate::error::Result;
use crate::state::{Begins, Extent, LayerState, PartLayout, PartType, State, StateLayout};
use crate::weights::Maker;

pub(super) const KIND: MemoryKind = MemoryKind { name: "rmt", settings: read::<Rmt> };

/// RMT's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rmt {
    /// Memory tokens.
    pub tokens: usize,
    /// GPT-2 only: memory tokens have position rows of their own. Off by default.
    #[serde(default)]
    pub wrap_pos: bool,
}

impl Settings for Rmt {
    fn kind(&self) -> &'static str {
        KIND.name
    }

    fn around(&self) -> Around {
        Around { before: self.tokens, after: self.tokens, wrapped: self.wrap_pos }
    }

    fn check(&self, _: &Architecture) -> Result<()> {
        expect_tokens(self.tokens)
    }

    fn keys(&self) -> Map<String, Value> {
        keys_of(self)
    }

    fn build(&self, _: &mut Maker, architecture: &Architecture, _: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(RmtMemory { tokens: self.tokens, width: architecture.width }))
    }
}

struct RmtMemory {
    tokens: usize,
    width: usize,
}

impl Memory for RmtMemory {
    fn layout(&self) -> StateLayout {
        let shape = vec![Extent::Texts, Extent::Size(self.tokens), Extent::Size(self.width)];
        let memory = PartLayout { name: "memory", shape, dtype: PartType::Computed };
        StateLayout { kind: KIND.name, parts: vec![memory], begins: Begins::Absent }
    }

    fn begin(&self, _: &Tape, _: &State, _: Range<usize>, _: Option<usize>) -> Result<Vec<Tensor>> {
        Ok(Vec::new())
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> Result<(Tensor, LayerState)> {
        Ok((step.block(x)?, memory))
    }

    fn through_top(&self) -> bool {
        true
    }

    fn to_top(&self, tape: &Tape, backbone: &Backbone, h: &Tensor, _: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let (t, m) = (h.dims()[1], self.tokens);
        let last = ops::narrow(h, 1, t - m, m)?;
        Ok(vec![backbone.head.normed(tape, &backbone.architecture, &last)?])
    }
}
