//! Conversion between element types: y = x, rounded to nearest even where the new type is narrower.

use half::bf16;

use super::cuda_of;
use crate::cpu::elementwise;
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

const OP: &str = "cast";

/// `x` with elements of another type: f32 to bf16, bf16 to f32, i32 to f32. The gradient comes back in `x`'s type.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let y = Tensor::uninit(x.shape(), dtype, x.device())?;
    cast_into(x, &y)?;
    let from = x.dtype();
    Ok(record(&[x], y, || Cast { from }))
}

/// Converts `x` into an existing tensor.
pub(crate) fn cast_into(x: &Tensor, y: &Tensor) -> Result<()> {
    y.expect_shape(OP, "the destination", x.shape())?;
    y.expect_device_of(OP, "the destination", x)?;
    let name = match (x.dtype(), y.dtype()) {
        (DType::F32, DType::BF16) => "f32_to_bf16",
        (DType::BF16, DType::F32) => "bf16_to_f32",
        (DType::I32, DType::F32) => "i32_to_f32",
        (from, to) if from == to => return y.copy_from(x),
        (from, to) => return Err(Error::argument(OP, format!("{from} cannot be converted to {to}"))),
    };
    match cuda_of(x) {
        None => match (x.dtype(), y.dtype()) {
            (DType::F32, _) => elementwise::map(&x.read::<f32>(OP)?, &mut y.write::<bf16>(OP)?, elementwise::round_bf16),
            (DType::BF16, _) => elementwise::map(&x.read::<bf16>(OP)?, &mut y.write::<f32>(OP)?, elementwise::widen),
            _ => elementwise::map(&x.read::<i32>(OP)?, &mut y.write::<f32>(OP)?, |v| v as f32),
        },
        Some(cuda) => {
            let n = x.elements();
            cuda.kernel("cast", DType::F32, name)?.cover(n).arg(x).arg(y).arg(n).run()?;
        }
    }
    Ok(())
}

/// A copy with a buffer of its own, untracked.
pub(crate) fn copy_of(x: &Tensor) -> Result<Tensor> {
    let y = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
    y.copy_from(&x.detach())?;
    Ok(y)
}

struct Cast {
    from: DType,
}

impl Backward for Cast {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        grads.give(0, cast(&dy, self.from)?)
    }
}
