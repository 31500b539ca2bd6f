//! An adapter that is being trained: the memory's parameters and LoRA's factors change, and the backbone's own values stay.
//!
//! A matrix W' that LoRA changes is a parameter of the model with a gradient, which no optimizer sees. A step is
//!
//! ```text
//! dL/dW'                              by the tape, as of any parameter
//! dL/dA = s B^T dL/dW',  dL/dB = s dL/dW' A^T        pull, where s = alpha / rank
//! A, B                                by the optimizer
//! W' = W + s B A                      refresh
//! ```
//!
//! so that forward passes, schedules and kernels are those of any model, at the price of one gradient and one copy of each changed matrix.

use std::path::Path;

use armt_engine::{DType, Device, Param, Tensor};

use super::lora::{Lora, LoraSettings};
use super::{Adapter, AdapterFile, Base, CONFIG, FORMAT, Own, TENSORS, memory_entries};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::write_json;
use crate::model::Model;
use crate::weights::{self, FileTensor, Tensors, Writing};

/// What training has of an adapter.
pub struct AdapterTraining {
    base: Base,
    lora: Option<Lora>,
    /// Parameters that LoRA changes, each with its base's value.
    weights: Vec<(Param, Tensor)>,
}

impl AdapterTraining {
    /// A model whose memory, and the matrices that LoRA changes, are to be trained; all zero, to be set. A target that the backbone does not have is
    /// refused with those that it has.
    pub fn blank(config: Config, lora: Option<&LoraSettings>, dtype: DType, device: &Device) -> Result<Model> {
        let changed = lora.map(|lora| lora.changed(Model::shape(config.clone())?.recurrence())).transpose()?;
        Model::blank_for_memory(config, changed.unwrap_or_default(), dtype, device)
    }

    /// A new adapter of a model that has the values of `base`, and keeps them until the first step.
    pub fn new(model: &Model, base: Base, lora: Option<&LoraSettings>, seed: u64) -> Result<Self> {
        let lora = lora.map(|settings| Lora::new(model.recurrence(), settings, seed, model.device())).transpose()?;
        let mut weights = Vec::new();
        for param in model.params() {
            if lora.as_ref().is_some_and(|lora| lora.changes(param.name())) {
                let base = Tensor::zeros(param.value().shape(), DType::F32, model.device())?;
                base.copy_from(param.value())?;
                weights.push((param.clone(), base));
            }
        }
        Ok(AdapterTraining { base, lora, weights })
    }

    /// An adapter to go on with, of a model that has the weights of the base and the memory of any: both are set to the adapter's. One with other
    /// settings is refused.
    pub fn begin_from(adapter: &Adapter, model: &Model, lora: Option<&LoraSettings>) -> Result<Self> {
        let own = adapter.lora();
        if own.as_ref() != lora {
            let told = |lora: Option<&LoraSettings>| {
                lora.map_or("none".to_string(), |l| format!("rank {}, alpha {}, targets {}", l.rank, l.alpha, l.targets.join(", ")))
            };
            return Err(Error::config("train.lora", &format!("the adapter's ({})", told(own.as_ref())), told(lora)));
        }
        let training = Self::new(model, adapter.base(), lora, 0)?;
        training.take(adapter, model)?;
        Ok(training)
    }

    /// Goes on with the adapter that [`AdapterTraining::save`] wrote to a folder, of a model that has that one's merged weights. The values of the
    /// base are those that [`AdapterTraining::save_base`] wrote.
    pub fn load(folder: &Path, base: &Path, model: &Model) -> Result<Self> {
        let adapter = Adapter::open(folder)?;
        if adapter.lora().is_some() {
            let tensors = Tensors::open(base)?;
            let mut staged = weights::Staged::default();
            for (_, entry) in model.recurrence().projections().into_iter().filter(|(_, entry)| entry.param.is_trainable()) {
                let (name, shape, data) = tensors.weight(&[&entry.name])?;
                entry.expect_shape(tensors.path(), &name, &shape)?;
                entry.import(&data, staged.values(entry.param));
            }
            staged.set(model.device())?;
        }
        Self::begin_from(&adapter, model, adapter.lora().as_ref())
    }

    /// Takes the values of an adapter with the same settings: factors and memory.
    pub fn take(&self, adapter: &Adapter, model: &Model) -> Result<()> {
        adapter.expect_parts(model, self.lora.as_ref())?;
        self.lora.as_ref().map_or(Ok(()), |lora| lora.set(&adapter.tensors, model.device()))?;
        adapter.set_memory(model)?;
        self.refresh()
    }

    /// What an optimizer changes: the memory's parameters and the factors.
    pub fn params(&self, model: &Model) -> Vec<Param> {
        let changed = |p: &&Param| self.weights.iter().any(|(weight, _)| weight.name() == p.name());
        let memory = model.params().into_iter().filter(|p| p.is_trainable() && !changed(p));
        memory.chain(self.lora.iter().flat_map(Lora::params)).cloned().collect()
    }

    /// Sets the gradients of the changed matrices to zero, before a step. Those of what [`AdapterTraining::params`] lists are the optimizer's.
    pub fn zero_grad(&self) -> Result<()> {
        Ok(self.weights.iter().try_for_each(|(weight, _)| weight.zero_grad())?)
    }

    /// Hands the gradients of the changed matrices on to the factors.
    pub fn pull(&self) -> Result<()> {
        self.lora.iter().try_for_each(|lora| self.weights.iter().try_for_each(|(weight, _)| lora.pull(weight)))
    }

    /// Brings the changed matrices up to date with the factors.
    pub fn refresh(&self) -> Result<()> {
        if let Some(lora) = &self.lora {
            for (weight, base) in &self.weights {
                if let Some(value) = lora.applied(weight.name(), base)? {
                    weight.set(&value)?;
                }
            }
        }
        Ok(())
    }

    /// Writes the adapter's folder, in f32.
    pub fn save(&self, model: &Model, folder: &Path) -> Result<()> {
        crate::files::make_folder(folder)?;
        let (config, none) = (model.config(), LoraSettings { rank: 0, alpha: 0.0, targets: Vec::new() });
        let LoraSettings { rank, alpha, targets } = self.lora.as_ref().map_or(none, |lora| lora.settings().clone());
        let file = AdapterFile {
            peft_type: "LORA".into(),
            task_type: "CAUSAL_LM".into(),
            base_model_name_or_path: self.base.name.clone(),
            r: rank,
            lora_alpha: alpha,
            lora_dropout: 0.0,
            target_modules: targets,
            fan_in_fan_out: config.model_type_of_backbone() == "gpt2",
            bias: "none".into(),
            inference_mode: true,
            armt: Own {
                format: FORMAT.into(),
                base: self.base.model.clone(),
                segment_size: config.segment_size,
                segment_alignment: config.segment_alignment,
                after_question: config.after_question.clone(),
            },
        };
        let entries = self.lora.iter().flat_map(Lora::entries).chain(memory_entries(model));
        let tensors: Vec<FileTensor<'_>> = entries.map(FileTensor::whole).collect();
        Writing::of(&folder.join(TENSORS), &tensors, DType::F32)?.finish()?;
        write_json(&folder.join(CONFIG), &file)
    }

    /// Writes the base's values of the matrices that are changed, if any are: to go on without the base's folder.
    pub fn save_base(&self, model: &Model, path: &Path) -> Result<()> {
        if self.weights.is_empty() {
            return Ok(());
        }
        let of = |weight: &Param| {
            let projections = model.recurrence().projections().into_iter().map(|(_, entry)| entry);
            projections.filter(|entry| entry.param.name() == weight.name()).collect::<Vec<_>>()
        };
        let shapes: Vec<_> =
            self.weights.iter().flat_map(|(weight, _)| of(weight)).map(|entry| (entry.name, entry.shape)).collect();
        let mut file = Writing::create(path, &shapes, DType::F32)?;
        for (weight, base) in &self.weights {
            let values = base.to_f32_vec()?;
            of(weight).iter().try_for_each(|entry| file.put(&entry.name, &entry.export(&values)))?;
        }
        file.finish()
    }
}
