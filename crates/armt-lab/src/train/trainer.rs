//! The training loop: full back-propagation through all segments, a curriculum of stages, validation, checkpoints.
//!
//! Everything random comes from the recipe's seed, the stage and the step alone, so a run that was interrupted and resumed gives the numbers
//! of an unbroken one. Batches are drawn ahead on threads of their own. Each stage has a fresh optimizer and schedule and goes on from
//! the best weights of the stage before, as in the authors' scripts.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use armt::adapter::{Adapter, AdapterTraining};
use armt::engine::optim::{AdamW, Group};
use armt::engine::{DType, Device, Param};
use armt::model::Model;
use armt::random::Random;
use armt::schedule::ScheduleKind;
use armt::weights::Tensors;
use serde_json::{Map, Value, json};

pub use super::event::{Ending, Event, RunProgress};
use super::first;
use super::origin::{Origin, best_of};
use super::recipe::{ModelRecipe, Recipe, Stage, expect_importance};
use super::replicas::{Alone, Replicas, expect_one_recipe, meet};
use super::run_folder::RunFolder;
use super::start::Start;
use super::step::Stepper;
use super::tensorboard::EventWriter;
use super::validation;
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::training::{Measure, TrainingTask, Window};

/// Threads that draw batches, each every so-manieth one, and batches of each that wait for the device. Not the pool that the device computes
/// with: its threads wait for batches too.
const DRAWERS: u64 = 4;
const AHEAD: usize = 2;
/// A loss above this is no learning any more.
const EXPLODED: f32 = 1e4;

/// Runs a recipe in a folder, from its start or from where the folder is. `each` hears everything and may stop the run.
///
/// A loss that is not finite, or explodes, is an error with the step and the last good checkpoint. So is a stage that ends below its mark where
/// the recipe is gated.
pub fn train(
    recipe: &Recipe,
    folder: &mut RunFolder,
    resume: bool,
    (dtype, device): (DType, &Device),
    each: &mut dyn FnMut(&Event<'_>) -> ControlFlow<()>,
) -> Result<Ending> {
    train_among(&Alone, recipe, folder, resume, (dtype, device), each)
}

/// Runs a recipe as [`train`] does, as one of several processes that train together: each takes its part of every batch. The first has the folder
/// open for writing and the others for reading ([`RunFolder::watch`]). A stop must be asked for in all of them after the same event. Every
/// process judges the model for itself. Memories that are carried from text to text are refused.
pub fn train_among(
    replicas: &dyn Replicas,
    recipe: &Recipe,
    folder: &mut RunFolder,
    resume: bool,
    (dtype, device): (DType, &Device),
    each: &mut dyn FnMut(&Event<'_>) -> ControlFlow<()>,
) -> Result<Ending> {
    let world = replicas.world();
    for (number, stage) in recipe.stages.iter().enumerate().filter(|_| world > 1) {
        let key = |name: &str| format!("stage.{}.{name}", number + 1);
        if stage.carry > 0.0 {
            return Err(Error::config(&key("carry"), "0 where several processes train together", stage.carry));
        }
        if !stage.batch.is_multiple_of(stage.accumulate * world) {
            let expected = format!("a multiple of {} parts by {world} processes", stage.accumulate);
            return Err(Error::config(&key("batch"), &expected, stage.batch));
        }
    }
    // The folder is put right by whoever opens it for writing.
    meet(replicas)?;
    expect_one_recipe(replicas, recipe)?;
    let origin = match &recipe.model {
        ModelRecipe::Fresh(_) | ModelRecipe::Recurrence(_) => None,
        // A checkpoint has what was taken from the folder, which may be gone by now.
        ModelRecipe::From(_) if resume => Some(Origin::open(&folder.last_folder(), recipe.memory.as_ref())?),
        ModelRecipe::From(from) => Some(Origin::open(from, recipe.memory.as_ref())?),
    };
    let (data, base) = first::open(recipe, origin.as_ref())?;
    let configs = recipe.configs(&base)?;
    let mut weights = match &origin {
        _ if resume => Some(Tensors::open(&folder.last_folder())?),
        Some(origin) => Some(origin.weights()?),
        None => None,
    };
    let mut progress = RunProgress::default();
    if resume {
        expect_same(recipe, folder)?;
        progress = folder.load_state()?;
        progress.check(recipe).map_err(|e| Error::file(&folder.last_folder().join("state.json"), e))?;
    }
    folder.keep_recipe(recipe.record()?);
    let mut events = if folder.writes() { Some(EventWriter::create(folder.path())?) } else { None };
    folder.truncate_log(progress.total)?;
    if progress.due {
        // A validation that was cut short after its line: it will be made, and told, again.
        let total = progress.total;
        folder.drop_from_log(|line| {
            ["exact_match", "valid"].iter().any(|key| line.get(key).is_some()) && line["step"].as_u64() == Some(total)
        })?;
    }
    events.as_mut().map_or(Ok(()), |events| events.resume_after(progress.total))?;
    folder.keep_tokenizer(data.tokenizer());
    device.reset_peak();
    while let (Some(stage), Some(sizes)) = (recipe.stages.get(progress.stage), recipe.sizes(progress.stage)) {
        let config = configs[progress.stage].clone();
        let task = data.task(progress.stage, sizes)?;
        let measure = task.measure();
        if recipe.eval.gated && measure == Measure::Loss {
            let expected = "false: a task that is judged by its loss has no mark that it could miss";
            return Err(Error::config("eval.gated", expected, "true"));
        }
        if progress.step == 0 {
            // What nobody can be judged on is told before the first step, not after many.
            validation::expect_texts(task.as_ref(), &recipe.eval)?;
        }
        // Of a run that is under way everything is in its folder.
        let from = origin.as_ref().filter(|_| !resume && progress.total == 0);
        let (model, adapter) = match weights.take() {
            Some(weights) => {
                Start { train: &recipe.train, seed: recipe.seed, weights, from }.model(config, folder, (dtype, device))?
            }
            None => (Model::fresh(config, recipe.seed, dtype, device)?, None),
        };
        folder.keep_adapter(adapter.as_ref());
        let mut optimizer = optimizer(recipe, &model, adapter.as_deref())?;
        if progress.total == 0 && !resume {
            // So that a run that dies early can be resumed too. One that is resumed has it, and other processes may be reading it.
            folder.save_last(&model, &optimizer, None, &progress)?;
        } else if progress.step > 0 {
            let path = folder.last_folder().join("optimizer.safetensors");
            optimizer.restore(&path)?;
            if optimizer.steps() != progress.step {
                let message = format!("it is after {} steps, but state.json after {}", optimizer.steps(), progress.step);
                return Err(Error::file(&path, message));
            }
        }
        let backprop = stage.backprop(recipe.backprop);
        // Of a model that is opened from a folder the recipe's check knows no memory.
        expect_importance(backprop, &model.config().memory)?;
        let mut stepper = Stepper::new(&model, optimizer, backprop, ScheduleKind::Auto)?.adapting(adapter.as_ref()).among(replicas);
        if progress.step > 0
            && let Some(memory) = folder.load_memory(&model)?
        {
            stepper.go_on_from(&memory)?;
        }
        let name = task.name();
        let (task, name, events) = (&*task, name.as_str(), events.as_mut());
        let mut run = StageRun { recipe, stage, task, name, model: &model, stepper, folder, events };
        // All have read the folder before the first writes to it, and it has written before the others read on.
        meet(replicas)?;
        if progress.step == 0
            && let Some(text) = &task.note(recipe.eval.samples)
            && each(&Event::Note { progress, text }).is_break()
        {
            return Ok(Ending::Stopped);
        }
        if run.go(&mut progress, each)?.is_break() {
            return Ok(Ending::Stopped);
        }
        meet(replicas)?;
        if recipe.eval.gated
            && let Some(mark) = stage.until.mark()
            && progress.best < mark
        {
            return Err(Error::BelowMark {
                stage: progress.stage + 1,
                name: name.into(),
                exact_match: progress.best,
                steps: progress.step,
                mark,
                best: folder.best_folder(),
            });
        }
        // The next stage goes on from the best weights of this one.
        let best = Tensors::open(&folder.best_folder())?;
        let score = progress.best;
        progress = RunProgress { stage: progress.stage + 1, total: progress.total, ..RunProgress::default() };
        if progress.stage == recipe.stages.len() {
            return Ok(Ending::Finished { measure, score });
        }
        model.set_weights(&best)?;
        if let Some(adapter) = &adapter {
            adapter.take(&Adapter::open(&folder.adapter_folder())?, &model)?;
        }
        folder.save_last(&model, &self::optimizer(recipe, &model, adapter.as_deref())?, None, &progress)?;
        weights = Some(best);
    }
    Err(Error::config("stage", "one of the recipe's", progress.stage))
}

/// Refuses to go on by another recipe than the run was begun with: the numbers would be those of neither. Runs of earlier versions do not
/// say what they were begun with.
fn expect_same(recipe: &Recipe, folder: &RunFolder) -> Result<()> {
    let Some(begun) = folder.load_recipe()? else { return Ok(()) };
    let now = recipe.record()?;
    let nothing = "nothing".to_string();
    // A key that the run does not know is one of a later version.
    let said = |key: &str, value: &str| now.contains_key(key) || !Recipe::says_nothing(key, value);
    if let Some((key, value)) = begun.iter().find(|(key, value)| now.get(*key) != Some(*value) && said(key, value)) {
        let expected = format!("{value}, with which the run was begun (model.from=RUN begins another from its best model)");
        return Err(Error::config(key, &expected, now.get(key).unwrap_or(&nothing)));
    }
    match now.iter().find(|(key, value)| !begun.contains_key(*key) && !Recipe::came_later(key, value)) {
        Some((key, value)) => {
            let expected = match key.starts_with("stage.") && new_stage(key, &begun) {
                true => "no stages but those with which the run was begun",
                false => "no such key, without which the run was begun (model.from=RUN begins another from its best model)",
            };
            Err(Error::config(key, expected, value))
        }
        None => Ok(()),
    }
}

/// Whether a key, `stage.3.steps`, is of a stage of which a recipe has no key at all.
fn new_stage(key: &str, recipe: &BTreeMap<String, String>) -> bool {
    let stage = key.splitn(3, '.').take(2).collect::<Vec<_>>().join(".") + ".";
    !recipe.keys().any(|known| known.starts_with(&stage))
}

fn optimizer(recipe: &Recipe, model: &Model, adapter: Option<&AdapterTraining>) -> Result<AdamW> {
    let all = || model.params().into_iter().filter(|p| p.is_trainable()).cloned().collect();
    let params: Vec<Param> = adapter.map_or_else(all, |adapter| adapter.params(model));
    let group = Group { params, weight_decay: recipe.optimizer.weight_decay, rate: 1.0 };
    Ok(AdamW::new(vec![group], recipe.settings())?)
}

/// A seed for one purpose at one place of a run.
fn seed(recipe: &Recipe, purpose: u64, stage: usize, step: u64) -> Random {
    first::seed(recipe.seed, purpose, stage, step)
}

/// A batch, and where texts go on from those of the batch before, which of them do not.
struct Drawn {
    asked: TaskBatch,
    begins: Option<Vec<bool>>,
}

struct StageRun<'a> {
    recipe: &'a Recipe,
    stage: &'a Stage,
    task: &'a dyn TrainingTask,
    name: &'a str,
    model: &'a Model,
    stepper: Stepper<'a>,
    folder: &'a mut RunFolder,
    events: Option<&'a mut EventWriter>,
}

impl StageRun<'_> {
    /// Runs the stage to its end, or to a break.
    fn go(&mut self, progress: &mut RunProgress, each: &mut dyn FnMut(&Event<'_>) -> ControlFlow<()>) -> Result<ControlFlow<()>> {
        if progress.due && self.validate(progress, each)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        if progress.over {
            return Ok(ControlFlow::Continue(()));
        }
        let (recipe, task, number) = (self.recipe, self.task, progress.stage);
        let (from, to) = (progress.step, self.stage.steps);
        let in_order = task.in_order(seed(recipe, 1, number, 0).bits())?;
        std::thread::scope(|scope| {
            let drawers: Vec<Receiver<Result<Drawn>>> = match in_order {
                Some(windows) => {
                    let (sender, batches) = sync_channel(AHEAD * DRAWERS as usize);
                    scope.spawn(move || {
                        // Those of the steps before are passed over, as `armt read --resume` passes over what was read.
                        let rest = windows.enumerate().skip_while(|(i, window)| window.is_ok() && (*i as u64) < from);
                        for (_, window) in rest.take((to - from) as usize) {
                            let drawn = window.map(|Window { asked, begins }| Drawn { asked, begins: Some(begins) });
                            if sender.send(drawn).is_err() {
                                return;
                            }
                        }
                    });
                    vec![batches]
                }
                None => (0..DRAWERS)
                    .map(|drawer| {
                        let (sender, batches) = sync_channel(AHEAD);
                        scope.spawn(move || {
                            for step in (from + drawer..to).step_by(DRAWERS as usize) {
                                let asked = task.batch(&mut seed(recipe, 1, number, step));
                                if sender.send(asked.map(|asked| Drawn { asked, begins: None })).is_err() {
                                    return;
                                }
                            }
                        });
                        batches
                    })
                    .collect(),
            };
            // The receivers are dropped inside, which ends the threads.
            self.steps(progress, drawers, each)
        })
    }

    fn steps(
        &mut self,
        progress: &mut RunProgress,
        drawers: Vec<Receiver<Result<Drawn>>>,
        each: &mut dyn FnMut(&Event<'_>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let schedule = self.recipe.schedule(self.stage);
        let start = Instant::now();
        let (mut tokens_done, mut skipped) = (0, 0);
        for drawer in drawers.iter().cycle() {
            let Ok(asked) = drawer.recv() else {
                // A thread that has no more batches has ended: so have the steps, or there is nothing to learn from.
                if progress.step < self.stage.steps {
                    return Err(Error::config("task.train", "texts", "none"));
                }
                break;
            };
            let drawn = asked?;
            let rate = schedule.rate(progress.step);
            let step_start = Instant::now();
            let loss = self.step(progress, &drawn, rate)?;
            // The loss is read back, so the device has done all of it.
            let seconds = step_start.elapsed().as_secs_f64();
            let diverged = !loss.is_finite() || loss > EXPLODED;
            skipped = if diverged { skipped + 1 } else { 0 };
            if diverged {
                self.stepper.begin_anew()?;
            }
            if skipped > self.recipe.optimizer.skip {
                return Err(Error::Diverged {
                    loss,
                    step: progress.step + 1,
                    stage: progress.stage + 1,
                    rate,
                    norm: self.gradient_norm()?,
                    checkpoint: self.folder.last_folder(),
                });
            }
            progress.step += 1;
            progress.total += 1;
            let tokens = drawn.asked.batch.ids.len();
            tokens_done += tokens;
            let speed = tokens_done as f64 / start.elapsed().as_secs_f64();
            let own = json!({
                "loss": loss, "lr": rate, "tokens_per_second": speed.round(), "tokens": tokens, "step_ms": (1e4 * seconds).round() / 10.0,
                "peak_bytes": self.model.device().pool_stats().peak_bytes,
            });
            self.log(progress, own)?;
            self.tell_events(progress, &[("train/loss", loss), ("train/lr", rate), ("train/tokens_per_second", speed as f32)])?;
            let steps = self.stage.steps;
            progress.due = progress.step == steps || progress.step.is_multiple_of(self.recipe.eval.every);
            if each(&Event::Step { progress: *progress, steps, stage: self.name, loss, tokens, seconds }).is_break() {
                self.save(progress)?;
                return Ok(ControlFlow::Break(()));
            }
            if progress.due && self.validate(progress, each)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if progress.over {
                return Ok(ControlFlow::Continue(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// One step; where memories are carried on, from the memory of the step before or from an empty one.
    fn step(&mut self, progress: &RunProgress, drawn: &Drawn, rate: f32) -> Result<f32> {
        if self.stage.carry == 0.0 {
            return self.stepper.step(&drawn.asked, self.stage.accumulate, rate);
        }
        if seed(self.recipe, 3, progress.stage, progress.step).uniform() >= self.stage.carry {
            self.stepper.begin_anew()?;
        } else if let Some(begins) = &drawn.begins {
            self.stepper.begin_some_anew(begins)?;
        }
        self.stepper.step_onward(&drawn.asked, rate)
    }

    fn gradient_norm(&self) -> Result<f64> {
        let mut sum = 0.0;
        for p in self.stepper.optimizer().params() {
            sum += p.grad()?.to_vec::<f32>()?.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>();
        }
        Ok(sum.sqrt())
    }

    /// Judges the model, keeps it if it is the best so far, and notes whether the stage is over. A stop leaves the validation due, or comes
    /// after it; everything is saved then, and where the validation fails.
    fn validate(
        &mut self,
        progress: &mut RunProgress,
        each: &mut dyn FnMut(&Event<'_>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let random = seed(self.recipe, 2, progress.stage, 0);
        let told = &mut |texts, of| each(&Event::Judged { texts, of });
        let judged = validation::score(self.model, self.task, &self.recipe.eval, random, told);
        let Ok(Some(score)) = judged else {
            // One that failed is due still, and the steps before it are made. What failed first is told.
            let saved = self.save(progress);
            return judged.and(saved).map(|()| ControlFlow::Break(()));
        };
        let measure = self.task.measure();
        let figures: Vec<(&str, f64)> = measure.figures(score).into_iter().chain(self.task.figures(score)).collect();
        let mut told = Map::from_iter(figures.iter().map(|(name, value)| (name.to_string(), json!(value))));
        if measure == Measure::Loss {
            // A step's line has a loss too.
            told.insert("valid".into(), true.into());
        }
        self.log(progress, told.into())?;
        let names: Vec<String> = figures.iter().map(|(name, _)| format!("valid/{name}")).collect();
        let scalars: Vec<(&str, f32)> =
            names.iter().zip(&figures).map(|(name, (_, value))| (name.as_str(), *value as f32)).collect();
        self.tell_events(progress, &scalars)?;
        // Nothing is better than 1: a stage that goes on after it is meant to.
        progress.waited = if score > progress.best || score == 1.0 { 0 } else { progress.waited + 1 };
        // Of equals the later one is kept: it has seen more.
        if score >= progress.best {
            progress.best = score;
            self.folder.save_best(self.model)?;
        }
        let patience = self.stage.patience.unwrap_or(self.recipe.eval.patience);
        let impatient = patience > 0 && progress.waited >= patience;
        progress.due = false;
        progress.over = progress.step == self.stage.steps || self.stage.until.reached(score) || impatient;
        self.save(progress)?;
        Ok(each(&Event::Validation { progress: *progress, stage: self.name, measure, score }))
    }

    /// A line of the log: where the run is, the stage's sizes, and `own`.
    fn log(&mut self, progress: &RunProgress, own: Value) -> Result<()> {
        let mut line = Map::from_iter([("step".into(), json!(progress.total)), ("stage".into(), json!(progress.stage + 1))]);
        line.extend(self.task.sizes().into_iter().map(|(name, size)| (name.into(), json!(size))));
        if let Value::Object(own) = own {
            line.extend(own);
        }
        self.folder.log(&line.into())
    }

    fn tell_events(&mut self, progress: &RunProgress, scalars: &[(&str, f32)]) -> Result<()> {
        self.events.as_mut().map_or(Ok(()), |events| events.scalars(progress.total, scalars))
    }

    fn save(&self, progress: &RunProgress) -> Result<()> {
        self.folder.save_last(self.model, self.stepper.optimizer(), self.stepper.memory(), progress)
    }
}

/// The model of a run folder that did best, or of a model folder.
pub fn best_model(path: &Path, dtype: DType, device: &Device) -> Result<Model> {
    Ok(Model::load(&best_of(path), dtype, device)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use armt::engine::Tape;

    /// Of any family, stored in f32 or bf16, a model's first loss in training is the loss that it has when it is asked.
    #[test]
    fn training_begins_with_the_loss_of_the_model_it_begins_from() {
        let families = [
            json!({"model_type": "gpt2", "vocab_size": 128, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}),
            json!({"model_type": "gpt_neox", "vocab_size": 130, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
                "num_attention_heads": 2}),
            json!({"model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2}),
        ];
        for (backbone, stored) in families.into_iter().zip([DType::F32, DType::BF16, DType::BF16]) {
            let dir = tempfile::tempdir().unwrap();
            let from = dir.path().join("from");
            // Large weights, so that no other model has nearly this loss; other segments than the stage's.
            let mut backbone = backbone.clone();
            backbone["initializer_range"] = json!(0.3);
            let memory = json!({"kind": "associative", "tokens": 2, "d_mem": 4});
            let config = json!({"model_type": "armt", "segment_size": 9, "memory": memory, "backbone": backbone});
            let fresh = Model::fresh(serde_json::from_value(config).unwrap(), 7, DType::F32, &Device::cpu()).unwrap();
            fresh.save(&from, stored).unwrap();

            let text = "[task]\nsetting = \"rewrite\"\n[[stage]]\npairs = 3\nbatch = 4\nsteps = 5";
            let recipe = Recipe::parse(text, &[format!("model.from={}", from.display())]).unwrap();
            let mut folder = RunFolder::create(&dir.path().join("run")).unwrap();
            let mut first = None;
            let ending = train(&recipe, &mut folder, false, (DType::F32, &Device::cpu()), &mut |event| {
                if let Event::Step { loss, .. } = event {
                    first = Some(*loss);
                }
                ControlFlow::Break(())
            });
            assert_eq!(ending.unwrap(), Ending::Stopped);

            let model = Model::blank(recipe.config(0, fresh.config()), DType::F32, &Device::cpu()).unwrap();
            model.set_weights(&Tensors::open(&from).unwrap()).unwrap();
            let task = recipe.lessons().open(None).unwrap().task(0, recipe.sizes(0).unwrap()).unwrap();
            let TaskBatch { batch, targets } = task.batch(&mut seed(&recipe, 1, 0, 0)).unwrap();
            let empty = model.empty(batch.texts).unwrap();
            let loss = model.loss(&Tape::new(), &batch, &targets, &empty, ScheduleKind::Sequential, recipe.backprop).unwrap().0;
            let (first, asked) = (first.unwrap(), loss.item().unwrap());
            assert!((first - asked).abs() < 1e-5 * asked.abs(), "{first} in training, {asked} asked");
        }
    }
}
