//! What a recipe must fulfil beyond its form. A mistake is named with its stage, line and key.

use super::{EvalRecipe, ModelRecipe, Recipe, Stage, TaskKind};
use crate::config::MemoryConfig;
use crate::error::{Error, Result};
use crate::tasks::retrieval::{EOS, Retrieval, Setting, VOCAB};

impl Recipe {
    /// `text` is the recipe's own, if it was not changed: lines are counted in it.
    pub(super) fn check(&self, text: Option<&str>) -> Result<()> {
        let line = |start: usize| match text.and_then(|t| t.get(..start)) {
            Some(before) => format!(" (line {})", 1 + before.matches('\n').count()),
            None => String::new(),
        };
        if self.stages.is_empty() {
            return Err(Error::config("stage", "at least one [[stage]]", "none"));
        }
        let o = &self.optimizer;
        if o.clip_value > 0.0 && o.clip_norm > 0.0 {
            return Err(Error::config("optimizer", "clip_value or clip_norm", "both"));
        }
        if !(o.lr > 0.0 && o.lr.is_finite()) {
            return Err(Error::config("optimizer.lr", "a positive number", o.lr));
        }
        let EvalRecipe { every, samples, batch, .. } = self.eval;
        if every == 0 || samples == 0 || batch == 0 {
            return Err(Error::config("eval", "every, samples and batch of at least 1", "0"));
        }
        match (&self.model, self.task.vocabulary) {
            (ModelRecipe::Fresh(_), _) if self.memory.is_none() => {
                return Err(Error::config("memory", "a section [memory]", "none"));
            }
            (ModelRecipe::From(_), Some(size)) => {
                return Err(Error::config("task.vocabulary", "no such key with model.from, whose model has its own", size));
            }
            _ => {}
        }
        let symbols = &self.task.symbols;
        let task = Retrieval { setting: Setting::Remember, key_size: 1, value_size: 1, symbols: *symbols.get_ref() };
        task.check_symbols().map_err(|e| Error::Argument(format!("task{}: {e}", line(symbols.span().start))))?;
        if self.task.setting == TaskKind::Babilong {
            self.questions()?;
            self.forms()?;
        }
        for (i, spanned) in self.stages.iter().enumerate() {
            let at = |e: Error| Error::Argument(format!("stage {}{}: {e}", i + 1, line(spanned.span().start)));
            self.check_stage(spanned.get_ref()).map_err(at)?;
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
        if stage.carry > 0.0 && stage.accumulate > 1 {
            return Err(Error::config("accumulate", "1 where memories are carried on", stage.accumulate));
        }
        if stage.carry > 0.0 && self.memory.as_ref().is_some_and(|m| !matches!(m, MemoryConfig::Associative(_))) {
            return Err(Error::config("carry", "0 with a memory that is not associative", stage.carry));
        }
        if self.task.setting != TaskKind::Babilong {
            let (task, pairs) = self.retrieval(stage)?;
            task.check(pairs)?;
        }
        match self.model {
            ModelRecipe::Fresh(_) => self.config(stage, &self.fresh(VOCAB, EOS)?).check().map(|_| ()),
            // Of a folder nothing is known before it is opened.
            ModelRecipe::From(_) => Ok(()),
        }
    }
}
