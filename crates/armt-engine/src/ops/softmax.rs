//! Softmax over the last axis: y = e^(x - max x) / sum e^(x - max x), and dx = y (dy - sum(dy y)), which needs y alone.

use super::{cast, cuda_of, to_f32, via_f32};
use crate::cpu::softmax as cpu;
use crate::error::{Error, Result};
use crate::paths;
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

const OP: &str = "softmax";

/// Softmax over the last axis. A scalar or an empty last axis is refused.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    x.expect_float(OP, "the operand")?;
    let d = x.shape().last();
    if x.shape().rank() == 0 || d == 0 {
        return Err(Error::shape(OP, "the operand", "[.., at least 1]", x.shape()));
    }
    if via_f32(x) {
        return cast(&softmax(&to_f32(x)?)?, DType::BF16);
    }
    let y = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
    match cuda_of(x) {
        None => cpu::forward(&x.read::<f32>(OP)?, &mut y.write::<f32>(OP)?, d),
        Some(cuda) => {
            let rows = x.shape().rows();
            let (name, blocks) = kernel_for("softmax", rows, d);
            cuda.kernel("softmax", x.dtype(), &name)?.grid(blocks, 1, 1).arg(x).arg(&y).arg(rows).arg(d).run()?;
        }
    }
    Ok(record(&[x], y.clone(), || Softmax { y }))
}

/// A warp that holds a row in registers, eight rows a block, or a block for each long row.
fn kernel_for(stem: &str, rows: usize, d: usize) -> (String, usize) {
    match paths::softmax(d) {
        Some(held) => (format!("{stem}_{held}"), rows.div_ceil(8)),
        None => (format!("{stem}_wide"), rows),
    }
}

struct Softmax {
    y: Tensor,
}

impl Backward for Softmax {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let y = self.y;
        let d = y.shape().last();
        let dx = Tensor::uninit(y.shape(), y.dtype(), y.device())?;
        match cuda_of(&y) {
            None => cpu::backward(&y.read::<f32>(OP)?, &dy.read::<f32>(OP)?, &mut dx.write::<f32>(OP)?, d),
            Some(cuda) => {
                let rows = y.shape().rows();
                let (name, blocks) = kernel_for("softmax_backward", rows, d);
                let launch = cuda.kernel("softmax", y.dtype(), &name)?.grid(blocks, 1, 1);
                launch.arg(&y).arg(&dy).arg(&dx).arg(rows).arg(d).run()?;
            }
        }
        grads.give(0, dx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Device;

    #[test]
    fn huge_values_neither_overflow_nor_vanish() {
        let x = Tensor::from_slice(&[1e30f32, 1e30, -1e30], [3], &Device::cpu()).unwrap();
        let y = softmax(&x).unwrap().to_vec::<f32>().unwrap();
        assert!((y[0] - 0.5).abs() < 1e-6 && (y[1] - 0.5).abs() < 1e-6 && y[2] < 1e-30, "{y:?}");
    }

    #[test]
    fn a_nan_reaches_its_whole_row_and_no_other() {
        let x = Tensor::from_slice(&[f32::NAN, 1.0, 2.0, 3.0], [2, 2], &Device::cpu()).unwrap();
        let y = softmax(&x).unwrap().to_vec::<f32>().unwrap();
        assert!(y[0].is_nan() && y[1].is_nan() && y[2].is_finite() && y[3].is_finite(), "{y:?}");
    }

    #[test]
    fn an_empty_last_axis_and_integers_are_refused() {
        let empty = Tensor::zeros([3, 0], DType::F32, &Device::cpu()).unwrap();
        assert!(matches!(softmax(&empty), Err(Error::Shape { .. })));
        let ids = Tensor::zeros([3], DType::I32, &Device::cpu()).unwrap();
        assert!(matches!(softmax(&ids), Err(Error::DType { .. })));
    }
}
