//! What a pass shows of a model, for research: logits, the outputs of every layer, the state after each segment, how probable each token was, and
//! the gradients of a loss that is computed elsewhere.
//!
//! A loss is a function of the logits y alone, so that all it has to give is dL/dy: the gradients of L are those of the number
//! sum(y * dL/dy), with dL/dy held fixed. That number is put on the tape and goes back as the trainer's own loss does.
//!
//! Everything is kept on the host in f32, so this is for short texts.

use std::ops::Range;

use armt_engine::{DType, Tape, Tensor, ops};

use crate::error::{Error, Result};
use crate::model::Model;
use crate::schedule::{Pass, ScheduleKind, Sequential};
use crate::segment::{Batch, Segment};
use crate::state::State;

/// What a pass has shown of some texts.
pub struct Probe {
    /// Logits of every token, `[B, tokens, V]`.
    pub logits: Vec<f32>,
    /// Outputs of the embedding and of each layer, without those of memory tokens and before the last norm, `[L + 1, B, tokens, d]`.
    pub hidden: Vec<f32>,
    /// The state after each segment.
    pub states: Vec<State>,
}

/// Runs texts segment by segment and layer by layer, and keeps everything. A state of other texts, or with an open end, is an error.
pub fn probe(model: &Model, batch: &Batch, state: &State) -> Result<Probe> {
    model.expect_state(state, batch.texts)?;
    state.expect_closed()?;
    let (recurrence, sizes, tokens) = (model.recurrence(), model.sizes(), batch.tokens());
    let mut hidden = vec![0f32; (sizes.layers + 1) * batch.ids.len() * sizes.width];
    let mut logits = vec![0f32; batch.ids.len() * sizes.vocab];
    let (mut states, mut state, tape): (Vec<State>, State, Tape) = (Vec::new(), state.clone(), Tape::off());
    for segment in model.segments(batch)? {
        let inputs = model.inputs(std::slice::from_ref(&segment), batch.texts)?;
        let mut watch = |layer: usize, h: &Tensor| -> Result<()> {
            let h = own_tokens(model, &segment, &ops::reshape(h, &h.dims()[1..])?)?;
            place(&h.to_f32_vec()?, &segment.range, tokens, &mut hidden[layer * batch.ids.len() * sizes.width..], sizes.width);
            Ok(())
        };
        state = Sequential.run_watched(recurrence, Pass::forward(&tape, &inputs), &state, &mut watch, &mut |_, h| {
            let own = model.logits(&tape, &own_tokens(model, &segment, h)?)?.to_f32_vec()?;
            place(&own, &segment.range, tokens, &mut logits, sizes.vocab);
            Ok(())
        })?;
        states.push(state.clone());
    }
    Ok(Probe { logits, hidden, states })
}

/// The logarithm of the probability of each token of a text but the first, given those before it and the state. One segment's logits are kept at a
/// time. A text of fewer than two tokens has none.
pub fn log_probabilities(model: &Model, ids: &[i32], state: &State) -> Result<Vec<f32>> {
    let (batch, vocab) = (Batch { ids: ids.to_vec(), texts: 1, mask: None }, model.sizes().vocab);
    let mut found = Vec::with_capacity(ids.len().saturating_sub(1));
    let alignment = model.config().segment_alignment;
    model.each_logits(&batch, state, ScheduleKind::Auto, alignment, &mut |range, values| {
        for (row, next) in values.chunks(vocab).zip(&ids[(range.start + 1).min(ids.len())..]) {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|x| f64::from(x - most).exp()).sum();
            found.push((f64::from(row[*next as usize] - most) - sum.ln()) as f32);
        }
        Ok(())
    })?;
    Ok(found)
}

/// The gradients of a loss of the logits with respect to every parameter, in the parameters, in place of those that were there. `loss` is
/// given the logits `[B, tokens, V]` and gives its derivative with respect to each of them. A model that is not to be trained has no
/// gradients and is refused.
pub fn backward(model: &Model, batch: &Batch, state: &State, loss: &mut dyn FnMut(&[f32]) -> Result<Vec<f32>>) -> Result<()> {
    model.expect_state(state, batch.texts)?;
    state.expect_closed()?;
    let (segments, vocab, tokens) = (model.segments(batch)?, model.sizes().vocab, batch.tokens());
    let (tape, inputs) = (Tape::new(), model.inputs(&segments, batch.texts)?);
    let mut own: Vec<Tensor> = Vec::new(); // of each segment, [B, its tokens, V]
    let pass = Pass::forward(&tape, &inputs);
    ScheduleKind::Auto.schedule(model.recurrence())?.run(model.recurrence(), pass, state, &mut |s, h| {
        own.push(ops::cast(&model.logits(&tape, &own_tokens(model, &segments[s], h)?)?, DType::F32)?);
        Ok(())
    })?;
    let mut logits = vec![0f32; batch.ids.len() * vocab];
    for (segment, own) in segments.iter().zip(&own) {
        place(&own.to_f32_vec()?, &segment.range, tokens, &mut logits, vocab);
    }
    let slopes = loss(&logits)?;
    if slopes.len() != logits.len() {
        return Err(Error::input(format!("a derivative for each of {} logits", logits.len()), slopes.len()));
    }
    model.params().into_iter().try_for_each(|param| param.zero_grad())?;
    let mut total: Option<Tensor> = None;
    for (segment, own) in segments.iter().zip(&own) {
        let rows = (0..batch.texts)
            .flat_map(|text| &slopes[(text * tokens + segment.range.start) * vocab..][..segment.range.len() * vocab]);
        let rows: Vec<f32> = rows.copied().collect();
        let part = ops::sum(&ops::mul(own, &Tensor::from_slice(&rows, own.shape(), model.device())?)?)?;
        total = Some(total.map_or(Ok(part.clone()), |total| ops::add(&total, &part))?);
    }
    let total = total.ok_or_else(|| Error::input("at least one token", "none"))?;
    Ok(tape.backward(&total)?)
}

/// Outputs `[B, T, d]` of a segment without those of its memory tokens and padding.
fn own_tokens(model: &Model, segment: &Segment, h: &Tensor) -> Result<Tensor> {
    Ok(ops::narrow(h, 1, model.recurrence().around().before + segment.pad, segment.range.len())?)
}

/// Puts the values `[B, range, width]` of a segment where they belong in `[B, tokens, width]`.
fn place(values: &[f32], range: &Range<usize>, tokens: usize, whole: &mut [f32], width: usize) {
    for (text, rows) in values.chunks(range.len() * width).enumerate() {
        whole[(text * tokens + range.start) * width..][..rows.len()].copy_from_slice(rows);
    }
}
