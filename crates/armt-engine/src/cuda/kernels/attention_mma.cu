// Causal attention on tensor cores, bf16 in and out, sums in f32: o_i = sum_j p_ij v_j, p_i = softmax_j(scale q_i . k_j).
//
// A warp owns 16 rows (of queries, or in the last kernel of keys); what passes by comes in tiles through two shared-memory buffers, the next
// one loading while this one is used. Probabilities never leave registers (attention_tile.cuh says how). Everything is summed in a fixed
// order. attention.cu is the plain twin; attention_wgmma.cu is what Hopper runs instead where it can.
// Rows of a passing tile, forwards and backwards; fewer backwards, where two accumulators take most registers.
constexpr int FORTH = 16 * WARPS, BACK = WARPS == 1 ? 16 : 32;

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// s [16, N] = own 16 rows times the tile's rows, transposed. Groups of 16 tile rows outside [from, to) are left zero.
template <int N>
__device__ __forceinline__ void scores(float (&s)[N / 8][4], const bf16* own, int own_row, const bf16* tile, int from, int to) {
    int lane = threadIdx.x % 32;
    clear(s);
#pragma unroll
    for (int d = 0; d < SIZE / 16; d++) {
        u32 a[4];
        ldmatrix(a, own + at(own_row + lane % 16, d * 2 + lane / 16));
#pragma unroll
        for (int g = 0; g < N / 16; g++)
            if (g >= from && g < to) {
                u32 b[4];
                ldmatrix(b, tile + at(g * 16 + lane / 16 * 8 + lane % 8, d * 2 + (lane / 8 & 1)));
                mma(s[2 * g], a, b[0], b[1]);
                mma(s[2 * g + 1], a, b[2], b[3]);
            }
    }
}

// sum [16, SIZE] += weights [16, N] times the tile's N rows, for the same groups.
template <int N>
__device__ __forceinline__ void add_weighted(float (&sum)[CHUNKS][4], const u32 (&weights)[N / 16][4], const bf16* tile, int from, int to) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < N / 16; g++)
        if (g >= from && g < to)
#pragma unroll
            for (int c = 0; c < CHUNKS; c += 2) {
                u32 b[4];
                ldmatrix_transposed(b, tile + at(g * 16 + (lane / 8 & 1) * 8 + lane % 8, c + lane / 16));
                mma(sum[c], weights[g], b[0], b[1]);
                mma(sum[c + 1], weights[g], b[2], b[3]);
            }
}

// Groups of 16 among a tile's rows from `first` on that are at most `last`, of N rows.
template <int N> __device__ __forceinline__ int groups_until(int first, int last) {
    return last < first ? 0 : min(N / 16, (last - first) / 16 + 1);
}

// o [n, tq, heads, SIZE], lse [n, heads, tq] (may be null). Keys up to row + tk - tq are visible, if the mask [n, tk] (may be null) says so.
KERNEL(attention_forward, __launch_bounds__(THREADS))
(const bf16* q, const bf16* k, const bf16* v, const int* mask, bf16* o, float* lse, i64 q_row, i64 k_row, int heads,
    int group, int tq, int tk, int size, float scale) {
    bf16 *qs = (bf16*)shared_bytes, *ks = qs + ROWS * SIZE, *vs = ks + 2 * FORTH * SIZE;
    int tiles = (tq + ROWS - 1) / ROWS, all = gridDim.x / tiles, own = threadIdx.x / 32 * 16;
    // The last tiles have the most keys: they start first.
    int tile = tiles - 1 - blockIdx.x / all, head = blockIdx.x % all, h = head % heads, offset = tk - tq;
    i64 n = head / heads;
    q += n * tq * q_row + h * SIZE;
    k += n * tk * k_row + h / group * SIZE;
    v += n * tk * k_row + h / group * SIZE;
    if (mask) mask += n * tk;
    int first = tile * ROWS + own, end = min(tk, tile * ROWS + ROWS + offset), passes = (end + FORTH - 1) / FORTH;
    load(qs, q, q_row, tile * ROWS, ROWS, tq);
    load(ks, k, k_row, 0, FORTH, tk);
    load(vs, v, k_row, 0, FORTH, tk);
    commit();
    const float turn = scale * LOG2_E;
    float sum[CHUNKS][4];
    Softmax softmax;
    clear(sum);
    for (int pass = 0; pass < passes; pass++) {
        int j0 = pass * FORTH, buffer = (pass & 1) * FORTH * SIZE;
        if (pass + 1 < passes) {
            int other = FORTH * SIZE - buffer;
            load(ks + other, k, k_row, j0 + FORTH, FORTH, tk);
            load(vs + other, v, k_row, j0 + FORTH, FORTH, tk);
            commit();
            wait<1>();
        } else {
            wait<0>();
        }
        __syncthreads();
        int live = first < tq ? groups_until<FORTH>(j0, first + 15 + offset) : 0;
        if (live > 0) {
            float s[FORTH / 8][4];
            scores<FORTH>(s, qs, own, ks + buffer, 0, live);
            if (mask || j0 + FORTH - 1 > first + offset || j0 + FORTH > tk) hide(s, j0, first, offset, tk, mask);
            softmax.weigh(s, sum, turn);
            u32 p[FORTH / 16][4];
            to_operand<FORTH>(p, s);
            add_weighted<FORTH>(sum, p, vs + buffer, 0, live);
        }
        __syncthreads();
    }
    float inverse[2];
    softmax.finish(inverse, lse ? lse + (i64)head * tq : nullptr, first, tq, scale);
    store(o + n * tq * heads * SIZE + h * SIZE, (i64)heads * SIZE, first, tq, qs, own, sum, inverse[0], inverse[1]);
}

// dq_i = scale sum_j ds_ij k_j, ds_ij = p_ij (do_i . v_j - delta_i). Leaves delta_i = do_i . o_i for the kernel of keys and values.
KERNEL(attention_backward_q, __launch_bounds__(THREADS))
(const bf16* q, const bf16* k, const bf16* v, const int* mask, const bf16* o, const bf16* d_o,
    const float* lse, float* delta, bf16* dq, i64 q_row, i64 k_row, int heads, int group, int tq, int tk, int size, float scale) {
    bf16 *qs = (bf16*)shared_bytes, *gs = qs + ROWS * SIZE, *ks = gs + ROWS * SIZE, *vs = ks + 2 * BACK * SIZE;
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
    int first = tile * ROWS + own, end = min(tk, tile * ROWS + ROWS + offset), passes = (end + BACK - 1) / BACK;
    load(qs, q, q_row, tile * ROWS, ROWS, tq);
    load(gs, d_o, o_row, tile * ROWS, ROWS, tq);
    load(ks, k, k_row, 0, BACK, tk);
    load(vs, v, k_row, 0, BACK, tk);
    commit();
    const float turn = scale * LOG2_E;
    float sum[CHUNKS][4], l[2], dl[2];
    clear(sum);
    deltas(dl, o, d_o, o_row, first, tq);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + half * 8;
        l[half] = row < tq ? lse[(i64)head * tq + row] * LOG2_E : 0.f;
        if (lane % 4 == 0 && row < tq) delta[(i64)head * tq + row] = dl[half];
    }
    for (int pass = 0; pass < passes; pass++) {
        int j0 = pass * BACK, buffer = (pass & 1) * BACK * SIZE;
        if (pass + 1 < passes) {
            int other = BACK * SIZE - buffer;
            load(ks + other, k, k_row, j0 + BACK, BACK, tk);
            load(vs + other, v, k_row, j0 + BACK, BACK, tk);
            commit();
            wait<1>();
        } else {
            wait<0>();
        }
        __syncthreads();
        int live = first < tq ? groups_until<BACK>(j0, first + 15 + offset) : 0;
        if (live > 0) {
            float s[BACK / 8][4], dp[BACK / 8][4];
            scores<BACK>(s, qs, own, ks + buffer, 0, live);
            scores<BACK>(dp, gs, own, vs + buffer, 0, live);
            bool all_visible = !mask && j0 + BACK - 1 <= first + offset && j0 + BACK <= tk;
#pragma unroll
            for (int c = 0; c < BACK / 8; c++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int key = j0 + c * 8 + lane % 4 * 2 + e, last = first + lane / 4 + offset;
                    bool visible = all_visible || (key < tk && (!mask || mask[key]));
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float p = exp2_of(s[c][2 * half + e] * turn - l[half]);
                        float ds = p * (dp[c][2 * half + e] - dl[half]);
                        s[c][2 * half + e] = visible && (all_visible || key <= last + half * 8) ? ds : 0.f;
                    }
                }
            u32 ds[BACK / 16][4];
            to_operand<BACK>(ds, s);
            add_weighted<BACK>(sum, ds, ks + buffer, 0, live);
        }
        __syncthreads();
    }
    store(dq, q_row, first, tq, qs, own, sum, scale, scale);
}

// dv_j = sum_i p_ij do_i and dk_j = scale sum_i ds_ij q_i, over the rows of all query heads of the group, in order. Scores are computed
// transposed, keys down and queries across.
KERNEL(attention_backward_kv, __launch_bounds__(THREADS))
(const bf16* q, const bf16* k, const bf16* v, const int* mask, const bf16* d_o, const float* lse, const float* delta,
    bf16* dk, bf16* dv, i64 q_row, i64 k_row, int heads, int group, int tq, int tk, int size, float scale) {
    bf16 *ks = (bf16*)shared_bytes, *vs = ks + ROWS * SIZE, *qs = vs + ROWS * SIZE, *gs = qs + 2 * BACK * SIZE;
    float *ls = (float*)(gs + 2 * BACK * SIZE), *dls = ls + 2 * BACK;
    int tiles = (tk + ROWS - 1) / ROWS, all = gridDim.x / tiles, lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    // The first tiles are seen by the most rows: they start first.
    int tile = blockIdx.x / all, head = blockIdx.x % all, key_heads = heads / group, hk = head % key_heads, offset = tk - tq;
    i64 n = head / key_heads, o_row = (i64)heads * SIZE, base = n * tk * k_row + hk * SIZE;
    q += n * tq * q_row;
    d_o += n * tq * o_row;
    if (mask) mask += n * tk;
    int first = tile * ROWS + own;
    // Passing tiles start at the first row that sees any of the block's keys, for each head of the group in turn.
    int from = max(0, tile * ROWS - offset) / BACK * BACK, each = from < tq ? (tq - from + BACK - 1) / BACK : 0, passes = each * group;
    auto load_pass = [&](int pass) {
        int h = hk * group + pass / each, i0 = from + pass % each * BACK, buffer = pass & 1;
        i64 rows = (n * heads + h) * tq;
        load(qs + buffer * BACK * SIZE, q + h * SIZE, q_row, i0, BACK, tq);
        load(gs + buffer * BACK * SIZE, d_o + h * SIZE, o_row, i0, BACK, tq);
        load_floats(ls + buffer * BACK, lse + rows, i0, BACK, tq);
        load_floats(dls + buffer * BACK, delta + rows, i0, BACK, tq);
        commit();
    };
    load(ks, k + base, k_row, tile * ROWS, ROWS, tk);
    load(vs, v + base, k_row, tile * ROWS, ROWS, tk);
    if (passes > 0) load_pass(0);
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
    for (int pass = 0; pass < passes; pass++) {
        int i0 = from + pass % each * BACK, buffer = pass & 1;
        if (pass + 1 < passes) {
            load_pass(pass + 1);
            wait<1>();
        } else {
            wait<0>();
        }
        __syncthreads();
        // Groups of 16 rows before the warp's first key see none of its keys.
        int dead = min(BACK / 16, max(0, first - offset - i0) / 16), live = groups_until<BACK>(i0, tq - 1);
        if (first < tk && dead < live) {
            const bf16 *qt = qs + buffer * BACK * SIZE, *gt = gs + buffer * BACK * SIZE;
            const float *lt = ls + buffer * BACK, *dlt = dls + buffer * BACK;
            float s[BACK / 8][4], dp[BACK / 8][4];
            scores<BACK>(s, ks, own, qt, dead, live);
            scores<BACK>(dp, vs, own, gt, dead, live);
#pragma unroll
            for (int c = 0; c < BACK / 8; c++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int within = c * 8 + lane % 4 * 2 + e, i = i0 + within;
                    float l = lt[within] * LOG2_E, dl = dlt[within];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        bool seen = visible[half] && i < tq && first + lane / 4 + half * 8 <= i + offset;
                        float p = seen ? exp2_of(s[c][2 * half + e] * turn - l) : 0.f;
                        s[c][2 * half + e] = p;
                        dp[c][2 * half + e] = p * (dp[c][2 * half + e] - dl);
                    }
                }
            u32 weights[BACK / 16][4];
            to_operand<BACK>(weights, s);
            add_weighted<BACK>(sum_v, weights, gt, dead, live);
            to_operand<BACK>(weights, dp);
            add_weighted<BACK>(sum_k, weights, qt, dead, live);
        }
        __syncthreads();
    }
    // Without a pass, the block's own tiles are still on their way to where the results are staged.
    commit();
    wait<0>();
    __syncthreads();
    store(dk + base, k_row, first, tk, ks, own, sum_k, scale, scale);
    store(dv + base, k_row, first, tk, vs, own, sum_v, 1.f, 1.f);
}

#if C_WARPS == 1
// The whole way back of sequences that fit one tile, where every query head has keys of its own: block (n, head) of one warp.
KERNEL(attention_backward_short, __launch_bounds__(32))
(const bf16* q, const bf16* k, const bf16* v, const int* mask, const bf16* o, const bf16* d_o, const float* lse, bf16* dq,
    bf16* dk, bf16* dv, i64 q_row, i64 k_row, int heads, int group, int tq, int tk, int size, float scale) {
    constexpr int TILE = 16 * SIZE;
    bf16 *qs = (bf16*)shared_bytes, *ks = qs + TILE, *vs = ks + TILE, *gs = vs + TILE, *os = gs + TILE;
    float *ls = (float*)(os + TILE), *dls = ls + 16; // of each query: log-sum-exp, do . o
    int lane = threadIdx.x, head = blockIdx.x, h = head % heads, offset = tk - tq;
    i64 n = head / heads, o_row = (i64)heads * SIZE, q_at = n * tq * q_row + h * SIZE, k_at = n * tk * k_row + h * SIZE, o_at = n * tq * o_row + h * SIZE;
    if (mask) mask += n * tk;
    for (int i = lane; i < 5 * 16 * CHUNKS; i += 32) {
        int which = i / (16 * CHUNKS), r = i / CHUNKS % 16, chunk = i % CHUNKS;
        const bf16* from = which == 0 ? q + q_at : which == 1 ? k + k_at : which == 2 ? v + k_at : which == 3 ? d_o + o_at : o + o_at;
        i64 stride = which == 0 ? q_row : which < 3 ? k_row : o_row;
        int limit = which == 1 || which == 2 ? tk : tq, bytes = r < limit ? 16 : 0;
        const bf16* source = from + (r < limit ? r : 0) * stride + chunk * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(qs + which * TILE + at(r, chunk))), "l"(source), "r"(bytes) : "memory");
    }
    commit();
    wait<0>();
    __syncwarp();
    {
        // Two lanes a query.
        int row = lane / 2;
        float x = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS / 2; c++) {
            int chunk = lane % 2 * (CHUNKS / 2) + c;
            Vec<bf16, 8> a = *(const Vec<bf16, 8>*)(gs + at(row, chunk)), b = *(const Vec<bf16, 8>*)(os + at(row, chunk));
#pragma unroll
            for (int e = 0; e < 8; e++) x += to_f32(a.v[e]) * to_f32(b.v[e]);
        }
        x += __shfl_xor_sync(~0u, x, 1);
        if (lane % 2 == 0) {
            dls[row] = x;
            ls[row] = row < tq ? lse[(i64)head * tq + row] * LOG2_E : 0.f;
        }
    }
    __syncwarp();
    const float turn = scale * LOG2_E;
    float s[2][4], dp[2][4], sum_q[CHUNKS][4], sum_k[CHUNKS][4], sum_v[CHUNKS][4];
    u32 weights[1][4];
    // Queries down, keys across.
    scores<16>(s, qs, 0, ks, 0, 1);
    scores<16>(dp, gs, 0, vs, 0, 1);
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int key = c * 8 + lane % 4 * 2 + e % 2, row = lane / 4 + e / 2 * 8;
            bool seen = key < tk && key <= row + offset && (!mask || mask[key]);
            s[c][e] = seen ? exp2_of(s[c][e] * turn - ls[row]) * (dp[c][e] - dls[row]) : 0.f;
        }
    to_operand<16>(weights, s);
    clear(sum_q);
    add_weighted<16>(sum_q, weights, ks, 0, 1);
    // Keys down, queries across.
    scores<16>(s, ks, 0, qs, 0, 1);
    scores<16>(dp, vs, 0, gs, 0, 1);
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = c * 8 + lane % 4 * 2 + e % 2, key = lane / 4 + e / 2 * 8;
            bool seen = row < tq && key < tk && key <= row + offset && (!mask || mask[key]);
            s[c][e] = seen ? exp2_of(s[c][e] * turn - ls[row]) : 0.f;
            dp[c][e] = s[c][e] * (dp[c][e] - dls[row]);
        }
    clear(sum_k);
    clear(sum_v);
    to_operand<16>(weights, s);
    add_weighted<16>(sum_v, weights, gs, 0, 1);
    to_operand<16>(weights, dp);
    add_weighted<16>(sum_k, weights, qs, 0, 1);
    store(dq + q_at, q_row, 0, tq, os, 0, sum_q, scale, scale);
    store(dk + k_at, k_row, 0, tk, ks, 0, sum_k, scale, scale);
    store(dv + k_at, k_row, 0, tk, vs, 0, sum_v, 1.f, 1.f);
}
#endif
