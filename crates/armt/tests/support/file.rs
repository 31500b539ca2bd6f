//! Model files of tensors that are at hand.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use armt::engine::DType;
use armt::weights::{Found, Writing};

/// Writes tensors in f32.
pub fn write(path: &Path, tensors: &[Found]) {
    let shapes: Vec<_> = tensors.iter().map(|(name, shape, _)| (name.clone(), shape.clone())).collect();
    let mut file = Writing::create(path, &shapes, DType::F32).unwrap();
    tensors.iter().for_each(|(name, _, values)| file.put(name, values).unwrap());
    file.finish().unwrap();
}
