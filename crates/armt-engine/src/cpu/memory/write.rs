//! Writes to the associative memory on the CPU.
//!
//! One memory (n) is one task: it is read from main memory once, and the products that follow find it in the cache.

use rayon::prelude::*;

use super::dpfp::{features, features_backward};
use super::{From, add_outer, add_rows, dot, recall, with_scratch};
use crate::cpu::math;
use crate::cpu::small_product::{Pair, dots};
use crate::ops::memory::{EPSILON, MemorySizes};

/// What a write reads beside the memory; all of it also needed to go back.
#[derive(Clone, Copy)]
pub(crate) struct WriteInputs<'a> {
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) beta: &'a [f32],
    pub(crate) z: &'a [f32],
    pub(crate) first: Option<&'a [i32]>,
    pub(crate) correction: bool,
    pub(crate) sizes: MemorySizes,
}

impl<'a> WriteInputs<'a> {
    /// Whether memory n was empty.
    pub(super) fn is_first(&self, n: usize) -> bool {
        self.first.is_some_and(|first| first[n] != 0)
    }

    /// The operands of memory n; `first` becomes part of `correction`.
    pub(super) fn memory(&self, n: usize) -> WriteInputs<'a> {
        let MemorySizes { m, dm, d, .. } = self.sizes;
        let dk = self.sizes.dk();
        WriteInputs {
            k: &self.k[n * m * dm..][..m * dm],
            v: &self.v[n * m * d..][..m * d],
            beta: &self.beta[n * m..][..m],
            z: &self.z[n * dk..][..dk],
            first: None,
            correction: self.correction && !self.is_first(n),
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
    let MemorySizes { n, m, dm, d, .. } = w.sizes;
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
    let MemorySizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    a.par_chunks_mut(dk * d).zip(x.par_chunks(m * d)).enumerate().for_each(|(n, (a, x))| {
        if w.is_first(n) {
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
    let MemorySizes { m, dm, d, .. } = w.sizes;
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
