//! Where the facts come from: the published files or the simulator, by number, so that any one can be had without the others.

use std::path::Path;

use armt::random::Random;

use crate::error::Result;
use crate::tasks::babi::file::{self, Split};
use crate::tasks::babi::{Sample, Task, simulate};

/// The stories of a task, one question each, by number from 0.
pub struct Stories {
    task: Task,
    seed: u64,
    /// Those of the file in the order of the seed; none where they are simulated.
    published: Option<Vec<Sample>>,
}

impl Stories {
    /// The questions of a published file, in an order that the seed says; each comes once before any comes again. Errors name the
    /// file and the line.
    pub fn published(folder: &Path, task: Task, split: Split, seed: u64) -> Result<Self> {
        let mut samples = file::samples(folder, task, split)?;
        super::shuffle(&mut samples, Random::of(&[seed, task.number() as u64]));
        Ok(Stories { task, seed, published: Some(samples) })
    }

    /// Simulated ones, as many as there are numbers. A task above qa5 is refused.
    pub fn simulated(task: Task, seed: u64) -> Result<Self> {
        simulate::story(task, &mut Random::new(0))?;
        Ok(Stories { task, seed, published: None })
    }

    /// Their task.
    pub fn task(&self) -> Task {
        self.task
    }

    /// How many there are before they come again; `None` where there are as many as numbers.
    pub fn count(&self) -> Option<usize> {
        self.published.as_ref().map(Vec::len)
    }

    /// Their seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Story `number`, or where that one does not serve another in its place: the n-th `attempt`, from 0.
    pub fn get(&self, number: u64, attempt: u64) -> Result<Sample> {
        let mut random = Random::of(&[self.seed, self.task.number() as u64, number, attempt]);
        match &self.published {
            Some(samples) if attempt == 0 => Ok(samples[(number % samples.len() as u64) as usize].clone()),
            Some(samples) => Ok(samples[random.below(samples.len())].clone()),
            None => {
                let story = simulate::story(self.task, &mut random)?;
                Ok(story.sample(random.below(story.questions.len())))
            }
        }
    }
}
