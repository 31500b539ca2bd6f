//! Recurrences over tokens, with a state in and a state out and gradients through both, each with its plain twin in [`naive`]: read that
//! first.
//!
//! ```text
//! selective_scan   Mamba:  S_t = exp(Delta_t A) o S_(t-1) + Delta_t u_t B_t;           y_t = S_t C_t + D u_t
//! wkv5             RWKV-5: y_t = r_t (S_(t-1) + u k_t v_t);                            S_t = w S_(t-1) + k_t v_t
//! causal_conv      y_t = b + sum_k w_k x_(t-K+1+k), each channel on its own; its state are the last K - 1 inputs
//! ```
//!
//! `conv_silu` and `gated_scan` are the convolution and the scan with what Mamba has around them, `token_mix` is RWKV's shift likewise: on CUDA each is one kernel where `paths.rs` says
//! so, else the operations that their `plain` names.
//!
//! The leading axis G is of layers with weights of their own, the next of texts, then come tokens. States are f32. A token that is not seen
//! (padding) leaves the state as it is, has an output of zero, and takes no part in any gradient. So a text gives the same values and
//! gradients however it is cut into calls.
//!
//! Kernels for the CPU are in `cpu/recurrence`. On CUDA the tokens of the first two are cut into chunks that run side by side: each from zero to
//! its end, the ends joined one after the other, and each again from where it then begins; `paths.rs` says how long they are.

mod causal_conv;
mod conv_silu;
mod gated_scan;
pub mod naive;
mod selective_scan;
mod token_mix;
mod wkv5;

pub use causal_conv::{CausalConv, causal_conv};
pub use conv_silu::{ConvSilu, Gate, conv_silu};
pub use gated_scan::{GatedScan, gated_scan};
pub use selective_scan::{SelectiveScan, selective_scan};
pub use token_mix::{TokenMix, token_mix};
pub use wkv5::{Wkv5, wkv5};

use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use crate::paths;
use crate::tensor::{DType, Tensor};

/// Layers, texts, tokens and channels of a recurrence's input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) groups: usize,
    pub(crate) texts: usize,
    pub(crate) tokens: usize,
    pub(crate) width: usize,
}

impl Sizes {
    /// Sequences that do not know of each other.
    pub(crate) fn sequences(&self) -> usize {
        self.groups * self.texts
    }

    /// Of an input `[G, B, T, E]` of floats. One without tokens or channels is refused.
    fn of(op: &'static str, what: &'static str, x: &Tensor) -> Result<Self> {
        x.expect_float(op, what)?;
        match *x.dims() {
            [groups, texts, tokens, width] if x.elements() > 0 => Ok(Sizes { groups, texts, tokens, width }),
            _ => Err(Error::shape(op, what, "[layers, texts, tokens, channels], none of them 0", x.shape())),
        }
    }

    /// Refuses an operand of another shape, type or device.
    fn expect(
        &self,
        op: &'static str,
        first: &Tensor,
        what: &'static str,
        x: &Tensor,
        shape: &[usize],
        dtype: DType,
    ) -> Result<()> {
        x.expect_dtype(op, what, dtype)?;
        x.expect_device_of(op, what, first)?;
        x.expect_shape(op, what, shape)
    }

    /// Refuses a mask that does not say of every token whether it is seen.
    fn expect_seen(&self, op: &'static str, first: &Tensor, seen: Option<&Tensor>) -> Result<()> {
        let shape = [self.groups, self.texts, self.tokens];
        seen.map_or(Ok(()), |seen| self.expect(op, first, "the mask", seen, &shape, DType::I32))
    }
}

/// How the tokens of a recurrence are cut into chunks on CUDA.
#[derive(Clone, Copy, Debug)]
struct Chunks {
    /// Tokens of each but the last.
    length: usize,
    count: usize,
}

impl Chunks {
    /// For a recurrence with so many threads for each sequence.
    fn new(cuda: &CudaDevice, sizes: Sizes, threads: usize) -> Self {
        let length = paths::token_chunk(cuda.card(), sizes.sequences() * threads, sizes.tokens);
        Chunks { length, count: sizes.tokens.div_ceil(length) }
    }
}
