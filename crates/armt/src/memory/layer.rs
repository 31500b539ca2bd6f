//! A layer's step: read its memory, run the block, write its memory. For any range of layers at once.
//!
//! ```text
//! associative: x <- x + A^T phi(W_Q x) / (z . phi(W_Q x));  y = block(x);  A, z <- write(last m rows of y)   (equations 1-4)
//! prmt:        first and last m rows of x <- M;             y = block(x);  M <- last m rows of y
//! window:      y = block(x seeing the previous segment);    the window <- this segment's keys and values, detached
//! ```

use std::ops::Range;

use armt_engine::ops;
use armt_engine::{DType, Tape, Tensor};

use super::associative::Pending;
use super::state::{Content, MemoryState};
use crate::error::{Error, Result};
use crate::model::{Attend, Model, Padding};
use crate::schedule::Backprop;

/// Elements of a layer's inputs, B T d, from which on a GPU gains by leaving out most of the last layer. Of w1's shape 4 texts have as many:
/// they gain at most 1 %, 8 texts 4 %, and 2 would lose 6 %.
const NARROW_FROM: usize = 3 << 19;

/// The memory of some layers, stacked: what a layer's step takes and gives back. No two may wait for the same write, so it is not cloned.
pub(crate) struct LayerMemory {
    /// Which layers, n of them.
    pub(super) layers: Range<usize>,
    pub(crate) kind: Kind,
}

/// What the layers keep.
pub(crate) enum Kind {
    /// A `[n, B, dk, d]`, z `[n, B, dk]`, for each layer whether it still is empty, and a write that waits.
    Associative { a: Tensor, z: Tensor, empty: Vec<bool>, pending: Option<Box<Pending>> },
    /// Memory tokens `[n, B, m, d]`.
    Prmt(Tensor),
    /// The previous segment's packed queries, keys and values `[n, B, T, ..]` and its mask `[n, B, T]`; nothing before the first.
    Window(Option<(Tensor, Tensor)>),
    /// Nothing.
    None,
}

impl LayerMemory {
    /// The part of layers `layers` of a state, to be read. It shares the state's buffers.
    pub(super) fn of(state: &MemoryState, model: &Model, layers: Range<usize>, tape: &Tape) -> Result<Self> {
        let kind = match &state.content {
            Content::Associative { a, z } => Kind::Associative {
                a: ops::rows(a, layers.clone())?,
                z: ops::rows(z, layers.clone())?,
                empty: vec![state.is_empty(); layers.len()],
                pending: None,
            },
            Content::Prmt(Some(m)) => Kind::Prmt(ops::rows(m, layers.clone())?),
            Content::Prmt(None) => {
                let learned = model.weights().layer_memory.as_ref();
                let learned = learned.ok_or_else(|| Error::Argument("the model has no layer memory".into()))?;
                Kind::Prmt(spread(&tape.param_rows(learned, layers.clone())?, state.batch)?)
            }
            Content::Window(Some((qkv, mask))) => {
                let mask = spread_mask(mask, layers.len())?;
                Kind::Window(Some((ops::rows(qkv, layers.clone())?, mask)))
            }
            Content::Window(None) => Kind::Window(None),
            Content::Rmt(_) | Content::None => Kind::None,
        };
        Ok(LayerMemory { layers, kind })
    }

    /// The same in a buffer that steps may write to: A is changed in place.
    pub(crate) fn owned(mut self) -> Result<Self> {
        if let Kind::Associative { a, .. } = &mut self.kind {
            *a = ops::scale(a, 1.0)?;
        }
        Ok(self)
    }

    /// The same, with an unseen window of `width` positions where there is none yet, so that layers that start run with those that do.
    pub(crate) fn with_room(mut self, model: &Model, batch: usize, width: usize) -> Result<Self> {
        if let Kind::Window(None) = self.kind {
            let (n, packed) = (self.layers.len(), model.weights().qkv.weight.value().dims()[2]);
            let keys = Tensor::zeros([n, batch, width, packed], model.dtype(), model.device())?;
            let mask = Tensor::zeros([n, batch, width], DType::I32, model.device())?;
            self.kind = Kind::Window(Some((keys, mask)));
        }
        Ok(self)
    }

    /// The same with no gradient going back through layers `layers`.
    pub(crate) fn cut(mut self, layers: Range<usize>) -> Result<Self> {
        let rows = self.rows(&layers);
        match &mut self.kind {
            Kind::Associative { a, z, pending, .. } => {
                *pending = pending.take().map(|write| write.cut(&rows).map(Box::new)).transpose()?;
                *a = ops::cut_rows(a, rows.clone())?;
                *z = ops::cut_rows(z, rows)?;
            }
            Kind::Prmt(m) => *m = ops::cut_rows(m, rows)?,
            // A window is detached already.
            Kind::Window(_) | Kind::None => {}
        }
        Ok(self)
    }

    /// Where layers lie in the stack.
    pub(super) fn rows(&self, layers: &Range<usize>) -> Range<usize> {
        layers.start - self.layers.start..layers.end - self.layers.start
    }

    /// The same with nothing waiting to be written.
    pub(super) fn settled(mut self) -> Result<Self> {
        if let Kind::Associative { a, z, pending, .. } = &mut self.kind
            && let Some(write) = pending.take()
        {
            (*a, *z) = write.to(a, z)?;
        }
        Ok(self)
    }

    /// Memories of neighbouring layers, one after the other, as one.
    pub(crate) fn join(parts: Vec<LayerMemory>) -> Result<Self> {
        let parts = parts.into_iter().map(LayerMemory::settled).collect::<Result<Vec<_>>>()?;
        let Some((first, last)) = parts.first().zip(parts.last()) else {
            return Err(Error::Argument("no layers to join".into()));
        };
        let gather = |pick: &dyn Fn(&Kind) -> Option<Tensor>| -> Result<Tensor> {
            let tensors: Vec<Tensor> = parts.iter().filter_map(|p| pick(&p.kind)).collect();
            Ok(ops::concat(&tensors.iter().collect::<Vec<_>>(), 0)?)
        };
        let kind = match &first.kind {
            Kind::Associative { .. } => Kind::Associative {
                a: gather(&|k| if let Kind::Associative { a, .. } = k { Some(a.clone()) } else { None })?,
                z: gather(&|k| if let Kind::Associative { z, .. } = k { Some(z.clone()) } else { None })?,
                empty: parts
                    .iter()
                    .flat_map(|p| if let Kind::Associative { empty, .. } = &p.kind { empty.clone() } else { vec![] })
                    .collect(),
                pending: None,
            },
            Kind::Prmt(_) => Kind::Prmt(gather(&|k| if let Kind::Prmt(m) = k { Some(m.clone()) } else { None })?),
            Kind::Window(Some(_)) => Kind::Window(Some((
                gather(&|k| if let Kind::Window(Some((keys, _))) = k { Some(keys.clone()) } else { None })?,
                gather(&|k| if let Kind::Window(Some((_, mask))) = k { Some(mask.clone()) } else { None })?,
            ))),
            Kind::Window(None) => Kind::Window(None),
            Kind::None => Kind::None,
        };
        Ok(LayerMemory { layers: first.layers.start..last.layers.end, kind })
    }

    /// The whole state after the last layer wrote. On a tape A gets a buffer of its own: that of the steps is unwound on the way back.
    pub(crate) fn into_state(self, tape: &Tape, batch: usize, tokens_read: u64, segments_read: u64) -> Result<MemoryState> {
        let content = match self.settled()?.kind {
            Kind::Associative { a, z, .. } => {
                let a = if tape.is_recording() { ops::scale(&a, 1.0)? } else { a };
                Content::Associative { a, z }
            }
            Kind::Prmt(m) => Content::Prmt(Some(m)),
            Kind::Window(Some((k, m))) => {
                let (rows, width) = (m.dims()[1], m.dims()[2]);
                Content::Window(Some((k, ops::reshape(&ops::rows(&m, 0..1)?, [rows, width])?)))
            }
            Kind::Window(None) => Content::Window(None),
            Kind::None => Content::None,
        };
        Ok(MemoryState { content, batch, tokens_read, segments_read })
    }
}

/// `whole` with rows `rows` of its leading axis replaced.
fn replaced(whole: &Tensor, rows: Range<usize>, part: &Tensor) -> Result<Tensor> {
    let n = whole.dims()[0];
    let (before, after) = (ops::rows(whole, 0..rows.start)?, ops::rows(whole, rows.end..n)?);
    let parts: Vec<&Tensor> = [&before, part, &after].into_iter().filter(|t| t.dims()[0] > 0).collect();
    Ok(ops::concat(&parts, 0)?)
}

/// The last m rows of `[n, B, T, ..]`, which are those of the memory tokens.
pub(crate) fn last_rows(x: &Tensor, m: usize) -> Result<Tensor> {
    Ok(ops::narrow(x, 2, x.dims()[2] - m, m)?)
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
    /// One step of layers `layers`: x `[n, B, T, d]` of n segments. Takes the memory of these layers, and maybe of others that rest; gives
    /// the layers' outputs and the memory after it.
    pub(crate) fn layer_step(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        x: &Tensor,
        memory: LayerMemory,
        padding: Option<&Padding>,
        backprop: Backprop,
    ) -> Result<(Tensor, LayerMemory)> {
        let rows = memory.rows(&layers);
        let block = |x: &Tensor| match backprop.recompute {
            true => self.lean_block(tape, &layers, x, padding),
            false => self.segment_block(tape, &layers, x, padding),
        };
        let (y, kind) = match &memory.kind {
            Kind::Associative { .. } => {
                let (x, memory) = self.settling_read(tape, layers.clone(), x, memory)?;
                let y = block(&x)?;
                let tokens = last_rows(&y, self.config().memory.tokens_after())?;
                let memory = self.associative_write(tape, layers, &tokens, memory, backprop.unwinds(self.dtype()))?;
                return Ok((y, memory));
            }
            Kind::Prmt(whole) => {
                let m = ops::rows(whole, rows.clone())?;
                let (tokens, t) = (m.dims()[2], x.dims()[2]);
                let x = ops::concat(&[&m, &ops::narrow(x, 2, tokens, t - 2 * tokens)?, &m], 2)?;
                let y = block(&x)?;
                let m = last_rows(&y, tokens)?;
                (y, Kind::Prmt(replaced(whole, rows, &m)?))
            }
            Kind::Window(previous) => {
                let (n, batch, t) = (x.dims()[0], x.dims()[1], x.dims()[2]);
                let own = match padding {
                    Some(padding) => padding.clone(),
                    None => self.no_padding(n, batch, t)?,
                };
                match previous {
                    None => {
                        let (y, qkv) = self.block(tape, layers.clone(), x, Attend::Segment(padding))?;
                        (y, Kind::Window(Some((qkv.detach(), own.mask))))
                    }
                    Some((all_keys, all_seen)) => {
                        let (keys, seen) = (ops::rows(all_keys, rows.clone())?, ops::rows(all_seen, rows.clone())?);
                        let both = self.after_window(&seen, &own)?;
                        let (y, qkv) = self.block(tape, layers.clone(), x, Attend::Window(&keys, &both))?;
                        let keys = replaced(all_keys, rows.clone(), &qkv.detach())?;
                        (y, Kind::Window(Some((keys, replaced(all_seen, rows, &own.mask)?))))
                    }
                }
            }
            Kind::None => (block(x)?, Kind::None),
        };
        Ok((y, LayerMemory { kind, ..memory }))
    }

    /// The same where nobody wants the outputs of the last of the layers: it computes those of its memory tokens alone, where that is less
    /// work. Gives the outputs of the layers before it, if there are any.
    pub(crate) fn last_layer_step(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        x: &Tensor,
        memory: LayerMemory,
        padding: Option<&Padding>,
        backprop: Backprop,
    ) -> Result<(Option<Tensor>, LayerMemory)> {
        // The few rows are kernels of their own, which pay on a GPU only beside large ones.
        let large = x.elements() / x.dims()[0] >= NARROW_FROM || !self.device().is_cuda();
        let narrow = matches!(memory.kind, Kind::Associative { .. }) && !backprop.recompute && large;
        if !narrow {
            let (y, memory) = self.layer_step(tape, layers, x, memory, padding, backprop)?;
            let before = y.dims()[0] - 1;
            return Ok(((before > 0).then(|| ops::rows(&y, 0..before)).transpose()?, memory));
        }
        let (x, memory) = self.settling_read(tape, layers.clone(), x, memory)?;
        let (y, last) = self.block_to_memory(tape, layers.clone(), &x, padding)?;
        let tokens = match &y {
            None => last,
            Some(y) => ops::concat(&[&last_rows(y, last.dims()[2])?, &last], 0)?,
        };
        Ok((y, self.associative_write(tape, layers, &tokens, memory, backprop.unwinds(self.dtype()))?))
    }

    /// The block within a segment.
    fn segment_block(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor, padding: Option<&Padding>) -> Result<Tensor> {
        Ok(self.block(tape, layers.clone(), x, Attend::Segment(padding))?.0)
    }

    /// The same, computed again when its gradient is asked for.
    fn lean_block(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor, padding: Option<&Padding>) -> Result<Tensor> {
        let (model, layers, padding) = (self.clone(), layers.clone(), padding.cloned());
        let mut y = tape.recompute(&[x], move |tape, x| {
            let y = model.segment_block(tape, &layers, &x[0], padding.as_ref());
            y.map(|y| vec![y]).map_err(Error::into_engine)
        })?;
        Ok(y.remove(0))
    }
}
