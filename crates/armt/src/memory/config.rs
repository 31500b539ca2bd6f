//! `memory` of a configuration: the kind and its numbers, read by the kind itself.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use serde::de::Error as _;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::Memory;
use crate::backbone::{Architecture, Around};
use crate::error::{Error, Result};
use crate::weights::Maker;

/// The checked numbers of a kind of memory.
pub trait Settings: Any + Debug + Send + Sync {
    /// The name that `kind` has in the file.
    fn kind(&self) -> &'static str;

    /// Memory tokens around a segment.
    fn around(&self) -> Around {
        Around::default()
    }

    /// What names of the backbone's tensors begin with in a file, and what stands between a layer and its parts.
    fn wrapping(&self) -> (&'static str, &'static str) {
        ("memory_cell.model.", "")
    }

    /// Refuses numbers that do not fit the transformer.
    fn check(&self, _architecture: &Architecture) -> Result<()> {
        Ok(())
    }

    /// The keys beside `kind`.
    fn keys(&self) -> Map<String, Value>;

    /// A memory with fresh parameters, around segments of at most `segment` tokens.
    fn build(&self, make: &mut Maker, architecture: &Architecture, segment: usize) -> Result<Box<dyn Memory>>;
}

/// What is kept between segments: any kind of the registry. Equal if all keys are.
#[derive(Clone, Debug)]
pub struct MemoryConfig(Arc<dyn Settings>);

/// Keys in the order in which people read them; others follow.
const ORDER: [&str; 8] = ["tokens", "d_mem", "nu", "correction", "wrap_pos", "write", "memory_layers", "sliding_window"];

impl MemoryConfig {
    /// A kind's own settings.
    pub fn new(settings: impl Settings) -> Self {
        MemoryConfig(Arc::new(settings))
    }

    /// Reads `{"kind": .., ..}`. An unknown kind or key is an error.
    pub fn from_keys(mut keys: Map<String, Value>) -> Result<Self> {
        let name = keys.remove("kind").ok_or_else(|| Error::config("memory.kind", "the kind of memory", "nothing"))?;
        let name = name.as_str().ok_or_else(|| Error::config("memory.kind", "a string", &name))?;
        Ok(MemoryConfig((super::kind(name)?.settings)(keys)?))
    }

    /// The settings, if they are of this kind.
    pub fn get<S: Settings>(&self) -> Option<&S> {
        let any: &dyn Any = self.0.as_ref();
        any.downcast_ref()
    }

    /// All keys, `kind` among them.
    pub fn keys(&self) -> Map<String, Value> {
        let mut keys = self.0.keys();
        keys.insert("kind".into(), self.0.kind().into());
        keys
    }
}

impl std::ops::Deref for MemoryConfig {
    type Target = dyn Settings;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref()
    }
}

impl<S: Settings> From<S> for MemoryConfig {
    fn from(settings: S) -> Self {
        MemoryConfig::new(settings)
    }
}

impl PartialEq for MemoryConfig {
    fn eq(&self, other: &Self) -> bool {
        self.keys() == other.keys()
    }
}

impl Serialize for MemoryConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = self.0.keys();
        let mut map = serializer.serialize_map(Some(keys.len() + 1))?;
        map.serialize_entry("kind", self.0.kind())?;
        for name in ORDER {
            if let Some(value) = keys.remove(name) {
                map.serialize_entry(name, &value)?;
            }
        }
        keys.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for MemoryConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        MemoryConfig::from_keys(Map::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// Reads a kind's settings from its keys.
pub(super) fn read<S: for<'de> Deserialize<'de> + Settings>(keys: Map<String, Value>) -> Result<Arc<dyn Settings>> {
    let settings: S = serde_json::from_value(Value::Object(keys)).map_err(|e| Error::config("memory", "its kind's keys", e))?;
    Ok(Arc::new(settings))
}

/// A kind's settings as keys.
pub(super) fn keys_of(settings: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(settings) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}

/// Refuses a memory without tokens.
pub(super) fn expect_tokens(tokens: usize) -> Result<()> {
    if tokens == 0 { Err(Error::config("memory.tokens", "at least 1", 0)) } else { Ok(()) }
}
