//! Several processes that train one model together, each on its own part of every batch.
//!
//! All draw the same batches, whatever their number, and begin with the same parameters. Gradients are added up over all of
//! them, so that each makes the same update and the parameters stay equal: on GPUs by NCCL, as part of the step and while the way back
//! still runs ([`Replicas::communicator`]), or else by any function that adds up numbers of the host. The first process writes the run's folder, which the
//! others only read.

use armt::engine::Communicator;

use crate::error::Result;

/// The processes, as one of them sees them.
pub trait Replicas: Sync {
    /// Its own number, from 0.
    fn rank(&self) -> usize;

    /// How many there are.
    fn world(&self) -> usize;

    /// Replaces numbers by their sums over all processes, which all ask for as many at the same time. Where another process is gone it is an error,
    /// after some time at most.
    fn add_up(&self, values: &mut [f32]) -> Result<()>;

    /// What adds up gradients on the GPUs themselves. Without it they go over the host.
    fn communicator(&self) -> Option<&Communicator> {
        None
    }
}

impl Replicas for Communicator {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world(&self) -> usize {
        self.world()
    }

    fn add_up(&self, values: &mut [f32]) -> Result<()> {
        Ok(self.add_up(values)?)
    }

    fn communicator(&self) -> Option<&Communicator> {
        Some(self)
    }
}

/// One process alone.
pub struct Alone;

impl Replicas for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn add_up(&self, _values: &mut [f32]) -> Result<()> {
        Ok(())
    }
}

/// Waits until all processes have come here.
pub(super) fn meet(replicas: &dyn Replicas) -> Result<()> {
    if replicas.world() == 1 { Ok(()) } else { replicas.add_up(&mut [0.0]) }
}
