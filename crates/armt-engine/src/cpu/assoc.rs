//! Writes to the associative memory on the CPU.
//!
//! One memory (n) is one task: it is read from main memory once, and the products that follow find it in the cache. Scratch is kept by each
//! thread.

use std::cell::RefCell;

use rayon::prelude::*;

use super::dpfp::{features, features_backward};
use super::math;
use super::small_product::{Matrix, Pair, dots, multiply};

/// Added to z . phi and to |phi|^2, as the published code does.
pub(crate) const EPSILON: f32 = 1e-5;

/// Independent partial sums of a dot product: two of the widest vectors.
const LANES: usize = 32;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with pieces of the given lengths of this thread's scratch, whose values are whatever was there. `f` must not hand work to
/// other threads: a stolen task would want the same scratch.
pub(super) fn with_scratch<const K: usize, R>(lengths: [usize; K], f: impl FnOnce([&mut [f32]; K]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        let total = lengths.iter().sum();
        if scratch.len() < total {
            scratch.resize(total, 0.0);
        }
        let mut rest = scratch.as_mut_slice();
        f(lengths.map(|length| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(length);
            rest = after;
            piece
        }))
    })
}

#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let rest = add_products(&mut sums, x, y);
    math::total_32(sums) + rest
}

/// Adds products of elements to interleaved sums; gives the sum of those that fill no lane.
#[inline(always)]
fn add_products(sums: &mut [f32; LANES], x: &[f32], y: &[f32]) -> f32 {
    let ((xs, x), (ys, y)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for ((s, x), y) in sums.iter_mut().zip(x).zip(y) {
            *s = x.mul_add(*y, *s);
        }
    }
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// y += sum_i c[i] rows[i], rows of y's length one after the other, at distance `stride` in `c`.
#[inline(always)]
fn add_rows(y: &mut [f32], c: &[f32], stride: usize, rows: &[f32]) {
    let width = y.len();
    let count = rows.len() / width;
    let fours = count / 4 * 4;
    for i in (0..fours).step_by(4) {
        let [c0, c1, c2, c3] = [c[i * stride], c[(i + 1) * stride], c[(i + 2) * stride], c[(i + 3) * stride]];
        let (r0, rest) = rows[i * width..(i + 4) * width].split_at(width);
        let (r1, rest) = rest.split_at(width);
        let (r2, r3) = rest.split_at(width);
        for ((((y, r0), r1), r2), r3) in y.iter_mut().zip(r0).zip(r1).zip(r2).zip(r3) {
            *y = c3.mul_add(*r3, c2.mul_add(*r2, c1.mul_add(*r1, c0.mul_add(*r0, *y))));
        }
    }
    for i in fours..count {
        let c = c[i * stride];
        for (y, r) in y.iter_mut().zip(&rows[i * width..(i + 1) * width]) {
            *y = c.mul_add(*r, *y);
        }
    }
}

/// Rows of A that a product over keys takes at a time: few enough for the first-level cache.
const BLOCK: usize = 32;

/// w = (w +) phi A: what A associates with every token's features. phi is `[m, dk]`, A `[dk, d]`, w `[m, d]`.
/// `ahead`: as for products, of A.
pub(super) fn recall(all: &[f32], phi: &[f32], w: &mut [f32], [dk, d]: [usize; 2], add: bool, ahead: usize) {
    let m = w.len() / d;
    assert!(all.len() == dk * d && phi.len() == m * dk && w.len() == m * d);
    let w = w.as_mut_ptr();
    for (block, a) in all.chunks(BLOCK * d).enumerate() {
        let phi = Matrix { ptr: phi[block * BLOCK..].as_ptr(), row: dk, col: 1 };
        let base = (add || block > 0).then_some(w.cast_const());
        // SAFETY: the operands have the lengths asserted above, and w is borrowed exclusively.
        unsafe { multiply([m, d, a.len() / d], phi, a.as_ptr(), d, w, d, base, ahead) };
    }
}

/// Where a sum of outer products begins.
#[derive(Clone, Copy)]
pub(super) enum From<'a> {
    /// At zero.
    Nothing,
    /// At what is there.
    Itself,
    /// At another memory.
    Old(&'a [f32]),
}

/// A = (old +) sum_i phi_i (x) x_i. phi is `[m, dk]`, x `[m, d]`, A `[dk, d]`. `ahead`: as for products.
pub(super) fn add_outer(a: &mut [f32], from: From<'_>, phi: &[f32], x: &[f32], [dk, d]: [usize; 2], ahead: usize) {
    let m = x.len() / d;
    assert!(a.len() == dk * d && phi.len() == m * dk && x.len() == m * d);
    assert!(!matches!(from, From::Old(old) if old.len() != a.len()));
    let a = a.as_mut_ptr();
    let base = match from {
        From::Nothing => None,
        From::Itself => Some(a.cast_const()),
        From::Old(old) => Some(old.as_ptr()),
    };
    let phi = Matrix { ptr: phi.as_ptr(), row: 1, col: dk };
    // SAFETY: the operands have the lengths asserted above, and A is borrowed exclusively.
    unsafe { multiply([dk, d, m], phi, x.as_ptr(), d, a, d, base, ahead) };
}

/// Sizes of a write: memories, tokens, and the widths of raw keys and of values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteSizes {
    pub(crate) n: usize,
    pub(crate) m: usize,
    pub(crate) dm: usize,
    pub(crate) d: usize,
    pub(crate) nu: usize,
}

impl WriteSizes {
    pub(crate) fn dk(&self) -> usize {
        2 * self.nu * self.dm
    }
}

/// What a write reads beside the memory; all of it also needed to go back.
#[derive(Clone, Copy)]
pub(crate) struct WriteInputs<'a> {
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) beta: &'a [f32],
    pub(crate) z: &'a [f32],
    pub(crate) first: Option<&'a [i32]>,
    pub(crate) correction: bool,
    pub(crate) sizes: WriteSizes,
}

impl<'a> WriteInputs<'a> {
    /// The operands of memory n; `first` becomes part of `correction`.
    fn memory(&self, n: usize) -> WriteInputs<'a> {
        let WriteSizes { m, dm, d, .. } = self.sizes;
        let dk = self.sizes.dk();
        WriteInputs {
            k: &self.k[n * m * dm..][..m * dm],
            v: &self.v[n * m * d..][..m * d],
            beta: &self.beta[n * m..][..m],
            z: &self.z[n * dk..][..dk],
            first: None,
            correction: self.correction && self.first.is_none_or(|first| first[n] == 0),
            sizes: self.sizes,
        }
    }

    /// phi, den and gamma of every token of one memory.
    #[inline(always)]
    fn keys(&self, r: &mut [f32], phi: &mut [f32], den: &mut [f32], gamma: &mut [f32]) {
        let keys = self.k.chunks_exact(self.sizes.dm).zip(phi.chunks_exact_mut(self.sizes.dk()));
        for ((k, phi), (den, gamma)) in keys.zip(den.iter_mut().zip(gamma)) {
            features(k, r, phi);
            *den = dot(self.z, phi) + EPSILON;
            *gamma = if self.correction { (1.0 - *den / (dot(phi, phi) + EPSILON)).clamp(0.0, 1.0) } else { 1.0 };
        }
    }
}

/// A' = A + sum_i phi_i (x) x_i, from `old` or in place, and z' = z + sum_i gamma_i phi_i. The x_i go to `x` too, if it is given.
pub(crate) fn write(w: &WriteInputs<'_>, old: Option<&[f32]>, a: &mut [f32], z_new: &mut [f32], x: Option<&mut [f32]>) {
    let WriteSizes { n, m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    let kept: Vec<Option<&mut [f32]>> = match x {
        Some(x) => x.chunks_mut(m * d).map(Some).collect(),
        None => (0..n).map(|_| None).collect(),
    };
    let memories = a.par_chunks_mut(dk * d).zip(z_new.par_chunks_mut(dk)).zip(kept);
    memories.enumerate().for_each(|(n, ((a, z_new), kept))| {
        let w = w.memory(n);
        with_scratch([2 * dm, m * dk, m, m, m * d], |[r, phi, den, gamma, x]| {
            simd!(w.keys(r, phi, den, gamma));
            let old = old.map(|old| &old[n * dk * d..][..dk * d]);
            recall(old.unwrap_or(a), phi, x, [dk, d], false, dk * d);
            simd!({
                for (i, (x, v)) in x.chunks_exact_mut(d).zip(w.v.chunks_exact(d)).enumerate() {
                    let (b, scale) = (math::sigmoid(w.beta[i]), 1.0 / den[i]);
                    for (x, v) in x.iter_mut().zip(v) {
                        *x = b * (v - *x * scale);
                    }
                }
                z_new.copy_from_slice(w.z);
                add_rows(z_new, gamma, 1, phi);
            });
            add_outer(a, old.map_or(From::Itself, From::Old), phi, x, [dk, d], if old.is_some() { dk * d } else { 0 });
            if let Some(kept) = kept {
                kept.copy_from_slice(x);
            }
        });
    });
}

/// A -= sum_i phi_i (x) x_i in place; exactly nothing where the memory was empty.
pub(crate) fn undo(w: &WriteInputs<'_>, a: &mut [f32], x: &[f32]) {
    let WriteSizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    a.par_chunks_mut(dk * d).zip(x.par_chunks(m * d)).enumerate().for_each(|(n, (a, x))| {
        if w.first.is_some_and(|first| first[n] != 0) {
            a.fill(0.0);
            return;
        }
        let w = w.memory(n);
        with_scratch([2 * dm, m * dk], |[r, phi]| {
            simd!({
                for (k, phi) in w.k.chunks_exact(dm).zip(phi.chunks_exact_mut(dk)) {
                    features(k, r, phi);
                    phi.iter_mut().for_each(|p| *p = -*p);
                }
            });
            add_outer(a, From::Itself, phi, x, [dk, d], dk * d);
        });
    });
}

/// Where the gradients of a write go. `da` and `dz` hold G = dA' and h = dz', and become those of A and z.
pub(crate) struct WriteGradients<'a> {
    pub(crate) dk: &'a mut [f32],
    pub(crate) dv: &'a mut [f32],
    pub(crate) dbeta: &'a mut [f32],
    pub(crate) da: &'a mut [f32],
    pub(crate) dz: &'a mut [f32],
}

/// From G = dA' and h = dz' to the gradients of everything but gamma, which is detached.
pub(crate) fn write_backward(w: &WriteInputs<'_>, a: &[f32], out: WriteGradients<'_>) {
    let WriteSizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    let WriteGradients { dk: dkeys, dv: dvalues, dbeta, da, dz } = out;
    let tokens = dkeys.par_chunks_mut(m * dm).zip(dvalues.par_chunks_mut(m * d)).zip(dbeta.par_chunks_mut(m));
    let memories = da.par_chunks_mut(dk * d).zip(dz.par_chunks_mut(dk));
    tokens.zip(memories).enumerate().for_each(|(n, (((dkeys, dvalues), dbeta), (g, h)))| {
        let w = w.memory(n);
        let a = &a[n * dk * d..][..dk * d];
        let lengths = [2 * dm, 2 * dm, m * dk, m, m, m, m * d, m * d, m * dk];
        with_scratch(lengths, |[r, dr, phi, den, gamma, dden, dv, dw, dphi]| {
            simd!(w.keys(r, phi, den, gamma));
            // The next A and G are asked for by the two products that take longest.
            recall(a, phi, dv, [dk, d], false, 0); // w_i = A^T phi_i, for now
            recall(g, phi, dw, [dk, d], false, 0); // e_i = G^T phi_i, for now
            simd!({
                for i in 0..m {
                    let (b, scale) = (math::sigmoid(w.beta[i]), 1.0 / den[i]);
                    let row = i * d..(i + 1) * d;
                    let (v, dv, dw, dvalue) = (&w.v[row.clone()], &mut dv[row.clone()], &mut dw[row.clone()], &mut dvalues[row]);
                    let e_w = dot(dw, dv);
                    let e_u = dot(dw, v) - e_w * scale;
                    dbeta[i] = e_u * b * (1.0 - b);
                    dden[i] = b * e_w * scale * scale;
                    for (((v, dv), dw), dvalue) in v.iter().zip(dv).zip(dw).zip(dvalue) {
                        *dv = b * (v - *dv * scale);
                        *dvalue = b * *dw;
                        *dw *= -b * scale;
                    }
                }
            });
            dots([Pair { rows: g, others: dv, ahead: 0 }, Pair { rows: a, others: dw, ahead: dk * d }], d, dphi);
            add_outer(g, From::Itself, phi, dw, [dk, d], dk * d);
            simd!({
                for (i, dphi) in dphi.chunks_exact_mut(dk).enumerate() {
                    for ((dphi, h), z) in dphi.iter_mut().zip(&*h).zip(w.z) {
                        *dphi += gamma[i] * h + dden[i] * z;
                    }
                    features_backward(&w.k[i * dm..][..dm], dphi, r, dr, &mut dkeys[i * dm..][..dm]);
                }
                add_rows(h, dden, 1, phi);
            });
        });
    });
}
