//! The memory as a value: it goes into a reading and comes out of it, and can be cloned, detached, saved and restored.

use armt_engine::{DType, Device, Tensor, ops};

use super::LayerMemory;
use crate::config::MemoryConfig;
use crate::error::{Error, Result};
use crate::model::Model;

/// What a memory holds, by kind. L layers, B texts.
#[derive(Clone)]
pub enum Content {
    /// Each layer's matrix A `[L, B, dk, d]` and normalisation z `[L, B, dk]`, f32.
    Associative {
        /// A.
        a: Tensor,
        /// z.
        z: Tensor,
    },
    /// RMT's memory tokens `[B, m, d]`; the learned ones before the first segment.
    Rmt(Option<Tensor>),
    /// PRMT's memory tokens of each layer `[L, B, m, d]`; the learned ones before the first segment.
    Prmt(Option<Tensor>),
    /// Packed queries, keys and values `[L, B, T, ..]` of the previous segment, and which of them can be seen `[B, T]`.
    Window(Option<(Tensor, Tensor)>),
    /// Nothing is kept.
    None,
}

impl Content {
    /// The tensors that are there, in a fixed order.
    fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Content::Associative { a, z } => vec![a, z],
            Content::Rmt(m) | Content::Prmt(m) => m.iter().collect(),
            Content::Window(w) => w.iter().flat_map(|(keys, mask)| [keys, mask]).collect(),
            Content::None => vec![],
        }
    }

    /// The axis of the texts in each of them.
    fn text_axes(&self) -> [usize; 2] {
        match self {
            Content::Rmt(_) => [0, 0],
            Content::Window(_) => [1, 0],
            Content::Associative { .. } | Content::Prmt(_) | Content::None => [1, 1],
        }
    }

    /// The same with each tensor changed, in the same order.
    fn map(&self, mut f: impl FnMut(&Tensor) -> Tensor) -> Self {
        match self {
            Content::Associative { a, z } => Content::Associative { a: f(a), z: f(z) },
            Content::Rmt(m) => Content::Rmt(m.as_ref().map(f)),
            Content::Prmt(m) => Content::Prmt(m.as_ref().map(f)),
            Content::Window(w) => Content::Window(w.as_ref().map(|(keys, mask)| (f(keys), f(mask)))),
            Content::None => Content::None,
        }
    }
}

/// A model's memory after some segments of a batch of texts.
#[derive(Clone)]
pub struct MemoryState {
    /// What is kept.
    pub content: Content,
    /// Texts read side by side.
    pub batch: usize,
    /// Ordinary tokens read so far, of each text.
    pub tokens_read: u64,
    /// Segments read so far.
    pub segments_read: u64,
}

impl MemoryState {
    /// The memory before anything was read.
    pub fn empty(model: &Model, batch: usize) -> Result<Self> {
        let (l, d) = (model.backbone().layers, model.backbone().width);
        let content = match &model.config().memory {
            MemoryConfig::Associative(m) => {
                let dk = 2 * m.nu * m.d_mem;
                let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, model.device());
                Content::Associative { a: zeros(&[l, batch, dk, d])?, z: zeros(&[l, batch, dk])? }
            }
            MemoryConfig::Rmt { .. } => Content::Rmt(None),
            MemoryConfig::Prmt { .. } => Content::Prmt(None),
            MemoryConfig::None { sliding_window: true } => Content::Window(None),
            MemoryConfig::None { sliding_window: false } => Content::None,
        };
        Ok(MemoryState { content, batch, tokens_read: 0, segments_read: 0 })
    }

    /// The same values, cut off from the tape.
    pub fn detach(&self) -> Self {
        MemoryState { content: self.content.map(Tensor::detach), ..self.clone() }
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.segments_read == 0
    }

    /// The same memory on another device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.try_map(|t, _| t.to_device(device))
    }

    /// The same values in buffers of their own.
    pub fn copied(&self) -> Result<Self> {
        self.try_map(|t, _| {
            let copy = Tensor::zeros(t.shape(), t.dtype(), t.device())?;
            copy.copy_from(t)?;
            Ok(copy)
        })
    }

    /// Replaces the values by those of a memory of the same shape.
    pub fn overwrite(&self, other: &Self) -> Result<()> {
        let pairs = self.content.tensors().into_iter().zip(other.content.tensors());
        Ok(pairs.into_iter().try_for_each(|(to, from)| to.copy_from(from))?)
    }

    /// The memory of some of the texts, in the order of `rows`. A text that there is not is an error.
    pub fn texts(&self, rows: &[usize]) -> Result<Self> {
        if let Some(row) = rows.iter().find(|row| **row >= self.batch) {
            return Err(Error::Argument(format!("expected texts 0 to {} of the memory, got {row}", self.batch.saturating_sub(1))));
        }
        if rows.iter().copied().eq(0..self.batch) {
            return Ok(self.clone());
        }
        let some = self.try_map(|t, axis| {
            let parts = rows.iter().map(|row| ops::narrow(t, axis, *row, 1)).collect::<armt_engine::Result<Vec<_>>>()?;
            ops::concat(&parts.iter().collect::<Vec<_>>(), axis)
        })?;
        Ok(MemoryState { batch: rows.len(), ..some })
    }

    /// Each tensor changed by a function that is also given the axis of the texts in it.
    fn try_map(&self, f: impl Fn(&Tensor, usize) -> armt_engine::Result<Tensor>) -> Result<Self> {
        let tensors = self.content.tensors().into_iter().zip(self.content.text_axes());
        let changed = tensors.map(|(t, axis)| f(t, axis)).collect::<armt_engine::Result<Vec<_>>>()?;
        let mut changed = changed.into_iter();
        // As many come as are asked for.
        let content = self.content.map(|old| changed.next().unwrap_or_else(|| old.clone()));
        Ok(MemoryState { content, ..self.clone() })
    }

    /// Refuses a state of another kind of memory, batch or model size.
    pub fn expect_fits(&self, model: &Model, batch: usize) -> Result<()> {
        if self.batch != batch {
            return Err(Error::Argument(format!("the memory is of {} text(s) side by side, but {batch} came", self.batch)));
        }
        let empty = MemoryState::empty(model, batch)?;
        let fits = match (&self.content, &empty.content) {
            (Content::Associative { a, z }, Content::Associative { a: want_a, z: want_z }) => {
                a.shape() == want_a.shape() && z.shape() == want_z.shape()
            }
            (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
        };
        if fits { Ok(()) } else { Err(Error::Argument("the memory belongs to a model of another kind or size".into())) }
    }

    /// The part of layers `layers`, as [`LayerMemory`] works with it.
    pub(crate) fn layers(&self, model: &Model, layers: std::ops::Range<usize>, tape: &armt_engine::Tape) -> Result<LayerMemory> {
        LayerMemory::of(self, model, layers, tape)
    }
}
