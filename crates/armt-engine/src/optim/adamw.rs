//! AdamW, as PyTorch computes it, with decoupled weight decay:
//!
//! ```text
//! p <- p - lr wd p;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
//! p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
//! ```
//!
//! One step is split in two: [`AdamW::prepare`] writes what changes from step to step (rate, bias corrections) to a small device buffer,
//! [`AdamW::apply`] clips and updates and reads it from there. The second half has no host copies, so it can be part of a
//! captured graph. Shadows of bf16 parameters are written by the same pass.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{SafeTensors, TensorView};

use crate::cpu::optim as cpu;
use crate::error::{Error, Result};
use crate::ops::cuda_of;
use crate::tape::Param;
use crate::tensor::{DType, Tensor};

/// How gradients are limited before an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// Not at all.
    None,
    /// All gradients are scaled so that their common norm is at most this. Gradients whose norm is not finite change nothing.
    Norm(f32),
    /// Every element is clamped to this distance from 0.
    Value(f32),
}

/// The numbers of AdamW. The default is PyTorch's, without clipping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Decay of the running mean of gradients.
    pub beta1: f32,
    /// Decay of the running mean of squared gradients.
    pub beta2: f32,
    /// Added to the root in the denominator.
    pub eps: f32,
    /// Limit on gradients.
    pub clip: Clip,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { beta1: 0.9, beta2: 0.999, eps: 1e-8, clip: Clip::None }
    }
}

/// Parameters that share a weight decay and a factor on the learning rate.
#[derive(Clone, Debug)]
pub struct Group {
    /// The parameters.
    pub params: Vec<Param>,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Factor on the learning rate.
    pub rate: f32,
}

struct Slot {
    param: Param,
    /// The parameter's gradient.
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    weight_decay: f32,
    rate: f32,
}

/// The optimizer and its state.
pub struct AdamW {
    settings: Settings,
    slots: Vec<Slot>,
    step: u64,
    /// lr, 1 - b1^t, 1 - b2^t, and the factor that clipping by norm gives. f32 [4].
    numbers: Tensor,
    /// Norm of all gradients at the last step, f32 [1]. Kept up to date only when clipping by norm.
    norm: Tensor,
    /// Sums of squares of pieces of the gradients.
    partial: Tensor,
}

/// Elements of a gradient whose squares one block sums.
const PIECE: usize = 1 << 14;

impl AdamW {
    /// An optimizer with zero state. Names must be unique, all parameters on one device, and none frozen.
    pub fn new(groups: Vec<Group>, settings: Settings) -> Result<Self> {
        const OP: &str = "AdamW";
        let mut slots: Vec<Slot> = Vec::new();
        for group in groups {
            for param in group.params {
                if let Some(first) = slots.first() {
                    param.value().expect_device_of(OP, "a parameter", first.param.value())?;
                }
                if slots.iter().any(|s| s.param.name() == param.name()) {
                    return Err(Error::argument(OP, format!("parameter {} was given twice", param.name())));
                }
                let zeros = || Tensor::zeros(param.value().shape(), DType::F32, param.value().device());
                let (mean, square) = (zeros()?, zeros()?);
                let grad = param.grad()?.clone();
                slots.push(Slot { param, grad, mean, square, weight_decay: group.weight_decay, rate: group.rate });
            }
        }
        let Some(first) = slots.first() else {
            return Err(Error::argument(OP, "expected at least one parameter, got none"));
        };
        let device = first.param.value().device().clone();
        let pieces: usize = slots.iter().map(|s| s.param.value().elements().div_ceil(PIECE)).sum();
        Ok(AdamW {
            settings,
            step: 0,
            numbers: Tensor::from_slice(&[0f32, 1.0, 1.0, 1.0], [4], &device)?,
            norm: Tensor::zeros([1], DType::F32, &device)?,
            partial: Tensor::zeros([pieces], DType::F32, &device)?,
            slots,
        })
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The parameters, in order.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.slots.iter().map(|s| &s.param)
    }

    /// Sets all gradients to zero.
    pub fn zero_grad(&self) -> Result<()> {
        self.params().try_for_each(Param::zero_grad)
    }

    /// One whole step with learning rate `lr`.
    pub fn step(&mut self, lr: f32) -> Result<()> {
        self.prepare(lr)?;
        self.apply()
    }

    /// First half of a step: counts it and writes its rate and bias corrections to the device.
    pub fn prepare(&mut self, lr: f32) -> Result<()> {
        self.step += 1;
        let correction = |beta: f32| (1.0 - f64::from(beta).powi(self.step.min(i32::MAX as u64) as i32)) as f32;
        self.numbers.overwrite(&[lr, correction(self.settings.beta1), correction(self.settings.beta2), 1.0])
    }

    /// Second half: clips the gradients and updates parameters and state. Capturable.
    pub fn apply(&self) -> Result<()> {
        if let Clip::Norm(most) = self.settings.clip {
            self.measure_norm(most)?;
        }
        self.slots.iter().try_for_each(|slot| self.update(slot))
    }

    /// The norm of all gradients at the last [`AdamW::apply`], on the device. Meaningful only with [`Clip::Norm`].
    pub fn grad_norm(&self) -> &Tensor {
        &self.norm
    }

    /// Writes the norm, and the factor that brings it down to `most`.
    fn measure_norm(&self, most: f32) -> Result<()> {
        const OP: &str = "clip by norm";
        let Some(cuda) = cuda_of(&self.norm) else {
            let mut sum = 0.0;
            for slot in &self.slots {
                sum += cpu::sum_of_squares(&slot.grad.read::<f32>(OP)?);
            }
            let norm = sum.sqrt() as f32;
            self.norm.write::<f32>(OP)?[0] = norm;
            self.numbers.write::<f32>(OP)?[3] = cpu::norm_factor(norm, most);
            return Ok(());
        };
        let mut at = 0;
        for slot in &self.slots {
            let n = slot.param.value().elements();
            let pieces = n.div_ceil(PIECE);
            let launch = cuda.kernel("optim", DType::F32, "sum_of_squares")?.grid(pieces, 1, 1);
            launch.arg(&slot.grad).arg(&self.partial.view_rows(at..at + pieces)).arg(n).arg(PIECE).run()?;
            at += pieces;
        }
        let launch = cuda.kernel("optim", DType::F32, "norm_factor")?.block(1024);
        launch.arg(&self.partial).arg(at).arg(&self.norm).arg(&self.numbers).arg(most).run()
    }

    fn update(&self, slot: &Slot) -> Result<()> {
        const OP: &str = "AdamW";
        let Settings { beta1, beta2, eps, clip } = self.settings;
        let limit = if let Clip::Value(limit) = clip { limit } else { f32::INFINITY };
        let (value, grad) = (slot.param.value(), &slot.grad);
        let Some(cuda) = cuda_of(value) else {
            let numbers = self.numbers.read::<f32>(OP)?;
            let rates = cpu::Rates {
                lr: numbers[0] * slot.rate,
                correction1: numbers[1],
                correction2: numbers[2],
                factor: numbers[3],
                limit,
                decay: slot.weight_decay,
                beta1,
                beta2,
                eps,
            };
            let (mut mean, mut square) = (slot.mean.write::<f32>(OP)?, slot.square.write::<f32>(OP)?);
            cpu::adamw(&mut value.write::<f32>(OP)?, &grad.read::<f32>(OP)?, &mut mean, &mut square, rates);
            return slot.param.refresh();
        };
        let n = value.elements();
        let launch = cuda.kernel("optim", DType::F32, "adamw")?.cover(n);
        let launch = launch.arg(value).arg(grad).arg(&slot.mean).arg(&slot.square).arg(slot.param.shadow()).arg(&self.numbers);
        launch.arg(n).arg(slot.rate).arg(slot.weight_decay).arg(beta1).arg(beta2).arg(eps).arg(limit).run()
    }

    /// Writes the state to a safetensors file, beside it first and then renamed.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut data: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        for slot in &self.slots {
            for (kind, tensor) in [("mean", &slot.mean), ("square", &slot.square)] {
                let bytes = tensor.to_vec::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect();
                data.push((format!("{kind}.{}", slot.param.name()), tensor.dims().to_vec(), bytes));
            }
        }
        let file_error = |message: String| Error::File { path: path.into(), message };
        let views = data
            .iter()
            .map(|(name, shape, bytes)| {
                let view = TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).map_err(|e| file_error(e.to_string()))?;
                Ok((name.as_str(), view))
            })
            .collect::<Result<Vec<_>>>()?;
        // One key: of several the order would be another each time.
        let metadata = HashMap::from([("step".into(), self.step.to_string())]);
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| file_error(e.to_string()))?;
        let io = |source| Error::Io { path: path.into(), source };
        let beside = path.with_extension(format!("partial-{}", std::process::id()));
        std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path)).map_err(io)
    }

    /// Restores what [`AdamW::save`] wrote, to the bit. A file of other parameters, a damaged one, or one that holds a number that is
    /// not finite is refused, and the state stays as it was.
    pub fn restore(&mut self, path: &Path) -> Result<()> {
        let refuse = |message: String| Error::File { path: path.into(), message };
        let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| refuse(e.to_string()))?;
        let step = header.metadata().as_ref().and_then(|m| m.get("step")).and_then(|s| s.parse().ok());
        let step = step.ok_or_else(|| refuse("expected the state of an optimizer, but it names no step".into()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| refuse(e.to_string()))?;
        let mut loaded: Vec<Vec<f32>> = Vec::new();
        for slot in &self.slots {
            for kind in ["mean", "square"] {
                let name = format!("{kind}.{}", slot.param.name());
                let view = file.tensor(&name).map_err(|_| refuse(format!("it holds no {name}")))?;
                let shape = slot.param.value().shape();
                if view.shape() != shape.dims() || view.dtype() != safetensors::Dtype::F32 {
                    return Err(refuse(format!("{name} should be f32 {shape}, but is {:?} {:?}", view.dtype(), view.shape())));
                }
                let (words, _) = view.data().as_chunks::<4>();
                let values: Vec<f32> = words.iter().map(|b| f32::from_le_bytes(*b)).collect();
                if let Some(bad) = values.iter().find(|x| !x.is_finite()) {
                    return Err(refuse(format!("{name} holds {bad}")));
                }
                loaded.push(values);
            }
        }
        if file.len() != loaded.len() {
            return Err(refuse(format!("expected {} tensors, got {}", loaded.len(), file.len())));
        }
        for (slot, pair) in self.slots.iter().zip(loaded.chunks(2)) {
            slot.mean.overwrite(&pair[0])?;
            slot.square.overwrite(&pair[1])?;
        }
        self.step = step;
        Ok(())
    }
}
