// Causal attention with Hopper's warpgroup products (wgmma), bf16 in and out, sums in f32:
// o_i = sum_j p_ij v_j, p_i = softmax_j(scale q_i . k_j).
//
// It walks as attention_mma.cu does: a block owns 64 rows, 16 a warp, and tiles of 64 rows pass by through two buffers. Its four warps are
// one warpgroup, whose products read the passing tile from shared memory once for all 64 rows, where mma.sync has each warp fetch it into
// registers. The weights are left operands in registers, and so are the own rows but for dk and dv; a product runs while the warps do
// element work on the one before. Every branch round a product is the same for the whole block, so what only some rows see is masked element by element, in tiles
// on the border. Heads of 32 and 64: a row is one swizzle atom wide.
//
// A segment is often a power of two and a few memory tokens, so a walk that ends in at most FEW rows takes them in a narrow pass. Tiles of
// queries are counted from the last row back: then the walk of each ends so, and not the walk of one alone.
constexpr int PASS = 64, FEW = 16;
static_assert(WARPS == 4 && (SIZE == 32 || SIZE == 64), "a block is one warpgroup, a row one swizzle atom");

// How wgmma finds a swizzled tile: where it starts, 8 rows to the next atom, the swizzle. That holds for both of its uses: rows across the
// result (the contraction runs along a row, 16 elements further are 32 bytes) and rows contracted (16 further are 16 rows).
__device__ __forceinline__ u64 described(const bf16* tile) {
    constexpr u64 ATOM = 8 * SIZE * 2, SWIZZLE = SIZE == 64 ? 1 : 2;
    return SWIZZLE << 62 | ATOM >> 4 << 32 | (u64)1 << 16 | address(tile) >> 4;
}
constexpr int ALONG = 32 >> 4, DOWN = 16 * SIZE * 2 >> 4;

#define FOUR(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define SIXTEEN(c, n) FOUR(c[n]), FOUR(c[n + 1]), FOUR(c[n + 2]), FOUR(c[n + 3])
// c [64, 64, 32 or 16] (+)= a [64, 16] times the described tile; CONTRACTED: the tile's rows are what is summed over.
template <int CONTRACTED> __device__ __forceinline__ void product(float (&c)[8][4], const u32 (&a)[4], u64 tile, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, add, 1, 1, %38;}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"((int)add), "n"(CONTRACTED));
}
template <int CONTRACTED> __device__ __forceinline__ void product(float (&c)[4][4], const u32 (&a)[4], u64 tile, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, add, 1, 1, %22;}"
                 : SIXTEEN(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"((int)add), "n"(CONTRACTED));
}
template <int CONTRACTED> __device__ __forceinline__ void product(float (&c)[2][4], const u32 (&a)[4], u64 tile, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, add, 1, 1, %14;}"
                 : FOUR(c[0]), FOUR(c[1]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"((int)add), "n"(CONTRACTED));
}
// c (+)= a times the described tile, transposed, with the left operand described in shared memory too.
__device__ __forceinline__ void product(float (&c)[8][4], u64 a, u64 tile, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "%32, %33, add, 1, 1, 0, 0;}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 4) : "l"(a), "l"(tile), "r"((int)add));
}
__device__ __forceinline__ void product(float (&c)[2][4], u64 a, u64 tile, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, add, 1, 1, 0, 0;}"
                 : FOUR(c[0]), FOUR(c[1]) : "l"(a), "l"(tile), "r"((int)add));
}
// Before products, when their registers were last touched by anything else.
__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are under way.
template <int N> __device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from using an accumulator before the wait above this.
template <int N> __device__ __forceinline__ void ready(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : FOUR(x[n])::"memory");
}
// The tiles that copies have brought are there for products too, and for all threads.
__device__ __forceinline__ void arrive() {
    wait<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

// The warp's 16 rows of a tile as a left operand.
__device__ __forceinline__ void own_rows(u32 (&a)[SIZE / 16][4], const bf16* tile, int own) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < SIZE / 16; d++) ldmatrix(a[d], tile + at(own + lane % 16, d * 2 + lane / 16));
}
// Issues s [64, 8 N] = own rows times the tile's first 8 N rows, transposed.
template <int N> __device__ __forceinline__ void scores(float (&s)[N][4], const u32 (&own)[SIZE / 16][4], const bf16* tile) {
    u64 rows = described(tile);
#pragma unroll
    for (int d = 0; d < SIZE / 16; d++) product<0>(s, own[d], rows + d * ALONG, d > 0);
    close_products();
}
// Issues s [64, 8 N] = the block's own rows, in shared memory, times the tile's first 8 N rows, transposed.
template <int N> __device__ __forceinline__ void scores(float (&s)[N][4], const bf16* own, const bf16* tile) {
    u64 left = described(own), rows = described(tile);
#pragma unroll
    for (int d = 0; d < SIZE / 16; d++) product(s, left + d * ALONG, rows + d * ALONG, d > 0);
    close_products();
}
// Issues sum += weights times the tile's first 16 N rows.
template <int N> __device__ __forceinline__ void add_weighted(float (&sum)[CHUNKS][4], const u32 (&weights)[N][4], const bf16* tile) {
    u64 rows = described(tile);
#pragma unroll
    for (int g = 0; g < N; g++) product<1>(sum, weights[g], rows + g * DOWN, true);
    close_products();
}

// o [n, tq, heads, SIZE], lse [n, heads, tq] (may be null). Keys up to row + tk - tq are visible, if the mask [n, tk] (may be null) says
// so.
KERNEL(attention_forward, __launch_bounds__(THREADS, 3))
(const bf16* q, const bf16* k, const bf16* v, const int* mask, bf16* o, float* lse, i64 q_row, i64 k_row, int heads,
    int group, int tq, int tk, int size, float scale) {
    bf16 *qs = (bf16*)shared_bytes, *ks = qs + ROWS * SIZE, *vs = ks + 2 * PASS * SIZE;
    int tiles = (tq + ROWS - 1) / ROWS, all = gridDim.x / tiles, own = threadIdx.x / 32 * 16;
    // The last tiles have the most keys: they start first.
    int tile = tiles - 1 - blockIdx.x / all, head = blockIdx.x % all, h = head % heads, offset = tk - tq;
    i64 n = head / heads;
    q += n * tq * q_row + h * SIZE;
    k += n * tk * k_row + h / group * SIZE;
    v += n * tk * k_row + h / group * SIZE;
    if (mask) mask += n * tk;
    int top = tq - (tiles - tile) * ROWS, first = top + own, end = top + ROWS + offset, passes = (end + PASS - 1) / PASS;
    load(qs, q, q_row, top, ROWS, tq);
    load(ks, k, k_row, 0, PASS, end);
    load(vs, v, k_row, 0, PASS, end);
    commit();
    const float turn = scale * LOG2_E;
    float sum[CHUNKS][4];
    Softmax softmax;
    clear(sum);
    arrive();
    u32 own_q[SIZE / 16][4];
    own_rows(own_q, qs, own);
    auto use = [&](auto count, int j0, const bf16* kt, const bf16* vt) {
        constexpr int N = decltype(count)::k;
        float s[N / 8][4];
        open_products();
        scores(s, own_q, kt);
        wait_products<0>();
        ready(s);
        if (mask || j0 + N - 1 > first + offset) hide(s, j0, first, offset, tk, mask);
        softmax.weigh(s, sum, turn);
        u32 p[N / 16][4];
        to_operand<N>(p, s);
        open_products();
        add_weighted(sum, p, vt);
        wait_products<0>();
        ready(sum);
    };
    for (int pass = 0; pass < passes; pass++) {
        int j0 = pass * PASS, buffer = (pass & 1) * PASS * SIZE;
        if (pass > 0) arrive();
        // Everyone is past the products of the last pass: its buffers are free.
        if (pass + 1 < passes) {
            int other = PASS * SIZE - buffer;
            load(ks + other, k, k_row, j0 + PASS, PASS, end);
            load(vs + other, v, k_row, j0 + PASS, PASS, end);
            commit();
        }
        if (end - j0 <= FEW)
            use(Count<FEW>(), j0, ks + buffer, vs + buffer);
        else
            use(Count<PASS>(), j0, ks + buffer, vs + buffer);
    }
    float inverse[2];
    softmax.finish(inverse, lse ? lse + (i64)head * tq : nullptr, first, tq, scale);
    store(o + n * tq * heads * SIZE + h * SIZE, (i64)heads * SIZE, first, tq, qs, own, sum, inverse[0], inverse[1]);
}

// dq_i = scale sum_j ds_ij k_j, ds_ij = p_ij (do_i . v_j - delta_i). Leaves delta_i = do_i . o_i for the kernel of keys and values.
KERNEL(attention_backward_q, __launch_bounds__(THREADS, 3))
(const bf16* q, const bf16* k, const bf16* v, const int* mask, const bf16* o, const bf16* d_o, const float* lse,
    float* delta, bf16* dq, i64 q_row, i64 k_row, int heads, int group, int tq, int tk, int size, float scale) {
    bf16 *qs = (bf16*)shared_bytes, *gs = qs + ROWS * SIZE, *ks = gs + ROWS * SIZE, *vs = ks + 2 * PASS * SIZE;
    int tiles = (tq + ROWS - 1) / ROWS, all = gridDim.x / tiles, lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    int tile = tiles - 1 - blockIdx.x / all, head = blockIdx.x % all, h = head % heads, offset = tk - tq;
    i64 n = head / heads, o_row = (i64)heads * SIZE;
    q += n * tq * q_row + h * SIZE;
    dq += n * tq * q_row + h * SIZE;
    o += n * tq * o_row + h * SIZE;
    d_o += n * tq * o_row + h * SIZE;
    k += n * tk * k_row + h / group * SIZE;
    v += n * tk * k_row + h / group * SIZE;
    if (mask) mask += n * tk;
    int top = tq - (tiles - tile) * ROWS, first = top + own, end = top + ROWS + offset, passes = (end + PASS - 1) / PASS;
    load(qs, q, q_row, top, ROWS, tq);
    load(gs, d_o, o_row, top, ROWS, tq);
    load(ks, k, k_row, 0, PASS, end);
    load(vs, v, k_row, 0, PASS, end);
    commit();
    const float turn = scale * LOG2_E;
    float sum[CHUNKS][4], l[2], dl[2];
    clear(sum);
    deltas(dl, o, d_o, o_row, first, tq);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + half * 8;
        bool there = (u32)row < (u32)tq;
        l[half] = there ? lse[(i64)head * tq + row] * LOG2_E : 0.f;
        if (lane % 4 == 0 && there) delta[(i64)head * tq + row] = dl[half];
    }
    arrive();
    u32 own_q[SIZE / 16][4], own_g[SIZE / 16][4];
    own_rows(own_q, qs, own);
    own_rows(own_g, gs, own);
    auto use = [&](auto count, int j0, const bf16* kt, const bf16* vt) {
        constexpr int N = decltype(count)::k;
        float s[N / 8][4], dp[N / 8][4];
        open_products();
        scores(s, own_q, kt);
        scores(dp, own_g, vt);
        wait_products<1>();
        ready(s);
        if (mask || j0 + N - 1 > first + offset) hide(s, j0, first, offset, tk, mask);
#pragma unroll
        for (int c = 0; c < N / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[c][e] = exp2_of(s[c][e] * turn - l[e / 2]);
        wait_products<0>();
        ready(dp);
#pragma unroll
        for (int c = 0; c < N / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[c][e] *= dp[c][e] - dl[e / 2];
        u32 ds[N / 16][4];
        to_operand<N>(ds, s);
        open_products();
        add_weighted(sum, ds, kt);
        wait_products<0>();
        ready(sum);
    };
    for (int pass = 0; pass < passes; pass++) {
        int j0 = pass * PASS, buffer = (pass & 1) * PASS * SIZE;
        if (pass > 0) arrive();
        if (pass + 1 < passes) {
            int other = PASS * SIZE - buffer;
            load(ks + other, k, k_row, j0 + PASS, PASS, end);
            load(vs + other, v, k_row, j0 + PASS, PASS, end);
            commit();
        }
        if (end - j0 <= FEW)
            use(Count<FEW>(), j0, ks + buffer, vs + buffer);
        else
            use(Count<PASS>(), j0, ks + buffer, vs + buffer);
    }
    store(dq, q_row, first, tq, qs, own, sum, scale, scale);
}

// dv_j = sum_i p_ij do_i and dk_j = scale sum_i ds_ij q_i, over the rows of all query heads of the group, in order. Scores are computed
// transposed, keys down and queries across.
KERNEL(attention_backward_kv, __launch_bounds__(THREADS, 3))
(const bf16* q, const bf16* k, const bf16* v, const int* mask, const bf16* d_o, const float* lse, const float* delta,
    bf16* dk, bf16* dv, i64 q_row, i64 k_row, int heads, int group, int tq, int tk, int size, float scale) {
    bf16 *ks = (bf16*)shared_bytes, *vs = ks + ROWS * SIZE, *qs = vs + ROWS * SIZE, *gs = qs + 2 * PASS * SIZE;
    float *ls = (float*)(gs + 2 * PASS * SIZE), *dls = ls + 2 * PASS;
    int tiles = (tk + ROWS - 1) / ROWS, all = gridDim.x / tiles, lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    // The first tiles are seen by the most rows: they start first.
    int tile = blockIdx.x / all, head = blockIdx.x % all, key_heads = heads / group, hk = head % key_heads, offset = tk - tq;
    i64 n = head / key_heads, o_row = (i64)heads * SIZE, base = n * tk * k_row + hk * SIZE;
    q += n * tq * q_row;
    d_o += n * tq * o_row;
    if (mask) mask += n * tk;
    int first = tile * ROWS + own;
    // Passing tiles start at the first row that sees any of the block's keys, for each head of the group in turn.
    int from = max(0, tile * ROWS - offset) / PASS * PASS, each = from < tq ? (tq - from + PASS - 1) / PASS : 0, passes = each * group;
    auto load_pass = [&](int h, int i0, int buffer) {
        i64 rows = (n * heads + h) * tq;
        load(qs + buffer * PASS * SIZE, q + h * SIZE, q_row, i0, PASS, tq);
        load(gs + buffer * PASS * SIZE, d_o + h * SIZE, o_row, i0, PASS, tq);
        load_floats(ls + buffer * PASS, lse + rows, i0, PASS, tq);
        load_floats(dls + buffer * PASS, delta + rows, i0, PASS, tq);
        commit();
    };
    load(ks, k + base, k_row, tile * ROWS, ROWS, tk);
    load(vs, v + base, k_row, tile * ROWS, ROWS, tk);
    commit();
    if (passes > 0) load_pass(hk * group, from, 0);
    const float turn = scale * LOG2_E;
    bool visible[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int key = first + lane / 4 + half * 8;
        visible[half] = key < tk && (!mask || mask[key]);
    }
    float sum_k[CHUNKS][4], sum_v[CHUNKS][4];
    clear(sum_k);
    clear(sum_v);
    arrive();
    auto use = [&](auto count, int i0, int buffer) {
        constexpr int N = decltype(count)::k;
        const bf16 *qt = qs + buffer * PASS * SIZE, *gt = gs + buffer * PASS * SIZE;
        const float *lt = ls + buffer * PASS + lane % 4 * 2, *dlt = dls + buffer * PASS + lane % 4 * 2;
        float s[N / 8][4], dp[N / 8][4];
        open_products();
        // From shared memory: in registers they would leave room for two blocks only.
        scores(s, ks, qt);
        scores(dp, vs, gt);
        wait_products<1>();
        ready(s);
        // Rows past the end are zeros and add nothing; keys past the end are not stored.
        if (mask || first + 15 > i0 + offset) {
#pragma unroll
            for (int c = 0; c < N / 8; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int i = i0 + c * 8 + lane % 4 * 2 + e % 2;
                    if (!visible[e / 2] || first + lane / 4 + e / 2 * 8 > i + offset) s[c][e] = __int_as_float(0xff800000);
                }
        }
#pragma unroll
        for (int c = 0; c < N / 8; c++) {
            Vec<float, 2> l = *(const Vec<float, 2>*)(lt + c * 8);
#pragma unroll
            for (int e = 0; e < 4; e++) s[c][e] = exp2_of(s[c][e] * turn - l.v[e % 2] * LOG2_E);
        }
        wait_products<0>();
        ready(dp);
#pragma unroll
        for (int c = 0; c < N / 8; c++) {
            Vec<float, 2> dl = *(const Vec<float, 2>*)(dlt + c * 8);
#pragma unroll
            for (int e = 0; e < 4; e++) dp[c][e] = s[c][e] * (dp[c][e] - dl.v[e % 2]);
        }
        u32 weights[N / 16][4], changes[N / 16][4];
        to_operand<N>(weights, s);
        to_operand<N>(changes, dp);
        open_products();
        add_weighted(sum_v, weights, gt);
        add_weighted(sum_k, changes, qt);
        wait_products<0>();
        ready(sum_v);
        ready(sum_k);
    };
    for (int pass = 0, i0 = from, h = hk * group; pass < passes; pass++) {
        int buffer = pass & 1, next = i0 + PASS < tq ? i0 + PASS : from;
        if (pass > 0) arrive();
        if (next == from) h++;
        if (pass + 1 < passes) load_pass(h, next, buffer ^ 1);
        if (tq - i0 <= FEW)
            use(Count<FEW>(), i0, buffer);
        else
            use(Count<PASS>(), i0, buffer);
        i0 = next;
    }
    // Results are staged where other warps' products may still read.
    __syncthreads();
    store(dk + base, k_row, first, tk, ks, own, sum_k, scale, scale);
    store(dv + base, k_row, first, tk, vs, own, sum_v, 1.f, 1.f);
}
