//! Recipes: one TOML file per experiment. Unknown keys are refused, and every mistake is named with its line.

mod check;
mod memory;
mod source;
mod until;

use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::adapter::LoraSettings;
use armt::backbone::families::{self, Family};
use armt::config::Config;
use armt::engine::optim::{Clip, Decay, Schedule, Settings};
use armt::memory::{MemoryConfig, Window};
use armt::recurrence::{self, FreshTokens};
use armt::schedule::Backprop;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::memory::MemoryRecipe;
pub use self::until::Until;

use self::source::Source;
use crate::error::{Error, Result};
use crate::tasks::setting;
use crate::tasks::training::{Lessons, Sizes};

/// What to train, on what, and how.
#[derive(Clone, Debug)]
pub struct Recipe {
    common: Common,
    lessons: Arc<dyn Lessons>,
}

impl std::ops::Deref for Recipe {
    type Target = Common;

    fn deref(&self) -> &Common {
        &self.common
    }
}

/// What every recipe has, whatever its task.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Common {
    /// Decides weights, data and everything else that is random.
    #[serde(default)]
    pub seed: u64,
    /// The backbone: a GPT-NeoX made from scratch, another `kind` of model made from scratch, or `from` a model folder.
    #[serde(default)]
    pub model: ModelRecipe,
    /// The memory, as in a model's `config.json`. With `model.from` it may be left out, or be `write` alone, and has to be that model's in all else. A
    /// model that keeps a state of its own has none.
    #[serde(default)]
    pub memory: Option<MemoryRecipe>,
    /// How weights are changed.
    #[serde(default)]
    pub optimizer: OptimizerRecipe,
    /// Which weights are changed.
    #[serde(default)]
    pub train: TrainRecipe,
    /// How gradients go back through the segments.
    #[serde(default)]
    pub backprop: Backprop,
    /// When and how the model is judged.
    #[serde(default)]
    pub eval: EvalRecipe,
    /// Only so many stages, from the first; all if not given.
    #[serde(default, rename = "stages")]
    pub keep: Option<usize>,
    /// The curriculum: each stage goes on from the weights of the one before.
    #[serde(rename = "stage")]
    pub stages: Vec<Stage>,
}

/// What the first weights are.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "ModelKeys", rename_all = "lowercase")]
#[non_exhaustive]
pub enum ModelRecipe {
    /// Fresh ones.
    Fresh(FreshModel),
    /// Fresh ones of a model that keeps a state of its own: `kind`.
    Recurrence(FreshRecurrence),
    /// Those of a model folder as `armt convert` writes it, or of a run's best model: `from`.
    From(PathBuf),
}

impl Default for ModelRecipe {
    fn default() -> Self {
        ModelRecipe::Fresh(FreshModel::default())
    }
}

/// What a model is made as where a recipe names no other kind.
const NEOX: &str = "gpt_neox";

/// The shape of a fresh GPT-NeoX, the paper's small one unless changed: 4 layers, width 128, 4 heads, feed-forward 128, weights of
/// spread 0.02.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FreshModel {
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Inner width of the feed-forward part.
    pub inner: usize,
    /// Spread of the first weights, `initializer_range`.
    pub init: f64,
    /// Whether the embedding is the output head too.
    pub tied: bool,
}

impl Default for FreshModel {
    fn default() -> Self {
        FreshModel { layers: 4, width: 128, heads: 4, inner: 128, init: 0.02, tied: false }
    }
}

/// A fresh model that keeps a state of its own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FreshRecurrence {
    /// `mamba` or `rwkv5`: the `model_type` that it will have.
    pub kind: String,
    /// Its own keys, as it documents them, with the values that were given.
    pub keys: Map<String, Value>,
}

impl FreshRecurrence {
    /// Its configuration for some tokens. A kind or a key that is not known is an error.
    fn describe(&self, vocab: usize, end: i32) -> Result<Value> {
        Ok(recurrence::describe(&self.kind, Value::Object(self.keys.clone()), FreshTokens { vocab, end })?)
    }
}

/// The section as it is written: a shape or a folder. The keys of another kind than GPT-NeoX are gathered before, see [`gather_shape`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelKeys {
    kind: Option<String>,
    shape: Option<Map<String, Value>>,
    from: Option<PathBuf>,
    layers: Option<usize>,
    width: Option<usize>,
    heads: Option<usize>,
    inner: Option<usize>,
    init: Option<f64>,
    tied: Option<bool>,
}

/// Puts the keys of `[model]` into a table of their own where it names another kind than GPT-NeoX, which alone knows them.
fn gather_shape(recipe: &mut toml::Table) {
    let Some(toml::Value::Table(model)) = recipe.get_mut("model") else { return };
    if model.get("kind").and_then(toml::Value::as_str).is_none_or(|kind| kind == NEOX) {
        return;
    }
    let kind = model.remove("kind");
    let keys = std::mem::take(model);
    model.extend(kind.map(|kind| ("kind".to_string(), kind)));
    model.insert("shape".into(), toml::Value::Table(keys));
}

impl TryFrom<ModelKeys> for ModelRecipe {
    type Error = Error;

    fn try_from(keys: ModelKeys) -> Result<Self> {
        let ModelKeys { kind, shape, from, layers, width, heads, inner, init, tied } = keys;
        match (kind, shape) {
            (Some(kind), Some(keys)) => {
                let fresh = FreshRecurrence { kind, keys };
                fresh.describe(1, 0)?;
                return Ok(ModelRecipe::Recurrence(fresh));
            }
            (None, Some(_)) => return Err(Error::config("model.shape", "no such key", "one")),
            _ => {}
        }
        let sizes = [("layers", layers), ("width", width), ("heads", heads), ("inner", inner)];
        let Some(folder) = from else {
            let usual = FreshModel::default();
            return Ok(ModelRecipe::Fresh(FreshModel {
                layers: layers.unwrap_or(usual.layers),
                width: width.unwrap_or(usual.width),
                heads: heads.unwrap_or(usual.heads),
                inner: inner.unwrap_or(usual.inner),
                init: init.unwrap_or(usual.init),
                tied: tied.unwrap_or(usual.tied),
            }));
        };
        let sizes = sizes.map(|(key, value)| (key, value.map(|v| v.to_string())));
        let others = [("init", init.map(|v| v.to_string())), ("tied", tied.map(|v| v.to_string()))];
        match sizes.into_iter().chain(others).find_map(|(key, value)| Some((key, value?))) {
            Some((key, value)) => {
                let expected = format!("no such key beside from: the model in {} has its own", folder.display());
                Err(Error::config(&format!("model.{key}"), &expected, value))
            }
            None => Ok(ModelRecipe::From(folder)),
        }
    }
}

/// AdamW. The defaults are those of the authors' retrieval scripts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct OptimizerRecipe {
    /// Peak learning rate of each stage.
    pub lr: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Clamp each element of the gradient to this; 0: not at all.
    pub clip_value: f32,
    /// Scale the gradient to at most this norm; 0: not at all. Not together with `clip_value`.
    pub clip_norm: f32,
    /// Steps in a row that may have a loss or a gradient that is not finite before the run ends. Such a step changes nothing, and a memory that was
    /// carried on begins anew. Only with `clip_norm`.
    pub skip: u32,
    /// Share of a stage's steps that the rate takes to rise.
    pub warmup: f32,
    /// The rate falls along a line that reaches 0 after this many times the stage's steps; 0: it stays.
    pub decay: f32,
}

impl Default for OptimizerRecipe {
    fn default() -> Self {
        OptimizerRecipe { lr: 3e-4, weight_decay: 1e-3, clip_value: 1.0, clip_norm: 0.0, skip: 0, warmup: 0.1, decay: 2.0 }
    }
}

/// Which weights are changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct TrainRecipe {
    /// `all`, or `memory`: the backbone of `model.from` stays as it is.
    pub only: Only,
    /// The backbone's own weights stay as they are, and a product of two thin matrices is trained for each of these projections, beside the memory.
    pub lora: Option<LoraSettings>,
    /// The folder of an adapter of `model.from` to begin with.
    pub adapter: Option<PathBuf>,
}

impl TrainRecipe {
    /// Whether the backbone's own weights stay as they are, so that what is trained is an adapter.
    pub fn adapts(&self) -> bool {
        self.only == Only::Memory || self.lora.is_some()
    }
}

/// A part of a model that is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Only {
    /// All of it.
    #[default]
    All,
    /// What reads, writes and begins the memory.
    Memory,
}

/// Validation during training.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct EvalRecipe {
    /// Steps between validations.
    pub every: u64,
    /// Texts of a validation.
    pub samples: usize,
    /// Texts of it that are computed at a time.
    pub batch: usize,
    /// Whether the run ends where a stage has not come to its `until` by its last step, instead of going on to stages that build on it.
    /// Stages with `until = "never"` have no such mark. A task that is judged by its loss has none either, and is refused.
    pub gated: bool,
    /// A stage ends after this many validations in a row that are neither better than all before nor 1; 0: never.
    pub patience: u64,
}

impl Default for EvalRecipe {
    fn default() -> Self {
        EvalRecipe { every: 250, samples: 1000, batch: 125, gated: false, patience: 0 }
    }
}

/// What every stage of a curriculum has; what else it has is its task's.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Stage {
    /// Texts of a batch.
    pub batch: usize,
    /// Parts that a batch is computed in, their gradients added.
    #[serde(default = "one")]
    pub accumulate: usize,
    /// Most steps.
    pub steps: u64,
    /// Each batch has a random number of pairs, or of segments, up to the stage's; above 25, one of 25 numbers.
    #[serde(default)]
    pub vary: bool,
    /// Share of the steps whose texts go on from the memory that the step before left, instead of an empty one: the memory of a very
    /// long text, without reading it in one step. Only an associative memory, and a state that a model keeps of its own, can be carried on.
    #[serde(default)]
    pub carry: f64,
    /// The stage ends when validation reaches this exact match, 1 if not given; `"never"`: only with its last step.
    #[serde(default)]
    pub until: Until,
    /// Another peak rate for this stage.
    #[serde(default)]
    pub lr: Option<f32>,
    /// Another `decay` for this stage.
    #[serde(default)]
    pub decay: Option<f32>,
    /// Another `backprop.sparse` for this stage.
    #[serde(default)]
    pub sparse: Option<f32>,
    /// Another `backprop.background` for this stage.
    #[serde(default)]
    pub background: Option<f32>,
    /// Another `eval.patience` for this stage: 0 where the rate shall fall to its end.
    #[serde(default)]
    pub patience: Option<u64>,
}

impl Stage {
    /// The keys of every stage.
    const KEYS: [&str; 11] =
        ["batch", "accumulate", "steps", "vary", "carry", "until", "lr", "decay", "sparse", "background", "patience"];

    /// How gradients go back in this stage.
    pub fn backprop(&self, usual: Backprop) -> Backprop {
        let (sparse, background) = (self.sparse.unwrap_or(usual.sparse), self.background.unwrap_or(usual.background));
        Backprop { sparse, background, ..usual }
    }
}

/// Refuses costs of importance with a memory that has none.
pub(super) fn expect_importance(costs: Backprop, memory: &MemoryConfig) -> Result<()> {
    let costs = [("sparse", costs.sparse), ("background", costs.background)];
    match costs.into_iter().find(|(_, cost)| *cost > 0.0 && memory.kind() != "associative") {
        Some((key, cost)) => Err(Error::config(key, "0 with a memory that is not associative", cost)),
        None => Ok(()),
    }
}

/// Keys that earlier versions wrote down for every run, whatever its task, and the value that they had where they said nothing.
const ONCE_OF_ALL: [(&str, &str); 8] = [
    ("value_size", "1"),
    ("symbols", "16"),
    ("questions", "1"),
    ("aligned", "false"),
    ("direct", "false"),
    ("alone", "0.0"),
    ("clusters", "0.0"),
    ("distract", "0"),
];

/// Keys that came after runs had begun to write down what they were made by, of all stages by one name, and what runs of before did.
const CAME_LATER: [(&str, &str); 8] = [
    ("optimizer.skip", "0"),
    ("train.only", "all"),
    ("eval.gated", "false"),
    ("backprop.sparse", "0.0"),
    ("backprop.background", "0.0"),
    ("stage.alone", "0.0"),
    ("stage.clusters", "0.0"),
    ("stage.distract", "0"),
];

/// What the names of files begin with that the Python package writes for rows of its caller's.
const ROWS: &str = "armt-rows-";

/// Every value within another, by its path; what is nothing is left out.
fn flatten(path: &str, value: &Value, record: &mut BTreeMap<String, String>) {
    let below = |key: &dyn std::fmt::Display| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    match value {
        Value::Null => {}
        Value::Object(map) => map.iter().for_each(|(key, value)| flatten(&below(key), value, record)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, value)| flatten(&below(&(i + 1)), value, record));
        }
        Value::String(text) => drop(record.insert(path.into(), without_place(text).into())),
        other => drop(record.insert(path.into(), other.to_string())),
    }
}

/// Rows that Python wrote for a recipe are the same wherever they lie, for their name is made of what they hold: of their place only the name counts.
fn without_place(value: &str) -> &str {
    let name = Path::new(value).file_name().and_then(|name| name.to_str());
    name.filter(|name| name.starts_with(ROWS)).unwrap_or(value)
}

fn one() -> usize {
    1
}

impl Recipe {
    /// Reads a recipe and those that it `extends`, with `key=value` changes (`optimizer.lr=1e-3`, `seed=2`) made before it is checked. A
    /// mistake is an error with the file and line of its key.
    pub fn load(path: &Path, changes: &[String]) -> Result<Self> {
        Self::of(Source::open(path)?, changes)
    }

    /// Reads a recipe from its text, with changes as [`Recipe::load`] makes them. It cannot extend another.
    pub fn parse(text: &str, changes: &[String]) -> Result<Self> {
        Self::of(Source::parse(text, None)?, changes)
    }

    fn of(mut source: Source, changes: &[String]) -> Result<Self> {
        changes.iter().try_for_each(|change| source.set(change))?;
        let (mut shared, own) = source.split(&Stage::KEYS);
        gather_shape(&mut shared);
        let mut common: Common = source.read(&shared, |text| toml::from_str(text))?;
        let name = source.text("task.setting")?;
        let setting = setting(&name).map_err(|e| source.error("task.setting", "", e))?;
        let lessons = source.read(&own, setting.read)?;
        if let Some(most) = common.keep {
            common.stages.truncate(most);
        }
        let recipe = Recipe { common, lessons };
        recipe.check(&source)?;
        Ok(recipe)
    }

    /// Every key with its value, defaults too, for comparison: `optimizer.lr` and `0.0003`. Where the model and its adapter come from is left out: a
    /// run has its own from its first checkpoint on, and these folders may be gone. So is the folder of rows that Python wrote.
    pub fn record(&self) -> Result<BTreeMap<String, String>> {
        // Over its text, so that a number is as people write it.
        let json = |e: serde_json::Error| Error::Toml(e.to_string());
        let value = serde_json::from_str(&serde_json::to_string(&self.common).map_err(json)?).map_err(json)?;
        let mut own = self.lessons.keys()?;
        if let Some(stages) = own.get_mut("stage").and_then(Value::as_array_mut) {
            stages.truncate(self.stages.len());
        }
        let mut record = BTreeMap::new();
        flatten("", &value, &mut record);
        flatten("", &own, &mut record);
        ["model.from", "train.adapter"].iter().for_each(|key| drop(record.remove(*key)));
        Ok(record)
    }

    /// Whether a key and its value, as an earlier version wrote them down, say nothing of this recipe.
    pub(super) fn says_nothing(key: &str, value: &str) -> bool {
        let (section, name) = key.rsplit_once('.').unwrap_or_default();
        (section == "task" || section.starts_with("stage.")) && ONCE_OF_ALL.contains(&(name, value))
    }

    /// Whether a key came later than the first runs that can be gone on with, and has the value that these did not need to write down.
    pub(super) fn came_later(key: &str, value: &str) -> bool {
        let name = key.strip_prefix("stage.").and_then(|rest| rest.split_once('.')).map(|(_, name)| format!("stage.{name}"));
        CAME_LATER.contains(&(name.as_deref().unwrap_or(key), value))
    }

    /// What it says of its task.
    pub fn lessons(&self) -> &dyn Lessons {
        self.lessons.as_ref()
    }

    /// What it says of its task, if that is of this type.
    pub fn lessons_of<L: Lessons>(&self) -> Option<&L> {
        let any: &dyn Any = self.lessons.as_ref();
        any.downcast_ref()
    }

    /// The texts at a time of a stage, from 0; `None` if there is no such stage.
    pub fn sizes(&self, stage: usize) -> Option<Sizes> {
        let Stage { batch, vary, carry, .. } = *self.stages.get(stage)?;
        Some(Sizes { batch, judged: self.eval.batch.min(self.eval.samples), vary, carried: carry > 0.0 })
    }

    /// The model to make from scratch, for so many tokens; its segments are the stages'. An error if the recipe begins from a folder.
    pub fn fresh(&self, vocabulary: usize, end: i32) -> Result<Config> {
        let memory = self.memory.as_ref().and_then(MemoryRecipe::whole);
        let m = match (&self.model, memory) {
            (ModelRecipe::Recurrence(m), memory) => {
                let memory = memory.cloned().unwrap_or_else(|| MemoryConfig::new(Window::default()));
                return Ok(Config::new(m.describe(vocabulary, end)?, memory, 1));
            }
            (ModelRecipe::Fresh(m), Some(_)) => m,
            _ => return Err(Error::config("model", "the shape of a fresh model and its memory", "none")),
        };
        let Some(memory) = memory else { return Err(Error::config("memory", "a section [memory]", "none")) };
        let FreshModel { layers, width, heads, inner, tied, init, .. } = *m;
        let shape = families::FreshShape { vocab: vocabulary, end, layers, width, heads, inner, tied, init };
        let backbone = Family::named(NEOX)?.describe(&shape);
        Ok(Config::new(backbone, memory.clone(), 1))
    }

    /// A model with the segments of a stage, from 0: in retrieval a segment is one pair, so it grows with the keys.
    pub fn config(&self, stage: usize, base: &Config) -> Config {
        let after_question = self.lessons.after_question(base.after_question.as_deref());
        Config { segment_size: self.lessons.segment_size(stage), after_question, ..base.clone() }
    }

    /// The models of all stages, each checked: one that cannot be is an error by its number.
    pub fn configs(&self, base: &Config) -> Result<Vec<Config>> {
        let stages = (0..self.stages.len()).map(|stage| {
            let config = self.config(stage, base);
            armt::recurrence::check(&config).map_err(|e| Error::Recipe {
                file: None,
                part: format!("stage {}", stage + 1),
                line: None,
                reason: Box::new(e.into()),
            })?;
            Ok(config)
        });
        stages.collect()
    }

    /// The optimizer's numbers.
    pub fn settings(&self) -> Settings {
        let o = &self.optimizer;
        let clip = match (o.clip_value > 0.0, o.clip_norm > 0.0) {
            (true, _) => Clip::Value(o.clip_value),
            (_, true) => Clip::Norm(o.clip_norm),
            _ => Clip::None,
        };
        Settings { clip, ..Settings::default() }
    }

    /// A stage's learning rates.
    pub fn schedule(&self, stage: &Stage) -> Schedule {
        let o = &self.optimizer;
        let steps = |share: f32| (f64::from(share) * stage.steps as f64).round() as u64;
        let decay = stage.decay.unwrap_or(o.decay);
        let decay = if decay > 0.0 { Decay::Linear { total: steps(decay) } } else { Decay::Constant };
        Schedule { peak: stage.lr.unwrap_or(o.lr), warmup: steps(o.warmup), decay }
    }
}

#[cfg(test)]
mod tests;
