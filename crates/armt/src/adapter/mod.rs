//! Adapters: what was trained beside a backbone that stayed as it was, in a folder of its own.
//!
//! ```text
//! adapter_config.json         LoRA's settings in peft's keys, and ours: whose base it is, and how texts are cut
//! adapter_model.safetensors   lora_A and lora_B under peft's names, and the memory's parameters under those of model folders
//! ```
//!
//! In use an adapter is no part of a model: it is added to the base's weights when these are loaded, and what comes of it is the model that
//! merging gives, to the bit. In training ([`AdapterTraining`]) the changed matrices are parameters like others, which the factors' product is added
//! to after each step and whose gradients are handed on to the factors; the engine and the schedules know nothing of it.

mod lora;
mod training;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use armt_engine::{DType, Device, Param, Tensor};
use serde::{Deserialize, Serialize};

pub use lora::{Lora, LoraSettings};
pub use training::AdapterTraining;

use crate::checkpoint::{Fingerprint, fingerprint_of};
use crate::config::{Alignment, Config};
use crate::error::{Error, Result};
use crate::files::read_json;
use crate::model::Model;
use crate::weights::{Entry, Tensors};

/// The file of an adapter's settings in its folder.
pub const CONFIG: &str = "adapter_config.json";
/// The file of an adapter's tensors in its folder.
pub const TENSORS: &str = "adapter_model.safetensors";
const FORMAT: &str = "armt-adapter-1";

/// `adapter_config.json`: peft's keys, and ours in one of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdapterFile {
    peft_type: String,
    task_type: String,
    base_model_name_or_path: String,
    /// 0 where only the memory was trained.
    r: usize,
    lora_alpha: f64,
    lora_dropout: f64,
    target_modules: Vec<String>,
    /// Whether the backbone stores matrices as `[in, out]`: GPT-2.
    fan_in_fan_out: bool,
    bias: String,
    inference_mode: bool,
    armt: Own,
}

/// What peft does not know of an adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Own {
    format: String,
    /// BLAKE3 of the base's configuration and weights, as memory files have it.
    base: String,
    segment_size: usize,
    segment_alignment: Alignment,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after_question: Option<String>,
}

/// The model that an adapter is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// Its folder's name.
    pub name: String,
    /// BLAKE3 of its configuration and weights.
    pub model: String,
}

impl Base {
    /// The model of a folder.
    pub fn of(folder: &Path) -> Result<Self> {
        let shape = Model::shape(Config::load(folder)?)?;
        let owner = fingerprint_of(shape.recurrence(), shape.config(), &Tensors::open(folder)?)?;
        Self::named(folder, owner.model)
    }

    fn named(folder: &Path, model: String) -> Result<Self> {
        let whole = std::path::absolute(folder).map_err(|e| Error::io(folder, e))?;
        let name = whole.file_name().map_or_else(|| whole.display().to_string(), |name| name.to_string_lossy().into_owned());
        Ok(Base { name, model })
    }
}

/// An adapter's folder, opened.
pub struct Adapter {
    folder: PathBuf,
    file: AdapterFile,
    tensors: Tensors,
}

impl Adapter {
    /// Opens a folder as training writes it. One that is not such a folder, and settings that no adapter has, are refused.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        if !path.is_file() {
            let found = if folder.is_dir() { "this folder has no adapter_config.json" } else { "there is no such folder" };
            return Err(Error::file(folder, format!("expected an adapter, as `armt train` writes it, but {found}")));
        }
        let expected = "an adapter's settings, as `armt train` writes them";
        let keys: serde_json::Value = read_json(&path, expected)?;
        if keys.get("peft_type").is_some() && keys.get("armt").is_none() {
            let way =
                "merge it in Python (merge_and_unload, then save_pretrained) and give that folder a memory with `armt convert`";
            return Err(Error::file(&path, format!("expected {expected}, got an adapter of peft, which has no memory: {way}")));
        }
        let file: AdapterFile = read_json(&path, expected)?;
        if file.armt.format != FORMAT || file.peft_type != "LORA" {
            let found = format!("{} of {}", file.peft_type, file.armt.format);
            return Err(Error::file(&path, format!("expected LORA of {FORMAT}, got {found}")));
        }
        let adapter = Adapter { folder: folder.into(), file, tensors: Tensors::open(&folder.join(TENSORS))? };
        adapter.lora().map_or(Ok(()), |lora| lora.check()).map_err(|e| Error::file(&path, e))?;
        Ok(adapter)
    }

    /// The model that it is for.
    pub fn base(&self) -> Base {
        Base { name: self.file.base_model_name_or_path.clone(), model: self.file.armt.base.clone() }
    }

    /// How matrices of the backbone are changed; `None` if only the memory was trained.
    pub fn lora(&self) -> Option<LoraSettings> {
        let AdapterFile { r, lora_alpha, target_modules, .. } = &self.file;
        (*r > 0).then(|| LoraSettings { rank: *r, alpha: *lora_alpha, targets: target_modules.clone() })
    }

    /// The configuration of the base with this adapter.
    pub fn config(&self, base: &Config) -> Config {
        let Own { segment_size, segment_alignment, after_question, .. } = self.file.armt.clone();
        Config { segment_size, segment_alignment, after_question, ..base.clone() }
    }

    /// Refuses another base than the one that it was trained on, by the names of both.
    pub fn expect_base(&self, base: &Base) -> Result<()> {
        let own = self.base();
        if own.model == base.model {
            return Ok(());
        }
        let message = format!(
            "it is an adapter of {} ({:.12}..), but the model is {} ({:.12}..)",
            own.name, own.model, base.name, base.model
        );
        Err(Error::file(&self.folder, message))
    }

    /// Loads the base from its folder with this adapter, to be used. Another model than its base is refused.
    pub fn load(&self, folder: &Path, dtype: DType, device: &Device) -> Result<Model> {
        let config = Config::load(folder)?;
        let lora = self.factors(&Model::shape(config.clone())?)?;
        let mut hash = Fingerprint::new(&config);
        let model = Model::load_changed(folder, self.config(&config), (dtype, device), |model, param, values| {
            hash.add(values);
            self.change(model, lora.as_ref(), param, values)
        })?;
        self.expect_base(&Base::named(folder, hash.finish().model)?)?;
        Ok(model)
    }

    /// The factors, on the CPU, for a model of the base's shape.
    fn factors(&self, shape: &Model) -> Result<Option<Lora>> {
        let at = |e: Error| Error::file(&self.folder.join(CONFIG), e);
        let lora =
            self.lora().map(|settings| Lora::new(shape.recurrence(), &settings, 0, &Device::cpu())).transpose().map_err(at)?;
        self.expect_parts(shape, lora.as_ref())?;
        lora.as_ref().map_or(Ok(()), |lora| lora.set(&self.tensors, &Device::cpu()))?;
        Ok(lora)
    }

    /// Refuses tensors that are neither of the factors nor of the model's memory, by name. Those of layers that have no memory, which earlier versions wrote, are
    /// passed over.
    fn expect_parts(&self, model: &Model, lora: Option<&Lora>) -> Result<()> {
        let of_memory = model.recurrence().entries().into_iter().filter(|e| e.of_memory);
        let known: HashSet<String> = lora.into_iter().flat_map(Lora::entries).chain(of_memory).map(|entry| entry.name).collect();
        match self.tensors.names().filter(|name| !known.contains(*name)).min() {
            Some(name) => {
                Err(Error::file(self.tensors.path(), format!("it holds {name}, which is no part of an adapter of this model")))
            }
            None => Ok(()),
        }
    }

    /// Makes of a base's values of a parameter those with the adapter.
    fn change(&self, model: &Model, lora: Option<&Lora>, param: &Param, values: &mut [f32]) -> Result<()> {
        for entry in memory_entries(model).filter(|e| e.param.name() == param.name()) {
            let (name, shape, data) = self.tensors.weight(&[&entry.name])?;
            entry.expect_shape(self.tensors.path(), &name, &shape)?;
            entry.import(&data, values);
        }
        if let Some(lora) = lora.filter(|lora| lora.changes(param.name())) {
            let base = Tensor::from_slice(values, param.value().shape(), &Device::cpu())?;
            if let Some(applied) = lora.applied(param.name(), &base)? {
                values.copy_from_slice(&applied.to_vec::<f32>()?);
            }
        }
        Ok(())
    }

    /// Overwrites the memory's parameters of a model that is trained.
    fn set_memory(&self, model: &Model) -> Result<()> {
        self.set(model, None)
    }

    /// Overwrites the parameters of a model that is trained, and has its base's values, with those that this adapter makes of them.
    pub fn merge_into(&self, model: &Model) -> Result<()> {
        self.set(model, self.factors(model)?.as_ref())
    }

    fn set(&self, model: &Model, lora: Option<&Lora>) -> Result<()> {
        for param in model.params().into_iter().filter(|p| p.is_trainable()) {
            let mut values = param.value().to_f32_vec()?;
            self.change(model, lora, param, &mut values)?;
            param.set(&Tensor::from_slice(&values, param.value().shape(), model.device())?)?;
        }
        Ok(())
    }
}

/// The tensors of a model's memory, which an adapter holds whole but for layers that have none: these are the base's.
fn memory_entries(model: &Model) -> impl Iterator<Item = Entry<'_>> {
    model.recurrence().entries().into_iter().filter(|e| e.of_memory && !e.at_rest)
}
