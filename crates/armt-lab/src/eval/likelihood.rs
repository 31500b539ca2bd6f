//! How probable a model finds a text: the negative logarithm of each token's probability, summed by segment.

use armt::State;
use armt::engine::{Tape, Tensor, ops};
use armt::model::Model;
use armt::schedule::{Pass, ScheduleKind};
use armt::segment::{Alignment, Segment};

use crate::error::{Error, Result};
use crate::tasks::TaskBatch;

/// A sum over tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Likelihood {
    /// -ln p of the tokens, in all.
    pub nll: f64,
    /// Tokens that were predicted.
    pub tokens: u64,
}

impl Likelihood {
    /// The mean over tokens; NaN of none.
    pub fn loss(self) -> f64 {
        self.nll / self.tokens as f64
    }
}

impl std::ops::AddAssign for Likelihood {
    fn add_assign(&mut self, other: Self) {
        self.nll += other.nll;
        self.tokens += other.tokens;
    }
}

/// The likelihood of the positions that a batch asks for, of each of its segments and of each of its texts in it, read on from a state as
/// reading goes, from the left whatever the model's alignment; and the state afterwards. What is asked nothing has no tokens.
pub fn by_segment(model: &Model, asked: &TaskBatch, state: &State) -> Result<(Vec<Vec<Likelihood>>, State)> {
    let TaskBatch { batch, targets } = asked;
    if targets.next.len() != batch.ids.len() {
        return Err(Error::input("targets", format!("{}, one for each token", batch.ids.len()), targets.next.len()));
    }
    model.expect_state(state, batch.texts)?;
    let segments = model.segments_aligned(batch, Alignment::Left)?;
    let around = model.recurrence().around();
    let rows = |s: &Segment| targets.asked_rows(around, s.range.clone(), s.pad, batch);
    let inputs = model.inputs(&segments, batch.texts)?.wanting(|s| !rows(&segments[s]).is_empty());
    let mut sums = vec![vec![Likelihood::default(); batch.texts]; segments.len()];
    let tape = Tape::off();
    let pass = Pass::forward(&tape, &inputs);
    let state = ScheduleKind::Auto.schedule(model.recurrence())?.run(model.recurrence(), pass, state, &mut |s, h| {
        let rows = rows(&segments[s]);
        let flat = ops::reshape(h, [batch.texts * h.dims()[1], h.dims()[2]])?;
        for own in rows.chunk_by(|a, b| a.1 == b.1) {
            let pick = |values: Vec<i32>| Tensor::from_slice(&values, [own.len()], model.device());
            let (places, next) = (pick(own.iter().map(|r| r.0).collect())?, pick(own.iter().map(|r| r.2).collect())?);
            let h = model.recurrence().normed(&tape, &ops::embedding(&flat, &places)?)?; // [asked, d]
            let loss = ops::linear_cross_entropy(&h, &tape.param(model.recurrence().output_table()), &next, 0)?;
            sums[s][own[0].1] = Likelihood { nll: f64::from(loss.item()?) * own.len() as f64, tokens: own.len() as u64 };
        }
        Ok(())
    })?;
    Ok((sums, state))
}

/// The likelihood of the positions that a batch asks for, all together, read on from a state; and the state afterwards.
pub fn of_batch(model: &Model, asked: &TaskBatch, state: &State) -> Result<(Likelihood, State)> {
    let mut sum = Likelihood::default();
    let (segments, state) = by_segment(model, asked, state)?;
    segments.into_iter().flatten().for_each(|part| sum += part);
    Ok((sum, state))
}
