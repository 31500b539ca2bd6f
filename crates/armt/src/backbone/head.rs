//! The norm after the last layer and the output table.

use armt_engine::{Param, Tape, Tensor};

use super::architecture::Architecture;
use super::block::{NormWeights, apply_norm};
use crate::error::Result;
use crate::weights::{Fill, Maker};

/// What turns the last layer's outputs into logits.
pub struct Head {
    /// `[d]`.
    pub norm: NormWeights,
    /// `[V, d]`, unless it is the table of tokens.
    pub table: Option<Param>,
}

impl Head {
    /// A fresh head.
    pub fn new(make: &mut Maker, a: &Architecture) -> Result<Self> {
        let norm = NormWeights::new(make, "last_norm", &[a.width], a.norm)?;
        let table = (!a.tied).then(|| make.param("head", &[a.vocab, a.width], Fill::Normal(a.init))).transpose()?;
        Ok(Head { norm, table })
    }

    /// The last norm.
    pub fn normed(&self, tape: &Tape, a: &Architecture, h: &Tensor) -> Result<Tensor> {
        apply_norm(a, h, &tape.param(&self.norm.gain), self.norm.bias.as_ref().map(|b| tape.param(b)).as_ref())
    }

    /// Its parameters.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.norm.params().chain(&self.table)
    }
}
