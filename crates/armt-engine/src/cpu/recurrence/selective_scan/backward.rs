//! The way back of the selective scan on the CPU.
//!
//! A text's tokens are taken in pieces, from the last to the first. Of each piece the states and decays are computed again, from the state at its
//! start, so that a decay is computed once and used twice. The sums of B's and C's gradients over the channels of a span stay vectors
//! until all its strips have added to them; those of A, D and the bias over texts are vectors all along.

use super::*;
use crate::cpu::par_rows;

/// Tokens whose states there are at a time.
const PIECE: usize = 16;

/// Where a task's vectors are in its scratch: so many vectors each, in this order.
struct Parts<'a> {
    /// `[strips, N]` each: rates, their gradients, and the gradients of the states.
    rates: &'a mut [Lanes],
    by_rate: &'a mut [Lanes],
    g: &'a mut [Lanes],
    /// `[strips]` each.
    by_bias: &'a mut [Lanes],
    by_d: &'a mut [Lanes],
    /// The states before each piece, `[strips, pieces, N]`.
    starts: &'a mut [Lanes],
    /// Of the tokens of a piece: `[PIECE + 1, N]` states, `[PIECE, N]` decays and what B's and C's gradients are sums of.
    states: &'a mut [Lanes],
    decays: &'a mut [Lanes],
    by_b: &'a mut [Lanes],
    by_c: &'a mut [Lanes],
    /// Step, u and slope of each token of a piece, `[PIECE, 3]`.
    tokens: &'a mut [Lanes],
}

impl<'a> Parts<'a> {
    fn sizes(strips: usize, scan: &Scan<'_>) -> [usize; 11] {
        let (n, tokens) = (scan.n, scan.sizes.tokens);
        let (all, piece) = (strips * n, PIECE.min(tokens));
        [all, all, all, strips, strips, tokens.div_ceil(PIECE) * all, (piece + 1) * n, piece * n, piece * n, piece * n, 3 * piece]
    }

    fn of(scratch: &'a mut [Lanes], strips: usize, scan: &Scan<'_>) -> Self {
        let mut rest = scratch;
        let mut parts = Self::sizes(strips, scan).map(|size| rest.split_off_mut(..size).unwrap_or_default()).into_iter();
        let mut next = || parts.next().unwrap_or_default();
        Parts {
            rates: next(),
            by_rate: next(),
            g: next(),
            by_bias: next(),
            by_d: next(),
            starts: next(),
            states: next(),
            decays: next(),
            by_b: next(),
            by_c: next(),
            tokens: next(),
        }
    }
}

/// Where tasks write. Gradients of B and C are `[spans, G, B, T, N]`, those of the parameters of each task `[E', N + 2]`: A's, D's and the bias's.
#[derive(Clone, Copy)]
struct Outputs<'a> {
    u: Shared<'a>,
    delta: Shared<'a>,
    state: Shared<'a>,
    b: Shared<'a>,
    c: Shared<'a>,
    params: Shared<'a>,
}

impl Span<'_> {
    #[inline(always)]
    fn backward(&self, [dy, dstate]: [&[f32]; 2], scratch: &mut [Lanes], out: Outputs<'_>, params: usize) {
        let (scan, n, tokens) = (self.scan, self.scan.n, self.scan.sizes.tokens);
        let pieces = tokens.div_ceil(PIECE);
        let p = Parts::of(scratch, self.strips(), scan);
        self.rates(p.rates);
        [&mut *p.by_rate, &mut *p.by_bias, &mut *p.by_d].into_iter().for_each(|x| x.fill([0.0; LANES]));
        for sequence in self.sequences() {
            for i in 0..self.strips() {
                let strip = self.strip(i);
                let (starts, rates) = (&mut p.starts[i * pieces * n..][..pieces * n], &p.rates[i * n..][..n]);
                turn(strip.state(scan.state, sequence), n, starts);
                turn(strip.state(dstate, sequence), n, &mut p.g[i * n..]);
                strip.note_starts(sequence, rates, starts);
            }
            for piece in (0..pieces).rev() {
                let (first, end) = (piece * PIECE, tokens.min((piece + 1) * PIECE));
                [&mut *p.by_b, &mut *p.by_c].into_iter().for_each(|x| x.fill([0.0; LANES]));
                for i in 0..self.strips() {
                    let (strip, rates) = (self.strip(i), &p.rates[i * n..][..n]);
                    let (g, by_rate) = (&mut p.g[i * n..][..n], &mut p.by_rate[i * n..][..n]);
                    p.states[..n].copy_from_slice(&p.starts[(i * pieces + piece) * n..][..n]);
                    strip.replay(sequence, first..end, rates, [&mut *p.states, &mut *p.decays, &mut *p.tokens]);
                    for (k, t) in (first..end).enumerate().rev() {
                        let (du, ddelta) = (strip.row_of(out.u, sequence, t), strip.row_of(out.delta, sequence, t));
                        if !strip.is_seen(sequence, t) {
                            du.fill(0.0);
                            ddelta.fill(0.0);
                            continue;
                        }
                        let token = Token { step: p.tokens[3 * k], u: p.tokens[3 * k + 1], slope: p.tokens[3 * k + 2] };
                        let dy = strip.row(dy, sequence, t);
                        let (before, after) = p.states[k * n..][..2 * n].split_at(n);
                        let (decays, by_b, by_c) = (&p.decays[k * n..][..n], &mut p.by_b[k * n..][..n], &mut p.by_c[k * n..][..n]);
                        let (b, c) = (strip.shared(scan.b, sequence, t), strip.shared(scan.c, sequence, t));
                        let input = product(&token.step, &token.u);
                        let (mut by_decay, mut by_input) = ([0.0; LANES], [0.0; LANES]);
                        for j in 0..n {
                            let grad = scaled(c[j], &dy, &g[j]);
                            by_c[j] = fma(&dy, &after[j], &by_c[j]);
                            by_b[j] = fma(&grad, &input, &by_b[j]);
                            by_input = scaled(b[j], &grad, &by_input);
                            let earlier = product(&grad, &decays[j]);
                            let way = product(&earlier, &before[j]);
                            g[j] = earlier;
                            by_decay = fma(&way, &rates[j], &by_decay);
                            by_rate[j] = fma(&way, &token.step, &by_rate[j]);
                        }
                        // Rates are A log2 e.
                        let by_step = fma(&by_input, &token.u, &each!(|l| by_decay[l] * std::f32::consts::LN_2));
                        let by_delta = product(&by_step, &token.slope);
                        p.by_bias[i] = each!(|l| p.by_bias[i][l] + by_delta[l]);
                        p.by_d[i] = fma(&dy, &token.u, &p.by_d[i]);
                        ddelta.copy_from_slice(&by_delta[..strip.width]);
                        du.copy_from_slice(&fma(&dy, &strip.d, &product(&token.step, &by_input))[..strip.width]);
                    }
                }
                let at = ((self.index * scan.sizes.sequences() + sequence) * tokens + first) * n;
                for (out, sums) in [(out.b, &*p.by_b), (out.c, &*p.by_c)] {
                    // SAFETY: the tokens of a sequence belong, for one span of channels, to one task.
                    let out = unsafe { out.part(at, (end - first) * n) };
                    totals(&sums[..out.len()], out);
                }
            }
            for (i, g) in p.g.chunks_exact(n).enumerate() {
                turn_back(g, n, self.strip(i).state_of(out.state, sequence));
            }
        }
        // From rates to a_log: A = -exp(a_log), whose derivative is A.
        for (by_rate, rate) in p.by_rate.iter_mut().zip(&*p.rates) {
            *by_rate = each!(|l| by_rate[l] * rate[l] * std::f32::consts::LN_2);
        }
        // SAFETY: a task has this place for itself.
        let params = unsafe { out.params.part(params, self.channels.len() * (n + 2)) };
        let (a, rest) = params.split_at_mut(self.channels.len() * n);
        let (d, bias) = rest.split_at_mut(self.channels.len());
        for (i, a) in a.chunks_mut(LANES * n).enumerate() {
            turn_back(&p.by_rate[i * n..][..n], n, a);
        }
        for (out, sums) in [(d, &*p.by_d), (bias, &*p.by_bias)] {
            out.copy_from_slice(&sums.as_flattened()[..out.len()]);
        }
    }
}

impl Strip<'_> {
    /// The states before each piece `[pieces, N]`, from the first.
    #[inline(always)]
    fn note_starts(&self, sequence: usize, rates: &[Lanes], starts: &mut [Lanes]) {
        let n = self.scan.n;
        for piece in 1..starts.len() / n {
            let (before, s) = starts[(piece - 1) * n..][..2 * n].split_at_mut(n);
            s.copy_from_slice(before);
            for t in ((piece - 1) * PIECE..piece * PIECE).filter(|t| self.is_seen(sequence, *t)) {
                let token = self.token(sequence, t);
                let input = product(&token.step, &token.u);
                for ((s, rate), b) in s.iter_mut().zip(rates).zip(self.shared(self.scan.b, sequence, t)) {
                    *s = fma(&decay(&token.step, rate), s, &each!(|l| input[l] * b));
                }
            }
        }
    }

    /// Of a piece's tokens, those that are seen: states `[tokens + 1, N]`, of which the first is there, decays `[tokens, N]`, and what the
    /// tokens themselves have, `[tokens, 3]`.
    #[inline(always)]
    fn replay(&self, sequence: usize, piece: Range<usize>, rates: &[Lanes], [states, decays, tokens]: [&mut [Lanes]; 3]) {
        let n = self.scan.n;
        for (k, t) in piece.enumerate() {
            let (before, after) = states[k * n..][..2 * n].split_at_mut(n);
            if !self.is_seen(sequence, t) {
                after.copy_from_slice(before);
                continue;
            }
            let (token, decays) = (self.token(sequence, t), &mut decays[k * n..][..n]);
            let (input, b) = (product(&token.step, &token.u), self.shared(self.scan.b, sequence, t));
            for j in 0..n {
                let decay = decay(&token.step, &rates[j]);
                after[j] = fma(&decay, &before[j], &each!(|l| input[l] * b[j]));
                decays[j] = decay;
            }
            tokens[3 * k..][..3].copy_from_slice(&[token.step, token.u, token.slope]);
        }
    }
}

/// From dy and the gradient of the last state to those of all operands.
pub(crate) fn backward(scan: &Scan<'_>, dy: &[f32], dstate: &[f32], out: Gradients<'_>) {
    let (width, n) = (scan.sizes.width, scan.n);
    let spans = Span::all(scan);
    let most = spans.iter().map(Span::strips).max().unwrap_or(0);
    let count = spans.iter().map(|span| span.index + 1).max().unwrap_or(0);
    // Where the parameters' gradients of each task begin.
    let mut places = vec![0];
    places.extend(spans.iter().scan(0, |end, span| {
        *end += span.channels.len() * (n + 2);
        Some(*end)
    }));
    let mut params = vec![0f32; places[spans.len()]];
    let size = scan.b.len();
    let mut sums = if count > 1 { vec![0f32; 2 * count * size] } else { Vec::new() };
    let half = sums.len() / 2;
    let (by_b, by_c) = sums.split_at_mut(half);
    let (b, c) = if count > 1 { (&mut *by_b, &mut *by_c) } else { (&mut *out.b, &mut *out.c) };
    let outputs = Outputs {
        u: Shared::new(out.u),
        delta: Shared::new(out.delta),
        state: Shared::new(out.state),
        b: Shared::new(b),
        c: Shared::new(c),
        params: Shared::new(&mut params),
    };
    run(&spans, Parts::sizes(most, scan).iter().sum(), |i, span, scratch| {
        simd!(span.backward([dy, dstate], scratch, outputs, places[i]));
    });
    if count > 1 {
        for (to, from) in [(out.b, &*by_b), (out.c, &*by_c)] {
            par_rows(to, n, n * count, |first, to| {
                to.copy_from_slice(&from[first * n..][..to.len()]);
                for from in from.chunks_exact(size).skip(1) {
                    add(to, &from[first * n..][..to.len()]);
                }
            });
        }
    }
    [&mut *out.a_log, &mut *out.d, &mut *out.bias].into_iter().for_each(|x| x.fill(0.0));
    for (span, at) in spans.iter().zip(places) {
        let (channels, first) = (span.channels.len(), span.group * width + span.channels.start);
        let (a, rest) = params[at..].split_at(channels * n);
        add(&mut out.a_log[first * n..][..channels * n], a);
        add(&mut out.d[first..][..channels], rest);
        add(&mut out.bias[first..][..channels], &rest[channels..]);
    }
}

/// y += x.
fn add(y: &mut [f32], x: &[f32]) {
    simd!(y.iter_mut().zip(x).for_each(|(y, x)| *y += x));
}
