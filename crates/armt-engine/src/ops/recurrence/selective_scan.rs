//! The selective scan of Mamba (Gu and Dao 2023), for E channels with N numbers of state each:
//!
//! Delta_t = softplus(delta_t + bias), A = -exp(a_log), S_t = exp(Delta_t A) o S_(t-1) + Delta_t u_t B_t, y_t = S_t C_t + D u_t.
//!
//! B and C are shared by all channels, Delta is each channel's own. Backward, with g_t = dy_t and G the gradient of S_t, from the last token
//! to the first: G += g_t C_t; dC_t = sum_e g_t S_t; dDelta_t = sum_n G (S_(t-1) A a_t + B_t u_t) with a_t = exp(Delta_t A);
//! dA += G S_(t-1) Delta_t a_t; dB_t = sum_e G Delta_t u_t; du_t = g_t D + Delta_t sum_n G B_t; G <- a_t G. What is left is the gradient of
//! the state before the first token.
//!
//! Nothing of size T E N is kept: the backward pass computes the states again, from some that it notes on the way.

use super::{Chunks, Sizes};
use crate::cpu::recurrence::selective_scan as cpu;
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::ops::reduce::sum_middle_into;
use crate::ops::{cast, cast_into, cuda_of, to_f32, via_f32};
use crate::tape::{Backward, Grads, record_all};
use crate::tensor::{DType, Tensor};

const OP: &str = "selective_scan";

/// What a selective scan takes. u, delta, B and C share a float type; the rest is f32.
#[derive(Clone, Copy)]
pub struct SelectiveScan<'a> {
    /// u, `[G, B, T, E]`.
    pub u: &'a Tensor,
    /// Step sizes before their bias and softplus, `[G, B, T, E]`.
    pub delta: &'a Tensor,
    /// The bias of the step sizes, `[G, E]`.
    pub bias: &'a Tensor,
    /// A = -exp(a_log), `[G, E, N]`.
    pub a_log: &'a Tensor,
    /// B, `[G, B, T, N]`.
    pub b: &'a Tensor,
    /// C, `[G, B, T, N]`.
    pub c: &'a Tensor,
    /// D, `[G, E]`.
    pub d: &'a Tensor,
    /// S before the first token, `[G, B, E, N]`.
    pub state: &'a Tensor,
    /// i32 `[G, B, T]`: 0 where a token is padding. `None`: nothing is.
    pub seen: Option<&'a Tensor>,
}

/// y `[G, B, T, E]` and S after the last token. Operands whose shapes, types or devices do not fit together are an error.
pub fn selective_scan(s: SelectiveScan<'_>) -> Result<(Tensor, Tensor)> {
    if via_f32(s.u) {
        let [u, delta, b, c] = [to_f32(s.u)?, to_f32(s.delta)?, to_f32(s.b)?, to_f32(s.c)?];
        let (y, state) = selective_scan(SelectiveScan { u: &u, delta: &delta, b: &b, c: &c, ..s })?;
        return Ok((cast(&y, DType::BF16)?, state));
    }
    let (sizes, n) = checked(&s)?;
    let y = Tensor::uninit(s.u.shape(), s.u.dtype(), s.u.device())?;
    let state = Tensor::uninit(s.state.shape(), DType::F32, s.u.device())?;
    let inputs = [s.u, s.delta, s.bias, s.a_log, s.b, s.c, s.d, s.state];
    let saved = Saved { inputs: inputs.map(Tensor::detach), seen: s.seen.map(Tensor::detach), sizes, n };
    match cuda_of(s.u) {
        Some(cuda) => saved.forward_on(cuda, &y, &state)?,
        None => saved.on_cpu(|scan| {
            cpu::forward(scan, &mut y.write::<f32>(OP)?, &mut state.write::<f32>(OP)?);
            Ok(())
        })?,
    }
    let [y, state] = record_all(&inputs, [y, state], || saved);
    Ok((y, state))
}

/// Sizes of the operands, and N.
fn checked(s: &SelectiveScan<'_>) -> Result<(Sizes, usize)> {
    let sizes = Sizes::of(OP, "u", s.u)?;
    let Sizes { groups, texts, tokens, width } = sizes;
    let n = s.a_log.shape().last();
    if n == 0 {
        return Err(Error::shape(OP, "a_log", format!("[{groups}, {width}, at least 1]"), s.a_log.shape()));
    }
    let expect = |what, x, shape: &[usize], dtype| sizes.expect(OP, s.u, what, x, shape, dtype);
    expect("the step sizes", s.delta, s.u.dims(), s.u.dtype())?;
    expect("the bias of the step sizes", s.bias, &[groups, width], DType::F32)?;
    expect("a_log", s.a_log, &[groups, width, n], DType::F32)?;
    expect("B", s.b, &[groups, texts, tokens, n], s.u.dtype())?;
    expect("C", s.c, &[groups, texts, tokens, n], s.u.dtype())?;
    expect("D", s.d, &[groups, width], DType::F32)?;
    expect("the state", s.state, &[groups, texts, width, n], DType::F32)?;
    sizes.expect_seen(OP, s.u, s.seen)?;
    Ok((sizes, n))
}

struct Saved {
    /// u, delta, bias, a_log, B, C, D, S.
    inputs: [Tensor; 8],
    seen: Option<Tensor>,
    sizes: Sizes,
    n: usize,
}

impl Saved {
    fn on_cpu<R>(&self, f: impl FnOnce(&cpu::Scan<'_>) -> Result<R>) -> Result<R> {
        let [u, delta, bias, a_log, b, c, d, state] = &self.inputs;
        let seen = self.seen.as_ref().map(|seen| seen.read::<i32>(OP)).transpose()?;
        f(&cpu::Scan {
            u: &u.read::<f32>(OP)?,
            delta: &delta.read::<f32>(OP)?,
            bias: &bias.read::<f32>(OP)?,
            a_log: &a_log.read::<f32>(OP)?,
            b: &b.read::<f32>(OP)?,
            c: &c.read::<f32>(OP)?,
            d: &d.read::<f32>(OP)?,
            state: &state.read::<f32>(OP)?,
            seen: seen.as_deref(),
            sizes: self.sizes,
            n: self.n,
        })
    }
}

/// Numbers of a channel's state that a thread has, at most, and that a channel can have: sums of a block's channels fill its shared memory.
const PART: usize = 8;
const MOST: usize = 128;
/// Threads of a block, and tokens whose states the backward pass has in registers: as in `selective_scan.cu`.
const BLOCK: usize = 128;
const SUB: usize = 8;

/// How the state of a channel is spread over neighbouring threads.
#[derive(Clone, Copy)]
struct Spread {
    lanes: usize,
    part: usize,
}

impl Spread {
    fn of(n: usize) -> Result<Self> {
        if n > MOST {
            return Err(Error::unsupported(OP, format!("states of {n} numbers a channel on CUDA; at most {MOST}")));
        }
        let lanes = n.div_ceil(PART).next_power_of_two();
        Ok(Spread { lanes, part: n.div_ceil(lanes) })
    }
}

/// The gradients of all operands.
struct Given<'a> {
    u: &'a Tensor,
    delta: &'a Tensor,
    bias: &'a Tensor,
    a_log: &'a Tensor,
    b: &'a Tensor,
    c: &'a Tensor,
    d: &'a Tensor,
    state: &'a Tensor,
}

impl Saved {
    fn kernel<'a>(&self, cuda: &'a CudaDevice, name: &str) -> Result<Launch<'a>> {
        let Spread { lanes, part } = Spread::of(self.n)?;
        cuda.kernel_with("selective_scan", self.inputs[0].dtype(), &[("C_LANES", lanes), ("C_PART", part)], name)
    }

    /// Blocks of channels.
    fn blocks(&self) -> Result<usize> {
        Ok(self.sizes.width.div_ceil(BLOCK / Spread::of(self.n)?.lanes))
    }

    fn chunks(&self, cuda: &CudaDevice) -> Result<Chunks> {
        Ok(Chunks::new(cuda, self.sizes, self.sizes.width * Spread::of(self.n)?.lanes))
    }

    /// A launch over blocks of channels, chunks and sequences; its last arguments are the sizes.
    fn walk<'a>(&self, cuda: &'a CudaDevice, name: &str, chunks: Chunks) -> Result<Launch<'a>> {
        Ok(self.kernel(cuda, name)?.block(BLOCK).grid(self.blocks()?, chunks.count, self.sizes.sequences()))
    }

    fn run(&self, launch: Launch<'_>, chunks: Chunks) -> Result<()> {
        let Sizes { texts, tokens, width, .. } = self.sizes;
        let launch = launch.arg(texts as i32).arg(tokens as i32).arg(width as i32).arg(self.n as i32);
        launch.arg(chunks.length as i32).run()
    }

    fn f32(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::uninit(shape, DType::F32, self.inputs[0].device())
    }

    /// Where chunks begin, and the sums of their step sizes. One chunk begins with the state, and its sum is not needed.
    fn starts(&self, cuda: &CudaDevice, chunks: Chunks) -> Result<(Tensor, Option<Tensor>)> {
        let [u, delta, bias, a_log, b, _, _, state] = &self.inputs;
        if chunks.count == 1 {
            return Ok((state.clone(), None));
        }
        let (all, width) = (self.sizes.sequences() * chunks.count, self.sizes.width);
        let (ends, sums) = (self.f32(&[all, width, self.n])?, self.f32(&[all, width])?);
        let launch = self.walk(cuda, "scan_local", chunks)?.arg(u).arg(delta).arg(bias).arg(a_log).arg(b);
        self.run(launch.arg(self.seen.as_ref()).arg(&ends).arg(&sums), chunks)?;
        self.join(cuda, chunks, &sums, state, &ends, false)?;
        Ok((ends, Some(sums)))
    }

    fn join(&self, cuda: &CudaDevice, chunks: Chunks, sums: &Tensor, state: &Tensor, ends: &Tensor, reverse: bool) -> Result<()> {
        let (n, Sizes { texts, width, .. }) = (state.elements(), self.sizes);
        let launch = self.kernel(cuda, "scan_join")?.cover(n).arg(&self.inputs[3]).arg(sums).arg(state).arg(ends).arg(n);
        launch.arg(texts as i32).arg(width as i32).arg(self.n as i32).arg(chunks.count as i32).arg(reverse).run()
    }

    fn forward_on(&self, cuda: &CudaDevice, y: &Tensor, last: &Tensor) -> Result<()> {
        let [u, delta, bias, a_log, b, c, d, _] = &self.inputs;
        let chunks = self.chunks(cuda)?;
        let (starts, _) = self.starts(cuda, chunks)?;
        let launch = self.walk(cuda, "scan", chunks)?.arg(u).arg(delta).arg(bias).arg(a_log).arg(b).arg(c).arg(d);
        self.run(launch.arg(self.seen.as_ref()).arg(&starts).arg(y).arg(last), chunks)
    }

    fn backward_on(&self, cuda: &CudaDevice, [dy, dstate]: [&Tensor; 2], to: Given<'_>) -> Result<()> {
        let [u, delta, bias, a_log, b, c, d, _] = &self.inputs;
        let (Sizes { groups, texts, tokens, width }, n, seen) = (self.sizes, self.n, self.seen.as_ref());
        let (chunks, blocks) = (self.chunks(cuda)?, self.blocks()?);
        let (starts, sums) = self.starts(cuda, chunks)?;
        let (sequences, all) = (self.sizes.sequences(), self.sizes.sequences() * chunks.count);
        let grads = match &sums {
            None => dstate.clone(),
            Some(sums) => {
                let ends = self.f32(&[all, width, n])?;
                let launch = self.walk(cuda, "scan_back_local", chunks)?.arg(delta).arg(bias).arg(a_log).arg(c).arg(seen);
                self.run(launch.arg(dy).arg(&ends), chunks)?;
                self.join(cuda, chunks, sums, dstate, &ends, true)?;
                ends
            }
        };
        let marks = self.f32(&[sequences, tokens.div_ceil(SUB), width, n])?;
        let (dbias, dd, da) = (self.f32(&[all, width])?, self.f32(&[all, width])?, self.f32(&[all, width, n])?);
        let (db, dc) = (self.f32(&[sequences * tokens, blocks, n])?, self.f32(&[sequences * tokens, blocks, n])?);
        let launch = self.walk(cuda, "scan_back", chunks)?.arg(u).arg(delta).arg(bias).arg(a_log).arg(b).arg(c).arg(d).arg(seen);
        let launch = launch.arg(&starts).arg(&grads).arg(dy).arg(&marks).arg(to.u).arg(to.delta);
        self.run(launch.arg(&dbias).arg(&da).arg(&db).arg(&dc).arg(&dd).arg(to.state), chunks)?;
        let parts = texts * chunks.count;
        sum_middle_into(&dbias, [groups, parts, width], to.bias, false)?;
        sum_middle_into(&dd, [groups, parts, width], to.d, false)?;
        sum_middle_into(&da, [groups, parts, width * n], to.a_log, false)?;
        for (partial, to) in [(&db, to.b), (&dc, to.c)] {
            let whole = Tensor::uninit(to.shape(), DType::F32, to.device())?;
            sum_middle_into(partial, [sequences * tokens, blocks, n], &whole, false)?;
            cast_into(&whole, to)?;
        }
        Ok(())
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (dy, dstate) = (grads.output(0)?, grads.output(1)?);
        let gradients = self.inputs.each_ref().map(|x| Tensor::uninit(x.shape(), x.dtype(), x.device()));
        let [u, delta, bias, a_log, b, c, d, state] = gradients;
        let (u, delta, bias, a_log, b, c, d, state) = (u?, delta?, bias?, a_log?, b?, c?, d?, state?);
        if let Some(cuda) = cuda_of(&dy) {
            let to = Given { u: &u, delta: &delta, bias: &bias, a_log: &a_log, b: &b, c: &c, d: &d, state: &state };
            self.backward_on(cuda, [&dy, &dstate], to)?;
        } else {
            self.on_cpu(|scan| {
                let out = cpu::Gradients {
                    u: &mut u.write::<f32>(OP)?,
                    delta: &mut delta.write::<f32>(OP)?,
                    bias: &mut bias.write::<f32>(OP)?,
                    a_log: &mut a_log.write::<f32>(OP)?,
                    b: &mut b.write::<f32>(OP)?,
                    c: &mut c.write::<f32>(OP)?,
                    d: &mut d.write::<f32>(OP)?,
                    state: &mut state.write::<f32>(OP)?,
                };
                cpu::backward(scan, &dy.read::<f32>(OP)?, &dstate.read::<f32>(OP)?, out);
                Ok(())
            })?;
        }
        for (i, gradient) in [u, delta, bias, a_log, b, c, d, state].into_iter().enumerate() {
            grads.give(i, gradient)?;
        }
        Ok(())
    }
}
