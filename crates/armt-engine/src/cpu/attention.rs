//! Causal attention on the CPU: O = softmax(scale Q K^T) V, a block of query rows at a time, one task for each key head.
//!
//! A block's scores are whole rows, so that the softmax needs no correction on the way; keys beyond the block's last row are never
//! touched. K (transposed) and V are packed once for each head into scratch that threads keep: rows of a packed projection lie a power
//! of two apart, which caches dislike. The backward pass computes the probabilities again from the saved log-sum-exp.

use std::cell::RefCell;

use rayon::prelude::*;

use super::small_product::{Matrix, multiply};
use super::{arch, math};
use crate::ops::attention::{Heads, Layout};
use crate::paths;

/// Query rows of a block.
const BLOCK: usize = 24;
/// Score rows are padded to the widest vector.
const LANES: usize = 16;

/// Score rows, padded.
fn score_width(l: Layout) -> usize {
    l.tk.next_multiple_of(LANES)
}

fn assert_fits(l: Layout, q: &[f32], k: &[f32], v: &[f32], mask: Option<&[i32]>) {
    let Heads { query, key, size } = l.heads;
    let needed = |rows: usize, row: usize, width: usize| if rows == 0 { 0 } else { (rows - 1) * row + width };
    let keys = needed(l.n * l.tk, l.k_row, key * size);
    assert!(l.tk >= l.tq && q.len() >= needed(l.n * l.tq, l.q_row, query * size));
    assert!(k.len() >= keys && v.len() >= keys);
    assert!(mask.is_none_or(|m| m.len() == l.n * l.tk));
}

/// Calls `task(sequence, key head, scratch of `floats`)` for every key head, on all threads if it is worth it.
fn each(l: Layout, floats: usize, task: impl Fn(usize, usize, &mut [f32]) + Sync) {
    thread_local! {
        static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let key = l.heads.key;
    let one = |i: usize| {
        SCRATCH.with_borrow_mut(|scratch| {
            if scratch.len() < floats {
                scratch.resize(floats, 0.0);
            }
            task(i / key, i % key, &mut scratch[..floats]);
        });
    };
    let tasks = l.n * key;
    match paths::attention_tasks(tasks, l.group() * l.tq * l.tk * l.heads.size) {
        None => (0..tasks).for_each(one),
        Some(together) => (0..tasks).into_par_iter().with_min_len(together).for_each(one),
    }
}

/// A pointer that tasks share, each for elements of its own.
#[derive(Clone, Copy)]
pub(crate) struct Out(pub(crate) *mut f32);
// SAFETY: tasks write disjoint elements: those of their own sequence and heads.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

impl Out {
    fn at(self, i: usize) -> *mut f32 {
        self.0.wrapping_add(i)
    }
}

/// o `[n, tq, H size]` and, if asked for, the log-sum-exp of each row, `[n, H, tq]`.
pub(crate) fn forward(q: &[f32], k: &[f32], v: &[f32], mask: Option<&[i32]>, l: Layout, o: &mut [f32], lse: Option<&mut [f32]>) {
    let Heads { query, size, .. } = l.heads;
    assert_fits(l, q, k, v, mask);
    assert!(o.len() == l.n * l.tq * query * size && lse.as_ref().is_none_or(|x| x.len() == l.n * query * l.tq));
    let (o_row, width, offset, scale) = (query * size, score_width(l), l.tk - l.tq, l.scale());
    let out = Out(o.as_mut_ptr());
    let lse_out = lse.map(|x| Out(x.as_mut_ptr()));
    each(l, size * width + l.tk * size + BLOCK * width, |n, hk, scratch| {
        let (kt, rest) = scratch.split_at_mut(size * width); // [size, width]
        let (vp, s) = rest.split_at_mut(l.tk * size); // [tk, size], [BLOCK, width]
        let keys = &k[n * l.tk * l.k_row + hk * size..];
        transpose(keys, l.k_row, l.tk, size, kt, width);
        pack(&v[n * l.tk * l.k_row + hk * size..], l.k_row, l.tk, size, vp);
        let mask = mask.map(|m| &m[n * l.tk..][..l.tk]);
        for h in hk * l.group()..(hk + 1) * l.group() {
            for i0 in (0..l.tq).step_by(BLOCK) {
                let rows = BLOCK.min(l.tq - i0);
                let end = i0 + rows + offset;
                let a = Matrix { ptr: q[(n * l.tq + i0) * l.q_row + h * size..].as_ptr(), row: l.q_row, col: 1 };
                let o = out.at((n * l.tq + i0) * o_row + h * size);
                // SAFETY: the operands are inside their slices by the lengths asserted above, the scratch has the sizes noted; o's
                // rows of this head belong to this task.
                unsafe {
                    multiply([rows, end.next_multiple_of(LANES), size], a, kt.as_ptr(), width, s.as_mut_ptr(), width, None, 0);
                    let mut inverse = [0.0; BLOCK];
                    for i in 0..rows {
                        let s = &mut s[i * width..][..width];
                        let (sum, log) = arch().dispatch(Row { s, seen: i0 + i + offset + 1, end, mask, scale });
                        inverse[i] = if sum > 0.0 { 1.0 / sum } else { 0.0 };
                        if let Some(lse) = lse_out {
                            *lse.at((n * query + h) * l.tq + i0 + i) = log;
                        }
                    }
                    let p = Matrix { ptr: s.as_ptr(), row: width, col: 1 };
                    multiply([rows, size, end], p, vp.as_ptr(), size, o, o_row, None, 0);
                    for (i, inverse) in inverse[..rows].iter().enumerate() {
                        for o in std::slice::from_raw_parts_mut(o.add(i * o_row), size) {
                            *o *= inverse;
                        }
                    }
                }
            }
        }
    });
}

/// dq, dk and dv, with the rows of q and of k and v. Every element of the heads is written.
pub(crate) fn backward(
    [q, k, v]: [&[f32]; 3],
    mask: Option<&[i32]>,
    l: Layout,
    [o, lse, d_o]: [&[f32]; 3],
    [dq, dk, dv]: [Out; 3],
) {
    let Heads { query, size, .. } = l.heads;
    assert_fits(l, q, k, v, mask);
    assert!(o.len() == l.n * l.tq * query * size && d_o.len() == o.len() && lse.len() == l.n * query * l.tq);
    let (o_row, width, offset, scale) = (query * size, score_width(l), l.tk - l.tq, l.scale());
    let dense = l.tk * size;
    each(l, 2 * size * width + 3 * dense + 2 * BLOCK * width, |n, hk, scratch| {
        let (kt, rest) = scratch.split_at_mut(size * width); // [size, width]
        let (vt, rest) = rest.split_at_mut(size * width); // [size, width]
        let (kp, rest) = rest.split_at_mut(dense); // [tk, size]
        let (dkp, rest) = rest.split_at_mut(dense);
        let (dvp, rest) = rest.split_at_mut(dense);
        let (p, ds) = rest.split_at_mut(BLOCK * width); // [BLOCK, width]
        let at = n * l.tk * l.k_row + hk * size;
        transpose(&k[at..], l.k_row, l.tk, size, kt, width);
        transpose(&v[at..], l.k_row, l.tk, size, vt, width);
        pack(&k[at..], l.k_row, l.tk, size, kp);
        dkp.fill(0.0);
        dvp.fill(0.0);
        let mask = mask.map(|m| &m[n * l.tk..][..l.tk]);
        for h in hk * l.group()..(hk + 1) * l.group() {
            for i0 in (0..l.tq).step_by(BLOCK) {
                let rows = BLOCK.min(l.tq - i0);
                let end = i0 + rows + offset;
                let padded = end.next_multiple_of(LANES);
                let q_at = (n * l.tq + i0) * l.q_row + h * size;
                let o_at = (n * l.tq + i0) * o_row + h * size;
                let queries = Matrix { ptr: q[q_at..].as_ptr(), row: l.q_row, col: 1 };
                let d_out = Matrix { ptr: d_o[o_at..].as_ptr(), row: o_row, col: 1 };
                let lse = &lse[(n * query + h) * l.tq + i0..][..rows];
                // SAFETY: as in `forward`; dq's rows of this head belong to this task.
                unsafe {
                    multiply([rows, padded, size], queries, kt.as_ptr(), width, p.as_mut_ptr(), width, None, 0);
                    multiply([rows, padded, size], d_out, vt.as_ptr(), width, ds.as_mut_ptr(), width, None, 0);
                    for i in 0..rows {
                        let (o, d_o) = (&o[o_at + i * o_row..][..size], &d_o[o_at + i * o_row..][..size]);
                        let row = Row { s: &mut p[i * width..][..width], seen: i0 + i + offset + 1, end, mask, scale };
                        arch().dispatch(RowBackward { row, dp: &mut ds[i * width..][..width], lse: lse[i], o, d_o });
                    }
                    let of_rows = |m: &[f32]| Matrix { ptr: m.as_ptr(), row: width, col: 1 };
                    let of_columns = |m: &[f32]| Matrix { ptr: m.as_ptr(), row: 1, col: width };
                    multiply([rows, size, end], of_rows(ds), kp.as_ptr(), size, dq.at(q_at), l.q_row, None, 0);
                    let (dv, dk) = (dvp.as_mut_ptr(), dkp.as_mut_ptr());
                    multiply([end, size, rows], of_columns(p), d_out.ptr, o_row, dv, size, Some(dv), 0);
                    multiply([end, size, rows], of_columns(ds), queries.ptr, l.q_row, dk, size, Some(dk), 0);
                }
            }
        }
        for (from, to) in [(&*dkp, dk), (&*dvp, dv)] {
            for (j, row) in from.chunks_exact(size).enumerate() {
                // SAFETY: rows of this key head belong to this task, and lie inside the gradient as those of k lie inside k.
                unsafe { std::slice::from_raw_parts_mut(to.at(at + j * l.k_row), size) }.copy_from_slice(row);
            }
        }
    });
}

/// `[rows, size]`, rows `stride` apart, to `[size, width]`, the columns from `rows` on zero.
fn transpose(x: &[f32], stride: usize, rows: usize, size: usize, y: &mut [f32], width: usize) {
    for j0 in (0..width).step_by(LANES) {
        let live = LANES.min(rows - j0.min(rows));
        if live < LANES {
            for y in y.chunks_exact_mut(width) {
                y[j0..j0 + LANES].fill(0.0);
            }
        }
        for j in j0..j0 + live {
            for (d, x) in x[j * stride..][..size].iter().enumerate() {
                y[d * width + j] = *x;
            }
        }
    }
}

/// `[rows, size]`, rows `stride` apart, without the gaps.
fn pack(x: &[f32], stride: usize, rows: usize, size: usize, y: &mut [f32]) {
    for (j, y) in y.chunks_exact_mut(size).take(rows).enumerate() {
        y.copy_from_slice(&x[j * stride..][..size]);
    }
}

/// A row of scores on its way to probabilities. A type of its own, as the products of `small_product`, and not a closure given to `simd!`: only a method
/// can insist on being inlined into the version compiled for wide vectors.
struct Row<'a> {
    s: &'a mut [f32],
    /// Keys up to the causal bound; those after it up to `end` get zeros.
    seen: usize,
    end: usize,
    mask: Option<&'a [i32]>,
    scale: f32,
}

impl pulp::NullaryFnOnce for Row<'_> {
    type Output = (f32, f32);

    /// To e^(scale s - max). Returns the sum and the log-sum-exp, infinite if no key is visible.
    #[inline(always)]
    fn call(self) -> (f32, f32) {
        let Row { s, seen, end, mask, scale } = self;
        let padded = seen.next_multiple_of(LANES);
        s[seen..padded].fill(f32::NEG_INFINITY);
        if let Some(mask) = mask {
            for (s, keep) in s[..seen].iter_mut().zip(mask) {
                *s = if *keep != 0 { *s } else { f32::NEG_INFINITY };
            }
        }
        let mut most = [f32::NEG_INFINITY; LANES];
        for s in s[..padded].as_chunks::<LANES>().0 {
            for (m, s) in most.iter_mut().zip(s) {
                *m = if *s > *m { *s } else { *m };
            }
        }
        let most = most.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if most == f32::NEG_INFINITY {
            // NaN is never the most: a row of nothing else is not one that sees no key.
            if s[..seen].iter().any(|s| s.is_nan()) {
                s[..end].fill(f32::NAN);
                return (f32::NAN, f32::NAN);
            }
            s[..end].fill(0.0);
            return (0.0, f32::INFINITY);
        }
        let shift = -most * scale;
        let mut sums = [0.0; LANES];
        for s in s[..padded].as_chunks_mut::<LANES>().0 {
            for (sum, s) in sums.iter_mut().zip(s) {
                *s = math::exp(s.mul_add(scale, shift));
                *sum += *s;
            }
        }
        // `exp` never underflows to zero: hidden keys are set to it.
        if let Some(mask) = mask {
            for (s, keep) in s[..seen].iter_mut().zip(mask) {
                *s = if *keep != 0 { *s } else { 0.0 };
            }
        }
        s[seen..end.max(padded)].fill(0.0);
        let sum = math::total(sums);
        (sum, sum.ln() - shift)
    }
}

/// From scores and dP to P = e^(scale s - lse) and dS = scale P (dP - delta), delta = do . o.
struct RowBackward<'a> {
    row: Row<'a>,
    dp: &'a mut [f32],
    lse: f32,
    o: &'a [f32],
    d_o: &'a [f32],
}

impl pulp::NullaryFnOnce for RowBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let RowBackward { row: Row { s, seen, end, mask, scale }, dp, lse, o, d_o } = self;
        let mut sums = [0.0; LANES];
        let ((o, o_rest), (d_o, d_rest)) = (o.as_chunks::<LANES>(), d_o.as_chunks::<LANES>());
        for (o, d) in o.iter().zip(d_o) {
            for ((sum, o), d) in sums.iter_mut().zip(o).zip(d) {
                *sum = o.mul_add(*d, *sum);
            }
        }
        let rest: f32 = o_rest.iter().zip(d_rest).map(|(o, d)| o * d).sum();
        let delta = math::total(sums) + rest;
        for (s, dp) in s[..seen].iter_mut().zip(&mut dp[..seen]) {
            *s = math::exp(s.mul_add(scale, -lse));
            *dp = *s * (*dp - delta) * scale;
        }
        if let Some(mask) = mask {
            for ((s, dp), keep) in s[..seen].iter_mut().zip(&mut dp[..seen]).zip(mask) {
                *s = if *keep != 0 { *s } else { 0.0 };
                *dp = if *keep != 0 { *dp } else { 0.0 };
            }
        }
        s[seen..end].fill(0.0);
        dp[seen..end].fill(0.0);
    }
}
