//! How the CUDA kernels of `assoc.cu` cut a memory: into tiles of columns, of which a block walks over all or a share.

use crate::cpu::assoc::WriteSizes;
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// What a kernel holds in shared memory beside the tokens' features.
#[derive(Clone, Copy)]
pub(super) struct Held {
    /// Tiles at a time: A, or A and its gradient.
    pub(super) tiles: usize,
    /// Rows as wide as a tile, of every token.
    pub(super) rows: usize,
    /// Rows as wide as the features, of every token.
    pub(super) features: usize,
}

/// A cut. `assoc.cu` lays its shared memory out by the same numbers.
pub(super) struct Cut {
    /// Columns of A of a tile; the kernels are compiled for it.
    columns: usize,
    /// Tokens that are worked on at once; the kernels are compiled for it.
    group: usize,
    /// Blocks that share the tiles of a memory.
    pub(super) splits: usize,
    /// Two where the next tile is loaded while this one is worked on.
    pub(super) buffers: usize,
    /// Blocks in all.
    blocks: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

/// Columns and buffers, the best first: a wide tile makes long loads and few sums, a second buffer hides the loads.
const SHAPES: [(usize, usize); 6] = [(32, 2), (16, 2), (32, 1), (16, 1), (8, 2), (8, 1)];

impl Cut {
    /// The first shape of which several blocks fit on a multiprocessor, or else one. Tokens so many that not even one fits are an error.
    pub(super) fn new(cuda: &CudaDevice, s: WriteSizes, held: Held) -> Result<Self> {
        let limit = cuda.shared_limit();
        let group = if s.m <= 4 || held.features > 0 { 4 } else { 8 };
        let slots = s.m.next_multiple_of(group);
        let stride = if slots == 4 { 4 } else { slots + 4 };
        let bytes = |(columns, buffers): (usize, usize)| {
            let scratch = (slots * 2 * s.dm).max(8 * group * columns);
            4 * (buffers * held.tiles * s.dk() * (columns + 4)
                + s.dk() * stride
                + scratch
                + held.rows * slots * columns
                + 2 * group * columns
                + 3 * slots
                + held.features * slots * s.dk())
        };
        let tiles = |columns: usize| s.d.div_ceil(columns);
        // Enough blocks for two on every multiprocessor.
        let splits = |columns: usize| (2 * cuda.multiprocessors()).div_ceil(s.n.max(1)).clamp(1, tiles(columns));
        let useful = |(columns, buffers): &(usize, usize)| *buffers == 1 || tiles(*columns) > splits(*columns);
        let together = if group == 4 && held.tiles == 1 && held.features == 0 { 3 } else { 2 };
        // The system takes a kilobyte of each block.
        let fits = |room: usize| SHAPES.into_iter().filter(useful).find(|shape| bytes(*shape) <= room - 1024);
        let shape = fits(limit / together).or_else(|| fits(limit + 1024)).ok_or_else(|| {
            let needed = bytes((8, 1));
            let message =
                format!("{} tokens of {} features need {needed} bytes of shared memory, this GPU has {limit}", s.m, s.dk());
            Error::argument("associative memory", message)
        })?;
        let (columns, buffers) = shape;
        let splits = splits(columns);
        Ok(Cut { columns, group, splits, buffers, blocks: s.n * splits, shared: bytes(shape) })
    }

    /// The constants that the kernels are compiled with.
    pub(super) fn defines(&self) -> [(&'static str, usize); 2] {
        [("C_COLUMNS", self.columns), ("C_GROUP", self.group)]
    }

    /// A kernel of `assoc.cu` on this cut.
    pub(super) fn launch<'a>(&self, cuda: &'a CudaDevice, dtype: DType, name: &str) -> Result<Launch<'a>> {
        Ok(cuda.kernel_with("assoc", dtype, &self.defines(), name)?.grid(self.blocks, 1, 1).shared(self.shared))
    }
}
