//! Language modelling on a user's texts: every token is predicted from those before it, in its segment and through the memory.
//!
//! A batch has so many places side by side, each with a window of n segments of S tokens. In each place documents follow one another; a window
//! that does not begin a document goes on where the window before it in its place ended. Where a stage carries memories on (`carry`), such a
//! window goes on from its document's memory too, a document's last window is filled up, and each document begins with an empty memory.
//! Where it does not, documents are joined, with the end token between them, so that windows are full.
//!
//! A stage that carries memories on is judged so too: documents from their beginnings, the memory going on from window to window.
//!
//! Files come in an order that is drawn anew each time all were read, documents in that of their file; the first of each place is taken up
//! somewhere in its beginning, so that places with the same file have other windows of it. All follows from the seed and the step: a run that
//! is resumed passes over the windows that it had.

mod lessons;
mod windows;

pub use self::lessons::{LossOn, SETTING, TextLessons};
pub use self::windows::Lanes;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use armt::random::Random;
use armt::text::Tokenizer;

use super::TaskBatch;
use super::asked::Text;
use super::documents::Documents;
use super::training::{Measure, TrainingTask, Windows};
use crate::error::{Error, Result};

/// Texts in windows of whole segments.
pub struct TextTraining {
    /// What is learned from.
    pub train: Documents,
    /// What is judged on.
    pub valid: Documents,
    /// Makes tokens of them.
    pub tokenizer: Arc<Tokenizer>,
    /// Comes between documents.
    pub end: i32,
    /// Tokens of a segment, S.
    pub segment: usize,
    /// Segments of a window, n.
    pub segments: usize,
    /// Which tokens are asked for.
    pub loss: LossOn,
    /// Whether windows go on from their document's memory.
    pub carried: bool,
    /// Places side by side.
    pub batch: usize,
    /// Whether each batch has a random number of segments, up to `segments`.
    pub vary: bool,
    /// Windows to be judged on, once they were read.
    judged: OnceLock<Vec<Text>>,
}

impl TextTraining {
    /// Windows to be judged on: the first of the validation's documents, at most `samples`, and none that is not full unless it is the only
    /// one.
    fn windows(&self, samples: usize) -> Result<&[Text]> {
        if self.judged.get().is_none() {
            let length = self.segment * self.segments;
            let mut lane = windows::Lane::once(&self.valid, &self.tokenizer, self.end)?;
            let mut windows = Vec::new();
            while windows.len() < samples {
                let Some(text) = lane.joined(length)? else { break };
                if text.ids.len() < length && !windows.is_empty() {
                    break;
                }
                windows.push(self.loss.of(text, self.segment));
            }
            let _ = self.judged.set(windows);
        }
        match self.judged.get().map(Vec::as_slice) {
            Some([]) | None => Err(Error::config("task.valid", "texts of at least two tokens", "none")),
            Some(windows) => Ok(&windows[..samples.min(windows.len())]),
        }
    }
}

impl TrainingTask for TextTraining {
    fn name(&self) -> String {
        let onward = if self.carried { ", from their document's memory" } else { "" };
        format!("text in {} x {} tokens{onward}", self.segments, self.segment)
    }

    /// Files that are judged on and learned from, by whatever names: of these a loss says what was learned by heart.
    fn note(&self, _samples: usize) -> Option<String> {
        let places = |documents: &Documents| documents.files().iter().filter_map(|file| file.canonicalize().ok()).collect();
        let (learned, judged): (HashSet<PathBuf>, HashSet<PathBuf>) = (places(&self.train), places(&self.valid));
        let common = judged.intersection(&learned).count();
        let of = |n: usize| if n == 1 { "1 file".to_string() } else { format!("{n} files") };
        (common > 0).then(|| format!("of {} of task.valid {common} are in task.train too", of(judged.len())))
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![("segments", self.segments), ("segment", self.segment)]
    }

    /// The first windows of a drawn order.
    fn batch(&self, random: &mut Random) -> Result<TaskBatch> {
        let mut windows = self.in_order(random.bits())?;
        let first = windows.as_mut().and_then(Iterator::next);
        first.map_or_else(|| Err(Error::config("task.train", "texts", "none")), |window| Ok(window?.asked))
    }

    fn in_order(&self, seed: u64) -> Result<Option<Windows<'_>>> {
        Ok(Some(Box::new(Lanes::new(self, seed)?)))
    }

    fn measure(&self) -> Measure {
        Measure::Loss
    }

    fn judged(&self, samples: usize) -> Result<usize> {
        Ok(match self.carried {
            true => samples,
            false => self.windows(samples)?.len(),
        })
    }

    fn validation_in_order(&self, texts: usize) -> Result<Option<Windows<'_>>> {
        Ok(match self.carried {
            true => Some(Box::new(Lanes::judged(self, texts)?)),
            false => None,
        })
    }

    fn validation(&self, from: usize, texts: usize, _random: &mut Random) -> Result<TaskBatch> {
        let windows = self.windows(from + texts)?;
        let some = windows.get(from..).filter(|some| !some.is_empty());
        let some = some.ok_or_else(|| Error::input("texts", format!("at most {}", windows.len()), from + texts))?;
        Ok(TaskBatch::of(some.to_vec(), self.end))
    }
}
