// The selective scan with the gate that follows it, y o silu(z), for states of N = 16 numbers a channel: tokens in order, nothing twice. Four
// neighbouring threads have a channel, four numbers of its state each. What does not depend on the state (softplus, the gate, D u) is done for
// a tile of TOKENS tokens at a time, four channels a thread with one access an operand, while the next tile is on its way.
//
// Block (CHANNELS channels, sequence). u, delta and y are [sequences, tokens, width]. B and C are the last 2 N columns of `shared`, z the last
// `width` of `gate`. `marks`, [sequences, tiles, width, N], has the state before every tile for the way back.
#define N 16
#define LANES 4
#define PART 4
#define CHANNELS 32
#define TOKENS 16

typedef Vec<T, 4> Four;
typedef Vec<float, 4> Floats;

struct Sizes {
    int texts, tokens, width, columns, gated;
};

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// max(x, 0) + log1p(exp(-|x|)), the logarithm as a polynomial within 3e-7 of it.
__device__ __forceinline__ float softplus(float x) {
    float t = exp2_of(-1.442695041f * fabsf(x));
    float p = -0.00837115291506052f;
    p = p * t + 0.04349390044808388f;
    p = p * t - 0.1068500280380249f;
    p = p * t + 0.1768747717142105f;
    p = p * t - 0.24474774301052094f;
    p = p * t + 0.3327192962169647f;
    p = p * t - 0.49997174739837646f;
    p = p * t + 0.9999997615814209f;
    return fmaxf(x, 0.f) + t * p;
}

// A thread's two places: four channels of one token of a tile, and a channel with part of its state.
struct Place {
    int row, first, column, channel, lane, e, tiles;
    i64 s, group;
    bool inside, active;
    const int* seen;
    __device__ __forceinline__ Place(const int* mask, Sizes z) {
        s = blockIdx.y;
        group = s / z.texts;
        row = threadIdx.x / 8;
        first = threadIdx.x % 8 * 4;
        column = blockIdx.x * CHANNELS + first;
        inside = column < z.width;
        channel = threadIdx.x / LANES;
        lane = threadIdx.x % LANES;
        active = blockIdx.x * CHANNELS + channel < z.width;
        e = min(blockIdx.x * CHANNELS + channel, z.width - 1);
        tiles = (z.tokens + TOKENS - 1) / TOKENS;
        seen = mask ? mask + s * z.tokens : nullptr;
    }
    // Where this thread's numbers of a state lie in [.., width, N] at `which`.
    __device__ __forceinline__ i64 state(i64 which, Sizes z) const { return (which * z.width + e) * N + lane * PART; }
    __device__ __forceinline__ bool has(int t, Sizes z) const { return inside && t < z.tokens; }
    __device__ __forceinline__ bool sees(int t) const { return !seen || seen[t]; }
    __device__ __forceinline__ i64 at(int t, Sizes z) const { return (s * z.tokens + t) * z.width + column; }
    __device__ __forceinline__ i64 gate(int t, Sizes z) const { return (s * z.tokens + t) * z.gated + z.gated - z.width + column; }
};

__device__ __forceinline__ Four load(const T* from, i64 at, bool there) {
    Four v = {};
    if (there) v = *(const Four*)(from + at);
    return v;
}
__device__ __forceinline__ Floats load_state(const float* from, i64 at) { return *(const Floats*)(from + at); }

// Four of the 2 N columns of B and C of a token of the tile, the same place in every tile.
__device__ __forceinline__ Four load_shared(const T* shared, int tile, const Place& p, Sizes z) {
    int t = tile * TOKENS + p.row;
    return load(shared, (p.s * z.tokens + t) * z.columns + z.columns - 2 * N + p.first, t < z.tokens);
}

// What a tile's tokens are, as a thread asks for them ahead of time.
struct Tile {
    Four u, delta, gate, bc;
    bool sees;
    __device__ __forceinline__ Tile(const T* us, const T* deltas, const T* gates, const T* shared, int tile, const Place& p, Sizes z) {
        int t = tile * TOKENS + p.row;
        bool there = p.has(t, z);
        u = load(us, p.at(t, z), there);
        delta = load(deltas, p.at(t, z), there);
        gate = load(gates, p.gate(t, z), there);
        bc = load_shared(shared, tile, p, z);
        sees = there && p.sees(t);
    }
};

__device__ __forceinline__ void put(float (&to)[4], const Four& from) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = to_f32(from.v[i]);
}
__device__ __forceinline__ void keep(float* to, const float (&from)[4]) { *(float4*)to = make_float4(from[0], from[1], from[2], from[3]); }
__device__ __forceinline__ void fetch(float (&to)[4], const float* from) {
    float4 v = *(const float4*)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Parameters of a thread's four channels.
struct Channels {
    float shift[4], skip[4];
    __device__ __forceinline__ Channels(const float* bias, const float* d, const Place& p, Sizes z) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            shift[i] = p.inside ? bias[p.group * z.width + p.column + i] : 0.f;
            skip[i] = p.inside ? d[p.group * z.width + p.column + i] : 0.f;
        }
    }
};

KERNEL(gated_scan, __launch_bounds__(128, 6))
    (const T* u, const T* delta, const float* bias, const float* a_log, const float* d, const T* shared, const T* gate, const int* seen,
     const float* state, T* y, float* last, float* marks, int texts, int tokens, int width, int columns, int gated) {
    __shared__ float steps[TOKENS][CHANNELS], gains[TOKENS][CHANNELS], sums[TOKENS][CHANNELS], bc[TOKENS][2 * N];
    Sizes z = {texts, tokens, width, columns, gated};
    Place p(seen, z);
    Channels own(bias, d, p, z);
    float a[PART], s[PART];
    Floats logs = load_state(a_log, p.state(p.group, z)), begin = load_state(state, p.state(p.s, z));
#pragma unroll
    for (int j = 0; j < PART; j++) a[j] = -1.442695041f * expf(logs.v[j]), s[j] = begin.v[j];
    Tile ahead(u, delta, gate, shared, 0, p, z);
    for (int tile = 0; tile < p.tiles; tile++) {
        Tile now = ahead;
        float x[4], step[4], gain[4], both[4];
        put(x, now.u);
        put(step, now.delta);
        put(both, now.bc);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            step[i] = now.sees ? softplus(step[i] + own.shift[i]) : 0.f;
            gain[i] = step[i] * x[i];
        }
        keep(&steps[p.row][p.first], step);
        keep(&gains[p.row][p.first], gain);
        keep(&bc[p.row][p.first], both);
        __syncthreads();
        if (tile + 1 < p.tiles) ahead = Tile(u, delta, gate, shared, tile + 1, p, z);
        if (marks && p.active) *(float4*)(marks + p.state(p.s * p.tiles + tile, z)) = make_float4(s[0], s[1], s[2], s[3]);
#pragma unroll 8
        for (int i = 0; i < TOKENS; i++) {
            float step = steps[i][p.channel], gain = gains[i][p.channel], b[PART], c[PART], sum = 0;
            fetch(b, &bc[i][p.lane * PART]);
            fetch(c, &bc[i][N + p.lane * PART]);
#pragma unroll
            for (int j = 0; j < PART; j++) {
                s[j] = exp2_of(step * a[j]) * s[j] + gain * b[j];
                sum += s[j] * c[j];
            }
            sum = warp_sum<LANES>(sum);
            if (p.lane == 0) sums[i][p.channel] = sum;
        }
        __syncthreads();
        int t = tile * TOKENS + p.row;
        if (p.has(t, z)) {
            float out[4], way[4];
            fetch(out, &sums[p.row][p.first]);
            put(way, now.gate);
            Four to;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float value = now.sees ? (out[i] + own.skip[i] * x[i]) * way[i] * sigmoid_of(way[i]) : 0.f;
                to.v[i] = from_f32<T>(value);
            }
            *(Four*)(y + p.at(t, z)) = to;
        }
    }
    if (p.active) *(float4*)(last + p.state(p.s, z)) = make_float4(s[0], s[1], s[2], s[3]);
}

// Sums of 2 PART values over a warp's eight channels: each lane gets one of them, and its place.
__device__ __forceinline__ float over_channels(float (&v)[2 * PART], int& place) {
    place = 0;
#pragma unroll
    for (int half = PART, mask = 16; half; half /= 2, mask /= 2) {
        bool upper = threadIdx.x & mask;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float sent = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
            v[i] = kept + __shfl_xor_sync(~0u, sent, mask);
        }
        if (upper) place += half;
    }
    return v[0];
}

// All gradients. The states of a tile are made again from its mark; dB and dC are sums over a block's channels, [sequences, tokens, blocks, 2 N],
// those of parameters over a sequence. dz goes into the last `width` columns of dgate, whose other columns stay as they are.
KERNEL(gated_scan_back, __launch_bounds__(128, 3))
    (const T* u, const T* delta, const float* bias, const float* a_log, const float* d, const T* shared, const T* gate, const int* seen,
     const float* marks, const T* dy, const float* dlast, T* du, T* ddelta, T* dgate, float* dbias, float* da, float* dd, float* dshared,
     float* dstate, int texts, int tokens, int width, int columns, int gated) {
    __shared__ float steps[TOKENS][CHANNELS], gains[TOKENS][CHANNELS], wanted[TOKENS][CHANNELS], bc[TOKENS][2 * N];
    __shared__ float sums[TOKENS][CHANNELS], ways[TOKENS][2][CHANNELS], parts[TOKENS][4][2 * N];
    Sizes z = {texts, tokens, width, columns, gated};
    Place p(seen, z);
    Channels own(bias, d, p, z);
    float a[PART], g[PART], sum_a[PART] = {}, sum_bias[4] = {}, sum_d[4] = {};
    Floats logs = load_state(a_log, p.state(p.group, z)), end = load_state(dlast, p.state(p.s, z));
    // Of channels that there are not, nothing may come into the sums over channels: their steps, gains and dy are zero, and so must g be.
#pragma unroll
    for (int j = 0; j < PART; j++) a[j] = -1.442695041f * expf(logs.v[j]), g[j] = p.active ? end.v[j] : 0.f;
    Tile ahead(u, delta, gate, shared, p.tiles - 1, p, z);
    Four ahead_dy = load(dy, p.at((p.tiles - 1) * TOKENS + p.row, z), p.has((p.tiles - 1) * TOKENS + p.row, z));
    for (int tile = p.tiles - 1; tile >= 0; tile--) {
        Tile now = ahead;
        Four now_dy = ahead_dy;
        {
            float x[4], step[4], gain[4], both[4], out[4], way[4];
            put(x, now.u);
            put(step, now.delta);
            put(both, now.bc);
            put(out, now_dy);
            put(way, now.gate);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                step[i] = now.sees ? softplus(step[i] + own.shift[i]) : 0.f;
                gain[i] = step[i] * x[i];
                out[i] = now.sees ? out[i] * way[i] * sigmoid_of(way[i]) : 0.f;
            }
            keep(&steps[p.row][p.first], step);
            keep(&gains[p.row][p.first], gain);
            keep(&bc[p.row][p.first], both);
            keep(&wanted[p.row][p.first], out);
        }
        // The state before the tile's first token, and after each.
        float held[TOKENS + 1][PART];
        Floats mark = load_state(marks, p.state(p.s * p.tiles + tile, z));
#pragma unroll
        for (int j = 0; j < PART; j++) held[0][j] = mark.v[j];
        __syncthreads();
        if (tile > 0) {
            int t = (tile - 1) * TOKENS + p.row;
            ahead = Tile(u, delta, gate, shared, tile - 1, p, z);
            ahead_dy = load(dy, p.at(t, z), p.has(t, z));
        }
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            float step = steps[i][p.channel], gain = gains[i][p.channel], b[PART], c[PART], sum = 0;
            fetch(b, &bc[i][p.lane * PART]);
            fetch(c, &bc[i][N + p.lane * PART]);
#pragma unroll
            for (int j = 0; j < PART; j++) {
                held[i + 1][j] = exp2_of(step * a[j]) * held[i][j] + gain * b[j];
                sum += held[i + 1][j] * c[j];
            }
            sum = warp_sum<LANES>(sum);
            if (p.lane == 0) sums[i][p.channel] = sum;
        }
#pragma unroll
        for (int i = TOKENS - 1; i >= 0; i--) {
            float step = steps[i][p.channel], gain = gains[i][p.channel], out = wanted[i][p.channel], b[PART], c[PART], v[2 * PART];
            fetch(b, &bc[i][p.lane * PART]);
            fetch(c, &bc[i][N + p.lane * PART]);
            float by_state = 0, by_b = 0;
#pragma unroll
            for (int j = 0; j < PART; j++) {
                g[j] += out * c[j];
                v[j] = g[j] * gain;
                v[PART + j] = out * held[i + 1][j];
                by_b += g[j] * b[j];
                g[j] *= exp2_of(step * a[j]);
                float way = g[j] * held[i][j];
                by_state += way * a[j];
                sum_a[j] += way * step;
            }
            int place;
            float sum = over_channels(v, place);
            // v is [B's or C's, number of the part].
            parts[i][threadIdx.x / 32][place / PART * N + p.lane * PART + place % PART] = sum;
            // The sums over the four lanes of both values: of the first in lanes 0 and 1, of the second in 2 and 3.
            bool second = p.lane & 2;
            float one = (second ? by_b : by_state) + __shfl_xor_sync(~0u, second ? by_state : by_b, 2);
            one += __shfl_xor_sync(~0u, one, 1);
            if (p.lane % 2 == 0) ways[i][p.lane / 2][p.channel] = one;
        }
        __syncthreads();
        int t = tile * TOKENS + p.row;
        if (p.has(t, z)) {
            float x[4], step[4], raw[4], out[4], way[4], by_state[4], by_b[4], sum[4];
            put(x, now.u);
            put(raw, now.delta);
            put(out, now_dy);
            put(way, now.gate);
            fetch(step, &steps[p.row][p.first]);
            fetch(by_state, &ways[p.row][0][p.first]);
            fetch(by_b, &ways[p.row][1][p.first]);
            fetch(sum, &sums[p.row][p.first]);
            Four to_u, to_delta, to_gate;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float open = sigmoid_of(way[i]), through = now.sees ? out[i] * way[i] * open : 0.f;
                // `by_state` is in units of a / ln 2.
                float for_step = now.sees ? (0.6931471806f * by_state[i] + by_b[i] * x[i]) * sigmoid_of(raw[i] + own.shift[i]) : 0.f;
                float inner = now.sees ? sum[i] + own.skip[i] * x[i] : 0.f;
                sum_bias[i] += for_step;
                sum_d[i] += through * x[i];
                to_delta.v[i] = from_f32<T>(for_step);
                to_u.v[i] = from_f32<T>(through * own.skip[i] + step[i] * by_b[i]);
                to_gate.v[i] = from_f32<T>(out[i] * inner * open * (1.f + way[i] * (1.f - open)));
            }
            *(Four*)(du + p.at(t, z)) = to_u;
            *(Four*)(ddelta + p.at(t, z)) = to_delta;
            *(Four*)(dgate + p.gate(t, z)) = to_gate;
        }
        if (t < tokens) {
            float all[4] = {};
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float one[4];
                fetch(one, &parts[p.row][w][p.first]);
#pragma unroll
                for (int i = 0; i < 4; i++) all[i] += one[i];
            }
            keep(dshared + ((p.s * tokens + t) * gridDim.x + blockIdx.x) * 2 * N + p.first, all);
        }
        // The next tile's steps go where this one's were read.
        __syncthreads();
    }
    if (p.active) {
        *(float4*)(dstate + p.state(p.s, z)) = make_float4(g[0], g[1], g[2], g[3]);
        float scale = 0.6931471806f;
        *(float4*)(da + p.state(p.s, z)) =
            make_float4(scale * sum_a[0] * a[0], scale * sum_a[1] * a[1], scale * sum_a[2] * a[2], scale * sum_a[3] * a[3]);
    }
    // The rows of a tile each have sums of their own.
    keep(&sums[p.row][p.first], sum_bias);
    keep(&steps[p.row][p.first], sum_d);
    __syncthreads();
    int column = blockIdx.x * CHANNELS + threadIdx.x % CHANNELS;
    if (threadIdx.x < 2 * CHANNELS && column < width) {
        bool of_bias = threadIdx.x < CHANNELS;
        float sum = 0;
        for (int row = 0; row < TOKENS; row++) sum += of_bias ? sums[row][threadIdx.x % CHANNELS] : steps[row][threadIdx.x % CHANNELS];
        (of_bias ? dbias : dd)[p.s * width + column] = sum;
    }
}

// Sums over blocks of channels into the last 2 N columns of [rows, columns], whose other columns get nothing; a warp has a row.
KERNEL(gated_scan_give)(const float* partial, T* dshared, i64 rows, int blocks, int columns) {
    int lane = threadIdx.x % 32, before = columns - 2 * N;
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    float sum = 0;
#pragma unroll 8
    for (int k = 0; k < blocks; k++) sum += partial[(row * blocks + k) * 2 * N + lane];
    dshared[row * columns + before + lane] = from_f32<T>(sum);
    for (int i = lane; i < before; i += 32) dshared[row * columns + i] = from_f32<T>(0.f);
}
