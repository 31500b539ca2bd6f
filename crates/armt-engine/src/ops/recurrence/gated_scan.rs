//! The selective scan of Mamba with the gate that follows it, its operands where the products before it left them:
//!
//! Delta_t = softplus(delta_t + bias), A = -exp(a_log), S_t = exp(Delta_t A) o S_(t-1) + Delta_t u_t B_t, y_t = (S_t C_t + D u_t) o silu(z_t).
//!
//! [`plain`] says it in other operations, and its way back is theirs. With v = S C + D u, the fused one has dv = dy o silu(z) and
//! dz = dy o v o silu'(z), and from dv on goes back as [`selective_scan`] does; v is not kept, for the states that it is made of are made again
//! anyway, from the one before every 16 tokens.

use super::{Gate, SelectiveScan, Sizes, selective_scan};
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use crate::ops::reduce::sum_middle_into;
use crate::ops::{cuda_of, mul, narrow, silu};
use crate::paths;
use crate::tape::{Backward, Grads, is_recorded, record_all};
use crate::tensor::{DType, Tensor};

const OP: &str = "gated_scan";

/// What a gated scan takes. u, delta, B, C and z share a float type; the rest is f32.
#[derive(Clone, Copy)]
pub struct GatedScan<'a> {
    /// u, `[G, B, T, E]`.
    pub u: &'a Tensor,
    /// Step sizes before their bias and softplus, `[G, B, T, E]`.
    pub delta: &'a Tensor,
    /// The bias of the step sizes, `[G, E]`.
    pub bias: &'a Tensor,
    /// A = -exp(a_log), `[G, E, N]`.
    pub a_log: &'a Tensor,
    /// D, `[G, E]`.
    pub d: &'a Tensor,
    /// `[G, B, T, at least 2 N]`; its last columns are B and C.
    pub shared: &'a Tensor,
    /// z.
    pub gate: &'a Gate,
    /// S before the first token, `[G, B, E, N]`.
    pub state: &'a Tensor,
    /// i32 `[G, B, T]`: 0 where a token is padding. `None`: nothing is.
    pub seen: Option<&'a Tensor>,
}

/// y `[G, B, T, E]` and S after the last token. Operands whose shapes, types or devices do not fit together are an error.
pub fn gated_scan(s: GatedScan<'_>) -> Result<(Tensor, Tensor)> {
    let (sizes, n) = checked(&s)?;
    let operands = [s.u, s.delta, s.a_log, s.shared, s.gate.tensor(), s.state];
    let widths = [sizes.width, s.shared.shape().last(), s.gate.tensor().shape().last()];
    let Some(cuda) = cuda_of(s.u).filter(|_| paths::gated_scan(n, widths, sizes.sequences(), in_fours(&operands))) else {
        return plain(s);
    };
    let y = Tensor::uninit(s.u.shape(), s.u.dtype(), s.u.device())?;
    let state = Tensor::uninit(s.state.shape(), DType::F32, s.u.device())?;
    let inputs = [s.u, s.delta, s.bias, s.a_log, s.d, s.shared, s.gate.tensor(), s.state];
    let shape = [sizes.sequences(), sizes.tokens.div_ceil(TOKENS), sizes.width, n];
    let marks = is_recorded(&inputs).then(|| Tensor::uninit(shape, DType::F32, s.u.device())).transpose()?;
    let saved = Saved { inputs: inputs.map(Tensor::detach), seen: s.seen.map(Tensor::detach), marks, sizes };
    saved.forward_on(cuda, &y, &state)?;
    let [y, state] = record_all(&inputs, [y, state], || saved);
    Ok((y, state))
}

/// The gated scan in operations of their own: the plain twin.
pub fn plain(s: GatedScan<'_>) -> Result<(Tensor, Tensor)> {
    let (Sizes { width, .. }, n) = checked(&s)?;
    let columns = |x: &Tensor, from_end: usize, length: usize| narrow(x, 3, x.shape().last() - from_end, length);
    let (b, c, z) = (columns(s.shared, 2 * n, n)?, columns(s.shared, n, n)?, columns(s.gate.tensor(), width, width)?);
    let GatedScan { u, delta, bias, a_log, d, state, seen, .. } = s;
    let (y, state) = selective_scan(SelectiveScan { u, delta, bias, a_log, b: &b, c: &c, d, state, seen })?;
    Ok((mul(&y, &silu(&z)?)?, state))
}

/// Sizes of the operands, and N. What `selective_scan` checks is left to it.
fn checked(s: &GatedScan<'_>) -> Result<(Sizes, usize)> {
    let sizes = Sizes::of(OP, "u", s.u)?;
    let Sizes { groups, texts, tokens, width } = sizes;
    let n = s.a_log.shape().last();
    let expect = |what, x, shape: &[usize], dtype| sizes.expect(OP, s.u, what, x, shape, dtype);
    expect("the step sizes", s.delta, s.u.dims(), s.u.dtype())?;
    expect("the bias of the step sizes", s.bias, &[groups, width], DType::F32)?;
    expect("a_log", s.a_log, &[groups, width, n.max(1)], DType::F32)?;
    expect("D", s.d, &[groups, width], DType::F32)?;
    expect("the state", s.state, &[groups, texts, width, n], DType::F32)?;
    for (what, x, least) in [("B and C", s.shared, 2 * n), ("the gate", s.gate.tensor(), width)] {
        let columns = x.shape().last();
        if columns < least {
            return Err(Error::shape(OP, what, format!("[{groups}, {texts}, {tokens}, at least {least}]"), x.shape()));
        }
        expect(what, x, &[groups, texts, tokens, columns], s.u.dtype())?;
    }
    sizes.expect_seen(OP, s.u, s.seen)?;
    Ok((sizes, n))
}

/// Whether four elements at a time can be read of each.
pub(super) fn in_fours(operands: &[&Tensor]) -> bool {
    operands.iter().all(|x| x.ptr().is_multiple_of(4 * x.dtype().size() as u64))
}

struct Saved {
    /// u, delta, bias, a_log, D, B and C, z, S.
    inputs: [Tensor; 8],
    seen: Option<Tensor>,
    /// S before every [`TOKENS`] tokens, where a way back will want it.
    marks: Option<Tensor>,
    sizes: Sizes,
}

/// Channels of a block, its threads, and tokens of a tile: as in `gated_scan.cu`.
const CHANNELS: usize = 32;
const BLOCK: usize = 128;
const TOKENS: usize = 16;

impl Saved {
    fn on<'a>(&self, cuda: &'a CudaDevice, name: &str) -> Result<crate::cuda::Launch<'a>> {
        cuda.kernel("gated_scan", self.inputs[0].dtype(), name)
    }

    /// Blocks of channels.
    fn blocks(&self) -> usize {
        self.sizes.width.div_ceil(CHANNELS)
    }

    /// A launch over blocks of channels and sequences that begins with the operands that both ways have.
    fn walk<'a>(&self, cuda: &'a CudaDevice, name: &str) -> Result<crate::cuda::Launch<'a>> {
        let [u, delta, bias, a_log, d, shared, gate, _] = &self.inputs;
        let launch = self.on(cuda, name)?.block(BLOCK).grid(self.blocks(), self.sizes.sequences(), 1);
        Ok(launch.arg(u).arg(delta).arg(bias).arg(a_log).arg(d).arg(shared).arg(gate).arg(self.seen.as_ref()))
    }

    /// The last arguments of such a launch.
    fn run(&self, launch: crate::cuda::Launch<'_>) -> Result<()> {
        let Sizes { texts, tokens, width, .. } = self.sizes;
        let [columns, gated] = [5, 6].map(|i| self.inputs[i].shape().last() as i32);
        launch.arg(texts as i32).arg(tokens as i32).arg(width as i32).arg(columns).arg(gated).run()
    }

    fn forward_on(&self, cuda: &CudaDevice, y: &Tensor, last: &Tensor) -> Result<()> {
        self.run(self.walk(cuda, "gated_scan")?.arg(&self.inputs[7]).arg(y).arg(last).arg(self.marks.as_ref()))
    }

    /// The gradients of all inputs in their order.
    fn backward_on(&self, cuda: &CudaDevice, [dy, dlast]: [&Tensor; 2]) -> Result<[Tensor; 8]> {
        let (Sizes { groups, texts, tokens, width }, n) = (self.sizes, self.inputs[3].shape().last());
        let (sequences, blocks, device) = (self.sizes.sequences(), self.blocks(), dy.device());
        let like = self.inputs.each_ref().map(|x| Tensor::uninit(x.shape(), x.dtype(), device));
        let [u, delta, bias, a_log, d, shared, gate, state] = like;
        let all = [u?, delta?, bias?, a_log?, d?, shared?, gate?, state?];
        let [u, delta, bias, a_log, d, shared, gate, state] = &all;
        let f32 = |shape: &[usize]| Tensor::uninit(shape, DType::F32, device);
        let (dbias, dd, da) = (f32(&[sequences, width])?, f32(&[sequences, width])?, f32(&[sequences, width, n])?);
        let partial = f32(&[sequences * tokens, blocks, 2 * n])?;
        let launch = self.walk(cuda, "gated_scan_back")?.arg(self.marks.as_ref()).arg(dy).arg(dlast).arg(u).arg(delta).arg(gate);
        self.run(launch.arg(&dbias).arg(&da).arg(&dd).arg(&partial).arg(state))?;
        for (sums, to) in [(&dbias, bias), (&dd, d), (&da, a_log)] {
            sum_middle_into(sums, [groups, texts, to.elements() / groups], to, false)?;
        }
        let rows = sequences * tokens;
        let launch = self.on(cuda, "gated_scan_give")?.grid((32 * rows).div_ceil(256), 1, 1).arg(&partial).arg(shared).arg(rows);
        launch.arg(blocks as i32).arg(shared.shape().last() as i32).run()?;
        Ok(all)
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (dy, dlast) = (grads.output(0)?, grads.output(1)?);
        let cuda = cuda_of(&dy).ok_or_else(|| Error::Bug(format!("{OP}: a fused scan that is not on CUDA")))?;
        for (i, gradient) in self.backward_on(cuda, [&dy, &dlast])?.into_iter().enumerate() {
            grads.give(i, gradient)?;
        }
        Ok(())
    }
}
