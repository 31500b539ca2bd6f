//! Threads that compile: at most as many as the machine has cores, for as long as there is something to do.
//!
//! They are no members of rayon's pool, where a job of a second would hold up the CPU's work, and a member that waits for one could wait for
//! itself.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// More than a thread has by default: compilers recurse.
const STACK: usize = 16 << 20;

type Job = Box<dyn FnOnce() + Send>;

pub(super) struct Workers {
    most: usize,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    idle: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    threads: usize,
}

impl Workers {
    pub(super) fn new(most: usize) -> Self {
        Workers { most: most.max(1), shared: Arc::default() }
    }

    /// Has `job` done, after those that were given before; its result can be received. A receiver that is closed says that the job panicked.
    pub(super) fn start<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> Receiver<R> {
        let (sender, receiver) = channel();
        // Whoever asked may be gone.
        let job = Box::new(move || drop(sender.send(job())));
        let mut jobs = self.shared.jobs();
        jobs.waiting.push_back(job);
        if jobs.threads < self.most {
            jobs.threads += 1;
            drop(jobs);
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("armt-compile".into()).stack_size(STACK);
            if thread.spawn(move || shared.work()).is_err() {
                self.shared.work();
            }
        }
        receiver
    }
}

impl Drop for Workers {
    /// What has not begun is dropped. A compiler that still runs when the program ends may crash, so what has begun is waited for.
    fn drop(&mut self) {
        let mut jobs = self.shared.jobs();
        jobs.waiting.clear();
        while jobs.threads > 0 {
            jobs = self.shared.idle.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        // Valid after every statement; jobs run without the lock.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let mut jobs = self.jobs();
            let Some(job) = jobs.waiting.pop_front() else {
                // Under the same lock: a job that comes after it finds a thread too few.
                jobs.threads -= 1;
                return self.idle.notify_all();
            };
            drop(jobs);
            // The result's sender is gone then, which is all that has to be known.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn as_many_jobs_run_at_once_as_there_are_workers_and_no_more() {
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let together = Arc::new(Barrier::new(3));
        let workers = Workers::new(3);
        let results: Vec<_> = (0..12)
            .map(|i| {
                let (running, most, together) = (running.clone(), most.clone(), together.clone());
                workers.start(move || {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    // Passes only if three are here at a time.
                    together.wait();
                    running.fetch_sub(1, Ordering::SeqCst);
                    i
                })
            })
            .collect();
        assert_eq!(results.into_iter().map(|r| r.recv().unwrap()).collect::<Vec<_>>(), (0..12).collect::<Vec<_>>());
        assert_eq!(most.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_job_that_panics_is_known_by_its_receiver_and_leaves_the_others_alone() {
        let workers = Workers::new(1);
        let failed = workers.start(|| {
            if true {
                panic!("on purpose")
            }
        });
        assert!(failed.recv().is_err());
        assert_eq!(workers.start(|| 7).recv(), Ok(7));
    }

    #[test]
    fn the_end_waits_for_what_has_begun_and_drops_the_rest() {
        let done = Arc::new(AtomicUsize::new(0));
        let workers = Workers::new(1);
        let (begun, has_begun) = channel();
        let (first, second) = (done.clone(), done.clone());
        let slow = workers.start(move || {
            begun.send(()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(50));
            first.fetch_add(1, Ordering::SeqCst);
        });
        let dropped = workers.start(move || second.fetch_add(10, Ordering::SeqCst));
        has_begun.recv().unwrap();
        drop(workers);
        assert_eq!(done.load(Ordering::SeqCst), 1);
        assert!(slow.recv().is_ok() && dropped.recv().is_err());
    }
}
