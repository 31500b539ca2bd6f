//! The associative memory's operations, each fused and each with its plain twin in [`naive`]: read that first.
//!
//! A memory is A `[dk, d]` and its normaliser z `[dk]`, both f32; phi = DPFP-nu makes dk = 2 nu dm features of a raw key or query.
//!
//! ```text
//! dpfp         phi(x)
//! read         y = A^T phi(q) / (z . phi(q) + eps) (+ residual)
//! tokens       k, v and beta of memory tokens, by products or, in a model that is used, by one kernel
//! write        A' = A + sum_i phi_i (x) b_i (v_i - vbar_i), z' = z + sum_i gamma_i phi_i, all tokens against the old memory
//! projected    the write whose tokens take turns, with vbar_i = A^T phi_i / |phi_i|^2: it does not wear the memory out
//! write_read   a segment's write and the next segment's read of the same memories, at once where that pays
//! cut          how the CUDA kernels cut a memory into tiles
//! ```
//!
//! Kernels are in `cpu/memory` and in `cuda/kernels/assoc*.cu`, `memory_tokens.cu` and `read_lanes.cu`; `paths.rs` says which is taken when.

mod cut;
mod dpfp;
pub mod naive;
mod projected;
mod read;
mod tokens;
mod write;
mod write_read;

use std::ops::Range;

pub use dpfp::dpfp;
pub use read::{assoc_read, assoc_read_rows};
pub use tokens::{TokenMaps, assoc_tokens};
pub use write::{AssocWrite, assoc_write, assoc_write_in_place, assoc_write_rows};
pub use write_read::{assoc_write_read, assoc_write_read_in_place};

use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// How a write changes a memory. The two are different models: a memory of one is nothing that the other could go on with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WriteRule {
    /// The paper's: all tokens of a segment against the old memory, what is stored taken as A^T phi / (z . phi).
    #[default]
    Paper,
    /// Tokens in turn, each against what the ones before it left, what is stored taken as A^T phi / |phi|^2.
    Projected,
}

/// Added to z . phi and to |phi|^2, as the published code does.
pub(crate) const EPSILON: f32 = 1e-5;

/// Sizes of a read or a write: `n` memories with `m` tokens or queries each, raw keys of `dm`, values of `d`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemorySizes {
    pub(crate) n: usize,
    pub(crate) m: usize,
    pub(crate) dm: usize,
    pub(crate) d: usize,
    pub(crate) nu: usize,
}

impl MemorySizes {
    /// Width of the features.
    pub(crate) fn dk(&self) -> usize {
        2 * self.nu * self.dm
    }
}

/// Refuses rows that a memory does not have.
fn expect_rows(op: &'static str, memory: &Tensor, rows: &Range<usize>) -> Result<()> {
    if memory.shape().rank() > 0 && rows.start < rows.end && rows.end <= memory.shape()[0] {
        return Ok(());
    }
    Err(Error::shape(op, "the memory", format!("[at least {}, ..]", rows.end.max(rows.start + 1)), memory.shape()))
}

/// Rows of a tensor, or all of it.
fn part(x: &Tensor, rows: Option<&Range<usize>>) -> Tensor {
    rows.map_or_else(|| x.detach(), |rows| x.view_rows(rows.clone()))
}
