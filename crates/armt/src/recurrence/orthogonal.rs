//! Fresh matrices whose rows, or columns where those are fewer, are orthogonal.

use rayon::prelude::*;

use crate::random::Random;

/// `count` matrices `[rows, columns]` of normal numbers whose shorter axis was made orthonormal, times `gain`.
pub(super) fn orthogonal(random: &mut Random, count: usize, rows: usize, columns: usize, gain: f64) -> Vec<f32> {
    let (few, long) = (rows.min(columns), rows.max(columns));
    let mut numbers = random.many(count * few * long, 2, |r| r.normal() as f32);
    numbers.par_chunks_mut((few * long).max(1)).for_each(|matrix| {
        let vectors = orthonormal(matrix, long);
        for (i, x) in matrix.iter_mut().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let (vector, element) = if rows <= columns { (row, column) } else { (column, row) };
            *x = (gain * vectors[vector][element]) as f32;
        }
    });
    numbers
}

/// Gram and Schmidt's way, each vector against those before it, twice for rounding.
fn orthonormal(vectors: &[f32], length: usize) -> Vec<Vec<f64>> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut made: Vec<Vec<f64>> = Vec::new();
    for vector in vectors.chunks(length.max(1)) {
        let mut own: Vec<f64> = vector.iter().map(|x| f64::from(*x)).collect();
        for _ in 0..2 {
            for other in &made {
                let share = dot(&own, other);
                own.iter_mut().zip(other).for_each(|(x, y)| *x -= share * y);
            }
        }
        let norm = dot(&own, &own).sqrt().max(f64::MIN_POSITIVE);
        own.iter_mut().for_each(|x| *x /= norm);
        made.push(own);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_axis_is_orthonormal() {
        for (rows, columns) in [(5, 9), (9, 5), (6, 6), (1, 3)] {
            let matrices = orthogonal(&mut Random::new(3), 2, rows, columns, 2.0);
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
