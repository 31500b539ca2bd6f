//! A range of one axis: y[.., i, ..] = x[.., start + i, ..]. Copied, but for the leading axis, where it is a view.
//!
//! Going back, the range of x's gradient gets dy added and the rest nothing.

use half::bf16;

use super::cuda_of;
use crate::cpu::elementwise::{round_bf16, widen};
use crate::cpu::slice::{self as cpu, Stretch};
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

const OP: &str = "narrow";

/// Elements `start` to `start + len` of one axis. Shares the buffer along axis 0. Refuses an axis or a range outside x.
pub fn narrow(x: &Tensor, axis: usize, start: usize, len: usize) -> Result<Tensor> {
    let shape = x.shape();
    if axis >= shape.rank() {
        return Err(Error::shape(OP, "the operand", format!("more than {axis} axes"), shape));
    }
    let size = shape[axis];
    if start.checked_add(len).is_none_or(|end| end > size) {
        return Err(Error::argument(OP, format!("{len} elements from {start} do not lie within axis {axis} of {shape}")));
    }
    if len == size {
        return Ok(x.clone());
    }
    if axis == 0 {
        return super::rows(x, start..start + len);
    }
    let (outer, inner) = (shape.outer(axis), shape.inner(axis));
    let y = Tensor::uninit(shape.with(axis, len), x.dtype(), x.device())?;
    let stretches = Stretches {
        rows: outer,
        width: len * inner,
        from: Stretch { stride: size * inner, at: start * inner },
        to: Stretch { stride: len * inner, at: 0 },
    };
    stretches.copy(x, &y)?;
    Ok(record(&[x], y, || Narrow { stretches }))
}

struct Narrow {
    stretches: Stretches,
}

impl Backward for Narrow {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let Some(target) = grads.target(0)? else { return Ok(()) };
        if !target.accumulate {
            target.tensor.fill_zero()?;
        }
        let Stretches { from, to, .. } = self.stretches;
        Stretches { from: to, to: from, ..self.stretches }.add(&dy, &target.tensor)
    }
}

/// `width` elements of each of `rows` rows, from one tensor to another.
#[derive(Clone, Copy)]
pub(super) struct Stretches {
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) from: Stretch,
    pub(super) to: Stretch,
}

impl Stretches {
    /// y's stretches = x's. Same type, any of them.
    pub(super) fn copy(self, x: &Tensor, y: &Tensor) -> Result<()> {
        let Stretches { width, from, to, .. } = self;
        match (cuda_of(x), x.dtype()) {
            (None, DType::F32) => cpu::update((&x.read::<f32>(OP)?, from), (&mut y.write::<f32>(OP)?, to), width, |_, x| x),
            (None, DType::BF16) => cpu::update((&x.read::<bf16>(OP)?, from), (&mut y.write::<bf16>(OP)?, to), width, |_, x| x),
            (None, DType::I32) => cpu::update((&x.read::<i32>(OP)?, from), (&mut y.write::<i32>(OP)?, to), width, |_, x| x),
            (_, DType::I8) => return Err(Error::argument(OP, "packed matrices in int8 cannot be cut")),
            (Some(_), dtype) => {
                // The bits of an i32 travel as those of an f32.
                let bits = if dtype == DType::I32 { DType::F32 } else { dtype };
                match self.unit(x, y) {
                    1 => self.launch("copy", bits, 1, x, y)?,
                    unit => self.launch("copy_vectors", bits, unit, x, y)?,
                }
            }
        }
        Ok(())
    }

    /// y's stretches += x's. y may be f32 where x is bf16.
    pub(super) fn add(self, x: &Tensor, y: &Tensor) -> Result<()> {
        let Stretches { width, from, to, .. } = self;
        match (cuda_of(x), x.dtype(), y.dtype()) {
            (None, DType::F32, _) => cpu::update((&x.read::<f32>(OP)?, from), (&mut y.write::<f32>(OP)?, to), width, |y, x| y + x),
            (None, _, DType::F32) => {
                cpu::update((&x.read::<bf16>(OP)?, from), (&mut y.write::<f32>(OP)?, to), width, |y, x| y + widen(x));
            }
            (None, ..) => {
                let sum = |y, x| round_bf16(widen(y) + widen(x));
                cpu::update((&x.read::<bf16>(OP)?, from), (&mut y.write::<bf16>(OP)?, to), width, sum);
            }
            (Some(_), dtype, to) if dtype != to => self.launch("add_to_f32", dtype, 1, x, y)?,
            (Some(_), dtype, _) => match self.unit(x, y) {
                1 => self.launch("add", dtype, 1, x, y)?,
                unit => self.launch("add_vectors", dtype, unit, x, y)?,
            },
        }
        Ok(())
    }

    /// Scalars that a thread takes at a time, of tensors of one type: sixteen bytes where everything is a multiple of them.
    fn unit(self, x: &Tensor, y: &Tensor) -> usize {
        let Stretches { width, from, to, .. } = self;
        let unit = 16 / x.dtype().size();
        let sizes = [width, from.stride, from.at, to.stride, to.at];
        let fits = sizes.iter().all(|n| n.is_multiple_of(unit)) && [x, y].iter().all(|t| t.ptr().is_multiple_of(16));
        if fits { unit } else { 1 }
    }

    /// A kernel of slice.cu over elements of `unit` scalars.
    fn launch(self, name: &str, dtype: DType, unit: usize, x: &Tensor, y: &Tensor) -> Result<()> {
        let Some(cuda) = cuda_of(x) else { return Ok(()) };
        let Stretches { rows, width, from, to } = self;
        let n = rows * width / unit;
        let mut launch = cuda.kernel("slice", dtype, name)?.cover(n).arg(x).arg(y).arg(n);
        for size in [width, from.stride, from.at, to.stride, to.at] {
            launch = launch.arg(size / unit);
        }
        launch.run()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::{Param, Tape};
    use crate::tensor::Device;

    #[test]
    fn an_axis_or_a_range_outside_the_operand_is_refused() {
        let x = Tensor::zeros([2, 3], DType::F32, &Device::cpu()).unwrap();
        let e = narrow(&x, 2, 0, 1).unwrap_err().to_string();
        assert!(e.contains("more than 2 axes") && e.contains("[2, 3]"), "{e}");
        for (start, len) in [(0, 4), (3, 1), (usize::MAX, 2)] {
            let e = narrow(&x, 1, start, len).unwrap_err().to_string();
            assert!(e.contains("axis 1") && e.contains("[2, 3]"), "{e}");
        }
    }

    #[test]
    fn integers_can_be_narrowed() {
        let x = Tensor::from_slice(&[1, 2, 3, 4, 5, 6], [2, 3], &Device::cpu()).unwrap();
        assert_eq!(narrow(&x, 1, 1, 2).unwrap().to_vec::<i32>().unwrap(), [2, 3, 5, 6]);
        assert_eq!(narrow(&x, 0, 1, 1).unwrap().to_vec::<i32>().unwrap(), [4, 5, 6]);
        assert_eq!(narrow(&x, 1, 3, 0).unwrap().dims(), [2, 0]);
    }

    #[test]
    fn gradients_reach_bf16_variables_and_f32_buffers_of_bf16_parameters() {
        let device = Device::cpu();
        let ones = Tensor::full(1.0, [2, 3], &device).unwrap();
        let param = Param::new("p", &ones, DType::BF16).unwrap();
        let tape = Tape::new();
        let x = tape.variable(&super::super::cast(&ones, DType::BF16).unwrap());
        let both = [narrow(&x, 1, 0, 2).unwrap(), narrow(&tape.param(&param), 1, 1, 2).unwrap(), narrow(&x, 1, 1, 2).unwrap()];
        let ones = super::super::cast(&Tensor::full(1.0, [2, 2], &device).unwrap(), DType::BF16).unwrap();
        tape.backward_from(&both.each_ref().map(|y| (y, ones.clone()))).unwrap();
        assert_eq!(tape.grad(&x).unwrap().to_f32_vec().unwrap(), [1.0, 2.0, 1.0, 1.0, 2.0, 1.0]);
        assert_eq!(param.grad().unwrap().to_vec::<f32>().unwrap(), [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
    }
}
