//! The processes that train one model together, as one of them sees them: sums over all of them on a stream beside the device's own.
//!
//! A process that is gone must be an error on the others and never a hang. NCCL itself notices a connection that was closed, but not a process that
//! rests, nor one that it shares memory with; and the calling thread waits inside the driver then. So a thread of its own watches: it asks NCCL for
//! errors and looks how long a call has been under way ([`Communicator::watched`]). Where something is wrong it aborts the communicator, which makes
//! the device end its work, whereupon the waiting call comes back and is an error. Where even that does not help it calls what it was given for that.

use std::fmt::Display;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::driver::{Context, SideStream};
use super::nccl::{CommHandle, Nccl};
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Tensor};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(200);
/// Time that a call has to come back after the communicator was aborted.
const GRACE: Duration = Duration::from_secs(20);

/// What one process has to say of itself to join the others.
pub struct Membership {
    /// Its number, from 0.
    pub rank: usize,
    /// How many there are.
    pub world: usize,
    /// How long the others may take, to join and at every call.
    pub timeout: Duration,
    /// Called with what is wrong where a call does not come back even after the communicator was aborted: all that is left is to end the process.
    pub give_up: Box<dyn FnOnce(&str) + Send>,
}

impl Membership {
    /// One process that has no others to wait for: to try NCCL out, and to measure what it costs.
    pub fn alone() -> Self {
        Membership { rank: 0, world: 1, timeout: Duration::from_secs(300), give_up: Box::new(|_| {}) }
    }
}

/// One process' end of a communicator of NCCL.
pub struct Communicator {
    shared: Arc<Shared>,
    rank: usize,
    world: usize,
    timeout: Duration,
    device: Device,
    side: SideStream,
    watcher: Option<JoinHandle<()>>,
}

struct Shared {
    nccl: &'static Nccl,
    comm: CommHandle,
    /// Stays as long as threads work on the communicator.
    context: Arc<Context>,
    watch: Mutex<Watch>,
    changed: Condvar,
}

#[derive(Default)]
struct Watch {
    /// Since when a call is under way.
    since: Option<Instant>,
    /// What is wrong. The communicator is aborted, or about to be.
    failed: Option<String>,
    /// Nothing is left to be watched.
    over: bool,
}

impl Shared {
    fn watch(&self) -> MutexGuard<'_, Watch> {
        // Every field is valid after every statement.
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expect_alive(&self) -> Result<()> {
        self.watch().failed.as_ref().map_or(Ok(()), |why| Err(Error::Together(why.clone())))
    }
}

impl Communicator {
    /// Joins the other processes on a GPU, which is no other's. Those that do not come within the time are an error. See [`nccl_report`] for what must be
    /// installed; `NCCL_COMM_ID=host:port` in the environment of all processes says where the first listens, and one process alone needs none.
    ///
    /// [`nccl_report`]: crate::nccl_report
    pub fn join(device: &Device, membership: Membership) -> Result<Self> {
        const OP: &str = "Communicator::join";
        let Membership { rank, world, timeout, give_up } = membership;
        let Device::Cuda(cuda) = device else {
            return Err(Error::unsupported(OP, "NCCL adds up what is on GPUs, this device is cpu"));
        };
        if rank >= world || i32::try_from(world).is_err() {
            return Err(Error::argument(OP, format!("expected a rank below the number of processes, got rank {rank} of {world}")));
        }
        let nccl = Nccl::get()?;
        let side = SideStream::new(&cuda.context)?;
        let context = cuda.context.clone();
        let told = format!("the {world} processes did not all come within {} s", timeout.as_secs_f64());
        let comm = within(timeout, &told, move || {
            context.bind()?;
            nccl.join(rank, world)
        })?;
        let (context, changed) = (cuda.context.clone(), Condvar::new());
        let shared = Arc::new(Shared { nccl, comm, context, watch: Mutex::default(), changed });
        let (watched, named) = (shared.clone(), std::thread::Builder::new().name("nccl-watch".into()));
        let watcher = named.spawn(move || watch(&watched, timeout, give_up));
        let watcher = watcher.map_err(|e| Error::unsupported(OP, format!("no thread could be started: {e}")))?;
        Ok(Communicator { shared, rank, world, timeout, device: device.clone(), side, watcher: Some(watcher) })
    }

    /// This process' number, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Where NCCL was found and what version it is.
    pub fn library(&self) -> String {
        self.shared.nccl.describe()
    }

    /// Begins to replace f32 tensors by their sums over all processes, after what was issued on the device so far and beside what is issued from
    /// now on, until [`Communicator::finish_sums`]: meanwhile nothing else may touch them. All processes ask for tensors of the same sizes in the same order. Both
    /// may be part of a recorded graph.
    pub fn begin_sums(&self, tensors: &[Tensor]) -> Result<()> {
        const OP: &str = "Communicator::begin_sums";
        let Device::Cuda(cuda) = &self.device else { return Ok(()) };
        for tensor in tensors {
            tensor.expect_dtype(OP, "a tensor to be added up", DType::F32)?;
            if tensor.device() != &self.device {
                let (expected, got) = (self.device.to_string(), tensor.device().to_string());
                return Err(Error::Device { op: OP, what: "a tensor to be added up", expected, got });
            }
        }
        let buffers: Vec<(u64, usize)> = tensors.iter().map(|t| (t.ptr(), t.elements())).collect();
        let _turn = cuda.context.turn();
        self.shared.expect_alive()?;
        self.side.follow()?;
        self.shared.nccl.sum(self.shared.comm, &buffers, self.side.handle())
    }

    /// What is issued on the device from now on comes after the sums that were begun.
    pub fn finish_sums(&self) -> Result<()> {
        self.side.lead()
    }

    /// Replaces numbers of the host by their sums over all processes.
    pub fn add_up(&self, values: &mut [f32]) -> Result<()> {
        self.watched(|| {
            let sums = Tensor::from_slice(values, [values.len()], &self.device)?;
            self.begin_sums(&[sums.detach()])?;
            self.finish_sums()?;
            values.copy_from_slice(&sums.to_vec::<f32>()?);
            Ok(())
        })
    }

    /// Runs what waits for other processes. An error where NCCL says that one is gone, or where it takes longer than the time that was given: what
    /// was computed meanwhile is worth nothing then, and nothing can be added up any more.
    pub fn watched<R, E: From<Error> + Display>(&self, f: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
        self.shared.expect_alive()?;
        self.shared.watch().since = Some(Instant::now());
        let result = f();
        let mut watch = self.shared.watch();
        watch.since = None;
        match (&watch.failed, &result) {
            // The reason rather than what followed from it.
            (Some(why), _) => Err(Error::Together(why.clone()).into()),
            (None, Ok(_)) => result,
            // The device may wait for the others, and they for this one, which will not go on.
            (None, Err(error)) => {
                watch.failed = Some(error.to_string());
                drop(watch);
                abort(&self.shared);
                result
            }
        }
    }

    /// Leaves the other processes after all is done. Graphs with sums in them must be gone.
    pub fn leave(mut self) -> Result<()> {
        self.end_watch();
        self.shared.expect_alive()?;
        self.device.synchronize()?;
        let shared = self.shared.clone();
        // Nothing is left for `drop` to abort.
        self.shared.watch().failed = Some("the process has left the others".into());
        within(self.timeout, "NCCL did not end", move || shared.nccl.destroy(shared.comm))
    }

    fn end_watch(&mut self) {
        self.shared.watch().over = true;
        self.shared.changed.notify_all();
        // It cannot have panicked: it runs nothing that does.
        self.watcher.take().map(JoinHandle::join);
    }
}

impl Drop for Communicator {
    /// Who does not leave in order has met an error, and others may wait for it for ever: so nothing is waited for.
    fn drop(&mut self) {
        self.end_watch();
        if self.shared.watch().failed.is_none() {
            abort(&self.shared);
        }
    }
}

/// Looks for what is wrong until there is nothing left to be watched.
fn watch(shared: &Arc<Shared>, timeout: Duration, give_up: Box<dyn FnOnce(&str) + Send>) {
    // NCCL asks for the device of the calling thread. Without it errors are not seen and the time alone counts.
    let _ = shared.context.bind();
    let mut state = shared.watch();
    let why = loop {
        // Of a call that failed here the communicator is aborted already.
        if state.over || state.failed.is_some() {
            return;
        }
        if let Err(error) = shared.nccl.asynchronous_error(shared.comm) {
            break error.to_string();
        }
        if state.since.is_some_and(|since| since.elapsed() > timeout) {
            break format!("another process did not come within {} s: it is gone or far behind", timeout.as_secs_f64());
        }
        state = wait(shared, state, PAUSE);
    };
    state.failed = Some(why.clone());
    // Before the abort: a call that it frees must find the reason.
    drop(state);
    abort(shared);
    let (mut state, aborted) = (shared.watch(), Instant::now());
    while state.since.is_some() {
        if aborted.elapsed() > GRACE {
            drop(state);
            return give_up(&why);
        }
        state = wait(shared, state, PAUSE);
    }
}

fn wait<'a>(shared: &'a Shared, state: MutexGuard<'a, Watch>, time: Duration) -> MutexGuard<'a, Watch> {
    shared.changed.wait_timeout(state, time).map_or_else(|e| e.into_inner().0, |(state, _)| state)
}

/// Aborts the communicator on a thread of its own, which may wait for graphs that the caller has yet to drop.
fn abort(shared: &Arc<Shared>) {
    let shared = shared.clone();
    // Where no thread can be had the process is about to end anyway.
    let _ = std::thread::Builder::new().name("nccl-abort".into()).spawn(move || shared.nccl.abort(shared.comm));
}

/// Runs `f` on a thread of its own and waits so long for it; afterwards the thread is left alone.
fn within<R: Send + 'static>(timeout: Duration, late: &str, f: impl FnOnce() -> Result<R> + Send + 'static) -> Result<R> {
    let (sender, done) = channel();
    let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || sender.send(f()));
    thread.map_err(|e| Error::unsupported("Communicator", format!("no thread could be started: {e}")))?;
    done.recv_timeout(timeout).unwrap_or_else(|error| {
        let why = if error == RecvTimeoutError::Timeout { late } else { "NCCL ended without an answer" };
        Err(Error::Together(why.into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_come_back_in_time_is_an_error() {
        assert_eq!(within(Duration::from_secs(60), "late", || Ok(3)).unwrap(), 3);
        let (hold, held) = channel::<()>();
        let error = within(Duration::from_millis(20), "the others did not come", move || Ok(held.recv().is_err())).unwrap_err();
        assert!(matches!(&error, Error::Together(why) if why == "the others did not come"), "{error}");
        drop(hold);
        let error = within(Duration::from_secs(60), "late", || Err::<(), _>(Error::NoCuda("none".into()))).unwrap_err();
        assert!(matches!(error, Error::NoCuda(_)));
    }

    #[test]
    fn a_cpu_is_refused() {
        let error = Communicator::join(&Device::cpu(), Membership::alone()).err().unwrap();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
}
