//! Where and in which numbers a model computes, and small tensors that follow from shapes alone (positions, flags, masks of ones).
//!
//! Such constants are copied to the device once and kept by their content, so that a step that is repeated copies nothing and can be
//! recorded.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use armt_engine::{DType, Device, Element, Tensor};

use crate::error::Result;

/// The device of a model, the type of its computation, and its constants.
pub struct Compute {
    device: Device,
    dtype: DType,
    weights: DType,
    /// By shape and bits.
    constants: Mutex<HashMap<(Vec<usize>, Vec<u32>), Tensor>>,
}

impl Compute {
    /// On `device`, in f32, or bf16 on CUDA. Int8 is f32 with the backbone's matrices in int8: on the CPU, for models that are used.
    pub fn new(device: &Device, weights: DType) -> Self {
        let dtype = if weights == DType::I8 { DType::F32 } else { weights };
        Compute { device: device.clone(), dtype, weights, constants: Mutex::default() }
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The type of the computation.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The type of the backbone's matrices: that of the computation, or int8.
    pub fn weights(&self) -> DType {
        self.weights
    }

    /// A tensor of these elements. Only for what follows from shapes: everything asked for is kept as long as the model.
    pub fn constant<T: Element + Into<Bits>>(&self, data: &[T], shape: &[usize]) -> Result<Tensor> {
        let key = (shape.to_vec(), data.iter().map(|x| (*x).into().0).collect());
        let mut kept = self.constants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = kept.get(&key) {
            return Ok(tensor.clone());
        }
        let tensor = Tensor::from_slice(data, shape, &self.device)?;
        kept.insert(key, tensor.clone());
        Ok(tensor)
    }
}

/// The bits of an element of four bytes.
pub struct Bits(u32);

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
