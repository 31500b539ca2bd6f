//! What a recipe must fulfil beyond its form. A mistake is named with its stage, line and key.

use super::source::Source;
use super::{EvalRecipe, ModelRecipe, Recipe, Stage, TaskKind};
use crate::error::{Error, Result};
use crate::tasks::retrieval::{EOS, Retrieval, Setting, VOCAB};

impl Recipe {
    /// Refuses what cannot be trained, with the place of the key in what the recipe was read from.
    pub(super) fn check(&self, source: &Source) -> Result<()> {
        self.check_sections(&|path, reason| source.error(path, "", reason))?;
        let symbols = Retrieval { setting: Setting::Remember, key_size: 1, value_size: 1, symbols: self.task.symbols };
        symbols.check_symbols().map_err(|e| source.error("task.symbols", "task", e))?;
        for (i, stage) in self.stages.iter().enumerate() {
            let number = i + 1;
            self.check_stage(stage).map_err(|e| source.error(&format!("stage.{number}"), &format!("stage {number}"), e))?;
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
        if !(o.lr > 0.0 && o.lr.is_finite()) {
            return refuse("optimizer.lr", "a positive number", &o.lr);
        }
        let EvalRecipe { every, samples, batch, .. } = self.eval;
        if every == 0 || samples == 0 || batch == 0 {
            return refuse("eval", "every, samples and batch of at least 1", &"0");
        }
        match (&self.model, self.task.vocabulary) {
            (ModelRecipe::Fresh(_), _) if self.memory.is_none() => {
                return refuse("memory", "a section [memory]", &"none");
            }
            (ModelRecipe::From(_), Some(size)) => {
                let expected = "no such key with model.from, whose model has its own";
                return refuse("task.vocabulary", expected, &size);
            }
            _ => {}
        }
        if self.task.setting == TaskKind::Babilong {
            self.stories().map_err(|e| at("task.stories", e))?;
            self.forms().map_err(|e| at("task.forms", e))?;
        }
        Ok(())
    }

    fn check_stage(&self, stage: &Stage) -> Result<()> {
        let of_retrieval = [("pairs", stage.pairs), ("key_size", stage.key_size), ("symbols", stage.symbols)];
        let of_babilong = [("segment", stage.segment), ("segments", stage.segments), ("facts", stage.facts)];
        let (own, foreign) = match self.task.setting {
            TaskKind::Babilong => (of_babilong, of_retrieval),
            TaskKind::Remember | TaskKind::Rewrite => (of_retrieval, of_babilong),
        };
        if let Some((key, value)) = foreign.iter().find_map(|(key, value)| value.map(|v| (key, v))) {
            return Err(Error::config(key, &format!("no such key with {:?}", self.task.setting), value));
        }
        let ways = [
            ("aligned", stage.aligned),
            ("direct", stage.direct),
            ("alone", stage.alone != 0.0),
            ("clusters", stage.clusters != 0.0),
            ("distract", stage.distract != 0),
        ];
        if let Some((key, _)) = ways.iter().find(|(_, on)| *on && self.task.setting != TaskKind::Babilong) {
            return Err(Error::config(key, &format!("no such key with {:?}", self.task.setting), true));
        }
        let shares = [("carry", stage.carry), ("alone", stage.alone), ("clusters", stage.clusters)];
        if let Some((key, share)) = shares.into_iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            return Err(Error::config(key, "a share from 0 to 1", share));
        }
        let needed: &[&str] = if self.task.setting == TaskKind::Babilong { &["segment", "segments"] } else { &["pairs"] };
        if let Some((key, _)) = own.iter().find(|(key, value)| needed.contains(key) && value.is_none()) {
            return Err(Error::config(key, "a number", "none"));
        }
        let common = [("questions", stage.questions), ("batch", stage.batch), ("accumulate", stage.accumulate)];
        let given = own.iter().filter_map(|(key, value)| value.map(|v| (*key, v)));
        if let Some((key, _)) = given.chain(common).find(|(key, value)| *value == 0 && *key != "symbols") {
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
        if stage.carry > 0.0 && stage.accumulate > 1 {
            return Err(Error::config("accumulate", "1 where memories are carried on", stage.accumulate));
        }
        if stage.carry > 0.0 && self.memory.as_ref().is_some_and(|m| m.kind() != "associative") {
            return Err(Error::config("carry", "0 with a memory that is not associative", stage.carry));
        }
        if self.task.setting != TaskKind::Babilong {
            let (task, pairs) = self.retrieval(stage)?;
            task.check(pairs)?;
            task.expect_room(pairs, stage.questions, stage.batch)?;
            task.expect_room(pairs, 1, self.eval.batch.min(self.eval.samples))?;
        }
        match self.model {
            ModelRecipe::Fresh(_) => armt::recurrence::check(&self.config(stage, &self.fresh(VOCAB, EOS)?))?,
            // Of a folder nothing is known before it is opened.
            ModelRecipe::From(_) => {}
        }
        Ok(())
    }
}
