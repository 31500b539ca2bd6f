//! The selective scan on the CPU.
//!
//! A task is a strip of [`LANES`] neighbouring channels of one sequence: their states lie side by side in vectors, one for each of the N
//! numbers, and B and C are numbers that all of them share. The backward pass goes over the tokens in pieces from the last to the first and
//! computes the states of a piece again, from the one at its start.

use rayon::prelude::*;

use super::{is_seen, join};
use crate::cpu::math;
use crate::ops::recurrence::Sizes;

/// Channels of a strip: two of the widest vectors.
const LANES: usize = 32;
/// Tokens whose states the backward pass has at a time.
const PIECE: usize = 32;

/// A number of each channel of a strip.
type Lanes = [f32; LANES];

/// The operands.
pub(crate) struct Scan<'a> {
    pub(crate) u: &'a [f32],
    pub(crate) delta: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) a_log: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) c: &'a [f32],
    pub(crate) d: &'a [f32],
    pub(crate) state: &'a [f32],
    pub(crate) seen: Option<&'a [i32]>,
    pub(crate) sizes: Sizes,
    pub(crate) n: usize,
}

/// Where the gradients of the operands go.
pub(crate) struct Gradients<'a> {
    pub(crate) u: &'a mut [f32],
    pub(crate) delta: &'a mut [f32],
    pub(crate) bias: &'a mut [f32],
    pub(crate) a_log: &'a mut [f32],
    pub(crate) b: &'a mut [f32],
    pub(crate) c: &'a mut [f32],
    pub(crate) d: &'a mut [f32],
    pub(crate) state: &'a mut [f32],
}

/// A strip of channels of a sequence.
#[derive(Clone, Copy)]
struct Strip<'a> {
    scan: &'a Scan<'a>,
    sequence: usize,
    /// First channel, and how many there are.
    first: usize,
    width: usize,
}

/// ln(1 + e^x).
#[inline(always)]
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Numbers of some channels as lanes; those that are too many are zero.
#[inline(always)]
fn lanes(x: &[f32]) -> Lanes {
    let mut all = [0.0; LANES];
    all[..x.len()].copy_from_slice(x);
    all
}

impl<'a> Strip<'a> {
    /// The channels' part of rows of all channels, at row t.
    #[inline(always)]
    fn row(&self, x: &[f32], t: usize) -> Lanes {
        let Sizes { tokens, width, .. } = self.scan.sizes;
        lanes(&x[(self.sequence * tokens + t) * width + self.first..][..self.width])
    }

    /// The channels' part of a parameter `[G, E]`.
    #[inline(always)]
    fn param(&self, x: &[f32]) -> Lanes {
        let Sizes { texts, width, .. } = self.scan.sizes;
        lanes(&x[self.sequence / texts * width + self.first..][..self.width])
    }

    /// The channels' part of `[.., E, N]` at `at`, with the N numbers of a channel in as many vectors.
    #[inline(always)]
    fn turned(&self, x: &[f32], at: usize) -> Vec<Lanes> {
        let n = self.scan.n;
        let x = &x[(at * self.scan.sizes.width + self.first) * n..][..self.width * n];
        let mut turned = vec![[0.0; LANES]; n];
        for (l, x) in x.chunks_exact(n).enumerate() {
            turned.iter_mut().zip(x).for_each(|(v, x)| v[l] = *x);
        }
        turned
    }

    /// [`Strip::turned`] back.
    #[inline(always)]
    fn turn_back(&self, turned: &[Lanes], x: &mut [f32]) {
        for (l, x) in x.chunks_exact_mut(self.scan.n).enumerate() {
            x.iter_mut().zip(turned).for_each(|(x, v)| *x = v[l]);
        }
    }

    /// A, and S before the first token.
    #[inline(always)]
    fn begin(&self) -> (Vec<Lanes>, Vec<Lanes>) {
        let mut a = self.turned(self.scan.a_log, self.sequence / self.scan.sizes.texts);
        a.iter_mut().flatten().for_each(|a| *a = -math::exp(*a));
        (a, self.turned(self.scan.state, self.sequence))
    }

    #[inline(always)]
    fn is_seen(&self, t: usize) -> bool {
        is_seen(self.scan.seen, self.scan.sizes.tokens, self.sequence, t)
    }

    /// N numbers of token t: B or C.
    #[inline(always)]
    fn shared(&self, x: &'a [f32], t: usize) -> &'a [f32] {
        &x[(self.sequence * self.scan.sizes.tokens + t) * self.scan.n..][..self.scan.n]
    }

    /// delta + bias, Delta, and u of token t.
    #[inline(always)]
    fn token(&self, bias: &Lanes, t: usize) -> (Lanes, Lanes, Lanes) {
        let (mut raw, u) = (self.row(self.scan.delta, t), self.row(self.scan.u, t));
        raw.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        (raw, raw.map(softplus), u)
    }

    /// S_t from S_(t-1).
    #[inline(always)]
    fn advance(&self, t: usize, a: &[Lanes], delta: &Lanes, u: &Lanes, s: &mut [Lanes]) {
        let b = self.shared(self.scan.b, t);
        for ((s, a), b) in s.iter_mut().zip(a).zip(b) {
            for l in 0..LANES {
                s[l] = math::exp(delta[l] * a[l]).mul_add(s[l], delta[l] * u[l] * b);
            }
        }
    }

    /// y of all tokens `[T, LANES]`, and the last state.
    #[inline(always)]
    fn forward(&self, y: &mut [f32], last: &mut [f32]) {
        let (a, mut s) = self.begin();
        let (bias, d) = (self.param(self.scan.bias), self.param(self.scan.d));
        for (t, y) in y.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            *y = [0.0; LANES];
            if !self.is_seen(t) {
                continue;
            }
            let (_, delta, u) = self.token(&bias, t);
            self.advance(t, &a, &delta, &u, &mut s);
            for (s, c) in s.iter().zip(self.shared(self.scan.c, t)) {
                for l in 0..LANES {
                    y[l] = s[l].mul_add(*c, y[l]);
                }
            }
            for l in 0..LANES {
                y[l] = d[l].mul_add(u[l], y[l]);
            }
        }
        self.turn_back(&s, last);
    }

    #[inline(always)]
    fn backward(&self, dy: &[f32], dstate: &[f32]) -> StripGradients {
        let (tokens, n) = (self.scan.sizes.tokens, self.scan.n);
        let (a, mut s) = self.begin();
        let (bias, d) = (self.param(self.scan.bias), self.param(self.scan.d));
        // The states before the first token of each piece.
        let mut starts = Vec::with_capacity(tokens.div_ceil(PIECE) * n);
        for t in 0..tokens {
            if t % PIECE == 0 {
                starts.extend_from_slice(&s);
            }
            if self.is_seen(t) {
                let (_, delta, u) = self.token(&bias, t);
                self.advance(t, &a, &delta, &u, &mut s);
            }
        }
        let mut out = StripGradients::new(tokens, n);
        let mut g = self.turned(dstate, self.sequence);
        let mut states = vec![[0.0; LANES]; (PIECE + 1) * n];
        for first in (0..tokens).step_by(PIECE).rev() {
            let end = tokens.min(first + PIECE);
            states[..n].copy_from_slice(&starts[first / PIECE * n..][..n]);
            for t in first..end {
                let (before, after) = states[(t - first) * n..].split_at_mut(n);
                after[..n].copy_from_slice(before);
                if self.is_seen(t) {
                    let (_, delta, u) = self.token(&bias, t);
                    self.advance(t, &a, &delta, &u, &mut after[..n]);
                }
            }
            for t in (first..end).rev().filter(|t| self.is_seen(*t)) {
                let (raw, delta, u) = self.token(&bias, t);
                let dy = self.row(dy, t);
                let (before, after) = states[(t - first) * n..].split_at(n);
                let (b, c) = (self.shared(self.scan.b, t), self.shared(self.scan.c, t));
                let (mut by_state, mut by_b) = ([0f32; LANES], [0f32; LANES]);
                for j in 0..n {
                    let (g, a, sp, s, da) = (&mut g[j], &a[j], &before[j], &after[j], &mut out.a[j]);
                    let (mut dc, mut db) = ([0f32; LANES], [0f32; LANES]);
                    for l in 0..LANES {
                        let decay = math::exp(delta[l] * a[l]);
                        g[l] = dy[l].mul_add(c[j], g[l]);
                        dc[l] = dy[l] * s[l];
                        db[l] = g[l] * delta[l] * u[l];
                        let way = g[l] * sp[l] * decay;
                        by_state[l] = way.mul_add(a[l], by_state[l]);
                        da[l] = way.mul_add(delta[l], da[l]);
                        by_b[l] = g[l].mul_add(b[j], by_b[l]);
                        g[l] *= decay;
                    }
                    out.c[t * n + j] = math::total_32(dc);
                    out.b[t * n + j] = math::total_32(db);
                }
                for l in 0..LANES {
                    let ddelta = by_b[l].mul_add(u[l], by_state[l]) * math::sigmoid(raw[l]);
                    out.delta[t][l] = ddelta;
                    out.bias[l] += ddelta;
                    out.u[t][l] = dy[l].mul_add(d[l], delta[l] * by_b[l]);
                    out.d[l] = dy[l].mul_add(u[l], out.d[l]);
                }
            }
        }
        // From A to a_log: A = -exp(a_log).
        for (da, a) in out.a.iter_mut().zip(&a) {
            da.iter_mut().zip(a).for_each(|(da, a)| *da *= a);
        }
        out.state = g;
        out
    }
}

/// The gradients that a strip has a part in. B's and C's are sums over its channels alone.
struct StripGradients {
    u: Vec<Lanes>,
    delta: Vec<Lanes>,
    bias: Lanes,
    a: Vec<Lanes>,
    b: Vec<f32>,
    c: Vec<f32>,
    d: Lanes,
    state: Vec<Lanes>,
}

impl StripGradients {
    fn new(tokens: usize, n: usize) -> Self {
        let zero = [0.0; LANES];
        StripGradients {
            u: vec![zero; tokens],
            delta: vec![zero; tokens],
            bias: zero,
            a: vec![zero; n],
            b: vec![0.0; tokens * n],
            c: vec![0.0; tokens * n],
            d: zero,
            state: Vec::new(),
        }
    }
}

/// All strips of all sequences.
fn strips<'a>(scan: &'a Scan<'a>) -> Vec<Strip<'a>> {
    let width = scan.sizes.width;
    let of = |sequence| {
        let firsts = (0..width).step_by(LANES);
        firsts.map(move |first| Strip { scan, sequence, first, width: LANES.min(width - first) })
    };
    (0..scan.sizes.sequences()).flat_map(of).collect()
}

/// y and the last state.
pub(crate) fn forward(scan: &Scan<'_>, y: &mut [f32], state: &mut [f32]) {
    let Sizes { tokens, width, .. } = scan.sizes;
    let strips = strips(scan);
    let states: Vec<&mut [f32]> = state.chunks_mut(width * scan.n).flat_map(|s| s.chunks_mut(LANES * scan.n)).collect();
    let mut ys = vec![0f32; strips.len() * tokens * LANES];
    let tasks = strips.par_iter().zip(ys.par_chunks_mut(tokens * LANES)).zip(states);
    tasks.for_each(|((strip, y), state)| simd!(strip.forward(y, state)));
    let count = width.div_ceil(LANES);
    y.par_chunks_mut(tokens * width).zip(ys.par_chunks(count * tokens * LANES)).for_each(|(y, ys)| {
        for (i, ys) in ys.chunks(tokens * LANES).enumerate() {
            join(ys, LANES, i * LANES, y, width);
        }
    });
}

/// From dy and the gradient of the last state to those of all operands.
pub(crate) fn backward(scan: &Scan<'_>, dy: &[f32], dstate: &[f32], out: Gradients<'_>) {
    let (Sizes { texts, tokens, width, .. }, n) = (scan.sizes, scan.n);
    let strips = strips(scan);
    let parts: Vec<StripGradients> = strips.par_iter().map(|strip| simd!(strip.backward(dy, dstate))).collect();
    [&mut *out.bias, &mut *out.a_log, &mut *out.d, &mut *out.b, &mut *out.c].into_iter().for_each(|x| x.fill(0.0));
    let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    let mut turned = vec![0f32; LANES * n];
    for (strip, part) in strips.iter().zip(&parts) {
        let Strip { sequence, first, width: own, .. } = *strip;
        let rows = sequence * tokens * width..(sequence + 1) * tokens * width;
        join(part.u.as_flattened(), LANES, first, &mut out.u[rows.clone()], width);
        join(part.delta.as_flattened(), LANES, first, &mut out.delta[rows], width);
        let channels = sequence / texts * width + first;
        add(&mut out.bias[channels..][..own], &part.bias);
        add(&mut out.d[channels..][..own], &part.d);
        strip.turn_back(&part.a, &mut turned[..own * n]);
        add(&mut out.a_log[channels * n..][..own * n], &turned);
        strip.turn_back(&part.state, &mut out.state[(sequence * width + first) * n..][..own * n]);
        add(&mut out.b[sequence * tokens * n..][..tokens * n], &part.b);
        add(&mut out.c[sequence * tokens * n..][..tokens * n], &part.c);
    }
}
