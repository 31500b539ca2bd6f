//! The model: configuration and parameters, immutable in use. Memory goes in and comes out as a value.

mod block;
mod constants;
mod inputs;
mod rotary;
mod weights;

use std::sync::Arc;

use armt_engine::ops;
use armt_engine::{DType, Device, Param, Tape, Tensor};
pub(crate) use block::{Attend, Cache};
use constants::Constants;
pub(crate) use inputs::Embedded;
pub use inputs::{BatchShape, DeviceBatch, HostBatch, Inputs};
pub use weights::{AssociativeWeights, LinearWeights, NormWeights, Weights};

use crate::config::{Alignment, Backbone, Config, MemoryConfig, Positions};
use crate::error::{Error, Result};
use crate::memory::MemoryState;
use crate::schedule::{Backprop, Choice};
use crate::segment::{Batch, Segment, segments};

/// A backbone with its memory. Cheap to clone; clones share the parameters.
#[derive(Clone)]
pub struct Model {
    pub(crate) config: Arc<Config>,
    pub(crate) backbone: Backbone,
    pub(crate) weights: Arc<Weights>,
    pub(crate) device: Device,
    dtype: DType,
    /// Tables of cos and sin.
    pub(crate) rotary: Option<(Tensor, Tensor)>,
    constants: Arc<Constants>,
}

/// What n segments with padding need beside their input.
#[derive(Clone)]
pub(crate) struct Padding {
    /// Which keys can be seen, `[n, B, T]`.
    pub(crate) mask: Tensor,
    /// Rotary positions, `[n, T]`.
    pub(crate) rows: Tensor,
}

impl Padding {
    /// That of the segments before segment `at` of the n, and of those from it on.
    fn split(&self, at: usize) -> Result<[Self; 2]> {
        let ([mask, masks], [rows, more]) = (ops::split_rows(&self.mask, at)?, ops::split_rows(&self.rows, at)?);
        Ok([Padding { mask, rows }, Padding { mask: masks, rows: more }])
    }
}

/// What a training example asks for: which positions predict, and what.
#[derive(Clone, Debug)]
pub struct Targets {
    /// For each position, row by row, the token it should predict; negative where it is not asked.
    pub next: Vec<i32>,
}

impl Targets {
    /// From labels and a mask as the authors have them: position i predicts label i + 1 where the mask at i is set; a label of -100
    /// is not asked for; the last position predicts nothing.
    pub fn shifted(labels: &[i32], mask: Option<&[bool]>, batch: usize) -> Self {
        let tokens = labels.len() / batch.max(1);
        let next = (0..labels.len())
            .map(|i| {
                let asked = (i + 1) % tokens != 0 && mask.is_none_or(|m| m[i]);
                if asked { labels[i + 1].max(-1) } else { -1 }
            })
            .collect();
        Targets { next }
    }
}

impl Model {
    /// A model with fresh parameters. `dtype` is the type of the computation: f32, or bf16 on CUDA.
    pub fn fresh(config: Config, seed: u64, dtype: DType, device: &Device) -> Result<Self> {
        Self::with_weights(config, Some(seed), dtype, device)
    }

    /// A model whose parameters are zero, to be set.
    pub fn blank(config: Config, dtype: DType, device: &Device) -> Result<Self> {
        Self::with_weights(config, None, dtype, device)
    }

    fn with_weights(config: Config, seed: Option<u64>, dtype: DType, device: &Device) -> Result<Self> {
        let backbone = config.check()?;
        let weights = Weights::fresh(&config, &backbone, seed, dtype, device)?;
        let rotary = match &backbone.positions {
            Positions::Learned(_) => None,
            Positions::Rotary(r) => {
                let width = config.segment_size + config.memory.tokens_before() + config.memory.tokens_after();
                // A window sees the previous segment too.
                Some(rotary::tables(r, 2 * width, device)?)
            }
        };
        Ok(Model {
            config: Arc::new(config),
            backbone,
            weights: Arc::new(weights),
            device: device.clone(),
            dtype,
            rotary,
            constants: Arc::default(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The checked backbone.
    pub fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    /// The parameters.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The type of the computation.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.weights.params().iter().map(|p| p.value().elements()).sum()
    }

    /// Cuts a batch into this model's segments.
    pub fn segments(&self, batch: &Batch) -> Result<Vec<Segment>> {
        self.segments_aligned(batch, self.config.segment_alignment)
    }

    /// The same with another alignment.
    pub fn segments_aligned(&self, batch: &Batch, alignment: Alignment) -> Result<Vec<Segment>> {
        if let Some(bad) = batch.ids.iter().find(|id| **id < 0 || **id as usize >= self.backbone.vocab) {
            return Err(Error::Argument(format!("token {bad} is outside the vocabulary of {}", self.backbone.vocab)));
        }
        segments(batch, self.config.segment_size, alignment)
    }

    /// The learned memory tokens for `texts` texts, `[texts, m, d]`; `None` if the model has none.
    pub(crate) fn memory_tokens(&self, tape: &Tape, texts: usize) -> Result<Option<Tensor>> {
        let Some(learned) = &self.weights.memory else { return Ok(None) };
        let m = learned.value().dims()[0];
        let ids: Vec<i32> = (0..texts * m).map(|i| (i % m) as i32).collect();
        Ok(Some(ops::embedding(&tape.param(learned), &self.constant(&ids, &[texts, m])?)?))
    }

    /// Embeddings of ids `[B, t]`.
    pub(crate) fn embed_tokens(&self, tape: &Tape, ids: &[i32], batch: usize) -> Result<Tensor> {
        let ids = Tensor::from_slice(ids, [batch, ids.len() / batch], &self.device)?;
        Ok(ops::embedding(&tape.param(&self.weights.embed), &ids)?)
    }

    /// Adds learned positions, the same for all texts. Rotary models have none to add.
    pub(crate) fn add_positions(&self, tape: &Tape, x: &Tensor, positions: &[i32]) -> Result<Tensor> {
        let Some(table) = &self.weights.positions else { return Ok(x.clone()) };
        let ids = self.constant(positions, &[positions.len()])?;
        Ok(ops::add(x, &ops::embedding(&tape.param(table), &ids)?)?)
    }

    /// Rows of the table of positions for memory tokens before, padding, `text` tokens, memory tokens after.
    fn positions(&self, text: usize, pad: usize) -> Vec<i32> {
        let (before, after) = (self.config.memory.tokens_before(), self.config.memory.tokens_after());
        // With wrap_pos, memory rows stand at the table's ends: RMT's and PRMT's reads first, writes last.
        let (first, last) = match (&self.weights.positions, self.config.memory.wrap_pos()) {
            (Some(table), true) => (before, table.value().dims()[0] - after),
            _ => (before, before + text),
        };
        let run = |from: usize, n: usize| (from..from + n).map(|p| p as i32);
        run(0, before).chain(std::iter::repeat_n(0, pad)).chain(run(first, text)).chain(run(last, after)).collect()
    }

    /// A mask of `width` columns with the memory tokens around them, which are never hidden.
    fn whole_mask(&self, mask: &[i32], width: usize) -> Vec<i32> {
        let (before, after) = (self.config.memory.tokens_before(), self.config.memory.tokens_after());
        mask.chunks(width)
            .flat_map(|row| std::iter::repeat_n(1, before).chain(row.iter().copied()).chain(std::iter::repeat_n(1, after)))
            .collect()
    }

    /// What a segment with a mask needs beside its input.
    fn padding(&self, mask: &[i32], pad: usize, width: usize, batch: usize) -> Result<Padding> {
        let before = self.config.memory.tokens_before();
        let t = before + width + self.config.memory.tokens_after();
        // Rotary positions go on as if the padding were not there.
        let rows: Vec<i32> = (0..t).map(|i| if i < before { i } else { before.max(i.saturating_sub(pad)) } as i32).collect();
        Ok(Padding {
            mask: Tensor::from_slice(&self.whole_mask(mask, width), [1, batch, t], &self.device)?,
            rows: self.constant(&rows, &[1, t])?,
        })
    }

    /// The padding of n segments that have none.
    pub(crate) fn no_padding(&self, n: usize, batch: usize, width: usize) -> Result<Padding> {
        let rows: Vec<i32> = (0..n * width).map(|i| (i % width) as i32).collect();
        Ok(Padding {
            mask: self.constant(&vec![1i32; n * batch * width], &[n, batch, width])?,
            rows: self.constant(&rows, &[n, width])?,
        })
    }

    /// The padding of a window and the segment after it, whose positions go on from the window's end.
    pub(crate) fn after_window(&self, seen: &Tensor, own: &Padding) -> Result<Padding> {
        let (n, t, width) = (own.rows.dims()[0], seen.dims()[2], own.rows.dims()[1]);
        let rows = own.rows.to_vec::<i32>()?;
        let both: Vec<i32> = rows.chunks(width).flat_map(|r| (0..t as i32).chain(r.iter().map(|p| p + t as i32))).collect();
        Ok(Padding { mask: ops::concat(&[seen, &own.mask], 2)?, rows: Tensor::from_slice(&both, [n, t + width], &self.device)? })
    }

    /// Padding of several segments, stacked; `None` if none has any.
    pub(crate) fn stack_padding<'a>(
        &self,
        parts: impl Iterator<Item = Option<&'a Padding>>,
        batch: usize,
        width: usize,
    ) -> Result<Option<Padding>> {
        let parts: Vec<Option<&Padding>> = parts.collect();
        if parts.iter().all(Option::is_none) {
            return Ok(None);
        }
        let whole = self.no_padding(1, batch, width)?;
        let masks: Vec<&Tensor> = parts.iter().map(|p| &p.unwrap_or(&whole).mask).collect();
        let rows: Vec<&Tensor> = parts.iter().map(|p| &p.unwrap_or(&whole).rows).collect();
        Ok(Some(Padding { mask: ops::concat(&masks, 0)?, rows: ops::concat(&rows, 0)? }))
    }

    /// RMT's memory for the next segment: the last m rows after the last norm.
    pub(crate) fn rmt_memory(&self, tape: &Tape, h: &Tensor) -> Result<Tensor> {
        let (t, m) = (h.dims()[1], self.config.memory.tokens_after());
        self.last_norm(tape, &ops::narrow(h, 1, t - m, m)?)
    }

    /// The norm after the last layer.
    pub(crate) fn last_norm(&self, tape: &Tape, h: &Tensor) -> Result<Tensor> {
        let norm = &self.weights.last_norm;
        self.apply_norm(h, &tape.param(&norm.gain), norm.bias.as_ref().map(|b| tape.param(b)).as_ref())
    }

    /// Logits `[.., V]` of outputs `[.., d]` of the last layer.
    pub fn logits(&self, tape: &Tape, h: &Tensor) -> Result<Tensor> {
        let h = self.last_norm(tape, h)?;
        let flat = ops::reshape(&h, [h.shape().rows(), h.shape().last()])?;
        let logits = ops::matmul_nt(&flat, &tape.param(self.weights.head()))?;
        Ok(ops::reshape(&logits, h.shape().with_last(self.backbone.vocab))?)
    }

    /// Reads a batch and gives the logits of its tokens `[B, tokens, V]` in f32 on the host, and the memory afterwards. For tests and
    /// short texts: all logits are kept.
    pub fn forward(&self, batch: &Batch, state: &MemoryState, schedule: Choice) -> Result<(Vec<f32>, MemoryState)> {
        self.forward_aligned(batch, state, schedule, self.config.segment_alignment)
    }

    /// The same with another alignment.
    pub fn forward_aligned(
        &self,
        batch: &Batch,
        state: &MemoryState,
        schedule: Choice,
        alignment: Alignment,
    ) -> Result<(Vec<f32>, MemoryState)> {
        state.expect_fits(self, batch.batch)?;
        let segments = self.segments_aligned(batch, alignment)?;
        let (tokens, vocab, before) = (batch.tokens(), self.backbone.vocab, self.config.memory.tokens_before());
        let mut logits = vec![0f32; batch.batch * tokens * vocab];
        let tape = Tape::off();
        let inputs = Inputs::new(self, &segments, batch.batch)?;
        let state = schedule.schedule(self)?.run(self, &tape, &inputs, state, Backprop::default(), &mut |s, h| {
            let Segment { range, pad, .. } = &segments[s];
            let text = ops::narrow(h, 1, before + pad, range.len())?;
            let values = self.logits(&tape, &text)?.to_f32_vec()?;
            for (b, row) in values.chunks(range.len() * vocab).enumerate() {
                logits[(b * tokens + range.start) * vocab..][..row.len()].copy_from_slice(row);
            }
            Ok(())
        })?;
        Ok((logits, state))
    }

    /// The mean loss of the positions that `targets` ask for, on `tape`, and the memory afterwards. Only the rows that are asked for go
    /// through the head.
    pub fn loss(
        &self,
        tape: &Tape,
        batch: &Batch,
        targets: &Targets,
        state: &MemoryState,
        schedule: Choice,
        backprop: Backprop,
    ) -> Result<(Tensor, MemoryState)> {
        state.expect_fits(self, batch.batch)?;
        let batch = DeviceBatch::new(self, &HostBatch::new(self, batch, targets)?)?;
        self.batch_loss(tape, &batch, state, schedule, backprop)
    }

    /// The mean loss of an example that is on the device, on `tape`, and the memory afterwards.
    pub fn batch_loss(
        &self,
        tape: &Tape,
        batch: &DeviceBatch,
        state: &MemoryState,
        schedule: Choice,
        backprop: Backprop,
    ) -> Result<(Tensor, MemoryState)> {
        let mut rows: Vec<Tensor> = Vec::new();
        let state = schedule.schedule(self)?.run(self, tape, &batch.inputs, state, backprop, &mut |s, h| {
            if let Some(asked) = &batch.asked[s] {
                let flat = ops::reshape(h, [h.dims()[0] * h.dims()[1], h.dims()[2]])?;
                rows.push(ops::embedding(&flat, asked)?);
            }
            Ok(())
        })?;
        let h = ops::concat(&rows.iter().collect::<Vec<_>>(), 0)?;
        let h = self.last_norm(tape, &h)?;
        Ok((ops::linear_cross_entropy(&h, &tape.param(self.weights.head()), &batch.next, 0)?, state))
    }

    /// Every parameter, in a fixed order.
    pub fn params(&self) -> Vec<&Param> {
        self.weights.params()
    }

    /// Whether a step of a given shape always issues the same work on the device, so that it can be recorded. A window's positions are
    /// made on the host.
    pub fn has_fixed_steps(&self) -> bool {
        !matches!(self.config.memory, MemoryConfig::None { sliding_window: true })
    }

    /// Whether the memory is one that a diagonal schedule can carry.
    pub fn has_diagonal(&self) -> bool {
        !matches!(self.config.memory, MemoryConfig::Rmt { .. })
    }
}
