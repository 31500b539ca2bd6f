//! Products of operands that are in the cache, in one thread and without packing: c = a b (+ base), and rows of dot products.
//!
//! A tile of the result stays in registers while k runs: R rows of W vectors of columns, so that a vector of b is loaded once for R
//! products. Where both operands run along k, as in a b^T, a tile holds R x C vectors of partial sums, each summed up at the end.
//!
//! A product may be one of many whose large operands, such as memories, come from main memory one after the other. It then asks for the next
//! one's while it works on its own, a little at a time: `ahead` is how many elements farther those lie, 0 if there is nothing to ask for.

use std::ops::Range;

use super::arch;

/// A matrix to read: element (i, j) is at `i * row + j * col`.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) ptr: *const f32,
    pub(super) row: usize,
    pub(super) col: usize,
}

/// c `[m, n]` = (base `[m, n]` +) a `[m, k]` b `[k, n]`, rows of b `b_row` and those of c and base `c_row` apart. The base may be c itself.
/// What is asked for ahead is like b, or like c where there are more rows than columns.
///
/// # Safety
///
/// All elements so described must be inside their allocations, and nothing else may touch those of c.
pub(super) unsafe fn multiply(
    sizes: [usize; 3],
    a: Matrix,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    base: Option<*const f32>,
    ahead: usize,
) {
    arch().dispatch(Product { sizes, a, b, b_row, c, c_row, base, ahead });
}

/// Asks for the `count` elements that lie `ahead` of `from` to be brought to the second-level cache.
#[inline(always)]
fn fetch(from: *const f32, ahead: usize, count: usize) {
    if ahead == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    for line in (0..count).step_by(16) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(ahead + line).cast()) };
    }
}

/// What [`multiply`] was asked for.
struct Product {
    sizes: [usize; 3],
    a: Matrix,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    base: Option<*const f32>,
    ahead: usize,
}

impl pulp::WithSimd for Product {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, simd: S) {
        let [m, n, _] = self.sizes;
        // SAFETY: all of the product that the caller of `multiply` vouches for.
        unsafe {
            if m <= n {
                return self.rows::<S>(simd, 0..m);
            }
            // Many rows: c is walked through once in its order, while b, of few columns, stays in the cache.
            for i in (0..m).step_by(STRIP) {
                fetch(self.c.wrapping_add(i * self.c_row), self.ahead, STRIP * self.c_row);
                self.rows::<S>(simd, i..m.min(i + STRIP));
            }
        }
    }
}

/// Rows of a full tile.
const STRIP: usize = 6;

impl Product {
    /// Some rows, a strip of columns at a time.
    ///
    /// # Safety
    ///
    /// As for [`multiply`], for these rows.
    #[inline(always)]
    unsafe fn rows<S: pulp::Simd>(&self, simd: S, rows: Range<usize>) {
        let n = self.sizes[1];
        let mut j = 0;
        // SAFETY: the columns from j on are inside the product that the caller vouches for.
        unsafe {
            while n - j >= 2 * S::F32_LANES {
                self.columns::<S, 2>(simd, rows.clone(), j);
                j += 2 * S::F32_LANES;
            }
            if n - j >= S::F32_LANES {
                self.columns::<S, 1>(simd, rows.clone(), j);
                j += S::F32_LANES;
            }
            self.rest(rows, j);
        }
    }

    /// W vectors of columns of some rows, a tile at a time.
    ///
    /// # Safety
    ///
    /// As for [`multiply`], for these rows and the columns from `j` on.
    #[inline(always)]
    unsafe fn columns<S: pulp::Simd, const W: usize>(&self, simd: S, rows: Range<usize>, j: usize) {
        let mut i = rows.start;
        while i < rows.end {
            // SAFETY: rows i and on, as many as are left.
            unsafe {
                i += match rows.end - i {
                    STRIP.. => self.strip::<S, STRIP, W>(simd, i, j),
                    4.. => self.strip::<S, 4, W>(simd, i, j),
                    2.. => self.strip::<S, 2, W>(simd, i, j),
                    _ => self.strip::<S, 1, W>(simd, i, j),
                };
            }
        }
    }

    /// R rows of W vectors, in registers. Returns R.
    ///
    /// # Safety
    ///
    /// As for [`multiply`], for the R rows from `i` and the W vectors of columns from `j` on.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // constant bounds, so that all of it stays in registers
    unsafe fn strip<S: pulp::Simd, const R: usize, const W: usize>(&self, simd: S, i: usize, j: usize) -> usize {
        let mut sums = [[simd.splat_f32s(0.0); W]; R];
        // SAFETY: the caller vouches for these rows and columns, and for all k.
        unsafe {
            let (a, b) = (self.a.ptr.add(i * self.a.row), self.b.add(j));
            // Once for all rows.
            let ahead = if i == 0 && self.sizes[0] <= self.sizes[1] { self.ahead } else { 0 };
            for x in 0..self.sizes[2] {
                fetch(b.add(x * self.b_row), ahead, W * S::F32_LANES);
                let mut row = [simd.splat_f32s(0.0); W];
                for w in 0..W {
                    row[w] = b.add(x * self.b_row).cast::<S::f32s>().add(w).read_unaligned();
                }
                for r in 0..R {
                    let a = simd.splat_f32s(*a.add(r * self.a.row + x * self.a.col));
                    for w in 0..W {
                        sums[r][w] = simd.mul_add_f32s(a, row[w], sums[r][w]);
                    }
                }
            }
            for r in 0..R {
                for w in 0..W {
                    let at = (i + r) * self.c_row + j + w * S::F32_LANES;
                    let sum = match self.base {
                        Some(base) => simd.add_f32s(base.add(at).cast::<S::f32s>().read_unaligned(), sums[r][w]),
                        None => sums[r][w],
                    };
                    self.c.add(at).cast::<S::f32s>().write_unaligned(sum);
                }
            }
        }
        R
    }

    /// The columns from `j` on, fewer than a vector, of odd head sizes.
    ///
    /// # Safety
    ///
    /// As for [`multiply`], for these rows and columns.
    #[inline(always)]
    unsafe fn rest(&self, rows: Range<usize>, j: usize) {
        let [_, n, k] = self.sizes;
        for (i, j) in rows.flat_map(|i| (j..n).map(move |j| (i, j))) {
            // SAFETY: element (i, j) of the product that the caller vouches for.
            unsafe {
                let (a, at) = (self.a.ptr.add(i * self.a.row), i * self.c_row + j);
                let mut sum = self.base.map_or(0.0, |base| *base.add(at));
                for x in 0..k {
                    sum += *a.add(x * self.a.col) * *self.b.add(x * self.b_row + j);
                }
                *self.c.add(at) = sum;
            }
        }
    }
}

/// Rows `[m, width]` of one matrix and `[n, width]` of another, both without gaps.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub(super) rows: &'a [f32],
    pub(super) others: &'a [f32],
    /// Where the next product's rows lie.
    pub(super) ahead: usize,
}

/// y[j, i] = the sum over the pairs of rows[i] . others[j]; y is `[n, m]`. Pairs of other lengths than the first are a bug.
pub(super) fn dots<const P: usize>(pairs: [Pair<'_>; P], width: usize, y: &mut [f32]) {
    let [m, n] = [pairs[0].rows.len() / width, pairs[0].others.len() / width];
    assert!(pairs.iter().all(|p| p.rows.len() == m * width && p.others.len() == n * width) && y.len() == m * n);
    arch().dispatch(Dots { pairs, width, sizes: [m, n], y });
}

/// What [`dots`] was asked for.
struct Dots<'a, const P: usize> {
    pairs: [Pair<'a>; P],
    width: usize,
    sizes: [usize; 2],
    y: &'a mut [f32],
}

impl<const P: usize> pulp::WithSimd for Dots<'_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(mut self, simd: S) {
        let m = self.sizes[0];
        let mut i = 0;
        while i < m {
            // SAFETY: rows i and on, as many as are left, of operands whose lengths `dots` has checked.
            unsafe {
                i += match m - i {
                    4.. => self.row_tiles::<S, 4>(simd, i),
                    _ => self.row_tiles::<S, 1>(simd, i),
                };
            }
        }
    }
}

impl<const P: usize> Dots<'_, P> {
    /// R rows against all others. Returns R.
    ///
    /// # Safety
    ///
    /// There are R rows from `i` on.
    #[inline(always)]
    unsafe fn row_tiles<S: pulp::Simd, const R: usize>(&mut self, simd: S, i: usize) -> usize {
        for Pair { rows, ahead, .. } in self.pairs {
            fetch(rows[i * self.width..].as_ptr(), ahead, R * self.width);
        }
        let n = self.sizes[1];
        // Of 16 registers, as AVX2 has, four by four sums would leave none for the operands.
        let most = if R == 4 && S::REGISTER_COUNT < 32 { 3 } else { 4 };
        let mut j = 0;
        while j < n {
            // SAFETY: others j and on, as many as are left.
            unsafe {
                j += match most.min(n - j) {
                    4 => self.tile::<S, R, 4>(simd, i, j),
                    3 => self.tile::<S, R, 3>(simd, i, j),
                    2 => self.tile::<S, R, 2>(simd, i, j),
                    _ => self.tile::<S, R, 1>(simd, i, j),
                };
            }
        }
        R
    }

    /// R rows against C others, in registers. Returns C.
    ///
    /// # Safety
    ///
    /// There are R rows from `i` and C others from `j` on.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // constant bounds, so that all of it stays in registers
    unsafe fn tile<S: pulp::Simd, const R: usize, const C: usize>(&mut self, simd: S, i: usize, j: usize) -> usize {
        let whole = self.width / S::F32_LANES * S::F32_LANES;
        let mut sums = [[simd.splat_f32s(0.0); C]; R];
        let mut rest = [[0f32; C]; R];
        for Pair { rows, others, .. } in self.pairs {
            // SAFETY: the caller vouches for the rows and others; x stays below their width.
            unsafe {
                let (a, b) = (rows.as_ptr().add(i * self.width), others.as_ptr().add(j * self.width));
                for x in (0..whole).step_by(S::F32_LANES) {
                    let mut other = [simd.splat_f32s(0.0); C];
                    for c in 0..C {
                        other[c] = b.add(c * self.width + x).cast::<S::f32s>().read_unaligned();
                    }
                    for r in 0..R {
                        let row = a.add(r * self.width + x).cast::<S::f32s>().read_unaligned();
                        for c in 0..C {
                            sums[r][c] = simd.mul_add_f32s(row, other[c], sums[r][c]);
                        }
                    }
                }
                for x in whole..self.width {
                    for r in 0..R {
                        for c in 0..C {
                            rest[r][c] += *a.add(r * self.width + x) * *b.add(c * self.width + x);
                        }
                    }
                }
            }
        }
        for c in 0..C {
            for r in 0..R {
                self.y[(j + c) * self.sizes[0] + i + r] = simd.reduce_sum_f32s(sums[r][c]) + rest[r][c];
            }
        }
        C
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(next).collect()
    }

    #[track_caller]
    fn assert_close(got: f32, want: f64) {
        assert!((f64::from(got) - want).abs() < 1e-4, "{got} instead of {want}");
    }

    #[test]
    fn products_are_those_of_plain_loops_for_any_layout_and_base() {
        for [m, n, k] in [[1, 1, 1], [10, 128, 37], [13, 50, 5], [4, 16, 192], [7, 33, 3]] {
            let (a, b, base) = (values(m * k, 1), values(k * n, 2), values(m * n, 3));
            for (row, col) in [(k, 1), (1, m)] {
                for with_base in [false, true] {
                    let mut c = vec![f32::NAN; m * n];
                    let from = with_base.then_some(base.as_ptr());
                    let matrix = Matrix { ptr: a.as_ptr(), row, col };
                    // SAFETY: the vectors have the sizes given.
                    unsafe { multiply([m, n, k], matrix, b.as_ptr(), n, c.as_mut_ptr(), n, from, 0) };
                    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let sum: f64 = (0..k).map(|x| f64::from(a[i * row + x * col]) * f64::from(b[x * n + j])).sum();
                        assert_close(c[i * n + j], sum + if with_base { f64::from(base[i * n + j]) } else { 0.0 });
                    }
                }
            }
        }
    }

    #[test]
    fn dots_are_those_of_plain_loops() {
        for [m, n, width] in [[1, 1, 1], [192, 10, 128], [5, 7, 37], [6, 4, 16], [9, 3, 50]] {
            let [a, b, u, v] = [values(m * width, 1), values(n * width, 2), values(m * width, 3), values(n * width, 4)];
            let (mut one, mut two) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
            dots([Pair { rows: &a, others: &b, ahead: 0 }], width, &mut one);
            dots([Pair { rows: &a, others: &b, ahead: 0 }, Pair { rows: &u, others: &v, ahead: 0 }], width, &mut two);
            let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let (row, other) = (i * width..(i + 1) * width, j * width..(j + 1) * width);
                let first = dot(&a[row.clone()], &b[other.clone()]);
                assert_close(one[j * m + i], first);
                assert_close(two[j * m + i], first + dot(&u[row], &v[other]));
            }
        }
    }
}
