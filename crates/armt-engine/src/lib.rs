//! Tensors, reverse-mode autodiff and kernels for the CPU and for NVIDIA GPUs, chosen at run time.
//!
//! A model is written once against [`ops`] and runs forward and backward on either device:
//!
//! ```
//! use armt_engine::{DType, Device, Param, Tape, Tensor, ops};
//!
//! # fn main() -> armt_engine::Result<()> {
//! let device = Device::cpu();
//! let weight = Param::new("weight", &Tensor::full(0.5, [3, 2], &device)?, DType::F32)?;
//! let x = Tensor::from_slice(&[1f32, 2.0, 3.0], [1, 3], &device)?;
//!
//! let tape = Tape::new();
//! let y = ops::matmul(&x, &tape.param(&weight))?; // [1, 2]
//! let loss = ops::sum(&y)?;
//! tape.backward(&loss)?;
//!
//! assert_eq!(loss.item()?, 6.0);
//! assert_eq!(weight.grad()?.to_vec::<f32>()?, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
//! # Ok(())
//! # }
//! ```

mod cpu;
mod cuda;
mod error;
pub mod machine;
pub mod ops;
pub mod optim;
pub mod paths;
mod tape;
mod tensor;

pub use cpu::{CpuReport, OwnThreads, join_thread_pool, own_threads};
pub use cuda::{
    Clocks, Communicator, CudaDevice, CudaReport, Graph, KernelCheck, Membership, Workspace, check_kernels, nccl_report,
};
pub use error::{Error, Result};
pub use tape::{Backward, Grads, Node, Param, Tape};
pub use tensor::{DType, Device, Element, MAX_RANK, PoolStats, Shape, Tensor};
