//! How gradients go back through the segments.

use armt_engine::DType;
use serde::{Deserialize, Serialize};

/// By default through all segments, with everything kept that they need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// So many times the mean importance of all that is written to the associative memory is added to what is differentiated, but not to the loss
    /// that is told: the memory learns to leave out what is not asked for. 0: not at all.
    pub sparse: f32,
    /// So many times the mean over all writes of -ln(1 - importance), in segments that hold nothing worth keeping
    /// ([`Targets::BACKGROUND`](crate::recurrence::Targets::BACKGROUND)), is added in the same way; the writes of other segments count as 0. 0: not at
    /// all.
    pub background: f32,
}

impl Backprop {
    /// Whether the memory is unwound in a computation of this type.
    pub fn unwinds(self, dtype: DType) -> bool {
        self.unwind || self.recompute || dtype == DType::BF16
    }

    /// Whether gradients stop after segment s.
    pub fn stops_after(self, s: usize) -> bool {
        self.truncate > 0 && (s + 1).is_multiple_of(self.truncate)
    }
}
