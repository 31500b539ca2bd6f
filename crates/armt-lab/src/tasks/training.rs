//! What a stage of training learns, whatever its texts are made of.

use armt::random::Random;

use super::TaskBatch;
use super::retrieval::Retrieval;
use crate::error::Result;
use crate::tasks::capacity::stored_pairs;

/// Different lengths that texts of a varying number of pairs have.
const LENGTHS: usize = 25;

/// A task to learn: batches to learn from, and texts to be judged on. Equal generators give equal texts.
pub trait TrainingTask: Send + Sync {
    /// What the stage is about, in a few words: "50 pairs".
    fn name(&self) -> String;

    /// Its sizes by name, for logs.
    fn sizes(&self) -> Vec<(&'static str, usize)>;

    /// A batch to learn from.
    fn batch(&self, random: &mut Random) -> Result<TaskBatch>;

    /// So many texts with one question each.
    fn validation(&self, texts: usize, random: &mut Random) -> Result<TaskBatch>;

    /// What else follows from a share of right answers, by name.
    fn figures(&self, _exact_match: f64) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}

/// Associative retrieval with up to so many pairs.
#[derive(Clone, Copy, Debug)]
pub struct RetrievalTraining {
    /// The task.
    pub task: Retrieval,
    /// Pairs of a text.
    pub pairs: usize,
    /// Questions after them, in training.
    pub questions: usize,
    /// Texts of a batch.
    pub batch: usize,
    /// Whether each batch has a random number of pairs, up to `pairs`.
    pub vary: bool,
}

impl TrainingTask for RetrievalTraining {
    fn name(&self) -> String {
        format!("{} pair{}", self.pairs, if self.pairs == 1 { "" } else { "s" })
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![("pairs", self.pairs)]
    }

    fn batch(&self, random: &mut Random) -> Result<TaskBatch> {
        let pairs = if self.vary { some_of(self.pairs, random) } else { self.pairs };
        self.task.batch_asking(pairs, self.questions, self.batch, random)
    }

    fn validation(&self, texts: usize, random: &mut Random) -> Result<TaskBatch> {
        self.task.batch(self.pairs, texts, random)
    }

    fn figures(&self, exact_match: f64) -> Vec<(&'static str, f64)> {
        vec![("stored", stored_pairs(exact_match, self.pairs, self.task.values()))]
    }
}

/// A random number up to `most`. Of large ones there are only so many: a step is recorded once for each.
pub(super) fn some_of(most: usize, random: &mut Random) -> usize {
    (1 + random.below(most)).next_multiple_of(most.div_ceil(LENGTHS)).min(most)
}
