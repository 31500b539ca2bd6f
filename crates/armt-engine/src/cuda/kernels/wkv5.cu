// The recurrence of RWKV-5, M <- diag(w) M + c d^T from token to token, with M the state (c = k, d = v) or, from the last token to the first, its
// gradient (c = r, d = dy). C_N key and value channels a head, one thread each; block (head, chunk, sequence). A sequence is cut into chunks of
// tokens: their ends are computed from zero side by side, joined one after the other, and every chunk is run again from where it begins.
//
//   columns   out_j = sum_i M_ij q_i + (sum_i u_i q_i c_i) d_j       y  with q = r;    dv with q = k
//   rows      out_i = sum_j M_ij q_j + u_i c_i (d . q)               dr with q = dy;   dk with q = v
//
// both of M before the token. The decay's gradient follows from the rows' sums: with X_t = sum_j G_ij S_ij after token t, K_t = k_i (G v)_i and
// R_t = r_i (S dy)_i, that of token t is X_t - K_t, and X_(t-1) = X_t - K_t + R_t.
#define TILE 8

struct Place {
    int tokens, width, from, to;
    i64 s, chunk, group, at;
    const int* seen;
    bool reverse;
    __device__ __forceinline__ Place(const int* mask, int texts, int all, int channels, int length, bool backwards) {
        tokens = all, width = channels, reverse = backwards;
        s = blockIdx.z;
        group = s / texts;
        chunk = s * gridDim.y + blockIdx.y;
        from = blockIdx.y * length;
        to = min(from + length, tokens);
        // The head's matrix of this chunk in [chunks of all, heads, C_N, C_N].
        at = (chunk * gridDim.x + blockIdx.x) * C_N * C_N;
        seen = mask ? mask + s * tokens : nullptr;
    }
    // Token `step` of the chunk in the order of the walk.
    __device__ __forceinline__ int token(int step) const { return reverse ? to - 1 - step : from + step; }
    __device__ __forceinline__ bool sees(int t) const { return !seen || seen[t]; }
    __device__ __forceinline__ i64 row(int t) const { return (s * tokens + t) * width + blockIdx.x * C_N; }
    __device__ __forceinline__ i64 param() const { return group * width + blockIdx.x * C_N; }
    // TILE tokens from `step` on of an operand.
    __device__ __forceinline__ void load(float (&tile)[TILE][C_N], const T* x, int step) const {
        for (int i = 0; i < TILE; i++)
            if (step + i < to - from) tile[i][threadIdx.x] = to_f32(x[row(token(step + i)) + threadIdx.x]);
    }
};

// sums[i] = sum_k f(i, k) for the tokens of a tile: where lanes can share a token they do, else a thread has one.
template <class F> __device__ __forceinline__ void over_head(float (&sums)[TILE], F f) {
    constexpr int LANES = C_N / TILE;
    if constexpr (C_N >= 32 && (C_N & (C_N - 1)) == 0) {
        int i = threadIdx.x / LANES;
        float sum = 0;
#pragma unroll
        for (int k = 0; k < TILE; k++) sum += f(i, k * LANES + threadIdx.x % LANES);
        sum = warp_sum<LANES>(sum);
        if (threadIdx.x % LANES == 0) sums[i] = sum;
    } else {
        for (int i = threadIdx.x; i < TILE; i += C_N) {
            float sum = 0;
            for (int k = 0; k < C_N; k++) sum += f(i, k);
            sums[i] = sum;
        }
    }
}

__device__ __forceinline__ float decay_of(float x) { return expf(-expf(x)); }

// Ends of chunks from zero, and how many of their tokens are seen.
KERNEL(wkv_local, __launch_bounds__(C_N, 1))(const T* c, const T* d, const float* decay, const int* seen, float* ends, float* counts,
                                           int texts, int tokens, int width, int length, bool reverse) {
    __shared__ float tile[TILE][C_N], owns[TILE][C_N], w[C_N];
    Place p(seen, texts, tokens, width, length, reverse);
    int j = threadIdx.x;
    w[j] = decay_of(decay[p.param() + j]);
    float m[C_N] = {}, count = 0;
    for (int step = 0; step < p.to - p.from; step += TILE) {
        __syncthreads();
        p.load(tile, c, step);
        p.load(owns, d, step);
        __syncthreads();
        for (int i = 0; i < min(TILE, p.to - p.from - step); i++) {
            if (!p.sees(p.token(step + i))) continue;
            float own = owns[i][j];
            count += 1;
#pragma unroll
            for (int k = 0; k < C_N; k++) m[k] = w[k] * m[k] + tile[i][k] * own;
        }
    }
#pragma unroll
    for (int k = 0; k < C_N; k++) ends[p.at + k * C_N + j] = m[k];
    if (j == 0 && blockIdx.x == 0) counts[p.chunk] = count;
}

// Turns the ends of chunks, each from zero, into where they begin, from `state` on, and gives what comes out at last where that is wanted.
// n = sequences * width * C_N.
KERNEL(wkv_join)(const float* decay, const float* counts, const float* state, float* ends, float* last, i64 n, int texts, int width,
                 int chunks, bool reverse) {
    EACH(i, n) {
        i64 each = (i64)width * C_N, s = i / each, rest = i % each, channel = rest / C_N;
        float rate = expf(decay[s / texts * width + channel]), value = state[i];
        for (int k = 0; k < chunks; k++) {
            i64 chunk = s * chunks + (reverse ? chunks - 1 - k : k);
            float end = ends[chunk * each + rest];
            ends[chunk * each + rest] = value;
            value = expf(-rate * counts[chunk]) * value + end;
        }
        if (last) last[i] = value;
    }
}

// `last` is what comes out of the chunk that the walk ends with.
KERNEL(wkv_columns, __launch_bounds__(C_N, 1))(const T* c, const T* d, const T* q, const float* decay, const float* bonus,
                                             const int* seen, const float* starts, T* out, float* last, int texts, int tokens,
                                             int width, int length, bool reverse) {
    __shared__ float tile_c[TILE][C_N], tile_q[TILE][C_N], owns[TILE][C_N], w[C_N], u[C_N], same[TILE];
    Place p(seen, texts, tokens, width, length, reverse);
    int j = threadIdx.x;
    w[j] = decay_of(decay[p.param() + j]);
    u[j] = bonus[p.param() + j];
    float m[C_N];
#pragma unroll
    for (int k = 0; k < C_N; k++) m[k] = starts[p.at + k * C_N + j];
    for (int step = 0; step < p.to - p.from; step += TILE) {
        __syncthreads();
        p.load(tile_c, c, step);
        p.load(tile_q, q, step);
        p.load(owns, d, step);
        __syncthreads();
        over_head(same, [&](int i, int k) { return u[k] * tile_q[i][k] * tile_c[i][k]; });
        __syncthreads();
        for (int i = 0; i < min(TILE, p.to - p.from - step); i++) {
            int t = p.token(step + i);
            float sum = 0;
            if (p.sees(t)) {
                float own = owns[i][j];
#pragma unroll
                for (int k = 0; k < C_N; k++) {
                    sum += m[k] * tile_q[i][k];
                    m[k] = w[k] * m[k] + tile_c[i][k] * own;
                }
                sum += same[i] * own;
            }
            out[p.row(t) + j] = from_f32<T>(sum);
        }
    }
    if (last && blockIdx.y == (reverse ? 0 : gridDim.y - 1)) {
#pragma unroll
        for (int k = 0; k < C_N; k++) last[((p.s * gridDim.x + blockIdx.x) * C_N + k) * C_N + j] = m[k];
    }
}

// `inner` gets sum_j M_ij q_j in f32, `dots`, where it is wanted, d . q of [sequences, tokens, heads].
KERNEL(wkv_rows, __launch_bounds__(C_N, 1))(const T* c, const T* d, const T* q, const float* decay, const float* bonus, const int* seen,
                                          const float* starts, T* out, float* inner, float* dots, int texts, int tokens, int width,
                                          int length, bool reverse) {
    __shared__ float tile_d[TILE][C_N], tile_q[TILE][C_N], owns[TILE][C_N], both[TILE];
    Place p(seen, texts, tokens, width, length, reverse);
    int i = threadIdx.x;
    float w = decay_of(decay[p.param() + i]), u = bonus[p.param() + i], m[C_N];
#pragma unroll
    for (int k = 0; k < C_N; k++) m[k] = starts[p.at + i * C_N + k];
    for (int step = 0; step < p.to - p.from; step += TILE) {
        __syncthreads();
        p.load(tile_d, d, step);
        p.load(tile_q, q, step);
        p.load(owns, c, step);
        __syncthreads();
        over_head(both, [&](int b, int k) { return tile_d[b][k] * tile_q[b][k]; });
        __syncthreads();
        for (int b = 0; b < min(TILE, p.to - p.from - step); b++) {
            int t = p.token(step + b);
            float sum = 0, dot = 0, own = 0;
            if (p.sees(t)) {
                own = owns[b][i];
                dot = both[b];
#pragma unroll
                for (int k = 0; k < C_N; k++) {
                    sum += m[k] * tile_q[b][k];
                    m[k] = w * m[k] + own * tile_d[b][k];
                }
            }
            out[p.row(t) + i] = from_f32<T>(sum + u * own * dot);
            inner[p.row(t) + i] = sum;
            if (dots && i == 0) dots[(p.s * tokens + t) * gridDim.x + blockIdx.x] = dot;
        }
    }
}

// The gradients of decay and bonus of each chunk, [sequences, chunks, width], from the rows' sums of states (`forward`) and of their gradients
// (`backward`). X is known where chunks end, so that rounding does not add up beyond them; n = sequences * chunks * width.
KERNEL(wkv_params)(const T* r, const T* k, const float* decay, const int* seen, const float* forward, const float* backward,
                   const float* dots, const float* starts, const float* grads, const float* last, float* ddecay, float* dbonus,
                   i64 n, int texts, int tokens, int width, int length, int chunks) {
    EACH(i, n) {
        int channel = int(i % width), chunk = int(i / width % chunks), heads = width / C_N;
        i64 s = i / width / chunks;
        const float* after = chunk + 1 < chunks ? starts + (i + width) * C_N : last + (s * width + channel) * C_N;
        double x = 0, to_decay = 0;
        float to_bonus = 0;
        for (int j = 0; j < C_N; j++) x += (double)after[j] * grads[i * C_N + j];
        for (int t = min((chunk + 1) * length, tokens) - 1; t >= chunk * length; t--) {
            if (seen && !seen[s * tokens + t]) continue;
            i64 at = (s * tokens + t) * width + channel;
            float rt = to_f32(r[at]), kt = to_f32(k[at]), own = kt * backward[at];
            to_bonus += rt * kt * dots[(s * tokens + t) * heads + channel / C_N];
            to_decay += x - own;
            x += rt * forward[at] - own;
        }
        ddecay[i] = -expf(decay[s / texts * width + channel]) * (float)to_decay;
        dbonus[i] = to_bonus;
    }
}
