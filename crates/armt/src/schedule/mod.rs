//! Two ways to walk the grid of layers and segments.
//!
//! (layer l, segment s) needs (l - 1, s) and (l, s - 1). [`Sequential`] goes segment by segment and layer by layer, as the paper does and
//! as is easiest to read. [`Diagonal`] runs all pairs with l + s = t as one batched layer: the same values from far fewer, larger steps.

mod diagonal;
mod sequential;

use armt_engine::{DType, Tape, Tensor};
pub use diagonal::Diagonal;
pub use sequential::Sequential;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::memory::MemoryState;
use crate::model::{Inputs, Model};

/// Receives the output `[B, T, d]` of the last layer, memory positions included, before the last norm: of each segment whose output is
/// wanted, in order.
pub type Sink<'a> = &'a mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// A way to run segments through the layers.
pub trait Schedule: Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Runs segments, starting from `state`; gives the memory after the last.
    fn run(
        &self,
        model: &Model,
        tape: &Tape,
        inputs: &Inputs,
        state: &MemoryState,
        backprop: Backprop,
        each: Sink<'_>,
    ) -> Result<MemoryState>;
}

/// How gradients go back through the segments. By default through all of them, with everything kept that they need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Backprop {
    /// Keep only the inputs of each layer's block and compute it again on the way back: a third more time, a fraction of the memory.
    pub recompute: bool,
    /// Do not keep each segment's associative memory but take it from the one after on the way back: faster, and one memory however many
    /// segments. It rounds by the largest values that the memory ever held, 1e-6 of them, which gradients may amplify. Always so in
    /// bf16, whose own rounding is far above, and with `recompute`.
    pub unwind: bool,
    /// Gradients do not go back from one stretch of this many segments to the one before; 0: they go back through all.
    pub truncate: usize,
}

impl Backprop {
    /// Whether the memory is unwound in a computation of this type.
    pub fn unwinds(self, dtype: DType) -> bool {
        self.unwind || self.recompute || dtype == DType::BF16
    }

    /// Whether gradients stop after segment s.
    fn stops_after(self, s: usize) -> bool {
        self.truncate > 0 && (s + 1).is_multiple_of(self.truncate)
    }
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
