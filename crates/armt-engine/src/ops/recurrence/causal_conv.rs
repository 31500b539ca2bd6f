//! A causal convolution over tokens, each channel on its own, that goes on where the call before ended:
//!
//! y_t = b + sum_k w_k x_(t-K+1+k), k = 0 .. K - 1: w_(K-1) is the token's own, and what is before the first token is the tail.
//!
//! The tail are the last K - 1 inputs that were seen, the oldest first; the new tail is those of the tail and x together. With K = 2 and
//! w = (1, 0) this is the token shift of RWKV. Backward is the correlation: dx_s = sum_k w_k dy_(s+K-1-k), with what the gradient of the
//! new tail adds; dw_k = sum_t dy_t x_(t-K+1+k).

use super::Sizes;
use crate::cpu::recurrence::causal_conv as cpu;
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::ops::reduce::sum_middle_into;
use crate::ops::{cast, cuda_of, to_f32, via_f32};
use crate::tape::{Backward, Grads, record_all};
use crate::tensor::{DType, Tensor};

const OP: &str = "causal_conv";

/// What a convolution takes. x, weight and bias share a float type; the tail is f32.
#[derive(Clone, Copy)]
pub struct CausalConv<'a> {
    /// `[G, B, T, E]`.
    pub x: &'a Tensor,
    /// `[G, E, K]`, K at least 2.
    pub weight: &'a Tensor,
    /// `[G, E]`. `None`: zero.
    pub bias: Option<&'a Tensor>,
    /// The last inputs before x, `[G, B, K - 1, E]`.
    pub tail: &'a Tensor,
    /// i32 `[G, B, T]`: 0 where a token is padding. `None`: nothing is.
    pub seen: Option<&'a Tensor>,
}

/// y `[G, B, T, E]` and the new tail. Operands whose shapes, types or devices do not fit together are an error.
pub fn causal_conv(conv: CausalConv<'_>) -> Result<(Tensor, Tensor)> {
    if via_f32(conv.x) {
        let (x, weight, bias) = (to_f32(conv.x)?, to_f32(conv.weight)?, conv.bias.map(to_f32).transpose()?);
        let (y, tail) = causal_conv(CausalConv { x: &x, weight: &weight, bias: bias.as_ref(), ..conv })?;
        return Ok((cast(&y, DType::BF16)?, tail));
    }
    let (sizes, k) = checked(&conv)?;
    let y = Tensor::uninit(conv.x.shape(), conv.x.dtype(), conv.x.device())?;
    let tail = Tensor::uninit(conv.tail.shape(), DType::F32, conv.x.device())?;
    let detached = |t: Option<&Tensor>| t.map(Tensor::detach);
    let saved = Saved {
        x: conv.x.detach(),
        weight: conv.weight.detach(),
        tail: conv.tail.detach(),
        bias: detached(conv.bias),
        seen: detached(conv.seen),
        sizes,
        k,
    };
    match cuda_of(conv.x) {
        Some(cuda) => saved.forward_on(cuda, &y, &tail)?,
        None => saved.on_cpu(|conv| {
            cpu::forward(conv, &mut y.write::<f32>(OP)?, &mut tail.write::<f32>(OP)?);
            Ok(())
        })?,
    }
    let inputs: Vec<&Tensor> = [conv.x, conv.weight, conv.tail].into_iter().chain(conv.bias).collect();
    let [y, tail] = record_all(&inputs, [y, tail], || saved);
    Ok((y, tail))
}

/// Sizes of the operands, and K.
fn checked(conv: &CausalConv<'_>) -> Result<(Sizes, usize)> {
    let sizes = Sizes::of(OP, "x", conv.x)?;
    let Sizes { groups, texts, width, .. } = sizes;
    let k = conv.weight.shape().last();
    if k < 2 {
        return Err(Error::shape(OP, "the weight", format!("[{groups}, {width}, at least 2]"), conv.weight.shape()));
    }
    let expect = |what, x, shape: &[usize], dtype| sizes.expect(OP, conv.x, what, x, shape, dtype);
    expect("the weight", conv.weight, &[groups, width, k], conv.x.dtype())?;
    conv.bias.map_or(Ok(()), |bias| expect("the bias", bias, &[groups, width], conv.x.dtype()))?;
    expect("the tail", conv.tail, &[groups, texts, k - 1, width], DType::F32)?;
    sizes.expect_seen(OP, conv.x, conv.seen)?;
    Ok((sizes, k))
}

struct Saved {
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    bias: Option<Tensor>,
    seen: Option<Tensor>,
    sizes: Sizes,
    k: usize,
}

impl Saved {
    fn on_cpu<R>(&self, f: impl FnOnce(&cpu::Conv<'_>) -> Result<R>) -> Result<R> {
        let seen = self.seen.as_ref().map(|seen| seen.read::<i32>(OP)).transpose()?;
        let bias = self.bias.as_ref().map(|bias| bias.read::<f32>(OP)).transpose()?;
        f(&cpu::Conv {
            x: &self.x.read::<f32>(OP)?,
            weight: &self.weight.read::<f32>(OP)?,
            bias: bias.as_deref(),
            tail: &self.tail.read::<f32>(OP)?,
            seen: seen.as_deref(),
            sizes: self.sizes,
            k: self.k,
        })
    }
}

/// Rows whose products one block sums for the gradients of weights.
const ROWS_PER_SUM: usize = 256;

impl Saved {
    fn kernel<'a>(&self, cuda: &'a CudaDevice, name: &str) -> Result<Launch<'a>> {
        cuda.kernel_with("causal_conv", self.x.dtype(), &[("C_K", self.k)], name)
    }

    fn forward_on(&self, cuda: &CudaDevice, y: &Tensor, tail: &Tensor) -> Result<()> {
        let Sizes { texts, tokens, width, .. } = self.sizes;
        let (seen, n) = (self.seen.as_ref(), self.x.elements());
        let launch = self.kernel(cuda, "conv")?.cover(n).arg(&self.x).arg(&self.weight).arg(self.bias.as_ref());
        let launch = launch.arg(&self.tail).arg(seen).arg(y).arg(n);
        launch.arg(texts as i32).arg(tokens as i32).arg(width as i32).run()?;
        let n = self.sizes.sequences() * width;
        let launch = self.kernel(cuda, "conv_tail")?.cover(n).arg(&self.x).arg(&self.tail).arg(seen).arg(tail).arg(n);
        launch.arg(tokens as i32).arg(width as i32).run()
    }

    fn backward_on(
        &self,
        cuda: &CudaDevice,
        [dy, dtail]: [&Tensor; 2],
        [x, weight, tail]: [&Tensor; 3],
        bias: Option<&Tensor>,
    ) -> Result<()> {
        let Sizes { groups, texts, tokens, width } = self.sizes;
        let seen = self.seen.as_ref();
        for (name, out) in [("conv_back", x), ("conv_tail_back", tail)] {
            let n = out.elements();
            let launch = self.kernel(cuda, name)?.cover(n).arg(&self.weight).arg(dy).arg(dtail).arg(seen).arg(out).arg(n);
            launch.arg(texts as i32).arg(tokens as i32).arg(width as i32).run()?;
        }
        let pieces = (texts * tokens).div_ceil(ROWS_PER_SUM).min(65_535);
        let partial = Tensor::uninit([groups, pieces, self.k + 1, width], DType::F32, dy.device())?;
        let launch = self.kernel(cuda, "conv_weight_sums")?.grid(width.div_ceil(256), pieces, groups);
        let launch = launch.arg(&self.x).arg(&self.tail).arg(seen).arg(dy).arg(&partial);
        launch.arg(texts as i32).arg(tokens as i32).arg(width as i32).run()?;
        let sums = Tensor::uninit([groups, self.k + 1, width], DType::F32, dy.device())?;
        sum_middle_into(&partial, [groups, pieces, (self.k + 1) * width], &sums, false)?;
        let n = sums.elements();
        self.kernel(cuda, "conv_weight_give")?.cover(n).arg(&sums).arg(weight).arg(bias).arg(n).arg(width as i32).run()
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (dy, dtail) = (grads.output(0)?, grads.output(1)?);
        let like = |x: &Tensor| Tensor::uninit(x.shape(), x.dtype(), x.device());
        let (x, weight, tail) = (like(&self.x)?, like(&self.weight)?, like(&self.tail)?);
        let bias = self.bias.as_ref().map(like).transpose()?;
        if let Some(cuda) = cuda_of(&self.x) {
            self.backward_on(cuda, [&dy, &dtail], [&x, &weight, &tail], bias.as_ref())?;
        } else {
            self.on_cpu(|conv| {
                let mut dbias = bias.as_ref().map(|bias| bias.write::<f32>(OP)).transpose()?;
                let out = cpu::Gradients {
                    x: &mut x.write::<f32>(OP)?,
                    weight: &mut weight.write::<f32>(OP)?,
                    bias: dbias.as_deref_mut(),
                    tail: &mut tail.write::<f32>(OP)?,
                };
                cpu::backward(conv, &dy.read::<f32>(OP)?, &dtail.read::<f32>(OP)?, out);
                Ok(())
            })?;
        }
        for (i, gradient) in [Some(x), Some(weight), Some(tail), bias].into_iter().flatten().enumerate() {
            grads.give(i, gradient)?;
        }
        Ok(())
    }
}
