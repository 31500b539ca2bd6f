// DPFP and the associative memory. phi(x) is made of r = relu([x, -x]), 2 dm wide: feature (j - 1) 2 dm + c is r[c] r[c - j], cyclic.
//
// Writes cut A [dk, d] into tiles of C_COLUMNS columns, one a block of 256 threads. A tile lies in shared memory with rows of
// C_COLUMNS + 4 floats, so that threads on different rows meet different banks. Features of a chunk of tokens lie beside it as [dk][token],
// so that one access of 16 bytes gives a key's feature for four tokens.
#ifndef C_COLUMNS
#define C_COLUMNS 32
#endif
#define EPSILON 1e-5f

extern __shared__ float4 shared_floats[];

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

extern "C" __global__ void dpfp(const T* x, T* y, i64 n, int dm, int nu) {
    int width = 2 * dm, dk = nu * width;
    EACH(i, n) {
        const T* row = x + i / dk * dm;
        int f = (int)(i % dk), j = f / width + 1, c = f % width;
        y[i] = from_f32<T>(rectified(row, c, dm) * rectified(row, back(c, j, width), dm));
    }
}
extern "C" __global__ void dpfp_backward(const T* x, const T* dy, T* dx, i64 n, int dm, int nu) {
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
extern "C" __global__ void read_features(const T* q, const float* z, T* qn, i64 rows, int t, int dm, int nu) {
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
extern "C" __global__ void read_backward(const T* q, const float* z, const T* dqn, T* dq, float* weights, i64 rows, int t, int dm, int nu) {
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
extern "C" __global__ void read_backward_z(const T* qn, const float* weights, float* dz, int t, int dk, bool accumulate) {
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

constexpr int COLUMNS = C_COLUMNS, QUADS = COLUMNS / 4, STRIDE = COLUMNS + 4, THREADS = 256, WARPS = THREADS / 32;
// Threads that walk down the rows of a tile side by side.
constexpr int WALKERS = THREADS / QUADS;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Starts copying columns [from, from + COLUMNS) of a [dk, d] matrix to a tile; columns past d become zero.
__device__ __forceinline__ void fetch_tile(float* tile, const float* matrix, int dk, int d, int from) {
    if (d % 4 == 0) {
        for (int i = threadIdx.x; i < dk * QUADS; i += THREADS) {
            int f = i / QUADS, c = i % QUADS * 4;
            float* to = tile + f * STRIDE + c;
            if (from + c < d)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(matrix + (i64)f * d + from + c));
            else
                *(float4*)to = make_float4(0.f, 0.f, 0.f, 0.f);
        }
    } else {
        for (int i = threadIdx.x; i < dk * COLUMNS; i += THREADS) {
            int f = i / COLUMNS, c = i % COLUMNS;
            float* to = tile + f * STRIDE + c;
            if (from + c < d)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(matrix + (i64)f * d + from + c));
            else
                *to = 0.f;
        }
    }
    asm volatile("cp.async.commit_group;");
}
// Waits for this thread's copies; a __syncthreads must follow.
__device__ __forceinline__ void await_tiles() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The tokens of one memory.
struct Tokens {
    const T *k, *beta;
    const float* z;
    int m, dm, nu, chunk;
    bool corrected;
    __device__ __forceinline__ int width() const { return 2 * dm; }
    __device__ __forceinline__ int dk() const { return 2 * dm * nu; }
    // Distance between two keys' features, padded against bank conflicts.
    __device__ __forceinline__ int stride() const { return chunk == 4 ? 4 : chunk + 4; }
};

// Features [dk][stride] of tokens first .. first + chunk, and den, gamma and b of each, a warp for a token. Tokens past m get zero features.
// `r` is scratch of chunk rows of 2 dm. Ends with a barrier.
__device__ __forceinline__ void load_features(const Tokens& t, int first, float* r, float* phi, float* den, float* gamma, float* b) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = t.width(), stride = t.stride();
    for (int i = warp; i < t.chunk; i += WARPS) {
        int token = first + i;
        float* ri = r + i * width;
        for (int c = lane; c < width; c += 32) ri[c] = token < t.m ? rectified(t.k + (i64)token * t.dm, c, t.dm) : 0.f;
        __syncwarp();
        float zk = 0, kk = 0;
        for (int j = 1; j <= t.nu; j++)
            for (int c = lane; c < width; c += 32) {
                int f = (j - 1) * width + c;
                float p = ri[c] * ri[back(c, j, width)];
                phi[f * stride + i] = p;
                zk += t.z[f] * p;
                kk += p * p;
            }
        float dn = warp_sum(zk) + EPSILON;
        kk = warp_sum(kk) + EPSILON;
        if (lane == 0) {
            den[token] = dn;
            gamma[token] = t.corrected ? fminf(fmaxf(1.f - dn / kk, 0.f), 1.f) : 1.f;
            b[token] = token < t.m ? sigmoid_of(to_f32(t.beta[token])) : 0.f;
        }
    }
    __syncthreads();
}

// out[i][c] = sum_f phi_i[f] tile[f][c] for G tokens; `red` is scratch of WARPS x G x COLUMNS. Ends with a barrier.
template <int G> __device__ __forceinline__ void recall(const float* tile, const float* phi, int stride, int dk, float* red, float* out) {
    int quad = threadIdx.x % QUADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float acc[G][4] = {};
#pragma unroll 4
    for (int f = threadIdx.x / QUADS; f < dk; f += WALKERS) {
        float4 a = *(const float4*)(tile + f * STRIDE + quad * 4);
#pragma unroll
        for (int q = 0; q < G; q += 4) {
            float4 p = *(const float4*)(phi + f * stride + q);
            float ps[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[q + i][0] += ps[i] * a.x;
                acc[q + i][1] += ps[i] * a.y;
                acc[q + i][2] += ps[i] * a.z;
                acc[q + i][3] += ps[i] * a.w;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < G; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int mask = QUADS; mask < 32; mask <<= 1) acc[i][c] += __shfl_xor_sync(~0u, acc[i][c], mask);
        if (lane < QUADS) *(float4*)(red + (warp * G + i) * COLUMNS + quad * 4) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    }
    __syncthreads();
    if (threadIdx.x < G * COLUMNS) {
        float s = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) s += red[w * G * COLUMNS + threadIdx.x];
        out[threadIdx.x] = s;
    }
    __syncthreads();
}

// tile[f][c] += sum_i phi_i[f] x[i][c] for G tokens. With `to`, the result also goes to columns [from, ..) of that [dk, d] matrix.
// Every thread keeps to its own elements.
template <int G>
__device__ __forceinline__ void update(float* tile, const float* phi, int stride, int dk, const float* x, float* to, int d, int from) {
    int quad = threadIdx.x % QUADS, col = from + quad * 4;
    float xs[G][4];
#pragma unroll
    for (int i = 0; i < G; i++) {
        float4 v = *(const float4*)(x + i * COLUMNS + quad * 4);
        xs[i][0] = v.x, xs[i][1] = v.y, xs[i][2] = v.z, xs[i][3] = v.w;
    }
#pragma unroll 2
    for (int f = threadIdx.x / QUADS; f < dk; f += WALKERS) {
        float4 a = *(const float4*)(tile + f * STRIDE + quad * 4);
#pragma unroll
        for (int q = 0; q < G; q += 4) {
            float4 p = *(const float4*)(phi + f * stride + q);
            float ps[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a.x += ps[i] * xs[q + i][0];
                a.y += ps[i] * xs[q + i][1];
                a.z += ps[i] * xs[q + i][2];
                a.w += ps[i] * xs[q + i][3];
            }
        }
        *(float4*)(tile + f * STRIDE + quad * 4) = a;
        if (!to) continue;
        if (d % 4 == 0) {
            if (col < d) *(float4*)(to + (i64)f * d + col) = a;
        } else {
            float as[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (col + c < d) to[(i64)f * d + col + c] = as[c];
        }
    }
}

// Adds all tokens' phi_i (x) x_i to the tile and sends it to `to`. Features of the only chunk are there already; several are made again.
template <int G>
__device__ __forceinline__ void update_all(const Tokens& t, float* tile, float* phi, float* r, float* den, float* gamma, float* b, const float* x,
                                           float* to, int d, int from) {
    for (int first = 0; first < t.m; first += t.chunk) {
        if (t.m > t.chunk) {
            __syncthreads();
            load_features(t, first, r, phi, den, gamma, b);
        }
#pragma unroll 1
        for (int g = 0; g < t.chunk; g += G) {
            bool last = first + t.chunk >= t.m && g + G >= t.chunk;
            update<G>(tile, phi + g, t.stride(), t.dk(), x + (first + g) * COLUMNS, last ? to : nullptr, d, from);
        }
    }
}

template <int G>
__device__ __forceinline__ void write_tile(const Tokens& t, const T* v, const float* a, float* a_new, float* z_new, float* kept, int d, int from) {
    int dk = t.dk(), tokens = (t.m + t.chunk - 1) / t.chunk * t.chunk;
    float* tile = (float*)shared_floats;
    float* phi = tile + dk * STRIDE;
    float* scratch = phi + dk * t.stride(); // r, then sums of the warps
    float* x = scratch + max(t.chunk * t.width(), WARPS * G * COLUMNS);
    float* sums = x + tokens * COLUMNS;
    float* den = sums + 2 * G * COLUMNS;
    float *gamma = den + tokens, *b = gamma + tokens;
    fetch_tile(tile, a, dk, d, from);
    for (int first = 0; first < t.m; first += t.chunk) {
        load_features(t, first, scratch, phi, den, gamma, b);
        if (z_new)
            for (int f = threadIdx.x; f < dk; f += THREADS) {
                float s = first == 0 ? t.z[f] : z_new[f];
                for (int i = 0; i < t.chunk; i++) s += gamma[first + i] * phi[f * t.stride() + i];
                z_new[f] = s;
            }
        await_tiles();
        __syncthreads();
#pragma unroll 1
        for (int g = 0; g < t.chunk; g += G) {
            recall<G>(tile, phi + g, t.stride(), dk, scratch, sums);
            if (threadIdx.x < G * COLUMNS) {
                int token = first + g + threadIdx.x / COLUMNS, col = from + threadIdx.x % COLUMNS;
                float value = token < t.m && col < d ? to_f32(v[(i64)token * d + col]) : 0.f;
                float added = b[token] * (value - sums[threadIdx.x] / den[token]);
                x[(first + g) * COLUMNS + threadIdx.x] = added;
                if (kept && token < t.m && col < d) kept[(i64)token * d + col] = added;
            }
            __syncthreads();
        }
    }
    update_all<G>(t, tile, phi, scratch, den, gamma, b, x, a_new, d, from);
}

// Block (n, tile). The first tile's block also makes z'. a_new may be a: every block keeps to its own columns. `kept`, if given, receives
// what was added to each key, [n, m, d].
extern "C" __global__ void __launch_bounds__(THREADS, 2) write(const T* k, const T* v, const T* beta, const float* a, const float* z, const int* first,
                                                             float* a_new, float* z_new, float* kept, int m, int dm, int nu, int d, int chunk, bool correction) {
    int tiles = (d + COLUMNS - 1) / COLUMNS, tile = blockIdx.x % tiles;
    i64 n = blockIdx.x / tiles, dk = 2 * (i64)dm * nu;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * dk, m, dm, nu, chunk, correction && !(first && first[n])};
    float* z_out = tile == 0 ? z_new + n * dk : nullptr;
    if (kept) kept += n * m * d;
    if (chunk == 4)
        write_tile<4>(t, v + n * m * d, a + n * dk * d, a_new + n * dk * d, z_out, kept, d, tile * COLUMNS);
    else
        write_tile<8>(t, v + n * m * d, a + n * dk * d, a_new + n * dk * d, z_out, kept, d, tile * COLUMNS);
}

// x = -kept, what a write added to each key of this tile's columns, ready to be added again. A barrier must follow.
__device__ __forceinline__ void load_taken_back(const float* kept, int m, int tokens, int d, int from, float* x) {
    for (int i = threadIdx.x; i < tokens * COLUMNS; i += THREADS) {
        int token = i / COLUMNS, col = from + i % COLUMNS;
        x[i] = token < m && col < d ? -kept[(i64)token * d + col] : 0.f;
    }
}

// Sets columns [from, from + COLUMNS) of a [dk, d] matrix to zero.
__device__ __forceinline__ void clear_columns(float* matrix, int dk, int d, int from) {
    for (int i = threadIdx.x; i < dk * COLUMNS; i += THREADS) {
        int f = i / COLUMNS, c = from + i % COLUMNS;
        if (c < d) matrix[(i64)f * d + c] = 0.f;
    }
}

template <int G> __device__ __forceinline__ void undo_tile(const Tokens& t, const float* kept, float* a, int d, int from) {
    int dk = t.dk(), tokens = (t.m + t.chunk - 1) / t.chunk * t.chunk;
    float* tile = (float*)shared_floats;
    float* phi = tile + dk * STRIDE;
    float* scratch = phi + dk * t.stride();
    float* x = scratch + max(t.chunk * t.width(), WARPS * G * COLUMNS);
    float* den = x + tokens * COLUMNS + 2 * G * COLUMNS;
    float *gamma = den + tokens, *b = gamma + tokens;
    fetch_tile(tile, a, dk, d, from);
    load_taken_back(kept, t.m, tokens, d, from, x);
    if (t.m <= t.chunk) load_features(t, 0, scratch, phi, den, gamma, b);
    await_tiles();
    __syncthreads();
    update_all<G>(t, tile, phi, scratch, den, gamma, b, x, a, d, from);
}

// Block (n, tile): a = a - sum_i phi_i (x) kept_i, in place; zero if it was empty.
extern "C" __global__ void __launch_bounds__(THREADS, 2) write_undo(const T* k, const T* beta, const float* z, const int* first, const float* kept,
                                                                  float* a, int m, int dm, int nu, int d, int chunk) {
    int tiles = (d + COLUMNS - 1) / COLUMNS, from = (int)(blockIdx.x % tiles) * COLUMNS;
    i64 n = blockIdx.x / tiles, dk = 2 * (i64)dm * nu;
    if (first && first[n]) return clear_columns(a + n * dk * d, (int)dk, d, from);
    Tokens t = {k + n * m * dm, beta + n * m, z + n * dk, m, dm, nu, chunk, false};
    if (chunk == 4)
        undo_tile<4>(t, kept + n * m * d, a + n * dk * d, d, from);
    else
        undo_tile<8>(t, kept + n * m * d, a + n * dk * d, d, from);
}

template <int G>
__device__ __forceinline__ void write_backward_tile(const Tokens& t, const T* v, float* a, float* grad, T* dv, bool change, float* dphi,
                                                    float* scalars, bool empty, const float* kept, int d, int from) {
    int dk = t.dk(), tokens = (t.m + t.chunk - 1) / t.chunk * t.chunk;
    float* tile = (float*)shared_floats;
    float* grad_tile = tile + dk * STRIDE;
    float* phi = grad_tile + dk * STRIDE;
    float* scratch = phi + dk * t.stride();
    float* x = scratch + max(t.chunk * t.width(), WARPS * G * COLUMNS); // b u
    float* dw = x + tokens * COLUMNS;
    float* w = dw + tokens * COLUMNS;
    float* e = w + G * COLUMNS;
    float* den = e + G * COLUMNS;
    float *gamma = den + tokens, *b = gamma + tokens;
    if (kept && empty) {
        for (int i = threadIdx.x; i < dk * STRIDE; i += THREADS) tile[i] = 0.f;
        clear_columns(a, dk, d, from);
    } else {
        fetch_tile(tile, a, dk, d, from);
    }
    fetch_tile(grad_tile, grad, dk, d, from);
    if (t.m <= t.chunk) load_features(t, 0, scratch, phi, den, gamma, b);
    if (kept && !empty) {
        // The tile is the new memory: back to the old one, here and where it lies.
        load_taken_back(kept, t.m, tokens, d, from, x);
        await_tiles();
        __syncthreads();
        update_all<G>(t, tile, phi, scratch, den, gamma, b, x, a, d, from);
        __syncthreads();
    }
    for (int first = 0; first < t.m; first += t.chunk) {
        if (t.m > t.chunk) load_features(t, first, scratch, phi, den, gamma, b);
        await_tiles();
        __syncthreads();
#pragma unroll 1
        for (int g = 0; g < t.chunk; g += G) {
            recall<G>(tile, phi + g, t.stride(), dk, scratch, w);
            recall<G>(grad_tile, phi + g, t.stride(), dk, scratch, e);
            if (threadIdx.x < G * COLUMNS) {
                int token = first + g + threadIdx.x / COLUMNS, col = from + threadIdx.x % COLUMNS;
                bool inside = token < t.m && col < d;
                float bi = b[token], scale = 1.f / den[token], wi = w[threadIdx.x], ei = e[threadIdx.x];
                float u = (inside ? to_f32(v[(i64)token * d + col]) : 0.f) - wi * scale;
                x[(first + g) * COLUMNS + threadIdx.x] = bi * u;
                dw[(first + g) * COLUMNS + threadIdx.x] = -bi * scale * ei;
                if (inside) dv[(i64)token * d + col] = from_f32<T>(bi * ei);
                float db = ei * u, dden = bi * ei * wi * scale * scale;
#pragma unroll
                for (int mask = COLUMNS / 2; mask; mask >>= 1) {
                    db += __shfl_xor_sync(~0u, db, mask);
                    dden += __shfl_xor_sync(~0u, dden, mask);
                }
                if (threadIdx.x % COLUMNS == 0 && token < t.m) {
                    scalars[token] = db;
                    scalars[t.m + token] = dden;
                }
            }
            __syncthreads();
            // dphi over this tile's columns: a thread for a key, so that nothing has to be exchanged.
#pragma unroll 1
            for (int f = threadIdx.x; f < dk; f += THREADS) {
                float acc[G] = {};
#pragma unroll 1
                for (int c = 0; c < COLUMNS; c += 4) {
                    float4 av = *(const float4*)(tile + f * STRIDE + c), gv = *(const float4*)(grad_tile + f * STRIDE + c);
#pragma unroll
                    for (int i = 0; i < G; i++) {
                        float4 xv = *(const float4*)(x + (first + g + i) * COLUMNS + c), wv = *(const float4*)(dw + (first + g + i) * COLUMNS + c);
                        acc[i] += gv.x * xv.x + gv.y * xv.y + gv.z * xv.z + gv.w * xv.w + (av.x * wv.x + av.y * wv.y + av.z * wv.z + av.w * wv.w);
                    }
                }
#pragma unroll
                for (int i = 0; i < G; i++)
                    if (first + g + i < t.m) dphi[(i64)(first + g + i) * dk + f] = acc[i];
            }
        }
        // The next chunk's features replace these.
        if (first + t.chunk < t.m) __syncthreads();
    }
    if (!change) return;
    __syncthreads();
    update_all<G>(t, grad_tile, phi, scratch, den, gamma, b, dw, grad, d, from);
}

// Block (n, tile): dv, sums over the tile's columns of dphi [n, tile, m, dk] and of db and dden [n, tile, 2, m], and, if `change`, grad turned
// from dA' to dA. With `kept`, a is the new memory and becomes the old one.
extern "C" __global__ void __launch_bounds__(THREADS, 2) write_backward(const T* k, const T* v, const T* beta, float* a, const float* z, float* grad,
                                                                      T* dv, bool change, float* dphi, float* scalars, const int* first,
                                                                      const float* kept, int m, int dm, int nu, int d, int chunk) {
    int tiles = (d + COLUMNS - 1) / COLUMNS, tile = blockIdx.x % tiles;
    i64 n = blockIdx.x / tiles, dk = 2 * (i64)dm * nu;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * dk, m, dm, nu, chunk, false}; // gamma is not needed here
    dphi += (i64)blockIdx.x * m * dk;
    scalars += (i64)blockIdx.x * 2 * m;
    a += n * dk * d, grad += n * dk * d, v += n * m * d, dv += n * m * d;
    bool empty = first && first[n];
    if (kept) kept += n * m * d;
    if (chunk == 4)
        write_backward_tile<4>(t, v, a, grad, dv, change, dphi, scalars, empty, kept, d, tile * COLUMNS);
    else
        write_backward_tile<8>(t, v, a, grad, dv, change, dphi, scalars, empty, kept, d, tile * COLUMNS);
}

// Block n: adds the tiles' sums in order, a warp for a token, finishes dk and dbeta, and turns h from dz' to dz. Shared: r and dphi of every warp, dz, dden.
extern "C" __global__ void __launch_bounds__(THREADS) write_backward_sum(const T* k, const T* beta, const float* z, const int* first, float* h,
                                                                          const float* parts, const float* scalars, T* dk_out, T* dbeta, int m, int dm,
                                                                          int nu, int tiles, bool correction) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = 2 * dm, dk = nu * width;
    i64 n = blockIdx.x;
    float* all_r = (float*)shared_floats;
    float* r = all_r + warp * width;
    float* dphi = all_r + WARPS * width + warp * dk;
    float* dz_sum = all_r + WARPS * (width + dk);
    float* dden_of = dz_sum + dk;
    k += n * m * dm, beta += n * m, z += n * dk, h += n * dk, dk_out += n * m * dm, dbeta += n * m;
    parts += n * tiles * m * dk, scalars += n * tiles * 2 * m;
    bool corrected = correction && !(first && first[n]);
    for (int f = threadIdx.x; f < dk; f += THREADS) dz_sum[f] = h[f];
    for (int base = 0; base < m; base += WARPS) {
        int token = base + warp;
        bool inside = token < m;
        for (int c = lane; c < width; c += 32) r[c] = inside ? rectified(k + (i64)token * dm, c, dm) : 0.f;
        __syncwarp();
        float db = 0, dden = 0;
        if (inside) {
            for (int tile = 0; tile < tiles; tile++) {
                db += scalars[(i64)tile * 2 * m + token];
                dden += scalars[(i64)tile * 2 * m + m + token];
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
            for (int f = lane; f < dk; f += 32) {
                float s = gamma * h[f] + dden * z[f];
#pragma unroll 1
                for (int tile = 0; tile < tiles; tile++) s += parts[((i64)tile * m + token) * dk + f];
                dphi[f] = s;
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
