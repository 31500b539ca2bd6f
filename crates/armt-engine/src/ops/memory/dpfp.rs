//! DPFP-nu: phi(x) = [r * roll(r, 1), .., r * roll(r, nu)] with r = relu([x, -x]) and roll(r, j)[i] = r[i - j], cyclic.
//!
//! The key axis is 2 nu dm wide, blocks in the order j = 1..nu, which is that of the published code.

use crate::cpu::memory::dpfp as cpu;
use crate::error::{Error, Result};
use crate::ops::{cast, cuda_of, to_f32, via_f32};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

const OP: &str = "dpfp";

/// The width dk = 2 nu dm of features, if nu and dm fit together: a roll by the whole width would be no roll.
pub(super) fn feature_width(op: &'static str, dm: usize, nu: usize) -> Result<usize> {
    if nu == 0 || nu >= 2 * dm {
        return Err(Error::argument(op, format!("nu must be at least 1 and less than 2 x {dm}, the width of [x, -x]; got {nu}")));
    }
    Ok(2 * nu * dm)
}

/// DPFP-nu of x `[.., dm]`, as `[.., 2 nu dm]`.
pub fn dpfp(x: &Tensor, nu: usize) -> Result<Tensor> {
    x.expect_float(OP, "the operand")?;
    if x.shape().rank() == 0 {
        return Err(Error::shape(OP, "the operand", "at least one axis", x.shape()));
    }
    let dm = x.shape().last();
    let dk = feature_width(OP, dm, nu)?;
    if via_f32(x) {
        return cast(&dpfp(&to_f32(x)?, nu)?, DType::BF16);
    }
    let y = Tensor::uninit(x.shape().with_last(dk), x.dtype(), x.device())?; // [.., dk]
    match cuda_of(x) {
        None => cpu::dpfp(&x.read::<f32>(OP)?, &mut y.write::<f32>(OP)?, dm, nu),
        Some(cuda) => {
            let n = y.elements();
            cuda.kernel("assoc", x.dtype(), OP)?.cover(n).arg(x).arg(&y).arg(n).arg(dm as i32).arg(nu as i32).run()?;
        }
    }
    Ok(record(&[x], y, || Dpfp { x: x.detach(), nu }))
}

struct Dpfp {
    x: Tensor,
    nu: usize,
}

impl Backward for Dpfp {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let (x, nu) = (&self.x, self.nu);
        let dm = x.shape().last();
        let dx = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
        match cuda_of(x) {
            None => cpu::dpfp_backward(&x.read::<f32>(OP)?, &dy.read::<f32>(OP)?, &mut dx.write::<f32>(OP)?, dm, nu),
            Some(cuda) => {
                let n = x.elements();
                let launch = cuda.kernel("assoc", x.dtype(), "dpfp_backward")?.cover(n);
                launch.arg(x).arg(&dy).arg(&dx).arg(n).arg(dm as i32).arg(nu as i32).run()?;
            }
        }
        grads.give(0, dx)
    }
}
