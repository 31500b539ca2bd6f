//! The way of Mamba's first product into its scan: of rows [x', z], u = silu(causal_conv(x')), and z as the gate of what comes after.
//!
//! [`plain`] says it in other operations, and its way back is theirs. The fused one reads x' where it lies and leaves z there. Going back, with p
//! what silu was applied to, it makes p again: dp = du o silu'(p), and the gradients of x', of the weights and of the tail are those of
//! [`causal_conv`] for dp. The gradient of x' goes beside that of z, which the scan has written into a row's other half.

use super::gated_scan::in_fours;
use super::{CausalConv, Sizes, causal_conv};
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::ops::reduce::sum_middle_into;
use crate::ops::{cuda_of, narrow, silu};
use crate::paths;
use crate::tape::{Backward, Grads, record_all};
use crate::tensor::{DType, Tensor};

const OP: &str = "conv_silu";

/// What the convolution and its gate take. x, weight and bias share a float type; the tail is f32.
#[derive(Clone, Copy)]
pub struct ConvSilu<'a> {
    /// Rows [x', z], `[G, B, T, 2 E]`.
    pub x: &'a Tensor,
    /// `[G, E, K]`, K at least 2.
    pub weight: &'a Tensor,
    /// `[G, E]`. `None`: zero.
    pub bias: Option<&'a Tensor>,
    /// The last x' before, `[G, B, K - 1, E]`.
    pub tail: &'a Tensor,
    /// i32 `[G, B, T]`: 0 where a token is padding. `None`: nothing is.
    pub seen: Option<&'a Tensor>,
}

/// z, as [`gated_scan`](super::gated_scan()) takes it: the last columns of a tensor whose others, where it has any, count for nothing, as those of
/// its gradient do.
#[derive(Clone)]
pub struct Gate(Tensor);

impl Gate {
    /// All columns of z, `[G, B, T, E]`.
    pub fn of(z: &Tensor) -> Self {
        Gate(z.clone())
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.0
    }
}

/// u `[G, B, T, E]`, z, and the new tail. Operands whose shapes, types or devices do not fit together are an error.
pub fn conv_silu(conv: ConvSilu<'_>) -> Result<(Tensor, Gate, Tensor)> {
    let (sizes, k) = checked(&conv)?;
    let vectors = in_fours(&[conv.x, conv.tail]);
    let Some(cuda) = cuda_of(conv.x).filter(|_| paths::conv_silu(sizes.width, k, conv.seen.is_some(), vectors)) else {
        return plain(conv);
    };
    let u = Tensor::uninit(conv.x.shape().with_last(sizes.width), conv.x.dtype(), conv.x.device())?;
    let tail = Tensor::uninit(conv.tail.shape(), DType::F32, conv.x.device())?;
    let [x, weight, before] = [conv.x, conv.weight, conv.tail].map(Tensor::detach);
    let saved = Saved { x, weight, tail: before, bias: conv.bias.map(Tensor::detach), sizes, k };
    saved.forward_on(cuda, &u, &tail)?;
    let inputs: Vec<&Tensor> = [conv.x, conv.weight, conv.tail].into_iter().chain(conv.bias).collect();
    let [u, gate, tail] = record_all(&inputs, [u, conv.x.detach(), tail], || saved);
    Ok((u, Gate(gate), tail))
}

/// The convolution, its silu and the gate in operations of their own: the plain twin.
pub fn plain(conv: ConvSilu<'_>) -> Result<(Tensor, Gate, Tensor)> {
    let (Sizes { width, .. }, _) = checked(&conv)?;
    let half = |from| narrow(conv.x, 3, from, width);
    let (x, z) = (half(0)?, half(width)?);
    let ConvSilu { weight, bias, tail, seen, .. } = conv;
    let (p, tail) = causal_conv(CausalConv { x: &x, weight, bias, tail, seen })?;
    Ok((silu(&p)?, Gate(z), tail))
}

/// Sizes of x', and K. What `causal_conv` checks is left to it where nothing else needs it.
fn checked(conv: &ConvSilu<'_>) -> Result<(Sizes, usize)> {
    let whole = Sizes::of(OP, "x", conv.x)?;
    let Sizes { groups, texts, tokens, width } = whole;
    if !width.is_multiple_of(2) {
        return Err(Error::shape(OP, "x", format!("[{groups}, {texts}, {tokens}, an even number]"), conv.x.shape()));
    }
    let (width, k) = (width / 2, conv.weight.shape().last());
    if k < 2 {
        return Err(Error::shape(OP, "the weight", format!("[{groups}, {width}, at least 2]"), conv.weight.shape()));
    }
    let expect = |what, x, shape: &[usize], dtype| whole.expect(OP, conv.x, what, x, shape, dtype);
    expect("the weight", conv.weight, &[groups, width, k], conv.x.dtype())?;
    conv.bias.map_or(Ok(()), |bias| expect("the bias", bias, &[groups, width], conv.x.dtype()))?;
    expect("the tail", conv.tail, &[groups, texts, k - 1, width], DType::F32)?;
    whole.expect_seen(OP, conv.x, conv.seen)?;
    Ok((Sizes { width, ..whole }, k))
}

struct Saved {
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    bias: Option<Tensor>,
    sizes: Sizes,
    k: usize,
}

/// Tokens that a thread has on the way there and back; with those before and after them that it reads too, fewer would cost more than they give.
const RUN: usize = 16;
const RUN_BACK: usize = 32;

impl Saved {
    /// A launch with a thread for each four channels of `run` tokens.
    fn runs<'a>(&self, cuda: &'a CudaDevice, name: &str, run: usize) -> Result<(Launch<'a>, usize)> {
        let n = self.sizes.sequences() * self.sizes.tokens.div_ceil(run) * (self.sizes.width / 4);
        let launch = cuda.kernel_with("causal_conv", self.x.dtype(), &[("C_K", self.k), ("C_RUN", run)], name)?.cover(n);
        Ok((launch.arg(&self.x).arg(&self.weight).arg(self.bias.as_ref()).arg(&self.tail), n))
    }

    /// The last arguments of such a launch.
    fn run(&self, (launch, n): (Launch<'_>, usize)) -> Result<()> {
        let Sizes { texts, tokens, width, .. } = self.sizes;
        launch.arg(n).arg(texts as i32).arg(tokens as i32).arg(width as i32).arg(2 * width as i32).run()
    }

    fn forward_on(&self, cuda: &CudaDevice, u: &Tensor, tail: &Tensor) -> Result<()> {
        let (launch, n) = self.runs(cuda, "conv_silu", RUN)?;
        self.run((launch.arg(u).arg(tail), n))
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        // The gradient of x' goes into the half of a row that z's has nothing in.
        let (du, dx, dtail) = (grads.output(0)?, grads.output_owned(1)?, grads.output(2)?);
        let cuda = cuda_of(&du).ok_or_else(|| Error::Bug(format!("{OP}: a fused convolution that is not on CUDA")))?;
        let (Sizes { groups, texts, tokens, width }, k, device) = (self.sizes, self.k, du.device());
        let like = |x: &Tensor| Tensor::uninit(x.shape(), x.dtype(), device);
        let (weight, tail, bias) = (like(&self.weight)?, like(&self.tail)?, self.bias.as_ref().map(like).transpose()?);
        let parts = texts * tokens.div_ceil(RUN_BACK);
        let partial = Tensor::uninit([groups, parts, k + 1, width], DType::F32, device)?;
        let (launch, n) = self.runs(cuda, "conv_silu_back", RUN_BACK)?;
        self.run((launch.arg(&du).arg(&dtail).arg(&dx).arg(&tail).arg(&partial), n))?;
        let sums = Tensor::uninit([groups, k + 1, width], DType::F32, device)?;
        sum_middle_into(&partial, [groups, parts, (k + 1) * width], &sums, false)?;
        let n = sums.elements();
        let give = cuda.kernel_with("causal_conv", self.x.dtype(), &[("C_K", k)], "conv_weight_give")?.cover(n);
        give.arg(&sums).arg(&weight).arg(bias.as_ref()).arg(n).arg(width as i32).run()?;
        for (i, gradient) in [Some(dx), Some(weight), Some(tail), bias].into_iter().flatten().enumerate() {
            grads.give(i, gradient)?;
        }
        Ok(())
    }
}
