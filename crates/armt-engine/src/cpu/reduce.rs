//! Sums over the middle axis of `[outer, middle, inner]`.

use super::par_rows;

/// y[o, i] = (y[o, i] +) sum_m x[o, m, i].
pub(crate) fn sum_middle(x: &[f32], [_, middle, inner]: [usize; 3], y: &mut [f32], accumulate: bool) {
    if inner == 1 {
        par_rows(y, 1, middle, |first, y| {
            for (i, y) in y.iter_mut().enumerate() {
                let row = &x[(first + i) * middle..][..middle];
                let total = simd!(sum(row));
                *y = if accumulate { *y + total } else { total };
            }
        });
        return;
    }
    // Columns are independent: threads take strips of them.
    let strip = strip_width(inner);
    for (o, y) in y.chunks_mut(inner).enumerate() {
        let x = &x[o * middle * inner..][..middle * inner];
        par_rows(y, 1, middle, |first, y| {
            if !accumulate {
                y.fill(0.0);
            }
            for (j, y) in y.chunks_mut(strip).enumerate() {
                let at = first + j * strip;
                simd!({
                    for row in x.chunks_exact(inner) {
                        let row = &row[at..at + y.len()];
                        for (y, x) in y.iter_mut().zip(row) {
                            *y += x;
                        }
                    }
                });
            }
        });
    }
}

/// Columns whose running sums stay in the first-level cache.
fn strip_width(inner: usize) -> usize {
    inner.min(2048)
}

/// Sum of a slice in sixteen interleaved parts: wide vectors, and less rounding than one running sum.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut parts = [0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (part, x) in parts.iter_mut().zip(chunk) {
            *part += x;
        }
    }
    super::math::total(parts) + rest.iter().sum::<f32>()
}

/// dx[o, m, i] = dy[o, i].
pub(crate) fn spread(dy: &[f32], dx: &mut [f32], middle: usize, inner: usize) {
    par_rows(dx, inner, inner, |first, dx| {
        for (i, dx) in dx.chunks_mut(inner).enumerate() {
            let o = (first + i) / middle;
            dx.copy_from_slice(&dy[o * inner..][..inner]);
        }
    });
}
