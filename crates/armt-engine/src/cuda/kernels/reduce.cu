// Sums over the middle axis of [outer, middle, inner], in f32 and in a fixed order. How pieces of that axis are added: see the prelude.

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

template <int N>
__device__ __forceinline__ void sum_elements(const T* x, Sums sums, i64 middle, i64 inner, float* partial, int* counters) {
    auto load = [&](i64 i) { return *(const Vec<T, N>*)(x + i); };
    sum_columns<N, 4>(sums, middle, inner, partial, counters, load, [&](Vec<T, N> own, i64, float (&s)[N]) {
#pragma unroll
        for (int e = 0; e < N; e++) s[e] += to_f32(own.v[e]);
    });
}
extern "C" __global__ void __launch_bounds__(256) sum_middle(const T* x, float* y, i64 middle, bool accumulate, float* partial, int* counters,
                                                           i64 inner, float* second, i64 split) {
    sum_elements<1>(x, Sums{y, second, split, accumulate}, middle, inner, partial, counters);
}
// inner is a multiple of 4 and x lies at one of 16 bytes.
extern "C" __global__ void __launch_bounds__(256) sum_middle_wide(const T* x, float* y, i64 middle, bool accumulate, float* partial,
                                                                int* counters, i64 inner, float* second, i64 split) {
    sum_elements<4>(x, Sums{y, second, split, accumulate}, middle, inner, partial, counters);
}

// dx[o, m, i] = dy[o, i]
extern "C" __global__ void spread(const float* dy, T* dx, i64 n, i64 middle, i64 inner) {
    EACH(j, n) dx[j] = from_f32<T>(dy[j / (middle * inner) * inner + j % inner]);
}
