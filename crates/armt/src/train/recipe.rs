//! Recipes: one TOML file per experiment. Unknown keys are refused, and every mistake is named with its line.

mod change;
mod check;

use std::path::{Path, PathBuf};

use armt_engine::optim::{Clip, Decay, Schedule, Settings};
use serde::Deserialize;
use serde_json::json;
use toml::Spanned;

use self::change::set;
use crate::config::{Alignment, Config, MemoryConfig, ModelType};
use crate::error::{Error, Result};
use crate::schedule::Backprop;
use crate::tasks::babi::{SIMULATED, Task};
use crate::tasks::babilong::{Form, GEN};
use crate::tasks::retrieval::{Retrieval, SYMBOLS, Setting};

/// What to train, on what, and how.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Decides weights, data and everything else that is random.
    #[serde(default)]
    pub seed: u64,
    /// The task.
    pub task: TaskRecipe,
    /// The backbone: a GPT-NeoX made from scratch, or `from` a model folder.
    #[serde(default)]
    pub model: ModelRecipe,
    /// The memory, as in a model's `config.json`. With `model.from` it may be left out, and otherwise has to be that model's.
    #[serde(default)]
    pub memory: Option<MemoryConfig>,
    /// How weights are changed.
    #[serde(default)]
    pub optimizer: OptimizerRecipe,
    /// How gradients go back through the segments.
    #[serde(default)]
    pub backprop: Backprop,
    /// When and how the model is judged.
    #[serde(default)]
    pub eval: EvalRecipe,
    /// The curriculum: each stage goes on from the weights of the one before.
    #[serde(rename = "stage")]
    pub stages: Vec<Spanned<Stage>>,
}

/// What is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskKind {
    /// Associative retrieval, all keys different.
    Remember,
    /// Associative retrieval, keys coming again.
    Rewrite,
    /// Facts hidden in books.
    Babilong,
}

/// The task.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskRecipe {
    /// `remember`, `rewrite` or `babilong`.
    pub setting: TaskKind,
    /// Retrieval: symbols of a value.
    #[serde(default = "one")]
    pub value_size: usize,
    /// Retrieval: different symbols that keys and values are made of: 2 to 100, and 16 if not given.
    #[serde(default = "the_authors_symbols")]
    pub symbols: Spanned<usize>,
    /// BABILong: the stories, `"qa1"` to `"qa5"`, or a list of some of these, of which each text is of one; qa1 if not given.
    #[serde(default)]
    pub question: OneOrMore,
    /// BABILong: folder of books to hide facts in; the project's own if not given.
    #[serde(default)]
    pub books: Option<PathBuf>,
    /// BABILong: the forms that texts are written in, `now`, `paper` and `mixed` (`armt data babilong --form`), each text in one of them; all of
    /// them if not given.
    #[serde(default)]
    pub forms: Option<Vec<Form>>,
    /// BABILong: folder of a tokenizer; if not given that of `model.from`, or else GPT-2's.
    #[serde(default)]
    pub bpe: Option<PathBuf>,
    /// BABILong: tokens of the model, the frequent ones of the books and all of the stories; as many as the tokenizer has if not given.
    #[serde(default)]
    pub vocabulary: Option<usize>,
}

/// A text, or several.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(untagged)]
pub enum OneOrMore {
    /// Nothing was said.
    #[default]
    None,
    /// `"qa1"`
    One(String),
    /// `["qa1", "qa2"]`
    More(Vec<String>),
}

/// What the first weights are.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "ModelKeys")]
pub enum ModelRecipe {
    /// Fresh ones.
    Fresh(Shape),
    /// Those of a model folder as `armt convert` writes it, or of a run's best model: `from`.
    From(PathBuf),
}

impl Default for ModelRecipe {
    fn default() -> Self {
        ModelRecipe::Fresh(Shape::default())
    }
}

/// The shape of a fresh GPT-NeoX, the paper's small one unless changed: 4 layers, width 128, 4 heads, feed-forward 128, weights of
/// spread 0.02.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
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

impl Default for Shape {
    fn default() -> Self {
        Shape { layers: 4, width: 128, heads: 4, inner: 128, init: 0.02, tied: false }
    }
}

/// The section as it is written: a shape or a folder.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelKeys {
    from: Option<PathBuf>,
    layers: Option<usize>,
    width: Option<usize>,
    heads: Option<usize>,
    inner: Option<usize>,
    init: Option<f64>,
    tied: Option<bool>,
}

impl TryFrom<ModelKeys> for ModelRecipe {
    type Error = Error;

    fn try_from(keys: ModelKeys) -> Result<Self> {
        let ModelKeys { from, layers, width, heads, inner, init, tied } = keys;
        let sizes = [("layers", layers), ("width", width), ("heads", heads), ("inner", inner)];
        let Some(folder) = from else {
            let usual = Shape::default();
            return Ok(ModelRecipe::Fresh(Shape {
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
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerRecipe {
    /// Peak learning rate of each stage.
    pub lr: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Clamp each element of the gradient to this; 0: not at all.
    pub clip_value: f32,
    /// Scale the gradient to at most this norm; 0: not at all. Not together with `clip_value`.
    pub clip_norm: f32,
    /// Share of a stage's steps that the rate takes to rise.
    pub warmup: f32,
    /// The rate falls along a line that reaches 0 after this many times the stage's steps; 0: it stays.
    pub decay: f32,
}

impl Default for OptimizerRecipe {
    fn default() -> Self {
        OptimizerRecipe { lr: 3e-4, weight_decay: 1e-3, clip_value: 1.0, clip_norm: 0.0, warmup: 0.1, decay: 2.0 }
    }
}

/// Validation during training.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalRecipe {
    /// Steps between validations.
    pub every: u64,
    /// Texts of a validation.
    pub samples: usize,
    /// Texts of it that are computed at a time.
    pub batch: usize,
    /// Whether the run ends where a stage has not come to its `until` by its last step, instead of going on to stages that build on it.
    /// Stages whose `until` is above 1 have no such mark.
    pub gated: bool,
    /// A stage ends after this many validations in a row that are neither better than all before nor 1; 0: never.
    pub patience: u64,
}

impl Default for EvalRecipe {
    fn default() -> Self {
        EvalRecipe { every: 250, samples: 1000, batch: 125, gated: false, patience: 0 }
    }
}

/// One stage of the curriculum.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Retrieval: pairs to remember.
    #[serde(default)]
    pub pairs: Option<usize>,
    /// Retrieval: symbols of a key; 1 if not given.
    #[serde(default)]
    pub key_size: Option<usize>,
    /// Retrieval: another number of different symbols for this stage: few are told apart sooner.
    #[serde(default)]
    pub symbols: Option<usize>,
    /// BABILong: tokens of a segment.
    #[serde(default)]
    pub segment: Option<usize>,
    /// BABILong: segments of a text.
    #[serde(default)]
    pub segments: Option<usize>,
    /// BABILong: facts of a story, at most; 10 if not given.
    #[serde(default)]
    pub facts: Option<usize>,
    /// BABILong: each fact and each question has a segment of its own, and there is no background.
    #[serde(default)]
    pub aligned: bool,
    /// BABILong's qa4: only questions that repeat a fact's words, and none that turns its relation around.
    #[serde(default)]
    pub direct: bool,
    /// BABILong: share of the batches that have facts alone, without background, in as many segments as these take; none if not given.
    #[serde(default)]
    pub alone: f64,
    /// BABILong: share of the texts whose facts stand side by side in one to three places, a third of these at the very start or end of the
    /// text; none if not given.
    #[serde(default)]
    pub clusters: f64,
    /// BABILong: sentences among the facts, at most, that name people and rooms and change nothing ("Mary did not go to the garden."); half
    /// of the texts have none; 0 if not given.
    #[serde(default)]
    pub distract: usize,
    /// Questions at the end of a text, of BABILong's a random number up to this: 1 in the paper, and in validation always.
    #[serde(default = "one")]
    pub questions: usize,
    /// Texts of a batch.
    pub batch: usize,
    /// Parts that a batch is computed in, their gradients added.
    #[serde(default = "one")]
    pub accumulate: usize,
    /// Most steps.
    pub steps: u64,
    /// Each batch has a random number of pairs, from 1 to `pairs`, or of segments; above 25, one of 25 numbers.
    #[serde(default)]
    pub vary: bool,
    /// Share of the steps whose texts go on from the memory that the step before left, instead of an empty one: the memory of a very
    /// long text, without reading it in one step. Only an associative memory can be carried on.
    #[serde(default)]
    pub carry: f64,
    /// The stage ends when validation reaches this exact match.
    #[serde(default = "perfect")]
    pub until: f64,
    /// Another peak rate for this stage.
    #[serde(default)]
    pub lr: Option<f32>,
    /// Another `decay` for this stage.
    #[serde(default)]
    pub decay: Option<f32>,
    /// Another `eval.patience` for this stage: 0 where the rate shall fall to its end.
    #[serde(default)]
    pub patience: Option<u64>,
}

fn one() -> usize {
    1
}

fn perfect() -> f64 {
    1.0
}

fn the_authors_symbols() -> Spanned<usize> {
    Spanned::new(0..0, SYMBOLS)
}

impl Recipe {
    /// Reads a recipe, with `key=value` changes (`optimizer.lr=1e-3`, `seed=2`) made before it is checked.
    pub fn load(path: &Path, changes: &[String]) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
        Self::parse(&text, changes).map_err(|e| Error::file(path, e))
    }

    /// The same from text.
    pub fn parse(text: &str, changes: &[String]) -> Result<Self> {
        let trouble = |e: toml::de::Error| Error::Argument(e.to_string().trim_end().to_string());
        let recipe: Recipe = if changes.is_empty() {
            toml::from_str(text).map_err(trouble)?
        } else {
            let mut table: toml::Table = toml::from_str(text).map_err(trouble)?;
            changes.iter().try_for_each(|change| set(&mut table, change))?;
            let text = toml::to_string(&table).map_err(|e| Error::Argument(e.to_string()))?;
            toml::from_str(&text).map_err(trouble)?
        };
        // Places in a changed recipe are not those of the file.
        recipe.check(changes.is_empty().then_some(text))?;
        Ok(recipe)
    }

    /// The task of a stage of associative retrieval, and its pairs. A recipe of BABILong has none.
    pub fn retrieval(&self, stage: &Stage) -> Result<(Retrieval, usize)> {
        let setting = match self.task.setting {
            TaskKind::Remember => Setting::Remember,
            TaskKind::Rewrite => Setting::Rewrite,
            TaskKind::Babilong => return Err(Error::config("task.setting", "remember or rewrite", "babilong")),
        };
        let symbols = stage.symbols.unwrap_or(*self.task.symbols.get_ref());
        let (key_size, value_size) = (stage.key_size.unwrap_or(1), self.task.value_size);
        Ok((Retrieval { setting, key_size, value_size, symbols }, stage.pairs.unwrap_or_default()))
    }

    /// The tasks of BABILong, at least one; one that is named twice comes twice as often.
    pub fn questions(&self) -> Result<Vec<Task>> {
        let names = match &self.task.question {
            OneOrMore::None => vec!["qa1"],
            OneOrMore::One(name) => vec![name.as_str()],
            OneOrMore::More(names) => names.iter().map(String::as_str).collect(),
        };
        if names.is_empty() {
            return Err(Error::config("task.question", "at least one task", "none"));
        }
        let tasks = names.into_iter().map(|name| {
            let task: Task = name.parse()?;
            match task.number() <= SIMULATED {
                true => Ok(task),
                false => Err(Error::config("task.question", &format!("qa1 to qa{SIMULATED}, which can be simulated"), task)),
            }
        });
        tasks.collect()
    }

    /// The forms that BABILong's texts are written in, at least one.
    pub fn forms(&self) -> Result<&[Form]> {
        match self.task.forms.as_deref() {
            None => Ok(&Form::ALL),
            Some([]) => Err(Error::config("task.forms", "at least one form", "none")),
            Some(forms) => Ok(forms),
        }
    }

    /// The model to make from scratch, for so many tokens; its segments are the stages'. An error if the recipe begins from a folder.
    pub fn fresh(&self, vocabulary: usize, end: i32) -> Result<Config> {
        let (ModelRecipe::Fresh(m), Some(memory)) = (&self.model, &self.memory) else {
            return Err(Error::config("model", "the shape of a fresh model and its memory", "none"));
        };
        Ok(Config {
            model_type: ModelType::Armt,
            segment_size: 1,
            segment_alignment: Alignment::Left,
            after_question: (self.task.setting == TaskKind::Babilong).then(|| GEN.into()),
            memory: memory.clone(),
            backbone: json!({
                "model_type": "gpt_neox", "vocab_size": vocabulary, "hidden_size": m.width, "num_hidden_layers": m.layers,
                "num_attention_heads": m.heads, "intermediate_size": m.inner, "max_position_embeddings": 2048,
                "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": true, "hidden_act": "gelu",
                "tie_word_embeddings": m.tied, "initializer_range": m.init, "eos_token_id": end,
            }),
        })
    }

    /// A model with a stage's segments: in retrieval a segment is one pair, so it grows with the keys.
    pub fn config(&self, stage: &Stage, base: &Config) -> Config {
        let pair = |(task, _): (Retrieval, usize)| task.segment_size();
        let segment_size = stage.segment.or_else(|| self.retrieval(stage).ok().map(pair)).unwrap_or_default();
        Config { segment_size, ..base.clone() }
    }

    /// The models of all stages, each checked: one that cannot be is an error by its number.
    pub fn configs(&self, base: &Config) -> Result<Vec<Config>> {
        let stages = self.stages.iter().enumerate().map(|(i, stage)| {
            let config = self.config(stage.get_ref(), base);
            config.check().map_err(|e| Error::Argument(format!("stage {}: {e}", i + 1)))?;
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
mod tests {
    use super::*;
    use crate::tasks::retrieval::{EOS, VOCAB};

    const RECIPE: &str = r#"
seed = 3
[task]
setting = "remember"
[memory]
kind = "associative"
tokens = 4
d_mem = 32
[[stage]]
pairs = 2
batch = 8
steps = 10
[[stage]]
pairs = 20
key_size = 2
batch = 8
steps = 20
"#;

    fn refused(text: &str, words: &[&str]) {
        let error = Recipe::parse(text, &[]).err().unwrap().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    }

    #[test]
    fn a_recipe_has_the_papers_defaults() {
        let r = Recipe::parse(RECIPE, &[]).unwrap();
        assert!(matches!(r.model, ModelRecipe::Fresh(shape) if (shape.layers, shape.width) == (4, 128)));
        assert_eq!((r.optimizer.lr, r.seed), (3e-4, 3));
        let config = r.config(r.stages[1].get_ref(), &r.fresh(VOCAB, EOS).unwrap());
        assert_eq!(config.segment_size, 5);
        assert!(config.check().is_ok());
    }

    #[test]
    fn mistakes_are_named_with_their_line_and_key() {
        refused(&RECIPE.replace("tokens", "tokenz"), &["tokenz"]);
        refused(&RECIPE.replace("batch = 8", "batch = \"many\""), &["line 11"]);
        refused(&RECIPE.replace("pairs = 20\nkey_size = 2", "pairs = 20"), &["stage 2", "line 13", "16", "20"]);
        refused(&RECIPE.replace("steps = 10", "steps = 0"), &["stage 1", "steps"]);
        refused(&format!("{RECIPE}questions = 0"), &["stage 2 (line 13)", "questions"]);
        refused(&format!("{RECIPE}carry = 1.5"), &["stage 2 (line 13)", "carry", "from 0 to 1"]);
        refused(&format!("{RECIPE}carry = 0.5\naccumulate = 2"), &["stage 2 (line 13)", "accumulate", "carried on"]);
        let rmt = RECIPE.replace("associative", "rmt").replace("d_mem = 32\n", "");
        refused(&format!("{rmt}carry = 0.5"), &["stage 2 (line 12)", "carry", "not associative"]);
        refused(&RECIPE.replace("setting = \"remember\"", "setting = \"forget\""), &["forget"]);
        refused("seed = 1", &["task"]);
        refused(&RECIPE.replace("[memory]\nkind = \"associative\"\ntokens = 4\nd_mem = 32\n", ""), &["memory: expected", "none"]);
        refused(&RECIPE.replace("[memory]", "symbols = 101\n[memory]"), &["task (line 5)", "symbols: expected 2 to 100", "101"]);
        refused(&format!("{RECIPE}symbols = 1"), &["stage 2 (line 13)", "symbols: expected 2 to 100", "got 1"]);
        refused(&RECIPE.replace("[memory]", "symbols = \"many\"\n[memory]"), &["line 5", "many"]);
        refused(&RECIPE.replace("[memory]", "symbols = 4\n[memory]"), &["stage 2 (line 14)", "only 16 of 2 of 4 symbols"]);
    }

    #[test]
    fn stages_have_the_keys_of_their_task_and_no_others() {
        let babilong = RECIPE
            .replace("\"remember\"", "\"babilong\"")
            .replace("pairs = 2\n", "segment = 16\nsegments = 2\n")
            .replace("pairs = 20\nkey_size = 2", "segment = 512\nsegments = 8\nfacts = 4\naligned = true");
        let r = Recipe::parse(&babilong, &[]).unwrap();
        let config = r.config(r.stages[1].get_ref(), &r.fresh(1000, 3).unwrap());
        assert_eq!(
            (config.segment_size, &config.backbone["vocab_size"], r.questions().unwrap()),
            (512, &json!(1000), vec![Task::new(1).unwrap()])
        );
        refused(&format!("{babilong}pairs = 3"), &["stage 2 (line 14)", "pairs: expected no such key with Babilong"]);
        refused(&babilong.replace("segments = 8\n", ""), &["stage 2", "segments: expected a number"]);
        let asked = |question: &str| babilong.replace("[memory]", &format!("question = {question}\n[memory]"));
        refused(&asked("\"qa7\""), &["qa1 to qa5", "qa7"]);
        refused(&asked("[\"qa1\", \"qa6\"]"), &["qa1 to qa5", "qa6"]);
        refused(&asked("[]"), &["task.question", "at least one task"]);
        let several = Recipe::parse(&asked("[\"qa2\", \"qa4\"]"), &[]).unwrap().questions().unwrap();
        assert_eq!(several, [2, 4].map(|n| Task::new(n).unwrap()));
        refused(&babilong.replace("[memory]", "forms = [\"now\", \"old\"]\n[memory]"), &["old"]);
        refused(&babilong.replace("[memory]", "forms = []\n[memory]"), &["task.forms", "at least one form"]);
        for key in ["alone = 0.5", "clusters = 0.5", "distract = 3"] {
            assert!(Recipe::parse(&format!("{babilong}{key}"), &[]).is_ok(), "{key}");
            refused(&format!("{RECIPE}{key}"), &["stage 2 (line 13)", "expected no such key with Remember"]);
        }
        refused(&format!("{babilong}alone = 1.5"), &["stage 2 (line 14)", "alone", "from 0 to 1"]);
        refused(&format!("{RECIPE}segment = 3"), &["stage 2 (line 13)", "segment: expected no such key with Remember"]);
        refused(&format!("{RECIPE}aligned = true"), &["stage 2 (line 13)", "aligned: expected no such key with Remember"]);
        refused(&format!("{RECIPE}direct = true"), &["stage 2 (line 13)", "direct: expected no such key with Remember"]);
        refused(&RECIPE.replace("pairs = 2\n", ""), &["stage 1", "pairs: expected a number"]);
    }

    #[test]
    fn a_task_has_the_authors_symbols_or_its_own() {
        let symbols = |text: &str, changes: &[String]| {
            let r = Recipe::parse(text, changes).unwrap();
            r.retrieval(r.stages[1].get_ref()).unwrap().0.symbols
        };
        assert_eq!(symbols(RECIPE, &[]), 16);
        assert_eq!(symbols(&RECIPE.replace("[memory]", "symbols = 32\n[memory]"), &[]), 32);
        assert_eq!(symbols(RECIPE, &["task.symbols=64".into()]), 64);
        assert_eq!(symbols(&format!("{RECIPE}symbols = 8"), &["task.symbols=64".into()]), 8);
        let error = Recipe::parse(RECIPE, &["task.symbols=1".into()]).err().unwrap().to_string();
        assert_eq!(error, "task: symbols: expected 2 to 100, the tokens below the marks, got 1");
    }

    #[test]
    fn a_model_has_a_shape_or_comes_from_a_folder() {
        let with = |keys: &str| format!("[model]\n{keys}\n{RECIPE}").replace("seed = 3", "");
        let r = Recipe::parse(&with("width = 64"), &[]).unwrap();
        assert!(matches!(r.model, ModelRecipe::Fresh(shape) if shape == Shape { width: 64, ..Shape::default() }));
        let r = Recipe::parse(RECIPE, &["model.from=some/folder".into()]).unwrap();
        assert!(matches!(&r.model, ModelRecipe::From(folder) if folder == Path::new("some/folder")));
        assert!(r.fresh(VOCAB, EOS).is_err());
        refused(&with("from = \"folder\"\nwidth = 64"), &["line 1", "model.width: expected no such key beside from", "got 64"]);
        refused(&with("from = \"folder\"\ntied = true"), &["model.tied", "got true"]);
        refused(&with("widht = 64"), &["line 2", "widht"]);
        refused(&with("from = \"folder\"").replace("[memory]", "vocabulary = 500\n[memory]"), &["task.vocabulary", "model.from"]);
    }

    #[test]
    fn a_stage_may_have_a_rate_of_its_own() {
        let changes = ["stage.2.steps=100", "stage.2.lr=1e-4", "stage.2.decay=1"].map(String::from);
        let r = Recipe::parse(RECIPE, &changes).unwrap();
        let [first, second] = [0, 1].map(|i| r.schedule(r.stages[i].get_ref()));
        assert_eq!((second.peak, second.decay), (1e-4, Decay::Linear { total: 100 }));
        assert_ne!((first.peak, first.decay), (second.peak, second.decay));
    }

    #[test]
    fn single_values_can_be_changed() {
        let changes = ["optimizer.lr=1e-3", "seed=9", "stage.2.steps=7", "memory.correction=false"].map(String::from);
        let r = Recipe::parse(RECIPE, &changes).unwrap();
        assert_eq!((r.optimizer.lr, r.seed, r.stages[1].get_ref().steps), (1e-3, 9, 7));
        assert!(matches!(&r.memory, Some(MemoryConfig::Associative(a)) if !a.correction));
        for bad in ["seed", "stage.5.steps=1", "optimizer.speed=1"] {
            assert!(Recipe::parse(RECIPE, &[bad.into()]).is_err(), "{bad}");
        }
    }
}
