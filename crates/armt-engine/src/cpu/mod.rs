//! Kernels on the CPU: plain loops over slices, on all threads, compiled for the widest vectors that the processor has.
//!
//! `simd!` compiles a loop once for each instruction set and picks at run time, so that one binary runs everywhere. Loops are written
//! so that the compiler vectorises them: slices of equal length, no branches, `mul_add`. [`par_rows`] spreads rows over rayon's threads
//! when there is enough work to pay for it. Every output element is computed by one thread in a fixed order: as many threads give the
//! same bits (how a product is cut depends on their number, and with it how the `gemm` crate sums).

/// Runs an expression compiled for the processor at hand. A macro, because the code must be inlined into the function that is
/// compiled for the instruction set: left outside, it would neither use its vectors nor its fused multiplication.
macro_rules! simd {
    ($body:expr) => {
        $crate::cpu::dispatch(
            #[inline(always)]
            || $body,
        )
    };
}
pub(crate) use simd;

pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod int8;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod memory;
pub(crate) mod norm;
pub(crate) mod optim;
pub(crate) mod recurrence;
pub(crate) mod reduce;
pub(crate) mod rotary;
pub(crate) mod slice;
mod small_product;
pub(crate) mod softmax;

use std::sync::OnceLock;

use rayon::prelude::*;

use crate::paths;

/// What the CPU kernels use.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CpuReport {
    /// Widest instruction set in use.
    pub vectors: String,
    /// Threads of rayon's global pool.
    pub threads: usize,
    /// Whether products with matrices in int8 are faster than those in f32.
    pub fast_int8: bool,
}

impl CpuReport {
    /// Looks at the processor.
    pub fn new() -> Self {
        // The processor's vector extensions appear in the name of the variant that was chosen.
        let chosen = format!("{:?}", arch());
        let vectors = match chosen.split(['(', ' ']).next() {
            Some("V4") => "AVX-512",
            Some("V3") => "AVX2 and FMA",
            Some("Neon") | Some("NeonFcma") => "NEON",
            _ => "none: portable code",
        };
        let fast_int8 = paths::int8_product() != paths::Int8Path::Plain;
        CpuReport { vectors: vectors.into(), threads: rayon::current_num_threads(), fast_int8 }
    }
}

impl Default for CpuReport {
    fn default() -> Self {
        Self::new()
    }
}

/// Makes the calling thread one of the threads that CPU kernels run on, `threads` in all (0: one for each core, or as
/// `RAYON_NUM_THREADS` says). A program calls it once when it starts: otherwise every operation is handed over to other threads while the
/// caller sleeps, which costs some 10 microseconds each time. Returns whether it took effect; it cannot after the first parallel
/// operation.
pub fn join_thread_pool(threads: usize) -> bool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global().is_ok()
}

/// Threads that CPU kernels run on when one thread calls them.
pub struct OwnThreads {
    _pool: rayon::ThreadPool,
}

/// Gives the calling thread threads of its own for CPU kernels, itself among them, `threads` in all (0: one for each core), as long as what it
/// returns is kept. What other threads compute does not stand in its way but at the processor itself. `None` if the system gives no
/// threads, or if it has some already.
pub fn own_threads(threads: usize) -> Option<OwnThreads> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build();
    pool.ok().map(|pool| OwnThreads { _pool: pool })
}

/// The widest instruction set that the processor has.
pub(crate) fn arch() -> pulp::Arch {
    static ARCH: OnceLock<pulp::Arch> = OnceLock::new();
    *ARCH.get_or_init(pulp::Arch::new)
}

/// Calls a function compiled for the processor at hand; see `simd!`.
#[inline(always)]
pub(crate) fn dispatch<R>(f: impl FnOnce() -> R) -> R {
    arch().dispatch(f)
}

/// Calls `f(first row, rows)` over `out` cut into pieces of whole rows of `width`, on several threads if rows of `cost` element
/// operations each are worth it.
pub(crate) fn par_rows<T: Send>(out: &mut [T], width: usize, cost: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if out.is_empty() || width == 0 {
        return;
    }
    let rows = out.len() / width;
    let piece = paths::rows_per_piece(rows, cost, rayon::current_num_threads());
    if piece >= rows {
        f(0, out);
    } else {
        out.par_chunks_mut(piece * width).enumerate().for_each(|(i, chunk)| f(i * piece, chunk));
    }
}
