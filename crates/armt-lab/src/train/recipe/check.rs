//! What a recipe must fulfil beyond its form. A mistake is named with its stage, line and key.

use super::source::Source;
use super::{EvalRecipe, MemoryRecipe, ModelRecipe, Only, Recipe, Stage, expect_importance};
use crate::error::{Error, Result};

/// A vocabulary to check the shape of a fresh model with, before the task's own is known.
const TOKENS: usize = 2;

impl Recipe {
    /// Refuses what cannot be trained, with the place of the key in what the recipe was read from.
    pub(super) fn check(&self, source: &Source) -> Result<()> {
        self.check_sections(&|path, reason| source.error(path, "", reason))?;
        self.check_task().map_err(|e| match &e {
            Error::Config { key, .. } if key.starts_with("task.") => source.error(&key.clone(), "", e),
            Error::Config { key, .. } => source.error(&format!("task.{key}"), "task", e),
            _ => source.error("task", "task", e),
        })?;
        for (i, stage) in self.stages.iter().enumerate() {
            let number = i + 1;
            let checked = self.check_stage(i, stage);
            checked.map_err(|e| source.error(&format!("stage.{number}"), &format!("stage {number}"), e))?;
        }
        Ok(())
    }

    /// What stands outside the stages; `at` gives a key that does not fit its place.
    fn check_sections(&self, at: &dyn Fn(&str, Error) -> Error) -> Result<()> {
        let refuse = |key: &str, expected: &str, got: &dyn std::fmt::Display| Err(at(key, Error::config(key, expected, got)));
        if self.keep == Some(0) {
            return refuse("stages", "at least 1", &0);
        }
        if self.stages.is_empty() {
            return refuse("stage", "at least one [[stage]]", &"none");
        }
        let o = &self.optimizer;
        for (key, number) in [
            ("optimizer.weight_decay", o.weight_decay),
            ("optimizer.clip_value", o.clip_value),
            ("optimizer.clip_norm", o.clip_norm),
            ("optimizer.warmup", o.warmup),
            ("optimizer.decay", o.decay),
        ] {
            if !(number >= 0.0 && number.is_finite()) {
                return refuse(key, "a number of at least 0", &number);
            }
        }
        if o.warmup > 1.0 {
            return refuse("optimizer.warmup", "a share from 0 to 1", &o.warmup);
        }
        match &self.model {
            ModelRecipe::Fresh(fresh) if !(fresh.init >= 0.0 && fresh.init.is_finite()) => {
                return refuse("model.init", "a number of at least 0", &fresh.init);
            }
            _ => {}
        }
        if o.clip_value > 0.0 && o.clip_norm > 0.0 {
            return refuse("optimizer", "clip_value or clip_norm", &"both");
        }
        if o.skip > 0 && o.clip_norm == 0.0 {
            return refuse("optimizer.skip", "0 without clip_norm", &o.skip);
        }
        if !(o.lr > 0.0 && o.lr.is_finite()) {
            return refuse("optimizer.lr", "a positive number", &o.lr);
        }
        let EvalRecipe { every, samples, batch, .. } = self.eval;
        if every == 0 || samples == 0 || batch == 0 {
            return refuse("eval", "every, samples and batch of at least 1", &"0");
        }
        if !matches!(self.model, ModelRecipe::From(_)) {
            let from = "model.from with weights that stay as they are";
            if self.train.only == Only::Memory {
                return refuse("train.only", &format!("all, or {from}"), &"memory");
            }
            if self.train.lora.is_some() {
                return refuse("train.lora", &format!("nothing, or {from}"), &"LoRA of a fresh model");
            }
            if let Some(adapter) = &self.train.adapter {
                return refuse("train.adapter", "nothing, or model.from, which it is an adapter of", &adapter.display());
            }
        }
        if let Some(lora) = &self.train.lora {
            lora.check().map_err(|e| at("train.lora", e.into()))?;
        }
        match (&self.model, &self.memory) {
            (ModelRecipe::From(_), _) | (_, Some(MemoryRecipe::Whole(_))) | (ModelRecipe::Recurrence(_), None) => Ok(()),
            (_, None) => refuse("memory", "a section [memory]", &"none"),
            (_, Some(MemoryRecipe::Written { .. })) => {
                refuse("memory.kind", "a kind of memory, where no model.from has one", &"none")
            }
        }
    }

    fn check_task(&self) -> Result<()> {
        if matches!(self.model, ModelRecipe::From(_)) {
            self.lessons.check_for_folder()?;
        }
        self.lessons.check()
    }

    fn check_stage(&self, number: usize, stage: &Stage) -> Result<()> {
        if !(0.0..=1.0).contains(&stage.carry) {
            return Err(Error::config("carry", "a share from 0 to 1", stage.carry));
        }
        if let Some((key, _)) = [("batch", stage.batch), ("accumulate", stage.accumulate)].iter().find(|(_, value)| *value == 0) {
            return Err(Error::config(key, "at least 1", 0));
        }
        if stage.steps == 0 {
            return Err(Error::config("steps", "at least 1", 0));
        }
        if !stage.batch.is_multiple_of(stage.accumulate) {
            let divisor = format!("a divisor of the batch of {}", stage.batch);
            return Err(Error::config("accumulate", &divisor, stage.accumulate));
        }
        if let Some(lr) = stage.lr.filter(|lr| !(*lr > 0.0 && lr.is_finite())) {
            return Err(Error::config("lr", "a positive number", lr));
        }
        if let Some(decay) = stage.decay.filter(|decay| !(*decay >= 0.0 && decay.is_finite())) {
            return Err(Error::config("decay", "a number of at least 0", decay));
        }
        let costs = stage.backprop(self.backprop);
        for (key, cost) in [("sparse", costs.sparse), ("background", costs.background)] {
            if !(cost >= 0.0 && cost.is_finite()) {
                return Err(Error::config(key, "a number of at least 0", cost));
            }
        }
        if costs.background > 0.0 && !self.lessons.knows_background() {
            return Err(Error::config("background", "0 with a task that does not know what of its texts counts", costs.background));
        }
        let memory = self.memory.as_ref().and_then(MemoryRecipe::whole);
        if let Some(memory) = memory {
            expect_importance(costs, memory)?;
        }
        if stage.carry > 0.0 && stage.accumulate > 1 {
            return Err(Error::config("accumulate", "1 where memories are carried on", stage.accumulate));
        }
        let keeps_its_own = matches!(self.model, ModelRecipe::Recurrence(_));
        if stage.carry > 0.0 && !keeps_its_own && memory.is_some_and(|m| m.kind() != "associative") {
            return Err(Error::config("carry", "0 with a memory that is not associative", stage.carry));
        }
        if let Some(sizes) = self.sizes(number) {
            self.lessons.check_stage(number, sizes)?;
        }
        match self.model {
            ModelRecipe::Fresh(_) | ModelRecipe::Recurrence(_) => {
                armt::recurrence::check(&self.config(number, &self.fresh(TOKENS, 0)?))?
            }
            // Of a folder nothing is known before it is opened.
            ModelRecipe::From(_) => {}
        }
        Ok(())
    }
}
