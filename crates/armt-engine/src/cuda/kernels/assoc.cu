// DPFP (its elements are in prelude.cuh), and what the associative memory does without walking over A: the general way of the read, whose
// products are taken elsewhere, and the end of the write's way back.
constexpr float EPSILON = 1e-5f;

extern __shared__ float4 shared_floats[];

KERNEL(dpfp)(const T* x, T* y, i64 n, int dm, int nu) {
    int width = 2 * dm, dk = nu * width;
    EACH(i, n) {
        const T* row = x + i / dk * dm;
        int f = (int)(i % dk), j = f / width + 1, c = f % width;
        y[i] = from_f32<T>(rectified(row, c, dm) * rectified(row, back(c, j, width), dm));
    }
}
KERNEL(dpfp_backward)(const T* x, const T* dy, T* dx, i64 n, int dm, int nu) {
    i64 dk = 2 * (i64)nu * dm;
    EACH(i, n) {
        const T* row = x + i / dm * dm;
        const T* grad = dy + i / dm * dk;
        float s = dpfp_slope(to_f32(x[i]), (int)(i % dm), dm, nu,
                             [&](int c) { return rectified(row, c, dm); }, [&](int f) { return to_f32(grad[f]); });
        dx[i] = from_f32<T>(s);
    }
}

// qn = phi(q) / (z . phi(q) + eps): a warp for each query, t queries to a z. Shared: r of every warp.
KERNEL(read_features)(const T* q, const float* z, T* qn, i64 rows, int t, int dm, int nu) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = 2 * dm, dk = nu * width;
    i64 row = (i64)blockIdx.x * (blockDim.x / 32) + warp;
    if (row >= rows) return;
    float* r = (float*)shared_floats + warp * width;
    const T* x = q + row * dm;
    for (int c = lane; c < width; c += 32) r[c] = rectified(x, c, dm);
    __syncwarp();
    const float* zn = z + row / t * dk;
    float s = 0;
    for (int j = 1; j <= nu; j++)
        for (int c = lane; c < width; c += 32) s += zn[(j - 1) * width + c] * (r[c] * r[back(c, j, width)]);
    float scale = 1.f / (warp_sum(s) + EPSILON);
    T* out = qn + row * dk;
    for (int j = 1; j <= nu; j++)
        for (int c = lane; c < width; c += 32) out[(j - 1) * width + c] = from_f32<T>(r[c] * r[back(c, j, width)] * scale);
}

// dq from dqn, and weights = dden den = -(dqn . phi) / den. Shared: r and dphi of every warp.
KERNEL(read_backward)(const T* q, const float* z, const T* dqn, T* dq, float* weights, i64 rows, int t, int dm, int nu) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = 2 * dm, dk = nu * width;
    i64 row = (i64)blockIdx.x * (blockDim.x / 32) + warp;
    if (row >= rows) return;
    float* r = (float*)shared_floats + warp * (width + dk);
    float* dphi = r + width;
    const T* x = q + row * dm;
    for (int c = lane; c < width; c += 32) r[c] = rectified(x, c, dm);
    __syncwarp();
    const float* zn = z + row / t * dk;
    const T* grad = dqn + row * dk;
    float zk = 0, gk = 0;
    for (int j = 1; j <= nu; j++)
        for (int c = lane; c < width; c += 32) {
            int f = (j - 1) * width + c;
            float phi = r[c] * r[back(c, j, width)], g = to_f32(grad[f]);
            dphi[f] = g;
            zk += zn[f] * phi;
            gk += g * phi;
        }
    float den = warp_sum(zk) + EPSILON, weight = -warp_sum(gk) / den;
    float scale = 1.f / den, dden = weight * scale;
    for (int f = lane; f < dk; f += 32) dphi[f] = dphi[f] * scale + dden * zn[f];
    if (lane == 0) weights[row] = weight;
    __syncwarp();
    for (int c = lane; c < dm; c += 32) {
        float s = dpfp_slope(to_f32(x[c]), c, dm, nu, [&](int i) { return r[i]; }, [&](int f) { return dphi[f]; });
        dq[row * dm + c] = from_f32<T>(s);
    }
}

// dz[n] (+)= sum_t weights[n, t] qn[n, t]: block (n, 32 features) of 128 threads, 4 queries at a time.
KERNEL(read_backward_z)(const T* qn, const float* weights, float* dz, int t, int dk, bool accumulate) {
    __shared__ float part[4][33];
    int tiles = (dk + 31) / 32, lane = threadIdx.x % 32, row = threadIdx.x / 32;
    i64 n = blockIdx.x / tiles;
    int f = (int)(blockIdx.x % tiles) * 32 + lane;
    float s = 0;
    if (f < dk)
        for (i64 i = row; i < t; i += 4) s += weights[n * t + i] * to_f32(qn[(n * t + i) * dk + f]);
    part[row][lane] = s;
    __syncthreads();
    if (row == 0 && f < dk) {
        s += part[1][lane] + part[2][lane] + part[3][lane];
        float* out = dz + n * dk + f;
        *out = accumulate ? *out + s : s;
    }
}

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int BATCH = 12; // features of a lane that are summed side by side

// What is left of the write's way back after assoc_walk.cu: block n adds its sums, `count` of dphi [n, count, m, dk] and `splits` of db and
// dden [n, splits, 2, m], in order, a warp for a token, finishes dk and dbeta, and turns h from dz' to dz. Shared: r and dphi of every warp,
// dz, dden.
KERNEL(write_backward_sum, __launch_bounds__(THREADS, 2))
(const T* k, const T* beta, const float* z, const int* empty, float* h, const float* parts, const float* scalars, T* dk_out,
    T* dbeta, int m, int dm, int nu, int count, int splits, bool correction) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = 2 * dm, dk = nu * width;
    i64 n = blockIdx.x;
    float* all_r = (float*)shared_floats;
    float* r = all_r + warp * width;
    float* dphi = all_r + WARPS * width + warp * dk;
    float* dz_sum = all_r + WARPS * (width + dk);
    float* dden_of = dz_sum + dk;
    k += n * m * dm, beta += n * m, z += n * dk, h += n * dk, dk_out += n * m * dm, dbeta += n * m;
    parts += n * count * m * dk, scalars += n * splits * 2 * m;
    bool corrected = correction && !(empty && empty[n]);
    for (int f = threadIdx.x; f < dk; f += THREADS) dz_sum[f] = h[f];
    for (int base = 0; base < m; base += WARPS) {
        int token = base + warp;
        bool inside = token < m;
        for (int c = lane; c < width; c += 32) r[c] = inside ? rectified(k + (i64)token * dm, c, dm) : 0.f;
        __syncwarp();
        float db = 0, dden = 0;
        if (inside) {
            for (int split = 0; split < splits; split++) {
                db += scalars[(i64)split * 2 * m + token];
                dden += scalars[(i64)split * 2 * m + m + token];
            }
            float zk = 0, kk = 0;
            for (int j = 1; j <= nu; j++)
                for (int c = lane; c < width; c += 32) {
                    float p = r[c] * r[back(c, j, width)];
                    zk += z[(j - 1) * width + c] * p;
                    kk += p * p;
                }
            float den = warp_sum(zk) + EPSILON;
            kk = warp_sum(kk) + EPSILON;
            float gamma = corrected ? fminf(fmaxf(1.f - den / kk, 0.f), 1.f) : 1.f;
            // Side by side, so that a lane waits for the memory once a part and not once a sum.
            for (int first = lane; first < dk; first += 32 * BATCH) {
                float s[BATCH];
#pragma unroll
                for (int u = 0; u < BATCH; u++) {
                    int f = first + 32 * u;
                    s[u] = f < dk ? gamma * h[f] + dden * z[f] : 0.f;
                }
#pragma unroll 2
                for (int part = 0; part < count; part++) {
                    const float* own = parts + ((i64)part * m + token) * dk + first;
#pragma unroll
                    for (int u = 0; u < BATCH; u++)
                        if (first + 32 * u < dk) s[u] += own[32 * u];
                }
#pragma unroll
                for (int u = 0; u < BATCH; u++)
                    if (first + 32 * u < dk) dphi[first + 32 * u] = s[u];
            }
            __syncwarp();
            const T* x = k + (i64)token * dm;
            for (int c = lane; c < dm; c += 32) {
                float s = dpfp_slope(to_f32(x[c]), c, dm, nu, [&](int i) { return r[i]; }, [&](int f) { return dphi[f]; });
                dk_out[(i64)token * dm + c] = from_f32<T>(s);
            }
            if (lane == 0) {
                float b = sigmoid_of(to_f32(beta[token]));
                dbeta[token] = from_f32<T>(db * b * (1.f - b));
            }
        }
        if (lane == 0) dden_of[warp] = dden;
        __syncthreads();
        for (int f = threadIdx.x; f < dk; f += THREADS) {
            int j = f / width + 1, c = f % width, rolled = back(c, j, width);
            float s = dz_sum[f];
#pragma unroll
            for (int w = 0; w < WARPS; w++) s += dden_of[w] * (all_r[w * width + c] * all_r[w * width + rolled]);
            dz_sum[f] = s;
        }
        __syncthreads();
    }
    for (int f = threadIdx.x; f < dk; f += THREADS) h[f] = dz_sum[f];
}
