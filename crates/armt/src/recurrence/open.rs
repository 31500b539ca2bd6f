//! A segment that tokens are added to one after the other, for generation.

use armt_engine::{Tape, Tensor, ops};

use super::{Inputs, Recurrent, StepContext};
use crate::backbone::Around;
use crate::backprop::Backprop;
use crate::error::{Error, Result};
use crate::segment::{Batch, segment};
use crate::state::{LayerState, State};

/// An open segment.
pub trait OpenSegment {
    /// Runs tokens `ids` of each text, row by row, the first of which has place `from` in the segment. Gives the last layer's outputs
    /// `[B, d]` of the last of them.
    fn step(&mut self, ids: &[i32], from: usize) -> Result<Tensor>;
}

/// The open segment of a recurrence whose segments can be cut anywhere: each piece of tokens is a segment that goes on from the state that
/// the one before left.
pub struct TokenByToken<'r> {
    recurrence: &'r dyn Recurrent,
    layers: Vec<LayerState>,
    texts: usize,
}

impl<'r> TokenByToken<'r> {
    /// Goes on from `state`, which stays as it is. A recurrence with positions around a segment, or through whose top something goes, is
    /// an error.
    pub fn new(recurrence: &'r dyn Recurrent, state: &State) -> Result<Self> {
        if recurrence.around() != Around::default() || recurrence.carries_through_top() {
            return Err(Error::Unsupported("segments of this recurrence cannot be cut anywhere".into()));
        }
        let tape = Tape::off();
        let layers = (0..recurrence.sizes().layers).map(|l| recurrence.begin(&tape, state, l..l + 1, None));
        Ok(TokenByToken { recurrence, layers: layers.collect::<Result<_>>()?, texts: state.texts() })
    }
}

impl OpenSegment for TokenByToken<'_> {
    fn step(&mut self, ids: &[i32], _from: usize) -> Result<Tensor> {
        let tape = Tape::off();
        let batch = Batch { ids: ids.to_vec(), texts: self.texts, mask: None };
        let n = batch.tokens();
        let inputs = Inputs::new(self.recurrence, &[segment(&batch, 0..n, n)], self.texts)?;
        let mut h = self.recurrence.embed(&tape, &inputs, 0..1, &[])?;
        let context = StepContext { tape: &tape, padding: None, backprop: Backprop::default(), segments: 1, background: None };
        let mut stepped = Vec::with_capacity(self.layers.len());
        for (l, state) in std::mem::take(&mut self.layers).into_iter().enumerate() {
            let (y, state) = self.recurrence.step(context, l..l + 1, &h, state)?;
            h = y;
            stepped.push(state);
        }
        self.layers = stepped;
        let d = h.dims()[3];
        Ok(ops::reshape(&ops::narrow(&h, 2, n - 1, 1)?, [self.texts, d])?)
    }
}
