//! Threads of the CPU's kernels: each thread of Python that computes has a set of its own, itself among them, so that readings in several
//! threads do not wait for one another.

use std::cell::OnceCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use armt::engine::{OwnThreads, own_threads};
use pyo3::prelude::*;

use crate::error::{Result, refuse};

/// As many as were asked for; 0: not yet.
static ASKED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static OWN: OnceCell<(usize, Option<OwnThreads>)> = const { OnceCell::new() };
}

/// Sets how many threads a computation takes, for every thread of Python that has not computed yet. Where this is not called it is
/// RAYON_NUM_THREADS, or else OMP_NUM_THREADS, which Ray sets to an actor's num_cpus, or else one for each core.
#[pyfunction]
#[pyo3(signature = (threads, /))]
pub fn set_threads(threads: usize) -> Result<()> {
    if threads == 0 {
        return Err(refuse("at least 1 thread", 0));
    }
    if let Some(own) = OWN.with(|own| own.get().map(|(own, _)| *own)).filter(|own| *own != threads) {
        return Err(refuse("set_threads before this thread's first computation", format!("one after it, with {own} threads")));
    }
    ASKED.store(threads, Ordering::Relaxed);
    Ok(())
}

/// Threads that a computation of the calling thread takes.
#[pyfunction]
pub fn get_threads() -> usize {
    OWN.with(|own| own.get().map(|(own, _)| *own)).unwrap_or_else(asked)
}

fn asked() -> usize {
    let variable = |name: &str| std::env::var(name).ok()?.parse().ok().filter(|n| *n > 0);
    let usual = || std::thread::available_parallelism().map_or(1, usize::from);
    match ASKED.load(Ordering::Relaxed) {
        0 => ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"].into_iter().find_map(variable).unwrap_or_else(usual),
        threads => threads,
    }
}

/// Computes without Python's lock, on the calling thread's own threads. A process that was forked after its parent had computed has none of
/// its parent's threads, and is refused.
pub fn compute<R: Send>(py: Python<'_>, f: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    let done = py.detach(|| {
        join_own()?;
        f()
    });
    // Before anything of Python's that would stumble over it.
    py.check_signals()?;
    done
}

/// Gives the calling thread its threads, if it has none yet.
pub fn join_own() -> Result<()> {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    if *PROCESS.get_or_init(std::process::id) != std::process::id() {
        let words =
            "this process was forked after its parent had used armt, whose threads do not live on in it: start it with spawn";
        return Err(armt::Error::Unsupported(format!("{words} (multiprocessing.set_start_method(\"spawn\"))")).into());
    }
    OWN.with(|own| {
        own.get_or_init(|| {
            let threads = asked();
            (threads, own_threads(threads))
        });
    });
    Ok(())
}
