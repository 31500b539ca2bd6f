// Sums over the middle axis of [outer, middle, inner], in f32 and in a fixed order.
//
// gridDim.y pieces of the summed axis leave partial sums [outer, pieces, inner]; the last block to finish, known by a counter that it sets
// back to zero, adds them in order. One piece gives the result at once, and needs neither.

// Whether this block is the last of `pieces` to come here; all its threads get the answer, and see what the others wrote.
__device__ __forceinline__ bool is_last(int* counter, int pieces) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == pieces - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// inner = 1: block (o, piece)
extern "C" __global__ void sum_last(const T* x, float* y, i64 middle, bool accumulate, float* partial, int* counters) {
    __shared__ float scratch[32];
    i64 o = blockIdx.x, piece = blockIdx.y, pieces = gridDim.y;
    i64 length = (middle + pieces - 1) / pieces, from = piece * length, to = min(from + length, middle);
    float s = 0;
    for (i64 m = from + threadIdx.x; m < to; m += blockDim.x) s += to_f32(x[o * middle + m]);
    s = block_sum(s, scratch);
    if (pieces > 1) {
        if (threadIdx.x == 0) partial[o * pieces + piece] = s;
        if (!is_last(counters + o, (int)pieces)) return;
        s = 0;
        for (i64 p = threadIdx.x; p < pieces; p += blockDim.x) s += __ldcg(partial + o * pieces + p);
        s = block_sum(s, scratch);
    }
    if (threadIdx.x == 0) y[o] = accumulate ? y[o] + s : s;
}

// Sums over eight rows of threads, N columns a thread; the first row of threads gets them.
template <int N> __device__ __forceinline__ void eight_rows(float (&s)[N], float (&part)[8][32 * N]) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32;
#pragma unroll
    for (int e = 0; e < N; e++) part[row][e * 32 + lane] = s[e];
    __syncthreads();
    if (row == 0)
#pragma unroll
        for (int e = 0; e < N; e++)
#pragma unroll
            for (int r = 1; r < 8; r++) s[e] += part[r][e * 32 + lane];
    __syncthreads();
}

// block (o, 32 N columns; piece) of 256 threads: 8 rows at a time
template <int N>
__device__ __forceinline__ void sum_columns(const T* x, float* y, i64 middle, i64 inner, bool accumulate, float* partial, int* counters) {
    __shared__ float part[8][32 * N];
    i64 tiles = (inner + 32 * N - 1) / (32 * N), o = blockIdx.x / tiles, piece = blockIdx.y, pieces = gridDim.y;
    i64 length = (middle + pieces - 1) / pieces, from = piece * length, to = min(from + length, middle);
    int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    i64 at = (blockIdx.x % tiles * 32 + lane) * N;
    float s[N] = {};
    if (at < inner)
#pragma unroll 4
        for (i64 m = from + row; m < to; m += 8) {
            Vec<T, N> v = *(const Vec<T, N>*)(x + (o * middle + m) * inner + at);
#pragma unroll
            for (int e = 0; e < N; e++) s[e] += to_f32(v.v[e]);
        }
    eight_rows<N>(s, part);
    if (pieces > 1) {
        if (row == 0 && at < inner)
#pragma unroll
            for (int e = 0; e < N; e++) partial[(o * pieces + piece) * inner + at + e] = s[e];
        if (!is_last(counters + blockIdx.x, (int)pieces)) return;
#pragma unroll
        for (int e = 0; e < N; e++) s[e] = 0;
        // Past the first cache, which does not see what other blocks wrote.
        if (at < inner)
            for (i64 p = row; p < pieces; p += 8)
#pragma unroll
                for (int e = 0; e < N; e++) s[e] += __ldcg(partial + (o * pieces + p) * inner + at + e);
        eight_rows<N>(s, part);
    }
    if (row == 0 && at < inner)
#pragma unroll
        for (int e = 0; e < N; e++) {
            float* out = y + o * inner + at + e;
            *out = accumulate ? *out + s[e] : s[e];
        }
}
extern "C" __global__ void __launch_bounds__(256) sum_middle(const T* x, float* y, i64 middle, i64 inner, bool accumulate, float* partial,
                                                           int* counters) {
    sum_columns<1>(x, y, middle, inner, accumulate, partial, counters);
}
// inner is a multiple of 4 and x lies at one of 16 bytes.
extern "C" __global__ void __launch_bounds__(256) sum_middle_wide(const T* x, float* y, i64 middle, i64 inner, bool accumulate, float* partial,
                                                                int* counters) {
    sum_columns<4>(x, y, middle, inner, accumulate, partial, counters);
}

// dx[o, m, i] = dy[o, i]
extern "C" __global__ void spread(const float* dy, T* dx, i64 n, i64 middle, i64 inner) {
    EACH(j, n) dx[j] = from_f32<T>(dy[j / (middle * inner) * inner + j % inner]);
}
