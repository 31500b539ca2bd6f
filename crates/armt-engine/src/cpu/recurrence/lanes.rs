//! Numbers of neighbouring channels, side by side in one of the widest vectors.
//!
//! All of it is inlined into code that `simd!` compiles for the processor: arrays of fixed size stay in registers, and every operation takes
//! and gives them by value, so that no store can stand in the way of a load.

/// Channels of a strip: one vector of AVX-512, two of AVX2, four of NEON.
pub(super) const LANES: usize = 16;

/// A number of each channel of a strip.
pub(super) type Lanes = [f32; LANES];

/// A number of each channel, by its place. A macro, because neither a closure nor `std::array::from_fn` is sure to be inlined.
macro_rules! each {
    (|$l:ident| $value:expr) => {{
        let mut all = [0f32; $crate::cpu::recurrence::lanes::LANES];
        for ($l, one) in all.iter_mut().enumerate() {
            *one = $value;
        }
        all
    }};
}
pub(super) use each;

/// x y + z.
#[inline(always)]
pub(super) fn fma(x: &Lanes, y: &Lanes, z: &Lanes) -> Lanes {
    each!(|l| x[l].mul_add(y[l], z[l]))
}

/// x y + z for one x.
#[inline(always)]
pub(super) fn scaled(x: f32, y: &Lanes, z: &Lanes) -> Lanes {
    each!(|l| x.mul_add(y[l], z[l]))
}

/// x y.
#[inline(always)]
pub(super) fn product(x: &Lanes, y: &Lanes) -> Lanes {
    each!(|l| x[l] * y[l])
}

/// Numbers of at most [`LANES`] channels; those of channels that are not there are zero.
#[inline(always)]
pub(super) fn load(x: &[f32]) -> Lanes {
    match x.first_chunk() {
        Some(all) => *all,
        None => each!(|l| if l < x.len() { x[l] } else { 0.0 }),
    }
}

/// Four rows of four, turned: eight shuffles. Written out, because the compiler makes sixteen moves of single numbers of the plain form.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn turn_4(x: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    use std::arch::x86_64::{__m128, _mm_movehl_ps, _mm_movelh_ps, _mm_unpackhi_ps, _mm_unpacklo_ps};
    // SAFETY: both are four times four numbers, and any bits are numbers. The instructions are of SSE, which every x86-64 has.
    unsafe {
        let [a, b, c, d] = std::mem::transmute::<[[f32; 4]; 4], [__m128; 4]>(x);
        let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
        let rows = [_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab), _mm_movelh_ps(ab_high, cd_high), _mm_movehl_ps(cd_high, ab_high)];
        std::mem::transmute::<[__m128; 4], [[f32; 4]; 4]>(rows)
    }
}

/// Four rows of four, turned.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn turn_4(x: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    turn_4_plainly(x)
}

/// The plain twin of [`turn_4`].
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline(always)]
fn turn_4_plainly([a, b, c, d]: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    [[a[0], b[0], c[0], d[0]], [a[1], b[1], c[1], d[1]], [a[2], b[2], c[2], d[2]], [a[3], b[3], c[3], d[3]]]
}

/// Four numbers from `at` on.
#[inline(always)]
fn four(x: &[f32], at: usize) -> [f32; 4] {
    let x = &x[at..at + 4];
    [x[0], x[1], x[2], x[3]]
}

/// x + y.
#[inline(always)]
fn sum_4(x: [f32; 4], y: [f32; 4]) -> [f32; 4] {
    [x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]]
}

/// The sum of each vector, four vectors at a time so that all additions are of vectors; always in the same order.
#[inline(always)]
pub(super) fn totals(x: &[Lanes], sums: &mut [f32]) {
    let mut rest = [[0f32; LANES]; 4];
    for (x, sums) in x.chunks(4).zip(sums.chunks_mut(4)) {
        let x = match x.first_chunk::<4>() {
            Some(all) => all,
            None => {
                rest[..x.len()].copy_from_slice(x);
                &rest
            }
        };
        let mut parts = [[0f32; 4]; 4];
        for (part, x) in parts.iter_mut().zip(x) {
            *part = sum_4(sum_4(four(x, 0), four(x, 8)), sum_4(four(x, 4), four(x, 12)));
        }
        let [a, b, c, d] = turn_4(parts);
        let totals = sum_4(sum_4(a, c), sum_4(b, d));
        match sums.first_chunk_mut::<4>() {
            Some(all) => *all = totals,
            None => sums.copy_from_slice(&totals[..sums.len()]),
        }
    }
}

/// Rows `[channels, n]` of at most [`LANES`] channels as n vectors of a number of each.
#[inline(always)]
pub(super) fn turn(x: &[f32], n: usize, turned: &mut [Lanes]) {
    let turned = &mut turned[..n];
    let fours = if x.len() == LANES * n { n / 4 * 4 } else { 0 };
    for j in (0..fours).step_by(4) {
        let turned = &mut turned[j..j + 4];
        for l in (0..LANES).step_by(4) {
            let rows = turn_4([four(x, l * n + j), four(x, (l + 1) * n + j), four(x, (l + 2) * n + j), four(x, (l + 3) * n + j)]);
            for (turned, row) in turned.iter_mut().zip(rows) {
                turned[l..l + 4].copy_from_slice(&row);
            }
        }
    }
    for (j, turned) in turned.iter_mut().enumerate().skip(fours) {
        *turned = each!(|l| x.get(l * n + j).copied().unwrap_or(0.0));
    }
}

/// [`turn`] back.
#[inline(always)]
pub(super) fn turn_back(turned: &[Lanes], n: usize, x: &mut [f32]) {
    let turned = &turned[..n];
    let fours = if x.len() == LANES * n { n / 4 * 4 } else { 0 };
    for j in (0..fours).step_by(4) {
        let turned = &turned[j..j + 4];
        for l in (0..LANES).step_by(4) {
            let rows = turn_4([four(&turned[0], l), four(&turned[1], l), four(&turned[2], l), four(&turned[3], l)]);
            for (i, row) in rows.into_iter().enumerate() {
                x[(l + i) * n + j..][..4].copy_from_slice(&row);
            }
        }
    }
    for (l, x) in x.chunks_exact_mut(n).enumerate() {
        for (x, turned) in x.iter_mut().zip(turned).skip(fours) {
            *x = turned[l];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math;

    #[test]
    fn four_rows_are_turned_as_their_plain_twin_turns_them() {
        let x = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0], [13.0, 14.0, 15.0, 16.0]];
        assert_eq!(turn_4(x), turn_4_plainly(x));
        assert_eq!(turn_4(turn_4(x)), x);
    }

    #[test]
    fn sums_of_vectors_are_those_of_one_by_one() {
        for count in [0, 1, 3, 4, 11] {
            let x: Vec<Lanes> = (0..count).map(|i| each!(|l| ((i * 31 + l * 7) % 13) as f32 * 0.37 - 1.0)).collect();
            let mut sums = vec![0.0; count];
            totals(&x, &mut sums);
            assert_eq!(sums, x.iter().map(|x| math::total(*x)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn rows_are_turned_and_turned_back_whatever_their_number() {
        for (channels, n) in [(16, 32), (16, 7), (16, 1), (5, 32), (3, 3), (16, 4), (1, 16)] {
            let x: Vec<f32> = (0..channels * n).map(|i| i as f32 + 1.0).collect();
            let mut turned = vec![[-1.0; LANES]; n + 1];
            turn(&x, n, &mut turned);
            for (j, turned) in turned[..n].iter().enumerate() {
                for (l, value) in turned.iter().enumerate() {
                    assert_eq!(*value, if l < channels { x[l * n + j] } else { 0.0 }, "{channels} by {n}");
                }
            }
            assert_eq!(turned[n], [-1.0; LANES]);
            let mut back = vec![0.0; x.len()];
            turn_back(&turned, n, &mut back);
            assert_eq!(back, x);
        }
    }
}
