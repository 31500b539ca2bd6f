// Layer norm (with a bias) and RMS norm (bias null) of rows [G, m, d], gain and bias [G, d]. Statistics in f32.
//
// Rows that fit are held in registers by one warp, HELD accesses of N elements a lane, eight rows a block; longer rows take a block
// each and are read again for each pass. In the backward pass block (piece, group) takes `length` rows of its group and leaves its sums
// of the gain's and the bias' gradients in [G, pieces, d]; they are added in order afterwards, so every run gives the same bits.
// dy gain is rounded (__fmul_rn) in both places where it stands, so that rows of one element give exactly zero.
#define WARPS 8
#define ALL (16 / sizeof(T))

// Mean (0 for RMS norm) and 1 / sqrt(variance + eps) of a row that a warp holds.
template <int N, int HELD>
__device__ __forceinline__ void statistics(const Vec<T, N>* row, int lane, int d, float eps, bool centred, float& mean, float& scale) {
    mean = 0;
    if (centred) {
        float s = 0;
#pragma unroll
        for (int j = 0; j < HELD; j++)
#pragma unroll
            for (int e = 0; e < N; e++)
                if ((j * 32 + lane) * N < d) s += to_f32(row[j].v[e]);
        mean = warp_sum(s) / d;
    }
    float s = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++)
#pragma unroll
        for (int e = 0; e < N; e++) {
            float c = to_f32(row[j].v[e]) - mean;
            if ((j * 32 + lane) * N < d) s += c * c;
        }
    scale = rsqrtf(warp_sum(s) / d + eps);
}

template <int N, int HELD>
__device__ __forceinline__ void load_row(const T* from, int lane, int d, Vec<T, N>* row) {
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int at = (j * 32 + lane) * N;
        if (at < d) row[j] = *(const Vec<T, N>*)(from + at);
    }
}

template <int N, int HELD>
__device__ __forceinline__ void forward(const T* x, const T* gain, const T* bias, T* y, i64 rows, i64 m, int d, float eps) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 r = (i64)blockIdx.x * WARPS + warp;
    if (r >= rows) return;
    Vec<T, N> row[HELD] = {};
    load_row<N, HELD>(x + r * d, lane, d, row);
    float mean, scale;
    statistics<N, HELD>(row, lane, d, eps, bias != nullptr, mean, scale);
    const T* own_gain = gain + r / m * d;
    const T* own_bias = bias ? bias + r / m * d : nullptr;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int at = (j * 32 + lane) * N;
        if (at >= d) continue;
        Vec<T, N> g = *(const Vec<T, N>*)(own_gain + at), b = {}, out;
        if (own_bias) b = *(const Vec<T, N>*)(own_bias + at);
#pragma unroll
        for (int e = 0; e < N; e++)
            out.v[e] = from_f32<T>((to_f32(row[j].v[e]) - mean) * scale * to_f32(g.v[e]) + (own_bias ? to_f32(b.v[e]) : 0.f));
        *(Vec<T, N>*)(y + r * d + at) = out;
    }
}

// Sums [WARPS][d] of the warps into d sums of the block. Called by all threads.
template <int N, int HELD>
__device__ __forceinline__ void gather(const float* sums, float* shared, int lane, int warp, int d, float* out) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int at = (j * 32 + lane) * N;
        if (at >= d) continue;
#pragma unroll
        for (int e = 0; e < N; e++) shared[warp * d + at + e] = sums[j * N + e];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float s = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) s += shared[w * d + c];
        out[c] = s;
    }
}

template <int N, int HELD>
__device__ __forceinline__ void backward(const T* x, const T* gain, const T* dy, T* dx, float* dgain, float* dbias, i64 length, i64 m,
                                         int d, float eps, bool add) {
    extern __shared__ float shared[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 piece = blockIdx.x, group = blockIdx.y, from = piece * length, to = min(from + length, m);
    Vec<T, N> g[HELD] = {};
    load_row<N, HELD>(gain + group * d, lane, d, g);
    float sum_gain[HELD * N] = {}, sum_bias[HELD * N] = {};
    for (i64 i = from + warp; i < to; i += WARPS) {
        i64 start = (group * m + i) * d;
        Vec<T, N> row[HELD] = {}, up[HELD] = {};
        load_row<N, HELD>(x + start, lane, d, row);
        load_row<N, HELD>(dy + start, lane, d, up);
        float mean, scale, plain = 0, along = 0;
        statistics<N, HELD>(row, lane, d, eps, dbias != nullptr, mean, scale);
        // Lanes beyond the row hold dy = 0 and add nothing.
#pragma unroll
        for (int j = 0; j < HELD; j++)
#pragma unroll
            for (int e = 0; e < N; e++) {
                float u = to_f32(up[j].v[e]), a = __fmul_rn(u, to_f32(g[j].v[e])), xhat = (to_f32(row[j].v[e]) - mean) * scale;
                plain += a;
                along += a * xhat;
                sum_gain[j * N + e] += u * xhat;
                sum_bias[j * N + e] += u;
            }
        plain = dbias ? warp_sum(plain) / d : 0.f;
        along = warp_sum(along) / d;
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int at = (j * 32 + lane) * N;
            if (at >= d) continue;
            Vec<T, N> out = {};
            if (add) out = *(const Vec<T, N>*)(dx + start + at);
#pragma unroll
            for (int e = 0; e < N; e++) {
                float xhat = (to_f32(row[j].v[e]) - mean) * scale;
                float slope = scale * (__fmul_rn(to_f32(up[j].v[e]), to_f32(g[j].v[e])) - plain - xhat * along);
                out.v[e] = from_f32<T>(add ? to_f32(out.v[e]) + slope : slope);
            }
            *(Vec<T, N>*)(dx + start + at) = out;
        }
    }
    i64 own = (group * gridDim.x + piece) * d;
    gather<N, HELD>(sum_gain, shared, lane, warp, d, dgain + own);
    if (dbias) gather<N, HELD>(sum_bias, shared, lane, warp, d, dbias + own);
}

// The same statistics for a row that a block reads.
template <int N>
__device__ __forceinline__ void wide_statistics(const T* row, i64 d, float eps, bool centred, float* scratch, float& mean, float& scale) {
    mean = 0;
    if (centred) {
        float s = 0;
        for (i64 at = (i64)threadIdx.x * N; at < d; at += (i64)blockDim.x * N) {
            Vec<T, N> v = *(const Vec<T, N>*)(row + at);
#pragma unroll
            for (int e = 0; e < N; e++) s += to_f32(v.v[e]);
        }
        mean = block_sum(s, scratch) / d;
    }
    float s = 0;
    for (i64 at = (i64)threadIdx.x * N; at < d; at += (i64)blockDim.x * N) {
        Vec<T, N> v = *(const Vec<T, N>*)(row + at);
#pragma unroll
        for (int e = 0; e < N; e++) {
            float c = to_f32(v.v[e]) - mean;
            s += c * c;
        }
    }
    scale = rsqrtf(block_sum(s, scratch) / d + eps);
}

template <int N>
__device__ __forceinline__ void wide_forward(const T* x, const T* gain, const T* bias, T* y, i64 m, i64 d, float eps) {
    __shared__ float scratch[32];
    i64 r = blockIdx.x;
    float mean, scale;
    wide_statistics<N>(x + r * d, d, eps, bias != nullptr, scratch, mean, scale);
    for (i64 at = (i64)threadIdx.x * N; at < d; at += (i64)blockDim.x * N) {
        Vec<T, N> v = *(const Vec<T, N>*)(x + r * d + at), g = *(const Vec<T, N>*)(gain + r / m * d + at), b = {}, out;
        if (bias) b = *(const Vec<T, N>*)(bias + r / m * d + at);
#pragma unroll
        for (int e = 0; e < N; e++)
            out.v[e] = from_f32<T>((to_f32(v.v[e]) - mean) * scale * to_f32(g.v[e]) + (bias ? to_f32(b.v[e]) : 0.f));
        *(Vec<T, N>*)(y + r * d + at) = out;
    }
}

// A thread meets the same columns in every row, so that it can add to their sums in memory.
template <int N>
__device__ __forceinline__ void wide_backward(const T* x, const T* gain, const T* dy, T* dx, float* dgain, float* dbias, i64 length,
                                              i64 m, i64 d, float eps, bool add) {
    __shared__ float scratch[32];
    i64 piece = blockIdx.x, group = blockIdx.y, from = piece * length, to = min(from + length, m);
    i64 own = (group * gridDim.x + piece) * d;
    for (i64 i = from; i < to; i++) {
        i64 start = (group * m + i) * d;
        float mean, scale, plain = 0, along = 0;
        wide_statistics<N>(x + start, d, eps, dbias != nullptr, scratch, mean, scale);
        for (i64 at = (i64)threadIdx.x * N; at < d; at += (i64)blockDim.x * N) {
            Vec<T, N> v = *(const Vec<T, N>*)(x + start + at), u = *(const Vec<T, N>*)(dy + start + at);
            Vec<T, N> g = *(const Vec<T, N>*)(gain + group * d + at);
#pragma unroll
            for (int e = 0; e < N; e++) {
                float a = __fmul_rn(to_f32(u.v[e]), to_f32(g.v[e])), xhat = (to_f32(v.v[e]) - mean) * scale;
                plain += a;
                along += a * xhat;
            }
        }
        plain = dbias ? block_sum(plain, scratch) / d : 0.f;
        along = block_sum(along, scratch) / d;
        for (i64 at = (i64)threadIdx.x * N; at < d; at += (i64)blockDim.x * N) {
            Vec<T, N> v = *(const Vec<T, N>*)(x + start + at), u = *(const Vec<T, N>*)(dy + start + at);
            Vec<T, N> g = *(const Vec<T, N>*)(gain + group * d + at), out = {};
            if (add) out = *(const Vec<T, N>*)(dx + start + at);
#pragma unroll
            for (int e = 0; e < N; e++) {
                float up = to_f32(u.v[e]), xhat = (to_f32(v.v[e]) - mean) * scale;
                float slope = scale * (__fmul_rn(up, to_f32(g.v[e])) - plain - xhat * along);
                out.v[e] = from_f32<T>(add ? to_f32(out.v[e]) + slope : slope);
                float* sum = dgain + own + at + e;
                *sum = i == from ? up * xhat : *sum + up * xhat;
                if (dbias) {
                    sum = dbias + own + at + e;
                    *sum = i == from ? up : *sum + up;
                }
            }
            *(Vec<T, N>*)(dx + start + at) = out;
        }
    }
}

// Four blocks of the forward pass on a multiprocessor: room for 64 registers, where the compiler would rather spill for eight.
#define HELD_ROWS(name, n, held)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                                            \
        norm_##name(const T* x, const T* gain, const T* bias, T* y, i64 rows, i64 m, i64 d, float eps) {                            \
        forward<n, held>(x, gain, bias, y, rows, m, (int)d, eps);                                                                   \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                               \
        norm_backward_##name(const T* x, const T* gain, const T* dy, T* dx, float* dgain, float* dbias, i64 length, i64 m, i64 d,   \
                             float eps, bool add) {                                                                                           \
        backward<n, held>(x, gain, dy, dx, dgain, dbias, length, m, (int)d, eps, add);                                                \
    }
#define WIDE_ROWS(name, n)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                               \
        norm_##name(const T* x, const T* gain, const T* bias, T* y, i64 rows, i64 m, i64 d, float eps) {                            \
        wide_forward<n>(x, gain, bias, y, m, d, eps);                                                                               \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                               \
        norm_backward_##name(const T* x, const T* gain, const T* dy, T* dx, float* dgain, float* dbias, i64 length, i64 m, i64 d,   \
                             float eps, bool add) {                                                                                           \
        wide_backward<n>(x, gain, dy, dx, dgain, dbias, length, m, d, eps, add);                                                    \
    }

HELD_ROWS(vector_1, ALL, 1)
HELD_ROWS(vector_2, ALL, 2)
HELD_ROWS(vector_4, ALL, 4)
HELD_ROWS(scalar_2, 1, 2)
HELD_ROWS(scalar_8, 1, 8)
WIDE_ROWS(wide_vector, ALL)
WIDE_ROWS(wide, 1)
