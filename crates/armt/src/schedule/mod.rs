//! Two ways to walk the grid of layers and segments.
//!
//! (layer l, segment s) needs (l - 1, s) and (l, s - 1). [`Sequential`] goes segment by segment and layer by layer, as the paper does and
//! as is easiest to read. [`Diagonal`] runs all pairs with l + s = t as one batched layer: the same values from far fewer, larger steps.

mod diagonal;
mod sequential;

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};

use armt_engine::{Tape, Tensor};
pub use diagonal::Diagonal;
pub use sequential::Sequential;

pub use crate::backprop::Backprop;
use crate::error::{Error, Result};
use crate::recurrence::{Inputs, Recurrent};
use crate::state::State;

/// Receives the output `[B, T, d]` of the last layer, memory positions included, before the last norm: of each segment whose output is
/// wanted, in order.
pub type Sink<'a> = &'a mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// What segments are run with.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    /// Where it is recorded.
    pub tape: &'a Tape,
    /// The segments.
    pub inputs: &'a Inputs,
    /// How gradients go back.
    pub backprop: Backprop,
    /// Once this is set the pass ends with [`Error::Interrupted`], between two steps.
    pub stop: Option<&'a AtomicBool>,
}

impl<'a> Pass<'a> {
    /// A pass without gradients that nothing stops.
    pub fn forward(tape: &'a Tape, inputs: &'a Inputs) -> Self {
        Pass { tape, inputs, backprop: Backprop::default(), stop: None }
    }

    /// Which of some segments are background, from the last to the first, where the way back costs that.
    fn background(&self, segments: RangeInclusive<usize>) -> Result<Option<Tensor>> {
        if self.tape.is_recording() && self.backprop.background > 0.0 { self.inputs.background(segments) } else { Ok(None) }
    }

    /// Ends the pass where a stop was asked for.
    fn expect_on(&self) -> Result<()> {
        if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) { Err(Error::Interrupted) } else { Ok(()) }
    }
}

/// A way to run segments through the layers.
pub trait Schedule: Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Runs segments, starting from `state`; gives the state after the last.
    fn run(&self, recurrence: &dyn Recurrent, pass: Pass<'_>, state: &State, each: Sink<'_>) -> Result<State>;
}

/// Which schedule is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScheduleKind {
    /// The diagonal where it exists.
    #[default]
    Auto,
    /// Segment by segment.
    Sequential,
    /// Diagonal by diagonal.
    Diagonal,
}

impl ScheduleKind {
    /// The schedule for a recurrence. Asking for a diagonal where there is none is an error.
    pub fn schedule(self, recurrence: &dyn Recurrent) -> Result<&'static dyn Schedule> {
        let has_diagonal = !recurrence.carries_through_top();
        match self {
            ScheduleKind::Sequential => Ok(&Sequential),
            ScheduleKind::Auto if !has_diagonal => Ok(&Sequential),
            ScheduleKind::Auto => Ok(&Diagonal),
            ScheduleKind::Diagonal if has_diagonal => Ok(&Diagonal),
            ScheduleKind::Diagonal => Err(Error::Unsupported(format!(
                "a memory of kind {} has no diagonal schedule: as RMT's it goes from the last layer to the next segment's first, so segments \
                 cannot overlap",
                recurrence.layout().kind
            ))),
        }
    }
}

impl std::str::FromStr for ScheduleKind {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "auto" => Ok(ScheduleKind::Auto),
            "sequential" => Ok(ScheduleKind::Sequential),
            "diagonal" => Ok(ScheduleKind::Diagonal),
            other => Err(Error::config("schedule", "auto, sequential or diagonal", other)),
        }
    }
}
