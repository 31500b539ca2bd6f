//! Whose turn it is to issue work on a device.
//!
//! A device has one stream, which puts its work in order: a buffer that one thread gives back may be handed to another at once, since
//! whatever still reads it was issued before. For that, threads issue their work in turn, each call of the driver one turn, in the order in
//! which they ask. A capture is one turn from its beginning to its end: what another thread issued meanwhile would become part of the graph.
//! A thread that has the turn may take it again.
//!
//! A turn that nobody else wants costs two uncontended locks, some 40 ns; a launch costs some 3 us.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A number for each thread, from 1 up.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    OWN.with(|own| *own)
}

#[derive(Default)]
pub(super) struct Turns {
    /// The thread that has the turn, or 0.
    owner: AtomicU64,
    /// How often its owner has taken it. Touched by the owner alone.
    depth: AtomicUsize,
    queue: Mutex<Queue>,
    passed: Condvar,
}

/// Numbers as at a counter: the next to be drawn, and the one that is served.
#[derive(Default)]
struct Queue {
    next: u64,
    served: u64,
}

/// Ends when dropped.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Both numbers are valid after every statement.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all who asked before.
    pub(super) fn take(&self) -> Turn<'_> {
        let own = this_thread();
        // Only this thread could have stored its own number, so that what another one stores meanwhile does not matter.
        if self.owner.load(Ordering::Relaxed) != own {
            let mut queue = self.queue();
            let number = queue.next;
            queue.next += 1;
            while queue.served != number {
                queue = self.passed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            self.owner.store(own, Ordering::Relaxed);
        }
        self.depth.fetch_add(1, Ordering::Relaxed);
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.0.depth.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        self.0.owner.store(0, Ordering::Relaxed);
        let mut queue = self.0.queue();
        queue.served += 1;
        if queue.next > queue.served {
            self.0.passed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_turn_is_one_threads_alone_and_may_be_taken_again_inside() {
        let (turns, inside, rounds) = (Turns::default(), AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let _outer = turns.take();
                        let _inner = turns.take();
                        assert!(!inside.swap(true, Ordering::SeqCst), "two threads have the turn");
                        rounds.fetch_add(1, Ordering::SeqCst);
                        assert!(inside.swap(false, Ordering::SeqCst));
                    }
                });
            }
        });
        assert_eq!(rounds.into_inner(), 4000);
        assert_eq!(turns.owner.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn who_asks_first_is_served_first() {
        let turns = Arc::new(Turns::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = turns.take();
        let mut threads = Vec::new();
        for i in 0..5 {
            let (own, order) = (turns.clone(), order.clone());
            threads.push(std::thread::spawn(move || {
                let _turn = own.take();
                order.lock().unwrap().push(i);
            }));
            while turns.queue().next < 2 + i {
                std::thread::yield_now();
            }
        }
        drop(first);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4]);
    }
}
