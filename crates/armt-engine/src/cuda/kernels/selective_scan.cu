// The selective scan. A sequence is cut into chunks of tokens: their ends are computed from zero side by side, joined one after the other, and
// every chunk is run again from where it begins. On the way back the same is done with the gradient of the state.
//
// C_LANES neighbouring threads have a channel, C_PART numbers of its state each: C_LANES * C_PART >= n, and what is too much stays zero. Block
// (128 / C_LANES channels, chunk, sequence). u, delta and y are [sequences, tokens, width], B and C [sequences, tokens, n].
#define PADDED (C_LANES * C_PART)
#define CHANNELS (128 / C_LANES)
// Tokens whose states are in registers on the way back; chunks are multiples of it.
#define SUB 8

struct Sizes {
    int texts, tokens, width, n, chunk;
};

__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// A thread's place: its channel and part of the state, its chunk and sequence.
struct Place {
    int sub, e, from, to;
    i64 s, chunk, group;
    const int* seen;
    bool active;
    __device__ __forceinline__ Place(Sizes z, const int* mask) {
        sub = threadIdx.x % C_LANES;
        int channel = blockIdx.x * CHANNELS + threadIdx.x / C_LANES;
        active = channel < z.width;
        e = min(channel, z.width - 1);
        s = blockIdx.z;
        group = s / z.texts;
        chunk = s * gridDim.y + blockIdx.y;
        from = blockIdx.y * z.chunk;
        to = min(from + z.chunk, z.tokens);
        seen = mask ? mask + s * z.tokens : nullptr;
    }
    __device__ __forceinline__ bool sees(int t) const { return t < to && (!seen || seen[t]); }
    // The first of its numbers in [.., width, n] at `which`.
    __device__ __forceinline__ i64 at(i64 which, Sizes z) const { return (which * z.width + e) * z.n + sub * C_PART; }
    __device__ __forceinline__ bool has(int j, Sizes z) const { return sub * C_PART + j < z.n; }
};

// SUB tokens of B or C from token t on, as f32, zero behind n.
__device__ __forceinline__ void load_tile(float (&tile)[SUB][PADDED], const T* from, i64 s, int t, Sizes z) {
    for (int i = threadIdx.x; i < SUB * PADDED; i += 128) {
        int row = i / PADDED, j = i % PADDED;
        tile[row][j] = t + row < z.tokens && j < z.n ? to_f32(from[(s * z.tokens + t + row) * z.n + j]) : 0.f;
    }
}

__device__ __forceinline__ void load_state(float (&s)[C_PART], const float* from, i64 at, const Place& p, Sizes z) {
#pragma unroll
    for (int j = 0; j < C_PART; j++) s[j] = from && p.active && p.has(j, z) ? from[at + j] : 0.f;
}
__device__ __forceinline__ void store_state(const float (&s)[C_PART], float* to, i64 at, const Place& p, Sizes z) {
#pragma unroll
    for (int j = 0; j < C_PART; j++)
        if (p.active && p.has(j, z)) to[at + j] = s[j];
}
__device__ __forceinline__ void load_a(float (&a)[C_PART], const float* a_log, const Place& p, Sizes z) {
#pragma unroll
    for (int j = 0; j < C_PART; j++) a[j] = p.has(j, z) ? -expf(a_log[p.at(p.group, z) + j]) : 0.f;
}

// y and the last state from where each chunk begins; or, without y, from zero each chunk's end and the sum of its step sizes.
template <bool LOCAL>
__device__ __forceinline__ void run(const T* u, const T* delta, const float* bias, const float* a_log, const T* b, const T* c, const float* d,
                                    const int* seen, const float* starts, T* y, float* last, float* sums, Sizes z) {
    __shared__ float tile_b[SUB][PADDED], tile_c[SUB][PADDED];
    Place p(z, seen);
    float a[C_PART], s[C_PART], total = 0;
    load_a(a, a_log, p, z);
    load_state(s, LOCAL ? nullptr : starts, p.at(p.chunk, z), p, z);
    float shift = bias[p.group * z.width + p.e], skip = LOCAL ? 0.f : d[p.group * z.width + p.e];
    for (int first = p.from; first < p.to; first += SUB) {
        __syncthreads();
        load_tile(tile_b, b, p.s, first, z);
        if (!LOCAL) load_tile(tile_c, c, p.s, first, z);
        __syncthreads();
        for (int i = 0; i < min(SUB, p.to - first); i++) {
            i64 at = (p.s * z.tokens + first + i) * z.width + p.e;
            float sum = 0;
            if (p.sees(first + i)) {
                float step = softplus(to_f32(delta[at]) + shift), own = to_f32(u[at]);
                total += step;
#pragma unroll
                for (int j = 0; j < C_PART; j++) {
                    s[j] = __expf(step * a[j]) * s[j] + step * own * tile_b[i][p.sub * C_PART + j];
                    if (!LOCAL) sum += s[j] * tile_c[i][p.sub * C_PART + j];
                }
                if (!LOCAL) sum = warp_sum<C_LANES>(sum) + skip * own;
            }
            if (!LOCAL && p.active && p.sub == 0) y[at] = from_f32<T>(sum);
        }
    }
    if (LOCAL) {
        store_state(s, last, p.at(p.chunk, z), p, z);
        if (p.active && p.sub == 0) sums[p.chunk * z.width + p.e] = total;
    } else if (blockIdx.y == gridDim.y - 1) {
        store_state(s, last, p.at(p.s, z), p, z);
    }
}

KERNEL(scan, __launch_bounds__(128, 3))(const T* u, const T* delta, const float* bias, const float* a_log, const T* b, const T* c,
                                      const float* d, const int* seen, const float* starts, T* y, float* last, int texts,
                                      int tokens, int width, int n, int chunk) {
    run<false>(u, delta, bias, a_log, b, c, d, seen, starts, y, last, nullptr, {texts, tokens, width, n, chunk});
}
KERNEL(scan_local, __launch_bounds__(128, 3))(const T* u, const T* delta, const float* bias, const float* a_log, const T* b,
                                            const int* seen, float* ends, float* sums, int texts, int tokens, int width, int n,
                                            int chunk) {
    run<true>(u, delta, bias, a_log, b, nullptr, nullptr, seen, nullptr, nullptr, ends, sums, {texts, tokens, width, n, chunk});
}

// Turns the ends of chunks, each from zero, into where they begin, from `state` on; backwards from the last chunk where `reverse`.
// count = sequences * width * n.
KERNEL(scan_join)(const float* a_log, const float* sums, const float* state, float* ends, i64 count, int texts, int width, int n,
                  int chunks, bool reverse) {
    EACH(i, count) {
        i64 each = (i64)width * n, s = i / each, rest = i % each, e = rest / n;
        float a = -expf(a_log[s / texts * each + rest]), value = state[i];
        for (int k = 0; k < chunks; k++) {
            i64 chunk = s * chunks + (reverse ? chunks - 1 - k : k);
            float end = ends[chunk * each + rest];
            ends[chunk * each + rest] = value;
            value = __expf(a * sums[chunk * width + e]) * value + end;
        }
    }
}

// The gradient of the state before each chunk where none comes from behind it.
KERNEL(scan_back_local, __launch_bounds__(128, 3))(const T* delta, const float* bias, const float* a_log, const T* c, const int* seen,
                                                 const T* dy, float* ends, int texts, int tokens, int width, int n, int chunk) {
    __shared__ float tile_c[SUB][PADDED];
    Sizes z = {texts, tokens, width, n, chunk};
    Place p(z, seen);
    float a[C_PART], g[C_PART] = {};
    load_a(a, a_log, p, z);
    float shift = bias[p.group * width + p.e];
    for (int first = p.from + (p.to - p.from - 1) / SUB * SUB; first >= p.from; first -= SUB) {
        __syncthreads();
        load_tile(tile_c, c, p.s, first, z);
        __syncthreads();
        for (int i = min(SUB, p.to - first) - 1; i >= 0; i--) {
            if (!p.sees(first + i)) continue;
            i64 at = (p.s * tokens + first + i) * width + p.e;
            float step = softplus(to_f32(delta[at]) + shift), dout = to_f32(dy[at]);
#pragma unroll
            for (int j = 0; j < C_PART; j++) g[j] = __expf(step * a[j]) * (g[j] + dout * tile_c[i][p.sub * C_PART + j]);
        }
    }
    store_state(g, ends, p.at(p.chunk, z), p, z);
}

// All gradients, from the states where chunks begin and the gradients of the states where they end. `marks` has room for the state before every
// SUB tokens. dB and dC are sums over a block's channels, [sequences, tokens, blocks, n]; those of parameters over a chunk, [chunks of all, ..].
KERNEL(scan_back, __launch_bounds__(128, 3))
    (const T* u, const T* delta, const float* bias, const float* a_log, const T* b, const T* c, const float* d, const int* seen,
     const float* starts, const float* grads, const T* dy, float* marks, T* du, T* ddelta, float* dbias, float* da, float* db, float* dc,
     float* dd, float* dstate, int texts, int tokens, int width, int n, int chunk) {
    __shared__ float tile_b[SUB][PADDED], tile_c[SUB][PADDED], red_b[SUB][4][PADDED], red_c[SUB][4][PADDED];
    Sizes z = {texts, tokens, width, n, chunk};
    Place p(z, seen);
    int marked = (tokens + SUB - 1) / SUB, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float a[C_PART], s[C_PART], g[C_PART], sum_a[C_PART] = {}, sum_bias = 0, sum_d = 0;
    load_a(a, a_log, p, z);
    load_state(s, starts, p.at(p.chunk, z), p, z);
    load_state(g, grads, p.at(p.chunk, z), p, z);
    float shift = bias[p.group * width + p.e], skip = d[p.group * width + p.e];
    for (int first = p.from; first < p.to; first += SUB) {
        store_state(s, marks, p.at(p.s * marked + first / SUB, z), p, z);
        __syncthreads();
        load_tile(tile_b, b, p.s, first, z);
        __syncthreads();
        for (int i = 0; i < SUB; i++) {
            if (!p.sees(first + i)) continue;
            i64 at = (p.s * tokens + first + i) * width + p.e;
            float step = softplus(to_f32(delta[at]) + shift), own = to_f32(u[at]);
#pragma unroll
            for (int j = 0; j < C_PART; j++) s[j] = __expf(step * a[j]) * s[j] + step * own * tile_b[i][p.sub * C_PART + j];
        }
    }
    for (int first = p.from + (p.to - p.from - 1) / SUB * SUB; first >= p.from; first -= SUB) {
        __syncthreads();
        load_tile(tile_b, b, p.s, first, z);
        load_tile(tile_c, c, p.s, first, z);
        __syncthreads();
        // The state before the first of these tokens, and after each.
        float held[SUB + 1][C_PART];
        load_state(held[0], marks, p.at(p.s * marked + first / SUB, z), p, z);
#pragma unroll
        for (int i = 0; i < SUB; i++) {
            bool sees = p.sees(first + i);
            i64 at = (p.s * tokens + first + i) * width + p.e;
            float step = sees ? softplus(to_f32(delta[at]) + shift) : 0.f, own = sees ? to_f32(u[at]) : 0.f;
#pragma unroll
            for (int j = 0; j < C_PART; j++)
                held[i + 1][j] = __expf(step * a[j]) * held[i][j] + step * own * tile_b[i][p.sub * C_PART + j];
        }
#pragma unroll
        for (int i = SUB - 1; i >= 0; i--) {
            bool sees = p.sees(first + i);
            i64 at = (p.s * tokens + first + i) * width + p.e;
            float raw = sees ? to_f32(delta[at]) + shift : 0.f, step = sees ? softplus(raw) : 0.f;
            float own = sees ? to_f32(u[at]) : 0.f, dout = sees && p.active ? to_f32(dy[at]) : 0.f;
            float by_state = 0, by_b = 0;
#pragma unroll
            for (int j = 0; j < C_PART; j++) {
                float decay = __expf(step * a[j]);
                g[j] += dout * tile_c[i][p.sub * C_PART + j];
                float to_c = dout * held[i + 1][j], to_b = p.active ? g[j] * step * own : 0.f, way = g[j] * held[i][j] * decay;
                by_state += way * a[j];
                sum_a[j] += sees ? way * step : 0.f;
                by_b += g[j] * tile_b[i][p.sub * C_PART + j];
                g[j] *= decay;
#pragma unroll
                for (int m = 16; m >= C_LANES; m >>= 1) {
                    to_c += __shfl_xor_sync(~0u, to_c, m);
                    to_b += __shfl_xor_sync(~0u, to_b, m);
                }
                if (lane < C_LANES) {
                    red_b[i][warp][p.sub * C_PART + j] = to_b;
                    red_c[i][warp][p.sub * C_PART + j] = to_c;
                }
            }
            by_state = warp_sum<C_LANES>(by_state);
            by_b = warp_sum<C_LANES>(by_b);
            float to_delta = sees ? (by_state + by_b * own) / (1.f + __expf(-raw)) : 0.f;
            sum_bias += to_delta;
            sum_d += dout * own;
            if (p.active && p.sub == 0 && first + i < p.to) {
                ddelta[at] = from_f32<T>(to_delta);
                du[at] = from_f32<T>(dout * skip + step * by_b);
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < SUB * PADDED; i += 128) {
            int row = i / PADDED, j = i % PADDED;
            if (j >= n || first + row >= p.to) continue;
            i64 to = ((p.s * tokens + first + row) * gridDim.x + blockIdx.x) * n + j;
            db[to] = red_b[row][0][j] + red_b[row][1][j] + red_b[row][2][j] + red_b[row][3][j];
            dc[to] = red_c[row][0][j] + red_c[row][1][j] + red_c[row][2][j] + red_c[row][3][j];
        }
    }
#pragma unroll
    for (int j = 0; j < C_PART; j++) sum_a[j] *= a[j];
    store_state(sum_a, da, p.at(p.chunk, z), p, z);
    if (p.active && p.sub == 0) {
        dbias[p.chunk * width + p.e] = sum_bias;
        dd[p.chunk * width + p.e] = sum_d;
    }
    if (blockIdx.y == 0) store_state(g, dstate, p.at(p.s, z), p, z);
}
