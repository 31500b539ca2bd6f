//! Segment by segment, layer by layer: the plain twin.

use armt_engine::{Tape, Tensor, ops};

use super::{Backprop, Schedule, Sink};
use crate::error::Result;
use crate::memory::{Content, LayerMemory, MemoryState};
use crate::model::{Embedded, Inputs, Model};

/// Segment by segment, layer by layer.
pub struct Sequential;

impl Schedule for Sequential {
    fn name(&self) -> &'static str {
        "sequential"
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
        if inputs.places.is_empty() {
            return Ok(state.clone());
        }
        let layers = model.backbone().layers;
        let mut memories = (0..layers).map(|l| state.layers(model, l..l + 1, tape)?.owned()).collect::<Result<Vec<_>>>()?;
        // RMT's memory is not a layer's: it enters with the next segment's input.
        let carries = matches!(state.content, Content::Rmt(_));
        let mut carried: Option<Tensor> = if let Content::Rmt(m) = &state.content { m.clone() } else { None };
        let mut embedded = Embedded::new();
        for (s, place) in inputs.places.iter().enumerate() {
            let mut h = if carries {
                let learned = if carried.is_none() { model.memory_tokens(tape, state.batch)? } else { None };
                model.embed_carrying(tape, inputs, s, carried.as_ref().or(learned.as_ref()))?
            } else {
                embedded.segment(model, tape, inputs, s)?
            }; // [1, B, T, d]
            let mut stepped: Vec<LayerMemory> = Vec::with_capacity(layers);
            for (l, memory) in memories.into_iter().enumerate() {
                let (y, memory) = model.layer_step(tape, l..l + 1, &h, memory, place.padding.as_ref(), backprop)?;
                h = y;
                stepped.push(if backprop.stops_after(s) { memory.cut(l..l + 1)? } else { memory });
            }
            memories = stepped;
            let h = ops::reshape(&h, &h.dims()[1..])?;
            if carries {
                let memory = model.rmt_memory(tape, &h)?;
                carried = Some(if backprop.stops_after(s) { memory.detach() } else { memory });
            }
            if place.wanted {
                each(s, &h)?;
            }
        }
        let (tokens, count) = (state.tokens_read + inputs.tokens(), state.segments_read + inputs.places.len() as u64);
        if carries {
            return Ok(MemoryState {
                content: Content::Rmt(carried),
                batch: state.batch,
                tokens_read: tokens,
                segments_read: count,
            });
        }
        LayerMemory::join(memories)?.into_state(tape, state.batch, tokens, count)
    }
}
