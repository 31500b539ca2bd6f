//! Shapes of the attention kernels' launches.

use super::Layout;
use crate::cuda::{CudaDevice, Launch};
use crate::error::Result;
use crate::paths::{self, AttentionPath, Products};
use crate::tensor::{DType, Tensor};

/// Which kernels run, and with what shape of blocks.
pub(super) struct Plan {
    layout: Layout,
    products: Products,
    /// Warps of a block: one for short sequences, where four would mostly idle.
    warps: usize,
}

impl Plan {
    /// `tensors` are those that the tensor-core kernels move 16 bytes at a time.
    pub(super) fn new(cuda: &CudaDevice, layout: Layout, tensors: &[&Tensor]) -> Self {
        let vectors = tensors.iter().all(|t| t.dtype() == DType::BF16 && t.ptr().is_multiple_of(16));
        let AttentionPath { products, warps } = paths::attention(cuda.card(), &layout, vectors);
        Plan { layout, products, warps }
    }

    pub(super) fn on_tensor_cores(&self) -> bool {
        self.products != Products::Plain
    }

    /// 32s of dimensions that the plain kernels are compiled for.
    pub(super) fn chunks(&self) -> usize {
        self.layout.heads.size.div_ceil(32).next_power_of_two()
    }

    /// A launch with one block for each head of `heads` and tile of `rows`: 16 rows a warp with tensor cores, 4 without.
    pub(super) fn launch<'a>(
        &self,
        cuda: &'a CudaDevice,
        dtype: DType,
        name: &str,
        rows: usize,
        heads: usize,
        shared: usize,
    ) -> Result<Launch<'a>> {
        let tile = self.warps * if self.on_tensor_cores() { 16 } else { 4 };
        let sizes = [("C_SIZE", self.layout.heads.size), ("C_WARPS", self.warps)];
        let launch = match self.products {
            Products::Plain => cuda.kernel_with("attention", dtype, &[("C_CHUNKS", self.chunks())], name)?,
            Products::Mma => cuda.kernel_with("attention_mma", dtype, &sizes, name)?,
            Products::Wgmma => cuda.kernel_with("attention_wgmma", dtype, &sizes, name)?,
        };
        Ok(launch.block(32 * self.warps).grid(self.layout.n * heads * rows.div_ceil(tile), 1, 1).shared(shared))
    }

    /// The arguments that all kernels end with.
    pub(super) fn sizes<'a>(&self, launch: Launch<'a>) -> Launch<'a> {
        let l = self.layout;
        let int = |x: usize| x as i32;
        let launch = launch.arg(l.q_row).arg(l.k_row).arg(int(l.heads.query)).arg(int(l.group()));
        launch.arg(int(l.tq)).arg(int(l.tk)).arg(int(l.heads.size)).arg(l.scale())
    }

    /// Bytes of `own` tiles of the block's rows and `passing` tiles of 32 rows, in f32, the latter padded by one: the plain kernels'.
    fn plain_shared(&self, own: usize, passing: usize) -> usize {
        let width = 32 * self.chunks();
        4 * (own * 16 * width + passing * 32 * (width + 1))
    }

    /// Bytes of `own` tiles of the block's rows and 2 double-buffered tiles of `passing` rows, in bf16.
    fn tiles_shared(&self, own: usize, passing: usize) -> usize {
        2 * self.layout.heads.size * (own * 16 * self.warps + 4 * passing)
    }

    pub(super) fn forward_shared(&self) -> usize {
        if self.on_tensor_cores() { self.tiles_shared(1, 16 * self.warps) } else { self.plain_shared(1, 2) }
    }

    /// Whether one kernel does the whole way back.
    pub(super) fn is_short(&self) -> bool {
        paths::attention_back_at_once(AttentionPath { products: self.products, warps: self.warps }, &self.layout)
    }

    /// Bytes of five tiles of 16 rows and two numbers for each row.
    pub(super) fn short_shared(&self) -> usize {
        5 * 16 * 2 * self.layout.heads.size + 2 * 16 * 4
    }

    pub(super) fn backward_shared(&self) -> usize {
        // Rows of a passing tile as in the kernels: BACK in attention_mma.cu, PASS in attention_wgmma.cu.
        let passing = match self.products {
            Products::Plain => return self.plain_shared(2, 2),
            Products::Mma if self.warps == 1 => 16,
            Products::Mma => 32,
            Products::Wgmma => 64,
        };
        // With room for the log-sum-exp and delta of the passing rows.
        self.tiles_shared(2, passing) + 4 * 4 * passing
    }
}
