//! Segment by segment, layer by layer: the plain twin.

use armt_engine::{Tensor, ops};

use super::{Pass, Schedule, Sink};
use crate::error::Result;
use crate::recurrence::{Embedded, Recurrent, StepContext};
use crate::state::{LayerState, State};

/// Segment by segment, layer by layer.
pub struct Sequential;

impl Schedule for Sequential {
    fn name(&self) -> &'static str {
        "sequential"
    }

    fn run(&self, recurrence: &dyn Recurrent, pass: Pass<'_>, state: &State, each: Sink<'_>) -> Result<State> {
        self.run_watched(recurrence, pass, state, &mut |_, _| Ok(()), each)
    }
}

impl Sequential {
    /// Runs segments; `watch` hears the inputs of the first layer, as layer 0, and the outputs of layer l, as l + 1, `[1, B, T, d]`, of every
    /// segment.
    pub fn run_watched(
        &self,
        recurrence: &dyn Recurrent,
        pass: Pass<'_>,
        state: &State,
        watch: Sink<'_>,
        each: Sink<'_>,
    ) -> Result<State> {
        let Pass { tape, inputs, backprop, .. } = pass;
        if inputs.places().is_empty() {
            return Ok(state.clone());
        }
        let layers = recurrence.sizes().layers;
        let mut states = (0..layers).map(|l| recurrence.begin(tape, state, l..l + 1, None)).collect::<Result<Vec<_>>>()?;
        // What goes through the top is not a layer's: it enters with the next segment's input.
        let carries = recurrence.carries_through_top();
        let mut carried: Vec<Tensor> = if carries { state.tensors().map(|(_, t)| t.clone()).collect() } else { Vec::new() };
        let mut embedded = Embedded::default();
        for (s, place) in inputs.places().iter().enumerate() {
            pass.expect_on()?;
            let background = pass.background(s..=s)?;
            let (padding, segments) = (place.padding.as_ref(), inputs.places().len());
            let context = StepContext { tape, padding, backprop, segments, background: background.as_ref() };
            let mut h = match carries {
                true => recurrence.embed(tape, inputs, s..s + 1, &carried)?,
                false => embedded.segment(recurrence, tape, inputs, s)?,
            }; // [1, B, T, d]
            watch(0, &h)?;
            let mut stepped: Vec<LayerState> = Vec::with_capacity(layers);
            for (l, state) in states.into_iter().enumerate() {
                let (y, state) = recurrence.step(context, l..l + 1, &h, state)?;
                h = y;
                watch(l + 1, &h)?;
                stepped.push(if backprop.stops_after(s) { recurrence.cut(state, &(l..l + 1))? } else { state });
            }
            states = stepped;
            let h = ops::reshape(&h, &h.dims()[1..])?;
            if carries {
                carried = recurrence.to_top(tape, &h, carried)?;
                if backprop.stops_after(s) {
                    carried.iter_mut().for_each(|t| *t = t.detach());
                }
            }
            if place.wanted {
                each(s, &h)?;
            }
        }
        let counts = state.counts_after(inputs.tokens(), inputs.places().len() as u64);
        if carries {
            return recurrence.layout().state(carried, counts);
        }
        let settled = states.into_iter().map(|s| recurrence.settle(s)).collect::<Result<_>>()?;
        recurrence.end(tape, LayerState::join(settled)?, counts)
    }
}
