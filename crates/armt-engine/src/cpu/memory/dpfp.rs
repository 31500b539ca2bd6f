//! DPFP on the CPU: phi = [r * roll(r, 1), .., r * roll(r, nu)] with r = relu([x, -x]).

use super::with_scratch;
use crate::cpu::par_rows;

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
pub(super) fn features(x: &[f32], r: &mut [f32], phi: &mut [f32]) {
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
pub(super) fn features_backward(x: &[f32], dphi: &[f32], r: &mut [f32], dr: &mut [f32], dx: &mut [f32]) {
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
