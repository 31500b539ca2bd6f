//! The associative memory of a range of layers: x + A^T phi(W_Q x) / (z . phi(W_Q x)) before the block, and the write of its memory tokens
//! after it (equations 1-4).
//!
//! A write may wait for the read that follows it, in the next segment, so that one pass over A does both, or leaves A rounded for the read's
//! product. Where A of each segment is kept, or nothing is rounded, there is nothing to gain.

use std::ops::Range;

use armt_engine::ops::{self, AssocWrite, Linear};
use armt_engine::{DType, Tape, Tensor};

use super::layer::{Kind, LayerMemory};
use crate::config::{Associative, MemoryConfig};
use crate::error::{Error, Result};
use crate::model::{AssociativeWeights, Model};

/// A write that is decided but not yet done, of n layers.
pub(crate) struct Pending {
    /// Which layers of the memory, by their place in the stack.
    rows: Range<usize>,
    k: Tensor,             // [n, B, m, d_mem]
    v: Tensor,             // [n, B, m, d]
    beta: Tensor,          // [n, B, m]
    first: Option<Tensor>, // [n, B]
    correction: bool,
    nu: usize,
}

impl Pending {
    /// A' and z' of the memory that it is for, whose A it takes.
    pub(super) fn to(&self, a: &Tensor, z: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok(ops::assoc_write_in_place(self.operands(a, z), self.rows.clone())?)
    }

    fn operands<'a>(&'a self, a: &'a Tensor, z: &'a Tensor) -> AssocWrite<'a> {
        let Pending { k, v, beta, first, correction, nu, .. } = self;
        AssocWrite { k, v, beta, a, z, first: first.as_ref(), correction: *correction, nu: *nu }
    }

    /// The write of layers `rows` of the memory alone, which must be among its own.
    fn part(&self, rows: &Range<usize>) -> Result<Self> {
        let part = |t: &Tensor| rows_from(t, rows, self.rows.start);
        let first = self.first.as_ref().map(part).transpose()?;
        let (k, v, beta) = (part(&self.k)?, part(&self.v)?, part(&self.beta)?);
        Ok(Pending { rows: rows.clone(), k, v, beta, first, correction: self.correction, nu: self.nu })
    }

    /// The same with no gradient going back through layers `rows` of the memory.
    pub(super) fn cut(self, rows: &Range<usize>) -> Result<Self> {
        let own = shared(rows, &self.rows);
        if own.is_empty() {
            return Ok(self);
        }
        let own = own.start - self.rows.start..own.end - self.rows.start;
        let cut = |t: &Tensor| ops::cut_rows(t, own.clone());
        Ok(Pending { k: cut(&self.k)?, v: cut(&self.v)?, beta: cut(&self.beta)?, ..self })
    }
}

/// What two ranges have in common.
fn shared(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Rows `rows` of a tensor whose first row is row `start`.
fn rows_from(t: &Tensor, rows: &Range<usize>, start: usize) -> Result<Tensor> {
    let own = rows.start - start..rows.end - start;
    Ok(if own.len() == t.dims()[0] { t.clone() } else { ops::rows(t, own)? })
}

impl Model {
    fn associative(&self) -> Result<(&Associative, &AssociativeWeights)> {
        match (&self.config.memory, &self.weights.associative) {
            (MemoryConfig::Associative(config), Some(weights)) => Ok((config, weights)),
            _ => Err(Error::Argument("the model has no associative memory".into())),
        }
    }

    /// x plus what the memory associates with it. An empty memory adds nothing.
    pub(crate) fn associative_read(&self, tape: &Tape, layers: Range<usize>, x: &Tensor, memory: &LayerMemory) -> Result<Tensor> {
        let Kind::Associative { a, z, empty, .. } = &memory.kind else { return Ok(x.clone()) };
        let rows = memory.rows(&layers);
        if empty[rows.clone()].iter().all(|e| *e) {
            return Ok(x.clone());
        }
        let (q, nu) = self.query(tape, &layers, x)?;
        self.with_reading(&layers, x, |residual| Ok(ops::assoc_read_rows(&q, a, z, rows, nu, residual)?))
    }

    /// The same, with the write done that the memory may still wait for: in one pass for layers that were written and are read now. In the
    /// ramps at both ends of a text there are also layers that were written and rest now, and layers that are read for the first time.
    pub(super) fn settling_read(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        x: &Tensor,
        mut memory: LayerMemory,
    ) -> Result<(Tensor, LayerMemory)> {
        let (rows, first) = (memory.rows(&layers), memory.layers.start);
        let Kind::Associative { pending: Some(write), .. } = &memory.kind else {
            return Ok((self.associative_read(tape, layers, x, &memory)?, memory));
        };
        let both = shared(&rows, &write.rows);
        // Where nothing goes back, reading the ramps' layers in parts would cost more than it saves.
        if both.is_empty() || (!tape.is_recording() && rows != write.rows) {
            memory = memory.settled()?;
            return Ok((self.associative_read(tape, layers, x, &memory)?, memory));
        }
        let mut parts = Vec::new();
        for part in [rows.start..both.start, both.clone(), both.end..rows.end].into_iter().filter(|part| !part.is_empty()) {
            let (x, layers) = (rows_from(x, &part, rows.start)?, first + part.start..first + part.end);
            let y;
            if part == both {
                (y, memory) = self.write_and_read(tape, layers, &x, memory)?;
            } else {
                y = self.associative_read(tape, layers, &x, &memory)?;
            }
            parts.push(y);
        }
        Ok((ops::concat(&parts.iter().collect::<Vec<_>>(), 0)?, memory))
    }

    /// Does the write that waits, and reads layers `layers`, which are among those it is for.
    fn write_and_read(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        x: &Tensor,
        mut memory: LayerMemory,
    ) -> Result<(Tensor, LayerMemory)> {
        let rows = memory.rows(&layers);
        let Kind::Associative { a, z, pending, .. } = &mut memory.kind else { return Ok((x.clone(), memory)) };
        let Some(write) = pending.take() else { return Ok((self.associative_read(tape, layers, x, &memory)?, memory)) };
        let resting = [write.rows.start..rows.start, rows.end..write.rows.end];
        for rows in resting.into_iter().filter(|rows| !rows.is_empty()) {
            (*a, *z) = write.part(&rows)?.to(a, z)?;
        }
        let write = write.part(&rows)?;
        let (q, _) = self.query(tape, &layers, x)?;
        let y = self.with_reading(&layers, x, |residual| {
            let y;
            (*a, *z, y) = ops::assoc_write_read(write.operands(a, z), rows, &q, residual)?;
            Ok(y)
        })?;
        Ok((y, memory))
    }

    /// Raw queries of x `[n, B, T, d]`, `[n, B, T, d_mem]`, and the order of their features.
    fn query(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor) -> Result<(Tensor, usize)> {
        let (config, weights) = self.associative()?;
        Ok((ops::linear(x, &tape.param_rows(&weights.query, layers.clone())?, Linear::default())?, config.nu))
    }

    /// x plus what `read` gives; it adds a residual that it is given itself.
    fn with_reading(
        &self,
        layers: &Range<usize>,
        x: &Tensor,
        read: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Some(with) = &self.associative()?.0.memory_layers else { return read(Some(x)) };
        // Layers without a memory run along in the batch; what they read counts nothing.
        let y = read(None)?;
        let share: Vec<f32> = layers.clone().map(|l| f32::from(u8::from(with.contains(&l)))).collect();
        let share = self.constant(&share, &[share.len(), 1, 1, 1])?;
        Ok(ops::add(x, &ops::mul(&y, &ops::cast(&share, y.dtype())?)?)?)
    }

    /// The memory after the outputs of memory tokens `[n, B, m, d]` were written for layers `layers`. Where the memory is unwound on the way
    /// back, or rounded for its next read, the write waits for that read.
    pub(super) fn associative_write(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        tokens: &Tensor,
        mut memory: LayerMemory,
        unwind: bool,
    ) -> Result<LayerMemory> {
        let rows = memory.rows(&layers);
        let Kind::Associative { a, z, empty, pending } = &mut memory.kind else { return Ok(memory) };
        let (config, weights) = self.associative()?;
        let (n, batch, m) = (tokens.dims()[0], tokens.dims()[1], tokens.dims()[2]);
        let weight = |p| tape.param_rows(p, layers.clone());
        let k = ops::linear(tokens, &weight(&weights.key)?, Linear::default())?;
        let v = ops::linear(tokens, &weight(&weights.value)?, Linear::default())?;
        let bias = weight(&weights.beta_bias)?;
        let beta = ops::linear(tokens, &weight(&weights.beta)?, Linear { bias: Some(&bias), ..Linear::default() })?;
        let beta = ops::reshape(&beta, [n, batch, m])?;
        let first = if empty[rows.clone()].contains(&true) {
            let flags: Vec<i32> = empty[rows.clone()].iter().flat_map(|e| std::iter::repeat_n(i32::from(*e), batch)).collect();
            Some(self.constant(&flags, &[n, batch])?)
        } else {
            None
        };
        empty[rows.clone()].fill(false);
        let write = Pending { rows: rows.clone(), k, v, beta, first, correction: config.correction, nu: config.nu };
        match (tape.is_recording(), unwind) {
            (true, true) => *pending = Some(Box::new(write)),
            (true, false) => (*a, *z) = ops::assoc_write_rows(write.operands(a, z), rows)?,
            (false, _) if self.dtype() == DType::BF16 => *pending = Some(Box::new(write)),
            (false, _) => (*a, *z) = write.to(a, z)?,
        }
        Ok(memory)
    }
}
