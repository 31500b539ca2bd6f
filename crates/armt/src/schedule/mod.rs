//! Two ways to walk the grid of layers and segments.
//!
//! (layer l, segment s) needs (l - 1, s) and (l, s - 1). [`Sequential`] goes segment by segment and layer by layer, as the paper does and
//! as is easiest to read. [`Diagonal`] runs all pairs with l + s = t as one batched layer: the same values from far fewer, larger steps.

mod diagonal;
mod sequential;

use armt_engine::{Tape, Tensor};
pub use diagonal::Diagonal;
pub use sequential::Sequential;

use crate::error::{Error, Result};
use crate::memory::MemoryState;
use crate::model::Model;
use crate::segment::Segment;

/// Receives each segment's output `[B, T, d]` of the last layer, memory positions included, before the last norm. In order.
pub type Sink<'a> = &'a mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// A way to run segments through the layers.
pub trait Schedule: Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Runs segments of equal width, starting from `state`; gives the memory after the last.
    fn run(&self, model: &Model, tape: &Tape, segments: &[Segment], state: &MemoryState, each: Sink<'_>) -> Result<MemoryState>;
}

/// Which schedule is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The diagonal where it exists.
    #[default]
    Auto,
    /// Segment by segment.
    Sequential,
    /// Diagonal by diagonal.
    Diagonal,
}

impl Choice {
    /// The schedule for a model. Asking for a diagonal where there is none is an error.
    pub fn schedule(self, model: &Model) -> Result<&'static dyn Schedule> {
        let has_diagonal = model.has_diagonal();
        match self {
            Choice::Sequential => Ok(&Sequential),
            Choice::Auto if !has_diagonal => Ok(&Sequential),
            Choice::Auto => Ok(&Diagonal),
            Choice::Diagonal if has_diagonal => Ok(&Diagonal),
            Choice::Diagonal => Err(Error::Argument(
                "RMT has no diagonal schedule: its memory goes from the last layer to the next segment's first, so segments cannot overlap".into(),
            )),
        }
    }
}

impl std::str::FromStr for Choice {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "auto" => Ok(Choice::Auto),
            "sequential" => Ok(Choice::Sequential),
            "diagonal" => Ok(Choice::Diagonal),
            other => Err(Error::config("schedule", "auto, sequential or diagonal", other)),
        }
    }
}

/// What every schedule checks first; gives the common width.
fn expect_even(segments: &[Segment]) -> Result<usize> {
    let width = segments.first().map_or(0, Segment::width);
    match segments.iter().find(|s| s.width() != width) {
        Some(odd) => Err(Error::Argument(format!("all segments must have one width: {width} came first, then {}", odd.width()))),
        None => Ok(width),
    }
}

/// Tokens in a list of segments.
fn tokens(segments: &[Segment]) -> u64 {
    segments.iter().map(|s| s.range.len() as u64).sum()
}
