//! The recurrence of RWKV-5 (Peng et al. 2024, "Eagle"), for H heads with a state S `[N, N]` of key channels i by value channels j:
//!
//! w = exp(-exp(decay)); y_t[j] = sum_i r_t[i] (S_(t-1)[i, j] + u[i] k_t[i] v_t[j]); S_t[i, j] = w[i] S_(t-1)[i, j] + k_t[i] v_t[j].
//!
//! Backward, with G the gradient of S_t, from the last token to the first, and p = v_t . dy_t: dr = S_(t-1) dy_t + u k_t p;
//! du += r_t k_t p; dk = u r_t p + G v_t; dv = (u r_t . k_t) dy_t + G^T k_t; dw += rowsum(G o S_(t-1)); G <- diag(w) G + r_t dy_t^T. What
//! is left is the gradient of the state before the first token, and that of the decay is -exp(decay) w dw.
//!
//! No state is kept but the first: the backward pass computes the others again, from some that it notes on the way.

use super::{Sizes, expect_cpu};
use crate::cpu::recurrence::wkv5 as cpu;
use crate::error::{Error, Result};
use crate::ops::{cast, to_f32, via_f32};
use crate::tape::{Backward, Grads, record_all};
use crate::tensor::{DType, Tensor};

const OP: &str = "wkv5";

/// What the recurrence takes. r, k and v share a float type; the rest is f32.
#[derive(Clone, Copy)]
pub struct Wkv5<'a> {
    /// Receptance, `[G, B, T, H N]`.
    pub r: &'a Tensor,
    /// Keys, `[G, B, T, H N]`.
    pub k: &'a Tensor,
    /// Values, `[G, B, T, H N]`.
    pub v: &'a Tensor,
    /// w = exp(-exp(decay)), `[G, H N]`.
    pub decay: &'a Tensor,
    /// u, the weight of the token itself, `[G, H N]`.
    pub bonus: &'a Tensor,
    /// S before the first token, `[G, B, H, N, N]`.
    pub state: &'a Tensor,
    /// i32 `[G, B, T]`: 0 where a token is padding. `None`: nothing is.
    pub seen: Option<&'a Tensor>,
}

/// y `[G, B, T, H N]` and S after the last token. Operands whose shapes, types or devices do not fit together are an error.
pub fn wkv5(w: Wkv5<'_>) -> Result<(Tensor, Tensor)> {
    if via_f32(w.r) {
        let [r, k, v] = [to_f32(w.r)?, to_f32(w.k)?, to_f32(w.v)?];
        let (y, state) = wkv5(Wkv5 { r: &r, k: &k, v: &v, ..w })?;
        return Ok((cast(&y, DType::BF16)?, state));
    }
    let (sizes, n) = checked(&w)?;
    expect_cpu(OP, w.r)?;
    let y = Tensor::uninit(w.r.shape(), w.r.dtype(), w.r.device())?;
    let state = Tensor::uninit(w.state.shape(), DType::F32, w.r.device())?;
    let inputs = [w.r, w.k, w.v, w.decay, w.bonus, w.state];
    let saved = Saved { inputs: inputs.map(Tensor::detach), seen: w.seen.map(Tensor::detach), sizes, n };
    saved.on_cpu(|wkv| {
        cpu::forward(wkv, &mut y.write::<f32>(OP)?, &mut state.write::<f32>(OP)?);
        Ok(())
    })?;
    let [y, state] = record_all(&inputs, [y, state], || saved);
    Ok((y, state))
}

/// Sizes of the operands, and N.
fn checked(w: &Wkv5<'_>) -> Result<(Sizes, usize)> {
    let sizes = Sizes::of(OP, "r", w.r)?;
    let Sizes { groups, texts, width, .. } = sizes;
    let n = w.state.shape().last();
    if n == 0 || !width.is_multiple_of(n) {
        let expected = format!("[{groups}, {texts}, H, N, N] with H N = {width}");
        return Err(Error::shape(OP, "the state", expected, w.state.shape()));
    }
    let expect = |what, x, shape: &[usize], dtype| sizes.expect(OP, w.r, what, x, shape, dtype);
    expect("the keys", w.k, w.r.dims(), w.r.dtype())?;
    expect("the values", w.v, w.r.dims(), w.r.dtype())?;
    expect("the decay", w.decay, &[groups, width], DType::F32)?;
    expect("the bonus", w.bonus, &[groups, width], DType::F32)?;
    expect("the state", w.state, &[groups, texts, width / n, n, n], DType::F32)?;
    sizes.expect_seen(OP, w.r, w.seen)?;
    Ok((sizes, n))
}

struct Saved {
    /// r, k, v, decay, bonus, S.
    inputs: [Tensor; 6],
    seen: Option<Tensor>,
    sizes: Sizes,
    n: usize,
}

impl Saved {
    fn on_cpu<R>(&self, f: impl FnOnce(&cpu::Wkv<'_>) -> Result<R>) -> Result<R> {
        let [r, k, v, decay, bonus, state] = &self.inputs;
        let seen = self.seen.as_ref().map(|seen| seen.read::<i32>(OP)).transpose()?;
        f(&cpu::Wkv {
            r: &r.read::<f32>(OP)?,
            k: &k.read::<f32>(OP)?,
            v: &v.read::<f32>(OP)?,
            decay: &decay.read::<f32>(OP)?,
            bonus: &bonus.read::<f32>(OP)?,
            state: &state.read::<f32>(OP)?,
            seen: seen.as_deref(),
            sizes: self.sizes,
            n: self.n,
        })
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (dy, dstate) = (grads.output(0)?, grads.output(1)?);
        let [r, k, v, decay, bonus, state] = self.inputs.each_ref().map(|x| Tensor::uninit(x.shape(), x.dtype(), x.device()));
        let (r, k, v, decay, bonus, state) = (r?, k?, v?, decay?, bonus?, state?);
        self.on_cpu(|wkv| {
            let out = cpu::Gradients {
                r: &mut r.write::<f32>(OP)?,
                k: &mut k.write::<f32>(OP)?,
                v: &mut v.write::<f32>(OP)?,
                decay: &mut decay.write::<f32>(OP)?,
                bonus: &mut bonus.write::<f32>(OP)?,
                state: &mut state.write::<f32>(OP)?,
            };
            cpu::backward(wkv, &dy.read::<f32>(OP)?, &dstate.read::<f32>(OP)?, out);
            Ok(())
        })?;
        for (i, gradient) in [r, k, v, decay, bonus, state].into_iter().enumerate() {
            grads.give(i, gradient)?;
        }
        Ok(())
    }
}
