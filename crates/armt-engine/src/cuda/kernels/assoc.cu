// DPFP and the associative memory. phi(x) is made of r = relu([x, -x]), 2 dm wide: feature (j - 1) 2 dm + c is r[c] r[c - j], cyclic.
//
// Kernels that walk over A [dk, d] take it in tiles of C_COLUMNS columns. A block of 256 threads has one memory, or a share of its tiles,
// and loads the next tile while it works on this one. A tile lies in shared memory with rows of C_COLUMNS + 4 floats, so that threads on
// different rows meet different banks. Features of all tokens lie beside it as [dk][token], so that one access of 16 bytes gives a key's
// feature for four tokens; tokens are taken C_GROUP at a time.
#ifndef C_COLUMNS
#define C_COLUMNS 32
#endif
#ifndef C_GROUP
#define C_GROUP 4
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

constexpr int COLUMNS = C_COLUMNS, QUADS = COLUMNS / 4, STRIDE = COLUMNS + 4, THREADS = 256, WARPS = THREADS / 32, G = C_GROUP;
// Threads that walk down the rows of a tile side by side.
constexpr int WALKERS = THREADS / QUADS;
// Blocks on a multiprocessor: groups of eight tokens need twice the registers.
constexpr int LIGHT = G == 4 ? 3 : 2;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Starts copying columns [from, from + COLUMNS) of a [dk, d] matrix to a tile; columns past d become zero. Not inlined: its addresses would
// take registers from everything else.
__device__ __noinline__ void fetch_tile(float* tile, const float* matrix, int dk, int d, int from) {
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
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The tiles that a block works on, one after the other, in `buffers` (1 or 2) pieces of shared memory. `start` fetches a tile.
struct Tiles {
    int first, count, step, buffers;
    __device__ __forceinline__ Tiles(int d, int split, int splits, int buffers)
        : first(split), count(((d + COLUMNS - 1) / COLUMNS - split + splits - 1) / splits), step(splits), buffers(buffers) {}
    __device__ __forceinline__ int column(int i) const { return (first + i * step) * COLUMNS; }
    // Makes tile i ready, and with two buffers starts the next. All threads have finished tile i - 1.
    template <class F> __device__ __forceinline__ void ready(int i, F start) const {
        if (buffers == 1 || i == 0) {
            __syncthreads();
            start(i);
            commit();
        }
        if (buffers == 2) {
            __syncthreads();
            if (i + 1 < count) start(i + 1);
            commit();
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
    }
};

// The tokens of one memory.
struct Tokens {
    const T *k, *beta;
    const float* z;
    int m, dm, nu;
    bool corrected;
    __device__ __forceinline__ int width() const { return 2 * dm; }
    __device__ __forceinline__ int dk() const { return 2 * dm * nu; }
    // Distance between two keys' features, padded against bank conflicts.
    __device__ __forceinline__ int stride() const { return slots() == 4 ? 4 : slots() + 4; }
    // Tokens with those that fill the last group.
    __device__ __forceinline__ int slots() const { return (m + G - 1) / G * G; }
};

// What a block keeps of its tokens beside tiles, in shared memory behind them.
struct Features {
    float *phi, *scratch, *x, *dw, *sums, *den, *gamma, *b, *end;
    // `rows` of x and dw are wanted: 0, 1 or 2.
    __device__ __forceinline__ Features(const Tokens& t, float* at, int rows) {
        phi = at;
        scratch = phi + t.dk() * t.stride(); // r, then sums of the warps
        x = scratch + max(t.slots() * t.width(), WARPS * G * COLUMNS);
        dw = x + t.slots() * COLUMNS;
        sums = x + rows * t.slots() * COLUMNS;
        den = sums + 2 * G * COLUMNS;
        gamma = den + t.slots();
        b = gamma + t.slots();
        end = b + t.slots();
    }
};

// Features [dk][stride] of all tokens, and den, gamma and b of each, a warp for a token. Tokens past m get zero features. Ends with a
// barrier.
__device__ __forceinline__ void load_features(const Tokens& t, const Features& s) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = t.width(), stride = t.stride();
#pragma unroll 1
    for (int token = warp; token < t.slots(); token += WARPS) {
        float* ri = s.scratch + token * width;
        for (int c = lane; c < width; c += 32) ri[c] = token < t.m ? rectified(t.k + (i64)token * t.dm, c, t.dm) : 0.f;
        __syncwarp();
        float zk = 0, kk = 0;
#pragma unroll 1
        for (int j = 1; j <= t.nu; j++)
#pragma unroll 2
            for (int c = lane; c < width; c += 32) {
                int f = (j - 1) * width + c;
                float p = ri[c] * ri[back(c, j, width)];
                s.phi[f * stride + token] = p;
                zk += t.z[f] * p;
                kk += p * p;
            }
        float dn = warp_sum(zk) + EPSILON;
        kk = warp_sum(kk) + EPSILON;
        if (lane == 0) {
            s.den[token] = dn;
            s.gamma[token] = t.corrected ? fminf(fmaxf(1.f - dn / kk, 0.f), 1.f) : 1.f;
            s.b[token] = t.beta && token < t.m ? sigmoid_of(to_f32(t.beta[token])) : 0.f;
        }
    }
    __syncthreads();
}

// out[i][c] = sum_f phi_i[f] tile[f][c] for G tokens. Ends with a barrier.
__device__ __forceinline__ void recall(const float* tile, const float* phi, int stride, int dk, float* red, float* out) {
    int quad = threadIdx.x % QUADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float acc[G][4] = {};
#pragma unroll 2
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
__device__ __forceinline__ void update(float* tile, const float* phi, int stride, int dk, const float* x, float* to, int d, int from) {
    int quad = threadIdx.x % QUADS, col = from + quad * 4;
    float xs[G][4];
#pragma unroll
    for (int i = 0; i < G; i++) {
        float4 v = *(const float4*)(x + i * COLUMNS + quad * 4);
        xs[i][0] = v.x, xs[i][1] = v.y, xs[i][2] = v.z, xs[i][3] = v.w;
    }
#pragma unroll (G == 4 ? 2 : 1)
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

// Adds all tokens' phi_i (x) x_i to the tile and sends it to `to`.
__device__ __forceinline__ void update_all(const Tokens& t, float* tile, const Features& s, const float* x, float* to, int d, int from) {
#pragma unroll 1
    for (int g = 0; g < t.slots(); g += G) update(tile, s.phi + g, t.stride(), t.dk(), x + g * COLUMNS, g + G >= t.slots() ? to : nullptr, d, from);
}

// y = residual + qn A for the few queries of a memory: block n. Twin of read_features and a product.
extern "C" __global__ void __launch_bounds__(THREADS, LIGHT) read_few(const T* q, const float* a, const float* z, const T* residual, T* y, int m, int dm,
                                                                      int nu, int d, int buffers) {
    i64 n = blockIdx.x, dk = 2 * (i64)dm * nu;
    Tokens t = {q + n * m * dm, nullptr, z + n * dk, m, dm, nu, false};
    float* tile = (float*)shared_floats;
    Features s(t, tile + buffers * dk * STRIDE, 0);
    Tiles tiles(d, 0, 1, buffers);
    auto fetch = [&](int i) { fetch_tile(tile + i % buffers * dk * STRIDE, a + n * dk * d, (int)dk, d, tiles.column(i)); };
    load_features(t, s);
    for (int i = 0; i < tiles.count; i++) {
        tiles.ready(i, fetch);
        float* held = tile + i % buffers * dk * STRIDE;
#pragma unroll 1
        for (int g = 0; g < t.slots(); g += G) {
            recall(held, s.phi + g, t.stride(), (int)dk, s.scratch, s.sums);
            if (threadIdx.x < G * COLUMNS) {
                int token = g + threadIdx.x / COLUMNS, col = tiles.column(i) + threadIdx.x % COLUMNS;
                if (token < m && col < d) {
                    i64 at = (n * m + token) * d + col;
                    y[at] = from_f32<T>(s.sums[threadIdx.x] / s.den[token] + (residual ? to_f32(residual[at]) : 0.f));
                }
            }
        }
    }
}

// The whole way back of read_few: block n. da += sum_t qn_t (x) dy_t, dz += sum_t dden_t phi_t, and dq. What is null is not wanted.
extern "C" __global__ void __launch_bounds__(THREADS, 2) read_few_backward(const T* q, const float* a, const float* z, const T* dy, T* dq, float* da,
                                                                               float* dz, int m, int dm, int nu, int d, int buffers,
                                                                               bool add_a, bool add_z) {
    i64 n = blockIdx.x;
    int dk = 2 * dm * nu, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tokens t = {q + n * m * dm, nullptr, z + n * dk, m, dm, nu, false};
    float* tile = (float*)shared_floats;
    Features s(t, tile + buffers * dk * STRIDE, 1);
    float* dqn = s.end; // [slots][dk]
    Tiles tiles(d, 0, 1, buffers);
    a += n * dk * d;
    if (da) da += n * dk * d;
    auto fetch = [&](int i) { fetch_tile(tile + i % buffers * dk * STRIDE, a, dk, d, tiles.column(i)); };
    load_features(t, s);
    for (int i = threadIdx.x; i < t.slots() * dk; i += THREADS) dqn[i] = 0.f;
    for (int i = 0; i < tiles.count; i++) {
        tiles.ready(i, fetch);
        float* held = tile + i % buffers * dk * STRIDE;
        int from = tiles.column(i);
        // x = dy / den, so that features serve as qn.
        for (int j = threadIdx.x; j < t.slots() * COLUMNS; j += THREADS) {
            int token = j / COLUMNS, col = from + j % COLUMNS;
            s.x[j] = token < m && col < d ? to_f32(dy[(n * m + token) * d + col]) / s.den[token] : 0.f;
        }
        __syncthreads();
        // dqn over this tile's columns, divided by den: a thread for a key.
#pragma unroll 1
        for (int f = threadIdx.x; f < dk; f += THREADS)
#pragma unroll 1
            for (int g = 0; g < t.slots(); g += G) {
                float acc[G] = {};
#pragma unroll 2
                for (int c = 0; c < COLUMNS; c += 4) {
                    float4 av = *(const float4*)(held + f * STRIDE + c);
#pragma unroll
                    for (int k = 0; k < G; k++) {
                        float4 xv = *(const float4*)(s.x + (g + k) * COLUMNS + c);
                        acc[k] += av.x * xv.x + av.y * xv.y + av.z * xv.z + av.w * xv.w;
                    }
                }
#pragma unroll
                for (int k = 0; k < G; k++) dqn[(g + k) * dk + f] += acc[k];
            }
        if (!da) continue;
        __syncthreads();
        // The tile is not needed any more: dA takes its place.
        int quad = threadIdx.x % QUADS, col = from + quad * 4;
        for (int f = threadIdx.x / QUADS; f < dk; f += WALKERS) {
            float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
            const float* old = da + (i64)f * d + col;
            if (add_a && d % 4 == 0 && col < d) o = *(const float4*)old;
            if (add_a && d % 4 != 0) {
                o.x = col < d ? old[0] : 0.f, o.y = col + 1 < d ? old[1] : 0.f;
                o.z = col + 2 < d ? old[2] : 0.f, o.w = col + 3 < d ? old[3] : 0.f;
            }
            *(float4*)(held + f * STRIDE + quad * 4) = o;
        }
        update_all(t, held, s, s.x, da, d, from);
    }
    __syncthreads();
    // dphi = dqn / den + dden z with dden = -(dqn . phi) / den^2; dqn is divided by den already. A warp for a query.
    for (int i = warp; i < m; i += WARPS) {
        float* r = s.scratch + i * t.width();
        for (int c = lane; c < t.width(); c += 32) r[c] = rectified(t.k + (i64)i * dm, c, dm);
        __syncwarp();
        float* row = dqn + i * dk;
        float gk = 0;
        for (int f = lane; f < dk; f += 32) gk += row[f] * s.phi[f * t.stride() + i];
        float dden = -warp_sum(gk) / s.den[i];
        for (int f = lane; f < dk; f += 32) row[f] += dden * t.z[f];
        if (lane == 0) s.gamma[i] = dden;
        __syncwarp();
        for (int c = lane; c < dm; c += 32) {
            const T* x = t.k + (i64)i * dm;
            float g = dpfp_slope(to_f32(x[c]), c, dm, nu, [&](int j) { return r[j]; }, [&](int f) { return row[f]; });
            dq[(n * m + i) * dm + c] = from_f32<T>(g);
        }
    }
    if (!dz) return;
    __syncthreads();
    for (int f = threadIdx.x; f < dk; f += THREADS) {
        float sum = add_z ? dz[n * dk + f] : 0.f;
        for (int i = 0; i < m; i++) sum += s.gamma[i] * s.phi[f * t.stride() + i];
        dz[n * dk + f] = sum;
    }
}

// Block (n, split). The first split's block also makes z'. a_new may be a: every block keeps to its own columns. `kept`, if given, receives
// what was added to each key, [n, m, d].
extern "C" __global__ void __launch_bounds__(THREADS, LIGHT) write(const T* k, const T* v, const T* beta, const float* a, const float* z, const int* empty,
                                                                  float* a_new, float* z_new, float* kept, int m, int dm, int nu, int d,
                                                                  int splits, int buffers, bool correction) {
    int split = blockIdx.x % splits;
    i64 n = blockIdx.x / splits, dk = 2 * (i64)dm * nu;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * dk, m, dm, nu, correction && !(empty && empty[n])};
    float* tile = (float*)shared_floats;
    Features s(t, tile + buffers * dk * STRIDE, 1);
    Tiles tiles(d, split, splits, buffers);
    a += n * dk * d, a_new += n * dk * d, v += n * m * d, z_new += n * dk;
    if (kept) kept += n * m * d;
    auto fetch = [&](int i) { fetch_tile(tile + i % buffers * dk * STRIDE, a, (int)dk, d, tiles.column(i)); };
    load_features(t, s);
    if (split == 0)
        for (int f = threadIdx.x; f < dk; f += THREADS) {
            float sum = t.z[f];
            for (int i = 0; i < m; i++) sum += s.gamma[i] * s.phi[f * t.stride() + i];
            z_new[f] = sum;
        }
    for (int i = 0; i < tiles.count; i++) {
        tiles.ready(i, fetch);
        float* held = tile + i % buffers * dk * STRIDE;
#pragma unroll 1
        for (int g = 0; g < t.slots(); g += G) {
            recall(held, s.phi + g, t.stride(), (int)dk, s.scratch, s.sums);
            if (threadIdx.x < G * COLUMNS) {
                int token = g + threadIdx.x / COLUMNS, col = tiles.column(i) + threadIdx.x % COLUMNS;
                bool inside = token < m && col < d;
                float value = inside ? to_f32(v[(i64)token * d + col]) : 0.f;
                float added = s.b[token] * (value - s.sums[threadIdx.x] / s.den[token]);
                s.x[g * COLUMNS + threadIdx.x] = added;
                if (kept && inside) kept[(i64)token * d + col] = added;
            }
            __syncthreads();
        }
        update_all(t, held, s, s.x, a_new, d, tiles.column(i));
    }
}

// x = -kept, what a write added to each key of a tile's columns, ready to be added again. A barrier must follow.
__device__ __forceinline__ void load_taken_back(const Tokens& t, const float* kept, int d, int from, float* x) {
#pragma unroll 1
    for (int i = threadIdx.x; i < t.slots() * COLUMNS; i += THREADS) {
        int token = i / COLUMNS, col = from + i % COLUMNS;
        x[i] = token < t.m && col < d ? -kept[(i64)token * d + col] : 0.f;
    }
}

// Block (n, split): a = a - sum_i phi_i (x) kept_i, in place; zero if it was empty.
extern "C" __global__ void __launch_bounds__(THREADS, LIGHT) write_undo(const T* k, const T* beta, const float* z, const int* empty, const float* kept,
                                                                       float* a, int m, int dm, int nu, int d, int splits, int buffers) {
    i64 n = blockIdx.x / splits, dk = 2 * (i64)dm * nu;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * dk, m, dm, nu, false};
    float* tile = (float*)shared_floats;
    Features s(t, tile + buffers * dk * STRIDE, 1);
    Tiles tiles(d, (int)(blockIdx.x % splits), splits, buffers);
    a += n * dk * d, kept += n * m * d;
    bool clear = empty && empty[n];
    auto fetch = [&](int i) { fetch_tile(tile + i % buffers * dk * STRIDE, a, (int)dk, d, tiles.column(i)); };
    load_features(t, s);
    for (int i = 0; i < tiles.count; i++) {
        tiles.ready(i, fetch);
        float* held = tile + i % buffers * dk * STRIDE;
        load_taken_back(t, kept, d, tiles.column(i), s.x);
        if (clear) {
#pragma unroll 1
            for (int j = threadIdx.x; j < dk * STRIDE; j += THREADS) held[j] = 0.f;
#pragma unroll 1
            for (int j = threadIdx.x; j < t.slots() * COLUMNS; j += THREADS) s.x[j] = 0.f;
        }
        __syncthreads();
        update_all(t, held, s, s.x, a, d, tiles.column(i));
    }
}

// Block (n, split): dv, sums over the split's columns of dphi [n, split, m, dk] and of db and dden [n, split, 2, m], and, if `change`, grad
// turned from dA' to dA. With `kept`, a is the new memory and becomes the old one.
extern "C" __global__ void __launch_bounds__(THREADS, 2) write_backward(const T* k, const T* v, const T* beta, float* a, const float* z, float* grad,
                                                                      T* dv, bool change, float* dphi, float* scalars, const int* empty,
                                                                      const float* kept, int m, int dm, int nu, int d, int splits,
                                                                      int buffers) {
    int dk = 2 * dm * nu;
    i64 n = blockIdx.x / splits;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * dk, m, dm, nu, false}; // gamma is not needed here
    float* tile = (float*)shared_floats;
    Features s(t, tile + 2 * buffers * dk * STRIDE, 2);
    float *w = s.sums, *e = s.sums + G * COLUMNS;
    Tiles tiles(d, (int)(blockIdx.x % splits), splits, buffers);
    dphi += (i64)blockIdx.x * m * dk;
    scalars += (i64)blockIdx.x * 2 * m;
    a += n * dk * d, grad += n * dk * d, v += n * m * d, dv += n * m * d;
    if (kept) kept += n * m * d;
    auto fetch = [&](int i) {
        float* at = tile + i % buffers * 2 * dk * STRIDE;
        fetch_tile(at, a, dk, d, tiles.column(i));
        fetch_tile(at + dk * STRIDE, grad, dk, d, tiles.column(i));
    };
    load_features(t, s);
    for (int i = 0; i < tiles.count; i++) {
        tiles.ready(i, fetch);
        float *held = tile + i % buffers * 2 * dk * STRIDE, *grad_held = held + dk * STRIDE;
        int from = tiles.column(i);
        if (kept) {
            // The tile is the new memory: back to the old one, here and where it lies.
            load_taken_back(t, kept, d, from, s.x);
            if (empty && empty[n]) {
#pragma unroll 1
                for (int j = threadIdx.x; j < dk * STRIDE; j += THREADS) held[j] = 0.f;
#pragma unroll 1
                for (int j = threadIdx.x; j < t.slots() * COLUMNS; j += THREADS) s.x[j] = 0.f;
            }
            __syncthreads();
            update_all(t, held, s, s.x, a, d, from);
            __syncthreads();
        }
#pragma unroll 1
        for (int g = 0; g < t.slots(); g += G) {
            recall(held, s.phi + g, t.stride(), dk, s.scratch, w);
            recall(grad_held, s.phi + g, t.stride(), dk, s.scratch, e);
            if (threadIdx.x < G * COLUMNS) {
                int token = g + threadIdx.x / COLUMNS, col = from + threadIdx.x % COLUMNS;
                bool inside = token < m && col < d;
                float bi = s.b[token], scale = 1.f / s.den[token], wi = w[threadIdx.x], ei = e[threadIdx.x];
                float u = (inside ? to_f32(v[(i64)token * d + col]) : 0.f) - wi * scale;
                s.x[g * COLUMNS + threadIdx.x] = bi * u;
                s.dw[g * COLUMNS + threadIdx.x] = -bi * scale * ei;
                if (inside) dv[(i64)token * d + col] = from_f32<T>(bi * ei);
                float db = ei * u, dden = bi * ei * wi * scale * scale;
#pragma unroll
                for (int mask = COLUMNS / 2; mask; mask >>= 1) {
                    db += __shfl_xor_sync(~0u, db, mask);
                    dden += __shfl_xor_sync(~0u, dden, mask);
                }
                if (threadIdx.x % COLUMNS == 0 && token < m) {
                    scalars[token] = i == 0 ? db : scalars[token] + db;
                    scalars[m + token] = i == 0 ? dden : scalars[m + token] + dden;
                }
            }
            __syncthreads();
            // dphi over this tile's columns: a thread for a key, so that nothing has to be exchanged.
#pragma unroll 1
            for (int f = threadIdx.x; f < dk; f += THREADS) {
                float acc[G] = {};
#pragma unroll 1
                for (int c = 0; c < COLUMNS; c += 4) {
                    float4 av = *(const float4*)(held + f * STRIDE + c), gv = *(const float4*)(grad_held + f * STRIDE + c);
#pragma unroll
                    for (int j = 0; j < G; j++) {
                        float4 xv = *(const float4*)(s.x + (g + j) * COLUMNS + c);
                        float4 wv = *(const float4*)(s.dw + (g + j) * COLUMNS + c);
                        acc[j] += gv.x * xv.x + gv.y * xv.y + gv.z * xv.z + gv.w * xv.w + (av.x * wv.x + av.y * wv.y + av.z * wv.z + av.w * wv.w);
                    }
                }
#pragma unroll
                for (int j = 0; j < G; j++)
                    if (g + j < m) {
                        float* out = dphi + (i64)(g + j) * dk + f;
                        *out = i == 0 ? acc[j] : *out + acc[j];
                    }
            }
        }
        __syncthreads();
        if (change) update_all(t, grad_held, s, s.dw, grad, d, from);
    }
}

// Block n: adds the tiles' sums in order, a warp for a token, finishes dk and dbeta, and turns h from dz' to dz. Shared: r and dphi of every warp, dz, dden.
extern "C" __global__ void __launch_bounds__(THREADS) write_backward_sum(const T* k, const T* beta, const float* z, const int* empty, float* h,
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
    bool corrected = correction && !(empty && empty[n]);
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
