//! Blocks of a product in tiles: a tile of the result is left + right for six pairs of parts, the smallest first.
//!
//! ```text
//! c += a1 b3, a1 b2, a2 b2, a2 b1, a3 b1, a1 b1        for each 32 numbers along k
//! ```

use std::arch::asm;

use super::pack::STRIP;
use super::{SIDE, Tile};

/// Where a piece of a product goes.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) c: *mut f32,
    /// How far its rows are apart.
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// To what is there.
    pub(super) add: bool,
}

/// Multiplies packed rows by packed columns, of `steps` times 32 numbers.
///
/// # Safety
///
/// The operands are packed for so many rows, columns and steps, c has those elements, and all tiles are configured whole.
pub(super) unsafe fn multiply(left: &[Tile], right: &[Tile], steps: usize, to: Target) {
    for i in (0..to.rows).step_by(2 * SIDE) {
        let a = left[i / (2 * SIDE) * steps * STRIP..].as_ptr();
        let few = to.rows - i <= SIDE;
        let (height, width) = if few { (SIDE, 4 * SIDE) } else { (2 * SIDE, 2 * SIDE) };
        for j in (0..to.columns).step_by(width) {
            let strip = |j: usize| right[j / (2 * SIDE) * steps * STRIP..].as_ptr();
            let (rows, columns) = (height.min(to.rows - i), width.min(to.columns - j));
            let compute = |c: *mut f32, row: usize| {
                // SAFETY: the caller of this has a whole block at c.
                unsafe {
                    if few {
                        // In place of columns that are missing those that are there, once more.
                        let second = if columns > 2 * SIDE { strip(j + 2 * SIDE) } else { strip(j) };
                        sixteen_rows(a, [strip(j), second], steps, c, row, to.add);
                    } else {
                        square(a, strip(j), steps, c, row, to.add);
                    }
                }
            };
            // SAFETY: elements of c that the caller vouches for.
            unsafe {
                let c = to.c.add(i * to.row + j);
                if (rows, columns) == (height, width) {
                    compute(c, to.row);
                } else {
                    edge(c, to.row, [rows, columns], width, compute);
                }
            }
        }
    }
}

/// A block of which some rows or columns are missing in c: computed beside it.
///
/// # Safety
///
/// c has so many rows and columns.
unsafe fn edge(c: *mut f32, c_row: usize, [rows, columns]: [usize; 2], width: usize, compute: impl Fn(*mut f32, usize)) {
    let mut block = [0f32; 4 * SIDE * SIDE];
    // SAFETY: a row of c, as the caller vouches.
    let row_of_c = |row: usize| unsafe { std::slice::from_raw_parts_mut(c.add(row * c_row), columns) };
    for row in 0..rows {
        block[row * width..][..columns].copy_from_slice(row_of_c(row));
    }
    compute(block.as_mut_ptr(), width);
    for row in 0..rows {
        row_of_c(row).copy_from_slice(&block[row * width..][..columns]);
    }
}

/// The instructions that begin and end a block, around those of a step: `c0` to `c3` say where the result's four tiles are.
macro_rules! block {
    ($c0:literal, $c1:literal, $c2:literal, $c3:literal, [$($step:expr),+ $(,)?], $($operands:tt)+) => {
        asm!(
            "test {add:e}, {add:e}",
            "jz 2f",
            concat!("tileloadd tmm0, [", $c0, "]"),
            concat!("tileloadd tmm1, [", $c1, "]"),
            concat!("tileloadd tmm2, [", $c2, "]"),
            concat!("tileloadd tmm3, [", $c3, "]"),
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            $($step,)+
            "dec {steps}",
            "jnz 3b",
            concat!("tilestored [", $c0, "], tmm0"),
            concat!("tilestored [", $c1, "], tmm1"),
            concat!("tilestored [", $c2, "], tmm2"),
            concat!("tilestored [", $c3, "], tmm3"),
            $($operands)+,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Both tiles of a part of one operand, into a register and the next one.
macro_rules! two {
    ($operand:literal, $part:literal, $first:literal, $second:literal) => {
        concat!(
            "tileloadd ",
            $first,
            ", [",
            $operand,
            " + {line} + 2048 * ",
            $part,
            "]\n",
            "tileloadd ",
            $second,
            ", [",
            $operand,
            " + {line} + 2048 * ",
            $part,
            " + 1024]"
        )
    };
}

/// 32 rows by 32 columns: c (+)= a b.
///
/// # Safety
///
/// As for [`multiply`].
unsafe fn square(a: *const Tile, b: *const Tile, steps: usize, c: *mut f32, row: usize, add: bool) {
    macro_rules! multiply {
        () => {
            "tdpbf16ps tmm0, tmm4, tmm6\n tdpbf16ps tmm1, tmm4, tmm7\n tdpbf16ps tmm2, tmm5, tmm6\n tdpbf16ps tmm3, tmm5, tmm7"
        };
    }
    macro_rules! a {
        ($part:literal) => {
            two!("{a}", $part, "tmm4", "tmm5")
        };
    }
    macro_rules! b {
        ($part:literal) => {
            two!("{b}", $part, "tmm6", "tmm7")
        };
    }
    // SAFETY: reads `steps` times the tiles of a strip of both, and reads and writes 32 rows of 32 elements of c. Of the registers only those named change.
    unsafe {
        block!(
            "{c} + {row}", "{c} + {row} + 64", "{lower} + {row}", "{lower} + {row} + 64",
            [
                a!("0"), b!("2"), multiply!(),
                b!("1"), multiply!(),
                a!("1"), multiply!(),
                b!("0"), multiply!(),
                a!("2"), multiply!(),
                a!("0"), multiply!(),
                "add {a}, 6144",
                "add {b}, 6144",
            ],
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            steps = inout(reg) steps => _,
            c = in(reg) c,
            lower = in(reg) c.add(SIDE * row),
            row = in(reg) 4 * row,
            line = in(reg) 64usize,
            add = in(reg) u32::from(add)
        );
    }
}

/// 16 rows by 64 columns, those of two strips: c (+)= a b.
///
/// # Safety
///
/// As for [`multiply`].
unsafe fn sixteen_rows(a: *const Tile, [b, d]: [*const Tile; 2], steps: usize, c: *mut f32, row: usize, add: bool) {
    macro_rules! a {
        ($part:literal) => {
            concat!("tileloadd tmm4, [{a} + {line} + 2048 * ", $part, "]")
        };
    }
    macro_rules! multiply {
        ($part:literal) => {
            concat!(
                two!("{b}", $part, "tmm5", "tmm6"),
                "\n tdpbf16ps tmm0, tmm4, tmm5\n tdpbf16ps tmm1, tmm4, tmm6\n",
                two!("{d}", $part, "tmm7", "tmm5"),
                "\n tdpbf16ps tmm2, tmm4, tmm7\n tdpbf16ps tmm3, tmm4, tmm5"
            )
        };
    }
    // SAFETY: as in `square`, with 16 rows of 64 elements of c, and the first tile of each pair of a's.
    unsafe {
        block!(
            "{c} + {row}", "{c} + {row} + 64", "{c} + {row} + 128", "{c} + {row} + 192",
            [
                a!("0"), multiply!("2"), multiply!("1"),
                a!("1"), multiply!("1"), multiply!("0"),
                a!("2"), multiply!("0"),
                a!("0"), multiply!("0"),
                "add {a}, 6144",
                "add {b}, 6144",
                "add {d}, 6144",
            ],
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            d = inout(reg) d => _,
            steps = inout(reg) steps => _,
            c = in(reg) c,
            row = in(reg) 4 * row,
            line = in(reg) 64usize,
            add = in(reg) u32::from(add)
        );
    }
}
