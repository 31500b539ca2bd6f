//! A layer's step: read its memory, run the block, write its memory. For any range of layers at once.
//!
//! ```text
//! associative: x <- x + A^T phi(W_Q x) / (z . phi(W_Q x));  y = block(x);  A, z <- write(last m rows of y)   (equations 1-4)
//! prmt:        first and last m rows of x <- M;             y = block(x);  M <- last m rows of y
//! window:      y = block(x seeing the previous segment);    the window <- this segment's keys and values, detached
//! ```

use std::ops::Range;

use armt_engine::ops::{self, AssocWrite, Linear};
use armt_engine::{DType, Tape, Tensor};

use super::state::{Content, MemoryState};
use crate::config::{Associative, MemoryConfig};
use crate::error::{Error, Result};
use crate::model::{Attend, Model, Padding};

/// The memory of n layers, stacked.
#[derive(Clone)]
pub(crate) enum LayerMemory {
    /// A `[n, B, dk, d]`, z `[n, B, dk]`, and for each layer whether it still is empty.
    Associative { a: Tensor, z: Tensor, empty: Vec<bool> },
    /// Memory tokens `[n, B, m, d]`.
    Prmt(Tensor),
    /// The previous segment's packed queries, keys and values `[n, B, T, ..]` and its mask `[n, B, T]`; nothing before the first.
    Window(Option<(Tensor, Tensor)>),
    /// Nothing.
    None,
}

impl LayerMemory {
    /// The part of layers `layers` of a state.
    pub(super) fn of(state: &MemoryState, model: &Model, layers: Range<usize>, tape: &Tape) -> Result<Self> {
        Ok(match &state.content {
            Content::Associative { a, z } => LayerMemory::Associative {
                a: ops::rows(a, layers.clone())?,
                z: ops::rows(z, layers.clone())?,
                empty: vec![state.is_empty(); layers.len()],
            },
            Content::Prmt(Some(m)) => LayerMemory::Prmt(ops::rows(m, layers)?),
            Content::Prmt(None) => {
                let learned = model.weights().layer_memory.as_ref();
                let learned = learned.ok_or_else(|| Error::Argument("the model has no layer memory".into()))?;
                LayerMemory::Prmt(spread(&tape.param_rows(learned, layers)?, state.batch)?)
            }
            Content::Window(Some((qkv, mask))) => {
                let mask = spread_mask(mask, layers.len())?;
                LayerMemory::Window(Some((ops::rows(qkv, layers)?, mask)))
            }
            Content::Window(None) => LayerMemory::Window(None),
            Content::Rmt(_) | Content::None => LayerMemory::None,
        })
    }

    /// The same, with an unseen window of `width` positions where there is none yet: layers that start can then join those that run.
    pub(crate) fn with_room(self, model: &Model, batch: usize, width: usize) -> Result<Self> {
        let LayerMemory::Window(None) = self else { return Ok(self) };
        let packed = model.weights().qkv.weight.value().dims()[2];
        let keys = Tensor::zeros([1, batch, width, packed], model.dtype(), model.device())?;
        let mask = Tensor::zeros([1, batch, width], DType::I32, model.device())?;
        Ok(LayerMemory::Window(Some((keys, mask))))
    }

    /// Rows of the layer axis.
    pub(crate) fn rows(&self, range: Range<usize>) -> Result<Self> {
        Ok(match self {
            LayerMemory::Associative { a, z, empty } => LayerMemory::Associative {
                a: ops::rows(a, range.clone())?,
                z: ops::rows(z, range.clone())?,
                empty: empty[range].to_vec(),
            },
            LayerMemory::Prmt(m) => LayerMemory::Prmt(ops::rows(m, range)?),
            LayerMemory::Window(Some((k, m))) => LayerMemory::Window(Some((ops::rows(k, range.clone())?, ops::rows(m, range)?))),
            LayerMemory::Window(None) => LayerMemory::Window(None),
            LayerMemory::None => LayerMemory::None,
        })
    }

    /// Memories of neighbouring ranges of layers, joined.
    pub(crate) fn join(parts: &[LayerMemory]) -> Result<Self> {
        let Some(first) = parts.first().filter(|_| parts.len() > 1) else {
            return parts.first().cloned().ok_or_else(|| Error::Argument("no layers to join".into()));
        };
        let gather = |pick: &dyn Fn(&LayerMemory) -> Option<Tensor>| -> Result<Tensor> {
            let tensors: Vec<Tensor> = parts.iter().filter_map(pick).collect();
            Ok(ops::concat(&tensors.iter().collect::<Vec<_>>(), 0)?)
        };
        Ok(match first {
            LayerMemory::Associative { .. } => LayerMemory::Associative {
                a: gather(&|p| if let LayerMemory::Associative { a, .. } = p { Some(a.clone()) } else { None })?,
                z: gather(&|p| if let LayerMemory::Associative { z, .. } = p { Some(z.clone()) } else { None })?,
                empty: parts
                    .iter()
                    .flat_map(|p| if let LayerMemory::Associative { empty, .. } = p { empty.clone() } else { vec![] })
                    .collect(),
            },
            LayerMemory::Prmt(_) => {
                LayerMemory::Prmt(gather(&|p| if let LayerMemory::Prmt(m) = p { Some(m.clone()) } else { None })?)
            }
            LayerMemory::Window(_) => {
                let windows = parts.iter().map(|p| if let LayerMemory::Window(w) = p { w.as_ref() } else { None });
                let Some(windows) = windows.collect::<Option<Vec<_>>>() else {
                    return Err(Error::Argument("a window's layers are joined only once all have one".into()));
                };
                let keys: Vec<&Tensor> = windows.iter().map(|w| &w.0).collect();
                let masks: Vec<&Tensor> = windows.iter().map(|w| &w.1).collect();
                LayerMemory::Window(Some((ops::concat(&keys, 0)?, ops::concat(&masks, 0)?)))
            }
            LayerMemory::None => LayerMemory::None,
        })
    }

    /// The whole state after the last layer wrote.
    pub(crate) fn into_state(self, batch: usize, tokens_read: u64, segments_read: u64) -> Result<MemoryState> {
        let content = match self {
            LayerMemory::Associative { a, z, .. } => Content::Associative { a, z },
            LayerMemory::Prmt(m) => Content::Prmt(Some(m)),
            LayerMemory::Window(Some((k, m))) => {
                let (rows, width) = (m.dims()[1], m.dims()[2]);
                Content::Window(Some((k, ops::reshape(&ops::rows(&m, 0..1)?, [rows, width])?)))
            }
            LayerMemory::Window(None) => Content::Window(None),
            LayerMemory::None => Content::None,
        };
        Ok(MemoryState { content, batch, tokens_read, segments_read })
    }
}

/// `[n, m, d]` repeated for each text: `[n, B, m, d]`.
fn spread(m: &Tensor, batch: usize) -> Result<Tensor> {
    let (n, tokens, d) = (m.dims()[0], m.dims()[1], m.dims()[2]);
    let one = ops::reshape(m, [n, 1, tokens, d])?;
    Ok(ops::concat(&vec![&one; batch], 1)?)
}

/// `[B, T]` repeated for each layer: `[n, B, T]`.
fn spread_mask(mask: &Tensor, n: usize) -> Result<Tensor> {
    let one = ops::reshape(mask, [1, mask.dims()[0], mask.dims()[1]])?;
    Ok(ops::concat(&vec![&one; n], 0)?)
}

impl Model {
    /// One step of layers `layers`: x `[n, B, T, d]` of n segments. Gives the layers' outputs and memory.
    pub(crate) fn layer_step(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        x: &Tensor,
        memory: &LayerMemory,
        padding: Option<&Padding>,
    ) -> Result<(Tensor, LayerMemory)> {
        match memory {
            LayerMemory::Associative { a, z, empty } => {
                let x = self.associative_read(tape, layers.clone(), x, memory)?;
                let (y, _) = self.block(tape, layers.clone(), &x, Attend::Segment(padding))?;
                let (a, z) = self.associative_write(tape, layers, &y, a, z, empty)?;
                Ok((y, LayerMemory::Associative { a, z, empty: vec![false; empty.len()] }))
            }
            LayerMemory::Prmt(m) => {
                let (tokens, t) = (m.dims()[2], x.dims()[2]);
                let x = ops::concat(&[m, &ops::narrow(x, 2, tokens, t - 2 * tokens)?, m], 2)?;
                let (y, _) = self.block(tape, layers, &x, Attend::Segment(padding))?;
                let m = ops::narrow(&y, 2, t - tokens, tokens)?;
                Ok((y, LayerMemory::Prmt(m)))
            }
            LayerMemory::Window(previous) => {
                let (n, batch, t) = (x.dims()[0], x.dims()[1], x.dims()[2]);
                let own = match padding {
                    Some(padding) => padding.clone(),
                    None => self.no_padding(n, batch, t)?,
                };
                let (y, qkv) = match previous {
                    None => self.block(tape, layers, x, Attend::Segment(padding))?,
                    Some((keys, seen)) => {
                        let both = self.after_window(seen, &own)?;
                        self.block(tape, layers, x, Attend::Window(keys, &both))?
                    }
                };
                Ok((y, LayerMemory::Window(Some((qkv.detach(), own.mask)))))
            }
            LayerMemory::None => {
                let (y, _) = self.block(tape, layers, x, Attend::Segment(padding))?;
                Ok((y, LayerMemory::None))
            }
        }
    }

    fn associative(&self) -> Result<(&Associative, &crate::model::AssociativeWeights)> {
        match (&self.config.memory, &self.weights.associative) {
            (MemoryConfig::Associative(config), Some(weights)) => Ok((config, weights)),
            _ => Err(Error::Argument("the model has no associative memory".into())),
        }
    }

    /// x plus what the memory associates with it. An empty memory adds nothing.
    pub(crate) fn associative_read(&self, tape: &Tape, layers: Range<usize>, x: &Tensor, memory: &LayerMemory) -> Result<Tensor> {
        let LayerMemory::Associative { a, z, empty } = memory else { return Ok(x.clone()) };
        if empty.iter().all(|e| *e) {
            return Ok(x.clone());
        }
        let (config, weights) = self.associative()?;
        let q = ops::linear(x, &tape.param_rows(&weights.query, layers.clone())?, Linear::default())?; // [n, B, T, d_mem]
        let Some(with) = &config.memory_layers else {
            return Ok(ops::assoc_read(&q, a, z, config.nu, Some(x))?);
        };
        // Layers without a memory run along in the batch; what they read counts nothing.
        let y = ops::assoc_read(&q, a, z, config.nu, None)?;
        let share: Vec<f32> = layers.map(|l| f32::from(u8::from(with.contains(&l)))).collect();
        let share = Tensor::from_slice(&share, [share.len(), 1, 1, 1], self.device())?;
        Ok(ops::add(x, &ops::mul(&y, &ops::cast(&share, y.dtype())?)?)?)
    }

    /// The memory after the last m rows of y `[n, B, T, d]` were written.
    fn associative_write(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        y: &Tensor,
        a: &Tensor,
        z: &Tensor,
        empty: &[bool],
    ) -> Result<(Tensor, Tensor)> {
        let (config, weights) = self.associative()?;
        let (n, batch, t, m) = (y.dims()[0], y.dims()[1], y.dims()[2], config.tokens);
        let tokens = ops::narrow(y, 2, t - m, m)?; // [n, B, m, d]
        let weight = |p| tape.param_rows(p, layers.clone());
        let k = ops::linear(&tokens, &weight(&weights.key)?, Linear::default())?;
        let v = ops::linear(&tokens, &weight(&weights.value)?, Linear::default())?;
        let bias = weight(&weights.beta_bias)?;
        let beta = ops::linear(&tokens, &weight(&weights.beta)?, Linear { bias: Some(&bias), ..Linear::default() })?;
        let beta = ops::reshape(&beta, [n, batch, m])?;
        let first = if empty.contains(&true) {
            let flags: Vec<i32> = empty.iter().flat_map(|e| std::iter::repeat_n(i32::from(*e), batch)).collect();
            Some(Tensor::from_slice(&flags, [n, batch], self.device())?)
        } else {
            None
        };
        debug_assert!(a.dtype() == DType::F32);
        let write =
            AssocWrite { k: &k, v: &v, beta: &beta, a, z, first: first.as_ref(), correction: config.correction, nu: config.nu };
        Ok(ops::assoc_write(write)?)
    }
}
