//! Work that waits for its kernels.
//!
//! A launch whose kernel is still being compiled would hold up the thread that issues it, and with it every kernel that this thread would ask
//! for next: a first step would compile one after the other. So such a launch waits here, and behind it, in their order, whatever is issued
//! after it. By the time somebody wants a result, all kernels of the step are known and are being compiled, as many at a time as there are
//! cores; then what waits is done.
//!
//! That changes no result, since work on a stream is nothing but waiting in order: buffers that were given back and handed out again
//! meanwhile are used as they would be on the stream. Memory that leaves the pool is the one thing that must not overtake.
//!
//! With `ARMT_COMPILE_AHEAD=off` every launch waits for its own kernel.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// Set to `off`: no launch waits behind one whose kernel is being compiled, all are issued as they come.
pub(super) const AHEAD_VARIABLE: &str = "ARMT_COMPILE_AHEAD";

/// Pieces of work that wait at most: those of some steps. More would be memory for nothing.
const MOST: usize = 1 << 16;

type Work<C> = Box<dyn FnOnce(&C) -> Result<()> + Send>;

/// What waits to be done with a device's context C. Used by the thread whose turn it is.
pub(super) struct Backlog<C>(Mutex<State<C>>);

struct State<C> {
    waiting: VecDeque<Work<C>>,
    /// Nothing may wait: a graph is recorded, time is measured, or what waited is being done.
    straight: bool,
    /// Why work that had waited was lost, and with it everything that was issued after it.
    lost: Option<String>,
}

impl<C> Backlog<C> {
    /// With `straight` nothing ever waits.
    pub(super) fn new(straight: bool) -> Self {
        Backlog(Mutex::new(State { waiting: VecDeque::new(), straight, lost: None }))
    }

    fn state(&self) -> MutexGuard<'_, State<C>> {
        // Valid after every statement; work is done without the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `work` at once, where it is `ready` and nothing waits; else it waits too.
    pub(super) fn issue(&self, context: &C, ready: bool, work: impl FnOnce(&C) -> Result<()> + Send + 'static) -> Result<()> {
        let mut state = self.state();
        state.check()?;
        if state.straight || (ready && state.waiting.is_empty()) {
            drop(state);
            return work(context);
        }
        state.waiting.push_back(Box::new(work));
        let many = state.waiting.len() >= MOST;
        drop(state);
        if many { self.catch_up(context) } else { Ok(()) }
    }

    /// Whether work that is issued now would wait.
    pub(super) fn waits(&self) -> bool {
        let state = self.state();
        !state.straight && !state.waiting.is_empty()
    }

    /// Does all that waits. Where a piece fails, what follows it would work with what is not there: it is dropped, and the device is of no
    /// more use.
    pub(super) fn catch_up(&self, context: &C) -> Result<()> {
        loop {
            let mut state = self.state();
            state.check()?;
            let work = if state.straight { None } else { state.waiting.pop_front() };
            let Some(work) = work else { return Ok(()) };
            state.straight = true;
            drop(state);
            let done = work(context);
            let mut state = self.state();
            state.straight = false;
            if let Err(e) = done {
                state.waiting.clear();
                state.lost = Some(e.to_string());
                return Err(e);
            }
        }
    }

    /// Runs `f` with nothing waiting: neither before it, nor what it issues.
    pub(super) fn straight<R>(&self, context: &C, f: impl FnOnce() -> Result<R>) -> Result<R> {
        self.catch_up(context)?;
        let before = std::mem::replace(&mut self.state().straight, true);
        let result = f();
        self.state().straight = before;
        result
    }

    /// Drops what waits: nobody is left who could see it.
    pub(super) fn clear(&self) {
        self.state().waiting.clear();
    }
}

impl<C> State<C> {
    fn check(&self) -> Result<()> {
        self.lost.as_ref().map_or(Ok(()), |why| Err(Error::Lost(why.clone())))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    type Log = Sender<&'static str>;

    fn issue(backlog: &Backlog<Log>, log: &Log, ready: bool, name: &'static str) {
        backlog.issue(log, ready, move |log| log.send(name).map_err(|_| Error::Bug("no log".into()))).unwrap();
    }

    fn seen(log: &Receiver<&'static str>) -> Vec<&'static str> {
        log.try_iter().collect()
    }

    #[test]
    fn what_follows_a_launch_that_waits_waits_behind_it() {
        let (log, lines) = channel();
        let backlog = Backlog::new(false);
        issue(&backlog, &log, true, "at once");
        issue(&backlog, &log, false, "compiled later");
        issue(&backlog, &log, true, "a copy of its result");
        assert_eq!(seen(&lines), ["at once"]);
        backlog.catch_up(&log).unwrap();
        assert_eq!(seen(&lines), ["compiled later", "a copy of its result"]);
        issue(&backlog, &log, true, "at once again");
        assert_eq!(seen(&lines), ["at once again"]);
    }

    #[test]
    fn work_that_issues_work_and_waits_keeps_the_order() {
        let (log, lines) = channel();
        let backlog = std::sync::Arc::new(Backlog::new(false));
        let inner = backlog.clone();
        let trial = move |log: &Log| {
            issue(&inner, log, false, "part of a trial");
            inner.catch_up(log)
        };
        issue(&backlog, &log, false, "before");
        backlog.issue(&log, true, trial).unwrap();
        issue(&backlog, &log, true, "after");
        backlog.catch_up(&log).unwrap();
        assert_eq!(seen(&lines), ["before", "part of a trial", "after"]);
    }

    #[test]
    fn nothing_waits_in_a_recording() {
        let (log, lines) = channel();
        let backlog = Backlog::new(false);
        issue(&backlog, &log, false, "before");
        let inside = backlog.straight(&log, || {
            issue(&backlog, &log, false, "inside");
            Ok(seen(&lines))
        });
        assert_eq!(inside.unwrap(), ["before", "inside"]);
        issue(&backlog, &log, false, "after");
        assert!(seen(&lines).is_empty());
    }

    #[test]
    fn work_after_a_failure_is_never_done_and_every_later_call_says_why() {
        let (log, lines) = channel();
        let backlog = Backlog::new(false);
        backlog.issue(&log, false, |_| Err(Error::Bug("no such kernel".into()))).unwrap();
        issue(&backlog, &log, true, "of what is not there");
        assert!(backlog.catch_up(&log).unwrap_err().to_string().contains("no such kernel"));
        for later in [backlog.catch_up(&log), backlog.issue(&log, true, |_| Ok(())), backlog.straight(&log, || Ok(()))] {
            let later = later.unwrap_err();
            assert!(matches!(&later, Error::Lost(why) if why.contains("no such kernel")), "{later}");
        }
        assert!(seen(&lines).is_empty());
    }

    #[test]
    fn a_backlog_does_not_grow_without_end() {
        let (log, lines) = channel();
        let backlog = Backlog::new(false);
        for _ in 0..MOST {
            issue(&backlog, &log, false, "launch");
        }
        assert_eq!(seen(&lines).len(), MOST);
        assert!(backlog.state().waiting.is_empty());
    }
}
