//! RWKV's token shift with what is mixed from it: with p the token before, y_m = p + (x - p) o mu_m for each of some shares mu.
//!
//! [`plain`] says it in other operations, and its way back is theirs. The fused one goes back so: dx_t = sum_m dy_m,t o mu_m + dy_m,(t+1) o (1 - mu_m),
//! and dmu_m is the sum over tokens of dy_m o (x - p).

use super::gated_scan::in_fours;
use super::{CausalConv, Sizes, causal_conv};
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::ops::reduce::sum_middle_into;
use crate::ops::{add, cast, cuda_of, mul, narrow, reshape, sub};
use crate::paths;
use crate::tape::{Backward, Grads, record_each};
use crate::tensor::{DType, Tensor};

const OP: &str = "token_mix";

/// What tokens are mixed of. x, the shares and the shift have a float type in common; the last input is f32.
#[derive(Clone, Copy)]
pub struct TokenMix<'a> {
    /// `[G, B, T, E]`.
    pub x: &'a Tensor,
    /// The token before the first, `[G, B, 1, E]`.
    pub last: &'a Tensor,
    /// mu of each mix, `[G, E]`.
    pub shares: &'a [&'a Tensor],
    /// The weights of a convolution that is the shift, (1, 0) for every channel, `[G, E, 2]`.
    pub shift: &'a Tensor,
    /// i32 `[G, B, T]`: 0 where a token is padding. `None`: nothing is.
    pub seen: Option<&'a Tensor>,
}

/// y of each share, `[G, B, T, E]`, and the last input. Operands whose shapes, types or devices do not fit together are an error.
pub fn token_mix(mix: TokenMix<'_>) -> Result<(Vec<Tensor>, Tensor)> {
    let sizes = checked(&mix)?;
    let aligned = in_fours(&[mix.x, mix.last])
        && mix.shares.iter().all(|share| share.ptr().is_multiple_of(16))
        && mix.x.ptr().is_multiple_of(16);
    let Some(cuda) = cuda_of(mix.x).filter(|_| paths::token_mix(sizes.width, mix.shares.len(), mix.seen.is_some(), aligned)) else {
        return plain(mix);
    };
    let like = || Tensor::uninit(mix.x.shape(), mix.x.dtype(), mix.x.device());
    let mut outputs = mix.shares.iter().map(|_| like()).collect::<Result<Vec<_>>>()?;
    outputs.push(Tensor::uninit(mix.last.shape(), DType::F32, mix.x.device())?);
    let detached = |share: &&Tensor| share.detach();
    let saved = Saved { x: mix.x.detach(), last: mix.last.detach(), shares: mix.shares.iter().map(detached).collect(), sizes };
    saved.forward_on(cuda, &outputs)?;
    let inputs: Vec<&Tensor> = [mix.x, mix.last].into_iter().chain(mix.shares.iter().copied()).collect();
    record_each(&inputs, &mut outputs, || saved);
    let last = outputs.pop().ok_or_else(|| Error::Bug(format!("{OP}: no output")))?;
    Ok((outputs, last))
}

/// The shift and the mixes in operations of their own: the plain twin.
pub fn plain(mix: TokenMix<'_>) -> Result<(Vec<Tensor>, Tensor)> {
    let Sizes { groups, width, .. } = checked(&mix)?;
    let TokenMix { x, last, shares, shift, seen } = mix;
    let (before, last) = causal_conv(CausalConv { x, weight: shift, bias: None, tail: last, seen })?;
    let change = sub(x, &before)?;
    let mixed = |share: &&Tensor| add(&before, &mul(&change, &reshape(share, [groups, 1, 1, width])?)?);
    Ok((shares.iter().map(mixed).collect::<Result<_>>()?, last))
}

fn checked(mix: &TokenMix<'_>) -> Result<Sizes> {
    let sizes = Sizes::of(OP, "x", mix.x)?;
    let Sizes { groups, texts, width, .. } = sizes;
    let expect = |what, x, shape: &[usize], dtype| sizes.expect(OP, mix.x, what, x, shape, dtype);
    expect("the last input", mix.last, &[groups, texts, 1, width], DType::F32)?;
    expect("the shift", mix.shift, &[groups, width, 2], mix.x.dtype())?;
    mix.shares.iter().try_for_each(|share| expect("a share", share, &[groups, width], mix.x.dtype()))?;
    sizes.expect_seen(OP, mix.x, mix.seen)?;
    Ok(sizes)
}

struct Saved {
    x: Tensor,
    last: Tensor,
    shares: Vec<Tensor>,
    sizes: Sizes,
}

/// Tokens that a thread has on the way back: `RUN` of the kernel.
const RUN: usize = 32;
/// Mixes that the kernels have arguments for.
const ARGUMENTS: usize = 4;

/// The next arguments: so many tensors, and nothing for the other mixes.
fn padded<'a>(launch: Launch<'a>, tensors: &[Tensor]) -> Launch<'a> {
    (0..ARGUMENTS).fold(launch, |launch, i| launch.arg(tensors.get(i)))
}

impl Saved {
    fn launch<'a>(&self, cuda: &'a CudaDevice, name: &str, n: usize) -> Result<Launch<'a>> {
        let launch = cuda.kernel_with("token_mix", self.x.dtype(), &[("C_M", self.shares.len())], name)?.cover(n);
        Ok(padded(launch.arg(&self.x).arg(&self.last), &self.shares))
    }

    fn run(&self, launch: Launch<'_>, n: usize) -> Result<()> {
        let Sizes { texts, tokens, width, .. } = self.sizes;
        launch.arg(n).arg(texts as i32).arg(tokens as i32).arg(width as i32).run()
    }

    /// Into the outputs in their order, the last input behind them.
    fn forward_on(&self, cuda: &CudaDevice, outputs: &[Tensor]) -> Result<()> {
        let (mixes, n) = (self.shares.len(), self.x.bytes() / 16);
        self.run(padded(self.launch(cuda, "token_mix", n)?, &outputs[..mixes]).arg(&outputs[mixes]), n)
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let mixes = self.shares.len();
        let dy = (0..mixes).map(|i| grads.output(i)).collect::<Result<Vec<_>>>()?;
        let dout = grads.output(mixes)?;
        let cuda = cuda_of(&dout).ok_or_else(|| Error::Bug(format!("{OP}: a fused shift that is not on CUDA")))?;
        let (Sizes { groups, texts, tokens, width }, device) = (self.sizes, dout.device());
        let dx = Tensor::uninit(self.x.shape(), self.x.dtype(), device)?;
        let dlast = Tensor::uninit(self.last.shape(), DType::F32, device)?;
        let parts = texts * tokens.div_ceil(RUN);
        let partial = Tensor::uninit([groups, parts, mixes, width], DType::F32, device)?;
        let n = groups * parts * (width / 4);
        let launch = padded(self.launch(cuda, "token_mix_back", n)?, &dy).arg(&dout);
        self.run(launch.arg(&dx).arg(&dlast).arg(&partial), n)?;
        let sums = Tensor::uninit([groups, mixes, width], DType::F32, device)?;
        sum_middle_into(&partial, [groups, parts, mixes * width], &sums, false)?;
        grads.give(0, dx)?;
        grads.give(1, dlast)?;
        for (i, share) in self.shares.iter().enumerate() {
            let own = narrow(&sums, 1, i, 1)?;
            grads.give(2 + i, cast(&own.view(share.shape()), share.dtype())?)?;
        }
        Ok(())
    }
}
