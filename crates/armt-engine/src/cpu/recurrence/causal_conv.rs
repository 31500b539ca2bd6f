//! The causal convolution on the CPU.
//!
//! What a sequence has to convolve is one list of rows: its tail, then the tokens that are seen. Row p of it is seen by outputs p to
//! p + K - 1.

use rayon::prelude::*;

use super::is_seen;
use crate::cpu::par_rows;
use crate::ops::recurrence::Sizes;

/// The operands.
pub(crate) struct Conv<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) tail: &'a [f32],
    pub(crate) seen: Option<&'a [i32]>,
    pub(crate) sizes: Sizes,
    pub(crate) k: usize,
}

/// Where the gradients of the operands go.
pub(crate) struct Gradients<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) weight: &'a mut [f32],
    pub(crate) bias: Option<&'a mut [f32]>,
    pub(crate) tail: &'a mut [f32],
}

/// The rows of one sequence, by where they are.
struct Rows {
    /// Tokens that are seen, in order.
    tokens: Vec<usize>,
    /// Of every token its place among them, if it is seen.
    place: Vec<Option<usize>>,
}

/// A row of a sequence's list.
#[derive(Clone, Copy)]
enum Row {
    Tail(usize),
    Token(usize),
}

impl Rows {
    fn of(conv: &Conv<'_>, sequence: usize) -> Self {
        let all = conv.sizes.tokens;
        let tokens: Vec<usize> = (0..all).filter(|t| is_seen(conv.seen, all, sequence, *t)).collect();
        let mut place = vec![None; all];
        tokens.iter().enumerate().for_each(|(p, t)| place[*t] = Some(p));
        Rows { tokens, place }
    }

    /// Row p of the list, of a convolution of K weights.
    fn at(&self, p: usize, k: usize) -> Row {
        if p < k - 1 { Row::Tail(p) } else { Row::Token(self.tokens[p - (k - 1)]) }
    }

    /// The list's length.
    fn count(&self, k: usize) -> usize {
        k - 1 + self.tokens.len()
    }
}

impl Conv<'_> {
    /// The weights as `[G, K, E]`: vectors run along channels.
    fn turned(&self) -> Vec<f32> {
        let (e, k) = (self.sizes.width, self.k);
        let mut turned = vec![0f32; self.weight.len()];
        for (i, w) in self.weight.iter().enumerate() {
            let (channel, j) = (i / k, i % k);
            turned[(channel / e * k + j) * e + channel % e] = *w;
        }
        turned
    }

    /// The inputs of a row.
    fn row(&self, sequence: usize, row: Row) -> &[f32] {
        let Sizes { tokens, width, .. } = self.sizes;
        match row {
            Row::Tail(p) => &self.tail[(sequence * (self.k - 1) + p) * width..][..width],
            Row::Token(t) => &self.x[(sequence * tokens + t) * width..][..width],
        }
    }

    fn all_rows(&self) -> Vec<Rows> {
        (0..self.sizes.sequences()).map(|s| Rows::of(self, s)).collect()
    }
}

/// y += w x, element by element.
fn add_product(y: &mut [f32], w: &[f32], x: &[f32]) {
    simd!({
        for ((y, w), x) in y.iter_mut().zip(w).zip(x) {
            *y = w.mul_add(*x, *y);
        }
    });
}

/// y and the new tail.
pub(crate) fn forward(conv: &Conv<'_>, y: &mut [f32], tail: &mut [f32]) {
    let (Sizes { texts, tokens, width, .. }, k) = (conv.sizes, conv.k);
    let (weight, rows) = (conv.turned(), conv.all_rows());
    par_rows(y, width, 2 * k * width, |first, y| {
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            let (sequence, t) = ((first + i) / tokens, (first + i) % tokens);
            let (rows, group) = (&rows[sequence], sequence / texts);
            y.fill(0.0);
            let Some(place) = rows.place[t] else { continue };
            if let Some(bias) = conv.bias {
                y.copy_from_slice(&bias[group * width..][..width]);
            }
            for j in 0..k {
                add_product(y, &weight[(group * k + j) * width..][..width], conv.row(sequence, rows.at(place + j, k)));
            }
        }
    });
    for ((sequence, tail), rows) in tail.chunks_exact_mut((k - 1) * width).enumerate().zip(&rows) {
        let first = rows.count(k) - (k - 1);
        for (p, tail) in tail.chunks_exact_mut(width).enumerate() {
            tail.copy_from_slice(conv.row(sequence, rows.at(first + p, k)));
        }
    }
}

/// From dy and the gradient of the new tail to those of all operands.
pub(crate) fn backward(conv: &Conv<'_>, dy: &[f32], dtail: &[f32], out: Gradients<'_>) {
    let (Sizes { groups, texts, tokens, width }, k) = (conv.sizes, conv.k);
    let (weight, rows) = (conv.turned(), conv.all_rows());
    let dy_of = |sequence: usize, t: usize| &dy[(sequence * tokens + t) * width..][..width];
    // What row p of a sequence's list gets: from the outputs that see it, and from the new tail.
    let give = |sequence: usize, p: usize, d: &mut [f32]| {
        let (rows, group) = (&rows[sequence], sequence / texts);
        d.fill(0.0);
        for j in 0..k {
            // Output q is the token at q and sees rows q to q + K - 1.
            if let Some(t) = p.checked_sub(j).and_then(|q| rows.tokens.get(q)) {
                add_product(d, &weight[(group * k + j) * width..][..width], dy_of(sequence, *t));
            }
        }
        if let Some(kept) = p.checked_sub(rows.count(k) - (k - 1)) {
            let dtail = &dtail[(sequence * (k - 1) + kept) * width..][..width];
            d.iter_mut().zip(dtail).for_each(|(d, g)| *d += g);
        }
    };
    par_rows(out.x, width, 2 * k * width, |first, dx| {
        for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
            let (sequence, t) = ((first + i) / tokens, (first + i) % tokens);
            match rows[sequence].place[t] {
                Some(place) => give(sequence, k - 1 + place, dx),
                None => dx.fill(0.0),
            }
        }
    });
    par_rows(out.tail, width, 2 * k * width, |first, d| {
        for (i, d) in d.chunks_exact_mut(width).enumerate() {
            give((first + i) / (k - 1), (first + i) % (k - 1), d);
        }
    });
    // Sums over tokens, of each layer's weights and bias: [K + 1, E].
    let sums: Vec<Vec<f32>> = (0..groups)
        .into_par_iter()
        .map(|group| {
            let mut sums = vec![0f32; (k + 1) * width];
            for (sequence, rows) in rows.iter().enumerate().skip(group * texts).take(texts) {
                for (q, t) in rows.tokens.iter().enumerate() {
                    let dy = dy_of(sequence, *t);
                    for (j, sum) in sums.chunks_exact_mut(width).enumerate() {
                        match j < k {
                            true => add_product(sum, dy, conv.row(sequence, rows.at(q + j, k))),
                            false => sum.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy),
                        }
                    }
                }
            }
            sums
        })
        .collect();
    for (dweight, sums) in out.weight.chunks_exact_mut(k * width).zip(&sums) {
        dweight.iter_mut().enumerate().for_each(|(i, d)| *d = sums[i % k * width + i / k]);
    }
    if let Some(dbias) = out.bias {
        dbias.chunks_exact_mut(width).zip(&sums).for_each(|(d, sums)| d.copy_from_slice(&sums[k * width..]));
    }
}
