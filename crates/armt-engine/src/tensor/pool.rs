//! Buffers come from a pool and go back to it when the last tensor that uses them is dropped, so that a repeated step allocates
//! nothing. Sizes are rounded up to classes at most an eighth apart, and a class is only ever reused for itself: the second
//! run of a step finds every buffer of the first.
//!
//! On CUDA all work is on one stream, so a buffer may be handed out again as soon as it is returned, to any thread: whatever still reads it
//! was issued before whatever will write it. A thread that captures a graph has its buffers from a child, a workspace's: the graph's
//! temporaries stay there for as long as it can be replayed. What comes from the host never does: it may outlive the step it was made in, and a
//! replay would write over it.

use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda::driver::Context;
use crate::error::{Error, Result};
use crate::machine;

/// Host buffers start on a cache line, which is also the widest vector; large ones on a huge page.
fn host_align(class: usize) -> usize {
    if class < machine::HUGE_PAGE { 64 } else { machine::HUGE_PAGE }
}

/// More bytes than any device has, few enough to be rounded up.
const LARGEST: usize = isize::MAX as usize / 2;

/// Where raw memory comes from.
pub(crate) enum Source {
    Host,
    Cuda(Arc<Context>),
}

/// How much a pool has done. A step that repeats without allocating leaves `allocations` as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Raw allocations made since the pool exists.
    pub allocations: usize,
    /// Bytes held: in use by tensors, and waiting to be used again.
    pub held_bytes: usize,
    /// Most bytes ever in use by tensors at one time.
    pub peak_bytes: usize,
    /// Bytes in use by tensors now.
    pub used_bytes: usize,
}

#[derive(Default)]
struct Counters {
    allocations: AtomicUsize,
    held: AtomicUsize,
    used: AtomicUsize,
    peak: AtomicUsize,
}

pub(crate) struct Pool {
    source: Arc<Source>,
    free: Mutex<HashMap<usize, Vec<usize>>>,
    counters: Arc<Counters>,
    parent: Option<Arc<Pool>>,
    /// Whether a graph that can be replayed has these buffers, those that are free too.
    recorded: AtomicBool,
}

/// One buffer; goes back to its pool when dropped.
pub(crate) struct Block {
    address: usize,
    class: usize,
    pool: Arc<Pool>,
}

impl Block {
    pub(crate) fn address(&self) -> usize {
        self.address
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.counters.used.fetch_sub(self.class, Ordering::Relaxed);
        self.pool.lock().entry(self.class).or_default().push(self.address);
    }
}

/// Rounds up to a size class: multiples of 512 bytes, then eighths of a power of two.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 16).max(512);
    bytes.max(1).div_ceil(step) * step
}

/// What a host buffer of a class is allocated as, with room to begin it where it should. No more alignment is asked for than the
/// system's allocator gives anyway: it would write all zeros itself, where large zeroed memory costs nothing until it is used.
fn host_layout(class: usize) -> Option<Layout> {
    Layout::from_size_align(class.checked_add(host_align(class))?, 2 * size_of::<usize>()).ok()
}

impl Pool {
    pub(crate) fn new(source: Source) -> Arc<Self> {
        let recorded = AtomicBool::new(false);
        Arc::new(Pool { source: Arc::new(source), free: Mutex::default(), counters: Arc::default(), parent: None, recorded })
    }

    /// A pool for the buffers of one captured graph. It takes from `parent` what fits and gives back everything at its end.
    pub(crate) fn child(parent: &Arc<Pool>) -> Arc<Self> {
        Arc::new(Pool {
            source: parent.source.clone(),
            free: Mutex::default(),
            counters: parent.counters.clone(),
            parent: Some(parent.clone()),
            recorded: AtomicBool::new(false),
        })
    }

    /// A graph is recorded with this pool's buffers: they stay until the pool ends.
    pub(crate) fn record(&self) {
        self.recorded.store(true, Ordering::Relaxed);
    }

    /// The pool that is nobody's child.
    pub(crate) fn root(self: &Arc<Self>) -> Arc<Self> {
        let mut pool = self;
        while let Some(parent) = &pool.parent {
            pool = parent;
        }
        pool.clone()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Vec<usize>>> {
        // The map is valid after every statement, so a panic elsewhere while it was held does no harm.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> PoolStats {
        let c = &self.counters;
        PoolStats {
            allocations: c.allocations.load(Ordering::Relaxed),
            held_bytes: c.held.load(Ordering::Relaxed),
            peak_bytes: c.peak.load(Ordering::Relaxed),
            used_bytes: c.used.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn reset_peak(&self) {
        self.counters.peak.store(self.counters.used.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn take(&self, class: usize) -> Option<usize> {
        let own = self.lock().get_mut(&class).and_then(Vec::pop);
        own.or_else(|| self.parent.as_ref().and_then(|p| p.take(class)))
    }

    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Block> {
        if bytes > LARGEST {
            return Err(Error::argument("allocation", format!("{bytes} bytes exceed the address space")));
        }
        let class = size_class(bytes);
        let address = match self.take(class) {
            Some(address) => address,
            None => self.raw_alloc(class)?,
        };
        let used = self.counters.used.fetch_add(class, Ordering::Relaxed) + class;
        self.counters.peak.fetch_max(used, Ordering::Relaxed);
        Ok(Block { address, class, pool: self.clone() })
    }

    fn raw_alloc(&self, class: usize) -> Result<usize> {
        let pooled = self.counters.held.load(Ordering::Relaxed);
        let address = match &*self.source {
            Source::Host => {
                // A system that promises more than it has would end the program when the memory is used.
                let total = machine::memory();
                if class > total.saturating_sub(pooled) {
                    self.trim();
                    let held = self.counters.held.load(Ordering::Relaxed);
                    let free = total.saturating_sub(held);
                    if class > free {
                        return Err(Error::OutOfMemory { device: "cpu".into(), requested: class, free, total, pooled });
                    }
                }
                let layout = host_layout(class)
                    .ok_or_else(|| Error::unsupported("allocation", format!("{class} bytes exceed the address space")))?;
                // SAFETY: the layout has a non-zero size (a class is at least 512 bytes). Zeroed, so that reading a buffer before
                // a kernel wrote it is a wrong number, never undefined behaviour.
                let start = unsafe { std::alloc::alloc_zeroed(layout) };
                if start.is_null() {
                    return Err(Error::OutOfMemory { device: "cpu".into(), requested: class, free: 0, total: 0, pooled });
                }
                let align = host_align(class);
                let skip = align - start as usize % align;
                // SAFETY: `start` is aligned to two words, so that `skip` is at least two, and at most the bytes that the layout has beyond
                // the class: the buffer lies inside, and the word before it too.
                unsafe {
                    let buffer = start.add(skip);
                    buffer.cast::<*mut u8>().sub(1).write(start);
                    if align == machine::HUGE_PAGE {
                        machine::prefer_huge_pages(buffer, class);
                    }
                    buffer as usize
                }
            }
            Source::Cuda(context) => match context.alloc(class)? {
                Some(address) => address,
                None => {
                    self.trim();
                    match context.alloc(class)? {
                        Some(address) => address,
                        None => {
                            let (free, total) = context.memory()?;
                            return Err(Error::OutOfMemory { device: context.describe(), requested: class, free, total, pooled });
                        }
                    }
                }
            },
        };
        self.counters.allocations.fetch_add(1, Ordering::Relaxed);
        self.counters.held.fetch_add(class, Ordering::Relaxed);
        Ok(address)
    }

    /// Gives every unused buffer back to the system, the parent's too, but those of recorded graphs: a replay writes to them.
    pub(crate) fn trim(&self) {
        if !self.recorded.load(Ordering::Relaxed) {
            // Not under the lock: freeing may wait for another thread's turn, in which that thread may want a buffer.
            let free = std::mem::take(&mut *self.lock());
            for (class, addresses) in free {
                for address in addresses {
                    self.raw_free(address, class);
                }
            }
        }
        if let Some(parent) = &self.parent {
            parent.trim();
        }
    }

    fn raw_free(&self, address: usize, class: usize) {
        match &*self.source {
            // SAFETY: `address` came from `raw_alloc`, which has left where the allocation begins in the word before it and has asked for this very
            // layout, and nothing refers to it any more.
            Source::Host => unsafe {
                let start = (address as *const *mut u8).sub(1).read();
                if let Some(layout) = host_layout(class) {
                    std::alloc::dealloc(start, layout);
                }
            },
            Source::Cuda(context) => context.free(address),
        }
        self.counters.held.fetch_sub(class, Ordering::Relaxed);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let free = std::mem::take(self.free.get_mut().unwrap_or_else(PoisonError::into_inner));
        for (class, mut addresses) in free {
            match &self.parent {
                Some(parent) => parent.lock().entry(class).or_default().append(&mut addresses),
                None => addresses.into_iter().for_each(|address| self.raw_free(address, class)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_close_and_stable() {
        for bytes in [0, 1, 511, 512, 513, 4096, 100_000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(512));
            assert!(class - bytes <= 512.max(bytes / 8 + 1), "{bytes} -> {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused_before_it_is_asked_for() {
        let pool = Pool::new(Source::Host);
        for bytes in [usize::MAX, LARGEST + 1, LARGEST, machine::memory() + 1] {
            assert!(pool.alloc(bytes).is_err(), "{bytes}");
        }
        assert_eq!(pool.stats().allocations, 0);
    }

    #[test]
    fn a_returned_buffer_is_used_again() {
        let pool = Pool::new(Source::Host);
        let first = pool.alloc(1000).unwrap();
        let address = first.address();
        drop(first);
        assert_eq!(pool.alloc(1001).unwrap().address(), address);
        assert_eq!(pool.stats().allocations, 1);
        assert_eq!(pool.stats().used_bytes, 0);
    }

    #[test]
    fn buffers_begin_where_they_should_and_are_zero() {
        let pool = Pool::new(Source::Host);
        for bytes in [1, 4096, machine::HUGE_PAGE - 1, machine::HUGE_PAGE + 1, 9 << 20] {
            let block = pool.alloc(bytes).unwrap();
            assert!(block.address().is_multiple_of(host_align(size_class(bytes))));
            // SAFETY: the buffer has so many bytes, and nobody else has it.
            let all = unsafe { std::slice::from_raw_parts_mut(block.address() as *mut u8, bytes) };
            assert!(all.iter().all(|byte| *byte == 0));
            all.fill(1);
        }
        pool.trim();
        assert_eq!(pool.stats().held_bytes, 0);
    }

    /// Where memory ran out while a step of a new shape ran, the buffers of the graphs of other shapes were given back, and a replay wrote to what
    /// was no longer there.
    #[test]
    fn buffers_of_recorded_graphs_are_not_given_back_while_they_can_be_replayed() {
        let pool = Pool::new(Source::Host);
        let child = Pool::child(&pool);
        drop(child.alloc(4096).unwrap());
        child.record();
        drop(pool.alloc(8192).unwrap());
        child.trim();
        assert_eq!(pool.stats().held_bytes, 4096, "the parent's is given back, the graph's is not");
        drop(child);
        pool.trim();
        assert_eq!(pool.stats().held_bytes, 0);
    }

    #[test]
    fn a_child_pool_keeps_its_buffers_until_it_ends() {
        let pool = Pool::new(Source::Host);
        drop(pool.alloc(4096).unwrap());
        let child = Pool::child(&pool);
        drop(child.alloc(4096).unwrap());
        assert_eq!(pool.stats().allocations, 1, "the child took the parent's buffer");
        let other = pool.alloc(4096).unwrap();
        assert_eq!(pool.stats().allocations, 2, "the child's buffer is not the parent's to hand out");
        drop(other);
        drop(child);
        assert_eq!(pool.lock()[&4096].len(), 2);
        pool.trim();
        assert_eq!(pool.stats().held_bytes, 0);
    }
}
