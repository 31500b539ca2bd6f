//! When gradients are settled: after which record nothing more is added to them.
//!
//! A record adds to the parameters that are among its inputs, so that the first record that has one is the last to add to its gradient. Rows of a
//! stacked parameter are leaves of their own and settle each at its time. A recompute region takes its parameters only when it is played: while one
//! is left nothing is settled.

use super::Record;
use super::grads::{Slot, SlotKind};
use crate::error::Result;
use crate::tensor::Tensor;

/// Groups of gradients that are not settled yet.
pub(super) struct ToSettle {
    /// For each group the most records that may be left when it and all before it are settled.
    left: Vec<usize>,
    told: usize,
}

impl ToSettle {
    pub(super) fn new(records: &[Record], slots: &[Slot], groups: &[Vec<Tensor>]) -> Self {
        let mut least = records.len();
        let left = groups.iter().map(|group| {
            let adds = |record: &Record| {
                let mut leaves = record.inputs.iter().flatten().filter_map(|id| match &slots[*id].kind {
                    SlotKind::Leaf(gradient) => Some(gradient),
                    _ => None,
                });
                record.op.adds_elsewhere() || leaves.any(|leaf| group.iter().any(|own| overlap(leaf, own)))
            };
            // A group that comes after another is not told before it.
            least = records[..least].iter().position(adds).unwrap_or(least);
            least
        });
        ToSettle { left: left.collect(), told: 0 }
    }

    /// Tells the groups that are settled when so many records are left.
    pub(super) fn tell(&mut self, left: usize, settled: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        while self.left.get(self.told).is_some_and(|most| left <= *most) {
            settled(self.told)?;
            self.told += 1;
        }
        Ok(())
    }
}

fn overlap(a: &Tensor, b: &Tensor) -> bool {
    let range = |t: &Tensor| t.ptr()..t.ptr() + t.bytes() as u64;
    let (a, b, same) = (range(a), range(b), a.device() == b.device());
    same && a.start < b.end && b.start < a.end
}
