// Sums over the middle axis of [outer, middle, inner], in f32 and in a fixed order. How pieces of that axis are added: see the prelude.

// inner = 1: block (o, piece)
KERNEL(sum_last)(const T* x, float* y, i64 middle, bool accumulate, float* partial, int* counters) {
    __shared__ float scratch[32];
    __shared__ bool last;
    i64 o = blockIdx.x, piece = blockIdx.y, pieces = gridDim.y;
    i64 length = (middle + pieces - 1) / pieces, from = piece * length, to = min(from + length, middle);
    float s = 0;
    for (i64 m = from + threadIdx.x; m < to; m += blockDim.x) s += to_f32(x[o * middle + m]);
    s = block_sum(s, scratch);
    if (pieces > 1) {
        if (threadIdx.x == 0) partial[o * pieces + piece] = s;
        if (!is_last(counters + o, (int)pieces, last)) return;
        s = 0;
        for (i64 p = threadIdx.x; p < pieces; p += blockDim.x) s += __ldcg(partial + o * pieces + p);
        s = block_sum(s, scratch);
    }
    if (threadIdx.x == 0) y[o] = accumulate ? y[o] + s : s;
}

template <int N>
__device__ __forceinline__ void sum_elements(const T* x, Sums sums, i64 middle, i64 inner, float* partial, int* counters) {
    auto load = [&](i64 i) { return *(const Vec<T, N>*)(x + i); };
    sum_columns<N, 4>(sums, middle, inner, partial, counters, load, [&](Vec<T, N> own, i64, float (&s)[N]) {
#pragma unroll
        for (int e = 0; e < N; e++) s[e] += to_f32(own.v[e]);
    });
}
KERNEL(sum_middle, __launch_bounds__(256))(const T* x, float* y, i64 middle, bool accumulate, float* partial, int* counters,
                                         i64 inner, float* second, i64 split) {
    sum_elements<1>(x, Sums{y, second, split, accumulate}, middle, inner, partial, counters);
}
// inner is a multiple of 4 and x lies at one of 16 bytes.
KERNEL(sum_middle_wide, __launch_bounds__(256))(const T* x, float* y, i64 middle, bool accumulate, float* partial,
                                              int* counters, i64 inner, float* second, i64 split) {
    sum_elements<4>(x, Sums{y, second, split, accumulate}, middle, inner, partial, counters);
}

// dx[o, m, i] = dy[o, i]
KERNEL(spread)(const float* dy, T* dx, i64 n, i64 middle, i64 inner) {
    EACH(j, n) dx[j] = from_f32<T>(dy[j / (middle * inner) * inner + j % inner]);
}

// y[r] = x[r] . w[r / m] + bias[r / m] of rows of k elements: a product with one column. A warp a row.
template <int N> __device__ __forceinline__ float dot_of(const T* x, const T* w, i64 k) {
    float s = 0;
    for (i64 c = threadIdx.x % 32 * N; c < k; c += 32 * N) {
        Vec<T, N> a = *(const Vec<T, N>*)(x + c), b = *(const Vec<T, N>*)(w + c);
#pragma unroll
        for (int e = 0; e < N; e++) s += to_f32(a.v[e]) * to_f32(b.v[e]);
    }
    return warp_sum(s);
}
KERNEL(one_column)(const T* x, const T* w, const T* bias, T* y, i64 rows, i64 m, i64 k) {
    constexpr int N = 16 / sizeof(T);
    i64 r = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, group = r / m;
    if (r >= rows) return;
    x += r * k, w += group * k;
    float s = k % N == 0 && aligned(x, w) ? dot_of<N>(x, w, k) : dot_of<1>(x, w, k);
    if (threadIdx.x % 32 == 0) y[r] = from_f32<T>(s + (bias ? to_f32(bias[group]) : 0.f));
}
