// Common to every kernel file: types, conversions, reductions. No header is included, so that NVRTC needs no toolkit.
// C_T is the element type that a file is compiled for.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// KERNEL(name, bounds)(parameters) { .. }: a file has many of them and a program one, the one that -DC_ONLY_name=WANTED names, since somebody
// waits for its compilation. The others are templates that nobody uses, which costs no more than reading them. C_ALL makes all.
#define WANTED ~, extern "C"
#define SECOND(first, second, ...) second
#define SECOND_OF(...) SECOND(__VA_ARGS__)
#ifdef C_ALL
#define LINKAGE(asked) extern "C"
#else
#define LINKAGE(asked) SECOND_OF(asked, template <int = 0>, ~)
#endif
#define KERNEL(name, ...) LINKAGE(C_ONLY_##name) __global__ void __VA_ARGS__ name

struct bf16 { u16 bits; };
typedef C_T T;

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_f32(int x) { return (float)x; }

template <class U> __device__ __forceinline__ U from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ int from_f32<int>(float x) { return (int)x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// N elements moved as one access.
template <class U, int N> struct alignas(sizeof(U) * N) Vec { U v[N]; };

// Stores N elements as one access, where the compiler would take it apart.
template <class U, int N> __device__ __forceinline__ void store(U* to, const Vec<U, N>& v) {
    if constexpr (sizeof(v) == 16) {
        const uint4& words = *(const uint4*)&v;
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
    } else {
        *(Vec<U, N>*)to = v;
    }
}

// Sum over LANES neighbouring lanes; each gets it.
template <int LANES = 32> __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int m = LANES / 2; m; m >>= 1) x += __shfl_xor_sync(~0u, x, m);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int m = 16; m; m >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, m));
    return x;
}

// Sum over a block of at most 1024 threads; every thread gets it. `scratch` holds 32 floats. Same order in every run.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.f);
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : __int_as_float(0xff800000));
}

#define EACH(i, n) for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

// Element-wise work: f(Count<k>, i) for elements i .. i + k of n, N at a time where `wide` (all addresses are multiples of N elements), the
// rest one by one.
template <int K> struct Count { static constexpr int k = K; };
template <int N, class F> __device__ __forceinline__ void each_wide(i64 n, bool wide, F f) {
    i64 vectors = wide ? n / N : 0;
    EACH(i, vectors) f(Count<N>(), i * N);
    EACH(i, n - vectors * N) f(Count<1>(), vectors * N + i);
}
template <class... P> __device__ __forceinline__ bool aligned(P... pointers) { return (((u64)pointers | ...) & 15) == 0; }

// Sums over the middle axis of [outer, middle, inner], in f32 and in a fixed order.
//
// gridDim.y pieces of the summed axis leave partial sums [outer, pieces, inner]; the last block to finish, known by a counter that it sets
// back to zero, adds them in order. One piece gives the result at once, and needs neither.

// Whether this block is the last of `pieces` to come here; all its threads get the answer, through the shared `last`, and see what the others wrote.
__device__ __forceinline__ bool is_last(int* counter, int pieces, bool& last) {
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

// Where a sum goes: rows `split` and on of [outer, inner] lie in another buffer. y is added to where `accumulate` says so.
struct Sums {
    float *y, *second;
    i64 split;
    bool accumulate;
    __device__ __forceinline__ float* row(i64 o, i64 inner) const { return o < split ? y + o * inner : second + (o - split) * inner; }
};

// y[o, i] = (y[o, i] +) the sum over m of what `add(load(at), at, s)` adds to s for columns i .. i + N at (o, m, i).
// Block (o, 32 N columns; piece) of 256 threads: 8 rows at a time. A thread asks for AHEAD of its rows before it uses the first.
template <int N, int AHEAD, class L, class F>
__device__ __forceinline__ void sum_columns(Sums sums, i64 middle, i64 inner, float* partial, int* counters, L load, F add) {
    __shared__ float part[8][32 * N];
    __shared__ bool last;
    i64 tiles = (inner + 32 * N - 1) / (32 * N), o = blockIdx.x / tiles, piece = blockIdx.y, pieces = gridDim.y;
    i64 length = (middle + pieces - 1) / pieces, from = piece * length, to = min(from + length, middle);
    int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    i64 at = (blockIdx.x % tiles * 32 + lane) * N;
    float s[N] = {};
    if (at < inner)
        for (i64 m = from + row; m < to; m += 8 * AHEAD) {
            decltype(load(0)) held[AHEAD];
            i64 first = (o * middle + m) * inner + at;
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (m + 8 * a < to) held[a] = load(first + 8 * a * inner);
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (m + 8 * a < to) add(held[a], first + 8 * a * inner, s);
        }
    eight_rows<N>(s, part);
    if (pieces > 1) {
        if (row == 0 && at < inner)
#pragma unroll
            for (int e = 0; e < N; e++) partial[(o * pieces + piece) * inner + at + e] = s[e];
        if (!is_last(counters + blockIdx.x, (int)pieces, last)) return;
#pragma unroll
        for (int e = 0; e < N; e++) s[e] = 0;
        // Past the first cache, which does not see what other blocks wrote.
        if (at < inner)
#pragma unroll 4
            for (i64 p = row; p < pieces; p += 8) {
                const float* from = partial + (o * pieces + p) * inner + at;
                if constexpr (N % 4 == 0) {
#pragma unroll
                    for (int e = 0; e < N; e += 4) {
                        float4 v = __ldcg((const float4*)(from + e));
                        s[e] += v.x, s[e + 1] += v.y, s[e + 2] += v.z, s[e + 3] += v.w;
                    }
                } else {
#pragma unroll
                    for (int e = 0; e < N; e++) s[e] += __ldcg(from + e);
                }
            }
        eight_rows<N>(s, part);
    }
    if (row == 0 && at < inner)
#pragma unroll
        for (int e = 0; e < N; e++) {
            float* out = sums.row(o, inner) + at + e;
            *out = sums.accumulate ? *out + s[e] : s[e];
        }
}

__device__ __forceinline__ float sigmoid_of(float x) { return 1.f / (1.f + __expf(-x)); }

// GELU in its tanh form: x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_of(float x) {
    float u = 0.7978845608f * x * (1.f + 0.044715f * x * x);
    return x * sigmoid_of(2.f * u);
}
__device__ __forceinline__ float gelu_slope(float x) {
    float u = 0.7978845608f * x * (1.f + 0.044715f * x * x), du = 0.7978845608f * (1.f + 0.134145f * x * x), s = sigmoid_of(2.f * u);
    return s + 2.f * x * s * (1.f - s) * du;
}

// DPFP: phi(x) is made of r = relu([x, -x]), 2 dm wide: feature (j - 1) 2 dm + c is r[c] r[c - j], cyclic.
// Element i of relu([x, -x]).
__device__ __forceinline__ float rectified(const T* x, int i, int dm) {
    return i < dm ? fmaxf(to_f32(x[i]), 0.f) : fmaxf(-to_f32(x[i - dm]), 0.f);
}
__device__ __forceinline__ int back(int c, int j, int width) { return c >= j ? c - j : c - j + width; }
__device__ __forceinline__ int ahead(int c, int j, int width) { return c + j < width ? c + j : c + j - width; }

// dx of element c from r and dphi of its row: dr[i] = sum_j dphi_j[i] r[i - j] + dphi_j[i + j] r[i + j], where i is the half that x is in.
template <class R, class D>
__device__ __forceinline__ float dpfp_slope(float x, int c, int dm, int nu, R r, D dphi) {
    if (x == 0.f) return 0.f;
    int width = 2 * dm, i = x > 0.f ? c : c + dm;
    float s = 0;
    for (int j = 1; j <= nu; j++) {
        int up = ahead(i, j, width);
        s += dphi((j - 1) * width + i) * r(back(i, j, width)) + dphi((j - 1) * width + up) * r(up);
    }
    return x > 0.f ? s : -s;
}
