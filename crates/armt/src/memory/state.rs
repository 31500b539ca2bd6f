//! The memory as a value: it goes into a reading and comes out of it, and can be cloned, detached, saved and restored.

use armt_engine::{DType, Device, Tensor};

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
        let cut = |t: &Option<Tensor>| t.as_ref().map(Tensor::detach);
        let content = match &self.content {
            Content::Associative { a, z } => Content::Associative { a: a.detach(), z: z.detach() },
            Content::Rmt(m) => Content::Rmt(cut(m)),
            Content::Prmt(m) => Content::Prmt(cut(m)),
            Content::Window(w) => Content::Window(w.as_ref().map(|(k, m)| (k.detach(), m.detach()))),
            Content::None => Content::None,
        };
        MemoryState { content, ..self.clone() }
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.segments_read == 0
    }

    /// The same memory on another device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let moved = |t: &Tensor| t.to_device(device);
        let content = match &self.content {
            Content::Associative { a, z } => Content::Associative { a: moved(a)?, z: moved(z)? },
            Content::Rmt(m) => Content::Rmt(m.as_ref().map(moved).transpose()?),
            Content::Prmt(m) => Content::Prmt(m.as_ref().map(moved).transpose()?),
            Content::Window(w) => Content::Window(match w {
                Some((k, m)) => Some((moved(k)?, moved(m)?)),
                None => None,
            }),
            Content::None => Content::None,
        };
        Ok(MemoryState { content, ..self.clone() })
    }

    /// Refuses a state of another kind of memory, batch or model size.
    pub(crate) fn expect_fits(&self, model: &Model, batch: usize) -> Result<()> {
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
