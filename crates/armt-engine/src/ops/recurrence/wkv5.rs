//! The recurrence of RWKV-5 (Peng et al. 2024, "Eagle"), for H heads with a state S `[N, N]` of key channels i by value channels j:
//!
//! w = exp(-exp(decay)); y_t[j] = sum_i r_t[i] (S_(t-1)[i, j] + u[i] k_t[i] v_t[j]); S_t[i, j] = w[i] S_(t-1)[i, j] + k_t[i] v_t[j].
//!
//! Backward, with G the gradient of S_t, from the last token to the first, and p = v_t . dy_t: dr = S_(t-1) dy_t + u k_t p;
//! du += r_t k_t p; dk = u r_t p + G v_t; dv = (u r_t . k_t) dy_t + G^T k_t; dw += rowsum(G o S_(t-1)); G <- diag(w) G + r_t dy_t^T. What
//! is left is the gradient of the state before the first token, and that of the decay is -exp(decay) w dw.
//!
//! No state is kept but the first: the backward pass computes the others again, from some that it notes on the way.

use super::{Chunks, Sizes};
use crate::cpu::recurrence::wkv5 as cpu;
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::ops::reduce::sum_middle_into;
use crate::ops::{cast, cuda_of, to_f32, via_f32};
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
    let y = Tensor::uninit(w.r.shape(), w.r.dtype(), w.r.device())?;
    let state = Tensor::uninit(w.state.shape(), DType::F32, w.r.device())?;
    let inputs = [w.r, w.k, w.v, w.decay, w.bonus, w.state];
    let saved = Saved { inputs: inputs.map(Tensor::detach), seen: w.seen.map(Tensor::detach), last: state.clone(), sizes, n };
    match cuda_of(w.r) {
        Some(cuda) => saved.forward_on(cuda, &y)?,
        None => saved.on_cpu(|wkv| {
            cpu::forward(wkv, &mut y.write::<f32>(OP)?, &mut state.write::<f32>(OP)?);
            Ok(())
        })?,
    }
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
    /// S after the last token.
    last: Tensor,
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

/// Channels of a head, at most, on CUDA: a thread has a row or a column of the state in registers.
const MOST: usize = 128;

/// The way that a state, or its gradient, walks over the tokens: M <- diag(w) M + c d^T.
#[derive(Clone, Copy)]
struct Walk<'a> {
    c: &'a Tensor,
    d: &'a Tensor,
    reverse: bool,
}

impl Saved {
    fn kernel<'a>(&self, cuda: &'a CudaDevice, name: &str) -> Result<Launch<'a>> {
        if self.n > MOST {
            return Err(Error::unsupported(OP, format!("heads of {} channels on CUDA; at most {MOST}", self.n)));
        }
        cuda.kernel_with("wkv5", self.inputs[0].dtype(), &[("C_N", self.n)], name)
    }

    /// A launch over heads, chunks and sequences.
    fn launch<'a>(&self, cuda: &'a CudaDevice, name: &str, chunks: Chunks) -> Result<Launch<'a>> {
        let (heads, sequences) = (self.sizes.width / self.n, self.sizes.sequences());
        Ok(self.kernel(cuda, name)?.block(self.n).grid(heads, chunks.count, sequences))
    }

    /// Runs a launch whose last arguments are the sizes.
    fn run(&self, launch: Launch<'_>, chunks: Chunks, reverse: bool) -> Result<()> {
        let Sizes { texts, tokens, width, .. } = self.sizes;
        let launch = launch.arg(texts as i32).arg(tokens as i32).arg(width as i32);
        launch.arg(chunks.length as i32).arg(reverse).run()
    }

    fn f32(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::uninit(shape, DType::F32, self.inputs[0].device())
    }

    /// Where chunks begin on a walk that begins with `state`.
    fn starts(&self, cuda: &CudaDevice, chunks: Chunks, walk: Walk<'_>, state: &Tensor) -> Result<Tensor> {
        if chunks.count == 1 {
            return Ok(state.clone());
        }
        let (Sizes { texts, width, .. }, all) = (self.sizes, self.sizes.sequences() * chunks.count);
        let (ends, counts) = (self.f32(&[all, width, self.n])?, self.f32(&[all])?);
        let decay = &self.inputs[3];
        let launch = self.launch(cuda, "wkv_local", chunks)?.arg(walk.c).arg(walk.d).arg(decay).arg(self.seen.as_ref());
        self.run(launch.arg(&ends).arg(&counts), chunks, walk.reverse)?;
        let n = state.elements();
        let launch = self.kernel(cuda, "wkv_join")?.cover(n).arg(decay).arg(&counts).arg(state).arg(&ends);
        let launch = launch.arg(None::<&Tensor>).arg(n).arg(texts as i32).arg(width as i32);
        launch.arg(chunks.count as i32).arg(walk.reverse).run()?;
        Ok(ends)
    }

    /// Of every token, M^T q and what the token itself adds; `last` is M at the end of the walk.
    fn columns(&self, cuda: &CudaDevice, chunks: Chunks, walk: Walk<'_>, [q, starts, out, last]: [&Tensor; 4]) -> Result<()> {
        let launch = self.launch(cuda, "wkv_columns", chunks)?.arg(walk.c).arg(walk.d).arg(q).arg(&self.inputs[3]);
        let launch = launch.arg(&self.inputs[4]).arg(self.seen.as_ref()).arg(starts).arg(out).arg(last);
        self.run(launch, chunks, walk.reverse)
    }

    /// Of every token, M q and what the token itself adds; `inner` is M q alone.
    fn rows(
        &self,
        cuda: &CudaDevice,
        chunks: Chunks,
        walk: Walk<'_>,
        [q, starts, out, inner]: [&Tensor; 4],
        dots: Option<&Tensor>,
    ) -> Result<()> {
        let launch = self.launch(cuda, "wkv_rows", chunks)?.arg(walk.c).arg(walk.d).arg(q).arg(&self.inputs[3]);
        let launch = launch.arg(&self.inputs[4]).arg(self.seen.as_ref()).arg(starts).arg(out).arg(inner).arg(dots);
        self.run(launch, chunks, walk.reverse)
    }

    fn forward_on(&self, cuda: &CudaDevice, y: &Tensor) -> Result<()> {
        let [r, k, v, _, _, state] = &self.inputs;
        let (chunks, walk) = (Chunks::new(cuda, self.sizes, self.sizes.width), Walk { c: k, d: v, reverse: false });
        let starts = self.starts(cuda, chunks, walk, state)?;
        self.columns(cuda, chunks, walk, [r, &starts, y, &self.last])
    }

    fn backward_on(
        &self,
        cuda: &CudaDevice,
        [dy, dstate]: [&Tensor; 2],
        [dr, dk, dv, ddecay, dbonus, dbefore]: [&Tensor; 6],
    ) -> Result<()> {
        let [r, k, v, decay, _, state] = &self.inputs;
        let Sizes { groups, texts, tokens, width } = self.sizes;
        let chunks = Chunks::new(cuda, self.sizes, width);
        let (states, gradients) = (Walk { c: k, d: v, reverse: false }, Walk { c: r, d: dy, reverse: true });
        let (starts, ends) = (self.starts(cuda, chunks, states, state)?, self.starts(cuda, chunks, gradients, dstate)?);
        let (forward, backward) = (self.f32(r.dims())?, self.f32(r.dims())?);
        let dots = self.f32(&[self.sizes.sequences(), tokens, width / self.n])?;
        self.rows(cuda, chunks, states, [dy, &starts, dr, &forward], Some(&dots))?;
        self.rows(cuda, chunks, gradients, [v, &ends, dk, &backward], None)?;
        self.columns(cuda, chunks, gradients, [k, &ends, dv, dbefore])?;
        let n = self.sizes.sequences() * chunks.count * width;
        let (of_decay, of_bonus) = (self.f32(&[n])?, self.f32(&[n])?);
        let launch = self.kernel(cuda, "wkv_params")?.cover(n).arg(r).arg(k).arg(decay).arg(self.seen.as_ref());
        let launch = launch.arg(&forward).arg(&backward).arg(&dots).arg(&starts).arg(&ends).arg(&self.last);
        let launch = launch.arg(&of_decay).arg(&of_bonus).arg(n).arg(texts as i32).arg(tokens as i32).arg(width as i32);
        launch.arg(chunks.length as i32).arg(chunks.count as i32).run()?;
        let sizes = [groups, texts * chunks.count, width];
        sum_middle_into(&of_decay, sizes, ddecay, false)?;
        sum_middle_into(&of_bonus, sizes, dbonus, false)
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (dy, dstate) = (grads.output(0)?, grads.output(1)?);
        let [r, k, v, decay, bonus, state] = self.inputs.each_ref().map(|x| Tensor::uninit(x.shape(), x.dtype(), x.device()));
        let (r, k, v, decay, bonus, state) = (r?, k?, v?, decay?, bonus?, state?);
        if let Some(cuda) = cuda_of(&dy) {
            self.backward_on(cuda, [&dy, &dstate], [&r, &k, &v, &decay, &bonus, &state])?;
        } else {
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
        }
        for (i, gradient) in [r, k, v, decay, bonus, state].into_iter().enumerate() {
            grads.give(i, gradient)?;
        }
        Ok(())
    }
}
