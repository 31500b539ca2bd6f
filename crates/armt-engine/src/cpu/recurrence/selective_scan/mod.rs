//! The selective scan on the CPU.
//!
//! A task is a span of neighbouring channels of some texts of one layer. It takes them text by text and in strips of [`LANES`] channels, whose
//! states lie side by side in vectors, one for each of the N numbers; B and C are numbers that all of them share. So A is made once for many
//! texts, and sums over channels and over texts are first taken in vectors. How large tasks are is said in `paths.rs`, by the sizes alone.
//!
//! Rates are kept as A log2 e, because a power of two is what a decay is computed as.

mod backward;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

use super::is_seen;
use super::lanes::{LANES, Lanes, each, fma, load, product, scaled, totals, turn, turn_back};
use crate::cpu::math;
use crate::ops::recurrence::Sizes;
use crate::paths;

pub(crate) use backward::backward;

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

/// What one task does: a span of channels of some texts of a layer.
struct Span<'a> {
    scan: &'a Scan<'a>,
    group: usize,
    /// Which of the spans of the layer's channels, and the channels.
    index: usize,
    channels: Range<usize>,
    texts: Range<usize>,
}

/// A strip of channels, at most [`LANES`], and the parameters that are vectors of them.
struct Strip<'a> {
    scan: &'a Scan<'a>,
    first: usize,
    width: usize,
    bias: Lanes,
    d: Lanes,
}

/// What the channels of a strip have at one token.
#[derive(Clone, Copy)]
struct Token {
    /// Delta.
    step: Lanes,
    u: Lanes,
    /// The derivative of Delta by delta.
    slope: Lanes,
}

impl<'a> Span<'a> {
    /// The tasks of a scan.
    fn all(scan: &'a Scan<'a>) -> Vec<Span<'a>> {
        let Sizes { groups, texts, width, .. } = scan.sizes;
        let tasks = paths::scan_tasks(groups, texts, width.div_ceil(LANES));
        let span = tasks.strips * LANES;
        let mut spans = Vec::new();
        for group in 0..groups {
            for (index, first) in (0..width).step_by(span).enumerate() {
                for text in (0..texts).step_by(tasks.texts) {
                    let (channels, texts) = (first..width.min(first + span), text..texts.min(text + tasks.texts));
                    spans.push(Span { scan, group, index, channels, texts });
                }
            }
        }
        spans
    }

    /// Its sequences.
    fn sequences(&self) -> Range<usize> {
        let first = self.group * self.scan.sizes.texts;
        first + self.texts.start..first + self.texts.end
    }

    /// How many strips it has.
    fn strips(&self) -> usize {
        self.channels.len().div_ceil(LANES)
    }

    #[inline(always)]
    fn strip(&self, i: usize) -> Strip<'a> {
        let (scan, first) = (self.scan, self.channels.start + i * LANES);
        let width = LANES.min(self.channels.end - first);
        let param = |x: &[f32]| load(&x[self.group * scan.sizes.width + first..][..width]);
        Strip { scan, first, width, bias: param(scan.bias), d: param(scan.d) }
    }

    /// The rates of all strips, `[strips, N]`.
    #[inline(always)]
    fn rates(&self, rates: &mut [Lanes]) {
        let (n, width) = (self.scan.n, self.scan.sizes.width);
        for (i, rates) in rates.chunks_exact_mut(n).enumerate() {
            let strip = self.strip(i);
            turn(&self.scan.a_log[(self.group * width + strip.first) * n..][..strip.width * n], n, rates);
            for rate in rates {
                *rate = each!(|l| -math::exp(rate[l]) * std::f32::consts::LOG2_E);
            }
        }
    }

    /// y and the last states.
    #[inline(always)]
    fn forward(&self, scratch: &mut [Lanes], y: Shared<'_>, last: Shared<'_>) {
        let (n, Sizes { tokens, .. }) = (self.scan.n, self.scan.sizes);
        let (rates, s) = scratch.split_at_mut(self.strips() * n);
        self.rates(rates);
        for sequence in self.sequences() {
            for (i, rates) in rates.chunks_exact(n).enumerate() {
                let strip = self.strip(i);
                turn(strip.state(self.scan.state, sequence), n, s);
                for t in 0..tokens {
                    let y = strip.row_of(y, sequence, t);
                    if !strip.is_seen(sequence, t) {
                        y.fill(0.0);
                        continue;
                    }
                    let token = strip.token(sequence, t);
                    let input = product(&token.step, &token.u);
                    let (b, c) = (strip.shared(self.scan.b, sequence, t), strip.shared(self.scan.c, sequence, t));
                    let mut sum = product(&strip.d, &token.u);
                    for (((s, rate), b), c) in s.iter_mut().zip(rates).zip(b).zip(c) {
                        let after = fma(&decay(&token.step, rate), s, &each!(|l| input[l] * b));
                        sum = scaled(*c, &after, &sum);
                        *s = after;
                    }
                    y.copy_from_slice(&sum[..strip.width]);
                }
                turn_back(s, n, strip.state_of(last, sequence));
            }
        }
    }
}

/// exp(Delta A).
#[inline(always)]
fn decay(step: &Lanes, rate: &Lanes) -> Lanes {
    each!(|l| math::exp2_below_0(step[l] * rate[l]))
}

impl<'a> Strip<'a> {
    /// Where its part of token t is in rows of all channels.
    #[inline(always)]
    fn at(&self, sequence: usize, t: usize) -> usize {
        let Sizes { tokens, width, .. } = self.scan.sizes;
        (sequence * tokens + t) * width + self.first
    }

    #[inline(always)]
    fn row(&self, x: &[f32], sequence: usize, t: usize) -> Lanes {
        load(&x[self.at(sequence, t)..][..self.width])
    }

    /// Its part of states `[G, B, E, N]`.
    #[inline(always)]
    fn state<'x>(&self, x: &'x [f32], sequence: usize) -> &'x [f32] {
        let n = self.scan.n;
        &x[(sequence * self.scan.sizes.width + self.first) * n..][..self.width * n]
    }

    /// Its part of a row that is written.
    #[inline(always)]
    fn row_of<'x>(&self, x: Shared<'x>, sequence: usize, t: usize) -> &'x mut [f32] {
        // SAFETY: a channel of a sequence belongs to one strip of one task, which has one row of it at a time.
        unsafe { x.part(self.at(sequence, t), self.width) }
    }

    /// Its part of a state that is written.
    #[inline(always)]
    fn state_of<'x>(&self, x: Shared<'x>, sequence: usize) -> &'x mut [f32] {
        let n = self.scan.n;
        // SAFETY: as of a row.
        unsafe { x.part((sequence * self.scan.sizes.width + self.first) * n, self.width * n) }
    }

    #[inline(always)]
    fn is_seen(&self, sequence: usize, t: usize) -> bool {
        is_seen(self.scan.seen, self.scan.sizes.tokens, sequence, t)
    }

    /// N numbers of token t: B or C.
    #[inline(always)]
    fn shared(&self, x: &'a [f32], sequence: usize, t: usize) -> &'a [f32] {
        &x[(sequence * self.scan.sizes.tokens + t) * self.scan.n..][..self.scan.n]
    }

    #[inline(always)]
    fn token(&self, sequence: usize, t: usize) -> Token {
        let (delta, u) = (self.row(self.scan.delta, sequence, t), self.row(self.scan.u, sequence, t));
        let raw = each!(|l| delta[l] + self.bias[l]);
        Token { step: each!(|l| math::softplus(raw[l])), u, slope: each!(|l| math::sigmoid(raw[l])) }
    }
}

/// A tensor that tasks write to, each to elements of its own.
#[derive(Clone, Copy)]
struct Shared<'a> {
    first: *mut f32,
    length: usize,
    of: PhantomData<&'a mut [f32]>,
}

// SAFETY: who asks for a part vouches that no other task has it.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    fn new(x: &'a mut [f32]) -> Self {
        Shared { first: x.as_mut_ptr(), length: x.len(), of: PhantomData }
    }

    /// Some of its elements. Panics where they are not all there.
    ///
    /// # Safety
    ///
    /// While they are held, nobody else may hold any of them.
    #[inline(always)]
    unsafe fn part(self, at: usize, count: usize) -> &'a mut [f32] {
        assert!(at <= self.length && count <= self.length - at);
        // SAFETY: inside the slice, by the line above, and nobody else has it, as the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(at), count) }
    }
}

/// Runs `task` on every span, with so many vectors of scratch, on all threads if it is worth it.
fn run(spans: &[Span<'_>], vectors: usize, task: impl Fn(usize, &Span<'_>, &mut [Lanes]) + Sync) {
    thread_local! {
        static SCRATCH: RefCell<Vec<Lanes>> = const { RefCell::new(Vec::new()) };
    }
    let one = |(i, span): (usize, &Span<'_>)| {
        SCRATCH.with_borrow_mut(|scratch| {
            if scratch.len() < vectors {
                scratch.resize(vectors, [0.0; LANES]);
            }
            task(i, span, &mut scratch[..vectors]);
        });
    };
    let Some(Span { scan, .. }) = spans.first() else { return };
    let Sizes { tokens, width, .. } = scan.sizes;
    match paths::stays_on_one_thread(scan.sizes.sequences() * tokens * width * scan.n) {
        true => spans.iter().enumerate().for_each(one),
        false => spans.par_iter().enumerate().for_each(one),
    }
}

/// y and the last state.
pub(crate) fn forward(scan: &Scan<'_>, y: &mut [f32], state: &mut [f32]) {
    let spans = Span::all(scan);
    let most = spans.iter().map(Span::strips).max().unwrap_or(0);
    let (y, state) = (Shared::new(y), Shared::new(state));
    run(&spans, (most + 1) * scan.n, |_, span, scratch| {
        let scratch = &mut scratch[..(span.strips() + 1) * scan.n];
        simd!(span.forward(scratch, y, state));
    });
}
