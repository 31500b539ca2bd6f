//! Activations, element by element: ReLU, sigmoid, SiLU x sigmoid(x), GELU in its tanh and its erf form; and SwiGLU,
//! y = silu(gate) * up for rows stored as [gate, up].

use super::reduce::{Pieces, sum_middle_into};
use super::{cast, cuda_of, to_f32, via_f32};
use crate::cpu::{elementwise, math, par_rows, simd};
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

#[derive(Clone, Copy)]
enum Curve {
    Relu,
    Sigmoid,
    Silu,
    Gelu,
    GeluErf,
}

impl Curve {
    fn op(self) -> &'static str {
        match self {
            Curve::Relu => "relu",
            Curve::Sigmoid => "sigmoid",
            Curve::Silu => "silu",
            Curve::Gelu => "gelu",
            Curve::GeluErf => "gelu_erf",
        }
    }
}

/// max(x, 0).
pub fn relu(x: &Tensor) -> Result<Tensor> {
    unary(Curve::Relu, x)
}

/// 1 / (1 + e^-x).
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    unary(Curve::Sigmoid, x)
}

/// x sigmoid(x).
pub fn silu(x: &Tensor) -> Result<Tensor> {
    unary(Curve::Silu, x)
}

/// GELU in its tanh form (GPT-2).
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    unary(Curve::Gelu, x)
}

/// GELU in its exact form (GPT-NeoX).
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    unary(Curve::GeluErf, x)
}

fn unary(kind: Curve, x: &Tensor) -> Result<Tensor> {
    let op = kind.op();
    x.expect_float(op, "the operand")?;
    if via_f32(x) {
        return cast(&unary(kind, &to_f32(x)?)?, DType::BF16);
    }
    let y = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
    unary_into(kind, x, &y)?;
    Ok(record(&[x], y, || Unary { kind, x: x.detach() }))
}

fn unary_into(kind: Curve, x: &Tensor, y: &Tensor) -> Result<()> {
    let op = kind.op();
    match cuda_of(x) {
        None => {
            let (x, y) = (x.read::<f32>(op)?, &mut y.write::<f32>(op)?);
            match kind {
                Curve::Relu => elementwise::map(&x, y, |x: f32| x.max(0.0)),
                Curve::Sigmoid => elementwise::map(&x, y, math::sigmoid),
                Curve::Silu => elementwise::map(&x, y, |x| x * math::sigmoid(x)),
                Curve::Gelu => elementwise::map(&x, y, math::gelu),
                Curve::GeluErf => elementwise::map(&x, y, math::gelu_erf),
            }
        }
        Some(cuda) => {
            let n = x.elements();
            cuda.kernel("activation", x.dtype(), op)?.cover(n).arg(x).arg(y).arg(n).run()?;
        }
    }
    Ok(())
}

/// dy times the derivative at x.
fn unary_backward(kind: Curve, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let op = kind.op();
    let dx = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
    match cuda_of(x) {
        None => {
            let (x, dy, dx) = (x.read::<f32>(op)?, dy.read::<f32>(op)?, &mut dx.write::<f32>(op)?);
            match kind {
                Curve::Relu => elementwise::zip(&x, &dy, dx, |x, dy| if x > 0.0 { dy } else { 0.0 }),
                Curve::Sigmoid => elementwise::zip(&x, &dy, dx, |x, dy| {
                    let s = math::sigmoid(x);
                    dy * s * (1.0 - s)
                }),
                Curve::Silu => elementwise::zip(&x, &dy, dx, |x, dy| dy * math::silu_slope(x)),
                Curve::Gelu => elementwise::zip(&x, &dy, dx, |x, dy| dy * math::gelu_slope(x)),
                Curve::GeluErf => elementwise::zip(&x, &dy, dx, |x, dy| dy * math::gelu_erf_slope(x)),
            }
        }
        Some(cuda) => {
            let n = x.elements();
            let name = format!("{op}_backward");
            cuda.kernel("activation", x.dtype(), &name)?.cover(n).arg(x).arg(dy).arg(&dx).arg(n).run()?;
        }
    }
    Ok(dx)
}

/// GELU (tanh form) into an existing tensor, for the linear layer.
pub(crate) fn gelu_into(x: &Tensor, y: &Tensor) -> Result<()> {
    unary_into(Curve::Gelu, x, y)
}

/// dy times GELU's derivative at x, for the linear layer.
pub(crate) fn gelu_backward(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    unary_backward(Curve::Gelu, x, dy)
}

/// dy times GELU's derivative at x, and in `dbias`, f32 `[outer, inner]`, (dbias +) its sum over the rows of `sizes` [outer, middle, inner], in
/// one pass.
pub(crate) fn gelu_bias_backward(x: &Tensor, dy: &Tensor, sizes: [usize; 3], dbias: &Tensor, accumulate: bool) -> Result<Tensor> {
    let Some(cuda) = cuda_of(x) else {
        let dx = gelu_backward(x, dy)?;
        sum_middle_into(&dx, sizes, dbias, accumulate)?;
        return Ok(dx);
    };
    let dx = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
    let [_, middle, inner] = sizes;
    let unit = 16 / x.dtype().size();
    let wide = inner.is_multiple_of(unit) && [x, dy, &dx].iter().all(|t| t.ptr().is_multiple_of(16));
    let (name, columns) = if wide { ("gelu_bias_backward_wide", 32 * unit) } else { ("gelu_bias_backward", 32) };
    let pieces = Pieces::new(cuda, sizes, columns, x)?;
    let launch = cuda.kernel("activation", x.dtype(), name)?.grid(pieces.tiles, pieces.count, 1).arg(x).arg(dy).arg(&dx);
    let launch = launch.arg(dbias).arg(middle).arg(inner).arg(accumulate).arg(pieces.partial.as_ref());
    launch.arg(cuda.counters_ptr()).run()?;
    Ok(dx)
}

struct Unary {
    kind: Curve,
    x: Tensor,
}

impl Backward for Unary {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        grads.give(0, unary_backward(self.kind, &self.x, &dy)?)
    }
}

/// silu(gate) * up for x `[.., 2 f]` whose rows are [gate, up]; the result is `[.., f]`.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu";
    x.expect_float(OP, "the operand")?;
    if x.shape().rank() == 0 || !x.shape().last().is_multiple_of(2) {
        return Err(Error::shape(OP, "the operand", "[.., an even number]", x.shape()));
    }
    if via_f32(x) {
        return cast(&swiglu(&to_f32(x)?)?, DType::BF16);
    }
    let f = x.shape().last() / 2;
    let y = Tensor::uninit(x.shape().with_last(f), x.dtype(), x.device())?;
    match cuda_of(x) {
        None => {
            let x = x.read::<f32>(OP)?;
            par_rows(&mut y.write::<f32>(OP)?, f, 4 * f, |first, y| {
                simd!({
                    for (y, x) in y.chunks_exact_mut(f).zip(x[first * 2 * f..].chunks_exact(2 * f)) {
                        let (gate, up) = x.split_at(f);
                        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                            *y = g * math::sigmoid(*g) * u;
                        }
                    }
                });
            });
        }
        Some(cuda) => {
            let n = y.elements();
            cuda.kernel("activation", x.dtype(), OP)?.cover(n).arg(x).arg(&y).arg(n).arg(f).run()?;
        }
    }
    Ok(record(&[x], y, || Swiglu { x: x.detach() }))
}

struct Swiglu {
    x: Tensor,
}

impl Backward for Swiglu {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        const OP: &str = "swiglu";
        let dy = grads.output(0)?;
        let x = &self.x;
        let f = x.shape().last() / 2;
        let dx = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
        match cuda_of(x) {
            None => {
                let (x, dy) = (x.read::<f32>(OP)?, dy.read::<f32>(OP)?);
                par_rows(&mut dx.write::<f32>(OP)?, 2 * f, 8 * f, |first, dx| {
                    let rows =
                        dx.chunks_exact_mut(2 * f).zip(x[first * 2 * f..].chunks_exact(2 * f)).zip(dy[first * f..].chunks_exact(f));
                    simd!({
                        for ((dx, x), dy) in rows {
                            let ((dg, du), (gate, up)) = (dx.split_at_mut(f), x.split_at(f));
                            for i in 0..f {
                                let (g, u, dy) = (gate[i], up[i], dy[i]);
                                dg[i] = dy * u * math::silu_slope(g);
                                du[i] = dy * g * math::sigmoid(g);
                            }
                        }
                    });
                });
            }
            Some(cuda) => {
                let n = dy.elements();
                let launch = cuda.kernel("activation", x.dtype(), "swiglu_backward")?.cover(n);
                launch.arg(x).arg(&dy).arg(&dx).arg(n).arg(f).run()?;
            }
        }
        grads.give(0, dx)
    }
}
