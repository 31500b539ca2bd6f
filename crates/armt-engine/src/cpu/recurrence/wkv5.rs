//! The recurrence of RWKV-5 on the CPU.
//!
//! A task is one head of one sequence: its state is small enough for the first-level cache, and vectors run along value channels. The
//! backward pass goes over the tokens in pieces from the last to the first and computes the states of a piece again, from the one at its
//! start.

use rayon::prelude::*;

use super::{is_seen, join};
use crate::cpu::math;
use crate::ops::recurrence::Sizes;

/// Tokens whose states the backward pass has at a time.
const PIECE: usize = 16;

/// The operands.
pub(crate) struct Wkv<'a> {
    pub(crate) r: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) decay: &'a [f32],
    pub(crate) bonus: &'a [f32],
    pub(crate) state: &'a [f32],
    pub(crate) seen: Option<&'a [i32]>,
    pub(crate) sizes: Sizes,
    pub(crate) n: usize,
}

/// Where the gradients of the operands go.
pub(crate) struct Gradients<'a> {
    pub(crate) r: &'a mut [f32],
    pub(crate) k: &'a mut [f32],
    pub(crate) v: &'a mut [f32],
    pub(crate) decay: &'a mut [f32],
    pub(crate) bonus: &'a mut [f32],
    pub(crate) state: &'a mut [f32],
}

/// One head of one sequence.
struct Head<'a> {
    wkv: &'a Wkv<'a>,
    sequence: usize,
    head: usize,
    /// w, `[N]`.
    w: Vec<f32>,
}

/// The gradients of a head.
struct HeadGradients {
    r: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    decay: Vec<f32>,
    bonus: Vec<f32>,
    state: Vec<f32>,
}

#[inline(always)]
fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let ((xs, x), (ys, y)) = (x.as_chunks::<16>(), y.as_chunks::<16>());
    for (x, y) in xs.iter().zip(ys) {
        for ((s, x), y) in sums.iter_mut().zip(x).zip(y) {
            *s = x.mul_add(*y, *s);
        }
    }
    math::total(sums) + x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>()
}

/// y += c x.
#[inline(always)]
fn add(y: &mut [f32], c: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = c.mul_add(*x, *y));
}

impl<'a> Head<'a> {
    fn new(wkv: &'a Wkv<'a>, sequence: usize, head: usize) -> Self {
        let mut of = Head { wkv, sequence, head, w: Vec::new() };
        of.w = of.param(wkv.decay).iter().map(|x| (-x.exp()).exp()).collect();
        of
    }

    /// The head's part of a row of r, k, v or dy.
    #[inline(always)]
    fn row<'x>(&self, x: &'x [f32], t: usize) -> &'x [f32] {
        let (Sizes { tokens, width, .. }, n) = (self.wkv.sizes, self.wkv.n);
        &x[(self.sequence * tokens + t) * width + self.head * n..][..n]
    }

    /// The head's part of a parameter `[G, H N]`.
    #[inline(always)]
    fn param<'x>(&self, x: &'x [f32]) -> &'x [f32] {
        let (Sizes { texts, width, .. }, n) = (self.wkv.sizes, self.wkv.n);
        &x[self.sequence / texts * width + self.head * n..][..n]
    }

    /// Where the head's state lies.
    fn state_at(&self) -> std::ops::Range<usize> {
        let (Sizes { width, .. }, n) = (self.wkv.sizes, self.wkv.n);
        let at = self.sequence * width * n + self.head * n * n;
        at..at + n * n
    }

    #[inline(always)]
    fn is_seen(&self, t: usize) -> bool {
        is_seen(self.wkv.seen, self.wkv.sizes.tokens, self.sequence, t)
    }

    /// S_t from S_(t-1).
    #[inline(always)]
    fn advance(&self, t: usize, s: &mut [f32]) {
        let (k, v) = (self.row(self.wkv.k, t), self.row(self.wkv.v, t));
        for ((s, w), k) in s.chunks_exact_mut(v.len()).zip(&self.w).zip(k) {
            s.iter_mut().zip(v).for_each(|(s, v)| *s = w.mul_add(*s, k * v));
        }
    }

    /// y `[T, N]`, and the last state.
    #[inline(always)]
    fn forward(&self, y: &mut [f32], s: &mut [f32]) {
        let n = self.wkv.n;
        s.copy_from_slice(&self.wkv.state[self.state_at()]);
        let bonus = self.param(self.wkv.bonus);
        for (t, y) in y.chunks_exact_mut(n).enumerate() {
            y.fill(0.0);
            if !self.is_seen(t) {
                continue;
            }
            let (r, k) = (self.row(self.wkv.r, t), self.row(self.wkv.k, t));
            let mut own = 0f32;
            for (i, s) in s.chunks_exact(n).enumerate() {
                add(y, r[i], s);
                own += r[i] * bonus[i] * k[i];
            }
            add(y, own, self.row(self.wkv.v, t));
            self.advance(t, s);
        }
    }

    #[inline(always)]
    fn backward(&self, dy: &[f32], dstate: &[f32]) -> HeadGradients {
        let (tokens, n) = (self.wkv.sizes.tokens, self.wkv.n);
        let bonus = self.param(self.wkv.bonus);
        // The states before the first token of each piece.
        let mut s = self.wkv.state[self.state_at()].to_vec();
        let mut starts = Vec::with_capacity(tokens.div_ceil(PIECE) * n * n);
        for t in 0..tokens {
            if t % PIECE == 0 {
                starts.extend_from_slice(&s);
            }
            if self.is_seen(t) {
                self.advance(t, &mut s);
            }
        }
        let zeros = |length: usize| vec![0f32; length];
        let mut out = HeadGradients {
            r: zeros(tokens * n),
            k: zeros(tokens * n),
            v: zeros(tokens * n),
            decay: zeros(n),
            bonus: zeros(n),
            state: dstate[self.state_at()].to_vec(),
        };
        let mut states = zeros(PIECE * n * n);
        for first in (0..tokens).step_by(PIECE).rev() {
            let end = tokens.min(first + PIECE);
            states[..n * n].copy_from_slice(&starts[first / PIECE * n * n..][..n * n]);
            for t in first..end - 1 {
                let (before, after) = states[(t - first) * n * n..].split_at_mut(n * n);
                after[..n * n].copy_from_slice(before);
                if self.is_seen(t) {
                    self.advance(t, &mut after[..n * n]);
                }
            }
            for t in (first..end).rev().filter(|t| self.is_seen(*t)) {
                let (r, k, v) = (self.row(self.wkv.r, t), self.row(self.wkv.k, t), self.row(self.wkv.v, t));
                let (dy, before) = (self.row(dy, t), &states[(t - first) * n * n..][..n * n]);
                let own = dot(v, dy);
                let (dr, dk, dv) = (&mut out.r[t * n..][..n], &mut out.k[t * n..][..n], &mut out.v[t * n..][..n]);
                let mut through = 0f32;
                for (i, (g, s)) in out.state.chunks_exact_mut(n).zip(before.chunks_exact(n)).enumerate() {
                    dr[i] = (bonus[i] * k[i]).mul_add(own, dot(s, dy));
                    out.bonus[i] += r[i] * k[i] * own;
                    dk[i] = (bonus[i] * r[i]).mul_add(own, dot(g, v));
                    through += bonus[i] * r[i] * k[i];
                    add(dv, k[i], g);
                    out.decay[i] += dot(g, s);
                    g.iter_mut().zip(dy).for_each(|(g, dy)| *g = self.w[i].mul_add(*g, r[i] * dy));
                }
                add(dv, through, dy);
            }
        }
        // From w to its decay: w = exp(-exp(decay)).
        for ((d, w), decay) in out.decay.iter_mut().zip(&self.w).zip(self.param(self.wkv.decay)) {
            *d *= -decay.exp() * w;
        }
        out
    }
}

/// All heads of all sequences.
fn heads<'a>(wkv: &'a Wkv<'a>) -> Vec<Head<'a>> {
    let count = wkv.sizes.width / wkv.n;
    (0..wkv.sizes.sequences()).flat_map(|s| (0..count).map(move |head| Head::new(wkv, s, head))).collect()
}

/// y and the last state.
pub(crate) fn forward(wkv: &Wkv<'_>, y: &mut [f32], state: &mut [f32]) {
    let (Sizes { tokens, width, .. }, n) = (wkv.sizes, wkv.n);
    let heads = heads(wkv);
    let mut ys = vec![0f32; heads.len() * tokens * n];
    let tasks = heads.par_iter().zip(ys.par_chunks_mut(tokens * n)).zip(state.par_chunks_mut(n * n));
    tasks.for_each(|((head, y), state)| simd!(head.forward(y, state)));
    y.par_chunks_mut(tokens * width).zip(ys.par_chunks(tokens * width)).for_each(|(y, ys)| {
        for (h, ys) in ys.chunks(tokens * n).enumerate() {
            join(ys, n, h * n, y, width);
        }
    });
}

/// From dy and the gradient of the last state to those of all operands.
pub(crate) fn backward(wkv: &Wkv<'_>, dy: &[f32], dstate: &[f32], out: Gradients<'_>) {
    let (Sizes { texts, tokens, width, .. }, n) = (wkv.sizes, wkv.n);
    let heads = heads(wkv);
    let parts: Vec<HeadGradients> = heads.par_iter().map(|head| simd!(head.backward(dy, dstate))).collect();
    out.decay.fill(0.0);
    out.bonus.fill(0.0);
    for (head, part) in heads.iter().zip(&parts) {
        let (rows, first) = (head.sequence * tokens * width..(head.sequence + 1) * tokens * width, head.head * n);
        join(&part.r, n, first, &mut out.r[rows.clone()], width);
        join(&part.k, n, first, &mut out.k[rows.clone()], width);
        join(&part.v, n, first, &mut out.v[rows], width);
        let channels = head.sequence / texts * width + first;
        add(&mut out.decay[channels..][..n], 1.0, &part.decay);
        add(&mut out.bonus[channels..][..n], 1.0, &part.bonus);
        out.state[head.state_at()].copy_from_slice(&part.state);
    }
}
