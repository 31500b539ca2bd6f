//! Products of f32 rows with matrices in eight bits: integers multiplied and summed exactly, scaled at the end.
//!
//! ```text
//! s_n = max_k |w_kn| / 127,   b_kn = round(w_kn / s_n)       once, when weights are set
//! t_i = max_k |x_ik| / 127,   a_ik = round(x_ik / t_i)       for every product
//! y_in = t_i s_n sum_k a_ik b_kn
//! ```
//!
//! The processor multiplies unsigned by signed bytes, so that a is kept as a + 128, and sums begin at -128 sum_k b_kn, which is kept beside s_n. Four
//! bytes along k are one lane: a matrix is stored `[N / 16, K / 4, 16, 4]`, and a vector of it meets four bytes of a row of x at a time. Both paths have the
//! same bits, because their sums are integers.

use std::ops::Range;

use rayon::prelude::*;

use super::math::ROUND;
use super::matmul::{Piece, in_pieces};
use crate::ops::Sizes;
use crate::paths::Int8Path;

/// Columns of a block of a matrix: one vector of sums.
pub(crate) const BLOCK: usize = 16;
/// Bytes along k that are multiplied and summed at once.
pub(crate) const LANE: usize = 4;
/// Rows that are rounded, multiplied and finished together, so that they stay in the cache.
const ROWS: usize = 48;

/// x rounded to an integer, ties to even, for |x| < 2^22.
#[inline(always)]
fn round(x: f32) -> i32 {
    (x + ROUND).to_bits() as i32 - ROUND.to_bits() as i32
}

/// Rounds a matrix `[K, N]` into `packed`, `[N / 16, K / 4, 16, 4]`, and puts the columns' scales and -128 times their sums into `scales`, `[2, N]`. A column that holds
/// something that is not finite gets a scale that is not, and so do its products.
pub(crate) fn pack(w: &[f32], n: usize, packed: &mut [i8], scales: &mut [f32]) {
    let k = w.len() / n.max(1);
    assert!(packed.len() == k * n && scales.len() == 2 * n && k.is_multiple_of(LANE) && n.is_multiple_of(BLOCK));
    let (scale, start) = scales.split_at_mut(n);
    let tasks = packed.par_chunks_mut(k * BLOCK).zip(scale.par_chunks_mut(BLOCK)).zip(start.par_chunks_mut(BLOCK));
    tasks.enumerate().for_each(|(block, ((packed, scale), start))| {
        let at = |row: usize, column: usize| w[row * n + block * BLOCK + column];
        for column in 0..BLOCK {
            let (most, doubt) = (0..k).fold((0f32, 0f32), |(most, doubt), row| {
                let x = at(row, column);
                (most.max(x.abs()), x.mul_add(0.0, doubt))
            });
            let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
            let mut sum = 0;
            for row in 0..k {
                let b = round(at(row, column) * inverse).clamp(-127, 127);
                packed[(row / LANE * BLOCK + column) * LANE + row % LANE] = b as i8;
                sum += b;
            }
            scale[column] = most / 127.0 + doubt;
            start[column] = (-128 * sum) as f32;
        }
    });
}

/// Rounds a row to bytes a + 128 and gives its scale, which is not finite where something in the row is not.
#[inline(always)]
fn round_row(x: &[f32], bytes: &mut [u8]) -> f32 {
    // Sixteen at a time: the compiler need not keep an order.
    let (mut most, mut doubt) = ([0f32; BLOCK], [0f32; BLOCK]);
    let (whole, rest) = x.as_chunks::<BLOCK>();
    for x in whole {
        for (x, (most, doubt)) in x.iter().zip(most.iter_mut().zip(&mut doubt)) {
            *most = if x.abs() > *most { x.abs() } else { *most };
            *doubt = x.mul_add(0.0, *doubt);
        }
    }
    for x in rest {
        most[0] = most[0].max(x.abs());
        doubt[0] = x.mul_add(0.0, doubt[0]);
    }
    let most = most.iter().fold(0f32, |a, b| a.max(*b));
    let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
    for (byte, x) in bytes.iter_mut().zip(x) {
        *byte = (round(x * inverse) + 128) as u8;
    }
    most / 127.0 + doubt.iter().sum::<f32>()
}

/// y[g] = x[g] w[g], with w as [`pack`] leaves it: `packed` `[G, K N]` and `scales` `[G, 2, N]`; then `epilogue(group, first row, rows)` over every piece of whole rows.
pub(crate) fn batched(
    x: &[f32],
    (packed, scales): (&[i8], &[f32]),
    s: Sizes,
    y: &mut [f32],
    path: Int8Path,
    epilogue: impl Fn(usize, usize, &mut [f32]) + Sync,
) {
    let Sizes { batch, m, n, k } = s;
    assert!(x.len() == batch * m * k && packed.len() == batch * k * n && scales.len() == batch * 2 * n);
    in_pieces(s, PANEL * BLOCK, y, &epilogue, |Piece { group, rows, columns, whole_rows, y }| {
        let (mut bytes, mut row_scales) = (vec![0u8; rows.len().min(ROWS) * k], [0f32; ROWS]);
        for first in rows.clone().step_by(ROWS) {
            let rows = first..rows.end.min(first + ROWS);
            super::simd!(for (i, row) in rows.clone().enumerate() {
                row_scales[i] = round_row(&x[(group * m + row) * k..][..k], &mut bytes[i * k..][..k]);
            });
            let product = Product {
                bytes: &bytes[..rows.len() * k],
                row_scales: &row_scales[..rows.len()],
                packed: &packed[group * k * n..][..k * n],
                scales: &scales[group * 2 * n..][..2 * n],
                // SAFETY: inside y, whose length `in_pieces` has asserted.
                y: unsafe { y.add((group * m + first) * n) },
                sizes: [rows.len(), n, k],
            };
            // SAFETY: the piece's elements of y are its own, and y is exclusively borrowed for the whole call; the path was chosen for this
            // processor.
            unsafe {
                match path {
                    Int8Path::Plain => super::simd!(product.plain(columns.clone())),
                    #[cfg(target_arch = "x86_64")]
                    Int8Path::Vnni => product.vnni(columns.clone()),
                }
                if whole_rows {
                    epilogue(group, first, std::slice::from_raw_parts_mut(product.y, rows.len() * n));
                }
            }
        }
    });
}

/// Blocks of columns that a tile has.
const PANEL: usize = 4;

/// Some rounded rows by a matrix.
struct Product<'a> {
    bytes: &'a [u8],       // [m, K]
    row_scales: &'a [f32], // [m]
    packed: &'a [i8],      // [N / 16, K / 4, 16, 4]
    scales: &'a [f32],     // [2, N]
    y: *mut f32,           // [m, N]
    sizes: [usize; 3],     // m, N, K
}

impl Product<'_> {
    /// Some whole blocks of columns, one lane of a block after the other: the plain twin.
    ///
    /// # Safety
    ///
    /// y has m N elements, and nothing else touches those of these columns.
    #[inline(always)]
    unsafe fn plain(&self, columns: Range<usize>) {
        let [m, n, k] = self.sizes;
        for (row, column) in (0..m).flat_map(|row| columns.clone().step_by(BLOCK).map(move |column| (row, column))) {
            let (a, b) = (&self.bytes[row * k..][..k], &self.packed[column * k..][..BLOCK * k]);
            let mut sums: [i32; BLOCK] = std::array::from_fn(|c| self.scales[n + column + c] as i32);
            for (a, b) in a.as_chunks::<LANE>().0.iter().zip(b.as_chunks::<{ BLOCK * LANE }>().0) {
                for (sum, b) in sums.iter_mut().zip(b.as_chunks::<LANE>().0) {
                    *sum += (0..LANE).map(|i| i32::from(a[i]) * i32::from(b[i])).sum::<i32>();
                }
            }
            for (c, sum) in sums.iter().enumerate() {
                // SAFETY: inside y, as the caller vouches.
                unsafe { *self.y.add(row * n + column + c) = *sum as f32 * self.row_scales[row] * self.scales[column + c] };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod vnni {
    use std::arch::x86_64::{
        _mm512_cvtepi32_ps, _mm512_cvtps_epi32, _mm512_dpbusd_epi32, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps,
        _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512, _mm512_storeu_ps,
    };
    use std::ops::Range;

    use super::{BLOCK, LANE, PANEL, Product};

    impl Product<'_> {
        /// Some whole blocks of columns, a tile of rows and blocks at a time, in registers.
        ///
        /// # Safety
        ///
        /// As for [`Product::plain`], and the processor has AVX-512 with VNNI.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        pub(super) unsafe fn vnni(&self, columns: Range<usize>) {
            let mut column = columns.start;
            // SAFETY: columns that are left, of all rows.
            unsafe {
                while columns.end - column >= PANEL * BLOCK {
                    self.panel::<PANEL>(column);
                    column += PANEL * BLOCK;
                }
                while column < columns.end {
                    self.panel::<1>(column);
                    column += BLOCK;
                }
            }
        }

        /// C blocks of columns of all rows.
        ///
        /// # Safety
        ///
        /// As for [`Product::vnni`].
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn panel<const C: usize>(&self, column: usize) {
            let m = self.sizes[0];
            let mut row = 0;
            while row < m {
                // SAFETY: rows that are left.
                row += unsafe {
                    match m - row {
                        6.. => self.tile::<6, C>(row, column),
                        4.. => self.tile::<4, C>(row, column),
                        2.. => self.tile::<2, C>(row, column),
                        _ => self.tile::<1, C>(row, column),
                    }
                };
            }
        }

        /// R rows of C blocks of columns. Returns R.
        ///
        /// # Safety
        ///
        /// As for [`Product::vnni`], for these rows and columns.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        #[allow(clippy::needless_range_loop)] // constant bounds, so that all of it stays in registers
        unsafe fn tile<const R: usize, const C: usize>(&self, row: usize, column: usize) -> usize {
            let [_, n, k] = self.sizes;
            let mut sums = [[_mm512_setzero_si512(); C]; R];
            // SAFETY: rows row .. row + R and columns column .. column + 16 C are inside the operands, whose lengths the sizes tell.
            unsafe {
                let (a, b) = (self.bytes.as_ptr().add(row * k), self.packed.as_ptr().add(column * k));
                let scales = self.scales.as_ptr().add(column);
                for c in 0..C {
                    let start = _mm512_cvtps_epi32(_mm512_loadu_ps(scales.add(n + c * BLOCK)));
                    for r in 0..R {
                        sums[r][c] = start;
                    }
                }
                for lane in 0..k / LANE {
                    let mut block = [_mm512_setzero_si512(); C];
                    for c in 0..C {
                        block[c] = _mm512_loadu_si512(b.add((c * k + lane * LANE) * BLOCK).cast());
                    }
                    for r in 0..R {
                        let four = _mm512_set1_epi32(a.add(r * k + lane * LANE).cast::<i32>().read_unaligned());
                        for c in 0..C {
                            sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], four, block[c]);
                        }
                    }
                }
                for r in 0..R {
                    let scale = _mm512_set1_ps(self.row_scales[row + r]);
                    for c in 0..C {
                        let y = _mm512_mul_ps(
                            _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][c]), scale),
                            _mm512_loadu_ps(scales.add(c * BLOCK)),
                        );
                        _mm512_storeu_ps(self.y.add((row + r) * n + column + c * BLOCK), y);
                    }
                }
            }
            R
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::matmul;
    use crate::paths;

    /// Numbers of both signs without a pattern that sizes could hide.
    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
    }

    /// Packed and its scales, for every group.
    fn packed(w: &[f32], Sizes { batch, n, k, .. }: Sizes) -> (Vec<i8>, Vec<f32>) {
        let (mut bytes, mut scales) = (vec![0i8; w.len()], vec![0f32; batch * 2 * n]);
        for g in 0..batch {
            pack(&w[g * k * n..][..k * n], n, &mut bytes[g * k * n..][..k * n], &mut scales[g * 2 * n..][..2 * n]);
        }
        (bytes, scales)
    }

    fn product(x: &[f32], w: &[f32], s: Sizes, path: Int8Path) -> Vec<f32> {
        let (bytes, scales) = packed(w, s);
        let mut y = vec![f32::NAN; s.batch * s.m * s.n];
        batched(x, (&bytes, &scales), s, &mut y, path, |_, _, rows| rows.iter_mut().for_each(|y| *y += 1.0));
        y
    }

    #[test]
    fn eight_bits_are_near_f32_and_both_paths_have_the_same_bits() {
        for [batch, m, n, k] in
            [[1, 1, 16, 4], [2, 7, 80, 12], [1, 49, 64, 260], [3, 130, 144, 64], [1, 3, 1040, 128], [2, 0, 16, 4]]
        {
            let s = Sizes { batch, m, n, k };
            let (x, w) = (numbers(batch * m * k, 1), numbers(batch * k * n, 2));
            let got = product(&x, &w, s, paths::int8_product());
            assert_eq!(got, product(&x, &w, s, Int8Path::Plain), "{s:?}");
            let mut exact = vec![0f32; got.len()];
            matmul::batched(&x, false, &w, false, s, &mut exact, false, |_, _, _| {});
            // Every term is off by at most half a step of each factor.
            let most = k as f32 * (0.5 / 127.0 * 2.0 + 0.25 / 127.0 / 127.0);
            let off = got.iter().zip(&exact).map(|(a, b)| (a - 1.0 - b).abs()).fold(0.0, f32::max);
            assert!(off <= most, "{s:?}: {off} > {most}");
            let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            let (error, whole) = (norm(&mut got.iter().zip(&exact).map(|(a, b)| a - 1.0 - b)), norm(&mut exact.iter().copied()));
            assert!(m == 0 || error < 0.02 * whole, "{s:?}: {error} of {whole}");
        }
    }

    #[test]
    fn few_rows_are_shared_by_more_threads_than_there_are_panels_of_columns() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(16).build().unwrap();
        for [m, n, k] in [[1, 80, 4096], [3, 144, 1024], [1, 768, 768], [2, 64, 2048]] {
            let s = Sizes { batch: 1, m, n, k };
            let (x, w) = (numbers(m * k, 5), numbers(k * n, 6));
            let got = pool.install(|| product(&x, &w, s, paths::int8_product()));
            assert_eq!(got, product(&x, &w, s, Int8Path::Plain), "{s:?}");
        }
    }

    #[test]
    fn integers_come_through_exactly() {
        // Rows and columns whose largest is 127 have steps of 1.
        let s = Sizes { batch: 1, m: 5, n: 32, k: 8 };
        let whole = |n: usize| (0..n).map(|i| (i * 37 % 255) as f32 - 127.0).collect::<Vec<_>>();
        let (mut x, mut w) = (whole(s.m * s.k), whole(s.k * s.n));
        x.chunks_mut(s.k).for_each(|row| row[0] = -127.0);
        w[..s.n].fill(127.0);
        let mut exact = vec![0f32; s.m * s.n];
        matmul::batched(&x, false, &w, false, s, &mut exact, false, |_, _, _| {});
        let got = product(&x, &w, s, paths::int8_product());
        assert!(got.iter().zip(&exact).all(|(a, b)| *a == b + 1.0));
    }

    #[test]
    fn zeros_stay_zero_and_what_is_not_finite_stays_visible() {
        let s = Sizes { batch: 1, m: 3, n: 32, k: 20 };
        let (mut x, mut w) = (numbers(s.m * s.k, 3), numbers(s.k * s.n, 4));
        x[..s.k].fill(0.0);
        x[s.k + 5] = f32::NAN;
        x[2 * s.k + 19] = f32::INFINITY;
        let y = product(&x, &w, s, paths::int8_product());
        assert!(y[..s.n].iter().all(|y| *y == 1.0), "{y:?}");
        assert!(y[s.n..].iter().all(|y| y.is_nan()), "{y:?}");
        w[3] = f32::NEG_INFINITY;
        let y = product(&x[..s.k], &w, Sizes { m: 1, ..s }, paths::int8_product());
        assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (i == 3)), "{y:?}");
    }
}
