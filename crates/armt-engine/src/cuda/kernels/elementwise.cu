// y = a (+ - *) b with b spread over a, and y = c a.
// a is [outer, middle, inner]; b has strides along each, 0 where it repeats.
constexpr int WIDE = 16 / sizeof(T);

// The place in b of element i of a. Divisions of 64 bits take several times as long as those of 32.
__device__ __forceinline__ i64 spread(i64 i, i64 n, i64 middle, i64 inner, i64 so, i64 sm, i64 si) {
    if (n <= 0xffffffffll) {
        u32 row = (u32)i / (u32)inner;
        return row / (u32)middle * so + row % (u32)middle * sm + (u32)i % (u32)inner * si;
    }
    i64 row = i / inner;
    return row / middle * so + row % middle * sm + i % inner * si;
}

#define BINARY(name, op)                                                                                                    \
    KERNEL(name)(const T* a, const T* b, T* y, i64 n, i64 middle, i64 inner, i64 so, i64 sm, i64 si) {                      \
        if (so == 0 && sm == 0 && si == 1 && middle == 1 && inner == n) {                                                   \
            each_wide<WIDE>(n, aligned(a, b, y), [&](auto count, i64 i) {                                                   \
                Vec<T, count.k> x = *(const Vec<T, count.k>*)(a + i), z = *(const Vec<T, count.k>*)(b + i), out;            \
                for (int e = 0; e < count.k; e++) out.v[e] = from_f32<T>(to_f32(x.v[e]) op to_f32(z.v[e]));                 \
                *(Vec<T, count.k>*)(y + i) = out;                                                                           \
            });                                                                                                             \
        } else {                                                                                                            \
            /* Neighbours of a have neighbours of b where its rows are whole, of which none begins within sixteen bytes. */ \
            bool wide = si == 1 && (inner | so | sm) % WIDE == 0 && aligned(a, b, y);                                       \
            each_wide<WIDE>(n, wide, [&](auto count, i64 i) {                                                               \
                i64 at = spread(i, n, middle, inner, so, sm, si);                                                           \
                Vec<T, count.k> x = *(const Vec<T, count.k>*)(a + i), z = *(const Vec<T, count.k>*)(b + at), out;           \
                for (int e = 0; e < count.k; e++) out.v[e] = from_f32<T>(to_f32(x.v[e]) op to_f32(z.v[e]));                 \
                *(Vec<T, count.k>*)(y + i) = out;                                                                           \
            });                                                                                                             \
        }                                                                                                                   \
    }
BINARY(add, +)
BINARY(sub, -)
BINARY(mul, *)

KERNEL(scale)(const T* a, T* y, i64 n, float c) {
    each_wide<WIDE>(n, aligned(a, y), [&](auto count, i64 i) {
        Vec<T, count.k> x = *(const Vec<T, count.k>*)(a + i), out;
        for (int e = 0; e < count.k; e++) out.v[e] = from_f32<T>(c * to_f32(x.v[e]));
        *(Vec<T, count.k>*)(y + i) = out;
    });
}

// y = gelu?(u + bias), rows of n in groups of m rows; `before` gets u + bias where it is asked for. u may be y or before.
KERNEL(bias_activation)(const T* u, const T* bias, T* before, T* y, i64 count, i64 m, i64 n, bool use_gelu) {
    EACH(i, count) {
        float v = to_f32(u[i]);
        if (bias) v += to_f32(bias[i / (m * n) * n + i % n]);
        if (before) before[i] = from_f32<T>(v);
        y[i] = from_f32<T>(use_gelu ? gelu_of(v) : v);
    }
}
