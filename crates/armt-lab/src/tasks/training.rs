//! What a run learns, whatever its texts are made of: the tasks that a recipe can name, and what the trainer asks of each.
//!
//! A task is a line of [`SETTINGS`](super::SETTINGS) and a file with its keys. `[task]` of a recipe and what a `[[stage]]` has beyond the keys of every stage
//! are read by the task itself, as [`Lessons`]; opened, with the books and tokenizers that they name, they are [`TaskData`]; of each stage
//! that gives a [`TrainingTask`].

use std::any::Any;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use armt::random::Random;
use armt::text::Tokenizer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::TaskBatch;
use crate::error::{Error, Result};

/// Different lengths that texts of a varying number of pairs have.
const LENGTHS: usize = 25;

/// A task that a recipe can name.
pub struct Setting {
    /// What `task.setting` says.
    pub name: &'static str,
    /// Reads the task's own keys from TOML: `[task]`, and a `[[stage]]` with the keys that not every stage has, for each.
    pub read: fn(&str) -> Result<Arc<dyn Lessons>, toml::de::Error>,
}

/// The keys of a task in a recipe: `[task]`, and its own of each `[[stage]]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys<T, S> {
    /// `[task]`.
    pub task: T,
    /// `[[stage]]`.
    #[serde(rename = "stage")]
    pub stages: Vec<S>,
}

/// Reads a task's keys as a type that has them.
pub fn read<L: Lessons + DeserializeOwned>(text: &str) -> Result<Arc<dyn Lessons>, toml::de::Error> {
    Ok(Arc::new(toml::from_str::<L>(text)?))
}

/// What a recipe says of its task, for all stages. Stages are numbered from 0.
pub trait Lessons: Any + Debug + Send + Sync {
    /// Every key with its value, defaults too: `{"task": {..}, "stage": [{..}, ..]}`.
    fn keys(&self) -> Result<Value>;

    /// Refuses what `[task]` must not say, by its key.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Refuses keys of `[task]` that only a fresh model can have, where the run begins from a folder.
    fn check_for_folder(&self) -> Result<()> {
        Ok(())
    }

    /// Refuses what a stage must not say, by its key.
    fn check_stage(&self, stage: usize, sizes: Sizes) -> Result<()>;

    /// Tokens of a segment.
    fn segment_size(&self, stage: usize) -> usize;

    /// Whether texts say which of their tokens are background: [`Targets::BACKGROUND`](armt::recurrence::Targets::BACKGROUND).
    fn knows_background(&self) -> bool {
        false
    }

    /// What stands between a question and its answer, for a model that has `own` between them, or nothing yet.
    fn after_question(&self, own: Option<&str>) -> Option<String> {
        own.map(String::from)
    }

    /// Opens what the texts are made of, for the model that the run begins from where it does. What is missing is an error that says where
    /// it was looked for; tokens that the model does not have are one too.
    fn open(&self, begun: Option<&Begun<'_>>) -> Result<Box<dyn TaskData>>;
}

/// The model that a run begins from.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Begun<'a> {
    /// Its folder.
    pub folder: &'a Path,
    /// Its tokens.
    pub vocab: usize,
    /// Its configuration.
    pub config: &'a armt::config::Config,
}

/// How many texts a stage has at a time, as every stage says it.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Texts of a batch.
    pub batch: usize,
    /// Texts that are judged at a time.
    pub judged: usize,
    /// Whether each batch has a random length, up to the stage's.
    pub vary: bool,
    /// Whether texts go on from the memory of those before them, at least in some steps.
    pub carried: bool,
}

/// What the texts of a task are made of, opened once for a run.
pub trait TaskData: Send + Sync {
    /// Tokens of a model for it.
    fn vocabulary(&self) -> usize;

    /// The token that ends a text or an answer.
    fn end_token(&self) -> i32;

    /// What a model needs beside its weights to be asked in words.
    fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        None
    }

    /// A stage's texts. Sizes that do not fit together are an error.
    fn task(&self, stage: usize, sizes: Sizes) -> Result<Box<dyn TrainingTask>>;
}

/// What a validation counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// The share of texts whose whole answer is right.
    ExactMatch,
    /// The mean loss of the positions that are asked for.
    Loss,
}

impl Measure {
    /// What a validation's score says in words. A score is from 0 to 1 and the better the higher: the share itself, or of a loss exp(-loss),
    /// the mean probability of the right token.
    pub fn told(self, score: f64) -> String {
        match self {
            Measure::ExactMatch => format!("exact match {score:.3}"),
            Measure::Loss => format!("loss {:.4}", loss_of(score)),
        }
    }

    /// A score by the names that logs have for it.
    pub fn figures(self, score: f64) -> Vec<(&'static str, f64)> {
        match self {
            Measure::ExactMatch => vec![("exact_match", score)],
            Measure::Loss => vec![("loss", loss_of(score)), ("perplexity", 1.0 / score)],
        }
    }
}

fn loss_of(score: f64) -> f64 {
    // Not -0.
    0.0 - score.ln()
}

/// A batch that follows the one before it.
#[derive(Clone, Debug)]
pub struct Window {
    /// The texts.
    pub asked: TaskBatch,
    /// Of each text, whether it is the beginning of one, and does not go on from the text that stood in its place before.
    pub begins: Vec<bool>,
}

/// Batches one after the other.
pub type Windows<'a> = Box<dyn Iterator<Item = Result<Window>> + Send + 'a>;

/// A task to learn: batches to learn from, and texts to be judged on. Equal generators give equal texts.
pub trait TrainingTask: Send + Sync {
    /// What the stage is about, in a few words: "50 pairs".
    fn name(&self) -> String;

    /// What a person should know of the stage before it begins, where its texts come from files: how many there are to learn and, of
    /// `samples` that are asked for, to judge, and what was left out.
    fn note(&self, _samples: usize) -> Option<String> {
        None
    }

    /// Its sizes by name, for logs.
    fn sizes(&self) -> Vec<(&'static str, usize)>;

    /// A batch to learn from.
    fn batch(&self, random: &mut Random) -> Result<TaskBatch>;

    /// Batches whose texts go on from those of the one before, for a task whose texts are longer than a batch: taken in place of
    /// [`TrainingTask::batch`], from the first on. `None` where every batch is drawn by itself.
    fn in_order(&self, _seed: u64) -> Result<Option<Windows<'_>>> {
        Ok(None)
    }

    /// What a validation counts.
    fn measure(&self) -> Measure {
        Measure::ExactMatch
    }

    /// Texts that a validation has where so many are asked for.
    fn judged(&self, samples: usize) -> Result<usize> {
        Ok(samples)
    }

    /// So many texts to be judged on, after the first `from`, with one question each.
    fn validation(&self, from: usize, texts: usize, random: &mut Random) -> Result<TaskBatch>;

    /// Texts to be judged on that go on from those of the batch before, `texts` side by side or as many as there are, for a task whose memories
    /// are carried through them in training too: taken in place of [`TrainingTask::validation`].
    fn validation_in_order(&self, _texts: usize) -> Result<Option<Windows<'_>>> {
        Ok(None)
    }

    /// What else follows from a score, by name.
    fn figures(&self, _score: f64) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}

/// A random number up to `most`. Of large ones there are only so many: a step is recorded once for each.
pub(super) fn some_of(most: usize, random: &mut Random) -> usize {
    (1 + random.below(most)).next_multiple_of(most.div_ceil(LENGTHS)).min(most)
}

/// Refuses the first of some numbers that is 0.
pub(super) fn expect_positive(sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((key, _)) => Err(Error::config(key, "at least 1", 0)),
        None => Ok(()),
    }
}

/// A task's keys as a recipe's record has them.
pub(super) fn keys_of(keys: &impl Serialize) -> Result<Value> {
    // Over its text, so that a number is as people write it.
    let json = |e: serde_json::Error| Error::Toml(e.to_string());
    serde_json::from_str(&serde_json::to_string(keys).map_err(json)?).map_err(json)
}
