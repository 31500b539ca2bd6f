//! Reads of the associative memory on the CPU: y_t = A^T qn_t (+ residual_t), qn_t = phi(q_t) / (z . phi(q_t) + eps).
//!
//! Many queries of a memory are features here and a product elsewhere. For a few queries of each of many memories one task does all of a
//! memory: A comes from main memory once, and on the way back its gradient too, while the products as such would each pass over both.
//!
//! Backward: dqn_t = A dy_t, dA += sum_t qn_t (x) dy_t, dden_t = -(dqn_t . qn_t) / den_t, dphi_t = dqn_t / den_t + dden_t z gives dq_t, and
//! dz += sum_t dden_t phi_t.

use rayon::prelude::*;

use super::dpfp::{features, features_backward};
use super::{From, add_outer, dot, recall, with_scratch};
use crate::cpu::par_rows;
use crate::cpu::small_product::{Pair, dots};
use crate::ops::memory::{EPSILON, MemorySizes};

/// qn of one query.
#[inline(always)]
fn normalised(q: &[f32], z: &[f32], r: &mut [f32], qn: &mut [f32]) {
    features(q, r, qn);
    let scale = 1.0 / (dot(z, qn) + EPSILON);
    qn.iter_mut().for_each(|x| *x *= scale);
}

/// qn of every query.
pub(crate) fn read_features(q: &[f32], z: &[f32], qn: &mut [f32], s: MemorySizes) {
    let (dm, dk) = (s.dm, s.dk());
    par_rows(qn, dk, 4 * dk, |first, qn| {
        with_scratch([2 * dm], |[r]| {
            simd!({
                for (i, (qn, q)) in qn.chunks_exact_mut(dk).zip(q[first * dm..].chunks_exact(dm)).enumerate() {
                    normalised(q, &z[(first + i) / s.m * dk..][..dk], r, qn);
                }
            });
        });
    });
}

/// y = A^T qn (+ residual), a memory at a time.
pub(crate) fn read_few(q: &[f32], a: &[f32], z: &[f32], residual: Option<&[f32]>, y: &mut [f32], s: MemorySizes) {
    let MemorySizes { m: t, dm, d, .. } = s;
    let dk = s.dk();
    y.par_chunks_mut(t * d).enumerate().for_each(|(n, y)| {
        let (q, z) = (&q[n * t * dm..][..t * dm], &z[n * dk..][..dk]);
        with_scratch([2 * dm, t * dk], |[r, qn]| {
            simd!({
                for (qn, q) in qn.chunks_exact_mut(dk).zip(q.chunks_exact(dm)) {
                    normalised(q, z, r, qn);
                }
            });
            if let Some(residual) = residual {
                y.copy_from_slice(&residual[n * t * d..][..t * d]);
            }
            recall(&a[n * dk * d..][..dk * d], qn, y, [dk, d], residual.is_some(), dk * d);
        });
    });
}

/// From dqn of one memory: dq, and dz += sum_t dden_t phi_t. `r`, `dr`, `phi` and `dphi` are scratch of 2 dm and dk.
#[inline(always)]
fn queries_backward((q, z, dqn): (&[f32], &[f32], &[f32]), dq: &mut [f32], dz: &mut [f32], dm: usize, scratch: [&mut [f32]; 4]) {
    let [r, dr, phi, dphi] = scratch;
    for ((dq, q), dqn) in dq.chunks_exact_mut(dm).zip(q.chunks_exact(dm)).zip(dqn.chunks_exact(z.len())) {
        features(q, r, phi);
        let den = dot(z, phi) + EPSILON;
        let dden = -dot(dqn, phi) / (den * den);
        for ((((dphi, dqn), z), phi), dz) in dphi.iter_mut().zip(dqn).zip(z).zip(&*phi).zip(dz.iter_mut()) {
            *dphi = dqn / den + dden * z;
            *dz += dden * phi;
        }
        features_backward(q, dphi, r, dr, dq);
    }
}

/// From dqn: dq, and dz (+)= sum_t dden_t phi_t.
pub(crate) fn read_backward(q: &[f32], z: &[f32], dqn: &[f32], dq: &mut [f32], (dz, add): (&mut [f32], bool), s: MemorySizes) {
    let (t, dm, dk) = (s.m, s.dm, s.dk());
    dq.par_chunks_mut(t * dm).zip(dz.par_chunks_mut(dk)).enumerate().for_each(|(n, (dq, dz))| {
        let operands = (&q[n * t * dm..][..t * dm], &z[n * dk..][..dk], &dqn[n * t * dk..][..t * dk]);
        if !add {
            dz.fill(0.0);
        }
        with_scratch([2 * dm, 2 * dm, dk, dk], |scratch| simd!(queries_backward(operands, dq, dz, dm, scratch)));
    });
}

/// A gradient to be written to, and whether to add to what is there.
pub(crate) type Gradient<'a> = (&'a mut [f32], bool);

/// The whole way back from dy, a memory at a time: dq, dz and, if wanted, dA.
pub(crate) fn read_few_backward(
    (q, a, z, dy): (&[f32], &[f32], &[f32], &[f32]),
    dq: &mut [f32],
    (dz, add_z): Gradient<'_>,
    da: Option<Gradient<'_>>,
    s: MemorySizes,
) {
    let MemorySizes { m: t, dm, d, .. } = s;
    let dk = s.dk();
    let (da, add_a) = da.map_or((None, false), |(da, add)| (Some(da), add));
    let das: Vec<Option<&mut [f32]>> = match da {
        Some(da) => da.chunks_mut(dk * d).map(Some).collect(),
        None => (0..a.len() / (dk * d)).map(|_| None).collect(),
    };
    let memories = dq.par_chunks_mut(t * dm).zip(dz.par_chunks_mut(dk)).zip(das);
    memories.enumerate().for_each(|(n, ((dq, dz), da))| {
        let (q, z, dy) = (&q[n * t * dm..][..t * dm], &z[n * dk..][..dk], &dy[n * t * d..][..t * d]);
        if !add_z {
            dz.fill(0.0);
        }
        with_scratch([2 * dm, 2 * dm, dk, dk, t * dk], |[r, dr, phi, dphi, qn]| {
            if let Some(da) = da {
                simd!({
                    for (qn, q) in qn.chunks_exact_mut(dk).zip(q.chunks_exact(dm)) {
                        normalised(q, z, r, qn);
                    }
                });
                add_outer(da, if add_a { From::Itself } else { From::Nothing }, qn, dy, [dk, d], dk * d);
            }
            let dqn = qn;
            dots([Pair { rows: &a[n * dk * d..][..dk * d], others: dy, ahead: dk * d }], d, dqn);
            simd!(queries_backward((q, z, dqn), dq, dz, dm, [r, dr, phi, dphi]));
        });
    });
}
