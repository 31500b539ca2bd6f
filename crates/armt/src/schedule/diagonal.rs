//! All (layer, segment) pairs of one diagonal as one batched layer.
//!
//! At step t the layers lo..=hi are active, layer l with segment t - l. The outputs of a step, moved up by one layer, are the inputs of
//! the next; segment t enters at layer 0. In the ramps at both ends only the active layers run, and the others' memory rests. Where nobody
//! wants a segment's outputs, the last layer computes only those of its memory tokens. Where a state cannot be in one batch with the segments that
//! follow, they run segment by segment.

use armt_engine::{Tensor, ops};

use super::{Pass, Schedule, Sequential, Sink};
use crate::backbone::Padding;
use crate::error::{Error, Result};
use crate::recurrence::{Embedded, Recurrent, StepContext};
use crate::state::State;

/// Diagonal by diagonal.
pub struct Diagonal;

impl Schedule for Diagonal {
    fn name(&self) -> &'static str {
        "diagonal"
    }

    fn run(&self, recurrence: &dyn Recurrent, pass: Pass<'_>, state: &State, each: Sink<'_>) -> Result<State> {
        let Pass { tape, inputs, backprop, .. } = pass;
        let (layers, places) = (recurrence.sizes().layers, inputs.places());
        let count = places.len();
        if count == 0 {
            return Ok(state.clone());
        }
        if !recurrence.fits_diagonal(state, inputs.width()) {
            return Sequential.run(recurrence, pass, state, each);
        }
        let mut embedded = Embedded::default();
        let mut memory = recurrence.begin(tape, state, 0..layers, Some(inputs.width()))?;
        let mut pipe: Option<Tensor> = None; // outputs of the last step that go on to the next layer
        for t in 0..count + layers - 1 {
            pass.expect_on()?;
            let (lo, hi) = ((t + 1).saturating_sub(count), t.min(layers - 1));
            let fresh = (t < count).then(|| embedded.segment(recurrence, tape, inputs, t)).transpose()?;
            let x = match (fresh, pipe) {
                (Some(fresh), Some(pipe)) => ops::prepend(&fresh, pipe)?,
                (fresh, pipe) => fresh.or(pipe).ok_or_else(|| Error::input("an active layer", "none"))?,
            }; // [n, B, T, d]
            let paddings = (lo..=hi).map(|l| places[t - l].padding.as_ref());
            let padding = Padding::stacked(recurrence.compute(), paddings, state.texts(), x.dims()[2])?;
            let background = pass.background(t - hi..=t - lo)?;
            let context =
                StepContext { tape, padding: padding.as_ref(), backprop, segments: count, background: background.as_ref() };
            if hi == layers - 1 && !places[t - hi].wanted {
                (pipe, memory) = recurrence.step_unheard(context, lo..hi + 1, &x, memory)?;
            } else {
                let y;
                (y, memory) = recurrence.step(context, lo..hi + 1, &x, memory)?;
                let n = y.dims()[0];
                let onward = if hi == layers - 1 { n - 1 } else { n };
                if onward < n {
                    let last = ops::rows(&y, n - 1..n)?;
                    each(t - hi, &ops::reshape(&last, &y.dims()[1..])?)?;
                }
                pipe = if onward > 0 { Some(ops::rows(&y, 0..onward)?) } else { None };
            }
            for l in (lo..=hi).filter(|l| backprop.stops_after(t - l)) {
                memory = recurrence.cut(memory, &(l..l + 1))?;
            }
        }
        recurrence.end(tape, memory, state.counts_after(inputs.tokens(), count as u64))
    }
}
