//! Batched products on the `gemm` crate, with an epilogue that runs over each piece of the result while it is in the cache.
//!
//! A product is cut into (group, rows) or (group, columns) pieces, one thread each.

use gemm::Parallelism;
use rayon::prelude::*;

use super::math;
use crate::ops::Sizes;
use crate::paths::{self, ProductPieces};

/// A pointer that pieces of one product share.
#[derive(Clone, Copy)]
pub(super) struct Shared(*mut f32);
// SAFETY: pieces write disjoint elements, as those who cut a product explain.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(y: &mut [f32]) -> Self {
        Shared(y.as_mut_ptr())
    }

    pub(super) fn get(self) -> *mut f32 {
        self.0
    }
}

/// y[g] = (y[g] +) op(a[g]) op(b[g]); then `epilogue(group, first row, rows)` over every piece of whole rows.
pub(crate) fn batched(
    a: &[f32],
    ta: bool,
    b: &[f32],
    tb: bool,
    s: Sizes,
    y: &mut [f32],
    accumulate: bool,
    epilogue: impl Fn(usize, usize, &mut [f32]) + Sync,
) {
    let Sizes { batch, m, n, k } = s;
    assert!(a.len() == batch * m * k && b.len() == batch * k * n && y.len() == batch * m * n);
    if batch * m * n == 0 {
        return;
    }
    let ProductPieces { pieces, by_rows, serial } = paths::product_pieces(s, rayon::current_num_threads());
    let length = if by_rows { m } else { n }.div_ceil(pieces);
    let out = Shared::new(y);
    let piece = |i: usize| {
        let (group, piece) = (i / pieces, i % pieces);
        let from = piece * length;
        let to = (from + length).min(if by_rows { m } else { n });
        if from >= to {
            return;
        }
        let (rows, cols) = if by_rows { (from..to, 0..n) } else { (0..m, from..to) };
        // Element (i, j) of an operand is at i * row + j * column.
        let (a_row, a_col) = if ta { (1, m) } else { (k, 1) };
        let (b_row, b_col) = if tb { (1, k) } else { (n, 1) };
        let y_at = group * m * n + rows.start * n + cols.start;
        // SAFETY: operands lie inside their slices by the lengths asserted above; each piece writes its own rows or columns of its own
        // group, so that no two touch one element of y; y is exclusively borrowed for the whole call.
        unsafe {
            gemm::gemm(
                rows.len(),
                cols.len(),
                k,
                out.get().add(y_at),
                1,
                n as isize,
                accumulate,
                a.as_ptr().add(group * m * k + rows.start * a_row),
                a_col as isize,
                a_row as isize,
                b.as_ptr().add(group * k * n + cols.start * b_col),
                b_col as isize,
                b_row as isize,
                1f32,
                1f32,
                false,
                false,
                false,
                Parallelism::None,
            );
            if by_rows {
                epilogue(group, rows.start, std::slice::from_raw_parts_mut(out.get().add(y_at), rows.len() * n));
            }
        }
    };
    if serial {
        (0..batch * pieces).for_each(piece);
    } else {
        (0..batch * pieces).into_par_iter().for_each(piece);
    }
    if !by_rows {
        for (group, y) in y.chunks_mut(m * n).enumerate() {
            epilogue(group, 0, y);
        }
    }
}

/// Rows of `n`: add a bias, apply GELU, add a residual.
pub(crate) fn epilogue(y: &mut [f32], n: usize, bias: Option<&[f32]>, residual: Option<&[f32]>, gelu: bool) {
    simd!({
        if let Some(bias) = bias {
            for row in y.chunks_exact_mut(n) {
                for (y, b) in row.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
        if gelu {
            for y in y.iter_mut() {
                *y = math::gelu(*y);
            }
        }
        if let Some(residual) = residual {
            for (y, r) in y.iter_mut().zip(residual) {
                *y += r;
            }
        }
    });
}
