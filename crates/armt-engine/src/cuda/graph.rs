//! CUDA graphs: a sequence of operations recorded once and replayed with one call.

use std::cell::RefCell;
use std::sync::Arc;

use super::CudaDevice;
use super::driver::GraphHandle;
use crate::error::{Error, Result};
use crate::tensor::Device;
use crate::tensor::pool::Pool;

thread_local! {
    /// The workspaces that this thread works in, the innermost last: the address of the device, and the pool.
    static WITHIN: RefCell<Vec<(usize, Arc<Pool>)>> = const { RefCell::new(Vec::new()) };
}

fn address(device: &CudaDevice) -> usize {
    std::ptr::from_ref(device).addr()
}

/// The pool of the innermost workspace of a device that the calling thread works in.
pub(super) fn workspace_pool(device: &CudaDevice) -> Option<Arc<Pool>> {
    WITHIN.with_borrow(|within| within.iter().rev().find(|(of, _)| *of == address(device)).map(|(_, pool)| pool.clone()))
}

/// The calling thread works in a workspace until this is dropped.
struct Within;

impl Within {
    fn enter(device: &CudaDevice, pool: &Arc<Pool>) -> Self {
        WITHIN.with_borrow_mut(|within| within.push((address(device), pool.clone())));
        Within
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        WITHIN.with_borrow_mut(Vec::pop);
    }
}

/// Buffers for the temporaries of steps that run one after the other: graphs, and the runs before they are recorded.
///
/// All of them share the same buffers, so that a hundred graphs need no more memory than the largest. Nothing that a step makes may be read
/// after another step of the workspace has begun: results are copied to tensors that were made outside. So a workspace is one thread's at a
/// time; threads that share a device have one each.
pub struct Workspace {
    device: Device,
    pool: Option<Arc<Pool>>,
}

impl Workspace {
    /// An empty workspace. On the CPU it has no buffers of its own, and records nothing.
    pub fn new(device: &Device) -> Self {
        let pool = match device {
            Device::Cpu => None,
            Device::Cuda(cuda) => Some(Pool::child(cuda.root_pool())),
        };
        Workspace { device: device.clone(), pool }
    }

    /// Runs `f` with this workspace's buffers, on the calling thread: what other threads do meanwhile is not affected.
    pub fn run<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let (Device::Cuda(cuda), Some(pool)) = (&self.device, &self.pool) else { return f() };
        let _within = Within::enter(cuda, pool);
        f()
    }

    /// Records what `f` issues, without running it. Returns the graph and what `f` returned; the work happens at each [`Graph::replay`].
    ///
    /// Everything that `f` needs must have been used before, by a call of `f` itself under [`Workspace::run`]: kernels compiled, constants
    /// uploaded. Copies between host and device inside `f` are an error, and so is a CPU device.
    pub fn record<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<(Graph, R)> {
        let (Device::Cuda(cuda), Some(pool)) = (&self.device, &self.pool) else {
            return Err(Error::unsupported("Workspace::record", "graphs exist on CUDA devices only, this one is cpu"));
        };
        pool.record();
        let (handle, value) = self.run(|| cuda.context.capture(f))?;
        Ok((Graph { device: cuda.clone(), handle, _pool: pool.clone() }, value))
    }
}

/// A captured sequence of operations on fixed buffers.
///
/// Replaying reads and writes the very buffers that the capture saw: inputs are changed with [`Tensor::overwrite`](crate::Tensor::overwrite)
/// or [`Tensor::copy_from`](crate::Tensor::copy_from), results are read from the tensors that the capture returned. Tensors made before the
/// capture and used in it must be kept alive by the caller; temporaries made inside belong to the graph's workspace.
pub struct Graph {
    device: Arc<CudaDevice>,
    handle: GraphHandle,
    // Holds the graph's temporaries until it can no longer be replayed.
    _pool: Arc<Pool>,
}

impl Graph {
    /// Runs `f` once for warming up (kernels are compiled, buffers found, products planned), and once more being recorded, in a workspace
    /// of its own. Returns the graph and what the recorded run returned.
    pub fn capture<R>(device: &Device, mut f: impl FnMut() -> Result<R>) -> Result<(Self, R)> {
        if !device.is_cuda() {
            return Err(Error::unsupported("Graph::capture", "graphs exist on CUDA devices only, this one is cpu"));
        }
        drop(f()?);
        Workspace::new(device).record(f)
    }

    /// Runs the recorded operations again.
    pub fn replay(&self) -> Result<()> {
        self.device.context.launch_graph(&self.handle)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Buffers go back to the pool only after the last replay has run.
        let _ = self.device.context.synchronize();
        self.device.context.destroy_graph(&self.handle);
    }
}
