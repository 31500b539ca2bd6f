//! All (layer, segment) pairs of one diagonal as one batched layer.
//!
//! At step t the layers lo..=hi are active, layer l with segment t - l. The outputs of a step, moved up by one layer, are the inputs of
//! the next; segment t enters at layer 0. In the ramps at both ends only the active layers run, and the others' memory rests. Where nobody
//! wants a segment's outputs, the last layer computes only those of its memory tokens.

use armt_engine::{Tape, Tensor, ops};

use super::{Backprop, Schedule, Sink};
use crate::error::{Error, Result};
use crate::memory::MemoryState;
use crate::model::{Embedded, Inputs, Model};

/// Diagonal by diagonal.
pub struct Diagonal;

impl Schedule for Diagonal {
    fn name(&self) -> &'static str {
        "diagonal"
    }

    fn run(
        &self,
        model: &Model,
        tape: &Tape,
        inputs: &Inputs,
        state: &MemoryState,
        backprop: Backprop,
        each: Sink<'_>,
    ) -> Result<MemoryState> {
        let (layers, count) = (model.backbone().layers, inputs.places.len());
        if count == 0 {
            return Ok(state.clone());
        }
        let mut embedded = Embedded::new();
        let mut memory = state.layers(model, 0..layers, tape)?.with_room(model, state.batch, inputs.width)?.owned()?;
        let mut pipe: Option<Tensor> = None; // outputs of the last step that go on to the next layer
        for t in 0..count + layers - 1 {
            let (lo, hi) = ((t + 1).saturating_sub(count), t.min(layers - 1));
            let fresh = (t < count).then(|| embedded.segment(model, tape, inputs, t)).transpose()?;
            let x = match (fresh, pipe) {
                (Some(fresh), Some(pipe)) => ops::prepend(&fresh, pipe)?,
                (fresh, pipe) => fresh.or(pipe).ok_or_else(|| Error::Argument("no layer is active".into()))?,
            }; // [n, B, T, d]
            let paddings = (lo..=hi).map(|l| inputs.places[t - l].padding.as_ref());
            let padding = model.stack_padding(paddings, state.batch, x.dims()[2])?;
            if hi == layers - 1 && !inputs.places[t - hi].wanted {
                (pipe, memory) = model.last_layer_step(tape, lo..hi + 1, &x, memory, padding.as_ref(), backprop)?;
            } else {
                let y;
                (y, memory) = model.layer_step(tape, lo..hi + 1, &x, memory, padding.as_ref(), backprop)?;
                let n = y.dims()[0];
                let onward = if hi == layers - 1 { n - 1 } else { n };
                if onward < n {
                    let last = ops::rows(&y, n - 1..n)?;
                    each(t - hi, &ops::reshape(&last, &y.dims()[1..])?)?;
                }
                pipe = if onward > 0 { Some(ops::rows(&y, 0..onward)?) } else { None };
            }
            for l in (lo..=hi).filter(|l| backprop.stops_after(t - l)) {
                memory = memory.cut(l..l + 1)?;
            }
        }
        memory.into_state(tape, state.batch, state.tokens_read + inputs.tokens(), state.segments_read + count as u64)
    }
}
