// Activations and their derivatives, element by element.
__device__ __forceinline__ float sigmoid_slope(float x) { float s = sigmoid_of(x); return s * (1.f - s); }
__device__ __forceinline__ float silu_slope(float x) { float s = sigmoid_of(x); return s * (1.f + x * (1.f - s)); }
__device__ __forceinline__ float gelu_erf_of(float x) { return 0.5f * x * (1.f + erff(x * 0.7071067812f)); }
__device__ __forceinline__ float gelu_erf_slope(float x) {
    return 0.5f * (1.f + erff(x * 0.7071067812f)) + x * 0.3989422804f * __expf(-0.5f * x * x);
}

constexpr int WIDE = 16 / sizeof(T);
#define UNARY(name, value, slope)                                                                                   \
    KERNEL(name)(const T* x, T* y, i64 n) {                                                                         \
        each_wide<WIDE>(n, aligned(x, y), [&](auto count, i64 i) {                                                  \
            Vec<T, count.k> own = *(const Vec<T, count.k>*)(x + i), out;                                            \
            for (int e = 0; e < count.k; e++) { float v = to_f32(own.v[e]); out.v[e] = from_f32<T>(value); }        \
            *(Vec<T, count.k>*)(y + i) = out;                                                                       \
        });                                                                                                         \
    }                                                                                                               \
    KERNEL(name##_backward)(const T* x, const T* dy, T* dx, i64 n) {                                                \
        each_wide<WIDE>(n, aligned(x, dy, dx), [&](auto count, i64 i) {                                             \
            Vec<T, count.k> own = *(const Vec<T, count.k>*)(x + i), up = *(const Vec<T, count.k>*)(dy + i), out;    \
            for (int e = 0; e < count.k; e++) {                                                                     \
                float v = to_f32(own.v[e]);                                                                         \
                out.v[e] = from_f32<T>(to_f32(up.v[e]) * (slope));                                                  \
            }                                                                                                       \
            *(Vec<T, count.k>*)(dx + i) = out;                                                                      \
        });                                                                                                         \
    }
UNARY(relu, fmaxf(v, 0.f), (v > 0.f ? 1.f : 0.f))
UNARY(sigmoid, sigmoid_of(v), sigmoid_slope(v))
UNARY(silu, v * sigmoid_of(v), silu_slope(v))
UNARY(gelu, gelu_of(v), gelu_slope(v))
UNARY(gelu_erf, gelu_erf_of(v), gelu_erf_slope(v))

// GELU's derivative and, as the sum over rows [outer, middle, inner] of what it gives, the gradient of the bias before it: du is on its way
// to memory anyway.
template <int N>
__device__ __forceinline__ void gelu_bias(const T* u, const T* dy, T* du, float* dbias, i64 middle, i64 inner, bool accumulate,
                                          float* partial, int* counters) {
    struct Held { Vec<T, N> u, dy; };
    auto load = [&](i64 i) { return Held{*(const Vec<T, N>*)(u + i), *(const Vec<T, N>*)(dy + i)}; };
    sum_columns<N, 2>(Sums{dbias, nullptr, gridDim.x, accumulate}, middle, inner, partial, counters, load, [&](Held held, i64 i, float (&s)[N]) {
        Vec<T, N> out;
#pragma unroll
        for (int e = 0; e < N; e++) {
            float slope = to_f32(held.dy.v[e]) * gelu_slope(to_f32(held.u.v[e]));
            out.v[e] = from_f32<T>(slope);
            s[e] += slope;
        }
        store(du + i, out);
    });
}
KERNEL(gelu_bias_backward, __launch_bounds__(256, 4))(const T* u, const T* dy, T* du, float* dbias, i64 middle, i64 inner,
                                                bool accumulate, float* partial, int* counters) {
    gelu_bias<1>(u, dy, du, dbias, middle, inner, accumulate, partial, counters);
}
// inner is a multiple of WIDE and all of them lie at multiples of 16 bytes.
KERNEL(gelu_bias_backward_wide, __launch_bounds__(256, 4))(const T* u, const T* dy, T* du, float* dbias, i64 middle,
                                                     i64 inner, bool accumulate, float* partial, int* counters) {
    gelu_bias<WIDE>(u, dy, du, dbias, middle, inner, accumulate, partial, counters);
}

// rows [gate, up] of 2 f -> silu(gate) up, rows of f
KERNEL(swiglu)(const T* x, T* y, i64 n, i64 f) {
    EACH(i, n) {
        i64 at = i / f * 2 * f + i % f;
        float g = to_f32(x[at]), u = to_f32(x[at + f]);
        y[i] = from_f32<T>(g * sigmoid_of(g) * u);
    }
}
KERNEL(swiglu_backward)(const T* x, const T* dy, T* dx, i64 n, i64 f) {
    EACH(i, n) {
        i64 at = i / f * 2 * f + i % f;
        float g = to_f32(x[at]), u = to_f32(x[at + f]), d = to_f32(dy[i]);
        dx[at] = from_f32<T>(d * u * silu_slope(g));
        dx[at + f] = from_f32<T>(d * g * sigmoid_of(g));
    }
}
