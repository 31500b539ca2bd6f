//! What a run begins with, for whoever makes its steps himself: the model before the first step, and the batches that the trainer's steps
//! learn from.

use armt::config::Config;
use armt::engine::{DType, Device};
use armt::model::Model;
use armt::random::Random;

use super::origin::Origin;
use super::recipe::{ModelRecipe, Recipe};
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::training::{Begun, TaskData, TrainingTask};

/// The first stage of a recipe, opened.
pub struct FirstStage {
    config: Config,
    origin: Option<Origin>,
    task: Box<dyn TrainingTask>,
    seed: u64,
}

impl FirstStage {
    /// Opens what the first stage's texts are made of. A recipe that trains an adapter is refused: its model is not all that it changes.
    pub fn open(recipe: &Recipe) -> Result<Self> {
        if recipe.train.adapts() {
            return Err(Error::unfit("a recipe that trains all of a model", "one that trains an adapter"));
        }
        let origin = match &recipe.model {
            ModelRecipe::Fresh(_) | ModelRecipe::Recurrence(_) => None,
            ModelRecipe::From(from) => Some(Origin::open(from, recipe.memory.as_ref())?),
        };
        let (data, base) = open(recipe, origin.as_ref())?;
        let sizes = recipe.sizes(0).ok_or_else(|| Error::config("stage", "at least one", "none"))?;
        Ok(FirstStage { config: recipe.config(0, &base), origin, task: data.task(0, sizes)?, seed: recipe.seed })
    }

    /// The model before the first step.
    pub fn model(&self, dtype: DType, device: &Device) -> Result<Model> {
        let Some(origin) = &self.origin else { return Ok(Model::fresh(self.config.clone(), self.seed, dtype, device)?) };
        let model = Model::blank(self.config.clone(), dtype, device)?;
        model.set_weights(&origin.weights()?)?;
        Ok(model)
    }

    /// What a step learns from, from 0. Of a task whose texts follow one another all before it are drawn too.
    pub fn batch(&self, step: u64) -> Result<TaskBatch> {
        match self.task.in_order(seed(self.seed, 1, 0, 0).bits())? {
            Some(mut windows) => match windows.nth(step as usize) {
                Some(window) => Ok(window?.asked),
                None => Err(Error::input("step", "one that there are texts for", step)),
            },
            None => self.task.batch(&mut seed(self.seed, 1, 0, step)),
        }
    }
}

/// What a recipe's texts are made of, and the configuration of its model but for the segments, which are the stages'.
pub(super) fn open(recipe: &Recipe, origin: Option<&Origin>) -> Result<(Box<dyn TaskData>, Config)> {
    let begun = origin.map(|o| Begun { folder: o.path(), vocab: o.vocab(), config: o.config() });
    let data = recipe.lessons().open(begun.as_ref())?;
    let fresh = || recipe.fresh(data.vocabulary(), data.end_token());
    let base = origin.map_or_else(fresh, |o| Ok(o.config().clone()))?;
    Ok((data, base))
}

/// A seed for one purpose at one place of a run.
pub(super) fn seed(run: u64, purpose: u64, stage: usize, step: u64) -> Random {
    let mut random = Random::new(run ^ (purpose << 56) ^ ((stage as u64) << 40) ^ step.wrapping_mul(0x9e37_79b9));
    Random::new(random.bits())
}
