//! Softmax over rows of d.

use super::reduce::sum;
use super::{math, par_rows};

/// y = e^(x - max) / sum.
pub(crate) fn forward(x: &[f32], y: &mut [f32], d: usize) {
    par_rows(y, d, 12 * d, |first, y| {
        let x = &x[first * d..first * d + y.len()];
        simd!({
            for (y, x) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                let max = largest(x);
                for (y, x) in y.iter_mut().zip(x) {
                    *y = math::exp(x - max);
                }
                let scale = 1.0 / sum(y);
                for y in y {
                    *y *= scale;
                }
            }
        });
    });
}

/// dx = y (dy - sum(dy y)).
pub(crate) fn backward(y: &[f32], dy: &[f32], dx: &mut [f32], d: usize) {
    par_rows(dx, d, 4 * d, |first, dx| {
        let (y, dy) = (&y[first * d..first * d + dx.len()], &dy[first * d..first * d + dx.len()]);
        simd!({
            for (dx, (y, dy)) in dx.chunks_exact_mut(d).zip(y.chunks_exact(d).zip(dy.chunks_exact(d))) {
                for (dx, (y, dy)) in dx.iter_mut().zip(y.iter().zip(dy)) {
                    *dx = y * dy;
                }
                let along = sum(dx);
                for (dx, y) in dx.iter_mut().zip(y) {
                    *dx = y.mul_add(-along, *dx);
                }
            }
        });
    });
}

/// The largest element. NaN is passed over here and comes back through the exponential.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let mut parts = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (part, x) in parts.iter_mut().zip(chunk) {
            *part = if *x > *part { *x } else { *part };
        }
    }
    parts.iter().chain(rest).fold(f32::NEG_INFINITY, |max, x| if *x > max { *x } else { max })
}
