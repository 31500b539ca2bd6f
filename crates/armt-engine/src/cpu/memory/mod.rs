//! Kernels of the associative memory on the CPU, and what they share: a thread's scratch, and products with a memory.

pub(crate) mod dpfp;
mod paper;
mod projected;
pub(crate) mod read;
pub(crate) mod write;
pub(crate) mod write_read;

use std::cell::RefCell;

use super::math;
use super::small_product::{Matrix, multiply};

/// Independent partial sums of a dot product: two of the widest vectors.
const LANES: usize = 32;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with pieces of the given lengths of this thread's scratch, whose values are whatever was there. `f` must not hand work to
/// other threads: a stolen task would want the same scratch.
fn with_scratch<const K: usize, R>(lengths: [usize; K], f: impl FnOnce([&mut [f32]; K]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        let total = lengths.iter().sum();
        if scratch.len() < total {
            scratch.resize(total, 0.0);
        }
        let mut rest = scratch.as_mut_slice();
        f(lengths.map(|length| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(length);
            rest = after;
            piece
        }))
    })
}

#[inline(always)]
fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let rest = add_products(&mut sums, x, y);
    math::total_32(sums) + rest
}

/// Adds products of elements to interleaved sums; gives the sum of those that fill no lane.
#[inline(always)]
fn add_products(sums: &mut [f32; LANES], x: &[f32], y: &[f32]) -> f32 {
    let ((xs, x), (ys, y)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for ((s, x), y) in sums.iter_mut().zip(x).zip(y) {
            *s = x.mul_add(*y, *s);
        }
    }
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// y += sum_i c[i] rows[i], rows of y's length one after the other, at distance `stride` in `c`.
#[inline(always)]
fn add_rows(y: &mut [f32], c: &[f32], stride: usize, rows: &[f32]) {
    let width = y.len();
    let count = rows.len() / width;
    let fours = count / 4 * 4;
    for i in (0..fours).step_by(4) {
        let [c0, c1, c2, c3] = [c[i * stride], c[(i + 1) * stride], c[(i + 2) * stride], c[(i + 3) * stride]];
        let (r0, rest) = rows[i * width..(i + 4) * width].split_at(width);
        let (r1, rest) = rest.split_at(width);
        let (r2, r3) = rest.split_at(width);
        for ((((y, r0), r1), r2), r3) in y.iter_mut().zip(r0).zip(r1).zip(r2).zip(r3) {
            *y = c3.mul_add(*r3, c2.mul_add(*r2, c1.mul_add(*r1, c0.mul_add(*r0, *y))));
        }
    }
    for i in fours..count {
        let c = c[i * stride];
        for (y, r) in y.iter_mut().zip(&rows[i * width..(i + 1) * width]) {
            *y = c.mul_add(*r, *y);
        }
    }
}

/// Rows of A that a product over keys takes at a time: few enough for the first-level cache.
const BLOCK: usize = 32;

/// w = (w +) phi A: what A associates with every token's features. phi is `[m, dk]`, A `[dk, d]`, w `[m, d]`.
/// `ahead`: as for products, of A.
fn recall(all: &[f32], phi: &[f32], w: &mut [f32], [dk, d]: [usize; 2], add: bool, ahead: usize) {
    let m = w.len() / d;
    assert!(all.len() == dk * d && phi.len() == m * dk && w.len() == m * d);
    let w = w.as_mut_ptr();
    for (block, a) in all.chunks(BLOCK * d).enumerate() {
        let phi = Matrix { ptr: phi[block * BLOCK..].as_ptr(), row: dk, col: 1 };
        let base = (add || block > 0).then_some(w.cast_const());
        // SAFETY: the operands have the lengths asserted above, and w is borrowed exclusively.
        unsafe { multiply([m, d, a.len() / d], phi, a.as_ptr(), d, w, d, base, ahead) };
    }
}

/// Where a sum of outer products begins.
#[derive(Clone, Copy)]
enum From<'a> {
    /// At zero.
    Nothing,
    /// At what is there.
    Itself,
    /// At another memory.
    Old(&'a [f32]),
}

/// A = (old +) sum_i phi_i (x) x_i. phi is `[m, dk]`, x `[m, d]`, A `[dk, d]`. `ahead`: as for products.
fn add_outer(a: &mut [f32], from: From<'_>, phi: &[f32], x: &[f32], [dk, d]: [usize; 2], ahead: usize) {
    let m = x.len() / d;
    assert!(a.len() == dk * d && phi.len() == m * dk && x.len() == m * d);
    assert!(!matches!(from, From::Old(old) if old.len() != a.len()));
    let a = a.as_mut_ptr();
    let base = match from {
        From::Nothing => None,
        From::Itself => Some(a.cast_const()),
        From::Old(old) => Some(old.as_ptr()),
    };
    let phi = Matrix { ptr: phi.as_ptr(), row: 1, col: dk };
    // SAFETY: the operands have the lengths asserted above, and A is borrowed exclusively.
    unsafe { multiply([dk, d, m], phi, x.as_ptr(), d, a, d, base, ahead) };
}
