//! All (layer, segment) pairs of one diagonal as one batched layer.
//!
//! At step t the layers lo..=hi are active, layer l with segment t - l. The outputs of a step, moved up by one layer, are the inputs of
//! the next; segment t enters at layer 0. In the ramps at both ends only the active layers run: their memory joins when a layer
//! starts and is put aside when it has seen the last segment.

use armt_engine::{Tape, Tensor, ops};

use super::{Schedule, Sink, expect_even, tokens};
use crate::error::Result;
use crate::memory::{LayerMemory, MemoryState};
use crate::model::Model;
use crate::segment::Segment;

/// Diagonal by diagonal.
pub struct Diagonal;

impl Schedule for Diagonal {
    fn name(&self) -> &'static str {
        "diagonal"
    }

    fn run(&self, model: &Model, tape: &Tape, segments: &[Segment], state: &MemoryState, each: Sink<'_>) -> Result<MemoryState> {
        let width = expect_even(segments)?;
        if segments.is_empty() {
            return Ok(state.clone());
        }
        let (layers, count) = (model.backbone().layers, segments.len());
        let paddings = segments.iter().map(|s| model.padding(s, state.batch)).collect::<Result<Vec<_>>>()?;
        let mut done: Vec<LayerMemory> = Vec::new(); // of layers 0..lo
        let mut active: Option<LayerMemory> = None; // of layers lo..=hi
        let mut pipe: Option<Tensor> = None; // outputs of the last step, for layers lo..=hi of that step
        for t in 0..count + layers - 1 {
            let (lo, hi) = ((t + 1).saturating_sub(count), t.min(layers - 1));
            if t < layers {
                let fresh = state.layers(model, t..t + 1, tape)?.with_room(model, state.batch, width)?;
                active = Some(match active.take() {
                    Some(before) => LayerMemory::join(&[before, fresh])?,
                    None => fresh,
                });
            }
            let mut inputs: Vec<Tensor> = Vec::new();
            if t < count {
                let x = model.embed(tape, &segments[t], state.batch, None)?;
                inputs.push(ops::reshape(&x, [1, x.dims()[0], x.dims()[1], x.dims()[2]])?);
            }
            inputs.extend(pipe.take());
            let x = if inputs.len() == 1 { inputs.remove(0) } else { ops::concat(&inputs.iter().collect::<Vec<_>>(), 0)? };
            let padding = model.stack_padding((lo..=hi).map(|l| paddings[t - l].as_ref()), x.dims()[1], x.dims()[2])?;
            let Some(memory) = active.take() else { break };
            let (y, mut memory) = model.layer_step(tape, lo..hi + 1, &x, &memory, padding.as_ref())?;
            let mut outputs = y;
            if hi == layers - 1 {
                let n = hi - lo + 1;
                let last = ops::rows(&outputs, n - 1..n)?;
                let (b, width, d) = (last.dims()[1], last.dims()[2], last.dims()[3]);
                each(t - hi, &ops::reshape(&last, [b, width, d])?)?;
                outputs = ops::rows(&outputs, 0..n - 1)?;
            }
            if t + 1 >= count {
                // Layer lo has seen the last segment.
                let n = hi - lo + 1;
                done.push(memory.rows(0..1)?);
                memory = memory.rows(1..n)?;
            }
            active = (hi > lo || t + 1 < count).then_some(memory);
            pipe = (outputs.dims()[0] > 0).then_some(outputs);
        }
        let (tokens, read) = (state.tokens_read + tokens(segments), state.segments_read + count as u64);
        LayerMemory::join(&done)?.into_state(state.batch, tokens, read)
    }
}
