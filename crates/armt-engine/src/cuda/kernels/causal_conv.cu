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
