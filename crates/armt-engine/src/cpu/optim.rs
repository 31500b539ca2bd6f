//! The update of AdamW and norms of gradients.

use rayon::prelude::*;

/// What one update depends on.
#[derive(Clone, Copy)]
pub(crate) struct Rates {
    pub(crate) lr: f32,
    pub(crate) correction1: f32,
    pub(crate) correction2: f32,
    /// From clipping by norm.
    pub(crate) factor: f32,
    /// From clipping by value.
    pub(crate) limit: f32,
    pub(crate) decay: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) eps: f32,
}

/// Elements a task takes.
const PIECE: usize = 1 << 14;

pub(crate) fn adamw(value: &mut [f32], grad: &[f32], mean: &mut [f32], square: &mut [f32], r: Rates) {
    if r.factor < 0.0 {
        return;
    }
    let piece = |(((p, g), m), v): (((&mut [f32], &[f32]), &mut [f32]), &mut [f32])| {
        simd!({
            let keep = 1.0 - r.lr * r.decay;
            let size = r.lr / r.correction1;
            let root = 1.0 / r.correction2.sqrt();
            for (((p, g), m), v) in p.iter_mut().zip(g).zip(m.iter_mut()).zip(v.iter_mut()) {
                let g = (g * r.factor).clamp(-r.limit, r.limit);
                *m = r.beta1 * *m + (1.0 - r.beta1) * g;
                *v = r.beta2 * *v + (1.0 - r.beta2) * g * g;
                *p = *p * keep - size * *m / (v.sqrt() * root + r.eps);
            }
        });
    };
    if value.len() <= PIECE {
        return piece((((value, grad), mean), square));
    }
    let pieces = value.par_chunks_mut(PIECE).zip(grad.par_chunks(PIECE));
    pieces.zip(mean.par_chunks_mut(PIECE)).zip(square.par_chunks_mut(PIECE)).for_each(piece);
}

/// Sum of squares in f64, in an order that does not depend on the number of threads.
pub(crate) fn sum_of_squares(x: &[f32]) -> f64 {
    let parts: Vec<f64> = x
        .par_chunks(PIECE)
        .map(|x| {
            simd!({
                let mut parts = [0f64; 8];
                let (chunks, rest) = x.as_chunks::<8>();
                for chunk in chunks {
                    for (part, x) in parts.iter_mut().zip(chunk) {
                        *part += f64::from(*x) * f64::from(*x);
                    }
                }
                parts.iter().sum::<f64>() + rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>()
            })
        })
        .collect();
    parts.iter().sum()
}

/// The factor that brings a norm down to `most`, as PyTorch has it. Below 0 where the norm is not finite: a step by it changes nothing.
pub(crate) fn norm_factor(norm: f32, most: f32) -> f32 {
    if norm.is_finite() { (most / (norm + 1e-6)).min(1.0) } else { -1.0 }
}
