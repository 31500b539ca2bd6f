//! Text as a task of recipes.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use armt::engine::machine::expect_room;
use armt::text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::TextTraining;
use crate::error::{Error, Result};
use crate::tasks::asked::Text;
use crate::tasks::documents::{Document, Documents};
use crate::tasks::training::{self, Begun, Keys, Lessons, Sizes, TaskData, TrainingTask, expect_positive, keys_of};
use crate::tasks::words::Words;

/// Language modelling.
pub const SETTING: training::Setting = training::Setting { name: "text", read: training::read::<TextLessons> };

/// What a recipe says of text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TextLessons(Keys<TaskKeys, StageKeys>);

/// `[task]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskKeys {
    setting: String,
    /// Files to learn from: names, folders and patterns (`books/**/*.txt`).
    train: Vec<String>,
    /// Files to be judged on.
    valid: Vec<String>,
    /// The field of a row that has its text; `text` if not given.
    #[serde(default = "text")]
    field: String,
    /// What one document is, `file`, `row` or `line`; if not given a row of a table and a text as a whole.
    #[serde(default)]
    document: Option<Document>,
    /// Folder of a tokenizer; if not given that of `model.from`, or else GPT-2's.
    #[serde(default)]
    bpe: Option<PathBuf>,
}

fn text() -> String {
    "text".into()
}

/// `[[stage]]`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StageKeys {
    /// Tokens of a segment.
    segment: usize,
    /// Segments of a window.
    segments: usize,
    /// Which tokens are asked for, `all` or `last`; all if not given.
    #[serde(default)]
    loss: LossOn,
}

/// Which tokens of a window are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LossOn {
    /// Every token but the first.
    #[default]
    All,
    /// Those of the last segment, for which the memory has most to give.
    Last,
}

impl LossOn {
    /// A window with what is not asked for left out.
    pub(super) fn of(self, mut text: Text, segment: usize) -> Text {
        if self == LossOn::Last {
            // The last that is asked anything: a document may end before its window.
            let last = text.next.iter().rposition(|next| *next >= 0).unwrap_or(0);
            let first = last / segment * segment;
            text.next[..first].fill(-1);
        }
        text
    }
}

impl TextLessons {
    fn stage(&self, stage: usize) -> Result<StageKeys> {
        let known = self.0.stages.get(stage).copied();
        known.ok_or_else(|| Error::input("stage", format!("one of {}", self.0.stages.len()), stage))
    }
}

impl Lessons for TextLessons {
    fn keys(&self) -> Result<Value> {
        keys_of(&self.0)
    }

    fn check(&self) -> Result<()> {
        let TaskKeys { train, valid, .. } = &self.0.task;
        match [("task.train", train), ("task.valid", valid)].iter().find(|(_, files)| files.is_empty()) {
            Some((key, _)) => Err(Error::config(key, "at least one file", "none")),
            None => Ok(()),
        }
    }

    fn check_stage(&self, stage: usize, sizes: Sizes) -> Result<()> {
        let StageKeys { segment, segments, .. } = self.stage(stage)?;
        expect_positive(&[("segment", segment), ("segments", segments)])?;
        for texts in [sizes.batch, sizes.judged] {
            expect_room("segments by texts", &[texts, segments, segment, 2 * size_of::<i32>()])?;
        }
        Ok(())
    }

    fn segment_size(&self, stage: usize) -> usize {
        self.stage(stage).map_or(0, |keys| keys.segment)
    }

    fn open(&self, begun: Option<&Begun<'_>>) -> Result<Box<dyn TaskData>> {
        let TaskKeys { train, valid, field, document, bpe, .. } = &self.0.task;
        let documents = |files: &[String]| Documents::open(files, field, *document);
        Ok(Box::new(Texts {
            lessons: self.clone(),
            train: documents(train)?,
            valid: documents(valid)?,
            words: Words::open(bpe.as_deref(), begun)?,
        }))
    }
}

/// The texts of a recipe.
struct Texts {
    lessons: TextLessons,
    train: Documents,
    valid: Documents,
    words: Words,
}

impl TaskData for Texts {
    fn vocabulary(&self) -> usize {
        self.words.tokenizer.vocabulary()
    }

    fn end_token(&self) -> i32 {
        self.words.end
    }

    fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        Some(&self.words.tokenizer)
    }

    fn task(&self, stage: usize, sizes: Sizes) -> Result<Box<dyn TrainingTask>> {
        let StageKeys { segment, segments, loss } = self.lessons.stage(stage)?;
        Ok(Box::new(TextTraining {
            train: self.train.clone(),
            valid: self.valid.clone(),
            tokenizer: self.words.tokenizer.clone(),
            end: self.words.end,
            segment,
            segments,
            loss,
            carried: sizes.carried,
            batch: sizes.batch,
            vary: sizes.vary,
            judged: OnceLock::new(),
        }))
    }
}
