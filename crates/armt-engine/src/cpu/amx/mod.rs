//! Products in f32 by the tiles of AMX, which multiply bf16: every number is the sum of three that have eight bits of its 24.
//!
//! ```text
//! x = x1 + x2 + x3,   x1 = round(x), x2 = round(x - x1), x3 = x - x1 - x2          exactly
//! x y = (x1 y1) + (x1 y2 + x2 y1) + (x1 y3 + x2 y2 + x3 y1) + what is below 2^-24 of it
//! ```
//!
//! So a product is six of bf16 with sums in f32, each of 16 times as many operations a cycle as fused multiply-adds of AVX-512 make, and nearer to
//! the exact one than a running sum in f32 is. An element's bits depend on its row, its column and k alone: not on how many rows there are, nor on
//! threads. Infinity counts as not a number here, and what is below 2^-126 as zero.
//!
//! Of the result a block of 32 x 32 is in four tiles while k runs, or one of 16 x 64 where 16 rows or fewer are left. `pack.rs` cuts operands into tiles,
//! `block.rs` multiplies them. k is cut into pieces whose tiles stay in the second-level cache: DEPTH x 16 of them.

mod block;
mod pack;

use std::arch::asm;
use std::cell::RefCell;
use std::ffi::{c_int, c_long};
use std::sync::OnceLock;

use super::small_product::Matrix;

/// Rows or columns of a tile, 16 lines of 64 bytes.
pub(super) const SIDE: usize = 16;
/// Numbers along k in a line: pairs of bf16.
const DEPTH: usize = 32;
/// Parts of a number.
const PARTS: usize = 3;
/// Numbers along k, rows and columns that are packed at a time.
const PIECE: Piece = Piece { k: 256, rows: 512, columns: 256 };

struct Piece {
    k: usize,
    rows: usize,
    columns: usize,
}

/// Pairs of bf16 along k, for 16 rows or columns.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Tile([[u32; SIDE]; SIDE]);

/// What `ldtilecfg` takes: all eight tiles whole.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    line_bytes: [u16; 16],
    lines: [u8; 16],
}

static CONFIG: Config = {
    let (mut line_bytes, mut lines) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        (line_bytes[tile], lines[tile]) = (64, 16);
        tile += 1;
    }
    Config { palette: 1, start: 0, reserved: [0; 14], line_bytes, lines }
};

/// Whether the processor has tiles of bf16, the system lets this process use them, which has to be asked for, and they work: there are virtual machines
/// that have the flags and end a process that believes them.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // Of leaf 7: AMX-BF16 and AMX-TILE.
        let has_tiles = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (1 << 22 | 1 << 24) == 1 << 22 | 1 << 24;
        let unwanted = std::env::var_os("ARMT_AMX").is_some_and(|value| value == "off");
        !unwanted && has_tiles && is_x86_feature_detected!("avx512f") && allowed() && survives(multiply_nothing)
    })
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// Asks the system for the registers of tiles.
fn allowed() -> bool {
    const SYS_ARCH_PRCTL: c_long = 158;
    const ARCH_REQ_XCOMP_PERM: c_long = 0x1023;
    const XFEATURE_XTILEDATA: c_long = 18;
    // SAFETY: a system call that changes nothing but what this process may use.
    unsafe { syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Whether a process of its own comes to the end of `what`, which may not allocate, lock or panic.
fn survives(what: fn()) -> bool {
    let mut status = -1;
    // SAFETY: of the threads only this one goes on in the new process, where it runs `what` and ends without anything that another could hold.
    unsafe {
        let process = fork();
        if process == 0 {
            what();
            _exit(0);
        }
        process > 0 && waitpid(process, &mut status, 0) == process && status == 0
    }
}

/// Each instruction that is used here, once.
fn multiply_nothing() {
    let mut tile = Tile([[0; SIDE]; SIDE]);
    // SAFETY: reads and writes `tile` alone. If the instructions are missing the process ends here, which is what is asked.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm0",
            "tileloadd tmm1, [{tile} + {line}]",
            "tilezero tmm2",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "tilestored [{tile} + {line}], tmm0",
            "tilerelease",
            config = in(reg) &CONFIG,
            tile = in(reg) &raw mut tile,
            line = in(reg) 64usize,
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            options(nostack),
        );
    }
}

thread_local! {
    /// Tiles of both operands' pieces.
    static PACKED: RefCell<[Vec<Tile>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// c `[m, n]` = (c +) a `[m, k]` b `[k, n]`, rows of c `c_row` apart. Of a and of b one of the two strides is 1.
///
/// # Safety
///
/// All elements so described must be inside their allocations, nothing else may touch those of c, and tiles must be [`available`].
pub(super) unsafe fn product(sizes: [usize; 3], a: Matrix, b: Matrix, c: *mut f32, c_row: usize, accumulate: bool) {
    let [m, n, k] = sizes;
    // b turned, so that of both operands the first axis is the result's and the second is k.
    let b = Matrix { ptr: b.ptr, row: b.col, col: b.row };
    let part = |x: Matrix, side: usize, k: usize| Matrix { ptr: x.ptr.wrapping_add(side * x.row + k * x.col), ..x };
    PACKED.with_borrow_mut(|[left, right]| {
        let depth = k.min(PIECE.k);
        pack::make_room(left, m.min(PIECE.rows), depth);
        pack::make_room(right, n.min(PIECE.columns), depth);
        // SAFETY: tiles are there, as the caller vouches. Their registers are used by `block` alone, and given back at the end.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, readonly)) };
        for (i0, k0) in (0..m).step_by(PIECE.rows).flat_map(|i| (0..k).step_by(PIECE.k).map(move |k| (i, k))) {
            let (rows, depth) = (PIECE.rows.min(m - i0), PIECE.k.min(k - k0));
            // SAFETY: these rows of a; columns of b and elements of c below, all inside what the caller vouches for. There is room in `left` and `right`.
            unsafe {
                pack::pack::<true>(part(a, i0, k0), rows, depth, left);
                for j0 in (0..n).step_by(PIECE.columns) {
                    let columns = PIECE.columns.min(n - j0);
                    pack::pack::<false>(part(b, j0, k0), columns, depth, right);
                    let to = block::Target { c: c.add(i0 * c_row + j0), row: c_row, rows, columns, add: accumulate || k0 > 0 };
                    block::multiply(left, right, depth.div_ceil(DEPTH), to);
                }
            }
        }
        // SAFETY: nothing is in the tiles any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(x: f32) -> f32 {
        f32::from_bits((x.to_bits() + 0x8000) & 0xffff_0000)
    }

    /// The three parts of a number.
    fn parts(x: f32) -> [f32; PARTS] {
        let first = round(x);
        let second = round(x - first);
        [first, second, x - first - second]
    }

    /// The plain twin: one element of the result, in the order in which tiles add. Of 32 numbers along k the first 16 are one sum and the others another.
    fn plain(a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32, k: usize, before: f32) -> f32 {
        let mut c = before;
        for first in (0..k).step_by(DEPTH) {
            for (left, right) in [(0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)] {
                let half = |from: usize| {
                    (from..k.min(from + DEPTH / 2)).fold(0f32, |sum, k| parts(a(k))[left].mul_add(parts(b(k))[right], sum))
                };
                c += half(first) + half(first + DEPTH / 2);
            }
        }
        c
    }

    /// Numbers of both signs with all of their 24 bits in use.
    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 20_011) as f32 / 10_007.3 - 1.0).collect()
    }

    /// A product of operands that are stored transposed or not, from what `before` has.
    fn product_of([m, n, k]: [usize; 3], a: &[f32], ta: bool, b: &[f32], tb: bool, before: Option<&[f32]>) -> Vec<f32> {
        let mut c = before.map_or(vec![f32::NAN; m * n], <[f32]>::to_vec);
        let turned = |row: usize, turn: bool, other: usize| if turn { (1, other) } else { (row, 1) };
        let ((a_row, a_col), (b_row, b_col)) = (turned(k, ta, m), turned(n, tb, k));
        let (a, b) = (Matrix { ptr: a.as_ptr(), row: a_row, col: a_col }, Matrix { ptr: b.as_ptr(), row: b_row, col: b_col });
        // SAFETY: operands and result are as large as the sizes say, and the caller has looked whether tiles are there.
        unsafe { product([m, n, k], a, b, c.as_mut_ptr(), n, before.is_some()) };
        c
    }

    #[test]
    fn a_process_that_ends_early_is_no_survivor() {
        fn missing() {
            // SAFETY: an instruction that no processor has ends the process, and this one is `survives`' own.
            unsafe { asm!("ud2", options(nomem, nostack)) };
        }
        assert!(survives(|| ()));
        assert!(!survives(missing));
    }

    fn skipped() -> bool {
        let skipped = !available();
        if skipped {
            println!("skipped: this processor has no tiles of bf16");
        }
        skipped
    }

    #[test]
    fn parts_are_the_whole_number_and_have_eight_bits_each() {
        for x in
            numbers(1000, 5).into_iter().flat_map(|x| [x, x * 1e20, x * 1e-20, x.next_up()]).chain([0.0, -0.0, 1.0, f32::MAX / 2.0])
        {
            let [first, second, third] = parts(x);
            assert!([first, second, third].iter().all(|part| part.to_bits() & 0xffff == 0), "{x}");
            assert_eq!(first + (second + third), x);
        }
    }

    #[test]
    fn tiles_have_the_bits_of_the_plain_twin() {
        if skipped() {
            return;
        }
        for (i, [m, n, k]) in [[1, 1, 1], [3, 16, 31], [16, 64, 32], [17, 65, 70], [32, 32, 64], [49, 130, 300], [520, 33, 40]]
            .into_iter()
            .enumerate()
        {
            let (a, b, before) = (numbers(m * k, i), numbers(k * n, i + 1), numbers(m * n, i + 2));
            for (ta, tb, before) in
                [(false, false, None), (false, true, Some(&before)), (true, false, Some(&before)), (true, true, None)]
            {
                let got = product_of([m, n, k], &a, ta, &b, tb, before.map(|c| &c[..]));
                for (at, got) in got.iter().enumerate() {
                    let (i, j) = (at / n, at % n);
                    let (a, b) = (
                        |q: usize| if ta { a[q * m + i] } else { a[i * k + q] },
                        |q: usize| if tb { b[j * k + q] } else { b[q * n + j] },
                    );
                    let expected = plain(a, b, k, before.map_or(0.0, |c| c[at]));
                    assert_eq!(got.to_bits(), expected.to_bits(), "{m} x {n} x {k}, {ta}, {tb}: {got} for {expected} at {i}, {j}");
                }
            }
        }
    }

    #[test]
    fn a_product_is_as_near_as_f32_can_be() {
        if skipped() {
            return;
        }
        let [m, n, k] = [37, 50, 777];
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        for (at, got) in product_of([m, n, k], &a, false, &b, false, None).into_iter().enumerate() {
            let terms = || (0..k).map(|q| f64::from(a[at / n * k + q]) * f64::from(b[q * n + at % n]));
            let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            assert!((f64::from(got) - exact).abs() < 2e-7 * size, "{got} for {exact}");
        }
    }

    #[test]
    fn a_row_has_the_same_bits_among_any_others() {
        if skipped() {
            return;
        }
        let [n, k] = [70, 300];
        let (a, b) = (numbers(600 * k, 1), numbers(k * n, 2));
        let all = product_of([600, n, k], &a, false, &b, false, None);
        for m in [1, 2, 16, 17, 31, 33, 513] {
            assert_eq!(product_of([m, n, k], &a, false, &b, false, None), all[..m * n], "{m} rows");
        }
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        if skipped() {
            return;
        }
        let [m, n, k] = [3, 20, 40];
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff)] {
            let mut a = numbers(m * k, 1);
            a[k + 7] = bad;
            let c = product_of([m, n, k], &a, false, &numbers(k * n, 2), false, None);
            assert!(c.iter().enumerate().all(|(at, c)| c.is_finite() == (at / n != 1)), "{bad}: {c:?}");
        }
    }
}
