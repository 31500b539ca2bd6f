//! Layer norm and RMS norm over the rows of `[G, m, d]`, with gains and biases `[G, d]`.
//!
//! A row stays in the first-level cache, so it is passed over several times: mean, variance, result. Sums over a row run in 32
//! interleaved parts, which gives wide vectors independent chains of additions.

use rayon::prelude::*;

use super::{math, par_rows};
use crate::ops::norm::Norm;
use crate::paths;

const LANES: usize = 32;

#[inline(always)]
fn sum_of(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut parts = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (part, x) in parts.iter_mut().zip(chunk) {
            *part += f(*x);
        }
    }
    for (part, x) in parts.iter_mut().zip(rest) {
        *part += f(*x);
    }
    math::total_32(parts)
}

/// Mean (0 where it is not subtracted) and 1 / sqrt(variance + eps) of a row.
#[inline(always)]
fn statistics(x: &[f32], norm: Norm) -> (f32, f32) {
    let d = norm.d as f32;
    let mean = if norm.centred { sum_of(x, |x| x) / d } else { 0.0 };
    let variance = sum_of(x, |x| (x - mean) * (x - mean)) / d;
    (mean, 1.0 / (variance + norm.eps).sqrt())
}

/// y = (x - mean) / std * gain + bias.
pub(crate) fn forward(x: &[f32], gain: &[f32], bias: Option<&[f32]>, y: &mut [f32], norm: Norm) {
    let Norm { m, d, .. } = norm;
    par_rows(y, d, 4 * d, |first, y| {
        let x = &x[first * d..first * d + y.len()];
        simd!({
            for (i, (y, x)) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)).enumerate() {
                let at = (first + i) / m * d;
                let gain = &gain[at..at + d];
                let (mean, scale) = statistics(x, norm);
                match bias {
                    Some(bias) => {
                        for (((y, x), gain), bias) in y.iter_mut().zip(x).zip(gain).zip(&bias[at..at + d]) {
                            *y = ((x - mean) * scale).mul_add(*gain, *bias);
                        }
                    }
                    None => {
                        for ((y, x), gain) in y.iter_mut().zip(x).zip(gain) {
                            *y = (x - mean) * scale * gain;
                        }
                    }
                }
            }
        });
    });
}

/// Rows whose gain and bias gradients are summed together. It depends on the sizes alone, never on the number of threads, so that the
/// order of summation is always the same.
pub(crate) fn rows_per_sum(m: usize, d: usize) -> usize {
    (4096 / d).max(m.div_ceil(64)).max(1)
}

struct Piece<'a> {
    /// First row, counted over all groups.
    first: usize,
    dx: &'a mut [f32],
    dgain: &'a mut [f32],
    dbias: Option<&'a mut [f32]>,
}

/// dx = 1/std (a - mean(a) - xhat mean(a xhat)) with a = dy gain and xhat = (x - mean) / std; RMS norm has no mean(a).
/// With `add`, dx is added to what is there. The gradients of gain and bias, sum(dy xhat) and sum(dy), come as partial sums `[G, pieces, d]` over [`rows_per_sum`] rows.
pub(crate) fn backward(
    (x, gain, dy): (&[f32], &[f32], &[f32]),
    (dx, add): (&mut [f32], bool),
    dgain: &mut [f32],
    mut dbias: Option<&mut [f32]>,
    norm: Norm,
) {
    let Norm { m, d, .. } = norm;
    if dx.is_empty() {
        return;
    }
    let block = rows_per_sum(m, d);
    let pieces = m.div_ceil(block);
    let mut dbias = dbias.as_mut().map(|b| b.chunks_exact_mut(d));
    let mut tasks = Vec::with_capacity(dgain.len() / d);
    for (i, (dx, dgain)) in
        dx.chunks_exact_mut(m * d).flat_map(|g| g.chunks_mut(block * d)).zip(dgain.chunks_exact_mut(d)).enumerate()
    {
        let first = i / pieces * m + i % pieces * block;
        tasks.push(Piece { first, dx, dgain, dbias: dbias.as_mut().and_then(Iterator::next) });
    }
    let run = |piece: Piece<'_>| simd!(backward_piece((x, gain, dy), piece, add, norm));
    if paths::stays_on_one_thread(8 * x.len()) {
        tasks.into_iter().for_each(run);
    } else {
        tasks.into_par_iter().for_each(run);
    }
}

#[inline(always)]
fn backward_piece((x, gain, dy): (&[f32], &[f32], &[f32]), piece: Piece<'_>, add: bool, norm: Norm) {
    let Norm { m, d, .. } = norm;
    let Piece { first, dx, dgain, mut dbias } = piece;
    let gain = &gain[first / m * d..][..d];
    dgain.fill(0.0);
    if let Some(dbias) = dbias.as_deref_mut() {
        dbias.fill(0.0);
    }
    if !add {
        dx.fill(0.0);
    }
    let rows = x[first * d..].chunks_exact(d).zip(dy[first * d..].chunks_exact(d));
    for (dx, (x, dy)) in dx.chunks_exact_mut(d).zip(rows) {
        let (mean, scale) = statistics(x, norm);
        let (a, along) = projections(x, dy, gain, mean, scale);
        let a = if norm.centred { a / d as f32 } else { 0.0 };
        let along = along / d as f32;
        match dbias.as_deref_mut() {
            Some(dbias) => {
                for (((((dx, x), dy), gain), dgain), dbias) in
                    dx.iter_mut().zip(x).zip(dy).zip(gain).zip(dgain.iter_mut()).zip(dbias)
                {
                    let xhat = (x - mean) * scale;
                    // dy gain is rounded as it was in its mean, so that rows of one element give exactly zero.
                    *dx = scale.mul_add(xhat.mul_add(-along, dy * gain - a), *dx);
                    *dgain = dy.mul_add(xhat, *dgain);
                    *dbias += dy;
                }
            }
            None => {
                for ((((dx, x), dy), gain), dgain) in dx.iter_mut().zip(x).zip(dy).zip(gain).zip(dgain.iter_mut()) {
                    let xhat = x * scale;
                    *dx = scale.mul_add(xhat.mul_add(-along, dy * gain), *dx);
                    *dgain = dy.mul_add(xhat, *dgain);
                }
            }
        }
    }
}

/// sum(a) and sum(a xhat) of a row, a = dy gain.
#[inline(always)]
fn projections(x: &[f32], dy: &[f32], gain: &[f32], mean: f32, scale: f32) -> (f32, f32) {
    let (mut plain, mut along) = ([0f32; LANES], [0f32; LANES]);
    let ((xs, x), (dys, dy), (gains, gain)) = (x.as_chunks::<LANES>(), dy.as_chunks::<LANES>(), gain.as_chunks::<LANES>());
    for ((x, dy), gain) in xs.iter().zip(dys).zip(gains) {
        for i in 0..LANES {
            let a = dy[i] * gain[i];
            plain[i] += a;
            along[i] = a.mul_add(x[i] - mean, along[i]);
        }
    }
    for (i, ((x, dy), gain)) in x.iter().zip(dy).zip(gain).enumerate() {
        let a = dy * gain;
        plain[i] += a;
        along[i] = a.mul_add(x - mean, along[i]);
    }
    (math::total_32(plain), math::total_32(along) * scale)
}
