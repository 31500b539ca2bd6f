//! Model folders: `config.json`, `model.safetensors` (or shards with an index), `tokenizer.json`, and `vocabulary.json` where the model has
//! a small one.
//!
//! Names in files are the authors': `memory_cell.model.transformer.h.0.layer.attn.c_attn.weight`. Loading also takes a plain backbone's
//! names, as Hugging Face writes them.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::Path;

use armt_engine::{DType, Param, Tensor};
use serde::Serialize;
use serde_json::Value;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::{Beside, read_json};
use crate::recurrence::Recurrent;
use crate::state::file::Owner;
use crate::text::{Pieces, Tokenizer, end_tokens};
use crate::weights::gguf::Gguf;
use crate::weights::{Entry, FileTensor, Found, Tensors, Writing};

/// The file of a model's weights in its folder.
pub const WEIGHTS: &str = "model.safetensors";

/// Hears every parameter with its values in a file.
pub type Each<'a> = &'a mut dyn FnMut(&Param, &mut [f32]) -> Result<()>;

/// Overwrites all parameters from a file, one after the other; `each` sees every parameter with its values before, and may change them. A missing or
/// misshapen tensor is an error by name, and nothing is changed; so is a non-finite one, and then some parameters are the file's.
pub fn set_weights(recurrence: &dyn Recurrent, tensors: &Tensors, each: Each<'_>) -> Result<()> {
    read_weights(recurrence, tensors, &mut |param, values| {
        each(param, values)?;
        // In place: a tensor of its own for each would stay in the pool.
        Ok(param.set_values(values)?)
    })
}

/// Refuses a file of which [`set_weights`] would not set all parameters. Its values are read and not kept.
pub fn expect_weights(recurrence: &dyn Recurrent, tensors: &Tensors) -> Result<()> {
    read_weights(recurrence, tensors, &mut |_, _| Ok(()))
}

/// The fingerprint of the model in a folder, of which `recurrence` has the shape. Its values are read and not kept.
pub fn fingerprint_of(recurrence: &dyn Recurrent, config: &Config, tensors: &Tensors) -> Result<Owner> {
    let mut made = Fingerprint::new(config);
    read_weights(recurrence, tensors, &mut |_, values| {
        made.add(values);
        Ok(())
    })?;
    Ok(made.finish())
}

/// Reads the parameters of a file, one after the other and once. A missing, misshapen or non-finite tensor is an error by name; that nothing is
/// missing or misshapen is known from the file's index before `each` hears the first.
fn read_weights(recurrence: &dyn Recurrent, tensors: &Tensors, each: Each<'_>) -> Result<()> {
    let mut entries: HashMap<&str, Vec<Entry<'_>>> = HashMap::new();
    for entry in recurrence.entries() {
        let (name, shape) = tensors.shape(&entry.names().collect::<Vec<_>>())?;
        entry.expect_shape(tensors.path(), name, shape)?;
        entries.entry(entry.param.name()).or_default().push(entry);
    }
    for param in recurrence.params() {
        let mut values = vec![0.0; param.value().elements()];
        for entry in entries.get(param.name()).into_iter().flatten() {
            let (_, _, data) = tensors.weight(&entry.names().collect::<Vec<_>>())?;
            entry.import(&data, &mut values);
        }
        each(param, &mut values)?;
    }
    Ok(())
}

/// Every parameter, or what `pick` takes of it (its gradient, say), under the names and shapes of the files.
pub fn export(recurrence: &dyn Recurrent, pick: impl Fn(&Param) -> armt_engine::Result<&Tensor>) -> Result<Vec<Found>> {
    let mut cache: HashMap<String, Vec<f32>> = HashMap::new();
    let mut out = Vec::new();
    for entry in recurrence.entries() {
        let values = match cache.entry(entry.param.name().to_string()) {
            std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
            std::collections::hash_map::Entry::Vacant(e) => e.insert(pick(entry.param)?.to_f32_vec()?),
        };
        let values = entry.export(values);
        out.push((entry.name, entry.shape, values));
    }
    Ok(out)
}

/// Overwrites some parameters, under the names and shapes of the files; the others stay. A name that the model does not have, another shape, and a
/// number that is not finite are errors, and then nothing is changed.
pub fn import(recurrence: &dyn Recurrent, given: &[Found]) -> Result<()> {
    let entries = recurrence.entries();
    let mut changed: HashMap<&str, (&Param, Vec<f32>)> = HashMap::new();
    for (name, shape, values) in given {
        let entry = entries.iter().find(|entry| entry.name == *name);
        let entry = entry.ok_or_else(|| Error::input("a parameter of the model", name))?;
        if entry.shape != *shape || shape.iter().product::<usize>() != values.len() {
            return Err(Error::input(format!("{name} of shape {:?}", entry.shape), format!("{shape:?}")));
        }
        if let Some(value) = values.iter().find(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: name.clone(), value: *value });
        }
        let own = match changed.entry(entry.param.name()) {
            std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
            std::collections::hash_map::Entry::Vacant(e) => e.insert((entry.param, entry.param.value().to_f32_vec()?)),
        };
        entry.import(values, &mut own.1);
    }
    for (param, values) in changed.into_values() {
        param.set(&Tensor::from_slice(&values, param.value().shape(), param.value().device())?)?;
    }
    Ok(())
}

/// Puts weights that were written, and `config.json`, into their folder. Both files are whole beside their places before either is put there, so
/// that what fails leaves the folder as it was. No system renames two files at once; the configuration comes last because a folder without one
/// is no model: a new one is there whole or not at all.
pub fn finish(weights: Writing, config: &impl Serialize, folder: &Path) -> Result<()> {
    let path = folder.join("config.json");
    let text = serde_json::to_string_pretty(config).map_err(|e| Error::file(folder, e))?;
    let mut beside = Beside::create(&path)?;
    beside.file().write_all(text.as_bytes()).map_err(|e| Error::io(&path, e))?;
    weights.finish()?;
    beside.finish()
}

/// Writes a folder: configuration and weights in f32 or bf16. What fails leaves it as it was.
pub fn save(recurrence: &dyn Recurrent, config: &Config, folder: &Path, dtype: DType) -> Result<()> {
    crate::files::make_folder(folder)?;
    let tensors: Vec<FileTensor<'_>> = recurrence.entries().into_iter().map(FileTensor::whole).collect();
    finish(Writing::of(&folder.join(WEIGHTS), &tensors, dtype)?, config, folder)
}

/// Writes the plain backbone as a folder that Hugging Face's `transformers` opens: `config.json` and `model.safetensors` in f32 or bf16. A model
/// that is no backbone with a memory is refused. What fails leaves the folder as it was.
pub fn save_plain(recurrence: &dyn Recurrent, config: &Config, folder: &Path, dtype: DType) -> Result<()> {
    let tensors = recurrence.plain();
    let tensors = tensors.ok_or_else(|| Error::Unsupported("the model has no backbone that others could open".into()))?;
    crate::files::make_folder(folder)?;
    let mut backbone = config.backbone.clone();
    let stored = if dtype == DType::BF16 { "bfloat16" } else { "float32" };
    ["dtype", "torch_dtype"].iter().filter(|key| config.backbone.get(key).is_some()).for_each(|key| backbone[*key] = stored.into());
    finish(Writing::of(&folder.join(WEIGHTS), &tensors, dtype)?, &backbone, folder)
}

/// The backbone's configuration of a Hugging Face folder, or of a GGUF file. Tokens that end a text by `generation_config.json` end it.
pub fn backbone_config(source: &Path) -> Result<Value> {
    if source.is_file() {
        return Gguf::open(source)?.config();
    }
    let mut config: Value = read_json(&source.join("config.json"), "a Hugging Face configuration")?;
    let path = source.join("generation_config.json");
    if path.is_file() {
        let generation: Value = read_json(&path, "how to generate, as Hugging Face describes it")?;
        let mut ends = end_tokens(&config);
        ends.extend(end_tokens(&generation));
        ends.sort_unstable();
        ends.dedup();
        match ends[..] {
            [] => {}
            [one] => config["eos_token_id"] = one.into(),
            _ => config["eos_token_id"] = ends.into(),
        }
    }
    Ok(config)
}

/// The configuration of a model folder, or of the plain backbone in a GGUF file.
pub fn config(source: &Path) -> Result<Config> {
    if !source.is_file() {
        return Config::load(source);
    }
    Config::plain(backbone_config(source)?).map_err(|e| Error::file(source, e))
}

/// The tokenizer of a folder, or of a GGUF file; `None` if there is none.
pub fn tokenizer(source: &Path) -> Result<Option<Tokenizer>> {
    if !source.is_file() {
        return Tokenizer::find(source);
    }
    let gguf = Gguf::open(source)?;
    let key = |name: &str| gguf.key(&format!("tokenizer.ggml.{name}"));
    let Some(model) = key("model").and_then(Value::as_str) else { return Ok(None) };
    let texts = |name: &str| -> Vec<String> {
        key(name).and_then(Value::as_array).into_iter().flatten().filter_map(|v| v.as_str().map(String::from)).collect()
    };
    let flag = |name: &str, usual: bool| key(name).and_then(Value::as_bool).unwrap_or(usual);
    let pre = key("pre").and_then(Value::as_str).unwrap_or("gpt-2");
    let pieces = Pieces {
        model: model.into(),
        pre: pre.into(),
        tokens: texts("tokens"),
        kinds: key("token_type").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_u64).collect(),
        scores: key("scores").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_f64).collect(),
        merges: texts("merges"),
        begin: key("bos_token_id")
            .and_then(Value::as_u64)
            .map(|id| id as usize)
            .filter(|_| flag("add_bos_token", Pieces::usually_begin(model, pre))),
        space_before: flag("add_space_prefix", true),
    };
    Tokenizer::from_pieces(&pieces).map(Some).map_err(|e| Error::file(source, e))
}

/// Refuses tensors that no part of the model is, by their names, and a head of its own where the configuration says that the embedding is the
/// head. What older files have beside the weights is passed over.
pub fn expect_used(recurrence: &dyn Recurrent, tensors: &Tensors) -> Result<()> {
    const BESIDE: [&str; 4] = [".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias"];
    const MASKS: &str = ".attention.masked_bias";
    let entries = recurrence.entries();
    let known: HashSet<&str> = entries.iter().flat_map(|e| e.names()).collect();
    let used = |name: &&str| known.contains(name) || BESIDE.iter().chain([&MASKS]).any(|end| name.ends_with(end));
    let mut others: Vec<&str> = tensors.names().filter(|name| !used(name)).collect();
    others.sort_unstable();
    // A tied head that is written all the same.
    others.retain(|name| {
        !(name.ends_with("lm_head.weight") || name.ends_with("embed_out.weight")) || !same_as_embedding(recurrence, tensors, name)
    });
    match others[..] {
        [] => Ok(()),
        [name] if name.ends_with("lm_head.weight") || name.ends_with("embed_out.weight") => Err(Error::file(
            tensors.path(),
            format!("{name} is not the embedding, but config.json says that it is (tie_word_embeddings): set that to false"),
        )),
        _ => {
            let more = if others.len() > 8 { format!(" and {} others", others.len() - 8) } else { String::new() };
            let shown = others.iter().take(8).copied().collect::<Vec<_>>().join(", ");
            Err(Error::file(tensors.path(), format!("it holds tensors that no part of the model is: {shown}{more}")))
        }
    }
}

/// Whether a tensor has the values of the model's output table.
fn same_as_embedding(recurrence: &dyn Recurrent, tensors: &Tensors, name: &str) -> bool {
    let table = recurrence.output_table().name().to_string();
    let entry = recurrence.entries().into_iter().find(|e| e.param.name() == table);
    let embedding = entry.and_then(|e| tensors.find(&e.names().collect::<Vec<_>>()).ok());
    matches!((embedding, tensors.find(&[name])), (Some((_, _, a)), Ok((_, _, b))) if a == b)
}

/// What tells a model from any other, of its configuration and every parameter in f32, being made.
pub struct Fingerprint {
    /// What reports and state files of the first format have.
    first: u64,
    second: blake3::Hasher,
}

impl Fingerprint {
    /// Of a configuration, to which parameters are added in their order.
    pub fn new(config: &Config) -> Self {
        let mut made = Fingerprint { first: 0xcbf2_9ce4_8422_2325, second: blake3::Hasher::new() };
        // How it is asked changes nothing of what it has read.
        let config = Config { after_question: None, ..config.clone() };
        let text = serde_json::to_string(&config).unwrap_or_default();
        text.bytes().for_each(|b| made.word(u64::from(b)));
        made.part(text.as_bytes());
        made
    }

    fn word(&mut self, word: u64) {
        self.first = (self.first ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    fn part(&mut self, bytes: &[u8]) {
        self.second.update(&(bytes.len() as u64).to_le_bytes());
        self.second.update(bytes);
    }

    /// Adds a parameter's values.
    pub fn add(&mut self, values: &[f32]) {
        values.iter().for_each(|x| self.word(u64::from(x.to_bits())));
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.part(&bytes);
    }

    /// Whose states the model's are, whatever tokenizes their texts.
    pub fn finish(&self) -> Owner {
        Owner { name: None, model: self.second.finalize().to_string(), first: format!("{:016x}", self.first), tokenizer: None }
    }
}

/// The fingerprint of a model whose parameters are in f32.
pub fn fingerprint(recurrence: &dyn Recurrent, config: &Config) -> Result<Owner> {
    let mut made = Fingerprint::new(config);
    for param in recurrence.params() {
        made.add(&param.value().to_f32_vec()?);
    }
    Ok(made.finish())
}
