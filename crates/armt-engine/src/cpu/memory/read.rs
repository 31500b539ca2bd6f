//! Reads of the associative memory on the CPU: y_t = A^T qn_t (+ residual_t), qn_t = phi(q_t) / (z . phi(q_t) + eps).
//!
//! Many queries of a memory are features here and a product elsewhere. For a few queries of each of many memories one task does all of a
//! memory ([`FewQueries`]): A comes from main memory once, and on the way back its gradient too, while the products as such would each pass
//! over both.
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

/// What a read of few queries takes beside A.
#[derive(Clone, Copy)]
pub(crate) struct FewQueries<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) z: &'a [f32],
    pub(crate) sizes: MemorySizes,
}

impl<'a> FewQueries<'a> {
    /// Those of memory n.
    pub(super) fn memory(&self, n: usize) -> FewQueries<'a> {
        let (queries, dk) = (self.sizes.m * self.sizes.dm, self.sizes.dk());
        FewQueries { q: &self.q[n * queries..][..queries], z: &self.z[n * dk..][..dk], sizes: self.sizes }
    }

    /// qn of every query of one memory. `r` is scratch of 2 dm.
    #[inline(always)]
    fn features(&self, r: &mut [f32], qn: &mut [f32]) {
        for (qn, q) in qn.chunks_exact_mut(self.sizes.dk()).zip(self.q.chunks_exact(self.sizes.dm)) {
            normalised(q, self.z, r, qn);
        }
    }

    /// y = A^T qn (+ residual) of one memory. `ahead`: as for products, of A.
    pub(super) fn read(&self, a: &[f32], residual: Option<&[f32]>, y: &mut [f32], ahead: usize) {
        let MemorySizes { m: t, dm, d, .. } = self.sizes;
        let dk = self.sizes.dk();
        with_scratch([2 * dm, t * dk], |[r, qn]| {
            simd!(self.features(r, qn));
            if let Some(residual) = residual {
                y.copy_from_slice(residual);
            }
            recall(a, qn, y, [dk, d], residual.is_some(), ahead);
        });
    }

    /// From dy of one memory: dq, dz += sum_t dden_t phi_t and, if wanted, dA. `ahead`: as for products, of A and dA.
    pub(super) fn read_backward(
        &self,
        a: &[f32],
        dy: &[f32],
        dq: &mut [f32],
        dz: &mut [f32],
        da: Option<Gradient<'_>>,
        ahead: usize,
    ) {
        let MemorySizes { m: t, dm, d, .. } = self.sizes;
        let dk = self.sizes.dk();
        with_scratch([2 * dm, 2 * dm, dk, dk, t * dk], |[r, dr, phi, dphi, qn]| {
            if let Some((da, add)) = da {
                simd!(self.features(r, qn));
                add_outer(da, if add { From::Itself } else { From::Nothing }, qn, dy, [dk, d], ahead);
            }
            let dqn = qn;
            dots([Pair { rows: a, others: dy, ahead }], d, dqn);
            simd!(queries_backward((self.q, self.z, dqn), dq, dz, dm, [r, dr, phi, dphi]));
        });
    }
}

/// y = A^T qn (+ residual), a memory at a time.
pub(crate) fn read_few(asked: &FewQueries<'_>, a: &[f32], residual: Option<&[f32]>, y: &mut [f32]) {
    let (values, memory) = (asked.sizes.m * asked.sizes.d, asked.sizes.dk() * asked.sizes.d);
    y.par_chunks_mut(values).zip(a.par_chunks(memory)).enumerate().for_each(|(n, (y, a))| {
        asked.memory(n).read(a, residual.map(|residual| &residual[n * values..][..values]), y, memory);
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
    asked: &FewQueries<'_>,
    a: &[f32],
    dy: &[f32],
    dq: &mut [f32],
    (dz, add_z): Gradient<'_>,
    da: Option<Gradient<'_>>,
) {
    let MemorySizes { m: t, dm, d, .. } = asked.sizes;
    let dk = asked.sizes.dk();
    let das: Vec<Option<Gradient<'_>>> = match da {
        Some((da, add)) => da.chunks_mut(dk * d).map(|da| Some((da, add))).collect(),
        None => (0..a.len() / (dk * d)).map(|_| None).collect(),
    };
    let memories =
        a.par_chunks(dk * d).zip(dy.par_chunks(t * d)).zip(dq.par_chunks_mut(t * dm)).zip(dz.par_chunks_mut(dk)).zip(das);
    memories.enumerate().for_each(|(n, ((((a, dy), dq), dz), da))| {
        if !add_z {
            dz.fill(0.0);
        }
        asked.memory(n).read_backward(a, dy, dq, dz, da, dk * d);
    });
}
