//! The feed-forward part of a block as one operation: y = gelu(x up + a) down + b + residual.
//!
//! The same as two linear layers, which it is on the CPU. On CUDA the way back saves a pass over the widest tensor of a block: GELU's derivative
//! is taken inside the product that makes its operand, where cuBLASLt can.

use super::matmul::{Activation, Linear, Sizes, add_sum, forward, give_operands, linear, multiply, sizes};
use super::{activation, cuda_of};
use crate::cuda::{Epilogue, Matrix, Product};
use crate::error::Result;
use crate::tape::{Backward, Grads, is_recorded, record};
use crate::tensor::Tensor;

const OP: &str = "mlp";

/// The matrices and biases of [`mlp`], for each of G groups or for all rows.
#[derive(Clone, Copy)]
pub struct Mlp<'a> {
    /// `[G, d, f]`.
    pub up: &'a Tensor,
    /// `[G, f]`.
    pub up_bias: &'a Tensor,
    /// `[G, f, d]`.
    pub down: &'a Tensor,
    /// `[G, d]`.
    pub down_bias: &'a Tensor,
}

/// gelu(x up + up_bias) down + down_bias + residual, with GELU in its tanh form, for x `[G, .., d]`. Refuses what
/// [`linear`](super::linear()) refuses.
pub fn mlp(x: &Tensor, w: Mlp<'_>, residual: &Tensor) -> Result<Tensor> {
    let first = Linear { bias: Some(w.up_bias), activation: Activation::Gelu, ..Linear::default() };
    let second = Linear { bias: Some(w.down_bias), residual: Some(residual), ..Linear::default() };
    let inputs = [x, w.up, w.up_bias, w.down, w.down_bias, residual];
    if cuda_of(x).is_none() || !is_recorded(&inputs) {
        return linear(&linear(x, w.up, first)?, w.down, second);
    }
    for (what, t) in [("up", w.up), ("the bias of up", w.up_bias), ("down", w.down), ("the bias of down", w.down_bias)] {
        t.expect_dtype(OP, what, x.dtype())?;
        t.expect_device_of(OP, what, x)?;
    }
    residual.expect_dtype(OP, "the residual", x.dtype())?;
    let like = |n: usize| Tensor::uninit(x.shape().with_last(n), x.dtype(), x.device());
    let wide = sizes(OP, x, w.up, &first)?;
    let (before, u) = (like(wide.n)?, like(wide.n)?);
    let narrow = sizes(OP, &u, w.down, &second)?;
    let y = like(narrow.n)?;
    forward(x, w.up, &first, wide, &u, Some(&before))?;
    forward(&u, w.down, &second, narrow, &y, None)?;
    let own = |t: &Tensor| t.detach();
    Ok(record(&inputs, y, || MlpBackward { x: own(x), up: own(w.up), before, u, down: own(w.down), wide, narrow }))
}

struct MlpBackward {
    x: Tensor,
    up: Tensor,
    /// x up + up_bias.
    before: Tensor,
    /// Its GELU.
    u: Tensor,
    down: Tensor,
    wide: Sizes,
    narrow: Sizes,
}

impl MlpBackward {
    /// The gradient of `before`: dy down^T times GELU's derivative.
    fn before_gradient(&self, dy: &Tensor) -> Result<Tensor> {
        let Sizes { batch, m, n: d, k: f } = self.narrow;
        let du = Tensor::uninit(self.before.shape(), dy.dtype(), dy.device())?;
        if let Some(cuda) = cuda_of(dy) {
            let fused = Product {
                m,
                n: f,
                k: d,
                batch,
                a: Matrix { ptr: dy.ptr(), dtype: dy.dtype(), transposed: false, stride: m * d },
                b: Matrix { ptr: self.down.ptr(), dtype: dy.dtype(), transposed: true, stride: f * d },
                c: None,
                d: Matrix { ptr: du.ptr(), dtype: dy.dtype(), transposed: false, stride: m * f },
                alpha: 1.0,
                epilogue: Epilogue::GeluSlope,
                bias: (0, 0),
                aux: self.before.ptr(),
            };
            if cuda.product(&fused)? {
                return Ok(du);
            }
        }
        multiply(dy, false, &self.down, true, Sizes { batch, m, n: f, k: d }, &du, false)?;
        activation::gelu_backward(&self.before, &du)
    }
}

impl Backward for MlpBackward {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let (w, n) = (self.wide, self.narrow);
        if let Some(t) = grads.target(4)? {
            add_sum(&dy, [n.batch, n.m, n.n], &t)?;
        }
        if let Some(t) = grads.target(3)? {
            multiply(&self.u, true, &dy, false, Sizes { batch: n.batch, m: n.k, n: n.n, k: n.m }, &t.tensor, t.accumulate)?;
        }
        let du = self.before_gradient(&dy)?;
        grads.give(5, dy)?;
        if let Some(t) = grads.target(2)? {
            add_sum(&du, [w.batch, w.m, w.n], &t)?;
        }
        give_operands(grads, &du, (&self.x, false), (&self.up, false), w)
    }
}
