// Causal attention in plain f32 loops, any head size up to 32 C_CHUNKS: o_i = sum_j p_ij v_j, p_i = softmax_j(scale q_i . k_j).
//
// A block has 4 warps of 4 rows each; what passes by (keys and values, or queries and their gradients) is staged in shared memory, 32 rows
// at a time. A warp's lanes are the 32 passing rows while it computes scores, and the head's dimensions while it sums.
// Twin of attention_mma.cu, and its fallback.
constexpr int WIDTH = 32 * C_CHUNKS, PAD = WIDTH + 1, OWN = 4, ROWS = 4 * OWN, PASS = 32;

extern __shared__ __align__(16) float shared_floats[];

// `count` rows of a head to shared memory, `pitch` apart; what is outside [0, limit) and beyond the head's size is zero.
__device__ __forceinline__ void stage(float* to, int pitch, const T* from, i64 stride, int first, int count, int limit, int size) {
    for (int i = threadIdx.x; i < count * WIDTH; i += blockDim.x) {
        int r = i / WIDTH, d = i % WIDTH, row = first + r;
        to[r * pitch + d] = row < limit && d < size ? to_f32(from[row * stride + d]) : 0.f;
    }
}

// Dot products of the warp's OWN rows with the lane's passing row.
__device__ __forceinline__ void dots(float (&s)[OWN], const float* own, const float* passing) {
#pragma unroll
    for (int r = 0; r < OWN; r++) s[r] = 0.f;
    for (int d = 0; d < WIDTH; d += 4) {
        float x0 = passing[d], x1 = passing[d + 1], x2 = passing[d + 2], x3 = passing[d + 3];
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            float4 y = *(const float4*)(own + r * WIDTH + d);
            s[r] += x0 * y.x + x1 * y.y + x2 * y.z + x3 * y.w;
        }
    }
}

// sum[r][:] += weights[r] of lane j times passing row j.
__device__ __forceinline__ void add_weighted(float (&sum)[OWN][C_CHUNKS], const float (&weights)[OWN], const float* passing) {
    int lane = threadIdx.x % 32;
    for (int j = 0; j < PASS; j++) {
        float x[C_CHUNKS];
#pragma unroll
        for (int c = 0; c < C_CHUNKS; c++) x[c] = passing[j * PAD + c * 32 + lane];
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            float w = __shfl_sync(~0u, weights[r], j);
#pragma unroll
            for (int c = 0; c < C_CHUNKS; c++) sum[r][c] += w * x[c];
        }
    }
}

__device__ __forceinline__ void clear(float (&sum)[OWN][C_CHUNKS]) {
#pragma unroll
    for (int r = 0; r < OWN; r++)
#pragma unroll
        for (int c = 0; c < C_CHUNKS; c++) sum[r][c] = 0.f;
}

// The warp's rows of a result, times a factor for each.
__device__ __forceinline__ void store(T* to, i64 stride, int first, int limit, int size, const float (&sum)[OWN][C_CHUNKS],
                                      const float (&factor)[OWN]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < OWN; r++)
#pragma unroll
        for (int c = 0; c < C_CHUNKS; c++) {
            int d = c * 32 + lane;
            if (first + r < limit && d < size) to[(first + r) * stride + d] = from_f32<T>(sum[r][c] * factor[r]);
        }
}

// o [n, tq, heads, size], lse [n, heads, tq] (may be null). Keys up to row + tk - tq are visible, if the mask [n, tk] (may be null) says so.
KERNEL(attention_forward, __launch_bounds__(128))
(const T* q, const T* k, const T* v, const int* mask, T* o, float* lse, i64 q_row, i64 k_row, int heads, int group, int tq,
    int tk, int size, float scale) {
    float *qs = shared_floats, *ks = qs + ROWS * WIDTH, *vs = ks + PASS * PAD;
    int tiles = (tq + ROWS - 1) / ROWS, tile = blockIdx.x % tiles, lane = threadIdx.x % 32, own = threadIdx.x / 32 * OWN;
    i64 head = blockIdx.x / tiles, n = head / heads;
    int h = head % heads, first = tile * ROWS + own, offset = tk - tq;
    q += n * tq * q_row + h * size;
    k += n * tk * k_row + h / group * size;
    v += n * tk * k_row + h / group * size;
    if (mask) mask += n * tk;
    stage(qs, WIDTH, q, q_row, tile * ROWS, ROWS, tq, size);
    const float none = __int_as_float(0xff800000);
    float sum[OWN][C_CHUNKS], most[OWN], total[OWN];
    clear(sum);
#pragma unroll
    for (int r = 0; r < OWN; r++) most[r] = none, total[r] = 0.f;
    int end = min(tk, tile * ROWS + ROWS + offset);
    for (int j0 = 0; j0 < end; j0 += PASS) {
        __syncthreads();
        stage(ks, PAD, k, k_row, j0, PASS, tk, size);
        stage(vs, PAD, v, k_row, j0, PASS, tk, size);
        __syncthreads();
        float s[OWN];
        dots(s, qs + own * WIDTH, ks + lane * PAD);
        int key = j0 + lane;
        bool visible = key < tk && (!mask || mask[key]);
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            float x = visible && key <= first + r + offset ? s[r] * scale : none;
            float m = fmaxf(most[r], warp_max(x)), shift = m == none ? 0.f : m;
            float keep = __expf(most[r] - shift);
            s[r] = __expf(x - shift);
            total[r] = total[r] * keep + warp_sum(s[r]);
            most[r] = m;
#pragma unroll
            for (int c = 0; c < C_CHUNKS; c++) sum[r][c] *= keep;
        }
        add_weighted(sum, s, vs);
    }
    float inverse[OWN];
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        inverse[r] = total[r] > 0.f ? 1.f / total[r] : 0.f;
        // Infinite where nothing is visible: probabilities computed from it are zero.
        if (lse && lane == 0 && first + r < tq)
            lse[head * tq + first + r] = total[r] > 0.f ? most[r] + logf(total[r]) : __int_as_float(0x7f800000);
    }
    store(o + n * tq * heads * size + h * size, (i64)heads * size, first, tq, size, sum, inverse);
}

// delta [n, heads, tq] = do . o, one warp for each row [n, tq, heads].
KERNEL(attention_delta)(const T* o, const T* d_o, float* delta, i64 rows, i64 heads, i64 tq, i64 size) {
    int lane = threadIdx.x % 32;
    for (i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32; row < rows; row += (i64)gridDim.x * blockDim.x / 32) {
        float x = 0.f;
        for (i64 d = lane; d < size; d += 32) x += to_f32(o[row * size + d]) * to_f32(d_o[row * size + d]);
        x = warp_sum(x);
        i64 h = row % heads, t = row / heads % tq, n = row / heads / tq;
        if (lane == 0) delta[(n * heads + h) * tq + t] = x;
    }
}

// dq_i = scale sum_j ds_ij k_j, ds_ij = p_ij (do_i . v_j - delta_i)
KERNEL(attention_backward_q, __launch_bounds__(128))
(const T* q, const T* k, const T* v, const int* mask, const T* d_o, const float* lse, const float* delta, T* dq,
    i64 q_row, i64 k_row, int heads, int group, int tq, int tk, int size, float scale) {
    float *qs = shared_floats, *gs = qs + ROWS * WIDTH, *ks = gs + ROWS * WIDTH, *vs = ks + PASS * PAD;
    int tiles = (tq + ROWS - 1) / ROWS, tile = blockIdx.x % tiles, lane = threadIdx.x % 32, own = threadIdx.x / 32 * OWN;
    i64 head = blockIdx.x / tiles, n = head / heads, o_row = (i64)heads * size;
    int h = head % heads, first = tile * ROWS + own, offset = tk - tq;
    q += n * tq * q_row + h * size;
    dq += n * tq * q_row + h * size;
    d_o += n * tq * o_row + h * size;
    k += n * tk * k_row + h / group * size;
    v += n * tk * k_row + h / group * size;
    if (mask) mask += n * tk;
    stage(qs, WIDTH, q, q_row, tile * ROWS, ROWS, tq, size);
    stage(gs, WIDTH, d_o, o_row, tile * ROWS, ROWS, tq, size);
    float sum[OWN][C_CHUNKS], l[OWN], dl[OWN], factor[OWN];
    clear(sum);
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        bool live = first + r < tq;
        l[r] = live ? lse[head * tq + first + r] : 0.f;
        dl[r] = live ? delta[head * tq + first + r] : 0.f;
        factor[r] = scale;
    }
    int end = min(tk, tile * ROWS + ROWS + offset);
    for (int j0 = 0; j0 < end; j0 += PASS) {
        __syncthreads();
        stage(ks, PAD, k, k_row, j0, PASS, tk, size);
        stage(vs, PAD, v, k_row, j0, PASS, tk, size);
        __syncthreads();
        float s[OWN], dp[OWN];
        dots(s, qs + own * WIDTH, ks + lane * PAD);
        dots(dp, gs + own * WIDTH, vs + lane * PAD);
        int key = j0 + lane;
        bool visible = key < tk && (!mask || mask[key]);
#pragma unroll
        for (int r = 0; r < OWN; r++)
            s[r] = visible && key <= first + r + offset ? __expf(s[r] * scale - l[r]) * (dp[r] - dl[r]) : 0.f;
        add_weighted(sum, s, ks);
    }
    store(dq, q_row, first, tq, size, sum, factor);
}

// dv_j = sum_i p_ij do_i and dk_j = scale sum_i ds_ij q_i, over the rows of all query heads of the group, in order.
KERNEL(attention_backward_kv, __launch_bounds__(128, 1))
(const T* q, const T* k, const T* v, const int* mask, const T* d_o, const float* lse, const float* delta, T* dk, T* dv,
    i64 q_row, i64 k_row, int heads, int group, int tq, int tk, int size, float scale) {
    float *ks = shared_floats, *vs = ks + ROWS * WIDTH, *qs = vs + ROWS * WIDTH, *gs = qs + PASS * PAD;
    int tiles = (tk + ROWS - 1) / ROWS, tile = blockIdx.x % tiles, lane = threadIdx.x % 32, own = threadIdx.x / 32 * OWN;
    int key_heads = heads / group, first = tile * ROWS + own, offset = tk - tq;
    i64 head = blockIdx.x / tiles, n = head / key_heads, o_row = (i64)heads * size;
    int hk = head % key_heads;
    i64 at = n * tk * k_row + hk * size;
    if (mask) mask += n * tk;
    stage(ks, WIDTH, k + at, k_row, tile * ROWS, ROWS, tk, size);
    stage(vs, WIDTH, v + at, k_row, tile * ROWS, ROWS, tk, size);
    float sum_k[OWN][C_CHUNKS], sum_v[OWN][C_CHUNKS], one[OWN], factor[OWN];
    int key[OWN]; // out of reach where hidden
    clear(sum_k);
    clear(sum_v);
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        key[r] = first + r < tk && (!mask || mask[first + r]) ? first + r : tk;
        one[r] = 1.f;
        factor[r] = scale;
    }
    // The first row that sees any of the tile's keys.
    int from = max(0, tile * ROWS - offset) / PASS * PASS;
    for (int h = hk * group; h < (hk + 1) * group; h++) {
        const T* q_head = q + n * tq * q_row + h * size;
        const T* g_head = d_o + n * tq * o_row + h * size;
        i64 rows = (n * heads + h) * tq;
        for (int i0 = from; i0 < tq; i0 += PASS) {
            __syncthreads();
            stage(qs, PAD, q_head, q_row, i0, PASS, tq, size);
            stage(gs, PAD, g_head, o_row, i0, PASS, tq, size);
            __syncthreads();
            float s[OWN], dp[OWN];
            dots(s, ks + own * WIDTH, qs + lane * PAD);
            dots(dp, vs + own * WIDTH, gs + lane * PAD);
            int i = i0 + lane;
            float l = i < tq ? lse[rows + i] : 0.f, dl = i < tq ? delta[rows + i] : 0.f;
#pragma unroll
            for (int r = 0; r < OWN; r++) {
                s[r] = i < tq && key[r] <= i + offset ? __expf(s[r] * scale - l) : 0.f;
                dp[r] = s[r] * (dp[r] - dl);
            }
            add_weighted(sum_v, s, gs);
            add_weighted(sum_k, dp, qs);
        }
    }
    store(dk + at, k_row, first, tk, size, sum_k, factor);
    store(dv + at, k_row, first, tk, size, sum_v, one);
}
