//! ARMT's memory: in each layer a matrix A and a normalisation z (equations 1-4 of the paper).
//!
//! ```text
//! before the block:  x <- x + A^T phi(W_Q x) / (z . phi(W_Q x))
//! after it, for its memory tokens:  k, v, b = W_K h, W_V h, sigmoid(W_b h);  A, z <- write(phi(k), v, b)
//! ```
//! phi is DPFP with nu rolled products: dk = 2 nu d_mem features. A first segment reads nothing.

mod pending;

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use armt_engine::machine::expect_room;
use armt_engine::ops::{self, Linear, TokenMaps, WriteRule};
use armt_engine::paths::narrow_pays;
use armt_engine::{DType, Param, Tape, Tensor};
use pending::{Pending, rows_from, shared};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{expect_tokens, keys_of, read};
use super::{Memory, MemoryKind, Settings, Step};
use crate::backbone::block::last_rows;
use crate::backbone::{Architecture, Around};
use crate::backprop::Backprop;
use crate::compute::Compute;
use crate::error::{Error, Result};
use crate::state::{Begins, Extent, LayerState, PartLayout, StateLayout};
use crate::weights::{EntryList, Fill, Layout, Maker};

pub(super) const KIND: MemoryKind = MemoryKind { name: "associative", settings: read::<Associative> };

/// The associative memory's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Associative {
    /// Memory tokens of a segment. 16 in the paper's BABILong experiments.
    pub tokens: usize,
    /// Width of keys and queries before DPFP. 64 for GPT-2, 32 or 64 for retrieval.
    pub d_mem: usize,
    /// DPFP's number of rolled products. The paper's is 3.
    #[serde(default = "three")]
    pub nu: usize,
    /// Gamma-correction of the normalisation vector. On in the paper; off is its ablation.
    #[serde(default = "yes")]
    pub correction: bool,
    /// GPT-2 only: memory tokens have position rows of their own, the last of the table. Off by default.
    #[serde(default)]
    pub wrap_pos: bool,
    /// How tokens are written: the paper's way by default, or `projected`, which does not wear the memory out.
    #[serde(default, skip_serializing_if = "Write::is_paper")]
    pub write: Write,
    /// Layers that have a memory, each once; all if absent. The others run along in the batch: they take as much room and time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_layers: Option<Vec<usize>>,
}

/// How the tokens of a segment are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Write {
    /// All against the old memory, what they replace divided by z . phi (equations 1 to 4).
    #[default]
    Paper,
    /// One after the other, what they replace divided by |phi|^2: nothing that a write takes away is ever more than there was, so A stays
    /// bounded however long the text is.
    Projected,
}

impl Write {
    fn is_paper(&self) -> bool {
        *self == Write::Paper
    }

    fn rule(self) -> WriteRule {
        match self {
            Write::Paper => WriteRule::Paper,
            Write::Projected => WriteRule::Projected,
        }
    }
}

fn three() -> usize {
    3
}

fn yes() -> bool {
    true
}

impl Associative {
    /// The paper's memory of so many tokens and this width of keys, in all layers.
    pub fn new(tokens: usize, d_mem: usize) -> Self {
        Associative { tokens, d_mem, nu: three(), correction: yes(), wrap_pos: false, write: Write::Paper, memory_layers: None }
    }
}

impl Settings for Associative {
    fn kind(&self) -> &'static str {
        KIND.name
    }

    fn around(&self) -> Around {
        Around { before: 0, after: self.tokens, wrapped: self.wrap_pos }
    }

    fn wrapping(&self) -> (&'static str, &'static str) {
        ("memory_cell.model.", "layer.")
    }

    fn check(&self, architecture: &Architecture) -> Result<()> {
        expect_tokens(self.tokens)?;
        if self.d_mem == 0 || self.nu == 0 || self.nu >= self.d_mem.saturating_mul(2) {
            let got = format!("d_mem {}, nu {}", self.d_mem, self.nu);
            return Err(Error::config("memory", "d_mem >= 1 and 1 <= nu < 2 d_mem", got));
        }
        // A of all layers: no model needs more for one text than that.
        let keys = self.d_mem.saturating_mul(2).saturating_mul(self.nu);
        expect_room("memory.d_mem", &[architecture.layers, keys, architecture.width + 1, size_of::<f32>()])?;
        let Some(with) = &self.memory_layers else { return Ok(()) };
        let refuse = |expected: &str, got: &dyn Display| Err(Error::config("memory.memory_layers", expected, got));
        if with.is_empty() {
            return refuse("at least one layer, or nothing for all", &"none");
        }
        if let Some(bad) = with.iter().find(|l| **l >= architecture.layers) {
            return refuse(&format!("layers below {}", architecture.layers), bad);
        }
        match with.iter().enumerate().find(|(i, l)| with[..*i].contains(l)) {
            Some((_, again)) => refuse("each layer once", &format!("{again} again")),
            None => Ok(()),
        }
    }

    fn keys(&self) -> Map<String, Value> {
        keys_of(self)
    }

    fn build(&self, make: &mut Maker, a: &Architecture, _: usize) -> Result<Box<dyn Memory>> {
        let (l, d) = (a.layers, a.width);
        // PyTorch's default for a linear layer: uniform within 1 / sqrt(in).
        let uniform = Fill::Uniform(1.0 / (d as f64).sqrt());
        Ok(Box::new(AssociativeMemory {
            query: make.param("assoc.query", &[l, d, self.d_mem], uniform)?,
            key: make.param("assoc.key", &[l, d, self.d_mem], uniform)?,
            value: make.param("assoc.value", &[l, d, d], Fill::Value(0.0))?,
            beta: make.param("assoc.beta", &[l, d, 1], uniform)?,
            beta_bias: make.param("assoc.beta_bias", &[l, 1], uniform)?,
            settings: self.clone(),
            compute: make.compute().clone(),
        }))
    }
}

/// The memory's maps (equations 1 and 4).
struct AssociativeMemory {
    settings: Associative,
    query: Param,     // W_Q [L, d, d_mem]
    key: Param,       // W_K [L, d, d_mem]
    value: Param,     // W_V [L, d, d], zero at first
    beta: Param,      // W_b [L, d, 1]
    beta_bias: Param, // [L, 1]
    compute: Arc<Compute>,
}

impl Memory for AssociativeMemory {
    fn layout(&self) -> StateLayout {
        let (l, d) = (self.value.value().dims()[0], self.value.value().dims()[1]);
        let dk = 2 * self.settings.nu * self.settings.d_mem;
        let a = vec![Extent::Size(l), Extent::Texts, Extent::Size(dk), Extent::Size(d)];
        let z = vec![Extent::Size(l), Extent::Texts, Extent::Size(dk)];
        StateLayout { kind: KIND.name, parts: vec![PartLayout::f32("A", a), PartLayout::f32("z", z)], begins: Begins::Zero }
    }

    fn params(&self) -> Vec<&Param> {
        vec![&self.query, &self.key, &self.value, &self.beta, &self.beta_bias]
    }

    fn layer_entries<'a>(&'a self, list: &mut EntryList<'a>, prefix: &str, l: usize) {
        let at_rest = self.settings.memory_layers.as_ref().is_some_and(|with| !with.contains(&l));
        list.resting(at_rest, |list| {
            for (name, param) in [("W_mq", &self.query), ("W_mk", &self.key), ("W_mv", &self.value), ("W_mb", &self.beta)] {
                let (input, output) = (param.value().dims()[1], param.value().dims()[2]);
                let layout = Layout::Columns { from: 0, columns: output };
                list.layer(format!("{prefix}{name}.weight"), param, l, vec![output, input], layout);
            }
            list.layer(format!("{prefix}W_mb.bias"), &self.beta_bias, l, vec![1], Layout::Plain);
        });
    }

    /// A is changed in place.
    fn own(&self, mut tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        tensors[0] = ops::scale(&tensors[0], 1.0)?;
        Ok(tensors)
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> Result<(Tensor, LayerState)> {
        let (x, memory) = self.settle_and_read(step, x, memory)?;
        let y = step.block(&x)?;
        let memory = self.write(step, &y, memory)?;
        Ok((y, memory))
    }

    /// The last layer computes only its memory tokens, where that is less work.
    fn step_unheard(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> Result<(Option<Tensor>, LayerState)> {
        if step.backprop.recompute || !narrow_pays(x.elements() / x.dims()[0], self.compute.device().is_cuda()) {
            let (y, memory) = self.step(step, x, memory)?;
            let before = y.dims()[0] - 1;
            return Ok(((before > 0).then(|| ops::rows(&y, 0..before)).transpose()?, memory));
        }
        let (x, memory) = self.settle_and_read(step, x, memory)?;
        let m = self.settings.tokens;
        let (y, last) = step.blocks.run_to_last_rows(step.tape, step.layers.clone(), &x, step.padding, m)?;
        let tokens = match &y {
            None => last,
            Some(y) => ops::concat(&[&last_rows(y, m)?, &last], 0)?,
        };
        Ok((y, self.write(step, &tokens, memory)?))
    }

    fn settle(&self, mut memory: LayerState) -> Result<LayerState> {
        if let Some(write) = take_pending(&mut memory) {
            write.apply(&mut memory.tensors)?;
        }
        Ok(memory)
    }

    fn cut(&self, mut memory: LayerState, layers: &Range<usize>) -> Result<LayerState> {
        let rows = memory.rows(layers);
        if let Some(write) = take_pending(&mut memory) {
            memory.waiting = Some(Box::new(write.cut(&rows)?));
        }
        memory.cut(layers)
    }

    /// On a tape A gets a buffer of its own: that of the steps is unwound on the way back.
    fn end(&self, tape: &Tape, mut tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        if tape.is_recording() {
            tensors[0] = ops::scale(&tensors[0], 1.0)?;
        }
        Ok(tensors)
    }

    fn look(&self, step: &Step<'_>, x: &Tensor, memory: &LayerState, _: usize) -> Result<Tensor> {
        self.read(step.tape, &step.layers, x, memory)
    }
}

fn take_pending(memory: &mut LayerState) -> Option<Box<Pending>> {
    memory.waiting.take().and_then(|write| write.downcast().ok())
}

impl AssociativeMemory {
    /// x plus what the memory associates with it. An empty memory adds nothing.
    fn read(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor, memory: &LayerState) -> Result<Tensor> {
        let rows = memory.rows(layers);
        if memory.fresh[rows.clone()].iter().flatten().all(|fresh| *fresh) {
            return Ok(x.clone());
        }
        let (q, nu) = (self.queries(tape, layers, x)?, self.settings.nu);
        let (a, z) = (&memory.tensors[0], &memory.tensors[1]);
        self.with_reading(layers, x, |residual| Ok(ops::assoc_read_rows(&q, a, z, rows, nu, residual)?))
    }

    /// Does the write that the memory may still wait for and reads: in one pass for layers that were written and are read now. In the ramps
    /// at both ends of a text there are also layers that were written and rest now, and layers that are read for the first time.
    fn settle_and_read(&self, step: &Step<'_>, x: &Tensor, mut memory: LayerState) -> Result<(Tensor, LayerState)> {
        let (rows, first) = (memory.rows(&step.layers), memory.layers.start);
        let Some(write) = take_pending(&mut memory) else {
            return Ok((self.read(step.tape, &step.layers, x, &memory)?, memory));
        };
        let both = shared(&rows, &write.rows);
        // Where nothing goes back, reading the ramps' layers in parts would cost more than it saves; and so would writing them in parts where
        // each write that is not in place copies the layers that rest.
        let in_parts = step.tape.is_recording() && (write.in_place || both == write.rows);
        if both.is_empty() || !(in_parts || rows == write.rows) {
            write.apply(&mut memory.tensors)?;
            return Ok((self.read(step.tape, &step.layers, x, &memory)?, memory));
        }
        let mut parts = Vec::new();
        for part in [rows.start..both.start, both.clone(), both.end..rows.end].into_iter().filter(|part| !part.is_empty()) {
            let (x, layers) = (rows_from(x, &part, rows.start)?, first + part.start..first + part.end);
            let y = match part == both {
                true => self.write_and_read(step.tape, &layers, &x, &write, &mut memory)?,
                false => self.read(step.tape, &layers, &x, &memory)?,
            };
            parts.push(y);
        }
        Ok((ops::concat(&parts.iter().collect::<Vec<_>>(), 0)?, memory))
    }

    /// Does a write, and reads layers `layers`, which are among those it is for.
    fn write_and_read(
        &self,
        tape: &Tape,
        layers: &Range<usize>,
        x: &Tensor,
        write: &Pending,
        memory: &mut LayerState,
    ) -> Result<Tensor> {
        let rows = memory.rows(layers);
        let resting = [write.rows.start..rows.start, rows.end..write.rows.end];
        for rows in resting.into_iter().filter(|rows| !rows.is_empty()) {
            write.part(&rows)?.apply(&mut memory.tensors)?;
        }
        let write = write.part(&rows)?;
        let q = self.queries(tape, layers, x)?;
        self.with_reading(layers, x, |residual| write.apply_and_read(&mut memory.tensors, &q, residual))
    }

    /// Raw queries of x `[n, B, T, d]`: `[n, B, T, d_mem]`.
    fn queries(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor) -> Result<Tensor> {
        Ok(ops::linear(x, &tape.param_rows(&self.query, layers.clone())?, Linear::default())?)
    }

    /// x plus what `read` gives; it adds a residual that it is given itself.
    fn with_reading(
        &self,
        layers: &Range<usize>,
        x: &Tensor,
        read: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if self.settings.memory_layers.is_none() {
            return read(Some(x));
        }
        // What layers without a memory read counts nothing.
        Ok(ops::add(x, &self.of_memory_layers(layers, read(None)?)?)?)
    }

    /// Adds the gradients of what importance costs, of which each is a mean over all writes of the pass.
    fn seed_costs(&self, step: &Step<'_>, beta: &Tensor) -> Result<()> {
        let Backprop { sparse, background, .. } = step.backprop;
        if !step.tape.is_recording() || (sparse == 0.0 && step.background.is_none()) {
            return Ok(());
        }
        let layers = self.settings.memory_layers.as_ref().map_or(self.value.value().dims()[0], Vec::len).max(1);
        let share = 1.0 / (layers * beta.dims()[1] * beta.dims()[2] * step.segments) as f32;
        let raw = beta.detach();
        let importance = ops::sigmoid(&raw)?;
        let mut slopes = Vec::new();
        if sparse > 0.0 {
            // s (1 - s), without the difference's rounding where s is near 1.
            let slope = ops::mul(&importance, &ops::sigmoid(&ops::scale(&raw, -1.0)?)?)?;
            slopes.push(ops::scale(&slope, sparse * share)?);
        }
        if let Some(alone) = step.background {
            // -ln(1 - s) has the slope s.
            let slope = ops::mul(&importance, &ops::cast(alone, raw.dtype())?)?;
            slopes.push(ops::scale(&slope, background * share)?);
        }
        for slope in slopes {
            step.tape.seed(beta, &self.of_memory_layers(&step.layers, slope)?)?;
        }
        Ok(())
    }

    /// x `[n, ..]` of layers that have a memory, and 0 of those that have none but run along in the batch.
    fn of_memory_layers(&self, layers: &Range<usize>, x: Tensor) -> Result<Tensor> {
        let Some(with) = &self.settings.memory_layers else { return Ok(x) };
        let share: Vec<f32> = layers.clone().map(|l| f32::from(u8::from(with.contains(&l)))).collect();
        let mut shape = vec![1; x.dims().len()];
        shape[0] = share.len();
        Ok(ops::mul(&x, &ops::cast(&self.compute.constant(&share, &shape)?, x.dtype())?)?)
    }

    /// The memory after the outputs of memory tokens were written, the last m rows of y `[n, B, T, d]`. In training, and where the memory is
    /// rounded for its next read, the write waits for that read.
    fn write(&self, step: &Step<'_>, y: &Tensor, mut memory: LayerState) -> Result<LayerState> {
        let (n, texts) = (y.dims()[0], y.dims()[1]);
        let rows = memory.rows(&step.layers);
        let weight = |p| step.tape.param_rows(p, step.layers.clone());
        let (key, value) = (weight(&self.key)?, weight(&self.value)?);
        let (beta, bias) = (weight(&self.beta)?, weight(&self.beta_bias)?);
        let maps = TokenMaps { key: &key, value: &value, beta: &beta, bias: &bias };
        let [k, v, beta] = ops::assoc_tokens(y, self.settings.tokens, maps)?;
        self.seed_costs(step, &beta)?;
        let fresh = &mut memory.fresh[rows.clone()];
        let first = if fresh.iter().flatten().any(|fresh| *fresh) {
            let flags: Vec<i32> = fresh.iter().flatten().map(|fresh| i32::from(*fresh)).collect();
            Some(self.compute.constant(&flags, &[n, texts])?)
        } else {
            None
        };
        fresh.iter_mut().for_each(|texts| texts.fill(false));
        let Associative { correction, nu, write: how, .. } = self.settings;
        let (dtype, recorded) = (self.compute.dtype(), step.tape.is_recording());
        let in_place = !recorded || step.backprop.unwinds(dtype);
        let write = Pending { rows, k, v, beta, first, correction, nu, rule: how.rule(), in_place };
        if recorded || dtype == DType::BF16 {
            memory.waiting = Some(Box::new(write));
        } else {
            write.apply(&mut memory.tensors)?;
        }
        Ok(memory)
    }
}
