//! A watch over calls that wait for other processes.
//!
//! A process that is gone must be an error on the others and never a hang. NCCL itself notices a connection that was closed, but not a process that
//! rests, nor one that it shares memory with; and the calling thread waits inside the driver then. So a thread of its own asks for errors and looks
//! how long a call has been under way ([`Watch::watched`]). Where something is wrong it aborts, which makes the device end its work, whereupon the
//! waiting call comes back and is an error. Where even that does not help it calls what it was given for that.

use std::fmt::Display;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(200);

/// What is watched over.
pub(super) trait Link: Send + Sync + 'static {
    /// What went wrong since, if anything did. Never waits.
    fn error(&self) -> Result<()>;

    /// Ends what is under way. May wait for what the caller has yet to drop. Called once at most, on a thread of its own; nothing else is called
    /// afterwards.
    fn abort(&self) -> Result<()>;
}

/// What happens when.
pub(super) struct Limits {
    /// How long a call may take.
    pub(super) timeout: Duration,
    /// How long it may take to come back after all was aborted.
    pub(super) grace: Duration,
    /// Called with what is wrong where it does not.
    pub(super) give_up: Box<dyn FnOnce(&str) + Send>,
}

pub(super) struct Watch<L: Link> {
    shared: Arc<Shared<L>>,
    watcher: Option<JoinHandle<()>>,
}

struct Shared<L> {
    link: L,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Since when a call is under way.
    since: Option<Instant>,
    /// What is wrong. The link is aborted, or about to be.
    failed: Option<String>,
    /// Nothing is left to be watched.
    over: bool,
}

impl<L: Link> Watch<L> {
    pub(super) fn start(link: L, limits: Limits) -> Result<Self> {
        let shared = Arc::new(Shared { link, state: Mutex::default(), changed: Condvar::new() });
        let watched = shared.clone();
        let watcher = std::thread::Builder::new().name("watch".into()).spawn(move || watch(&watched, limits));
        let watcher = watcher.map_err(|e| Error::Together(format!("no thread could be started: {e}")))?;
        Ok(Watch { shared, watcher: Some(watcher) })
    }

    /// What is watched over, as long as nothing is wrong with it.
    pub(super) fn link(&self) -> Result<&L> {
        match &self.shared.state().failed {
            Some(why) => Err(Error::Together(why.clone())),
            None => Ok(&self.shared.link),
        }
    }

    /// Runs what waits for other processes.
    pub(super) fn watched<R, E: From<Error> + Display>(&self, f: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
        self.link()?;
        self.shared.state().since = Some(Instant::now());
        let result = f();
        let mut state = self.shared.state();
        state.since = None;
        match (&state.failed, &result) {
            // The reason rather than what followed from it.
            (Some(why), _) => Err(Error::Together(why.clone()).into()),
            (None, Ok(_)) => result,
            // The device may wait for the others, and they for this process, which will not go on.
            (None, Err(error)) => {
                state.failed = Some(error.to_string());
                drop(state);
                abort(&self.shared);
                result
            }
        }
    }

    /// Ends the watch and runs what ends the link in order. Nothing is aborted afterwards.
    pub(super) fn end<R>(mut self, f: impl FnOnce(&L) -> Result<R>) -> Result<R> {
        self.stop();
        let ended = f(self.link()?);
        self.shared.state().failed = Some("this process has left the others".into());
        ended
    }

    fn stop(&mut self) {
        self.shared.state().over = true;
        self.shared.changed.notify_all();
        // It runs nothing that panics.
        self.watcher.take().map(JoinHandle::join);
    }
}

impl<L: Link> Drop for Watch<L> {
    /// Who does not end in order has met an error, and others may wait for it for ever: so nothing is waited for.
    fn drop(&mut self) {
        self.stop();
        if self.shared.state().failed.is_none() {
            abort(&self.shared);
        }
    }
}

impl<L> Shared<L> {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every field is valid after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, PAUSE).map_or_else(|e| e.into_inner().0, |(state, _)| state)
    }
}

/// Looks for what is wrong until there is nothing left to be watched.
fn watch<L: Link>(shared: &Arc<Shared<L>>, limits: Limits) {
    let Limits { timeout, grace, give_up } = limits;
    let mut state = shared.state();
    let why = loop {
        // Of a call that failed by itself everything is aborted already.
        if state.over || state.failed.is_some() {
            return;
        }
        if let Err(error) = shared.link.error() {
            break error.to_string();
        }
        if state.since.is_some_and(|since| since.elapsed() > timeout) {
            break format!("another process did not come within {} s: it is gone, or far behind", timeout.as_secs_f64());
        }
        state = shared.wait(state);
    };
    // Before the abort: a call that it frees must find the reason.
    state.failed = Some(why.clone());
    drop(state);
    abort(shared);
    let (mut state, aborted) = (shared.state(), Instant::now());
    while state.since.is_some() {
        if aborted.elapsed() > grace {
            drop(state);
            return give_up(&why);
        }
        state = shared.wait(state);
    }
}

fn abort<L: Link>(shared: &Arc<Shared<L>>) {
    let shared = shared.clone();
    // Where no thread can be had the process is about to end anyway.
    let _ = std::thread::Builder::new().name("abort".into()).spawn(move || shared.link.abort());
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A link whose waiting calls come back when it is aborted, if it is one that lets them.
    #[derive(Default)]
    struct Line {
        broken: AtomicBool,
        aborts: AtomicUsize,
        deaf: bool,
    }

    impl Line {
        /// What a call does that waits for a process that never comes.
        fn wait_in_vain(&self) -> Result<u32> {
            let start = Instant::now();
            while (self.deaf || self.aborts.load(Ordering::SeqCst) == 0) && start.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(5));
                if self.deaf && self.broken.load(Ordering::SeqCst) {
                    break; // the test is done with it
                }
            }
            Ok(7) // what the device left there
        }
    }

    impl Link for Arc<Line> {
        fn error(&self) -> Result<()> {
            if self.broken.load(Ordering::SeqCst) && !self.deaf { Err(Error::NoCuda("the line is broken".into())) } else { Ok(()) }
        }

        fn abort(&self) -> Result<()> {
            self.aborts.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }

    /// A watch over a line, with what it gives up by.
    fn over(line: &Arc<Line>, timeout: u64, grace: u64) -> (Watch<Arc<Line>>, Receiver<String>) {
        let (sender, given_up) = channel();
        let give_up = Box::new(move |why: &str| sender.send(why.to_string()).unwrap());
        let limits = Limits { timeout: Duration::from_millis(timeout), grace: Duration::from_millis(grace), give_up };
        (Watch::start(line.clone(), limits).unwrap(), given_up)
    }

    #[test]
    fn calls_that_come_back_in_time_go_well_and_nothing_is_aborted() {
        let line = Arc::new(Line::default());
        let (watch, given_up) = over(&line, 1500, 100);
        assert_eq!(watch.watched(|| Ok::<_, Error>(3)).unwrap(), 3);
        // Between calls there is no limit.
        std::thread::sleep(Duration::from_millis(2000));
        assert_eq!(watch.watched(|| Ok::<_, Error>(4)).unwrap(), 4);
        assert_eq!(watch.end(|_| Ok(5)).unwrap(), 5);
        assert_eq!(line.aborts.load(Ordering::SeqCst), 0);
        assert!(given_up.try_recv().is_err());
    }

    #[test]
    fn a_call_that_takes_too_long_is_freed_and_an_error() {
        let line = Arc::new(Line::default());
        let (watch, given_up) = over(&line, 100, 20_000);
        let error = watch.watched(|| line.wait_in_vain()).unwrap_err();
        assert!(error.to_string().contains("another process did not come within 0.1 s"), "{error}");
        let error = watch.watched(|| Ok::<_, Error>(1)).unwrap_err();
        assert!(error.to_string().contains("did not come"), "no call goes well afterwards: {error}");
        assert!(watch.end(|_| Ok(())).is_err());
        assert_eq!(line.aborts.load(Ordering::SeqCst), 1);
        assert!(given_up.try_recv().is_err());
    }

    #[test]
    fn an_error_of_the_link_frees_a_call_long_before_its_time() {
        let line = Arc::new(Line::default());
        let (watch, _) = over(&line, 600_000, 20_000);
        let start = Instant::now();
        let error = watch.watched(|| {
            line.broken.store(true, Ordering::SeqCst);
            line.wait_in_vain()
        });
        assert!(error.unwrap_err().to_string().contains("the line is broken"));
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_call_that_nothing_frees_is_given_up() {
        let line = Arc::new(Line { deaf: true, ..Line::default() });
        let (watch, given_up) = over(&line, 100, 100);
        std::thread::scope(|scope| {
            scope.spawn(|| watch.watched(|| line.wait_in_vain()));
            let why = given_up.recv_timeout(Duration::from_secs(20)).unwrap();
            assert!(why.contains("did not come within 0.1 s"), "{why}");
            line.broken.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn who_fails_or_leaves_without_an_end_lets_the_others_go() {
        let line = Arc::new(Line::default());
        let (watch, _) = over(&line, 600_000, 100);
        let error = watch.watched(|| Err::<(), _>(Error::NoCuda("out of paper".into()))).unwrap_err();
        assert!(matches!(&error, Error::NoCuda(why) if why == "out of paper"), "its own error: {error}");
        drop(watch);
        let dropped = Arc::new(Line::default());
        drop(over(&dropped, 600_000, 100));
        let start = Instant::now();
        while [&line, &dropped].iter().any(|line| line.aborts.load(Ordering::SeqCst) != 1) {
            assert!(start.elapsed() < Duration::from_secs(20), "nothing was aborted");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
