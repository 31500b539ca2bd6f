// RWKV's token shift with all that is mixed from it, where nothing is hidden: y_m = p + (x - p) mu_m for C_M mixes, with p the token before.
// x and y are [sequences, tokens, width], mu [layers, width], `texts` sequences of a layer; `last` is the token before the first, [sequences, width].
#define RUN 32
constexpr int WIDE = 16 / sizeof(T);

template <class P> struct Each { P* v[4]; };

template <int K> __device__ __forceinline__ void values(float (&to)[K], const T* from) {
    Vec<T, K> v = *(const Vec<T, K>*)from;
#pragma unroll
    for (int i = 0; i < K; i++) to[i] = to_f32(v.v[i]);
}
// The input before token t of K channels.
template <int K> __device__ __forceinline__ void before(float (&to)[K], const T* x, const float* last, i64 s, int t, int e, int tokens, int width) {
    if (t > 0) {
        values(to, x + (s * tokens + t - 1) * width + e);
    } else {
#pragma unroll
        for (int i = 0; i < K; i++) to[i] = last[s * width + e + i];
    }
}

// n = sequences * tokens * width / WIDE.
KERNEL(token_mix)(const T* x, const float* last, const T* mu0, const T* mu1, const T* mu2, const T* mu3, T* y0, T* y1, T* y2, T* y3, float* out,
                  i64 n, int texts, int tokens, int width) {
    Each<const T> mu = {mu0, mu1, mu2, mu3};
    Each<T> y = {y0, y1, y2, y3};
    int vectors = width / WIDE;
    EACH(i, n) {
        i64 row = i / vectors, s = row / tokens;
        int e = int(i % vectors) * WIDE, t = int(row % tokens);
        float own[WIDE], p[WIDE], share[WIDE];
        values(own, x + row * width + e);
        before(p, x, last, s, t, e, tokens, width);
#pragma unroll
        for (int m = 0; m < C_M; m++) {
            values(share, mu.v[m] + s / texts * width + e);
            Vec<T, WIDE> to;
#pragma unroll
            for (int c = 0; c < WIDE; c++) to.v[c] = from_f32<T>(p[c] + (own[c] - p[c]) * share[c]);
            *(Vec<T, WIDE>*)(y.v[m] + row * width + e) = to;
        }
        if (t == tokens - 1)
#pragma unroll
            for (int c = 0; c < WIDE; c++) out[s * width + e + c] = own[c];
    }
}

// A thread has RUN tokens of four channels, from the last to the first. Of the shares it leaves sums: partial [layers, texts, runs, C_M, width].
// n = sequences * runs * width / 4.
KERNEL(token_mix_back)(const T* x, const float* last, const T* mu0, const T* mu1, const T* mu2, const T* mu3, const T* dy0, const T* dy1,
                       const T* dy2, const T* dy3, const float* dout, T* dx, float* dlast, float* partial, i64 n, int texts, int tokens,
                       int width) {
    Each<const T> mu = {mu0, mu1, mu2, mu3}, dy = {dy0, dy1, dy2, dy3};
    int quads = width / 4, runs = (tokens + RUN - 1) / RUN;
    EACH(i, n) {
        int e = int(i % quads) * 4, run = int(i / quads % runs);
        i64 s = i / quads / runs;
        int from = run * RUN, to = min(from + RUN, tokens);
        float share[C_M][4], sums[C_M][4] = {}, own[4], p[4], d[4];
        // What a token gets as the one before another.
        float next[4] = {};
#pragma unroll
        for (int m = 0; m < C_M; m++) values(share[m], mu.v[m] + s / texts * width + e);
        if (to == tokens) {
#pragma unroll
            for (int c = 0; c < 4; c++) next[c] = dout[s * width + e + c];
        } else {
#pragma unroll
            for (int m = 0; m < C_M; m++) {
                values(d, dy.v[m] + (s * tokens + to) * width + e);
#pragma unroll
                for (int c = 0; c < 4; c++) next[c] += d[c] * (1.f - share[m][c]);
            }
        }
        values(own, x + (s * tokens + to - 1) * width + e);
        for (int t = to - 1; t >= from; t--) {
            float given[4], back[4] = {};
            before(p, x, last, s, t, e, tokens, width);
#pragma unroll
            for (int c = 0; c < 4; c++) given[c] = next[c];
#pragma unroll
            for (int m = 0; m < C_M; m++) {
                values(d, dy.v[m] + (s * tokens + t) * width + e);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    given[c] += d[c] * share[m][c];
                    back[c] += d[c] * (1.f - share[m][c]);
                    sums[m][c] += d[c] * (own[c] - p[c]);
                }
            }
            Vec<T, 4> out;
#pragma unroll
            for (int c = 0; c < 4; c++) out.v[c] = from_f32<T>(given[c]), next[c] = back[c], own[c] = p[c];
            *(Vec<T, 4>*)(dx + (s * tokens + t) * width + e) = out;
        }
        if (from == 0)
#pragma unroll
            for (int c = 0; c < 4; c++) dlast[s * width + e + c] = next[c];
#pragma unroll
        for (int m = 0; m < C_M; m++)
            *(float4*)(partial + ((s * runs + run) * C_M + m) * width + e) = make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    }
}
