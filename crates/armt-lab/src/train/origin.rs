//! The model folder that a run begins from: `model.from` of a recipe.
//!
//! Its backbone and memory are the run's; only the segments are the stages' own, and the recipe may have another `memory.write`, for which the
//! weights are the same. A run that is resumed has all of that in its latest checkpoint and does not need the folder any more.

use std::path::{Path, PathBuf};

use armt::config::Config;
use armt::weights::Tensors;
use serde_json::Value;

use super::recipe::MemoryRecipe;
use crate::carried;
use crate::error::{Error, Result};

/// A model folder whose configuration was read and checked.
#[derive(Debug)]
pub struct Origin {
    path: PathBuf,
    config: Config,
    vocab: usize,
    /// Whether the run writes its memory as the model did.
    same_write: bool,
}

impl Origin {
    /// Opens a model folder as `armt convert` writes it, a run's folder, of which its best model is taken, or a model that the program carries, by its
    /// name. A folder without a model, a backbone without a memory around it, and a model with another memory than the recipe's, if that has one,
    /// are refused.
    pub fn open(folder: &Path, memory: Option<&MemoryRecipe>) -> Result<Self> {
        let path = best_of(&carried::model(folder)?);
        expect_wrapped(&path)?;
        let mut config = Config::load(&path)?;
        let checked = armt::recurrence::check(&config).and_then(|()| config.vocab());
        let vocab = checked.map_err(|e| Error::file(&path.join("config.json"), e))?;
        let own = config.memory.clone();
        if let Some(memory) = memory {
            config.memory = memory.over(&own, &path.display().to_string())?;
        }
        let same_write = config.memory == own;
        Ok(Origin { path, config, vocab, same_write })
    }

    /// Refuses a recipe that changes how the memory is written: an adapter goes with the model as it is in its folder.
    pub(super) fn expect_same_write(&self) -> Result<()> {
        if self.same_write {
            return Ok(());
        }
        let expected = format!("that of the model in {}, whose weights stay as they are", self.path.display());
        Err(Error::config("memory.write", &expected, "another"))
    }

    /// The folder of the model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Tokens of the model.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The model's weights.
    pub fn weights(&self) -> Result<Tensors> {
        Ok(Tensors::open(&self.path)?)
    }
}

/// The folder of a run's best model, or the folder itself.
pub(super) fn best_of(folder: &Path) -> PathBuf {
    let best = folder.join("best");
    if best.is_dir() { best } else { folder.into() }
}

fn expect_wrapped(folder: &Path) -> Result<()> {
    let path = folder.join("config.json");
    if !path.is_file() {
        let found = if folder.is_dir() { "a folder without config.json" } else { "nothing" };
        return Err(Error::file(folder, format!("expected the model to begin from, as `armt convert` writes it, found {found}")));
    }
    let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    let value: Value = serde_json::from_str(&text).map_err(|e| Error::file(&path, e))?;
    match value.get("model_type").and_then(Value::as_str) {
        Some(kind) if kind != "armt" => {
            Err(Error::file(&path, format!("expected a model with a memory, got a plain {kind}: `armt convert` gives it one")))
        }
        // What else is wrong with it is found when it is read.
        _ => Ok(()),
    }
}
