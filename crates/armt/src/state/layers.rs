//! The state of some layers while segments run through them.

use std::any::Any;
use std::ops::Range;

use armt_engine::{Tensor, ops};

use crate::error::{Error, Result};

/// The state of n neighbouring layers, stacked: what a step takes and gives back. Some of the layers may rest in a step. No two may wait for
/// the same write, so it is not cloned.
pub struct LayerState {
    /// Which layers.
    pub layers: Range<usize>,
    /// The tensors in the order of the state's layout, `[n, B, ..]` each; none before the first segment of a state that begins absent.
    pub tensors: Vec<Tensor>,
    /// Of each layer, of each text: whether it has kept nothing yet.
    pub fresh: Vec<Vec<bool>>,
    /// What the kind of memory has decided but not yet done. Only that kind knows what it is.
    pub waiting: Option<Box<dyn Any + Send>>,
}

impl LayerState {
    /// Where layers lie in the stack.
    pub fn rows(&self, layers: &Range<usize>) -> Range<usize> {
        layers.start - self.layers.start..layers.end - self.layers.start
    }

    /// Replaces rows of the stacked tensors by those of `parts`.
    pub fn replace(&mut self, rows: &Range<usize>, parts: Vec<Tensor>) -> Result<()> {
        for (whole, part) in self.tensors.iter_mut().zip(parts) {
            let all = rows.len() == whole.dims()[0];
            *whole = if all { part } else { ops::replace_rows(whole, rows.clone(), &part)? };
        }
        Ok(())
    }

    /// Cuts the way back of gradients through layers `layers`.
    pub fn cut(mut self, layers: &Range<usize>) -> Result<Self> {
        let rows = self.rows(layers);
        for tensor in &mut self.tensors {
            *tensor = ops::cut_rows(tensor, rows.clone())?;
        }
        Ok(self)
    }

    /// States of neighbouring layers, one after the other, as one. Nothing may wait in them.
    pub fn join(parts: Vec<LayerState>) -> Result<Self> {
        let Some((first, last)) = parts.first().zip(parts.last()) else {
            return Err(Error::input("at least one layer's state", "none"));
        };
        let layers = first.layers.start..last.layers.end;
        let gather = |i: usize| {
            let tensors: Vec<&Tensor> = parts.iter().filter_map(|p| p.tensors.get(i)).collect();
            ops::concat(&tensors, 0)
        };
        let tensors = (0..first.tensors.len()).map(gather).collect::<armt_engine::Result<Vec<_>>>()?;
        Ok(LayerState { layers, tensors, fresh: parts.into_iter().flat_map(|p| p.fresh).collect(), waiting: None })
    }
}
