//! Sums and means: over everything, or over one axis. y[o, i] = sum_m x[o, m, i], accumulated in f32.

use super::{cast, cuda_of, scale, to_f32, via_f32};
use crate::cpu::reduce as cpu;
use crate::cuda::{COUNTERS, CudaDevice};
use crate::error::{Error, Result};
use crate::paths::{self, SumPath};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Shape, Tensor};

const OP: &str = "sum";

/// The sum of all elements, as an f32 tensor of shape `[1]`.
pub fn sum(x: &Tensor) -> Result<Tensor> {
    x.expect_float(OP, "the operand")?;
    let x = &to_f32(x)?;
    let y = Tensor::uninit([1], DType::F32, x.device())?;
    sum_middle_into(x, [1, x.elements(), 1], &y, false)?;
    let (shape, dtype) = (x.shape(), x.dtype());
    Ok(record(&[x], y, || Sum { shape, dtype, sizes: [1, shape.elements(), 1] }))
}

/// The mean of all elements, as an f32 tensor of shape `[1]`.
pub fn mean(x: &Tensor) -> Result<Tensor> {
    scale(&sum(x)?, 1.0 / x.elements() as f32)
}

/// The sum over one axis, which disappears from the shape.
pub fn sum_axis(x: &Tensor, axis: usize) -> Result<Tensor> {
    x.expect_float(OP, "the operand")?;
    if axis >= x.shape().rank() {
        return Err(Error::shape(OP, "the operand", format!("more than {axis} axes"), x.shape()));
    }
    if via_f32(x) {
        return cast(&sum_axis(&to_f32(x)?, axis)?, DType::BF16);
    }
    let shape = x.shape();
    let sizes = [shape.outer(axis), shape[axis], shape.inner(axis)];
    let kept: Vec<usize> = (0..shape.rank()).filter(|&i| i != axis).map(|i| shape[i]).collect();
    let y = Tensor::uninit(kept.as_slice(), DType::F32, x.device())?;
    sum_middle_into(x, sizes, &y, false)?;
    let dtype = x.dtype();
    let y = cast(&y, dtype)?;
    Ok(record(&[x], y, || Sum { shape, dtype, sizes }))
}

struct Sum {
    shape: Shape,
    dtype: DType,
    sizes: [usize; 3],
}

impl Backward for Sum {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let dx = Tensor::uninit(self.shape, self.dtype, dy.device())?;
        let [_, middle, inner] = self.sizes;
        match cuda_of(&dy) {
            None => cpu::spread(&dy.read::<f32>(OP)?, &mut dx.write::<f32>(OP)?, middle, inner),
            Some(cuda) => {
                // The sum of everything is f32 whatever x is.
                let dy = cast(&dy, DType::F32)?;
                let n = dx.elements();
                cuda.kernel("reduce", self.dtype, "spread")?.cover(n).arg(&dy).arg(&dx).arg(n).arg(middle).arg(inner).run()?;
            }
        }
        grads.give(0, dx)
    }
}

/// y[o, i] = (y[o, i] +) sum_m x[o, m, i] for x of `sizes` [o, m, i]; y is f32. The order of summation is fixed.
pub(crate) fn sum_middle_into(x: &Tensor, sizes: [usize; 3], y: &Tensor, accumulate: bool) -> Result<()> {
    sum_into(x, sizes, [y, y], sizes[0], accumulate)
}

/// Sums over the middle axis of two halves of x, each of `sizes`, into the two tensors of y, as [`sum_middle_into`]: one launch.
pub(crate) fn sum_halves_into(x: &Tensor, [outer, middle, inner]: [usize; 3], y: [&Tensor; 2], accumulate: bool) -> Result<()> {
    sum_into(x, [2 * outer, middle, inner], y, outer, accumulate)
}

/// Sums whose first `split` rows go to the first tensor of y and the others to the second.
fn sum_into(x: &Tensor, sizes: [usize; 3], y: [&Tensor; 2], split: usize, accumulate: bool) -> Result<()> {
    let [outer, middle, inner] = sizes;
    debug_assert!(x.elements() == outer * middle * inner && y.iter().all(|y| y.dtype() == DType::F32));
    debug_assert!(y[0].elements() == split * inner && (outer == split || y[1].elements() == (outer - split) * inner));
    let Some(cuda) = cuda_of(x) else {
        let x = x.read::<f32>(OP)?;
        let (first, second) = x.split_at(split * middle * inner);
        cpu::sum_middle(first, [split, middle, inner], &mut y[0].write::<f32>(OP)?, accumulate);
        if outer > split {
            cpu::sum_middle(second, [outer - split, middle, inner], &mut y[1].write::<f32>(OP)?, accumulate);
        }
        return Ok(());
    };
    let SumPath { kernel: name, columns } = paths::sum_columns(inner, split == outer, x.ptr().is_multiple_of(16));
    let pieces = Pieces::new(cuda, sizes, columns, x)?;
    let launch = cuda.kernel("reduce", x.dtype(), name)?.grid(pieces.tiles, pieces.count, 1).arg(x).arg(y[0]).arg(middle);
    let launch = launch.arg(accumulate).arg(pieces.partial.as_ref()).arg(cuda.counters_ptr());
    if name == "sum_last" { launch.run() } else { launch.arg(inner).arg(y[1]).arg(split).run() }
}

/// How a kernel that sums over the middle axis is cut into blocks: (o, tile of columns) by pieces of the summed axis.
pub(super) struct Pieces {
    pub(super) tiles: usize,
    pub(super) count: usize,
    /// For the pieces' sums, where there is more than one.
    pub(super) partial: Option<Tensor>,
}

impl Pieces {
    /// Blocks of `columns` columns, one piece where there are more of them than counters.
    pub(super) fn new(cuda: &CudaDevice, [outer, middle, inner]: [usize; 3], columns: usize, like: &Tensor) -> Result<Self> {
        let tiles = outer * inner.div_ceil(columns);
        let count = if tiles > COUNTERS { 1 } else { paths::sum_pieces(cuda.card(), tiles, middle, inner) };
        let partial = (count > 1).then(|| Tensor::uninit([outer, count, inner], DType::F32, like.device())).transpose()?;
        Ok(Pieces { tiles, count, partial })
    }
}
