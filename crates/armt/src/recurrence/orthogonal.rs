//! Fresh matrices whose rows, or columns where those are fewer, are orthogonal.
//!
//! Vectors that are few beside their length are made so all at once: with G = V V^T = L L^T the rows of L^-1 V are orthonormal (Cholesky's way),
//! which is exact enough where G is far from singular, as that of random vectors then is. Others are taken one after the other.

use armt_engine::{Device, Tensor, ops};
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::random::Random;

/// So many times as long as there are of them, and vectors are made orthonormal at once.
const FEW: usize = 4;

/// `count` matrices `[rows, columns]` of normal numbers whose shorter axis was made orthonormal, times `gain`.
pub(super) fn orthogonal(random: &mut Random, count: usize, rows: usize, columns: usize, gain: f64) -> Result<Vec<f32>> {
    let (few, long) = (rows.min(columns), rows.max(columns));
    let mut numbers = random.many(count * few * long, 2, |r| r.normal() as f32);
    numbers.par_chunks_mut((few * long).max(1)).try_for_each(|matrix| {
        let vectors = if long >= FEW * few { at_once(matrix, few, long)? } else { in_turn(matrix, long) };
        for (i, x) in matrix.iter_mut().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let at = if rows <= columns { row * long + column } else { column * long + row };
            *x = (gain * f64::from(vectors[at])) as f32;
        }
        Ok::<(), Error>(())
    })?;
    Ok(numbers)
}

/// L^-1 V for vectors V `[few, long]`.
fn at_once(vectors: &[f32], few: usize, long: usize) -> Result<Vec<f32>> {
    let v = Tensor::from_slice(vectors, [few, long], &Device::cpu())?;
    let mut l: Vec<f64> = ops::matmul_nt(&v, &v)?.to_vec::<f32>()?.into_iter().map(f64::from).collect();
    for i in 0..few {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| l[i * few + k] * l[j * few + k]).sum();
            let left = l[i * few + j] - sum;
            l[i * few + j] = if i == j { left.max(f64::MIN_POSITIVE).sqrt() } else { left / l[j * few + j] };
        }
    }
    // The inverse, row by row: L^-1_i = (e_i - sum_j L_ij L^-1_j) / L_ii.
    let mut inverse = vec![0f64; few * few];
    for i in 0..few {
        let (before, own) = inverse.split_at_mut(i * few);
        own[i] = 1.0;
        for (j, row) in before.chunks_exact(few).enumerate() {
            let share = l[i * few + j];
            own[..=j].iter_mut().zip(row).for_each(|(x, y)| *x -= share * y);
        }
        own[..=i].iter_mut().for_each(|x| *x /= l[i * few + i]);
    }
    let inverse: Vec<f32> = inverse.into_iter().map(|x| x as f32).collect();
    Ok(ops::matmul(&Tensor::from_slice(&inverse, [few, few], &Device::cpu())?, &v)?.to_vec()?)
}

/// Gram and Schmidt's way, each vector against those before it.
fn in_turn(vectors: &[f32], length: usize) -> Vec<f32> {
    let mut made: Vec<Vec<f64>> = Vec::new();
    for vector in vectors.chunks(length.max(1)) {
        let mut own: Vec<f64> = vector.iter().map(|x| f64::from(*x)).collect();
        for other in &made {
            let share = dot(&own, other);
            own.iter_mut().zip(other).for_each(|(x, y)| *x -= share * y);
        }
        let norm = dot(&own, &own).sqrt().max(f64::MIN_POSITIVE);
        own.iter_mut().for_each(|x| *x /= norm);
        made.push(own);
    }
    made.into_iter().flatten().map(|x| x as f32).collect()
}

/// x . y in interleaved sums, which vectors can take.
fn dot(x: &[f64], y: &[f64]) -> f64 {
    let mut sums = [0f64; 8];
    let ((xs, x), (ys, y)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    for (x, y) in xs.iter().zip(ys) {
        sums.iter_mut().zip(x).zip(y).for_each(|((sum, x), y)| *sum += x * y);
    }
    sums.iter().sum::<f64>() + x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_axis_is_orthonormal() {
        for (rows, columns) in [(5, 9), (9, 5), (6, 6), (1, 3), (7, 60), (60, 7)] {
            let matrices = orthogonal(&mut Random::new(3), 2, rows, columns, 2.0).unwrap();
            for m in matrices.chunks(rows * columns) {
                let at = |r: usize, c: usize| m[r * columns + c];
                for i in 0..rows.min(columns) {
                    for j in 0..rows.min(columns) {
                        let dot: f32 = match rows <= columns {
                            true => (0..columns).map(|c| at(i, c) * at(j, c)).sum(),
                            false => (0..rows).map(|r| at(r, i) * at(r, j)).sum(),
                        };
                        let want = if i == j { 4.0 } else { 0.0 };
                        assert!((dot - want).abs() < 1e-5, "{rows} by {columns}: {i} and {j} give {dot}");
                    }
                }
            }
        }
    }
}
