// What the tensor-core attention kernels share: a block of C_WARPS warps with 16 rows each, swizzled tiles of rows of C_SIZE elements,
// copies to and from them, fragments of a warp's 16 rows. An accumulator, packed to bf16, is the left operand of the next product, for
// mma.sync and for wgmma alike. Rows are swizzled in chunks of 16 bytes so that ldmatrix meets no bank twice; with 32 and 64 elements a row
// that is also the swizzle of 64 and 128 bytes that wgmma knows, if a tile starts at a multiple of 1024 bytes.
constexpr int SIZE = C_SIZE, WARPS = C_WARPS, THREADS = 32 * WARPS, ROWS = 16 * WARPS, CHUNKS = SIZE / 8;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

extern __shared__ __align__(1024) unsigned char shared_bytes[];

// Element offset of a 16-byte chunk in a swizzled tile.
__device__ __forceinline__ int at(int row, int chunk) {
    int turn = CHUNKS == 4 ? row >> 1 & 3 : row & 7;
    return row * SIZE + ((chunk ^ turn) << 3);
}
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)) : "memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of copies are under way.
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void copy_chunk(u32 to, const bf16* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// `count` rows of a head to a swizzled tile; rows before 0 and from `limit` on become zero.
__device__ __forceinline__ void load(bf16* to, const bf16* from, i64 stride, int first, int count, int limit) {
    constexpr int STEP = THREADS / CHUNKS;
    int chunk = threadIdx.x % CHUNKS, own = threadIdx.x / CHUNKS;
    // Eight rows further the swizzle is the same: where all rows are there, addresses are steps from the first.
    if (STEP % 8 == 0 && count % STEP == 0 && first >= 0 && first + count <= limit) {
        u32 place = address(to + at(own, chunk));
        const bf16* source = from + (first + own) * stride + chunk * 8;
#pragma unroll
        for (int r = 0; r < count; r += STEP, source += STEP * stride) copy_chunk(place + r * SIZE * 2, source, 16);
        return;
    }
    for (int r = own; r < count; r += STEP) {
        int row = first + r;
        bool there = (u32)row < (u32)limit;
        copy_chunk(address(to + at(r, chunk)), from + (there ? row : 0) * stride + chunk * 8, there ? 16 : 0);
    }
}
// `count` floats; those from `limit` on become zero.
__device__ __forceinline__ void load_floats(float* to, const float* from, int first, int count, int limit) {
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int bytes = first + i < limit ? 4 : 0;
        const float* source = from + (first + i < limit ? first + i : 0);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address(to + i)), "l"(source), "r"(bytes) : "memory");
    }
}

template <int N> __device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[n][e] = 0.f;
}

// An accumulator as a left operand.
template <int N> __device__ __forceinline__ void to_operand(u32 (&a)[N / 16][4], const float (&x)[N / 8][4]) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) a[n / 2][(n & 1) * 2 + half] = pack(x[n][2 * half], x[n][2 * half + 1]);
}

#define NONE __int_as_float(0xff800000)

// Scores s [16, 8 N] of the warp's rows from `first` on and of keys from j0 on that a row does not see become the least there is: keys
// beyond its own place, which is `offset` further than its number, past the end, or hidden by the mask (may be null).
template <int N>
__device__ __forceinline__ void hide(float (&s)[N][4], int j0, int first, int offset, int tk, const int* mask) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < N; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int key = j0 + c * 8 + lane % 4 * 2 + e, last = first + lane / 4 + offset;
            bool visible = key < tk && (!mask || mask[key]);
            if (!visible || key > last) s[c][e] = NONE;
            if (!visible || key > last + 8) s[c][2 + e] = NONE;
        }
}

// The running softmax of a warp's 16 rows: the largest score so far of rows lane / 4 and 8 below, and the lane's part of the sums.
struct Softmax {
    float most[2] = {NONE, NONE}, total[2] = {0.f, 0.f};
    // Scores [16, 8 N] become weights e^(scale (s - most)), where turn = scale log2(e), and what `sum` holds so far is made to fit.
    template <int N> __device__ __forceinline__ void weigh(float (&s)[N][4], float (&sum)[CHUNKS][4], float turn) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = most[half];
#pragma unroll
            for (int c = 0; c < N; c++) m = fmaxf(m, fmaxf(s[c][2 * half], s[c][2 * half + 1]));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            float shift = m == NONE ? 0.f : m * turn, keep = exp2_of(most[half] * turn - shift), add = 0.f;
            most[half] = m;
#pragma unroll
            for (int c = 0; c < N; c++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s[c][e] = exp2_of(s[c][e] * turn - shift);
                    add += s[c][e];
                }
            total[half] = total[half] * keep + add;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                sum[c][2 * half] *= keep;
                sum[c][2 * half + 1] *= keep;
            }
        }
    }
    // One over the sums, and the log-sum-exp of the rows from `first` on, of tq, to lse [tq] (may be null).
    __device__ __forceinline__ void finish(float (&inverse)[2], float* lse, int first, int tq, float scale) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = total[half];
            x += __shfl_xor_sync(~0u, x, 1);
            x += __shfl_xor_sync(~0u, x, 2);
            inverse[half] = x > 0.f ? 1.f / x : 0.f;
            int row = first + lane / 4 + half * 8;
            // Infinite where nothing is visible: probabilities computed from it are zero.
            if (lse && lane % 4 == 0 && (u32)row < (u32)tq) lse[row] = x > 0.f ? most[half] * scale + log2f(x) * LN_2 : -NONE;
        }
    }
};

// The warp's 16 rows of a result, times a factor for each half, through its own rows of a tile that it no longer needs.
__device__ __forceinline__ void store(bf16* to, i64 stride, int first, int limit, bf16* tile, int own_row, const float (&sum)[CHUNKS][4],
                                      float low, float high) {
    int lane = threadIdx.x % 32, top = own_row + lane / 4;
    __syncwarp();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        *(u32*)(tile + at(top, c) + lane % 4 * 2) = pack(sum[c][0] * low, sum[c][1] * low);
        *(u32*)(tile + at(top + 8, c) + lane % 4 * 2) = pack(sum[c][2] * high, sum[c][3] * high);
    }
    __syncwarp();
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
        int r = i / CHUNKS, chunk = i % CHUNKS, row = first + r;
        if ((u32)row < (u32)limit) *(uint4*)(to + row * stride + chunk * 8) = *(const uint4*)(tile + at(own_row + r, chunk));
    }
}

// do . o of rows `first` + lane / 4 and 8 below it, the same in the four lanes of a row; zero for rows that are not there.
__device__ __forceinline__ void deltas(float (&delta)[2], const bf16* o, const bf16* d_o, i64 stride, int first, int limit) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + half * 8;
        float x = 0.f;
        if ((u32)row < (u32)limit)
#pragma unroll
            for (int c = 0; c < CHUNKS; c += 4) {
                i64 at = row * stride + (c + lane % 4) * 8;
                Vec<bf16, 8> a = *(const Vec<bf16, 8>*)(o + at), b = *(const Vec<bf16, 8>*)(d_o + at);
#pragma unroll
                for (int e = 0; e < 8; e++) x += to_f32(a.v[e]) * to_f32(b.v[e]);
            }
        x += __shfl_xor_sync(~0u, x, 1);
        delta[half] = x + __shfl_xor_sync(~0u, x, 2);
    }
}
