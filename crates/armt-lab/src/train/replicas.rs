//! Several processes that train one model together, each on its own part of every batch.
//!
//! All draw the same batches, whatever their number, and begin with the same parameters. Gradients are added up over all of
//! them, so that each makes the same update and the parameters stay equal: on GPUs by NCCL, as part of the step and while the way back
//! still runs ([`Replicas::communicator`]), or else by any function that adds up numbers of the host. The first process writes the run's folder, which the
//! others only read.

use std::hash::{DefaultHasher, Hash, Hasher};

use armt::engine::Communicator;

use crate::error::{Error, Result};
use crate::train::recipe::Recipe;

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

/// Refuses to train where not all processes were given one recipe: their models would come apart without a word.
pub(super) fn expect_one_recipe(replicas: &dyn Replicas, recipe: &Recipe) -> Result<()> {
    if replicas.world() == 1 {
        return Ok(());
    }
    let mut hasher = DefaultHasher::new();
    recipe.record()?.hash(&mut hasher);
    // In pieces whose sums are exact.
    let own = hasher.finish().to_le_bytes().map(f32::from);
    let mut sums = own;
    replicas.add_up(&mut sums)?;
    match sums == own.map(|piece| piece * replicas.world() as f32) {
        true => Ok(()),
        false => Err(Error::config("recipe", "one for all processes that train together", "several")),
    }
}
