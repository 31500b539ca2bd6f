//! Where tensors live and operations run, chosen at run time.

use std::sync::{Arc, OnceLock};

use super::pool::{Block, Pool, PoolStats, Source};
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};

/// The CPU, or one NVIDIA GPU. Cheap to clone.
#[derive(Clone)]
pub enum Device {
    /// All cores, through rayon's global thread pool.
    Cpu,
    /// One GPU and everything loaded for it.
    Cuda(Arc<CudaDevice>),
}

fn host_pool() -> &'static Arc<Pool> {
    static POOL: OnceLock<Arc<Pool>> = OnceLock::new();
    POOL.get_or_init(|| Pool::new(Source::Host))
}

impl Device {
    /// The CPU.
    pub fn cpu() -> Self {
        Device::Cpu
    }

    /// GPU number `n`. An error says whether the driver, the device or a library is missing, and where it was looked for.
    pub fn cuda(n: usize) -> Result<Self> {
        CudaDevice::open(n).map(Device::Cuda)
    }

    /// How many GPUs the driver shows. An error where there is no driver.
    pub fn cuda_count() -> Result<usize> {
        CudaDevice::count()
    }

    /// GPU 0 where there is one that works, else the CPU. The second value says why the GPU was passed over.
    pub fn auto() -> (Self, Option<Error>) {
        match Self::cuda(0) {
            Ok(device) => (device, None),
            Err(why) => (Device::Cpu, Some(why)),
        }
    }

    /// Whether this is a GPU.
    pub fn is_cuda(&self) -> bool {
        matches!(self, Device::Cuda(_))
    }

    /// Waits until everything issued so far has run, and reports the first failure among it.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(cuda) => cuda.synchronize(),
        }
    }

    /// What this device's buffer pool has done so far.
    pub fn pool_stats(&self) -> PoolStats {
        self.with_pool(|pool| pool.stats())
    }

    /// Starts a new measurement of [`PoolStats::peak_bytes`].
    pub fn reset_peak(&self) {
        self.with_pool(|pool| pool.reset_peak());
    }

    /// Gives unused pooled buffers back to the system.
    pub fn trim(&self) {
        self.with_pool(|pool| pool.trim());
    }

    pub(crate) fn alloc(&self, bytes: usize) -> Result<Block> {
        self.with_pool(|pool| pool.alloc(bytes))
    }

    /// A buffer that no graph's temporaries will ever lie in.
    pub(crate) fn alloc_lasting(&self, bytes: usize) -> Result<Block> {
        self.with_pool(|pool| pool.root().alloc(bytes))
    }

    fn with_pool<R>(&self, f: impl FnOnce(&Arc<Pool>) -> R) -> R {
        match self {
            Device::Cpu => f(host_pool()),
            Device::Cuda(cuda) => f(&cuda.pool()),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Device::Cpu, Device::Cpu) => true,
            (Device::Cuda(a), Device::Cuda(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(cuda) => write!(f, "cuda:{}", cuda.ordinal()),
        }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}
