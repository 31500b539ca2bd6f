//! LoRA: a matrix of the backbone changes by a product of two thin ones, which alone are trained.
//!
//! ```text
//! W' = W + (alpha / rank) B A        A [rank, in], B [out, rank] in files, under peft's names
//! ```
//!
//! Ours are stacked over layers and transposed as all our matrices are: a `[L, in, rank]`, b `[L, rank, out]`. Where queries, keys and values (or
//! gate and up) are side by side in one parameter, the product is added to the columns of its projection.

use std::ops::Range;

use armt_engine::machine::expect_room;
use armt_engine::{DType, Device, Param, Tape, Tensor, ops};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::random::Random;
use crate::recurrence::Recurrent;
use crate::weights::{Entry, EntryList, Layout, Staged, Tensors};

/// What names of adapters' tensors begin with: peft's wrapping of a model.
const WRAPPING: &str = "base_model.model.";

/// How large the change is, and of what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraSettings {
    /// Rows of A, and columns of B.
    pub rank: usize,
    /// The product is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Names of projections, or the ends of their names at a dot: `q_proj`, `attn.c_proj`.
    pub targets: Vec<String>,
}

impl LoraSettings {
    /// Refuses a rank of 0, a scale that is no number, and nothing to change.
    pub fn check(&self) -> Result<()> {
        if self.rank == 0 {
            return Err(Error::config("lora.rank", "at least 1", 0));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(Error::config("lora.alpha", "a positive number", self.alpha));
        }
        if self.targets.is_empty() {
            return Err(Error::config("lora.targets", "names of projections", "none"));
        }
        Ok(())
    }

    fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Whether a module is one of the targets.
    fn takes(&self, module: &str) -> bool {
        self.targets.iter().any(|target| is_named(module, target))
    }

    /// Names of a model's parameters that are changed. A target that the backbone does not have is refused with those that it has.
    pub fn changed(&self, recurrence: &dyn Recurrent) -> Result<Vec<String>> {
        self.check()?;
        let projections = recurrence.projections();
        if let Some(unknown) = self.targets.iter().find(|t| !projections.iter().any(|(module, _)| is_named(module, t))) {
            let mut known: Vec<&str> = projections.iter().filter_map(|(module, _)| module.rsplit('.').next()).collect();
            known.sort_unstable();
            known.dedup();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            return Err(Error::config("lora.targets", &format!("some of the backbone's projections ({known})"), unknown));
        }
        let mut names: Vec<String> = Vec::new();
        for (_, entry) in projections.iter().filter(|(module, _)| self.takes(module)) {
            if !names.iter().any(|name| name == entry.param.name()) {
                names.push(entry.param.name().into());
            }
        }
        Ok(names)
    }
}

/// Whether a target means a module, as peft decides it.
fn is_named(module: &str, target: &str) -> bool {
    module == target || module.strip_suffix(target).is_some_and(|before| before.ends_with('.'))
}

/// The factors of one projection in all layers.
struct Factors {
    /// Its modules' names, one a layer.
    modules: Vec<String>,
    /// The parameter that it is a part of.
    weight: String,
    /// Its columns there.
    columns: Range<usize>,
    /// How B of a file is stored in b.
    layout: Layout,
    /// `[L, in, rank]`.
    a: Param,
    /// `[L, rank, out]`.
    b: Param,
}

/// The factors of all projections that are changed, in f32.
pub struct Lora {
    settings: LoraSettings,
    factors: Vec<Factors>,
    layers: usize,
}

impl Lora {
    /// Factors for a model's projections on a device, A drawn from `seed` as peft does it and B zero: nothing is changed yet. A target that the
    /// backbone does not have is refused with those that it has.
    pub fn new(recurrence: &dyn Recurrent, settings: &LoraSettings, seed: u64, device: &Device) -> Result<Self> {
        settings.changed(recurrence)?;
        let (layers, rank) = (recurrence.sizes().layers, settings.rank);
        let mut random = Random::new(seed);
        let mut factors: Vec<Factors> = Vec::new();
        for (module, entry) in recurrence.projections().into_iter().filter(|(module, _)| settings.takes(module)) {
            let (columns, layout) = entry.outputs();
            let same = |f: &&mut Factors| f.weight == entry.param.name() && f.columns == columns;
            if let Some(known) = factors.iter_mut().find(same) {
                known.modules.push(module);
                continue;
            }
            let (input, output) = (entry.param.value().dims()[1], columns.len());
            expect_room("lora.rank", &[layers, rank, input + output, size_of::<f32>()])?;
            // Kaiming's uniform with a = sqrt(5), whose bound is that.
            let bound = 1.0 / (input as f64).sqrt();
            let a = random.many(layers * input * rank, 1, |r| (bound * (2.0 * r.uniform() - 1.0)) as f32);
            let name = format!("lora.{}.{}", entry.param.name(), columns.start);
            factors.push(Factors {
                a: Param::new(format!("{name}.a"), &Tensor::from_slice(&a, [layers, input, rank], device)?, DType::F32)?,
                b: Param::new(format!("{name}.b"), &Tensor::zeros([layers, rank, output], DType::F32, device)?, DType::F32)?,
                modules: vec![module],
                weight: entry.param.name().into(),
                columns,
                layout,
            });
        }
        Ok(Lora { settings: settings.clone(), factors, layers })
    }

    /// What it was made by.
    pub fn settings(&self) -> &LoraSettings {
        &self.settings
    }

    /// The factors.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.factors.iter().flat_map(|f| [&f.a, &f.b])
    }

    /// The factors' tensors in files, under peft's names.
    pub fn entries(&self) -> Vec<Entry<'_>> {
        let rank = self.settings.rank;
        let mut list = EntryList::new(self.layers);
        for f in &self.factors {
            let (input, output) = (f.a.value().dims()[1], f.columns.len());
            for (l, module) in f.modules.iter().enumerate() {
                let thin = Layout::Columns { from: 0, columns: rank };
                list.layer(format!("{WRAPPING}{module}.lora_A.weight"), &f.a, l, vec![rank, input], thin);
                list.layer(format!("{WRAPPING}{module}.lora_B.weight"), &f.b, l, vec![output, rank], f.layout);
            }
        }
        list.into_entries()
    }

    /// Overwrites the factors from a file. A missing, misshapen or non-finite tensor is an error by name, and nothing is changed.
    pub fn set(&self, tensors: &Tensors, device: &Device) -> Result<()> {
        let mut staged = Staged::default();
        for entry in self.entries() {
            let (name, shape, data) = tensors.weight(&[&entry.name])?;
            entry.expect_shape(tensors.path(), &name, &shape)?;
            entry.import(&data, staged.values(entry.param));
        }
        staged.set(device)
    }

    /// Whether a parameter of this name is changed.
    pub fn changes(&self, weight: &str) -> bool {
        self.factors.iter().any(|f| f.weight == weight)
    }

    /// The product of each projection of a parameter, `[L, in, out]` on `tape`, with its columns, in their order.
    fn products<'a>(&'a self, tape: &'a Tape, weight: &str) -> impl Iterator<Item = Result<(&'a Range<usize>, Tensor)>> {
        let mut own: Vec<&Factors> = self.factors.iter().filter(|f| f.weight == weight).collect();
        own.sort_by_key(|f| f.columns.start);
        own.into_iter().map(|f| {
            let product = ops::matmul(&tape.param(&f.a), &tape.param(&f.b))?;
            Ok((&f.columns, ops::scale(&product, self.settings.scale())?))
        })
    }

    /// The parameter of this name with its projections changed, from its value `[L, in, out]` in f32; `None` if none of them is.
    pub fn applied(&self, weight: &str, value: &Tensor) -> Result<Option<Tensor>> {
        let (tape, width) = (Tape::off(), value.shape().last());
        let (mut parts, mut at) = (Vec::new(), 0);
        for product in self.products(&tape, weight) {
            let (columns, product) = product?;
            if columns.start > at {
                parts.push(ops::narrow(value, 2, at, columns.start - at)?);
            }
            parts.push(ops::add(&ops::narrow(value, 2, columns.start, columns.len())?, &product)?);
            at = columns.end;
        }
        if parts.is_empty() {
            return Ok(None);
        }
        if at < width {
            parts.push(ops::narrow(value, 2, at, width - at)?);
        }
        Ok(Some(ops::concat(&parts.iter().collect::<Vec<_>>(), 2)?))
    }

    /// Adds to the factors' gradients what the changed parameter's gradient `[L, in, out]` means for them.
    pub fn pull(&self, weight: &Param) -> Result<()> {
        let tape = Tape::new();
        let products = self.products(&tape, weight.name()).collect::<Result<Vec<_>>>()?;
        let part = |columns: &Range<usize>| ops::narrow(weight.grad()?, 2, columns.start, columns.len());
        let grads = products.iter().map(|(columns, product)| Ok((product, part(columns)?)));
        Ok(tape.backward_from(&grads.collect::<Result<Vec<_>>>()?)?)
    }
}
