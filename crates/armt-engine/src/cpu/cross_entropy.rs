//! Rows of logits: log-sum-exp, gradient, index of the largest.

use super::{math, par_rows};

/// The largest of a slice, in sixteen interleaved parts. NaN is passed over.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let more = |a: f32, b: f32| if b > a { b } else { a };
    let mut parts = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (part, x) in parts.iter_mut().zip(chunk) {
            *part = more(*part, *x);
        }
    }
    parts.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| more(a, b))
}

/// log sum e^x = m + log sum e^(x - m), m the largest, the sum in sixteen interleaved parts.
#[inline(always)]
fn log_sum_exp(x: &[f32]) -> f32 {
    let m = largest(x);
    let mut parts = [0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (part, x) in parts.iter_mut().zip(chunk) {
            *part += math::exp(x - m);
        }
    }
    let sum = math::total(parts) + rest.iter().map(|x| math::exp(x - m)).sum::<f32>();
    m + sum.ln()
}

/// lse[r] of rows of `classes`; 0 for rows without a target, which are not looked at.
pub(crate) fn row_log_sums(logits: &[f32], targets: &[i32], lse: &mut [f32], classes: usize) {
    par_rows(lse, 1, 4 * classes, |first, lse| {
        for (i, lse) in lse.iter_mut().enumerate() {
            let row = &logits[(first + i) * classes..][..classes];
            *lse = if targets[first + i] < 0 { 0.0 } else { simd!(log_sum_exp(row)) };
        }
    });
}

/// losses[r] = lse[r] - logits[r, target]; 0 for rows without a target.
pub(crate) fn row_losses(logits: &[f32], targets: &[i32], lse: &[f32], losses: &mut [f32], classes: usize) {
    for (i, ((loss, lse), &target)) in losses.iter_mut().zip(lse).zip(targets).enumerate() {
        *loss = usize::try_from(target).map_or(0.0, |target| lse - logits[i * classes + target]);
    }
}

/// The mean of the losses of rows with a target, and one over their number; zeros where there is none.
pub(crate) fn mean_loss(losses: &[f32], targets: &[i32]) -> (f32, f32) {
    let count = targets.iter().filter(|&&t| t >= 0).count();
    if count == 0 {
        return (0.0, 0.0);
    }
    let sum: f64 = losses.iter().map(|&x| f64::from(x)).sum();
    ((sum / count as f64) as f32, (1.0 / count as f64) as f32)
}

/// dx = (softmax(x) - onehot(target)) * scale, over `logits`, or in place where there are none.
pub(crate) fn gradient(logits: Option<&[f32]>, targets: &[i32], lse: &[f32], scale: f32, dx: &mut [f32], classes: usize) {
    par_rows(dx, classes, 4 * classes, |first, dx| {
        for (i, dx) in dx.chunks_exact_mut(classes).enumerate() {
            let row = first + i;
            let Ok(target) = usize::try_from(targets[row]) else {
                dx.fill(0.0);
                continue;
            };
            if let Some(logits) = logits {
                dx.copy_from_slice(&logits[row * classes..][..classes]);
            }
            let lse = lse[row];
            simd!(dx.iter_mut().for_each(|x| *x = math::exp(*x - lse) * scale));
            dx[target] -= scale;
        }
    });
}

/// y[r] = index of the largest of row r, the first among equals; 0 if all are NaN.
pub(crate) fn argmax(x: &[f32], y: &mut [i32], length: usize) {
    par_rows(y, 1, length, |first, y| {
        for (i, y) in y.iter_mut().enumerate() {
            let row = &x[(first + i) * length..][..length];
            let m = simd!(largest(row));
            *y = row.iter().position(|&x| x == m).unwrap_or(0) as i32;
        }
    });
}
