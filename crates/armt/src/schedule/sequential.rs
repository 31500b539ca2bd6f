//! Segment by segment, layer by layer: the plain twin.

use armt_engine::{Tape, ops};

use super::{Schedule, Sink, expect_even, tokens};
use crate::error::Result;
use crate::memory::{Content, LayerMemory, MemoryState};
use crate::model::Model;
use crate::segment::Segment;

/// Segment by segment, layer by layer.
pub struct Sequential;

impl Schedule for Sequential {
    fn name(&self) -> &'static str {
        "sequential"
    }

    fn run(&self, model: &Model, tape: &Tape, segments: &[Segment], state: &MemoryState, each: Sink<'_>) -> Result<MemoryState> {
        expect_even(segments)?;
        let layers = model.backbone().layers;
        let mut memory = (0..layers).map(|l| state.layers(model, l..l + 1, tape)).collect::<Result<Vec<_>>>()?;
        // RMT's memory is not a layer's: it enters with the next segment's input.
        let mut carried = if let Content::Rmt(m) = &state.content { m.clone() } else { None };
        for (s, segment) in segments.iter().enumerate() {
            let x = model.embed(tape, segment, state.batch, carried.as_ref())?; // [B, T, d]
            let (b, t, d) = (x.dims()[0], x.dims()[1], x.dims()[2]);
            let padding = model.padding(segment, state.batch)?;
            let mut h = ops::reshape(&x, [1, b, t, d])?;
            for (l, memory) in memory.iter_mut().enumerate() {
                (h, *memory) = model.layer_step(tape, l..l + 1, &h, memory, padding.as_ref())?;
            }
            let h = ops::reshape(&h, [b, t, d])?;
            if matches!(state.content, Content::Rmt(_)) {
                carried = Some(model.rmt_memory(tape, &h)?);
            }
            each(s, &h)?;
        }
        let (tokens, count) = (state.tokens_read + tokens(segments), state.segments_read + segments.len() as u64);
        if segments.is_empty() {
            return Ok(state.clone());
        }
        if matches!(state.content, Content::Rmt(_)) {
            return Ok(MemoryState {
                content: Content::Rmt(carried),
                batch: state.batch,
                tokens_read: tokens,
                segments_read: count,
            });
        }
        LayerMemory::join(&memory)?.into_state(state.batch, tokens, count)
    }
}
