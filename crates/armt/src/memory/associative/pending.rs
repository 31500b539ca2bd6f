//! A write that is decided but not yet done.
//!
//! It may wait for the read that follows it, in the next segment, so that one pass over A does both, or leaves A rounded for the read's
//! product. Where nothing is recorded and nothing is rounded, there is nothing to gain.

use std::ops::Range;

use armt_engine::Tensor;
use armt_engine::ops::{self, AssocWrite, WriteRule};

use crate::error::Result;

/// A write to some layers of a memory.
pub(super) struct Pending {
    /// Which layers of the memory, by their place in the stack.
    pub(super) rows: Range<usize>,
    pub(super) k: Tensor,             // [n, B, m, d_mem]
    pub(super) v: Tensor,             // [n, B, m, d]
    pub(super) beta: Tensor,          // [n, B, m]
    pub(super) first: Option<Tensor>, // [n, B]
    pub(super) correction: bool,
    pub(super) nu: usize,
    pub(super) rule: WriteRule,
    /// Whether A' takes A's place, or A is kept for the way back.
    pub(super) in_place: bool,
}

impl Pending {
    /// Writes to the memory that it is for.
    pub(super) fn apply(&self, memory: &mut [Tensor]) -> Result<()> {
        let write = if self.in_place { ops::assoc_write_in_place } else { ops::assoc_write_rows };
        let (a, z) = write(self.operands(memory), self.rows.clone())?;
        store(memory, a, z);
        Ok(())
    }

    /// Writes to the memory that it is for, and reads it with raw queries q.
    pub(super) fn apply_and_read(&self, memory: &mut [Tensor], q: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let write_read = if self.in_place { ops::assoc_write_read_in_place } else { ops::assoc_write_read };
        let (a, z, y) = write_read(self.operands(memory), self.rows.clone(), q, residual)?;
        store(memory, a, z);
        Ok(y)
    }

    fn operands<'a>(&'a self, memory: &'a [Tensor]) -> AssocWrite<'a> {
        let Pending { k, v, beta, first, correction, nu, rule, .. } = self;
        let (first, correction, nu, rule) = (first.as_ref(), *correction, *nu, *rule);
        AssocWrite { k, v, beta, a: &memory[0], z: &memory[1], first, correction, nu, rule }
    }

    /// The write of layers `rows` of the memory alone, which must be among its own.
    pub(super) fn part(&self, rows: &Range<usize>) -> Result<Self> {
        let part = |t: &Tensor| rows_from(t, rows, self.rows.start);
        let first = self.first.as_ref().map(part).transpose()?;
        let (k, v, beta) = (part(&self.k)?, part(&self.v)?, part(&self.beta)?);
        let Pending { correction, nu, rule, in_place, .. } = *self;
        Ok(Pending { rows: rows.clone(), k, v, beta, first, correction, nu, rule, in_place })
    }

    /// The write with no gradient going back through layers `rows` of the memory.
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

/// Puts A and z where a memory has them.
fn store(memory: &mut [Tensor], a: Tensor, z: Tensor) {
    (memory[0], memory[1]) = (a, z);
}

/// What two ranges have in common.
pub(super) fn shared(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Rows `rows` of a tensor whose first row is row `start`.
pub(super) fn rows_from(t: &Tensor, rows: &Range<usize>, start: usize) -> Result<Tensor> {
    let own = rows.start - start..rows.end - start;
    Ok(if own.len() == t.dims()[0] { t.clone() } else { ops::rows(t, own)? })
}
