//! The GPU: context, libraries, kernels, graphs. Everything is found and loaded at run time.

mod backlog;
mod blas;
mod cache;
mod check;
mod communicator;
pub(crate) mod driver;
mod graph;
mod kernels;
mod libraries;
mod nccl;
mod nvml;
mod nvrtc;
mod tune;
mod turns;
mod watch;
mod workers;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use blas::{Blas, Planned};
pub(crate) use blas::{Epilogue, Matrix, Product};
pub use check::{KernelCheck, check_kernels};
pub use communicator::{Communicator, Membership};
use driver::Context;
pub use graph::{Graph, Workspace};
use kernels::Kernels;
pub(crate) use kernels::Launch;
pub use nccl::nccl_report;
pub use nvml::Clocks;
use nvml::Nvml;
use nvrtc::Nvrtc;
use tune::{Choices, Trial};

use crate::error::{Error, Result};
use crate::paths::Card;
use crate::tensor::DType;
use crate::tensor::pool::{Block, Pool, Source};

/// Counters that a kernel may use.
pub(crate) const COUNTERS: usize = 4096;

/// One GPU with its stream, its buffer pool, its libraries and its kernels.
pub struct CudaDevice {
    blas: Arc<Mutex<(Blas, Choices)>>,
    kernels: Kernels,
    /// Two i32: a code, and a value, that a kernel leaves when it meets bad input (a token id outside the table).
    fault: Block,
    /// Zeros, which a kernel of several blocks counts its blocks with and sets back.
    counters: Block,
    _workspace: Block,
    nvml: OnceLock<Option<Nvml>>,
    pool: Arc<Pool>,
    context: Arc<Context>,
}

/// What a diagnosis shows about a GPU.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CudaReport {
    /// Name and number of the device.
    pub device: String,
    /// Compute capability and the architecture that kernels are compiled for.
    pub architecture: String,
    /// Free and total bytes of memory.
    pub memory: (usize, usize),
    /// Newest CUDA version that the driver runs.
    pub driver: String,
    /// Path and version of cuBLASLt.
    pub cublaslt: String,
    /// Path and version of NVRTC.
    pub nvrtc: String,
    /// Folder of compiled kernels, and whether it can be written.
    pub cache: String,
}

impl CudaDevice {
    /// Opens a device, or returns the one that is open already.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>> {
        static OPEN: OnceLock<Mutex<HashMap<usize, Weak<CudaDevice>>>> = OnceLock::new();
        let mut open = OPEN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let context = Arc::new(Context::open(ordinal)?);
        // Libraries newer than the driver's CUDA do not run; older ones do.
        let newest = (context.driver_version / 1000) as u32;
        let majors: Vec<u32> = (12..=newest.min(13)).rev().collect();
        let nvrtc = Nvrtc::load(&majors)?;
        let pool = Pool::new(Source::Cuda(context.clone()));
        let workspace = pool.alloc(blas::WORKSPACE)?;
        let fault = pool.alloc(8)?;
        context.zero(fault.address() as u64, 8)?;
        let counters = pool.alloc(4 * COUNTERS)?;
        context.zero(counters.address() as u64, 4 * COUNTERS)?;
        let blas = Blas::load(&context, &majors, workspace.address() as u64)?;
        let kernels = Kernels::new(nvrtc, context.capability);
        let choices = Choices::load(kernels.cache_folder().map(PathBuf::as_path), &context.name, blas.version);
        let device = Arc::new(CudaDevice {
            blas: Arc::new(Mutex::new((blas, choices))),
            kernels,
            fault,
            counters,
            _workspace: workspace,
            nvml: OnceLock::new(),
            pool,
            context,
        });
        open.insert(ordinal, Arc::downgrade(&device));
        Ok(device)
    }

    /// How many GPUs the driver shows.
    pub(crate) fn count() -> Result<usize> {
        driver::device_count()
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// What decisions about paths and shapes of launches ask of the GPU.
    pub(crate) fn card(&self) -> Card {
        let kilobytes = match self.context.capability {
            (8, 0 | 7) => 163,
            (9 | 10, _) => 227,
            _ => 99,
        };
        let Context { multiprocessors, bytes, capability, .. } = *self.context;
        Card { multiprocessors, memory: bytes, shared: kilobytes << 10, wgmma: capability == (9, 0) }
    }

    /// Where the calling thread's buffers come from: the workspace that it works in, or else the device's pool.
    pub(crate) fn pool(&self) -> Arc<Pool> {
        graph::workspace_pool(self).unwrap_or_else(|| self.pool.clone())
    }

    /// The device's pool, which workspaces take from.
    fn root_pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// What was found and would be used.
    pub fn report(&self) -> Result<CudaReport> {
        let version = self.context.driver_version;
        let (blas, _) = &*self.blas.lock().unwrap_or_else(PoisonError::into_inner);
        let nvrtc = self.kernels.nvrtc();
        let cache = self.kernels.cache_folder().map_or("none (no home folder)".into(), |folder| {
            let writable =
                std::fs::create_dir_all(folder).is_ok() && std::fs::metadata(folder).is_ok_and(|m| !m.permissions().readonly());
            format!(
                "{} ({})",
                folder.display(),
                if writable { "writable" } else { "not writable: kernels are compiled in each run" }
            )
        });
        Ok(CudaReport {
            device: self.context.describe(),
            architecture: self.kernels.arch().to_string(),
            memory: self.context.memory()?,
            driver: format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
            cublaslt: format!("{} (version {})", blas.path.display(), blas.version),
            nvrtc: format!("{} (version {}.{})", nvrtc.path.display(), nvrtc.version.0, nvrtc.version.1),
            cache,
        })
    }

    pub(crate) fn upload<T: Copy + Send + 'static>(&self, to: u64, from: &[T]) -> Result<()> {
        self.context.upload(to, from)
    }

    pub(crate) fn download<T: Copy>(&self, from: u64, to: &mut [T]) -> Result<()> {
        self.context.download(from, to)?;
        self.check_fault()
    }

    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.context.copy(to, from, bytes)
    }

    pub(crate) fn zero(&self, to: u64, bytes: usize) -> Result<()> {
        self.context.zero(to, bytes)
    }

    pub(crate) fn fill(&self, to: u64, value: f32, count: usize) -> Result<()> {
        self.context.fill(to, value.to_bits(), count)
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.context.synchronize()?;
        self.check_fault()
    }

    /// The clocks at this moment; `None` where the system does not show them.
    pub fn clocks(&self) -> Option<Clocks> {
        let nvml = self.nvml.get_or_init(|| self.context.bus().ok().and_then(|bus| Nvml::find(&bus)));
        nvml.as_ref().and_then(Nvml::clocks)
    }

    /// Milliseconds of device time that the work issued by `f` takes.
    pub fn time(&self, f: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.context.time(f)
    }

    /// Makes the device fail, for tests of what happens then. The process cannot use the device afterwards.
    #[doc(hidden)]
    pub fn fail_on_purpose(&self) -> Result<()> {
        self.kernel("selftest", DType::F32, "trap")?.run()
    }

    /// Address of the two words that kernels report bad input in.
    pub(crate) fn fault_ptr(&self) -> usize {
        self.fault.address()
    }

    /// Address of [`COUNTERS`] i32 zeros.
    pub(crate) fn counters_ptr(&self) -> usize {
        self.counters.address()
    }

    /// Turns what a kernel reported into an error, and forgets it.
    fn check_fault(&self) -> Result<()> {
        let mut words = [0i32; 2];
        self.context.download(self.fault.address() as u64, &mut words)?;
        if words[0] == 0 {
            return Ok(());
        }
        self.context.zero(self.fault.address() as u64, 8)?;
        let outside =
            |op, what, value: i32, range: &str| Error::Index { op, what, value: value.into(), position: None, range: range.into() };
        Err(match words {
            [1, id] => outside("embedding", "id", id, "the table"),
            [2, target] => outside("cross_entropy", "target", target, "the classes"),
            [code, value] => Error::Bug(format!("a kernel refused the value {value} (code {code})")),
        })
    }

    /// Issues a matrix product; `false` if the library cannot do its epilogue.
    pub(crate) fn product(&self, product: &Product) -> Result<bool> {
        // Before the lock: a thread that captures has the turn and may want the lock.
        let _turn = self.context.turn();
        let untried = {
            let (blas, choices) = &mut *self.blas.lock().unwrap_or_else(PoisonError::into_inner);
            match blas.prepare(product)? {
                Planned::Never => return Ok(false),
                Planned::Before => None,
                Planned::Now(suggestions) => {
                    let choice = choices.choice(product, suggestions, self.context.is_capturing());
                    blas.settle(product, choice.unwrap_or(0));
                    choice.is_none().then_some((suggestions, choices.among))
                }
            }
        };
        if let Some((suggestions, among)) = untried {
            match Trial::new(self, product, suggestions, among) {
                Ok(trial) => {
                    let (ready, blas) = (trial.is_ready(), self.blas.clone());
                    let run = move |context: &Context| trial.run(context, &mut blas.lock().unwrap_or_else(PoisonError::into_inner));
                    self.context.issue(ready, run)?;
                }
                // No room to try beside the product itself, which goes by the first suggestion.
                Err(Error::OutOfMemory { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let (product, blas) = (*product, self.blas.clone());
        self.context.issue(true, move |context| blas.lock().unwrap_or_else(PoisonError::into_inner).0.run(context, &product))?;
        Ok(true)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.context.abandon();
    }
}
