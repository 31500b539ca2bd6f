//! How far a run is, what it tells as it goes, and how it ends.

use std::ops::Not;

use serde::{Deserialize, Serialize};

use super::recipe::Recipe;
use crate::error::{Error, Result};
use crate::tasks::training::Measure;

/// How far a run has come: what `state.json` holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RunProgress {
    /// Stage, from 0.
    pub stage: usize,
    /// Steps of this stage.
    pub step: u64,
    /// Steps of all stages.
    pub total: u64,
    /// Best score of this stage: an exact match, or of a loss exp(-loss).
    pub best: f64,
    /// Validations since then.
    pub waited: u64,
    /// The step has a validation that was not made yet.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub due: bool,
    /// The stage has ended: by its last step, by what was reached, or because nothing was gained.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub over: bool,
}

impl RunProgress {
    /// Refuses what no run of the recipe can have come to.
    pub(super) fn check(&self, recipe: &Recipe) -> Result<()> {
        let RunProgress { stage, step, total, best, waited, due, over } = *self;
        let Some(own) = recipe.stages.get(stage) else {
            let expected = format!("one of the recipe's {} stages, from 0", recipe.stages.len());
            return Err(Error::config("stage", &expected, stage));
        };
        if step > own.steps {
            return Err(Error::config("step", &format!("at most the {} steps of stage {stage}", own.steps), step));
        }
        let before = &recipe.stages[..stage];
        // A stage may end early, but not without a step.
        let most = before.iter().fold(0u64, |sum, s| sum.saturating_add(s.steps));
        if total < step || !(stage as u64..=most).contains(&(total - step)) {
            return Err(Error::config("total", &format!("{stage} to {most} steps before the {step} of stage {stage}"), total));
        }
        if !(0.0..=1.0).contains(&best) {
            return Err(Error::config("best", "a share from 0 to 1", best));
        }
        if waited > step {
            return Err(Error::config("waited", "at most as many validations as steps", waited));
        }
        if step == 0 && (due || over || best != 0.0) {
            return Err(Error::config("step", "at least 1 where something was judged", 0));
        }
        Ok(())
    }
}

/// What a run tells as it goes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A stage begins of which a person should know something.
    Note {
        /// How far the run is.
        progress: RunProgress,
        /// What there is to know.
        text: &'a str,
    },
    /// A step was made.
    Step {
        /// How far the run is.
        progress: RunProgress,
        /// Steps that the stage may have.
        steps: u64,
        /// What the stage is about.
        stage: &'a str,
        /// The batch's loss.
        loss: f32,
        /// Tokens of the batch.
        tokens: usize,
        /// How long it took, without waiting for its batch.
        seconds: f64,
    },
    /// Some texts of a validation were judged.
    Judged {
        /// Texts so far.
        texts: usize,
        /// Texts of the validation.
        of: usize,
    },
    /// A validation was made.
    Validation {
        /// How far the run is.
        progress: RunProgress,
        /// What the stage is about.
        stage: &'a str,
        /// What was counted.
        measure: Measure,
        /// The score, from 0 to 1, of which `measure` tells the meaning.
        score: f64,
    },
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    /// All stages are done.
    Finished {
        /// What validations counted.
        measure: Measure,
        /// Best score of the last stage.
        score: f64,
    },
    /// It was asked to stop; everything is saved.
    Stopped,
}
