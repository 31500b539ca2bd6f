//! CUDA graphs: a sequence of operations recorded once and replayed with one call.

use std::sync::Arc;

use super::CudaDevice;
use super::driver::GraphHandle;
use crate::error::{Error, Result};
use crate::tensor::Device;
use crate::tensor::pool::Pool;

/// A captured sequence of operations on fixed buffers.
///
/// Replaying reads and writes the very buffers that the capture saw: inputs are changed with [`Tensor::overwrite`](crate::Tensor::overwrite)
/// or [`Tensor::copy_from`](crate::Tensor::copy_from), results are read from the tensors that the capture returned. Tensors made before the
/// capture and used in it must be kept alive by the caller; temporaries made inside belong to the graph.
pub struct Graph {
    device: Arc<CudaDevice>,
    handle: GraphHandle,
    // Holds the graph's temporaries until it can no longer be replayed.
    _pool: Arc<Pool>,
}

impl Graph {
    /// Runs `f` once for warming up (kernels are compiled, buffers found, products planned), and once more being recorded. Returns the
    /// graph and what the recorded run returned; the work of the recorded run happens at each [`Graph::replay`], not before.
    ///
    /// Copies between host and device inside `f` are an error, and so is a CPU device.
    pub fn capture<R>(device: &Device, mut f: impl FnMut() -> Result<R>) -> Result<(Self, R)> {
        let Device::Cuda(cuda) = device else {
            return Err(Error::argument("Graph::capture", "graphs exist on CUDA devices only, this one is cpu"));
        };
        drop(f()?);
        Self::record(cuda, f)
    }

    /// Records `f` without running it first. Everything it needs must have been used before.
    fn record<R>(cuda: &Arc<CudaDevice>, f: impl FnOnce() -> Result<R>) -> Result<(Self, R)> {
        let outer = cuda.pool();
        let pool = Pool::child(&outer);
        cuda.set_pool(pool.clone());
        let captured = cuda.context.capture(f);
        cuda.set_pool(outer);
        let (handle, value) = captured?;
        Ok((Graph { device: cuda.clone(), handle, _pool: pool }, value))
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
