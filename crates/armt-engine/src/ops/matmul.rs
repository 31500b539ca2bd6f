//! Matrix products: y[g] = op(a[g]) op(b[g]), and the linear layer y[g] = activation(x[g] w[g] + bias[g]) + residual[g].
//!
//! Products are cuBLASLt's on CUDA, with bias and GELU in its epilogue where it can, and the `gemm` crate's on the CPU, where the
//! epilogue runs over each piece of the result while it is in the cache; a linear layer with one output may be a kernel of our own.
//! Gradients of weights accumulate straight into the parameter's f32 buffer, also from bf16 operands.

use super::reduce::sum_middle_into;
use super::{activation, cast, cuda_of, to_f32, via_f32};
use crate::cpu::int8;
use crate::cpu::matmul as cpu;
use crate::cuda::{CudaDevice, Epilogue, Matrix, Product};
use crate::error::{Error, Result};
use crate::paths::{self, LinearPath};
use crate::tape::{Backward, Grads, is_recorded, record};
use crate::tensor::{DType, Shape, Tensor};

/// What a linear layer applies after adding its bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// GELU in its tanh form.
    Gelu,
}

/// The parts of a linear layer beside x and w. The default is a plain product.
#[derive(Clone, Copy, Default)]
pub struct Linear<'a> {
    /// `[N]` or `[G, N]`.
    pub bias: Option<&'a Tensor>,
    /// Applied after the bias.
    pub activation: Activation,
    /// Added last; of the result's shape. Not together with an activation.
    pub residual: Option<&'a Tensor>,
    /// w is stored as `[G, N, K]`.
    pub transposed: bool,
    /// Of a w in int8, `[G, 2, N]`: those of [`Param::scales`](crate::Param::scales).
    pub scales: Option<&'a Tensor>,
    /// Whether there is to be room for one more row of the leading axis in front of the result, for [`prepend`](super::prepend). Nothing
    /// that a tape records needs it.
    pub room: bool,
}

/// a b: `[.., M, K]` by `[.., K, N]` with equal leading axes, or by one `[K, N]` for all rows.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    product("matmul", a, false, b, false)
}

/// a b^T: `[.., M, K]` by `[.., N, K]`.
pub fn matmul_nt(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    product("matmul_nt", a, false, b, true)
}

/// a^T b: `[.., K, M]` by `[.., K, N]`.
pub fn matmul_tn(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    product("matmul_tn", a, true, b, false)
}

/// Sizes of a batched product y[batch] = op(a) op(b).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// The last two axes, swapped if stored transposed.
fn last_two(shape: Shape, transposed: bool) -> (usize, usize) {
    let r = shape.rank();
    let (rows, cols) = (shape[r - 2], shape[r - 1]);
    if transposed { (cols, rows) } else { (rows, cols) }
}

fn product(op: &'static str, a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    a.expect_float(op, "the first operand")?;
    b.expect_dtype(op, "the second operand", a.dtype())?;
    b.expect_device_of(op, "the second operand", a)?;
    if via_f32(a) {
        return cast(&product(op, &to_f32(a)?, ta, &to_f32(b)?, tb)?, DType::BF16);
    }
    let (ra, rb) = (a.shape().rank(), b.shape().rank());
    if ra < 2 || rb < 2 {
        let (what, short) = if ra < 2 { ("the first operand", a) } else { ("the second operand", b) };
        return Err(Error::shape(op, what, "at least two axes", short.shape()));
    }
    if rb == 2 && ra > 2 && !ta {
        let flat = super::reshape(a, [a.shape().rows(), a.shape().last()])?;
        let y = product(op, &flat, ta, b, tb)?;
        let n = y.shape().last();
        return super::reshape(&y, a.shape().with_last(n));
    }
    let (m, k) = last_two(a.shape(), ta);
    let (k_b, n) = last_two(b.shape(), tb);
    if k != k_b || a.dims()[..ra - 2] != b.dims()[..rb - 2] {
        let (x, y) = if tb { (n, k) } else { (k, n) };
        let lead = &a.dims()[..ra - 2];
        let expected = format!("{:?} or, for a plain product, [{x}, {y}]", [lead, &[x, y]].concat());
        return Err(Error::shape(op, "the second operand", expected, b.shape()));
    }
    let sizes = Sizes { batch: a.dims()[..ra - 2].iter().product(), m, n, k };
    let shape = Shape::new(&[&a.dims()[..ra - 2], &[m, n]].concat());
    let y = Tensor::uninit(shape, a.dtype(), a.device())?;
    multiply(a, ta, b, tb, sizes, &y, false)?;
    Ok(record(&[a, b], y, || ProductBackward { a: a.detach(), ta, b: b.detach(), tb, sizes }))
}

/// y = (y +) op(a) op(b), untracked. y may be f32 where the operands are bf16.
pub(crate) fn multiply(a: &Tensor, ta: bool, b: &Tensor, tb: bool, s: Sizes, y: &Tensor, accumulate: bool) -> Result<()> {
    const OP: &str = "matmul";
    if s.batch * s.m * s.n == 0 {
        return Ok(());
    }
    if s.k == 0 {
        return if accumulate { Ok(()) } else { y.fill_zero() };
    }
    let Some(cuda) = cuda_of(a) else {
        let (a, b) = (a.read::<f32>(OP)?, b.read::<f32>(OP)?);
        cpu::batched(&a, ta, &b, tb, s, &mut y.write::<f32>(OP)?, accumulate, |_, _, _| {});
        return Ok(());
    };
    let product = Product {
        m: s.m,
        n: s.n,
        k: s.k,
        batch: s.batch,
        a: Matrix { ptr: a.ptr(), dtype: a.dtype(), transposed: ta, stride: s.m * s.k },
        b: Matrix { ptr: b.ptr(), dtype: b.dtype(), transposed: tb, stride: s.k * s.n },
        c: accumulate.then(|| y.ptr()),
        d: Matrix { ptr: y.ptr(), dtype: y.dtype(), transposed: false, stride: s.m * s.n },
        alpha: 1.0,
        epilogue: Epilogue::None,
        bias: (0, 0),
        aux: 0,
    };
    cuda.product(&product).map(|_| ())
}

struct ProductBackward {
    a: Tensor,
    ta: bool,
    b: Tensor,
    tb: bool,
    sizes: Sizes,
}

impl Backward for ProductBackward {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        give_operands(grads, &dy, (&self.a, self.ta), (&self.b, self.tb), self.sizes)
    }
}

/// Gradients of the operands, inputs 0 and 1, of y = op(a) op(b).
fn give_operands(grads: &mut Grads<'_>, dy: &Tensor, (a, ta): (&Tensor, bool), (b, tb): (&Tensor, bool), s: Sizes) -> Result<()> {
    let Sizes { batch, m, n, k } = s;
    if let Some(t) = grads.target(0)? {
        if ta {
            multiply(b, tb, dy, true, Sizes { batch, m: k, n: m, k: n }, &t.tensor, t.accumulate)?;
        } else {
            multiply(dy, false, b, !tb, Sizes { batch, m, n: k, k: n }, &t.tensor, t.accumulate)?;
        }
    }
    if let Some(t) = grads.target(1)? {
        if tb {
            multiply(dy, true, a, ta, Sizes { batch, m: n, n: k, k: m }, &t.tensor, t.accumulate)?;
        } else {
            multiply(a, !ta, dy, false, Sizes { batch, m: k, n, k: m }, &t.tensor, t.accumulate)?;
        }
    }
    Ok(())
}

/// activation(x w + bias) + residual. x is `[G, .., K]` with w `[G, K, N]`, or `[.., K]` with w `[K, N]`; the result is `[.., N]`.
pub fn linear(x: &Tensor, w: &Tensor, with: Linear<'_>) -> Result<Tensor> {
    const OP: &str = "linear";
    let Linear { bias, activation, residual, transposed, scales, room } = with;
    x.expect_float(OP, "x")?;
    if let Some(scales) = scales {
        expect_int8(x, w, scales, transposed)?;
    }
    for (what, t) in [("the weight", scales.is_none().then_some(w)), ("the bias", bias), ("the residual", residual)] {
        if let Some(t) = t {
            t.expect_dtype(OP, what, x.dtype())?;
            t.expect_device_of(OP, what, x)?;
        }
    }
    if activation != Activation::None && residual.is_some() {
        return Err(Error::argument(OP, "an activation and a residual cannot be combined: add the residual with `add`"));
    }
    if via_f32(x) {
        let own = |t: Option<&Tensor>| t.map(to_f32).transpose();
        let (bias, residual) = (own(bias)?, own(residual)?);
        let with = Linear { bias: bias.as_ref(), residual: residual.as_ref(), ..with };
        return cast(&linear(&to_f32(x)?, &to_f32(w)?, with)?, DType::BF16);
    }
    let sizes = sizes(OP, x, w, &with)?;
    let y_shape = x.shape().with_last(sizes.n);
    let inputs: Vec<&Tensor> = [Some(x), Some(w), bias, residual].into_iter().flatten().collect();
    let y = match room && !is_recorded(&inputs) {
        true => Tensor::uninit(y_shape.with(0, 1 + y_shape[0]), x.dtype(), x.device())?.view_rows(1..1 + y_shape[0]),
        false => Tensor::uninit(y_shape, x.dtype(), x.device())?,
    };
    // The values before the activation, which its derivative needs.
    let keep = activation == Activation::Gelu && is_recorded(&inputs);
    let before = keep.then(|| Tensor::uninit(y_shape, x.dtype(), x.device())).transpose()?;
    forward(x, w, &with, sizes, &y, before.as_ref())?;
    Ok(record(&inputs, y, || LinearBackward {
        x: x.detach(),
        w: w.detach(),
        transposed,
        before,
        has_bias: bias.is_some(),
        has_residual: residual.is_some(),
        sizes,
    }))
}

/// Refuses what a weight in int8 cannot do: it is for f32 on the CPU, and has no gradient to hand on.
fn expect_int8(x: &Tensor, w: &Tensor, scales: &Tensor, transposed: bool) -> Result<()> {
    const OP: &str = "linear";
    w.expect_dtype(OP, "the weight", DType::I8)?;
    x.expect_dtype(OP, "x, where the weight is int8", DType::F32)?;
    scales.expect_dtype(OP, "the scales", DType::F32)?;
    w.expect_rank(OP, "the weight in int8", 3)?;
    scales.expect_shape(OP, "the scales", [w.shape()[0], 2, w.shape()[2]])?;
    if transposed || x.device().is_cuda() || is_recorded(&[x]) {
        return Err(Error::argument(OP, "a weight in int8 is stored [in, out], is multiplied on the CPU and hands no gradient on"));
    }
    Ok(())
}

/// The sizes of a linear layer; an error where shapes do not fit together.
fn sizes(op: &'static str, x: &Tensor, w: &Tensor, with: &Linear<'_>) -> Result<Sizes> {
    let grouped = w.shape().rank() == 3;
    if !grouped {
        w.expect_rank(op, "the weight", 2)?;
    }
    let (k, n) = last_two(w.shape(), with.transposed);
    let batch = if grouped { w.shape()[0] } else { 1 };
    let fits = x.shape().rank() >= w.shape().rank() - 1 && x.shape().last() == k && (!grouped || x.shape()[0] == batch);
    if !fits || x.shape().rank() == 0 {
        let expected = if grouped { format!("[{batch}, .., {k}]") } else { format!("[.., {k}]") };
        return Err(Error::shape(op, "x", expected, x.shape()));
    }
    if k == 0 {
        return Err(Error::shape(op, "x", "rows of at least one number", x.shape()));
    }
    let m = x.elements() / (batch * k).max(1);
    let y_shape = x.shape().with_last(n);
    if let Some(bias) = with.bias
        && (bias.elements() != batch * n || bias.shape().last() != n)
    {
        return Err(Error::shape(op, "the bias", if grouped { format!("[{batch}, {n}]") } else { format!("[{n}]") }, bias.shape()));
    }
    if let Some(residual) = with.residual {
        residual.expect_shape(op, "the residual", y_shape)?;
    }
    Ok(Sizes { batch, m, n, k })
}

/// activation(x w + bias) + residual into y, untracked. `before`, if given, receives what the activation was applied to.
pub(super) fn forward(x: &Tensor, w: &Tensor, with: &Linear<'_>, s: Sizes, y: &Tensor, before: Option<&Tensor>) -> Result<()> {
    const OP: &str = "linear";
    let Some(cuda) = cuda_of(x) else {
        let bias = with.bias.map(|t| t.read::<f32>(OP)).transpose()?;
        let residual = with.residual.map(|t| t.read::<f32>(OP)).transpose()?;
        let x = x.read::<f32>(OP)?;
        // With an activation to differentiate, the product goes to `before` and the activation from there to y.
        let mut out = before.unwrap_or(y).write::<f32>(OP)?;
        let gelu = with.activation == Activation::Gelu && before.is_none();
        let epilogue = |group: usize, row: usize, out: &mut [f32]| {
            let bias = bias.as_deref().map(|b| &b[group * s.n..][..s.n]);
            let residual = residual.as_deref().map(|r| &r[(group * s.m + row) * s.n..][..out.len()]);
            cpu::epilogue(out, s.n, bias, residual, gelu);
        };
        match with.scales {
            None => cpu::batched(&x, false, &w.read::<f32>(OP)?, with.transposed, s, &mut out, false, epilogue),
            Some(scales) => {
                let w = (&*w.read::<i8>(OP)?, &*scales.read::<f32>(OP)?);
                int8::batched(&x, w, s, &mut out, paths::int8_product(), epilogue);
            }
        }
        drop(out);
        return match before {
            Some(before) => activation::gelu_into(before, y),
            None => Ok(()),
        };
    };
    if paths::linear(s, with.activation, with.residual.is_some()) == LinearPath::OneColumn {
        return one_column(cuda, x, w, with.bias, s, y);
    }
    let epilogue = match (with.bias, with.activation, before) {
        (None, ..) => Epilogue::None,
        (Some(_), Activation::None, _) => Epilogue::Bias,
        (Some(_), Activation::Gelu, None) => Epilogue::BiasGelu,
        (Some(_), Activation::Gelu, Some(_)) => Epilogue::BiasGeluAux,
    };
    let mut product = Product {
        m: s.m,
        n: s.n,
        k: s.k,
        batch: s.batch,
        a: Matrix { ptr: x.ptr(), dtype: x.dtype(), transposed: false, stride: s.m * s.k },
        b: Matrix { ptr: w.ptr(), dtype: w.dtype(), transposed: with.transposed, stride: s.k * s.n },
        c: with.residual.map(Tensor::ptr),
        d: Matrix { ptr: y.ptr(), dtype: y.dtype(), transposed: false, stride: s.m * s.n },
        alpha: 1.0,
        epilogue,
        bias: (with.bias.map_or(0, Tensor::ptr), s.n),
        aux: before.map_or(0, Tensor::ptr),
    };
    if s.batch * s.m * s.n == 0 || (epilogue != Epilogue::None && cuda.product(&product)?) {
        return Ok(());
    }
    // Without a fused epilogue: the product first, then bias and activation in a kernel of our own.
    product.epilogue = Epilogue::None;
    if before.is_some() {
        product.d.ptr = product.aux;
    }
    cuda.product(&product)?;
    let gelu = with.activation == Activation::Gelu;
    if with.bias.is_none() && !gelu {
        return Ok(());
    }
    let n = y.elements();
    let launch = cuda.kernel("elementwise", y.dtype(), "bias_activation")?.cover(n);
    launch.arg(before.unwrap_or(y)).arg(with.bias).arg(before).arg(y).arg(n).arg(s.m).arg(s.n).arg(gelu).run()
}

/// x w + bias where w has one column.
fn one_column(cuda: &CudaDevice, x: &Tensor, w: &Tensor, bias: Option<&Tensor>, s: Sizes, y: &Tensor) -> Result<()> {
    const WARPS: usize = 4;
    let rows = s.batch * s.m;
    if rows == 0 {
        return Ok(());
    }
    let launch = cuda.kernel("reduce", x.dtype(), "one_column")?.block(32 * WARPS).grid(rows.div_ceil(WARPS), 1, 1);
    launch.arg(x).arg(w).arg(bias).arg(y).arg(rows).arg(s.m).arg(s.k).run()
}

struct LinearBackward {
    x: Tensor,
    w: Tensor,
    transposed: bool,
    before: Option<Tensor>,
    has_bias: bool,
    has_residual: bool,
    sizes: Sizes,
}

impl Backward for LinearBackward {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let s = self.sizes;
        let rows = [s.batch, s.m, s.n];
        let bias = if self.has_bias { grads.target(2)? } else { None };
        let du = match (&self.before, bias) {
            // The bias' gradient from the values that are at hand.
            (Some(before), Some(t)) if t.tensor.dtype() == DType::F32 => {
                activation::gelu_bias_backward(before, &dy, rows, &t.tensor, t.accumulate)?
            }
            (before, bias) => {
                let du = match before {
                    Some(before) => activation::gelu_backward(before, &dy)?,
                    None => dy.clone(),
                };
                if let Some(t) = bias {
                    add_sum(&du, rows, &t)?;
                }
                du
            }
        };
        if self.has_residual {
            grads.give(2 + usize::from(self.has_bias), dy)?;
        }
        give_operands(grads, &du, (&self.x, false), (&self.w, self.transposed), s)
    }
}

/// target += sum over the middle axis, whatever float type the target has.
pub(crate) fn add_sum(x: &Tensor, sizes: [usize; 3], target: &crate::tape::Target) -> Result<()> {
    if target.tensor.dtype() == DType::F32 {
        return sum_middle_into(x, sizes, &target.tensor, target.accumulate);
    }
    let sum = Tensor::uninit(target.tensor.shape(), DType::F32, x.device())?;
    sum_middle_into(x, sizes, &sum, false)?;
    let sum = cast(&sum, target.tensor.dtype())?;
    if target.accumulate { super::accumulate(&target.tensor, &sum) } else { target.tensor.copy_from(&sum) }
}
