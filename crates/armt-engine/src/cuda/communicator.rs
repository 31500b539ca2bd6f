//! The processes that train one model together, as one of them sees them: sums over all of them on a stream beside the device's own.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::driver::{Context, SideStream};
use super::nccl::{CommHandle, Nccl};
use super::watch::{Limits, Link, Watch};
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Tensor};

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
    rank: usize,
    world: usize,
    timeout: Duration,
    device: Device,
    side: SideStream,
    watch: Watch<Member>,
}

#[derive(Clone)]
struct Member {
    nccl: &'static Nccl,
    comm: CommHandle,
    /// Stays as long as threads work on the communicator.
    context: Arc<Context>,
}

impl Link for Member {
    fn error(&self) -> Result<()> {
        self.nccl.asynchronous_error(self.comm)
    }

    fn abort(&self) -> Result<()> {
        self.context.bind()?;
        self.nccl.abort(self.comm)
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
        let (nccl, context) = (Nccl::get()?, cuda.context.clone());
        let side = SideStream::new(&context)?;
        let late = format!("the {world} processes did not all come within {} s", timeout.as_secs_f64());
        let member = within(timeout, &late, move || {
            context.bind()?;
            Ok(Member { nccl, comm: nccl.join(rank, world)?, context })
        })?;
        let watch = Watch::start(member, Limits { timeout, grace: GRACE, give_up })?;
        Ok(Communicator { rank, world, timeout, device: device.clone(), side, watch })
    }

    /// This process' number, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Begins to replace f32 tensors by their sums over all processes, after what was issued on the device so far and beside what is issued from
    /// now on, until [`Communicator::finish_sums`]: meanwhile nothing else may touch them. All processes ask for tensors of the same sizes in the same order.
    /// Both may be part of a recorded graph.
    pub fn begin_sums(&self, tensors: &[Tensor]) -> Result<()> {
        const OP: &str = "Communicator::begin_sums";
        for tensor in tensors {
            tensor.expect_dtype(OP, "a tensor to be added up", DType::F32)?;
            if tensor.device() != &self.device {
                let (expected, got) = (self.device.to_string(), tensor.device().to_string());
                return Err(Error::Device { op: OP, what: "a tensor to be added up", expected, got });
            }
        }
        let buffers: Vec<(u64, usize)> = tensors.iter().map(|t| (t.ptr(), t.elements())).collect();
        let Member { nccl, comm, context } = self.watch.link()?;
        let _turn = context.turn();
        self.side.follow()?;
        nccl.sum(*comm, &buffers, self.side.handle())
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
        self.watch.watched(f)
    }

    /// Leaves the other processes after all is done. Graphs with sums in them must be gone.
    pub fn leave(self) -> Result<()> {
        self.watched(|| self.device.synchronize())?;
        self.watch.end(|member| {
            let member = member.clone();
            within(self.timeout, "NCCL did not end", move || member.nccl.destroy(member.comm))
        })
    }
}

/// Runs `f` on a thread of its own and waits so long for it; afterwards the thread is left alone.
fn within<R: Send + 'static>(timeout: Duration, late: &str, f: impl FnOnce() -> Result<R> + Send + 'static) -> Result<R> {
    let (sender, done) = channel();
    let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || sender.send(f()));
    thread.map_err(|e| Error::Together(format!("no thread could be started: {e}")))?;
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
