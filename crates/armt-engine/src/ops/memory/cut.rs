//! How the CUDA kernels of `assoc_walk.cu` and `assoc_step.cu` cut a memory: into tiles of columns, of which a block walks over all or a share.

use super::{MemorySizes, WriteRule};
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
    /// Whether tokens take turns, which takes room for a second set of features and for what passes between them. `None` for a read, which
    /// is compiled as the paper's write.
    pub(super) rule: Option<WriteRule>,
}

/// Floats of `numbers` and squares that a group of tokens has beside its features.
fn token_floats(group: usize, rule: Option<WriteRule>) -> usize {
    5 * group + if rule == Some(WriteRule::Projected) { 4 * group * group } else { 0 }
}

/// Sets of features of each token: phi, and psi where tokens take turns.
fn feature_sets(rule: Option<WriteRule>) -> usize {
    if rule == Some(WriteRule::Projected) { 2 } else { 1 }
}

/// What a kernel is compiled for: how it works, and a memory's shape, `tokens` and `buffers`, or zeros where it takes any.
fn constants(
    shape: Option<MemorySizes>,
    tokens: usize,
    buffers: usize,
    how: &[(&'static str, usize)],
) -> Vec<(&'static str, usize)> {
    let values = shape.map_or([0; 5], |s| [s.dm, s.nu, s.d, tokens, buffers]);
    how.iter().copied().chain(["C_DM", "C_NU", "C_D", "C_TOKENS", "C_BUFFERS"].into_iter().zip(values)).collect()
}

/// A cut. `assoc_walk.cu` lays its shared memory out by the same numbers.
pub(super) struct Cut {
    /// Columns of A of a tile; the kernels are compiled for it.
    columns: usize,
    /// Tokens that are worked on at once; the kernels are compiled for it.
    group: usize,
    /// Blocks of 16 keys of which a warp can hold sums over columns, or 0 where there are more; the kernels are compiled for it.
    pub(super) held: usize,
    rule: Option<WriteRule>,
    sizes: MemorySizes,
    /// Keys, filled up.
    keys: usize,
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

/// Tokens of a projected write that take their turns in one pass over A: all, or as many as a block has room for.
pub(super) fn tokens_in_a_pass(card: Card, s: MemorySizes) -> usize {
    let held = Held { tiles: 2, recalls: true, rule: Some(WriteRule::Projected) };
    let most = s.m.min(paths::TURNS);
    if Cut::new(card, MemorySizes { m: most, ..s }, held).is_ok() { most } else { most.min(GROUPS[0]) }
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
            let rows = slots * if held.recalls { 16 * WARPS } else { columns }.max(2 * s.dm);
            let rows = if held.rule == Some(WriteRule::Projected) { rows.max(WARPS * group * group) } else { rows };
            let tokens = slots * feature_sets(held.rule) * keys + rows + token_floats(slots, held.rule);
            4 * (buffers * held.tiles * keys * columns + tokens)
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
            Error::unsupported("associative memory", message)
        })?;
        let (columns, buffers) = shape;
        let rule = held.rule;
        let held = held_blocks(keys, columns).filter(|_| s.m <= group).unwrap_or(0);
        let splits = splits(columns);
        Ok(Cut { columns, group, held, rule, sizes: s, keys, splits, buffers, blocks: s.n * splits, shared: bytes(shape) })
    }

    /// Sums over columns that a memory's blocks leave for each token.
    pub(super) fn sums(&self) -> usize {
        self.splits * (self.columns / 16)
    }

    /// A kernel of `assoc_walk.cu` on this cut.
    pub(super) fn launch<'a>(&self, cuda: &'a CudaDevice, dtype: DType, name: &str) -> Result<Launch<'a>> {
        Ok(self.kernel(cuda, dtype, name)?.grid(self.blocks, 1, 1).shared(self.shared))
    }

    /// The kernel that adds what the blocks of a projected write's way back left: a block a memory, with a tile's place for its sums.
    pub(super) fn launch_sum<'a>(&self, cuda: &'a CudaDevice, dtype: DType) -> Result<Launch<'a>> {
        let rows = (self.group * self.columns.max(2 * self.sizes.dm)).max(WARPS * self.group * self.group);
        let features = self.group * feature_sets(self.rule) * self.keys;
        let shared = 4 * (self.keys * self.columns + features + rows + token_floats(self.group, self.rule));
        Ok(self.kernel(cuda, dtype, "projected_backward_sum")?.grid(self.blocks / self.splits, 1, 1).shared(shared))
    }

    fn kernel<'a>(&self, cuda: &'a CudaDevice, dtype: DType, name: &str) -> Result<Launch<'a>> {
        let projected = usize::from(self.rule == Some(WriteRule::Projected));
        let how = [("C_COLUMNS", self.columns), ("C_GROUP", self.group), ("C_HELD", self.held), ("C_PROJECTED", projected)];
        // A model writes as many tokens in every segment; queries are as many as a segment has tokens, and the last one fewer.
        let tokens = if self.rule.is_some() { self.sizes.m } else { 0 };
        let shape = paths::walk_knows_shape(self.sizes).then_some(self.sizes);
        cuda.kernel_with("assoc_walk", dtype, &constants(shape, tokens, self.buffers, &how), name)
    }
}

/// Whether psi has the slots of a group that few tokens leave: no more shared memory then than in the paper's write. Three blocks of w2's walk there
/// run on a multiprocessor with it and two without. Kernels that take any shape lack a few registers for it.
fn psi_has_room(s: MemorySizes, group: usize) -> bool {
    s.m <= group / 2 && paths::walk_knows_shape(s)
}

/// A cut for a write and the read that follows it, in one walk. `assoc_step.cu` lays its shared memory out by the same numbers.
pub(super) struct StepCut {
    columns: usize,
    group: usize,
    queries: usize,
    held: usize,
    rule: WriteRule,
    sizes: MemorySizes,
    /// Two where the next tile is loaded while this one is worked on; on the way back that of A'.
    pub(super) buffers: usize,
    shared: usize,
}

impl StepCut {
    /// The cuts there and back, where one walk serves both and the memory fits it.
    pub(super) fn new(card: Card, s: MemorySizes, queries: usize, rule: WriteRule) -> Option<[Self; 2]> {
        if !paths::write_read_in_one_walk(card, s, queries) {
            return None;
        }
        Some([Self::cut(card, s, queries, rule, false)?, Self::cut(card, s, queries, rule, true)?])
    }

    fn cut(card: Card, s: MemorySizes, queries: usize, rule: WriteRule, back: bool) -> Option<Self> {
        let limit = card.shared;
        let (group, asked, keys) = (group_of(s.m), group_of(queries), s.dk().next_multiple_of(16));
        let bytes = |(columns, buffers): (usize, usize)| {
            // On the way back tiles of A and of its gradient take turns in three pieces, of which one is the next of A.
            let pieces = if back { buffers + 1 } else { buffers };
            // Sums of recall by every warp, of 16 columns each, and the queries' rows; before that r of a token, or products, by every warp.
            let rows = if back { 16 * WARPS * group + columns * asked } else { 16 * WARPS * (s.m + queries) };
            let parts = group * asked + if rule == WriteRule::Projected { group * group } else { 0 };
            let rows = rows.max(WARPS * (2 * s.dm).max(parts));
            let sets = if psi_has_room(s, group) { 1 } else { feature_sets(Some(rule)) };
            let features = (sets * group + asked) * keys;
            4 * (pieces * keys * columns + features + token_floats(group, Some(rule)) + 5 * asked + group * asked + rows)
        };
        let useful = |(columns, buffers): &(usize, usize)| *buffers == 1 || s.d > *columns;
        let fits = |room: usize| {
            let shapes = SHAPES.into_iter().filter(useful).filter_map(|shape| Some((shape, held_blocks(keys, shape.0)?)));
            // Three kinds of so many sums are more than there are registers.
            let held = |held: usize| rule == WriteRule::Paper || held < 6 || group + asked < 2 * GROUPS[1];
            shapes.filter(|(_, blocks)| held(*blocks)).find(|(shape, _)| bytes(*shape) <= room - 1024)
        };
        let ((columns, buffers), held) = fits(limit / 2).or_else(|| fits(limit + 1024))?;
        let shared = bytes((columns, buffers));
        Some(StepCut { columns, group, queries: asked, held, rule, sizes: s, buffers, shared })
    }

    /// A kernel of `assoc_step.cu` on this cut.
    pub(super) fn launch<'a>(&self, cuda: &'a CudaDevice, dtype: DType, name: &str) -> Result<Launch<'a>> {
        let projected = match self.rule {
            WriteRule::Paper => 0,
            WriteRule::Projected if psi_has_room(self.sizes, self.group) => 2,
            WriteRule::Projected => 1,
        };
        let how = [
            ("C_COLUMNS", self.columns),
            ("C_GROUP", self.group),
            ("C_HELD", self.held),
            ("C_PROJECTED", projected),
            ("C_QUERIES", self.queries),
        ];
        // In f32 the most sums of the most tokens leave no registers to know a shape with.
        let most = dtype == DType::F32 && self.held == 6 && self.group + self.queries == 2 * GROUPS[1];
        let shape = paths::walk_knows_shape(self.sizes).then_some(self.sizes).filter(|_| !most);
        let constants = constants(shape, self.sizes.m, self.buffers, &how);
        Ok(cuda.kernel_with("assoc_step", dtype, &constants, name)?.grid(self.sizes.n, 1, 1).shared(self.shared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_take_turns_in_one_pass_where_a_block_has_room_for_them() {
        let h200 = Card { multiprocessors: 132, memory: 139 << 30, shared: 227 << 10, wgmma: true };
        let a100 = Card { multiprocessors: 108, memory: 79 << 30, shared: 163 << 10, wgmma: false };
        let s = MemorySizes { n: 12, m: 16, dm: 64, d: 768, nu: 3 };
        assert_eq!(tokens_in_a_pass(h200, s), 16);
        assert_eq!(tokens_in_a_pass(h200, MemorySizes { m: 4, ..s }), 4);
        assert_eq!(tokens_in_a_pass(h200, MemorySizes { m: 40, ..s }), 16);
        assert_eq!(
            (tokens_in_a_pass(h200, MemorySizes { dm: 128, ..s }), tokens_in_a_pass(a100, MemorySizes { dm: 128, ..s })),
            (16, 8)
        );
    }

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
