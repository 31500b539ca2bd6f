// Layer norm (with a bias) and RMS norm (bias null) of rows [G, m, d], gain and bias [G, d]. Statistics in f32.
//
// Rows that fit are held in registers by LANES lanes of a warp, HELD accesses of N elements a lane; longer rows take a block each and
// are read again for each pass. In the backward pass block (piece, group) takes `length` rows of its group and leaves its sums of the
// gain's and the bias' gradients in [G, pieces, d]; they are added in order afterwards, so every run gives the same bits.
// dy gain is rounded (__fmul_rn) in both places where it stands, so that rows of one element give exactly zero.
#define THREADS 256
#define ALL (16 / sizeof(T))
#define PACKED (sizeof(T) == 2) // two elements in a register

template <int N, int HELD, int LANES>
__device__ __forceinline__ void load_row(const T* from, int lane, int d, Vec<T, N>* row) {
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int at = (j * LANES + lane) * N;
        if (at < d) row[j] = *(const Vec<T, N>*)(from + at);
    }
}

// Element e of a vector. Of a word with two bf16 the halves are taken apart where they are used, so that they take one register.
template <int N> __device__ __forceinline__ float element(const Vec<T, N>& v, int e) {
    if constexpr (sizeof(T) == 2 && N > 1) {
        u32 word = ((const u32*)&v)[e / 2];
        return __uint_as_float(e % 2 ? word & 0xffff0000 : word << 16);
    } else {
        return to_f32(v.v[e]);
    }
}

// Hides that the elements are those of before: the compiler would keep them as f32 from one pass to the next, in twice the registers.
template <int N, int HELD> __device__ __forceinline__ void forget(Vec<T, N> (&row)[HELD]) {
    if constexpr (sizeof(T) == 2 && N > 1)
#pragma unroll
        for (int j = 0; j < HELD; j++)
#pragma unroll
            for (int w = 0; w < N / 2; w++) asm volatile("" : "+r"(((u32*)&row[j])[w]));
}

// The mean of a row; lanes beyond it hold zeros.
template <int N, int HELD, int LANES> __device__ __forceinline__ float mean_of(const Vec<T, N>* row, int d) {
    float s = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++)
#pragma unroll
        for (int e = 0; e < N; e++) s += to_f32(row[j].v[e]);
    return warp_sum<LANES>(s) / d;
}

template <int N, int HELD, int LANES>
__device__ __forceinline__ void forward(const T* x, const T* gain, const T* bias, T* y, i64 rows, i64 m, int d, float eps) {
    int lane = threadIdx.x % LANES;
    i64 own = (i64)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, r = min(own, rows - 1);
    Vec<T, N> row[HELD] = {};
    load_row<N, HELD, LANES>(x + r * d, lane, d, row);
    float mean = bias ? mean_of<N, HELD, LANES>(row, d) : 0.f, square = 0;
    forget(row);
#pragma unroll
    for (int j = 0; j < HELD; j++)
#pragma unroll
        for (int e = 0; e < N; e++) {
            float c = element(row[j], e) - mean;
            if ((j * LANES + lane) * N < d) square += c * c;
        }
    float scale = rsqrtf(warp_sum<LANES>(square) / d + eps);
    forget(row);
    if (own >= rows) return;
    const T* own_gain = gain + r / m * d;
    const T* own_bias = bias ? bias + r / m * d : nullptr;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int at = (j * LANES + lane) * N;
        if (at >= d) continue;
        Vec<T, N> g = *(const Vec<T, N>*)(own_gain + at), b = {}, out;
        if (own_bias) b = *(const Vec<T, N>*)(own_bias + at);
#pragma unroll
        for (int e = 0; e < N; e++)
            out.v[e] = from_f32<T>((element(row[j], e) - mean) * scale * element(g, e) + (own_bias ? element(b, e) : 0.f));
        *(Vec<T, N>*)(y + r * d + at) = out;
    }
}

// Sums [THREADS / LANES][d] of the rows of lanes into d sums of the block. Called by all threads.
template <int N, int HELD, int LANES>
__device__ __forceinline__ void gather(const float* sums, float* shared, int lane, int d, float* out) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int at = (j * LANES + lane) * N;
        if (at >= d) continue;
#pragma unroll
        for (int e = 0; e < N; e++) shared[threadIdx.x / LANES * d + at + e] = sums[j * N + e];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < d; c += THREADS) {
        float s = 0;
#pragma unroll
        for (int r = 0; r < THREADS / LANES; r++) s += shared[r * d + c];
        out[c] = s;
    }
}

// What a row needs is asked for at once, dx too: the memory's latency, met once a row, is most of a warp's time.
template <int N, int HELD, int LANES>
__device__ __forceinline__ void backward(const T* x, const T* gain, const T* dy, T* dx, float* dgain, float* dbias, i64 length, i64 m,
                                         int d, float eps, bool add) {
    extern __shared__ float shared[];
    int lane = threadIdx.x % LANES;
    i64 piece = blockIdx.x, group = blockIdx.y, from = piece * length, to = min(from + length, m);
    Vec<T, N> g[HELD] = {};
    load_row<N, HELD, LANES>(gain + group * d, lane, d, g);
    float sum_gain[HELD * N] = {}, sum_bias[HELD * N] = {};
    for (i64 first = from; first < to; first += THREADS / LANES) {
        // A warp's rows go on together. Past the last one it is taken again, with dy = 0, and not stored.
        i64 i = first + threadIdx.x / LANES, start = (group * m + min(i, to - 1)) * d;
        bool own = i < to;
        Vec<T, N> row[HELD] = {}, up[HELD] = {}, old[HELD] = {};
        load_row<N, HELD, LANES>(x + start, lane, d, row);
        if (own) load_row<N, HELD, LANES>(dy + start, lane, d, up);
        if (own && add) load_row<N, HELD, LANES>(dx + start, lane, d, old);
        float mean = dbias ? mean_of<N, HELD, LANES>(row, d) : 0.f, square = 0, plain = 0, along = 0;
        // Lanes beyond the row hold dy = 0 and add nothing to the last two.
#pragma unroll
        for (int j = 0; j < HELD; j++)
#pragma unroll
            for (int e = 0; e < N; e++) {
                float c = element(row[j], e) - mean, a = __fmul_rn(element(up[j], e), element(g[j], e));
                if ((j * LANES + lane) * N < d) square += c * c;
                plain += a;
                along += a * c;
            }
        float scale = rsqrtf(warp_sum<LANES>(square) / d + eps);
        plain = dbias ? warp_sum<LANES>(plain) / d : 0.f;
        along = warp_sum<LANES>(along) * scale / d;
        forget(row);
        forget(up);
        forget(g);
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int at = (j * LANES + lane) * N;
            Vec<T, N> out;
#pragma unroll
            for (int e = 0; e < N; e++) {
                float u = element(up[j], e), xhat = (element(row[j], e) - mean) * scale;
                float slope = scale * (__fmul_rn(u, element(g[j], e)) - plain - xhat * along);
                sum_gain[j * N + e] += u * xhat;
                sum_bias[j * N + e] += u;
                out.v[e] = from_f32<T>(add ? element(old[j], e) + slope : slope);
            }
            if (own && at < d) *(Vec<T, N>*)(dx + start + at) = out;
        }
    }
    i64 sums = (group * gridDim.x + piece) * d;
    gather<N, HELD, LANES>(sum_gain, shared, lane, d, dgain + sums);
    if (dbias) gather<N, HELD, LANES>(sum_bias, shared, lane, d, dbias + sums);
}

// Statistics of a row that a block reads.
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

// `there` blocks of the forward pass on a multiprocessor: as many as do without spills. On the way back `blocks` of them, which norm.rs
// knows too.
#define HELD_ROWS(name, n, held, lanes, there, blocks)                                                                              \
    KERNEL(norm_##name, __launch_bounds__(THREADS, there))                                                                          \
        (const T* x, const T* gain, const T* bias, T* y, i64 rows, i64 m, i64 d, float eps) {                                       \
        forward<n, held, lanes>(x, gain, bias, y, rows, m, (int)d, eps);                                                            \
    }                                                                                                                               \
    KERNEL(norm_backward_##name, __launch_bounds__(THREADS, blocks))                                                                \
        (const T* x, const T* gain, const T* dy, T* dx, float* dgain, float* dbias, i64 length, i64 m, i64 d,                       \
         float eps, bool add) {                                                                                                     \
        backward<n, held, lanes>(x, gain, dy, dx, dgain, dbias, length, m, (int)d, eps, add);                                       \
    }
#define WIDE_ROWS(name, n)                                                                                                          \
    KERNEL(norm_##name, __launch_bounds__(THREADS))                                                                                 \
        (const T* x, const T* gain, const T* bias, T* y, i64 rows, i64 m, i64 d, float eps) {                                       \
        wide_forward<n>(x, gain, bias, y, m, d, eps);                                                                               \
    }                                                                                                                               \
    KERNEL(norm_backward_##name, __launch_bounds__(THREADS))                                                                        \
        (const T* x, const T* gain, const T* dy, T* dx, float* dgain, float* dbias, i64 length, i64 m, i64 d,                       \
         float eps, bool add) {                                                                                                     \
        wide_backward<n>(x, gain, dy, dx, dgain, dbias, length, m, d, eps, add);                                                    \
    }

HELD_ROWS(vector_16_1, ALL, 1, 16, 6, 4)
HELD_ROWS(vector_32_1, ALL, 1, 32, 6, 4)
HELD_ROWS(vector_16_3, ALL, 3, 16, PACKED ? 6 : 5, 2)
HELD_ROWS(vector_32_2, ALL, 2, 32, 6, 2)
HELD_ROWS(vector_32_3, ALL, 3, 32, PACKED ? 6 : 5, 2)
HELD_ROWS(vector_32_4, ALL, 4, 32, 4, 1)
HELD_ROWS(scalar_32_2, 1, 2, 32, 4, 4)
HELD_ROWS(scalar_32_8, 1, 8, 32, 4, 2)
WIDE_ROWS(wide_vector, ALL)
WIDE_ROWS(wide, 1)
