//! Batched products on the `gemm` crate or by tiles, with an epilogue that runs over each piece of the result while it is in the cache.
//!
//! A product is cut into (group, rows) or (group, columns) pieces, one thread each.

use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

use super::math;
use super::small_product::Matrix;
use crate::ops::Sizes;
use crate::paths::{self, ProductPath, ProductPieces};

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

/// Cuts a product `[batch, m, n]` along its rows or along its columns, in multiples of `units` of them, and has every piece computed, which calls `epilogue(group, first row,
/// rows)` for its rows where they are whole. Where they are not, that is done here at the end.
pub(super) fn in_pieces(
    s: Sizes,
    units: [usize; 2],
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
    let (whole, unit) = if by_rows { (m, units[0]) } else { (n, units[1]) };
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
    let path = paths::cpu_product(s);
    in_pieces(s, path.units(), y, &epilogue, |Piece { group, rows, columns, whole_rows, y }| {
        // Element (i, j) of an operand is at i * row + j * column.
        let (a_row, a_col) = if ta { (1, m) } else { (k, 1) };
        let (b_row, b_col) = if tb { (1, k) } else { (n, 1) };
        let sizes = [rows.len(), columns.len(), k];
        // SAFETY: operands lie inside their slices by the lengths asserted above and in `in_pieces`; the piece's elements of y are its own, and y is
        // exclusively borrowed for the whole call.
        unsafe {
            let a = Matrix { ptr: a.as_ptr().add(group * m * k + rows.start * a_row), row: a_row, col: a_col };
            let b = Matrix { ptr: b.as_ptr().add(group * k * n + columns.start * b_col), row: b_row, col: b_col };
            let y = y.add(group * m * n + rows.start * n + columns.start);
            match path {
                ProductPath::Gemm => by_gemm(sizes, a, b, y, n, accumulate),
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                ProductPath::Tiles => super::amx::product(sizes, a, b, y, n, accumulate),
            }
            if whole_rows {
                epilogue(group, rows.start, std::slice::from_raw_parts_mut(y, rows.len() * n));
            }
        }
    });
}

/// c `[m, n]` = (c +) a `[m, k]` b `[k, n]` by the `gemm` crate, rows of c `c_row` apart.
///
/// # Safety
///
/// All elements so described must be inside their allocations, and nothing else may touch those of c.
unsafe fn by_gemm([m, n, k]: [usize; 3], a: Matrix, b: Matrix, c: *mut f32, c_row: usize, accumulate: bool) {
    let (a_row, a_col, b_row, b_col) = (a.row as isize, a.col as isize, b.row as isize, b.col as isize);
    let (from, none) = (accumulate, Parallelism::None);
    // SAFETY: as the caller vouches.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c,
            1,
            c_row as isize,
            from,
            a.ptr,
            a_col,
            a_row,
            b.ptr,
            b_col,
            b_row,
            1f32,
            1f32,
            false,
            false,
            false,
            none,
        );
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
