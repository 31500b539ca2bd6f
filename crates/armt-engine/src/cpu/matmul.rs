//! Batched products on the `gemm` crate, with an epilogue that runs over each piece of the result while it is in the cache.
//!
//! A product is cut into (group, rows) or (group, columns) pieces, one thread each.

use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

use super::math;
use crate::ops::Sizes;
use crate::paths::{self, ProductPieces};

/// A pointer that pieces of one product share.
#[derive(Clone, Copy)]
struct Shared(*mut f32);
// SAFETY: pieces write disjoint elements, as `in_pieces` explains.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn get(self) -> *mut f32 {
        self.0
    }
}

/// A part of a product that one thread computes. No two have an element of the result in common, and none is empty.
pub(super) struct Piece {
    pub(super) group: usize,
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
    /// Whether rows are finished when their piece is. Where products are cut along columns, others have the rest of each row.
    pub(super) whole_rows: bool,
    /// All of y, `[batch, m, n]`: a piece may write its own rows and columns of its own group.
    pub(super) y: *mut f32,
}

/// Cuts a product `[batch, m, n]` along its rows, or along its columns in multiples of `unit` of them, and has every piece computed, which calls `epilogue(group, first row,
/// rows)` for its rows where they are whole. Where they are not, that is done here at the end.
pub(super) fn in_pieces(
    s: Sizes,
    unit: usize,
    y: &mut [f32],
    epilogue: &(impl Fn(usize, usize, &mut [f32]) + Sync),
    compute: impl Fn(Piece) + Sync,
) {
    let Sizes { batch, m, n, .. } = s;
    assert!(y.len() == batch * m * n);
    if batch * m * n == 0 {
        return;
    }
    let ProductPieces { pieces, by_rows, serial } = paths::product_pieces(s, rayon::current_num_threads());
    let (whole, unit) = if by_rows { (m, 1) } else { (n, unit) };
    let length = whole.div_ceil(pieces).next_multiple_of(unit);
    let out = Shared(y.as_mut_ptr());
    let piece = |i: usize| {
        let (group, from) = (i / pieces, i % pieces * length);
        let to = whole.min(from + length);
        // Rounded up, the pieces before may have taken all.
        if from < to {
            let (rows, columns) = if by_rows { (from..to, 0..n) } else { (0..m, from..to) };
            compute(Piece { group, rows, columns, whole_rows: by_rows, y: out.get() });
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
    assert!(a.len() == batch * m * k && b.len() == batch * k * n);
    in_pieces(s, 1, y, &epilogue, |Piece { group, rows, columns, whole_rows, y }| {
        // Element (i, j) of an operand is at i * row + j * column.
        let (a_row, a_col) = if ta { (1, m) } else { (k, 1) };
        let (b_row, b_col) = if tb { (1, k) } else { (n, 1) };
        let y_at = group * m * n + rows.start * n + columns.start;
        // SAFETY: operands lie inside their slices by the lengths asserted above and in `in_pieces`; the piece's elements of y are its own, and y is
        // exclusively borrowed for the whole call.
        unsafe {
            gemm::gemm(
                rows.len(),
                columns.len(),
                k,
                y.add(y_at),
                1,
                n as isize,
                accumulate,
                a.as_ptr().add(group * m * k + rows.start * a_row),
                a_col as isize,
                a_row as isize,
                b.as_ptr().add(group * k * n + columns.start * b_col),
                b_col as isize,
                b_row as isize,
                1f32,
                1f32,
                false,
                false,
                false,
                Parallelism::None,
            );
            if whole_rows {
                epilogue(group, rows.start, std::slice::from_raw_parts_mut(y.add(y_at), rows.len() * n));
            }
        }
    });
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
