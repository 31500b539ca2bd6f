//! How the CUDA kernels of `assoc_walk.cu` and `assoc_step.cu` cut a memory: into tiles of columns, of which a block walks over all or a share.

use super::MemorySizes;
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::paths::{self, Card};
use crate::tensor::DType;

/// What a kernel holds in shared memory beside the tokens' features.
#[derive(Clone, Copy)]
pub(super) struct Held {
    /// Tiles at a time: A, or A and a gradient.
    pub(super) tiles: usize,
    /// Whether it asks tiles for what is stored, which takes room for partial sums.
    pub(super) recalls: bool,
}

/// A cut. `assoc_walk.cu` lays its shared memory out by the same numbers.
pub(super) struct Cut {
    /// Columns of A of a tile; the kernels are compiled for it.
    columns: usize,
    /// Tokens that are worked on at once; the kernels are compiled for it.
    group: usize,
    /// Blocks of 16 keys of which a warp can hold sums over columns, or 0 where there are more; the kernels are compiled for it.
    pub(super) held: usize,
    /// Blocks that share the tiles of a memory.
    pub(super) splits: usize,
    /// Two where the next tile is loaded while this one is worked on.
    pub(super) buffers: usize,
    /// Blocks in all.
    blocks: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

/// Columns and buffers, the best first: a second buffer hides the loads, a wide tile makes long ones.
const SHAPES: [(usize, usize); 4] = [(32, 2), (16, 2), (32, 1), (16, 1)];
/// Warps of a block.
const WARPS: usize = 8;
/// Tokens or queries that are worked on at once; more take several groups.
const GROUPS: [usize; 2] = [8, 16];

/// The group that so many tokens come in.
fn group_of(tokens: usize) -> usize {
    if tokens <= GROUPS[0] { GROUPS[0] } else { GROUPS[1] }
}

/// Blocks of 16 keys of which a warp can hold sums over columns, if it can: each 16 columns of a tile have warps of their own, which share
/// the keys.
fn held_blocks(keys: usize, columns: usize) -> Option<usize> {
    let wanted = (keys / 16).div_ceil(WARPS / (columns / 16));
    [3, 6].into_iter().find(|held| wanted <= *held)
}

/// Tiles that a block could walk over while it makes its tokens' features.
const FEATURES: usize = 2;

/// Among how many blocks the tiles of each of n memories are shared, if `slots` blocks run at a time: so that all are done soonest, and in few
/// rounds. A few blocks more than there are slots would take a round of their own.
fn splits(n: usize, tiles: usize, slots: usize) -> usize {
    let cost = |splits: &usize| {
        let rounds = (n * splits).div_ceil(slots);
        (rounds * (FEATURES + tiles.div_ceil(*splits)), rounds)
    };
    (1..=tiles).rev().min_by_key(cost).unwrap_or(1)
}

impl Cut {
    /// The first shape of which several blocks fit on a multiprocessor, or else one. Tokens so many that not even one fits are an error.
    pub(super) fn new(card: Card, s: MemorySizes, held: Held) -> Result<Self> {
        let limit = card.shared;
        let group = group_of(s.m);
        let slots = s.m.next_multiple_of(group);
        let keys = s.dk().next_multiple_of(16);
        let bytes = |(columns, buffers): (usize, usize)| {
            // Sums of recall by every warp, of 16 columns each; r before that.
            let rows = if held.recalls { 16 * WARPS } else { columns };
            4 * (buffers * held.tiles * keys * columns + slots * (keys + rows.max(2 * s.dm) + 5))
        };
        let together = if group == 8 && held.tiles == 1 { 3 } else { 2 };
        let tiles = |columns: usize| s.d.div_ceil(columns);
        let splits = |columns: usize| splits(s.n, tiles(columns), together * card.multiprocessors);
        let useful = |(columns, buffers): &(usize, usize)| *buffers == 1 || tiles(*columns) > splits(*columns);
        // The system takes a kilobyte of each block.
        let fits = |room: usize| SHAPES.into_iter().filter(useful).find(|shape| bytes(*shape) <= room - 1024);
        let shape = fits(limit / together).or_else(|| fits(limit + 1024)).ok_or_else(|| {
            let needed = bytes((16, 1));
            let message =
                format!("{} tokens of {} features need {needed} bytes of shared memory, this GPU has {limit}", s.m, s.dk());
            Error::argument("associative memory", message)
        })?;
        let (columns, buffers) = shape;
        let held = held_blocks(keys, columns).filter(|_| s.m <= group).unwrap_or(0);
        let splits = splits(columns);
        Ok(Cut { columns, group, held, splits, buffers, blocks: s.n * splits, shared: bytes(shape) })
    }

    /// Sums over columns that a memory's blocks leave for each token.
    pub(super) fn sums(&self) -> usize {
        self.splits * (self.columns / 16)
    }

    /// A kernel of `assoc_walk.cu` on this cut.
    pub(super) fn launch<'a>(&self, cuda: &'a CudaDevice, dtype: DType, name: &str) -> Result<Launch<'a>> {
        let defines = [("C_COLUMNS", self.columns), ("C_GROUP", self.group), ("C_HELD", self.held)];
        Ok(cuda.kernel_with("assoc_walk", dtype, &defines, name)?.grid(self.blocks, 1, 1).shared(self.shared))
    }
}

/// A cut for a write and the read that follows it, in one walk. `assoc_step.cu` lays its shared memory out by the same numbers.
pub(super) struct StepCut {
    columns: usize,
    group: usize,
    queries: usize,
    held: usize,
    /// Whether the next tile is loaded while this one is worked on.
    pub(super) early: bool,
    blocks: usize,
    shared: usize,
}

impl StepCut {
    /// The cuts there and back, where one walk serves both and the memory fits it.
    pub(super) fn new(card: Card, s: MemorySizes, queries: usize) -> Option<[Self; 2]> {
        if !paths::write_read_in_one_walk(card, s, queries) {
            return None;
        }
        Some([Self::cut(card, s, queries, false)?, Self::cut(card, s, queries, true)?])
    }

    fn cut(card: Card, s: MemorySizes, queries: usize, back: bool) -> Option<Self> {
        let limit = card.shared;
        let (group, asked, keys) = (group_of(s.m), group_of(queries), s.dk().next_multiple_of(16));
        let bytes = |(columns, buffers): (usize, usize)| {
            // On the way back tiles of A and of its gradient take turns in three pieces, of which one is the next of A.
            let pieces = if back { buffers + 1 } else { buffers };
            // Sums of recall by every warp, of 16 columns each, and the queries' rows; before that r of a token, or products, by every warp.
            let rows = if back { 16 * WARPS * group + columns * asked } else { 16 * WARPS * (s.m + queries) };
            let rows = rows.max(WARPS * (2 * s.dm).max(group * asked));
            4 * (pieces * keys * columns + (group + asked) * (keys + 5) + group * asked + rows)
        };
        let useful = |(columns, buffers): &(usize, usize)| *buffers == 1 || s.d > *columns;
        let fits = |room: usize| {
            let shapes = SHAPES.into_iter().filter(useful);
            shapes.filter_map(|shape| Some((shape, held_blocks(keys, shape.0)?))).find(|(shape, _)| bytes(*shape) <= room - 1024)
        };
        let ((columns, buffers), held) = fits(limit / 2).or_else(|| fits(limit + 1024))?;
        let shared = bytes((columns, buffers));
        Some(StepCut { columns, group, queries: asked, held, early: buffers == 2, blocks: s.n, shared })
    }

    /// A kernel of `assoc_step.cu` on this cut.
    pub(super) fn launch<'a>(&self, cuda: &'a CudaDevice, dtype: DType, name: &str) -> Result<Launch<'a>> {
        let defines = [("C_COLUMNS", self.columns), ("C_GROUP", self.group), ("C_QUERIES", self.queries), ("C_HELD", self.held)];
        Ok(cuda.kernel_with("assoc_step", dtype, &defines, name)?.grid(self.blocks, 1, 1).shared(self.shared))
    }
}

#[cfg(test)]
mod tests {
    use super::splits;

    #[test]
    fn blocks_share_tiles_without_a_round_for_a_few_of_them() {
        // One memory: a tile for each block, as far as there are slots.
        assert_eq!((splits(1, 48, 264), splits(1, 300, 264)), (48, 264));
        // Nine blocks a memory would be 24 more than there are slots.
        assert_eq!((splits(32, 24, 264), splits(96, 24, 264)), (8, 2));
        assert_eq!(splits(12, 48, 264), 22);
        // Memories enough for all slots are not shared.
        assert_eq!((splits(264, 24, 264), splits(2048, 8, 396)), (1, 1));
    }
}
