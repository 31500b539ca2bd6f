// The causal convolution with a carried tail, one thread an element. C_K weights for each channel; x is [sequences, tokens, width], the tail
// [sequences, C_K - 1, width], `texts` sequences share weights. `seen` may be null: then nothing is hidden.

__device__ __forceinline__ int seen_before(const int* seen, int t) {
    do t--;
    while (t >= 0 && seen && !seen[t]);
    return t;
}
__device__ __forceinline__ int seen_after(const int* seen, int t, int tokens) {
    do t++;
    while (t < tokens && seen && !seen[t]);
    return t;
}

// Element i of [sequences, rows, width].
struct At {
    int e, row;
    i64 s;
    __device__ __forceinline__ At(i64 i, int rows, int width) : e(int(i % width)), row(int(i / width % rows)), s(i / width / rows) {}
};

// f(k, input that weight k is for) for k = C_K - 1 .. 0 of the output of token t: tokens that are seen, then the tail.
template <class F> __device__ __forceinline__ void each_input(const T* x, const float* tail, const int* seen, int t, int width, F f) {
    int kept = C_K - 1;
#pragma unroll
    for (int k = C_K - 1; k >= 0; k--) {
        if (t >= 0) {
            f(k, to_f32(x[(i64)t * width]));
            t = seen_before(seen, t);
        } else {
            f(k, tail[(i64)--kept * width]);
        }
    }
}

KERNEL(conv)(const T* x, const T* weight, const T* bias, const float* tail, const int* seen, T* y, i64 n, int texts,
             int tokens, int width) {
    EACH(i, n) {
        At at(i, tokens, width);
        const int* own = seen ? seen + at.s * tokens : nullptr;
        i64 channel = at.s / texts * width + at.e;
        float sum = 0;
        if (!own || own[at.row]) {
            if (bias) sum = to_f32(bias[channel]);
            each_input(x + at.s * tokens * width + at.e, tail + at.s * (C_K - 1) * width + at.e, own, at.row, width,
                       [&](int k, float v) { sum += to_f32(weight[channel * C_K + k]) * v; });
        }
        y[i] = from_f32<T>(sum);
    }
}

// The last C_K - 1 inputs of [tail, tokens that are seen]; n = sequences * width.
KERNEL(conv_tail)(const T* x, const float* tail, const int* seen, float* out, i64 n, int tokens, int width) {
    EACH(i, n) {
        i64 s = i / width, e = i % width;
        const int* own = seen ? seen + s * tokens : nullptr;
        int t = seen_before(own, tokens), kept = C_K - 1;
        for (int p = C_K - 2; p >= 0; p--) {
            float v;
            if (t >= 0) {
                v = to_f32(x[(s * tokens + t) * width + e]);
                t = seen_before(own, t);
            } else {
                v = tail[(s * (C_K - 1) + --kept) * width + e];
            }
            out[(s * (C_K - 1) + p) * width + e] = v;
        }
    }
}

// What an input gets that weight k is for in the output of token t, k - 1 in that of the next, and so on; where the tokens end before the
// weights do, it is in the new tail, at place k of what is left.
__device__ __forceinline__ float given(const T* weight, const T* dy, const float* dtail, const int* seen, int t, int k, int tokens, int width) {
    float sum = 0;
    for (; k >= 0; k--) {
        if (t >= tokens) return sum + dtail[(i64)k * width];
        sum += to_f32(weight[k]) * to_f32(dy[(i64)t * width]);
        t = seen_after(seen, t, tokens);
    }
    return sum;
}

// n = sequences * tokens * width.
KERNEL(conv_back)(const T* weight, const T* dy, const float* dtail, const int* seen, T* dx, i64 n, int texts, int tokens,
                  int width) {
    EACH(i, n) {
        At at(i, tokens, width);
        const int* own = seen ? seen + at.s * tokens : nullptr;
        i64 channel = at.s / texts * width + at.e;
        float sum = 0;
        if (!own || own[at.row])
            sum = given(weight + channel * C_K, dy + at.s * tokens * width + at.e, dtail + at.s * (C_K - 1) * width + at.e, own, at.row, C_K - 1,
                        tokens, width);
        dx[i] = from_f32<T>(sum);
    }
}

// n = sequences * (C_K - 1) * width.
KERNEL(conv_tail_back)(const T* weight, const T* dy, const float* dtail, const int* seen, float* out, i64 n, int texts,
                       int tokens, int width) {
    EACH(i, n) {
        At at(i, C_K - 1, width);
        const int* own = seen ? seen + at.s * tokens : nullptr;
        i64 channel = at.s / texts * width + at.e;
        out[i] = given(weight + channel * C_K, dy + at.s * tokens * width + at.e, dtail + at.s * (C_K - 1) * width + at.e, own,
                       seen_after(own, -1, tokens), at.row, tokens, width);
    }
}

// Sums over a piece of a layer's tokens, of dy times each input and of dy: partial [groups, pieces, C_K + 1, width].
KERNEL(conv_weight_sums)(const T* x, const float* tail, const int* seen, const T* dy, float* partial, int texts, int tokens,
                         int width) {
    int e = blockIdx.x * blockDim.x + threadIdx.x, pieces = gridDim.y;
    if (e >= width) return;
    i64 group = blockIdx.z, rows = (i64)texts * tokens, length = (rows + pieces - 1) / pieces, from = blockIdx.y * length;
    float sums[C_K + 1] = {};
    for (i64 row = from; row < min(from + length, rows); row++) {
        i64 s = group * texts + row / tokens;
        int t = int(row % tokens);
        const int* own = seen ? seen + s * tokens : nullptr;
        if (own && !own[t]) continue;
        float d = to_f32(dy[(s * tokens + t) * width + e]);
        sums[C_K] += d;
        each_input(x + s * tokens * width + e, tail + s * (C_K - 1) * width + e, own, t, width, [&](int k, float v) { sums[k] += d * v; });
    }
#pragma unroll
    for (int k = 0; k <= C_K; k++) partial[((group * pieces + blockIdx.y) * (C_K + 1) + k) * width + e] = sums[k];
}

// From sums [groups, C_K + 1, width] to the gradients of weights [groups, width, C_K] and bias; n = their number.
KERNEL(conv_weight_give)(const float* sums, T* dweight, T* dbias, i64 n, int width) {
    EACH(i, n) {
        int k = int(i % (C_K + 1));
        i64 channel = i / (C_K + 1), group = channel / width, e = channel % width;
        T sum = from_f32<T>(sums[(group * (C_K + 1) + k) * width + e]);
        if (k < C_K)
            dweight[channel * C_K + k] = sum;
        else if (dbias)
            dbias[channel] = sum;
    }
}

// The convolution of the first `width` columns of rows of `wide`, and silu of it, where nothing is hidden. A thread has C_RUN tokens of four
// channels, and has each input once.
#ifndef C_RUN
#define C_RUN 16
#endif
typedef Vec<T, 4> Four;

// Four channels of C_RUN tokens: EACH of width / 4 by runs by sequences.
struct Run {
    int e, from, runs;
    i64 s, run;
    __device__ __forceinline__ Run(i64 i, int tokens, int width) {
        int quads = width / 4;
        runs = (tokens + C_RUN - 1) / C_RUN;
        e = int(i % quads) * 4;
        run = i / quads % runs;
        s = i / quads / runs;
        from = int(run) * C_RUN;
    }
};

// The weights of four channels.
__device__ __forceinline__ void weights_of(float (&w)[C_K][4], const T* weight, i64 channel) {
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int k = 0; k < C_K; k++) w[k][c] = to_f32(weight[(channel + c) * C_K + k]);
}

// The input of token t of four channels: before the first it is the tail's. x and tail begin at the sequence and the first channel.
__device__ __forceinline__ void input_of(float (&v)[4], const T* x, const float* tail, int t, int tokens, int wide, int width) {
    Four row = {};
    if (t >= 0 && t < tokens) row = *(const Four*)(x + (i64)t * wide);
#pragma unroll
    for (int c = 0; c < 4; c++) v[c] = t >= 0 ? to_f32(row.v[c]) : tail[(i64)(t + C_K - 1) * width + c];
}

// The last C_K inputs, the newest last.
struct Window {
    float v[C_K][4];
    __device__ __forceinline__ void push(const float (&next)[4]) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int k = 0; k + 1 < C_K; k++) v[k][c] = v[k + 1][c];
            v[C_K - 1][c] = next[c];
        }
    }
    // sum_k w_k v_k of channel c.
    __device__ __forceinline__ float times(const float (&w)[C_K][4], int c) const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < C_K; k++) sum += w[k][c] * v[k][c];
        return sum;
    }
};

KERNEL(conv_silu)(const T* x, const T* weight, const T* bias, const float* tail, T* u, float* out, i64 n, int texts, int tokens, int width,
                  int wide) {
    EACH(i, n) {
        Run r(i, tokens, width);
        const T* own = x + r.s * tokens * wide + r.e;
        const float* before = tail + r.s * (C_K - 1) * width + r.e;
        i64 channel = r.s / texts * width + r.e;
        float w[C_K][4], shift[4], next[4];
        weights_of(w, weight, channel);
#pragma unroll
        for (int c = 0; c < 4; c++) shift[c] = bias ? to_f32(bias[channel + c]) : 0.f;
        Window window;
#pragma unroll
        for (int k = 1; k < C_K; k++) {
            input_of(next, own, before, r.from - C_K + k, tokens, wide, width);
            window.push(next);
        }
#pragma unroll 4
        for (int t = r.from; t < r.from + C_RUN; t++) {
            if (t >= tokens) break;
            input_of(next, own, before, t, tokens, wide, width);
            window.push(next);
            Four y;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float value = shift[c] + window.times(w, c);
                y.v[c] = from_f32<T>(value * sigmoid_of(value));
            }
            *(Four*)(u + (r.s * tokens + t) * width + r.e) = y;
        }
        if (r.run == r.runs - 1)
            for (int k = 0; k < C_K - 1; k++) {
                input_of(next, own, before, tokens - C_K + 1 + k, tokens, wide, width);
#pragma unroll
                for (int c = 0; c < 4; c++) out[(r.s * (C_K - 1) + k) * width + r.e + c] = next[c];
            }
    }
}

// The gradient of the first `width` columns of dx, whose others stay as they are, of the tail, and of a run's tokens those of weights and bias:
// partial [groups, texts, runs, C_K + 1, width].
KERNEL(conv_silu_back, __launch_bounds__(256, 2))
    (const T* x, const T* weight, const T* bias, const float* tail, const T* du, const float* dout, T* dx, float* dtail, float* partial, i64 n,
     int texts, int tokens, int width, int wide) {
    EACH(i, n) {
        Run r(i, tokens, width);
        const T* own = x + r.s * tokens * wide + r.e;
        const float* before = tail + r.s * (C_K - 1) * width + r.e;
        i64 channel = r.s / texts * width + r.e;
        float w[C_K][4], shift[4], next[4], sums[C_K + 1][4] = {};
        weights_of(w, weight, channel);
#pragma unroll
        for (int c = 0; c < 4; c++) shift[c] = bias ? to_f32(bias[channel + c]) : 0.f;
        // The inputs up to a token, and the gradients of the last outputs before silu.
        Window inputs, slopes = {};
#pragma unroll
        for (int k = 1; k < C_K; k++) {
            input_of(next, own, before, r.from - C_K + k, tokens, wide, width);
            inputs.push(next);
        }
#pragma unroll 2
        for (int t = r.from; t < r.from + C_RUN + C_K - 1; t++) {
            input_of(next, own, before, t, tokens, wide, width);
            inputs.push(next);
            float slope[4] = {};
            if (t < tokens) {
                Four dy = *(const Four*)(du + (r.s * tokens + t) * width + r.e);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float value = shift[c] + inputs.times(w, c), open = sigmoid_of(value);
                    slope[c] = to_f32(dy.v[c]) * open * (1.f + value * (1.f - open));
                }
            }
            slopes.push(slope);
            if (t < r.from + C_RUN) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
#pragma unroll
                    for (int k = 0; k < C_K; k++) sums[k][c] += slope[c] * inputs.v[k][c];
                    sums[C_K][c] += slope[c];
                }
            }
            // With this the input of C_K - 1 tokens before has all that it gets.
            int whole = t - C_K + 1, kept = whole - (tokens - C_K + 1);
            if (whole >= tokens || whole >= r.from + C_RUN || (whole < r.from && (whole >= 0 || r.from > 0))) continue;
            float given[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                given[c] = kept >= 0 ? dout[(r.s * (C_K - 1) + kept) * width + r.e + c] : 0.f;
#pragma unroll
                for (int k = 0; k < C_K; k++) given[c] += slopes.v[k][c] * w[C_K - 1 - k][c];
            }
            if (whole >= 0) {
                Four to;
#pragma unroll
                for (int c = 0; c < 4; c++) to.v[c] = from_f32<T>(given[c]);
                *(Four*)(dx + (r.s * tokens + whole) * wide + r.e) = to;
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++) dtail[(r.s * (C_K - 1) + whole + C_K - 1) * width + r.e + c] = given[c];
            }
        }
#pragma unroll
        for (int k = 0; k <= C_K; k++)
            *(float4*)(partial + ((r.s * r.runs + r.run) * (C_K + 1) + k) * width + r.e) = make_float4(sums[k][0], sums[k][1], sums[k][2], sums[k][3]);
    }
}
