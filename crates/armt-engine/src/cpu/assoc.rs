//! The associative memory on the CPU: loops over the d values of a row of A, which is contiguous, for several tokens at a time.
//!
//! One memory (n) is one task. Rows of A are taken four at a time for sums over keys, and tokens four at a time for sums over tokens,
//! so that a partial sum is loaded and stored once for four products. Scratch is kept by each thread.

use std::cell::RefCell;

use rayon::prelude::*;

use super::{math, par_rows};

/// Added to z . phi and to |phi|^2, as the published code does.
pub(crate) const EPSILON: f32 = 1e-5;

/// Independent partial sums of a dot product: two of the widest vectors.
const LANES: usize = 32;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with pieces of the given lengths of this thread's scratch, whose values are whatever was there. `f` must not hand work to
/// other threads: a stolen task would want the same scratch.
fn with_scratch<const K: usize, R>(lengths: [usize; K], f: impl FnOnce([&mut [f32]; K]) -> R) -> R {
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
fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let rest = add_products(&mut sums, x, y);
    math::total_32(sums) + rest
}

/// x . y + u . v with one sum over the lanes.
#[inline(always)]
fn two_dots((x, y): (&[f32], &[f32]), (u, v): (&[f32], &[f32])) -> f32 {
    let mut sums = [0f32; LANES];
    let rest = add_products(&mut sums, x, y) + add_products(&mut sums, u, v);
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

/// w[i] = A^T phi[i] for every token i; rows of A stay in the cache for all tokens.
#[inline(always)]
fn recall(a: &[f32], phi: &[f32], w: &mut [f32], dk: usize, d: usize) {
    w.fill(0.0);
    for (block, rows) in a.chunks(4 * d).enumerate() {
        for (w, phi) in w.chunks_exact_mut(d).zip(phi.chunks_exact(dk)) {
            add_rows(w, &phi[4 * block..], 1, rows);
        }
    }
}

/// r = relu([x, -x]).
#[inline(always)]
fn rectify(x: &[f32], r: &mut [f32]) {
    let (plus, minus) = r.split_at_mut(x.len());
    for ((p, m), x) in plus.iter_mut().zip(minus).zip(x) {
        (*p, *m) = (x.max(0.0), (-x).max(0.0));
    }
}

/// phi = DPFP(x): block j is r * roll(r, j). `r` is scratch of 2 dm.
#[inline(always)]
fn features(x: &[f32], r: &mut [f32], phi: &mut [f32]) {
    rectify(x, r);
    let width = r.len();
    for (block, phi) in phi.chunks_exact_mut(width).enumerate() {
        let j = block + 1;
        for (c, phi) in phi[..j].iter_mut().enumerate() {
            *phi = r[c] * r[width - j + c];
        }
        for ((phi, r), rolled) in phi[j..].iter_mut().zip(&r[j..]).zip(&r[..width - j]) {
            *phi = r * rolled;
        }
    }
}

/// dx of DPFP at x. `r` and `dr` are scratch of 2 dm.
#[inline(always)]
fn features_backward(x: &[f32], dphi: &[f32], r: &mut [f32], dr: &mut [f32], dx: &mut [f32]) {
    rectify(x, r);
    let width = r.len();
    dr.fill(0.0);
    for (block, dphi) in dphi.chunks_exact(width).enumerate() {
        let j = block + 1;
        for c in 0..j {
            dr[c] += dphi[c] * r[width - j + c];
            dr[width - j + c] += dphi[c] * r[c];
        }
        for ((dr, dphi), rolled) in dr[j..].iter_mut().zip(&dphi[j..]).zip(&r[..width - j]) {
            *dr += dphi * rolled;
        }
        for ((dr, dphi), r) in dr[..width - j].iter_mut().zip(&dphi[j..]).zip(&r[j..]) {
            *dr += dphi * r;
        }
    }
    let (plus, minus) = dr.split_at(x.len());
    for (((dx, x), p), m) in dx.iter_mut().zip(x).zip(plus).zip(minus) {
        *dx = if *x > 0.0 { *p } else { 0.0 } - if *x < 0.0 { *m } else { 0.0 };
    }
}

/// DPFP of every row of `dm`.
pub(crate) fn dpfp(x: &[f32], phi: &mut [f32], dm: usize, nu: usize) {
    let dk = 2 * nu * dm;
    par_rows(phi, dk, 2 * dk, |first, phi| {
        with_scratch([2 * dm], |[r]| {
            simd!({
                for (phi, x) in phi.chunks_exact_mut(dk).zip(x[first * dm..].chunks_exact(dm)) {
                    features(x, r, phi);
                }
            });
        });
    });
}

/// Gradient of [`dpfp`].
pub(crate) fn dpfp_backward(x: &[f32], dphi: &[f32], dx: &mut [f32], dm: usize, nu: usize) {
    let dk = 2 * nu * dm;
    par_rows(dx, dm, 4 * dk, |first, dx| {
        let rows = dx.chunks_exact_mut(dm).zip(x[first * dm..].chunks_exact(dm)).zip(dphi[first * dk..].chunks_exact(dk));
        with_scratch([2 * dm, 2 * dm], |[r, dr]| {
            simd!({
                for ((dx, x), dphi) in rows {
                    features_backward(x, dphi, r, dr, dx);
                }
            });
        });
    });
}

/// qn = phi(q) / (z . phi(q) + eps) for every query; `t` queries share a z.
pub(crate) fn read_features(q: &[f32], z: &[f32], qn: &mut [f32], t: usize, dm: usize, nu: usize) {
    let dk = 2 * nu * dm;
    par_rows(qn, dk, 4 * dk, |first, qn| {
        with_scratch([2 * dm], |[r]| {
            simd!({
                for (i, (qn, q)) in qn.chunks_exact_mut(dk).zip(q[first * dm..].chunks_exact(dm)).enumerate() {
                    features(q, r, qn);
                    let scale = 1.0 / (dot(&z[(first + i) / t * dk..][..dk], qn) + EPSILON);
                    qn.iter_mut().for_each(|x| *x *= scale);
                }
            });
        });
    });
}

/// From dqn: dq, and dz (+)= sum_t dden_t phi_t, with dden = -(dqn . qn) / den.
#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
pub(crate) fn read_backward(
    q: &[f32],
    z: &[f32],
    dqn: &[f32],
    dq: &mut [f32],
    dz: &mut [f32],
    accumulate: bool,
    t: usize,
    dm: usize,
    nu: usize,
) {
    let dk = 2 * nu * dm;
    dq.par_chunks_mut(t * dm).zip(dz.par_chunks_mut(dk)).enumerate().for_each(|(n, (dq, dz))| {
        let (q, z, dqn) = (&q[n * t * dm..][..t * dm], &z[n * dk..][..dk], &dqn[n * t * dk..][..t * dk]);
        with_scratch([2 * dm, 2 * dm, dk, dk], |[r, dr, phi, dphi]| {
            simd!({
                if !accumulate {
                    dz.fill(0.0);
                }
                for ((dq, q), dqn) in dq.chunks_exact_mut(dm).zip(q.chunks_exact(dm)).zip(dqn.chunks_exact(dk)) {
                    features(q, r, phi);
                    let den = dot(z, phi) + EPSILON;
                    let dden = -dot(dqn, phi) / (den * den);
                    for ((((dphi, dqn), z), phi), dz) in dphi.iter_mut().zip(dqn).zip(z).zip(&*phi).zip(dz.iter_mut()) {
                        *dphi = dqn / den + dden * z;
                        *dz += dden * phi;
                    }
                    features_backward(q, dphi, r, dr, dq);
                }
            });
        });
    });
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
            simd!({
                w.keys(r, phi, den, gamma);
                let old = old.map(|old| &old[n * dk * d..][..dk * d]);
                recall(old.unwrap_or(a), phi, x, dk, d);
                for (i, (x, v)) in x.chunks_exact_mut(d).zip(w.v.chunks_exact(d)).enumerate() {
                    let (b, scale) = (math::sigmoid(w.beta[i]), 1.0 / den[i]);
                    for (x, v) in x.iter_mut().zip(v) {
                        *x = b * (v - *x * scale);
                    }
                }
                for (f, a) in a.chunks_exact_mut(d).enumerate() {
                    if let Some(old) = old {
                        a.copy_from_slice(&old[f * d..][..d]);
                    }
                    add_rows(a, &phi[f..], dk, x);
                }
                z_new.copy_from_slice(w.z);
                add_rows(z_new, gamma, 1, phi);
                if let Some(kept) = kept {
                    kept.copy_from_slice(x);
                }
            });
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
                for (f, a) in a.chunks_exact_mut(d).enumerate() {
                    add_rows(a, &phi[f..], dk, x);
                }
            });
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
            simd!({
                w.keys(r, phi, den, gamma);
                recall(a, phi, dv, dk, d); // w_i = A^T phi_i, for now
                recall(g, phi, dw, dk, d); // e_i = G^T phi_i, for now
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
                // One pass over A and G, a row for all tokens, which then changes G's.
                for (f, (g, a)) in g.chunks_exact_mut(d).zip(a.chunks_exact(d)).enumerate() {
                    for (i, (dv, dw)) in dv.chunks_exact(d).zip(dw.chunks_exact(d)).enumerate() {
                        dphi[i * dk + f] = two_dots((g, dv), (a, dw)) + gamma[i] * h[f] + dden[i] * w.z[f];
                    }
                    add_rows(g, &phi[f..], dk, dw);
                }
                for (i, dphi) in dphi.chunks_exact(dk).enumerate() {
                    features_backward(&w.k[i * dm..][..dm], dphi, r, dr, &mut dkeys[i * dm..][..dm]);
                }
                add_rows(h, dden, 1, phi);
            });
        });
    });
}
