//! Operands cut into tiles of bf16, three for each: `[strips of 32 rows or columns, k / 32, part, 2]`.
//!
//! A line of a left tile is a row, with pairs of numbers along k; one of a right tile is a pair, for 16 columns. A pair is of k and k + 16, so that making
//! one takes a shift and no shuffle; both operands have the same pairs, and so the same products. Numbers that lie the other way are turned within
//! their tile.

use std::arch::x86_64::{
    __m512, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_load_si512, _mm512_maskz_loadu_ps,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_srli_epi32, _mm512_store_si512,
    _mm512_sub_ps, _mm512_ternarylogic_epi32, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

use super::{DEPTH, Matrix, PARTS, SIDE, Tile};

/// Tiles of a strip for each 32 numbers along k: two of each part.
pub(super) const STRIP: usize = 2 * PARTS;

/// Makes `tiles` long enough for so many rows or columns.
pub(super) fn make_room(tiles: &mut Vec<Tile>, side: usize, k: usize) {
    let wanted = side.div_ceil(2 * SIDE) * k.div_ceil(DEPTH) * STRIP;
    if tiles.len() < wanted {
        tiles.resize(wanted, Tile([[0; SIDE]; SIDE]));
    }
}

/// Packs `side` rows (`LEFT`) or columns of k numbers each: number q of the i-th is at i x.row + q x.col. What is missing to whole strips is zero.
///
/// # Safety
///
/// Those elements are inside their allocation, one of the strides is 1, `tiles` has room, and the processor has AVX-512.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pack<const LEFT: bool>(x: Matrix, side: usize, k: usize, tiles: &mut [Tile]) {
    let (steps, groups) = (k.div_ceil(DEPTH), 2 * side.div_ceil(2 * SIDE));
    // The first part's tile of 16 rows or columns; those of the other parts are two and four tiles on.
    let at = |group: usize, step: usize| (group / 2 * steps + step) * STRIP + group % 2;
    let turn = |tiles: &mut [Tile], group: usize, step: usize| {
        tiles[at(group, step)..].iter_mut().step_by(2).take(PARTS).for_each(|tile| transpose(tile));
    };
    let inside = |from: usize, end: usize| ((1u32 << end.saturating_sub(from).min(SIDE)) - 1) as u16;
    // Sixteen numbers of which the end may be missing.
    let load = |present: u16, row: usize, q: usize| {
        // SAFETY: what the mask leaves out is not touched; the rest is inside, as the caller vouches.
        unsafe { _mm512_maskz_loadu_ps(present, x.ptr.wrapping_add(row * x.row + q * x.col)) }
    };
    if x.col == 1 {
        for (group, step) in (0..groups).flat_map(|group| (0..steps).map(move |step| (group, step))) {
            let q = step * DEPTH;
            let (low, high) = (inside(q, k), inside(q + SIDE, k));
            for line in 0..SIDE {
                let row = group * SIDE + line;
                let present = if row < side { u16::MAX } else { 0 };
                split(load(low & present, row, q), load(high & present, row, q + SIDE), &mut tiles[at(group, step)..], line);
            }
            if !LEFT {
                turn(tiles, group, step);
            }
        }
    } else {
        for step in 0..steps {
            // Line by line through all groups: neighbours in memory.
            for line in 0..SIDE {
                let q = step * DEPTH + line;
                for group in 0..groups {
                    let present = inside(group * SIDE, side);
                    let number = |q: usize| if q < k { load(present, group * SIDE, q) } else { _mm512_setzero_ps() };
                    split(number(q), number(q + SIDE), &mut tiles[at(group, step)..], line);
                }
            }
            if LEFT {
                (0..groups).for_each(|group| turn(tiles, group, step));
            }
        }
    }
}

/// Pairs of `low` and `high` in three parts, into a line of every other tile.
#[inline]
#[target_feature(enable = "avx512f")]
fn split(mut low: __m512, mut high: __m512, tiles: &mut [Tile], line: usize) {
    let (half, upper) = (_mm512_set1_epi32(0x8000), _mm512_set1_epi32(!0xffff));
    let round = |x: __m512| _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), upper));
    for part in 0..PARTS {
        let last = part + 1 == PARTS;
        let (l, h) = if last { (low, high) } else { (round(low), round(high)) };
        // low >> 16 | high & upper
        let pairs =
            _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi32::<16>(_mm512_castps_si512(l)), _mm512_castps_si512(h), upper);
        // SAFETY: a line is 64 bytes long and begins at a multiple of them.
        unsafe { _mm512_store_si512(tiles[2 * part].0[line].as_mut_ptr().cast(), pairs) };
        (low, high) = (_mm512_sub_ps(low, l), _mm512_sub_ps(high, h));
    }
}

/// Turns a tile: pairs change places with lines.
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)] // constant bounds, so that all of it stays in registers
fn transpose(tile: &mut Tile) {
    let lines = tile.0.as_mut_ptr();
    let (mut x, mut y) = ([_mm512_setzero_si512(); SIDE], [_mm512_setzero_si512(); SIDE]);
    for i in 0..SIDE {
        // SAFETY: as in `split`, here and below.
        x[i] = unsafe { _mm512_load_si512(lines.add(i).cast()) };
    }
    for i in (0..SIDE).step_by(2) {
        (y[i], y[i + 1]) = (_mm512_unpacklo_epi32(x[i], x[i + 1]), _mm512_unpackhi_epi32(x[i], x[i + 1]));
    }
    // x[4 g + c] has column 4 l + c of the lines 4 g .. 4 g + 4 in its lane l.
    for i in (0..SIDE).step_by(4) {
        (x[i], x[i + 1]) = (_mm512_unpacklo_epi64(y[i], y[i + 2]), _mm512_unpackhi_epi64(y[i], y[i + 2]));
        (x[i + 2], x[i + 3]) = (_mm512_unpacklo_epi64(y[i + 1], y[i + 3]), _mm512_unpackhi_epi64(y[i + 1], y[i + 3]));
    }
    for c in 0..4 {
        // Even lanes and odd ones of all four groups.
        let even = [_mm512_shuffle_i32x4::<0x88>(x[c], x[4 + c]), _mm512_shuffle_i32x4::<0x88>(x[8 + c], x[12 + c])];
        let odd = [_mm512_shuffle_i32x4::<0xdd>(x[c], x[4 + c]), _mm512_shuffle_i32x4::<0xdd>(x[8 + c], x[12 + c])];
        let turned = [
            _mm512_shuffle_i32x4::<0x88>(even[0], even[1]),
            _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]),
            _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]),
            _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]),
        ];
        for (lane, turned) in turned.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_store_si512(lines.add(4 * lane + c).cast(), turned) };
        }
    }
}
