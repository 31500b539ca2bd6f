//! The projected write of one memory on the CPU: S = Phi A, then each token's x_i from those before it, then A' = A + Phi^T X. Its formulas
//! are in `ops/memory/projected.rs`; its undoing is the paper's, since both add Phi^T X.

use super::dpfp::{features, features_backward};
use super::write::{WriteGradients, WriteInputs, Written};
use super::{From, add_outer, add_rows, dot, recall, with_scratch};
use crate::cpu::math;
use crate::cpu::small_product::{Pair, dots};
use crate::ops::memory::{EPSILON, MemorySizes};

/// What tokens have before the memory is asked: `[m, dk]`, `[m]`, `[m]` and `[m, m]`, of which what is below the diagonal counts.
struct Keys<'a> {
    phi: &'a mut [f32],
    n: &'a mut [f32],
    gamma: &'a mut [f32],
    near: &'a mut [f32],
}

impl Keys<'_> {
    /// Of all tokens. `r` is scratch of 2 dm.
    #[inline(always)]
    fn fill(&mut self, w: &WriteInputs<'_>, r: &mut [f32]) {
        let MemorySizes { m, dm, .. } = w.sizes;
        let dk = w.sizes.dk();
        for (i, k) in w.k.chunks_exact(dm).enumerate() {
            let (before, phi) = self.phi.split_at_mut(i * dk);
            let phi = &mut phi[..dk];
            features(k, r, phi);
            self.n[i] = dot(phi, phi) + EPSILON;
            let mut met = dot(w.z, phi) + EPSILON;
            for (j, earlier) in before.chunks_exact(dk).enumerate() {
                let near = dot(phi, earlier);
                self.near[i * m + j] = near;
                met += self.gamma[j] * near;
            }
            let corrected = w.correction && !(w.was_empty() && i == 0);
            self.gamma[i] = if corrected { (1.0 - met / self.n[i]).clamp(0.0, 1.0) } else { 1.0 };
        }
    }

    /// Turns S = Phi A in `x` into X, and leaves w_i = A_{i-1}^T phi_i in `met` if it is given.
    #[inline(always)]
    fn take_turns(&self, w: &WriteInputs<'_>, x: &mut [f32], mut met: Option<&mut [f32]>) {
        let MemorySizes { m, d, .. } = w.sizes;
        for (i, v) in w.v.chunks_exact(d).enumerate() {
            let (before, x) = x.split_at_mut(i * d);
            let x = &mut x[..d];
            add_rows(x, &self.near[i * m..], 1, before);
            if let Some(met) = &mut met {
                met[i * d..(i + 1) * d].copy_from_slice(x);
            }
            let (b, scale) = (math::sigmoid(w.beta[i]), 1.0 / self.n[i]);
            for (x, v) in x.iter_mut().zip(v) {
                *x = b * (v - *x * scale);
            }
        }
    }
}

/// A' from `old` or in place, and z'.
pub(super) fn write(w: &WriteInputs<'_>, old: Option<&[f32]>, new: Written<'_>) {
    let MemorySizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    with_scratch([2 * dm, m * dk, m, m, m * m, m * d], |[r, phi, n, gamma, near, x]| {
        let mut keys = Keys { phi, n, gamma, near };
        simd!(keys.fill(w, r));
        recall(old.unwrap_or(new.a), keys.phi, x, [dk, d], false, dk * d);
        simd!(keys.take_turns(w, x, None));
        new.put(w, old, keys.phi, keys.gamma, x);
    });
}

/// From dA' and dz' to the gradients of everything but gamma. dz is dz', and so stays.
pub(super) fn write_backward(w: &WriteInputs<'_>, a: &[f32], out: WriteGradients<'_>) {
    let MemorySizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    let WriteGradients { dk: dkeys, dv: dvalues, dbeta, da: g, dz: h } = out;
    let lengths = [2 * dm, 2 * dm, m * dk, m, m, m * m, m * d, m * d, m * d, m * dk, m * m];
    with_scratch(lengths, |[r, dr, phi, n, gamma, near, x, met, dw, dphi, shares]| {
        let mut keys = Keys { phi, n, gamma, near };
        simd!(keys.fill(w, r));
        recall(a, keys.phi, x, [dk, d], false, 0); // S
        recall(g, keys.phi, dw, [dk, d], false, 0); // E
        simd!({
            keys.take_turns(w, x, Some(met));
            shares.fill(0.0);
            // From the last token to the first: e_i = E_i + sum_{k>i} G_ki dw_k, dw_i = -(b_i / n_i) e_i.
            for i in (0..m).rev() {
                let (b, scale) = (math::sigmoid(w.beta[i]), 1.0 / keys.n[i]);
                let (dw, later) = dw[i * d..].split_at_mut(d);
                add_rows(dw, &keys.near[((i + 1) * m + i).min(m * m)..], m, later);
                let (v, met) = (&w.v[i * d..][..d], &met[i * d..][..d]);
                let e_met = dot(dw, met);
                dbeta[i] = (dot(dw, v) - e_met * scale) * b * (1.0 - b);
                shares[i * m + i] = 2.0 * b * e_met * scale * scale; // 2 dn_i
                for (dw, dvalue) in dw.iter_mut().zip(&mut dvalues[i * d..][..d]) {
                    *dvalue = b * *dw;
                    *dw *= -b * scale;
                }
                // dG_ij = dw_i . x_j, for phi_i and for phi_j.
                for (j, x) in x.chunks_exact(d).take(i).enumerate() {
                    let share = dot(dw, x);
                    (shares[i * m + j], shares[j * m + i]) = (share, share);
                }
            }
        });
        dots([Pair { rows: g, others: x, ahead: 0 }, Pair { rows: a, others: dw, ahead: dk * d }], d, dphi);
        add_outer(g, From::Itself, keys.phi, dw, [dk, d], dk * d);
        simd!({
            for (i, dphi) in dphi.chunks_exact_mut(dk).enumerate() {
                add_rows(dphi, &shares[i * m..], 1, keys.phi);
                for (dphi, h) in dphi.iter_mut().zip(&*h) {
                    *dphi += keys.gamma[i] * h;
                }
                features_backward(&w.k[i * dm..][..dm], dphi, r, dr, &mut dkeys[i * dm..][..dm]);
            }
        });
    });
}
