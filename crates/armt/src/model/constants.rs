//! Small tensors that follow from shapes alone (positions, flags, masks of ones), copied to the device once.
//!
//! Kept by their content, so that a step that is repeated copies nothing and can be recorded.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use armt_engine::{Element, Tensor};

use super::Model;
use crate::error::Result;

/// What was copied so far, by shape and bits.
#[derive(Default)]
pub(super) struct Constants(Mutex<HashMap<(Vec<usize>, Vec<u32>), Tensor>>);

impl Model {
    /// A tensor of these elements. Only for what follows from shapes: everything asked for is kept as long as the model.
    pub(crate) fn constant<T: Element + Into<Bits>>(&self, data: &[T], shape: &[usize]) -> Result<Tensor> {
        let key = (shape.to_vec(), data.iter().map(|x| (*x).into().0).collect());
        let mut kept = self.constants.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = kept.get(&key) {
            return Ok(tensor.clone());
        }
        let tensor = Tensor::from_slice(data, shape, &self.device)?;
        kept.insert(key, tensor.clone());
        Ok(tensor)
    }
}

/// The bits of an element of four bytes.
pub(crate) struct Bits(u32);

impl From<i32> for Bits {
    fn from(x: i32) -> Self {
        Bits(x as u32)
    }
}

impl From<f32> for Bits {
    fn from(x: f32) -> Self {
        Bits(x.to_bits())
    }
}
