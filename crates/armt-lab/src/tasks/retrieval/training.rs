//! Associative retrieval as a task of recipes.

use std::sync::Arc;

use armt::random::Random;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{EOS, Retrieval, SYMBOLS, Setting, VOCAB};
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::capacity::stored_pairs;
use crate::tasks::training::{self, Begun, Keys, Lessons, Sizes, TaskData, TrainingTask, expect_positive, keys_of, some_of};

/// Keys that are all different.
pub const REMEMBER: training::Setting = training::Setting { name: "remember", read: training::read::<RetrievalLessons> };
/// Keys that come again with new values.
pub const REWRITE: training::Setting = training::Setting { name: "rewrite", read: training::read::<RetrievalLessons> };

/// What a recipe says of retrieval.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RetrievalLessons(Keys<TaskKeys, StageKeys>);

/// `[task]`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskKeys {
    setting: Setting,
    /// Symbols of a value.
    #[serde(default = "one")]
    value_size: usize,
    /// Different symbols that keys and values are made of: 2 to 100, and 16 if not given.
    #[serde(default = "the_authors_symbols")]
    symbols: usize,
    /// Pairs and questions that share a segment, in stages that do not say otherwise: 1 in the paper.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    together: usize,
}

/// `[[stage]]`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StageKeys {
    /// Pairs to remember.
    pairs: usize,
    /// Symbols of a key; 1 if not given.
    #[serde(default)]
    key_size: Option<usize>,
    /// Another number of different symbols for this stage: few are told apart sooner.
    #[serde(default)]
    symbols: Option<usize>,
    /// Questions at the end of a text, in training: 1 in the paper, and in validation always.
    #[serde(default = "one")]
    questions: usize,
    /// Another number of pairs and questions that share a segment. Where all of a text do, attention finds the answer without a memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    together: Option<usize>,
}

fn one() -> usize {
    1
}

// Runs of before do not have the key in their folder.
fn is_one(n: &usize) -> bool {
    *n == 1
}

fn the_authors_symbols() -> usize {
    SYMBOLS
}

impl RetrievalLessons {
    /// The task of a stage, from 0, and its pairs; `None` if there is no such stage.
    pub fn stage(&self, stage: usize) -> Option<(Retrieval, usize)> {
        let TaskKeys { setting, value_size, symbols, .. } = self.0.task;
        let own = self.0.stages.get(stage)?;
        let (key_size, symbols) = (own.key_size.unwrap_or(1), own.symbols.unwrap_or(symbols));
        Some((Retrieval { setting, key_size, value_size, symbols }, own.pairs))
    }

    /// Pairs and questions that share a segment of a stage.
    fn together(&self, own: &StageKeys) -> usize {
        own.together.unwrap_or(self.0.task.together)
    }

    fn known(&self, stage: usize) -> Result<(Retrieval, StageKeys)> {
        let known = self.stage(stage).zip(self.0.stages.get(stage));
        let known = known.map(|((task, _), keys)| (task, *keys));
        known.ok_or_else(|| Error::input("stage", format!("one of {}", self.0.stages.len()), stage))
    }
}

impl Lessons for RetrievalLessons {
    fn keys(&self) -> Result<Value> {
        keys_of(&self.0)
    }

    fn check(&self) -> Result<()> {
        let TaskKeys { setting, value_size, symbols, .. } = self.0.task;
        Retrieval { setting, key_size: 1, value_size, symbols }.check_symbols()
    }

    fn check_stage(&self, stage: usize, sizes: Sizes) -> Result<()> {
        let (task, own) = self.known(stage)?;
        let StageKeys { pairs, key_size, questions, .. } = own;
        let named =
            [("pairs", pairs), ("key_size", key_size.unwrap_or(1)), ("questions", questions), ("together", self.together(&own))];
        expect_positive(&named)?;
        task.check(pairs)?;
        task.expect_room(pairs, questions, sizes.batch)?;
        task.expect_room(pairs, 1, sizes.judged)
    }

    fn segment_size(&self, stage: usize) -> usize {
        self.known(stage).map_or(0, |(task, keys)| task.segment_size().saturating_mul(self.together(&keys)))
    }

    fn open(&self, begun: Option<&Begun<'_>>) -> Result<Box<dyn TaskData>> {
        match begun.filter(|b| EOS as usize >= b.vocab) {
            Some(small) => Err(Error::config("model.from", &format!("a model of more than {EOS} tokens"), small.vocab)),
            None => Ok(Box::new(Symbols(Arc::new(self.clone())))),
        }
    }
}

/// Texts of nothing but symbols.
struct Symbols(Arc<RetrievalLessons>);

impl TaskData for Symbols {
    fn vocabulary(&self) -> usize {
        VOCAB
    }

    fn end_token(&self) -> i32 {
        EOS
    }

    fn task(&self, stage: usize, sizes: Sizes) -> Result<Box<dyn TrainingTask>> {
        let (task, StageKeys { pairs, questions, .. }) = self.0.known(stage)?;
        Ok(Box::new(RetrievalTraining { task, pairs, questions, batch: sizes.batch, vary: sizes.vary }))
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

    fn validation(&self, _from: usize, texts: usize, random: &mut Random) -> Result<TaskBatch> {
        self.task.batch(self.pairs, texts, random)
    }

    fn figures(&self, exact_match: f64) -> Vec<(&'static str, f64)> {
        vec![("stored", stored_pairs(exact_match, self.pairs, self.task.values()))]
    }
}
