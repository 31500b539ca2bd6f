// Keys, values and importance of the few memory tokens of a segment, k = x W_K, v = x W_V, beta = x W_b + bias, in one launch: three
// products that would each leave most of the GPU idle, and a copy of the tokens before them.
//
// Block (32 columns of k or of v, or all of beta; layer) of 8 warps: up to 16 rows of x against columns of W [width, n], which nobody else
// reads. Each warp has every eighth slice of 16 of the summed axis, straight from global memory to registers, AHEAD of them asked for before
// the first is used (three would spill), and the eight sums are added in order. A product does not care which summed index is called which,
// nor which column: a lane takes four neighbours of each, so that all loads are of 8 bytes, and of its accumulators eight are neighbours too.
constexpr int WARPS = 8, ROWS = 16, COLUMNS = 32, SLICE = 16, AHEAD = 2;

__device__ __forceinline__ void mma(float (&c)[4], uint2 upper, uint2 lower, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(upper.x), "r"(lower.x), "r"(upper.y), "r"(lower.y), "r"(b0), "r"(b1));
}
// Low or high halves of two words.
__device__ __forceinline__ u32 low(u32 first, u32 second) { return __byte_perm(first, second, 0x5410); }
__device__ __forceinline__ u32 high(u32 first, u32 second) { return __byte_perm(first, second, 0x7632); }
__device__ __forceinline__ uint2 four(const T* p) { return __ldg((const uint2*)p); }

// The rows of x [texts, t, width] that are memory tokens, the last m of each text.
struct Tokens {
    const T* x;
    int rows, m, t, width;
    __device__ __forceinline__ const T* row(int r) const { return x + (i64)(r / m * t + (t - m) + r % m) * width; }
};

// Adds the products of N slices, WARPS slices apart, of two rows of x from `above` and `below` and of columns of w from `right`, to c.
template <int N> __device__ __forceinline__ void slices(float (&c)[4][4], const T* above, const T* below, const T* right, int n) {
    constexpr int STEP = WARPS * SLICE;
    uint2 a[N][2], b[N][4];
#pragma unroll
    for (int s = 0; s < N; s++) {
        a[s][0] = four(above + s * STEP), a[s][1] = four(below + s * STEP);
#pragma unroll
        for (int i = 0; i < 4; i++) b[s][i] = four(right + (s * STEP + i) * n);
    }
#pragma unroll
    for (int s = 0; s < N; s++) {
        uint2* r = b[s];
        mma(c[0], a[s][0], a[s][1], low(r[0].x, r[1].x), low(r[2].x, r[3].x));
        mma(c[1], a[s][0], a[s][1], high(r[0].x, r[1].x), high(r[2].x, r[3].x));
        mma(c[2], a[s][0], a[s][1], low(r[0].y, r[1].y), low(r[2].y, r[3].y));
        mma(c[3], a[s][0], a[s][1], high(r[0].y, r[1].y), high(r[2].y, r[3].y));
    }
}

// y [rows, n] = x w, of which the block has COLUMNS columns.
__device__ __forceinline__ void columns_of(Tokens x, const T* w, T* y, int n, int first, float (&sums)[WARPS][ROWS * COLUMNS]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, own = lane % 4;
    // In the place of rows and columns that are not there others are multiplied, and nobody stores the results.
    const T *above = x.row(group < x.rows ? group : 0), *below = x.row(group + 8 < x.rows ? group + 8 : 0);
    const T* right = w + first + (first + 4 * group < n ? 4 * group : 0);
    float c[4][4] = {};
    constexpr int STEP = WARPS * SLICE;
    int k = warp * SLICE + 4 * own;
#pragma unroll 1
    for (; k + (AHEAD - 1) * STEP < x.width; k += AHEAD * STEP) slices<AHEAD>(c, above + k, below + k, right + k * n, n);
#pragma unroll 1
    for (; k < x.width; k += STEP) slices<1>(c, above + k, below + k, right + k * n, n);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float* to = sums[warp] + (group + 8 * half) * COLUMNS + 8 * own;
#pragma unroll
        for (int side = 0; side < 2; side++) {
            int i = 2 * half + side;
            *(float4*)(to + 4 * side) = make_float4(c[0][i], c[1][i], c[2][i], c[3][i]);
        }
    }
    __syncthreads();
    int row = threadIdx.x / (COLUMNS / 2), column = threadIdx.x % (COLUMNS / 2) * 2;
    if (row >= x.rows || first + column >= n) return;
    float2 s = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        float2 part = *(const float2*)(sums[i] + row * COLUMNS + column);
        s.x += part.x, s.y += part.y;
    }
    *(Vec<T, 2>*)(y + row * n + first + column) = {from_f32<T>(s.x), from_f32<T>(s.y)};
}

// x [layers, texts, t, width], key [layers, width, dm], value [layers, width, d], beta [layers, width], bias [layers]: k, v and b of the
// texts' last m rows, of which there are at most 16. width is a multiple of 16, dm and d of 4.
KERNEL(token_maps, __launch_bounds__(32 * WARPS, 3))
(const T* x, const T* key, const T* value, const T* beta, const T* bias, T* k, T* v, T* b, int texts, int m, int t, int width, int dm, int d) {
    __shared__ __align__(16) float sums[WARPS][ROWS * COLUMNS];
    int of_keys = (dm + COLUMNS - 1) / COLUMNS, of_values = (d + COLUMNS - 1) / COLUMNS, tile = blockIdx.x;
    i64 layer = blockIdx.y;
    Tokens tokens = {x + layer * texts * t * width, texts * m, m, t, width};
    if (tile < of_keys + of_values) {
        bool keys = tile < of_keys;
        int n = keys ? dm : d, first = (keys ? tile : tile - of_keys) * COLUMNS;
        columns_of(tokens, (keys ? key : value) + layer * width * n, (keys ? k : v) + layer * tokens.rows * n, n, first, sums);
        return;
    }
    int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < tokens.rows; r += WARPS) {
        const T* row = tokens.row(r);
        float s = 0;
        for (int i = lane * 4; i < width; i += 128) {
            Vec<T, 4> p = *(const Vec<T, 4>*)(row + i), q = *(const Vec<T, 4>*)(beta + layer * width + i);
#pragma unroll
            for (int e = 0; e < 4; e++) s += to_f32(p.v[e]) * to_f32(q.v[e]);
        }
        s = warp_sum(s);
        if (lane == 0) b[layer * tokens.rows + r] = from_f32<T>(s + to_f32(bias[layer]));
    }
}
