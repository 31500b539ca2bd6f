//! What a recipe says of the memory: all of it, or only how that of `model.from` is written from now on.

use armt::memory::{MemoryConfig, Write};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The section `[memory]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum MemoryRecipe {
    /// All of its keys, `kind` among them, as in a model's `config.json`.
    Whole(MemoryConfig),
    /// `write` alone: the memory is that of `model.from`, written in this way.
    Written {
        /// The way.
        write: Write,
    },
}

impl<'de> Deserialize<'de> for MemoryRecipe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let keys: Map<String, Value> = Map::deserialize(deserializer)?;
        match keys.get("write") {
            Some(write) if keys.len() == 1 => {
                let write = Write::deserialize(write).map_err(D::Error::custom)?;
                Ok(MemoryRecipe::Written { write })
            }
            _ => MemoryConfig::from_keys(keys).map(MemoryRecipe::Whole).map_err(D::Error::custom),
        }
    }
}

impl MemoryRecipe {
    /// All of the memory, if that is what the recipe says.
    pub fn whole(&self) -> Option<&MemoryConfig> {
        match self {
            MemoryRecipe::Whole(memory) => Some(memory),
            MemoryRecipe::Written { .. } => None,
        }
    }

    /// The memory of a run that begins from a model with this one: it is written in another way if the recipe says so, and is the same in all else.
    /// Another memory is refused by the first key in which they differ; `model` says whose it is. A whole one without `write` says nothing of it, as
    /// recipes were before there was a choice: it is refused where the model's is written in the projected way.
    pub fn over(&self, own: &MemoryConfig, model: &str) -> Result<MemoryConfig> {
        let mut keys = own.keys();
        match self {
            MemoryRecipe::Whole(memory) => {
                expect_same_but_for_write(&memory.keys(), &keys, model)?;
                Ok(memory.clone())
            }
            MemoryRecipe::Written { write } => {
                let write = serde_json::json!(write);
                if own.kind() != "associative" {
                    let expected = format!("nothing: the memory of the model in {model} is of kind {}", own.kind());
                    return Err(Error::config("memory.write", &expected, write));
                }
                keys.insert("write".into(), write);
                Ok(MemoryConfig::from_keys(keys)?)
            }
        }
    }
}

fn expect_same_but_for_write(recipe: &Map<String, Value>, own: &Map<String, Value>, model: &str) -> Result<()> {
    // Other kinds have other keys, which would say less.
    let names = ["kind"].into_iter().chain(recipe.keys().chain(own.keys()).map(String::as_str));
    let mut names = names.filter(|name| *name != "write" || !recipe.contains_key("write"));
    let shown = |keys: &Map<String, Value>, name: &str| keys.get(name).map_or("nothing".into(), Value::to_string);
    match names.find(|name| recipe.get(*name) != own.get(*name)) {
        Some(name) => {
            let expected = format!("{}, as the model in {model} has, or no section [memory]", shown(own, name));
            Err(Error::config(&format!("memory.{name}"), &expected, shown(recipe, name)))
        }
        None => Ok(()),
    }
}
