//! The operations: one a file, with its formula, its checks, its forward and its backward pass. Kernels are in `cpu` and `cuda`.
//!
//! Every operation takes tensors of one device, refuses what does not fit with an error that says what was expected, and makes a new
//! tensor. Where layers are stacked, the leading axis is the group axis `G`: each group has its own weights.
//!
//! bf16 tensors are computed with on CUDA (sums in f32). On the CPU bf16 is a storage type: operations cast to f32 and back.

mod activation;
pub mod attention;
pub(crate) mod binary;
mod cast;
mod concat;
mod cross_entropy;
mod embedding;
mod linear_cross_entropy;
mod matmul;
pub mod memory;
pub(crate) mod norm;
pub mod recurrence;
mod reduce;
mod rotary;
mod slice;
mod softmax;
mod view;

pub use activation::{gelu, gelu_erf, relu, sigmoid, silu, swiglu};
pub use attention::{Heads, attention, attention_cached};
pub(crate) use binary::{accumulate, sum_of};
pub use binary::{add, mul, scale, sub};
pub use cast::cast;
pub(crate) use cast::{cast_into, copy_of};
pub use concat::{concat, prepend, replace_rows};
pub use cross_entropy::{argmax, cross_entropy, token_losses};
pub use embedding::embedding;
pub use linear_cross_entropy::linear_cross_entropy;
pub(crate) use matmul::Sizes;
pub use matmul::{Activation, Linear, linear, matmul, matmul_nt, matmul_tn};
pub use memory::{
    AssocWrite, TokenMaps, WriteRule, assoc_read, assoc_read_rows, assoc_tokens, assoc_write, assoc_write_in_place,
    assoc_write_read, assoc_write_read_in_place, assoc_write_rows, dpfp,
};
pub use norm::{layer_norm, rms_norm};
pub use recurrence::{
    CausalConv, ConvSilu, Gate, GatedScan, SelectiveScan, TokenMix, Wkv5, causal_conv, conv_silu, gated_scan, selective_scan,
    token_mix, wkv5,
};
pub use reduce::{mean, sum, sum_axis};
pub use rotary::rotary;
pub use slice::narrow;
pub use softmax::softmax;
pub use view::{cut_rows, reshape, rows, split_rows};

use crate::error::Result;
use crate::tensor::{DType, Device, Tensor};

/// Whether an operation on this tensor has to go through f32: bf16 on the CPU.
pub(crate) fn via_f32(tensor: &Tensor) -> bool {
    tensor.dtype() == DType::BF16 && !tensor.device().is_cuda()
}

/// Casts bf16 operands on the CPU to f32, leaving everything else alone. Tracked: gradients come back as bf16.
pub(crate) fn to_f32(tensor: &Tensor) -> Result<Tensor> {
    if via_f32(tensor) { cast(tensor, DType::F32) } else { Ok(tensor.clone()) }
}

/// The CUDA device behind a tensor, or `None` on the CPU.
pub(crate) fn cuda_of(tensor: &Tensor) -> Option<&crate::cuda::CudaDevice> {
    match tensor.device() {
        Device::Cpu => None,
        Device::Cuda(cuda) => Some(cuda),
    }
}
