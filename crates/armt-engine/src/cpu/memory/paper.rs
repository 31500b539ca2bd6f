//! The paper's write of one memory on the CPU: all tokens against the old memory. Its formulas are in `ops/memory/write.rs`.

use super::dpfp::{features, features_backward};
use super::write::{WriteGradients, WriteInputs, Written};
use super::{From, add_outer, add_rows, dot, recall, with_scratch};
use crate::cpu::math;
use crate::cpu::small_product::{Pair, dots};
use crate::ops::memory::{EPSILON, MemorySizes};

/// phi, den and gamma of every token. `r` is scratch of 2 dm.
#[inline(always)]
fn keys(w: &WriteInputs<'_>, r: &mut [f32], phi: &mut [f32], den: &mut [f32], gamma: &mut [f32]) {
    let corrected = w.correction && !w.was_empty();
    let keys = w.k.chunks_exact(w.sizes.dm).zip(phi.chunks_exact_mut(w.sizes.dk()));
    for ((k, phi), (den, gamma)) in keys.zip(den.iter_mut().zip(gamma)) {
        features(k, r, phi);
        *den = dot(w.z, phi) + EPSILON;
        *gamma = if corrected { (1.0 - *den / (dot(phi, phi) + EPSILON)).clamp(0.0, 1.0) } else { 1.0 };
    }
}

/// A' from `old` or in place, and z'.
pub(super) fn write(w: &WriteInputs<'_>, old: Option<&[f32]>, new: Written<'_>) {
    let MemorySizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    with_scratch([2 * dm, m * dk, m, m, m * d], |[r, phi, den, gamma, x]| {
        simd!(keys(w, r, phi, den, gamma));
        recall(old.unwrap_or(new.a), phi, x, [dk, d], false, dk * d);
        simd!({
            for (i, (x, v)) in x.chunks_exact_mut(d).zip(w.v.chunks_exact(d)).enumerate() {
                let (b, scale) = (math::sigmoid(w.beta[i]), 1.0 / den[i]);
                for (x, v) in x.iter_mut().zip(v) {
                    *x = b * (v - *x * scale);
                }
            }
        });
        new.put(w, old, phi, gamma, x);
    });
}

/// From G = dA' and h = dz' to the gradients of everything but gamma.
pub(super) fn write_backward(w: &WriteInputs<'_>, a: &[f32], out: WriteGradients<'_>) {
    let MemorySizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    let WriteGradients { dk: dkeys, dv: dvalues, dbeta, da: g, dz: h } = out;
    let lengths = [2 * dm, 2 * dm, m * dk, m, m, m, m * d, m * d, m * dk];
    with_scratch(lengths, |[r, dr, phi, den, gamma, dden, dv, dw, dphi]| {
        simd!(keys(w, r, phi, den, gamma));
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
}
