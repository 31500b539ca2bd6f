//! Rotary embedding on the CPU, row by row.

use super::par_rows;

/// How packed rows are rotated: the first `rotated` of the heads of `size`, at `t` positions, the first 2 `half` dimensions of each.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) row: usize,
    pub(crate) rotated: usize,
    pub(crate) size: usize,
    pub(crate) half: usize,
    pub(crate) t: usize,
    /// Rows that share a table.
    pub(crate) table: usize,
    /// 1 forwards, -1 for the inverse.
    pub(crate) sign: f32,
}

pub(crate) fn rotate(x: &[f32], cos: &[f32], sin: &[f32], s: Turn, y: &mut [f32]) {
    let Turn { row, rotated, size, half, t, table, sign } = s;
    par_rows(y, row, 2 * row, |first, y| {
        simd!({
            for (i, (y, x)) in y.chunks_exact_mut(row).zip(x[first * row..].chunks_exact(row)).enumerate() {
                y.copy_from_slice(x);
                let at = ((first + i) / table * t + (first + i) % t) * half;
                let (cos, sin) = (&cos[at..][..half], &sin[at..][..half]);
                for (y, x) in y.chunks_exact_mut(size).zip(x.chunks_exact(size)).take(rotated) {
                    let ((y1, y2), (x1, x2)) = (y.split_at_mut(half), x.split_at(half));
                    for ((((y1, y2), (x1, x2)), c), s) in y1.iter_mut().zip(y2).zip(x1.iter().zip(x2)).zip(cos).zip(sin) {
                        let s = sign * s;
                        *y1 = x1 * c - x2 * s;
                        *y2 = x2 * c + x1 * s;
                    }
                }
            }
        });
    });
}
