//! Which kernel or path is taken when, and why. Every such decision of the engine is here, as a function of shapes, types and the device
//! alone: so the same call takes the same path in every run, and the tests can ask what a card they do not have would run.
//!
//! What a path does is said where it is done; each has a plain twin that the tests hold it to. Figures are of an H200 in bf16 unless they
//! say otherwise, and most have their story in docs/LOG.md.
//!
//! ```text
//! on the CPU            bf16 is a storage type: operations cast to f32 and back (`ops::via_f32`)
//! memory, read          a walk over A, or features and a product           read_by_walk, read_by_task
//!                       features by lanes, or any width                    read_by_lanes
//! memory, tokens        k, v and beta by one kernel, or three products   tokens_in_one_launch
//! memory, write         tokens in turn, as many in a pass as fit             TURNS
//! memory, write + read  at once, or one after the other                    write_read_in_one_walk, read_by_task, write_rounds
//! memory, walks         kernels for one shape of memory, or for any        walk_knows_shape
//!                       how a walk is cut into tiles and blocks            ops/memory/cut.rs
//! attention             wgmma, mma or plain loops                          attention, attention_back_at_once
//! linear                one column, cuBLASLt with or without an epilogue   linear
//! norm, softmax, loss   lanes that hold a row, or a block                  norm, softmax, short_row
//! sums over an axis     kernels by width, pieces of the summed axis        sum_columns, sum_pieces
//! rows of a table       ranges and pieces that gradients are summed in       scatter_pieces
//! logits                rows that exist at a time                          logits_rows
//! products              when cuBLASLt's suggestions are tried              tries_suggestions (cuda/tune.rs)
//! recurrences           how many tokens a chunk has                        token_chunk
//!                       Mamba's convolution, scan and gate in one kernel   conv_silu, gated_scan
//!                       RWKV's shift and what is mixed from it in one      token_mix
//!                       what a task of the CPU's selective scan takes      scan_tasks
//! threads of the CPU    when another one pays                              rows_per_piece, attention_tasks, product_pieces
//! last layer            only its memory tokens, or all                     narrow_pays
//! ```

use crate::ops::attention::Layout;
use crate::ops::memory::MemorySizes;
use crate::ops::{Activation, Sizes};

/// What decisions ask of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    /// Multiprocessors.
    pub(crate) multiprocessors: usize,
    /// Bytes of its memory.
    pub(crate) memory: usize,
    /// Bytes of shared memory that one block can have.
    pub(crate) shared: usize,
    /// Whether products of whole warpgroups (`wgmma`) exist: on Hopper only, neither before nor after.
    pub(crate) wgmma: bool,
}

/// Most queries of a memory that a walk over A serves: the kernels have groups of 8 and 16 tokens, and a product reads A once for any number.
const WALK_QUERIES: usize = 16;

/// Whether a read walks over A, once and in f32, instead of making features and multiplying: for a few queries of each of many memories,
/// as small segments in training have them. 91 us for w2's 2,048 memories where rounding A for a product alone takes 80. With fewer
/// memories than multiprocessors blocks would idle. (A memory too wide for the walk takes the product all the same.)
pub(crate) fn read_by_walk(card: Card, s: MemorySizes) -> bool {
    s.m <= WALK_QUERIES && s.n >= card.multiprocessors
}

/// Most queries of a memory for which one task of the CPU a memory is faster than products.
const TASK_QUERIES: usize = 32;

/// Whether one task of the CPU should do all of a memory's read, and of the write before it where they are at once: A comes from main memory
/// once, and its gradient too, while the products as such would each pass over both. w2 gains 3 % by reads so, and 3 % by writes with them, texts
/// of 50 segments 6 to 18 %. Four memories a thread, or threads would idle at the end.
pub(crate) fn read_by_task(s: MemorySizes, threads: usize) -> bool {
    s.m <= TASK_QUERIES && s.n >= 4 * threads
}

/// Queries for each warp where the features of a read are made by lanes that ask their neighbours (`read_lanes.cu`), or `None` for the kernels
/// that take any width: a row of r = relu([q, -q]) must fill the lanes with 1, 2 or 4 elements each, and three orders fit the registers.
/// 4.2 us of w1 where rows in shared memory take 7.4. Warps enough to hide the memory's latency first; then more queries for each, which
/// share a z.
pub(crate) fn read_by_lanes(card: Card, s: MemorySizes) -> Option<usize> {
    let fits = [16, 32, 64].contains(&s.dm) && s.nu <= 3;
    fits.then(|| (s.n * s.m / (64 * card.multiprocessors)).clamp(1, 16))
}

/// Rows of one product of tensor cores.
const TILE_ROWS: usize = 16;

/// Whether keys, values and importance of `rows` memory tokens, those of all texts of a layer, come from one kernel where nothing is recorded: as
/// many as one tile has, with widths (of the tokens, of keys, of values) that 8 bytes an access allow. The products of 16 rows of w1 take
/// little more than a launch and their weights' bytes, 15 MB; more rows would read the weights again. With this and walks for one shape
/// w1 has 1.87M tokens/s where it had 1.79M.
pub(crate) fn tokens_in_one_launch(rows: usize, [width, dm, d]: [usize; 3]) -> bool {
    let vectors = width.is_multiple_of(16) && dm.is_multiple_of(4) && d.is_multiple_of(4);
    rows <= TILE_ROWS && vectors && width * dm.max(d) <= i32::MAX as usize
}

/// Tokens that take turns in one walk of a projected write on CUDA: one group of the kernels, whose products with each other a block solves in
/// shared memory. No model has more so far.
pub(crate) const TURNS: usize = 16;

/// Whether a write and the read that follows it are one walk over A: few tokens, few queries, and memories for half of the
/// multiprocessors or more, since a block has a whole memory there. w2 took 54.8 ms with it and 62.8 without. Anything else takes the write
/// and the read one after the other, which share a memory's columns among blocks.
pub(crate) fn write_read_in_one_walk(card: Card, s: MemorySizes, queries: usize) -> bool {
    s.m <= WALK_QUERIES && queries <= WALK_QUERIES && s.n >= card.multiprocessors / 2
}

/// Columns of the widest tile, and keys of a block of a tile: a shape of which tiles and blocks are whole.
const WIDEST_TILE: usize = 32;
const KEYS_OF_A_BLOCK: usize = 16;

/// Whether the kernels that walk over A are compiled for the very shape of a model's memory: the walk is bound by its instructions, of which half
/// count rows and columns and ask whether they are there. w2's loop over tiles has some 1,100 of them instead of 1,900 on its way back, and w2
/// takes 39.5 ms with such kernels where it took 50.7, with the projected write 40.9 and not 60.8. Other shapes share kernels that take any.
pub(crate) fn walk_knows_shape(s: MemorySizes) -> bool {
    s.d.is_multiple_of(WIDEST_TILE) && s.dk().is_multiple_of(KEYS_OF_A_BLOCK)
}

/// Whether a write leaves A rounded to bf16 for the read that follows: where that read will be a product of bf16 operands, which else would
/// round A in a pass of its own (7 us of w1).
pub(crate) fn write_rounds(queries: usize) -> bool {
    queries > WALK_QUERIES
}

/// What computes attention's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Products {
    /// Loops in f32: `attention.cu`.
    Plain,
    /// Tensor cores, a warp at a time: `attention_mma.cu`.
    Mma,
    /// Tensor cores, four warps at a time: `attention_wgmma.cu`.
    Wgmma,
}

/// How attention runs on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionPath {
    pub(crate) products: Products,
    /// Warps of a block.
    pub(crate) warps: usize,
}

/// Keys of one tile of a warp: so few are one pass, and three of four warps would idle.
const SHORT_KEYS: usize = 16;

/// bf16 heads of 32, 64 and 128 go to tensor cores if every access can be of 16 bytes (`vectors`: all operands are bf16 and begin so).
/// Warpgroup products where they exist, with heads of 32 and 64, whose rows are one swizzle atom: w4 58.0 ms instead of 62.4.
pub(crate) fn attention(card: Card, l: &Layout, vectors: bool) -> AttentionPath {
    let cores = vectors && matches!(l.heads.size, 32 | 64 | 128) && l.q_row.is_multiple_of(8) && l.k_row.is_multiple_of(8);
    let short = l.tk <= SHORT_KEYS;
    let products = match cores {
        false => Products::Plain,
        true if card.wgmma && l.heads.size <= 64 && !short => Products::Wgmma,
        true => Products::Mma,
    };
    AttentionPath { products, warps: if cores && short { 1 } else { 4 } }
}

/// Whether one kernel does attention's whole way back: where queries and keys are one tile each and no heads are shared, all gradients
/// come from the same 16 x 16 probabilities.
pub(crate) fn attention_back_at_once(path: AttentionPath, l: &Layout) -> bool {
    let one_tile = l.tq > 0 && l.tq <= SHORT_KEYS && l.tk <= SHORT_KEYS;
    path.products == Products::Mma && path.warps == 1 && one_tile && l.heads.query == l.heads.key
}

/// How a linear layer runs on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinearPath {
    /// A dot product a row, in a kernel of our own.
    OneColumn,
    /// cuBLASLt, with bias and activation in its epilogue if it can, else in a kernel that follows.
    Product,
}

/// One column without anything after it is a dot product, for which cuBLASLt takes half as long again (5.2 us of w1 where the kernel takes
/// 3.4).
pub(crate) fn linear(s: Sizes, activation: Activation, residual: bool) -> LinearPath {
    if s.n == 1 && activation == Activation::None && !residual { LinearPath::OneColumn } else { LinearPath::Product }
}

/// Which kernel a normalised row takes: lanes that hold it in registers, `held` accesses a lane, or a block that reads it again for each
/// pass. Vectors of 16 bytes where the width and all addresses allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormPath {
    /// Lanes with 16 bytes an access.
    Vector { lanes: usize, held: usize },
    /// Lanes with an element an access.
    Scalar { lanes: usize, held: usize },
    /// A block, 16 bytes an access.
    WideVector,
    /// A block, an element an access.
    Wide,
}

/// Of the ways to hold a row of d elements, `width` to 16 bytes, the first that it fits in, so that few lanes are idle: 16 lanes where a
/// row has no work for 32. `vectors`: all operands begin at a multiple of 16 bytes.
pub(crate) fn norm(d: usize, width: usize, vectors: bool) -> NormPath {
    let first = |ways: &[(usize, usize)], units: usize| ways.iter().copied().find(|(lanes, held)| units <= lanes * held);
    if vectors && d.is_multiple_of(width) {
        let way = first(&[(16, 1), (32, 1), (16, 3), (32, 2), (32, 3), (32, 4)], d / width);
        way.map_or(NormPath::WideVector, |(lanes, held)| NormPath::Vector { lanes, held })
    } else {
        let way = first(&[(32, 2), (32, 8)], d);
        way.map_or(NormPath::Wide, |(lanes, held)| NormPath::Scalar { lanes, held })
    }
}

/// Blocks of a norm's way back that a multiprocessor runs at once: more where a row takes few registers.
pub(crate) fn norm_blocks(path: NormPath) -> usize {
    match path {
        NormPath::Vector { held: 1, .. } | NormPath::Scalar { held: 2, .. } => 4,
        _ => 2,
    }
}

/// Elements of a row of d that each lane of a warp holds in registers for a softmax, or `None` where a block takes the row.
pub(crate) fn softmax(d: usize) -> Option<usize> {
    [2, 8, 32].into_iter().find(|held| d <= 32 * held)
}

/// Whether a warp rather than a block takes a row of a loss or of argmax: below this a block's threads have less than four elements each.
pub(crate) fn short_row(length: usize) -> bool {
    length <= 1024
}

/// The kernel of `reduce.cu` that sums over the middle axis, and the columns of one of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SumPath {
    pub(crate) kernel: &'static str,
    pub(crate) columns: usize,
}

/// `whole`: all sums go to one tensor; `vectors`: x begins at a multiple of 16 bytes. Four columns a thread are 16 bytes a load: bias gradients
/// of w2 took 278 us one by one.
pub(crate) fn sum_columns(inner: usize, whole: bool, vectors: bool) -> SumPath {
    match inner {
        1 if whole => SumPath { kernel: "sum_last", columns: 1 },
        _ if vectors && inner.is_multiple_of(4) => SumPath { kernel: "sum_middle_wide", columns: 128 },
        _ => SumPath { kernel: "sum_middle", columns: 32 },
    }
}

/// Into how many pieces the summed axis is cut, for `tiles` blocks of columns: enough to fill the card, but none so that a multiprocessor
/// would get a fifth block while others have four, and none shorter than a block has work for.
pub(crate) fn sum_pieces(card: Card, tiles: usize, middle: usize, inner: usize) -> usize {
    let wanted = card.multiprocessors * 4 / tiles.max(1);
    let most = middle.div_ceil(if inner == 1 { 1024 } else { 64 });
    wanted.min(most).clamp(1, 1024)
}

/// Positions that a block of an embedding's way back lists at a time; `CHUNK` of the kernel.
const SCATTER_CHUNK: usize = 2048;
/// Most bytes of the sums of its pieces.
const SCATTER_BYTES: usize = 32 << 20;

/// How the gradient of a table is summed on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScatterPieces {
    /// Rows of the table that a block owns.
    pub(crate) span: usize,
    /// Positions of a piece.
    pub(crate) length: usize,
    /// Pieces, each with sums of its own.
    pub(crate) pieces: usize,
}

/// Ranges of rows enough to fill the card, for `tiles` blocks of columns, and for small tables, where one range would look through all
/// positions, pieces of the positions too. A row's place in its range and a position in its chunk share one int.
pub(crate) fn scatter_pieces(card: Card, [n, vocabulary, d]: [usize; 3], tiles: usize) -> ScatterPieces {
    let wanted = (card.multiprocessors * 8 / tiles.max(1)).max(vocabulary.div_ceil(1 << 20)).max(1);
    let most = SCATTER_BYTES / (vocabulary * d * 4).max(1);
    let length = n.div_ceil(most.clamp(1, 1024)).next_multiple_of(SCATTER_CHUNK).max(2 * SCATTER_CHUNK);
    ScatterPieces { span: vocabulary.div_ceil(wanted).max(1), length, pieces: n.div_ceil(length).max(1) }
}

/// Most bytes of logits that exist at a time on the CPU where the caller does not choose, and the part of a GPU's memory that they may take there.
/// Logits that are one chunk are kept for the way back, which would multiply for them once more; and every chunk adds to the whole gradient of
/// the table, of 50,280 rows of 768 309 MB read and written. So a GPU takes as large ones as do not matter to it.
const LOGITS_BYTES: usize = 64 << 20;
const LOGITS_PART: usize = 64;

/// Rows of logits that exist at a time: as asked, or as many as fit, in whole tiles of a product where that is more than one.
pub(crate) fn logits_rows(asked: usize, rows: usize, row_bytes: usize, card: Option<Card>) -> usize {
    let fit = card.map_or(LOGITS_BYTES, |card| card.memory / LOGITS_PART) / row_bytes;
    let whole = if fit > 64 { fit / 64 * 64 } else { fit };
    (if asked == 0 { whole } else { asked }).clamp(1, rows.max(1))
}

/// Whether cuBLASLt's suggestions for a product of so many operations are tried: smaller ones are over before it matters.
pub(crate) fn tries_suggestions(operations: f64) -> bool {
    operations >= 2e8
}

/// Elements of a layer's inputs, B T d, from which on a GPU gains by computing only the memory tokens of a last layer that nobody hears: the few
/// rows are kernels of their own. Of w1's shape 4 texts have as many: they gain at most 1 %, 8 texts 4 %, and 2 would lose 6 %.
const NARROW_FROM: usize = 3 << 19;

/// Whether that pays for a layer's inputs of so many elements. On the CPU it always does.
pub fn narrow_pays(elements: usize, cuda: bool) -> bool {
    !cuda || elements >= NARROW_FROM
}

/// Element operations that are not worth another thread of the CPU: some 10 us of work, what handing it over costs.
const GRAIN: usize = 1 << 14;

/// Whether so many element operations are done by the calling thread alone.
pub(crate) fn stays_on_one_thread(operations: usize) -> bool {
    operations < 2 * GRAIN
}

/// How many rows of `cost` element operations one task of the CPU takes: all where it is not worth it; else at least a grain of work, and
/// about four tasks a thread for balance.
pub(crate) fn rows_per_piece(rows: usize, cost: usize, threads: usize) -> usize {
    if threads == 1 || stays_on_one_thread(rows * cost) {
        return rows.max(1);
    }
    rows.div_ceil(threads * if rows * cost < 64 * GRAIN { 1 } else { 4 }).max(GRAIN.div_ceil(cost.max(1))).max(1)
}

/// Multiplications of attention that are not worth a task of the CPU of their own.
const ATTENTION_GRAIN: usize = 1 << 15;

/// How many of `tasks` heads of `cost` multiplications are put together, or `None` where one thread does all.
pub(crate) fn attention_tasks(tasks: usize, cost: usize) -> Option<usize> {
    (tasks * cost >= 2 * ATTENTION_GRAIN).then(|| ATTENTION_GRAIN.div_ceil(cost.max(1)))
}

/// Products on the CPU of fewer multiplications stay on one thread.
const SERIAL: usize = 1 << 16;
/// Fewest rows or columns of a piece of a product, so that the micro-kernels stay full.
const SMALLEST: usize = 32;

/// How a batched product is shared among threads of the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProductPieces {
    /// Pieces of each group.
    pub(crate) pieces: usize,
    /// Along the rows of the result, or else along its columns.
    pub(crate) by_rows: bool,
    /// On one thread.
    pub(crate) serial: bool,
}

/// As few pieces as give every thread the same number; the gemm crate's own threading synchronises inside a product, which costs a tenth at
/// our sizes.
pub(crate) fn product_pieces(s: Sizes, threads: usize) -> ProductPieces {
    if s.batch * s.m * s.n * s.k < SERIAL {
        return ProductPieces { pieces: 1, by_rows: true, serial: true };
    }
    let wanted = if s.batch >= 4 * threads { 1 } else { threads / gcd(s.batch, threads) };
    let by_rows = s.m >= wanted * SMALLEST || s.m >= s.n;
    let pieces = wanted.min(if by_rows { s.m } else { s.n }.div_ceil(SMALLEST)).max(1);
    ProductPieces { pieces, by_rows, serial: s.batch * pieces == 1 }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// How products with matrices in eight bits are computed on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Int8Path {
    /// By AVX-512's sums of four products of bytes.
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// In plain loops, slower than f32's products: a model then takes less memory and more time.
    Plain,
}

/// What the processor has.
pub(crate) fn int8_product() -> Int8Path {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni") {
        return Int8Path::Vnni;
    }
    Int8Path::Plain
}

/// Threads for each multiprocessor that a recurrence over tokens is cut into chunks for, and the fewest tokens of a chunk: a chunk is run twice
/// over, so that fewer would cost more than they give. Neither is measured yet.
const CHUNK_THREADS: usize = 1024;
const SHORTEST_CHUNK: usize = 64;

/// Tokens of a chunk of a recurrence whose sequences have `threads` threads together; a multiple of 32, and at least all of them where that
/// is enough.
pub(crate) fn token_chunk(card: Card, threads: usize, tokens: usize) -> usize {
    let wanted = (card.multiprocessors * CHUNK_THREADS).div_ceil(threads.max(1));
    tokens.div_ceil(wanted).max(SHORTEST_CHUNK).next_multiple_of(32)
}

/// Numbers of state a channel that `gated_scan.cu` is made for: those of all published Mambas.
const GATED_STATE: usize = 16;
/// Most weights a channel of `conv_silu`, whose inputs and their slopes a thread has in registers.
const FUSED_WEIGHTS: usize = 4;

/// Whether Mamba's scan and its gate are one kernel in which four threads walk over all tokens of a channel. `widths` are the columns of u, of what B
/// and C lie in, and of what z lies in; `fours`: four elements of each can be read at a time. Tokens are not cut into chunks there, which would
/// have each exponential computed twice, and one multiprocessor computes but 16 of them in a cycle: the layers of a diagonal, or the texts of a
/// batch, are blocks enough.
pub(crate) fn gated_scan(n: usize, widths: [usize; 3], sequences: usize, fours: bool) -> bool {
    n == GATED_STATE && widths.iter().all(|columns| columns.is_multiple_of(4)) && sequences <= 65_535 && fours
}

/// Whether Mamba's convolution, its silu and what takes x' and z apart are one kernel: where nothing is hidden, so that a channel's inputs are
/// neighbours.
pub(crate) fn conv_silu(width: usize, weights: usize, hides: bool, fours: bool) -> bool {
    width.is_multiple_of(4) && weights <= FUSED_WEIGHTS && !hides && fours
}

/// Whether RWKV's shift and what is mixed from it are one kernel: up to four mixes, sixteen bytes at a time, where nothing is hidden, so that the
/// token before is the neighbour.
pub(crate) fn token_mix(width: usize, mixes: usize, hides: bool, aligned: bool) -> bool {
    width.is_multiple_of(8) && (1..=4).contains(&mixes) && !hides && aligned
}

/// Strips of channels of a task of the selective scan on the CPU: B's and C's gradients are summed over them in vectors, and their states and rates
/// stay in the second-level cache.
const SCAN_STRIPS: usize = 4;
/// Tasks that a scan is at least cut into, where it has as many texts: enough for 16 threads, and few enough that rates, which each task makes
/// anew, cost nothing.
const SCAN_TASKS: usize = 64;

/// What a task of the selective scan takes on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScanTasks {
    /// Strips of channels.
    pub(crate) strips: usize,
    /// Texts.
    pub(crate) texts: usize,
}

/// By the sizes alone, and not by the number of threads: sums over channels and texts are those of tasks, added in their order.
pub(crate) fn scan_tasks(groups: usize, texts: usize, strips: usize) -> ScanTasks {
    let spans = groups * strips.div_ceil(SCAN_STRIPS);
    let parts = SCAN_TASKS.div_ceil(spans.max(1)).clamp(1, texts.max(1));
    ScanTasks { strips: SCAN_STRIPS, texts: texts.div_ceil(parts).max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Heads;

    const H200: Card = Card { multiprocessors: 132, memory: 139 << 30, shared: 227 << 10, wgmma: true };
    const A100: Card = Card { multiprocessors: 108, memory: 79 << 30, shared: 163 << 10, wgmma: false };

    fn memory(n: usize, m: usize) -> MemorySizes {
        MemorySizes { n, m, dm: 64, d: 128, nu: 3 }
    }

    #[test]
    fn few_queries_of_many_memories_walk_and_anything_else_multiplies() {
        assert!(read_by_walk(H200, memory(2048, 10)));
        assert!(!read_by_walk(H200, memory(2048, 17)) && !read_by_walk(H200, memory(24, 10)));
        assert!(read_by_task(memory(8, 32), 2) && !read_by_task(memory(7, 32), 2) && !read_by_task(memory(8, 33), 2));
        assert!(write_read_in_one_walk(H200, memory(66, 4), 10) && !write_read_in_one_walk(H200, memory(65, 4), 10));
        assert!(!write_read_in_one_walk(H200, memory(66, 17), 10) && !write_read_in_one_walk(H200, memory(66, 4), 17));
        assert!(write_rounds(17) && !write_rounds(16));
    }

    #[test]
    fn walks_are_compiled_for_shapes_of_whole_tiles() {
        let shape = |dm: usize, d: usize| MemorySizes { n: 1, m: 4, dm, d, nu: 3 };
        assert!(walk_knows_shape(shape(32, 128)) && walk_knows_shape(shape(64, 768)) && walk_knows_shape(shape(8, 32)));
        assert!(!walk_knows_shape(shape(32, 48)) && !walk_knows_shape(shape(17, 64)));
    }

    #[test]
    fn a_tile_of_tokens_is_one_launch() {
        assert!(tokens_in_one_launch(16, [768, 64, 768]) && tokens_in_one_launch(1, [16, 4, 4]));
        assert!(!tokens_in_one_launch(17, [768, 64, 768]));
        assert!(!tokens_in_one_launch(16, [24, 64, 768]) && !tokens_in_one_launch(16, [768, 6, 768]));
        assert!(!tokens_in_one_launch(16, [768, 64, 770]));
    }

    #[test]
    fn features_go_by_lanes_where_a_row_fills_them() {
        assert_eq!(read_by_lanes(H200, memory(24, 528)), Some(1));
        assert_eq!(read_by_lanes(H200, memory(24, 528_000)), Some(16));
        assert_eq!(read_by_lanes(H200, MemorySizes { dm: 17, ..memory(24, 528) }), None);
        assert_eq!(read_by_lanes(H200, MemorySizes { nu: 4, ..memory(24, 528) }), None);
    }

    #[test]
    fn attention_goes_to_the_fastest_products_that_take_it() {
        let layout = |size: usize, t: usize| {
            let heads = Heads { query: 2, key: 2, size };
            Layout { n: 1, tq: t, tk: t, heads, q_row: 6 * size, k_row: 6 * size }
        };
        let path = |card, size, t, vectors| attention(card, &layout(size, t), vectors);
        let of = |products, warps| AttentionPath { products, warps };
        assert_eq!(path(H200, 64, 528, true), of(Products::Wgmma, 4));
        assert_eq!(path(A100, 64, 528, true), of(Products::Mma, 4));
        assert_eq!(path(H200, 128, 528, true), of(Products::Mma, 4));
        assert_eq!(path(H200, 32, 14, true), of(Products::Mma, 1));
        assert_eq!(path(H200, 64, 528, false), of(Products::Plain, 4));
        assert_eq!(path(H200, 33, 14, true), of(Products::Plain, 4));
        assert!(attention_back_at_once(of(Products::Mma, 1), &layout(32, 14)));
        assert!(!attention_back_at_once(of(Products::Plain, 4), &layout(32, 14)));
    }

    #[test]
    fn recurrences_are_cut_where_threads_would_idle() {
        // mamba-130m in training, one layer of 8 texts; and a step of a diagonal of all its layers.
        assert_eq!(token_chunk(H200, 8 * 1536 * 2, 2048), 352);
        assert_eq!(token_chunk(H200, 24 * 1536 * 2, 512), 256);
        assert_eq!(token_chunk(H200, 1 << 20, 512), 512);
        assert_eq!(token_chunk(H200, 1536, 100), 64);
    }

    #[test]
    fn mambas_scan_is_one_kernel_where_states_are_of_sixteen() {
        assert!(gated_scan(16, [1536, 80, 3072], 24, true));
        assert!(!gated_scan(32, [256, 72, 512], 64, true) && !gated_scan(16, [1536, 81, 3072], 24, true));
        assert!(!gated_scan(16, [1536, 80, 3072], 24, false) && !gated_scan(16, [1536, 80, 3072], 70_000, true));
        assert!(conv_silu(1536, 4, false, true) && !conv_silu(1536, 4, true, true) && !conv_silu(1536, 5, false, true));
        assert!(!conv_silu(1534, 4, false, true) && !conv_silu(1536, 4, false, false));
    }

    #[test]
    fn scans_are_cut_into_tasks_enough_for_many_threads() {
        // Rewrite's training, 4 layers of 64 texts; one text of mamba-130m.
        assert_eq!(scan_tasks(4, 64, 16), ScanTasks { strips: 4, texts: 16 });
        assert_eq!(scan_tasks(1, 1, 96), ScanTasks { strips: 4, texts: 1 });
        assert_eq!(scan_tasks(24, 100, 96), ScanTasks { strips: 4, texts: 100 });
    }

    #[test]
    fn small_work_stays_on_one_thread() {
        assert_eq!(rows_per_piece(100, 100, 2), 100);
        assert_eq!(rows_per_piece(100, 100_000, 1), 100);
        assert_eq!(rows_per_piece(100, 100_000, 2), 13);
        assert_eq!((attention_tasks(4, 100), attention_tasks(4, 1 << 20)), (None, Some(1)));
        let s = Sizes { batch: 1, m: 640, n: 512, k: 128 };
        assert_eq!(product_pieces(s, 2), ProductPieces { pieces: 2, by_rows: true, serial: false });
        assert_eq!(product_pieces(Sizes { batch: 8, ..s }, 2), ProductPieces { pieces: 1, by_rows: true, serial: false });
        assert_eq!(product_pieces(Sizes { m: 4, ..s }, 2), ProductPieces { pieces: 2, by_rows: false, serial: false });
        assert!(product_pieces(Sizes { m: 1, n: 8, ..s }, 2).serial);
    }

    #[test]
    fn a_chunk_of_logits_is_as_large_as_its_device_allows_and_at_least_a_row() {
        assert_eq!(logits_rows(0, 10_000, 50_257 * 2, None), 640);
        assert_eq!(logits_rows(0, 16_384, 50_280 * 2, Some(H200)), 16_384);
        assert_eq!(logits_rows(0, 16_384, 50_280 * 2, Some(A100)), 13_120);
        assert_eq!(logits_rows(0, 100, 50_257 * 2, None), 100);
        assert_eq!(logits_rows(0, 100, 100 << 20, None), 1);
        assert_eq!(logits_rows(7, 100, 4, Some(H200)), 7);
        assert_eq!(logits_rows(7, 0, 4, None), 1);
    }
}
