//! Model folders: `config.json`, `model.safetensors` (or shards with an index), `tokenizer.json`, and `vocabulary.json` where the model has
//! a small one.
//!
//! Names in files are the authors': `memory_cell.model.transformer.h.0.layer.attn.c_attn.weight`. Loading also takes a plain backbone's
//! names, as Hugging Face writes them.

mod names;
mod tensors;

use std::collections::HashMap;
use std::path::Path;

use armt_engine::{DType, Device, Param, Tensor};
use names::{Entry, entries};
use serde_json::Value;
pub use tensors::Tensors;

use crate::config::{Alignment, Config, MemoryConfig, ModelType};
use crate::error::{Error, Result};
use crate::files::{read_json, write_beside};
use crate::model::Model;
use crate::random::Random;

impl Model {
    /// Loads a model folder. A folder of a plain backbone loads as a model without memory, its whole context one segment.
    pub fn load(folder: &Path, dtype: DType, device: &Device) -> Result<Self> {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let value: Value = serde_json::from_str(&text).map_err(|e| Error::file(&path, e))?;
        let config = if value.get("model_type").and_then(Value::as_str) == Some("armt") {
            Config::load(folder)?.0
        } else {
            plain(value).map_err(|e| Error::file(&path, e))?
        };
        let model = Model::blank(config, dtype, device)?;
        model.set_weights(&Tensors::open(folder)?)?;
        Ok(model)
    }

    /// Overwrites all parameters from a file. A missing, misshapen or non-finite tensor is an error by name, and nothing is changed.
    pub fn set_weights(&self, tensors: &Tensors) -> Result<()> {
        let mut staged: Vec<(&Param, Vec<f32>)> = Vec::new();
        for entry in entries(self) {
            let (name, shape, data) = tensors.weight(&entry.names())?;
            entry.expect_shape(tensors.path(), &name, &shape)?;
            let values = match staged.iter_mut().find(|(p, _)| p.name() == entry.param.name()) {
                Some((_, values)) => values,
                None => {
                    staged.push((entry.param, vec![0.0; entry.param.value().elements()]));
                    let last = staged.len() - 1;
                    &mut staged[last].1
                }
            };
            entry.import(&data, values);
        }
        for (param, values) in staged {
            param.set(&Tensor::from_slice(&values, param.value().shape(), &self.device)?)?;
        }
        Ok(())
    }

    /// Every parameter, or what `pick` takes of it (its gradient, say), under the names and shapes of the files.
    pub fn export(&self, pick: impl Fn(&Param) -> &Tensor) -> Result<Vec<(String, Vec<usize>, Vec<f32>)>> {
        let mut cache: HashMap<&str, Vec<f32>> = HashMap::new();
        let mut out = Vec::new();
        for entry in entries(self) {
            let values = match cache.entry(entry.param.name()) {
                std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
                std::collections::hash_map::Entry::Vacant(e) => e.insert(pick(entry.param).to_vec::<f32>()?),
            };
            out.push((entry.name.clone(), entry.shape.clone(), entry.export(values)));
        }
        Ok(out)
    }

    /// Writes the folder: configuration and weights in f32 or bf16. Files are written beside and renamed.
    pub fn save(&self, folder: &Path, dtype: DType) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.into(), source })?;
        let text = serde_json::to_string_pretty(&*self.config).map_err(|e| Error::file(folder, e))?;
        write_beside(&folder.join("config.json"), text.as_bytes())?;
        let tensors = self.export(Param::value)?;
        let metadata = HashMap::from([("format".into(), "pt".into())]);
        tensors::write(&folder.join("model.safetensors"), &tensors, dtype, metadata)
    }

    /// A number that tells this model from any other: of its configuration and every parameter.
    pub fn fingerprint(&self) -> Result<String> {
        let mut h = 0xcbf2_9ce4_8422_2325u64;
        let mut add = |word: u64| h = (h ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        // How it is asked changes nothing of what it has read.
        let config = Config { after_question: None, ..(*self.config).clone() };
        serde_json::to_string(&config).unwrap_or_default().bytes().for_each(|b| add(u64::from(b)));
        for param in self.params() {
            param.value().to_vec::<f32>()?.iter().for_each(|x| add(u64::from(x.to_bits())));
        }
        Ok(format!("{h:016x}"))
    }

    /// A backbone of the shape that a Hugging Face folder's `config.json` describes, its weights random, with a fresh memory: to try what is
    /// meant for weights that are not at hand.
    pub fn convert_random(folder: &Path, memory: MemoryConfig, segment_size: usize, seed: u64, device: &Device) -> Result<Self> {
        let backbone: Value = read_json(&folder.join("config.json"), "a Hugging Face configuration")?;
        Model::fresh(wrapped(backbone, memory, segment_size), seed, DType::F32, device)
    }

    /// Wraps a Hugging Face folder's backbone with a fresh memory, initialised as the authors do.
    pub fn convert(folder: &Path, memory: MemoryConfig, segment_size: usize, seed: u64, device: &Device) -> Result<Self> {
        let model = Self::convert_random(folder, memory, segment_size, seed, device)?;
        let tensors = Tensors::open(folder)?;
        let mut random = Random::new(seed ^ 0x6d65_6d6f_7279);
        let of_memory = |e: &Entry<'_>| e.is_memory();
        let mut staged: HashMap<&str, (&Param, Vec<f32>)> = HashMap::new();
        for entry in entries(&model).into_iter().filter(|e| !of_memory(e)) {
            let (name, shape, data) = tensors.find(&entry.names())?;
            let (_, values) =
                staged.entry(entry.param.name()).or_insert_with(|| (entry.param, vec![0.0; entry.param.value().elements()]));
            if entry.is_positions() && shape != entry.shape {
                wrap_positions(&model, &data, &shape, values, &mut random, tensors.path())?;
            } else {
                entry.expect_shape(tensors.path(), &name, &shape)?;
                entry.import(&data, values);
            }
        }
        // Memory tokens are drawn with the spread of the embedding.
        if let (Some(memory), Some((_, table))) = (&model.weights().memory, staged.get(model.weights().embed.name())) {
            let deviation = spread(table);
            let values = (0..memory.value().elements()).map(|_| (deviation * random.normal()) as f32).collect();
            staged.insert(memory.name(), (memory, values));
        }
        for (param, values) in staged.values() {
            param.set(&Tensor::from_slice(values, param.value().shape(), device)?)?;
        }
        Ok(model)
    }
}

/// A plain backbone as a model without memory.
fn plain(backbone: Value) -> Result<Config> {
    let context = ["n_positions", "max_position_embeddings"].iter().find_map(|k| backbone.get(k)?.as_u64());
    let segment_size = context.ok_or_else(|| Error::config("n_positions", "the length of the context", "nothing"))? as usize;
    let memory = MemoryConfig::None { sliding_window: false };
    Ok(wrapped(backbone, memory, segment_size))
}

/// A backbone with a memory.
fn wrapped(backbone: Value, memory: MemoryConfig, segment_size: usize) -> Config {
    Config {
        model_type: ModelType::Armt,
        segment_size,
        segment_alignment: Alignment::default(),
        after_question: None,
        memory,
        backbone,
    }
}

/// Standard deviation of values.
fn spread(values: &[f32]) -> f64 {
    let n = values.len().max(2) as f64;
    let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    (values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()
}

/// A backbone's table of positions with new rows, standard normal, for memory tokens: before it for reads, after it for writes.
fn wrap_positions(
    model: &Model,
    data: &[f32],
    shape: &[usize],
    values: &mut [f32],
    random: &mut Random,
    path: &Path,
) -> Result<()> {
    let d = model.backbone().width;
    let before = model.config().memory.tokens_before();
    let around = before + model.config().memory.tokens_after();
    if !model.config().memory.wrap_pos() || data.len() + around * d != values.len() {
        let rows = values.len() / d - if model.config().memory.wrap_pos() { around } else { 0 };
        return Err(Error::file(path, format!("the table of positions should be [{rows}, {d}], but is {shape:?}")));
    }
    values.iter_mut().for_each(|x| *x = random.normal() as f32);
    values[before * d..][..data.len()].copy_from_slice(data);
    Ok(())
}
