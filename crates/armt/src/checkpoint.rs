//! Model folders: `config.json`, `model.safetensors` (or shards with an index), `tokenizer.json`, and `vocabulary.json` where the model has
//! a small one.
//!
//! Names in files are the authors': `memory_cell.model.transformer.h.0.layer.attn.c_attn.weight`. Loading also takes a plain backbone's
//! names, as Hugging Face writes them.

use std::collections::HashMap;
use std::path::Path;

use armt_engine::{DType, Param, Tensor};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::write_beside;
use crate::recurrence::Recurrent;
use crate::weights::{self, Staged, Tensors};

/// Overwrites all parameters from a file. A missing, misshapen or non-finite tensor is an error by name, and nothing is changed.
pub fn set_weights(recurrence: &dyn Recurrent, tensors: &Tensors) -> Result<()> {
    let entries = recurrence.entries();
    let mut staged = Staged::default();
    for entry in &entries {
        let (name, shape, data) = tensors.weight(&entry.names().collect::<Vec<_>>())?;
        entry.expect_shape(tensors.path(), &name, &shape)?;
        entry.import(&data, staged.values(entry.param));
    }
    staged.set(recurrence.compute().device())
}

/// Every parameter, or what `pick` takes of it (its gradient, say), under the names and shapes of the files.
pub fn export(recurrence: &dyn Recurrent, pick: impl Fn(&Param) -> &Tensor) -> Result<Vec<(String, Vec<usize>, Vec<f32>)>> {
    let mut cache: HashMap<String, Vec<f32>> = HashMap::new();
    let mut out = Vec::new();
    for entry in recurrence.entries() {
        let values = match cache.entry(entry.param.name().to_string()) {
            std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
            std::collections::hash_map::Entry::Vacant(e) => e.insert(pick(entry.param).to_vec::<f32>()?),
        };
        let values = entry.export(values);
        out.push((entry.name, entry.shape, values));
    }
    Ok(out)
}

/// Writes a folder: configuration and weights in f32 or bf16. Files are written beside and renamed.
pub fn save(recurrence: &dyn Recurrent, config: &Config, folder: &Path, dtype: DType) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| Error::io(folder, source))?;
    let text = serde_json::to_string_pretty(config).map_err(|e| Error::file(folder, e))?;
    write_beside(&folder.join("config.json"), text.as_bytes())?;
    let tensors = export(recurrence, Param::value)?;
    let metadata = HashMap::from([("format".into(), "pt".into())]);
    weights::write(&folder.join("model.safetensors"), &tensors, dtype, metadata)
}

/// A number that tells a model from any other: of its configuration and every parameter.
pub fn fingerprint(recurrence: &dyn Recurrent, config: &Config) -> Result<String> {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |word: u64| h = (h ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    // How it is asked changes nothing of what it has read.
    let config = Config { after_question: None, ..config.clone() };
    serde_json::to_string(&config).unwrap_or_default().bytes().for_each(|b| add(u64::from(b)));
    for param in recurrence.params() {
        param.value().to_vec::<f32>()?.iter().for_each(|x| add(u64::from(x.to_bits())));
    }
    Ok(format!("{h:016x}"))
}
