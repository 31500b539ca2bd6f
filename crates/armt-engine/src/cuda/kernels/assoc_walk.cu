// The kernels of the associative memory that walk over A once, for tokens in groups of C_GROUP: the write, its undoing and its way back, and
// the read of a few queries and its way back. Their pieces are in assoc_tile.cuh.
constexpr int GROUP = C_GROUP;
// Blocks on a multiprocessor of the writes, and of kernels with sums over columns. Where many are held, shared memory has room for one, or,
// where they are of two kinds, the registers.
constexpr bool TIGHT = PROJECTED && WHOLE && TWO_PARTS && GROUP == 16 && (COLUMNS == 16 || !HOPPER); // a second block would lack a few registers
constexpr int LIGHT = GROUP == 8 ? 3 : 2, HEAVY = HELD * GROUP / 8 > 6 || (PROJECTED && HELD == 6) || TIGHT ? 1 : 2;

// The tokens' features and, in the projected write, what turns make of them. Ends with a barrier.
__device__ __forceinline__ void load_written(const Tokens<GROUP>& t, const Held& s) {
    load_features(t, s);
    if (PROJECTED) load_turns(t, s);
}

// Projections with sums in memory, out [m][dk], for keys or tokens too many to be held. They begin with what is there, if `more`.
__device__ __forceinline__ void project_to(const Tokens<GROUP>& t, const float* tile, const float* x, float* out, bool more) {
    Own own;
#pragma unroll 1
    for (int group = 0; group < t.groups(); group++) {
        Projector<GROUP> p(x + group * GROUP * COLUMNS, own, ALL);
#pragma unroll 1
        for (int first = own.walker * 16; first < t.keys(); first += WALKERS * 16) {
            float sum[GROUP / 8][4] = {};
            float4 v[2];
            __syncwarp(); // stores may have parted the lanes
            load_own(v, tile, first, own);
            p.add(sum, v);
            Projections<GROUP>::visit(sum, first, own, [&](int token, int key, float value) {
                token += group * GROUP;
                if (token >= t.m || key >= t.dk()) return;
                float* place = out + (i64)token * t.dk() + key;
                *place = more ? *place + value : value;
            });
        }
    }
}

#if !C_PROJECTED // a read is the same after either write
// y = residual + qn A for the few queries of a memory, at most one group: block n. Twin of read_features and a product.
KERNEL(read_few, __launch_bounds__(THREADS, 3))
(const T* q, const float* a, const float* z, const T* residual, T* y, int m, int dm, int nu, int d, int buffers) {
    settle(dm, nu, d, buffers);
    i64 n = blockIdx.x;
    Tokens<GROUP> t = {q + n * m * dm, nullptr, z + n * 2 * dm * nu, m, dm, nu, false};
    Held s(t, buffers, 1, true);
    Tiles tiles(d, 0, 1, buffers);
    int size = t.keys() * COLUMNS;
    a += n * t.dk() * d, y += n * m * d;
    if (residual) residual += n * m * d;
    auto fetch = [&](int i) { fetch_tile(s.tiles + i % buffers * size, a, t.dk(), d, tiles.column(i)); };
    tiles.begin(fetch);
    Ahead<GROUP> old = {};
    if (residual) old.load(residual, m, d, tiles.column(0));
    fill_up(t, s.tiles, buffers);
    load_features(t, s);
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++) {
        int from = tiles.column(i);
        tiles.next(i, fetch);
        tiles.ready();
        recall<1>(t, s, s.tiles + i % buffers * size, 0);
        __syncthreads();
        each_own<GROUP>([&](int e, int token, int column) {
            int col = from + column;
            float value = recalled<1>(t, s, 0, at_row(token, column)) / s.den[token] + old[e];
            if (token < m && has_column(col, d)) y[(i64)token * d + col] = from_f32<T>(value);
        });
        if (residual && i + 1 < tiles.count) old.load(residual, m, d, tiles.column(i + 1));
    }
}

#if C_HELD > 0
// The whole way back of read_few: block n. da += sum_t qn_t (x) dy_t, dz += sum_t dden_t phi_t, and dq. What is null is not wanted.
KERNEL(read_few_backward, __launch_bounds__(THREADS, HEAVY))
(const T* q, const float* a, const float* z, const T* dy, T* dq, float* da, float* dz, int m, int dm, int nu, int d,
    int buffers, bool add_a, bool add_z) {
    settle(dm, nu, d, buffers);
    i64 n = blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tokens<GROUP> t = {q + n * m * dm, nullptr, z + n * 2 * dm * nu, m, dm, nu, false};
    Held s(t, buffers, 2, false);
    Tiles tiles(d, 0, 1, buffers);
    int dk = t.dk(), size = t.keys() * COLUMNS;
    a += n * dk * d, dy += n * m * d;
    if (da) da += n * dk * d;
    auto fetch = [&](int i) {
        float* to = s.tiles + i % buffers * 2 * size;
        fetch_tile(to, a, dk, d, tiles.column(i));
        if (da && add_a) fetch_tile(to + size, da, dk, d, tiles.column(i));
    };
    tiles.begin(fetch);
    Ahead<GROUP> grad;
    grad.load(dy, m, d, tiles.column(0));
    fill_up(t, s.tiles, 2 * buffers);
    load_features(t, s);
    Projections<GROUP> dqn;
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++) {
        float* held = s.tiles + i % buffers * 2 * size;
        tiles.next(i, fetch);
        // x = dy / den, so that features serve as qn, and dqn is divided by den.
        each_own<GROUP>([&](int e, int token, int column) { s.rows[at_row(token, column)] = grad[e] / s.den[token]; });
        if (i + 1 < tiles.count) grad.load(dy, m, d, tiles.column(i + 1));
        tiles.ready();
        dqn.add(held, s.rows, t.keys(), ALL);
        if (da) update(t, s, ALL, held + size, s.rows, !add_a, false, da, d, tiles.column(i));
    }
    // What follows takes its pointers anew: they would be in the way above.
    q += n * m * dm, dq += n * m * dm, z += n * dk;
    // The sides' sums are added in order where the tiles were: [token][dk].
    float* sums = s.tiles;
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        __syncthreads();
        if (warp % SIDES == side)
            dqn.each([&](int token, int key, float value) {
                if (has_key(key, dk)) sums[token * dk + key] = side == 0 ? value : sums[token * dk + key] + value;
            });
    }
    __syncthreads();
    // dphi = dqn / den + dden z with dden = -(dqn . phi) / den^2. A warp for a query.
    for (int i = warp; i < m; i += WARPS) {
        const T* x = q + (i64)i * dm;
        float *r = s.rows + i * t.width(), *row = sums + i * dk;
        for (int c = lane; c < t.width(); c += 32) r[c] = rectified(x, c, dm);
        float gk = 0;
        for (int f = lane; f < dk; f += 32) gk += row[f] * s.phi[at_feature<GROUP>(f, i)];
        float dden = -warp_sum(gk) / s.den[i];
        for (int f = lane; f < dk; f += 32) row[f] += dden * z[f];
        if (lane == 0) s.dden[i] = dden;
        __syncwarp();
        for (int c = lane; c < dm; c += 32) {
            float g = dpfp_slope(to_f32(x[c]), c, dm, nu, [&](int j) { return r[j]; }, [&](int f) { return row[f]; });
            dq[i * dm + c] = from_f32<T>(g);
        }
    }
    if (!dz) return;
    dz += n * dk;
    __syncthreads();
    add_features(t, s, s.dden, add_z ? dz : nullptr, dz);
}
#endif
#endif

// Block (n, split). The last split, which has the fewest tiles, also makes z'. a_new may be a: every block keeps to its own columns. If
// given, `kept` receives what was added to each key, [n, m, d], and `rounded` the new memory in the tokens' type.
KERNEL(write, __launch_bounds__(THREADS, LIGHT))
(const T* k, const T* v, const T* beta, const float* a, const float* z, const int* empty, float* a_new, float* z_new, float* kept,
    T* rounded, int m, int dm, int nu, int d, int splits, int buffers, bool correction) {
    settle(m, dm, nu, d, buffers);
    int split = blockIdx.x % splits;
    i64 n = blockIdx.x / splits;
    bool blank = empty && empty[n];
    Tokens<GROUP> t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, correction && (PROJECTED || !blank), PROJECTED, blank};
    Held s(t, buffers, 1, true);
    Tiles tiles(d, split, splits, buffers);
    int size = t.keys() * COLUMNS;
    a += n * t.dk() * d, a_new += n * t.dk() * d, v += n * m * d;
    if (kept) kept += n * m * d;
    if (rounded) rounded += n * t.dk() * d;
    auto fetch = [&](int i) { fetch_tile(s.tiles + i % buffers * size, a, t.dk(), d, tiles.column(i)); };
    tiles.begin(fetch);
    Ahead<GROUP> values;
    values.load(v, m, d, tiles.column(0));
    fill_up(t, s.tiles, buffers);
    load_written(t, s);
    if (split == splits - 1) add_features(t, s, s.gamma, t.z, z_new + n * t.dk());
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++) {
        float* held = s.tiles + i % buffers * size;
        int from = tiles.column(i);
        tiles.next(i, fetch);
        tiles.ready();
        recall<1>(t, s, held, 0);
        __syncthreads();
#pragma unroll 1
        for (int group = 0; group < t.groups(); group++)
            each_own<GROUP>([&](int e, int token, int column) {
                token += group * GROUP;
                int col = from + column, place = at_row(token, column);
                float added = s.b[token] * (values.get(e, group, v, token, col, m, d) - __fdividef(recalled<1>(t, s, 0, place), s.den[token]));
                s.rows[place] = added;
                if (kept && token < m && has_column(col, d)) kept[(i64)token * d + col] = added;
            });
        if (i + 1 < tiles.count) values.load(v, m, d, tiles.column(i + 1));
        __syncthreads();
        update(t, s, OF_PSI, held, s.rows, false, false, a_new, d, from, rounded);
    }
}

// rows = -kept, what a write added to each key in a tile's columns, ready to be added again; zero, if `blank`. `ahead` has the first group's.
__device__ __forceinline__ void take_back(const Tokens<GROUP>& t, const Held& s, const Ahead<GROUP, float>& ahead, const float* kept, bool blank,
                                          int d, int from) {
#pragma unroll 1
    for (int group = 0; group < t.groups(); group++)
        each_own<GROUP>([&](int e, int token, int column) {
            token += group * GROUP;
            s.rows[at_row(token, column)] = blank ? 0.f : -ahead.get(e, group, kept, token, from + column, t.m, d);
        });
}

// Block (n, split): a = a - sum_i psi_i (x) kept_i, in place; zero if it was empty.
KERNEL(write_undo, __launch_bounds__(THREADS, LIGHT))
(const T* k, const T* beta, const float* z, const int* empty, const float* kept, float* a, int m, int dm, int nu, int d, int splits,
    int buffers) {
    settle(m, dm, nu, d, buffers);
    i64 n = blockIdx.x / splits;
    Tokens<GROUP> t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, false, PROJECTED};
    Held s(t, buffers, 1, false);
    Tiles tiles(d, (int)(blockIdx.x % splits), splits, buffers);
    int size = t.keys() * COLUMNS;
    a += n * t.dk() * d, kept += n * m * d;
    bool blank = empty && empty[n];
    auto fetch = [&](int i) { fetch_tile(s.tiles + i % buffers * size, a, t.dk(), d, tiles.column(i)); };
    tiles.begin(fetch);
    Ahead<GROUP, float> taken;
    taken.load(kept, m, d, tiles.column(0));
    load_written(t, s);
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++) {
        int from = tiles.column(i);
        tiles.next(i, fetch);
        take_back(t, s, taken, kept, blank, d, from);
        if (i + 1 < tiles.count) taken.load(kept, m, d, tiles.column(i + 1));
        tiles.ready();
        update(t, s, OF_PSI, s.tiles + i % buffers * size, s.rows, blank, false, a, d, from);
    }
}

// Block (n, split): dv, sums over the columns of each side of the split's tiles of dphi [n, split, side, m, dk], and over all of them of db
// and dden [n, split, 2, m], and, if `change`, grad turned from dA' to dA. With `kept`, a is the new memory and becomes the old one. In the
// projected write dphi is [n, split, side, 2, m, dk]: what comes back to phi from A, and what comes back to psi.
KERNEL(write_backward, __launch_bounds__(THREADS, HEAVY))
(const T* k, const T* v, const T* beta, float* a, const float* z, float* grad, T* dv, bool change, float* dphi, float* scalars,
    const int* empty, const float* kept, int m, int dm, int nu, int d, int splits, int buffers) {
    settle(m, dm, nu, d, buffers);
    i64 n = blockIdx.x / splits;
    Tokens<GROUP> t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, false, PROJECTED}; // gamma is not needed here
    Held s(t, buffers, 2, true);
    Tiles tiles(d, (int)(blockIdx.x % splits), splits, buffers);
    int dk = t.dk(), size = t.keys() * COLUMNS;
    // x and dw of each token take the place of the first split's sums.
    float *x = s.rows, *dw = s.rows + WALKERS / 2 * t.slots() * COLUMNS;
    a += n * dk * d, grad += n * dk * d, v += n * m * d, dv += n * m * d;
    if (kept) kept += n * m * d;
    bool blank = empty && empty[n];
    constexpr int KINDS = PROJECTED ? 2 : 1;
    auto own_dphi = [&] { return dphi + ((i64)blockIdx.x * SIDES + threadIdx.x / 32 % SIDES) * KINDS * m * dk; };
    auto own_dpsi = [&] { return own_dphi() + m * dk; };
    auto fetch = [&](int i) {
        float* to = s.tiles + i % buffers * 2 * size;
        fetch_tile(to, a, dk, d, tiles.column(i));
        fetch_tile(to + size, grad, dk, d, tiles.column(i));
    };
    tiles.begin(fetch);
    Ahead<GROUP> values;
    Ahead<GROUP, float> taken = {};
    values.load(v, m, d, tiles.column(0));
    if (kept) taken.load(kept, m, d, tiles.column(0));
    fill_up(t, s.tiles, 2 * buffers);
    load_written(t, s);
    Projections<GROUP> projections, of_psi;
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++) {
        float *held = s.tiles + i % buffers * 2 * size, *grad_held = held + size;
        int from = tiles.column(i);
        bool more = i + 1 < tiles.count;
        tiles.next(i, fetch);
        if (kept) {
            take_back(t, s, taken, kept, blank, d, from);
            if (more) taken.load(kept, m, d, tiles.column(i + 1));
        }
        tiles.ready();
        if (kept) {
            // The tile is the new memory: back to the old one, here and where it lies.
            update(t, s, OF_PSI, held, s.rows, blank, true, a, d, from);
            __syncthreads();
        }
        recall<2>(t, s, held, size);
        __syncthreads();
#pragma unroll 1
        for (int group = 0; group < t.groups(); group++)
            each_own<GROUP>([&](int own, int token, int column) {
                token += group * GROUP;
                int col = from + column, place = at_row(token, column);
                float b = s.b[token], scale = __fdividef(1.f, s.den[token]), w = recalled<2>(t, s, 0, place), e = recalled<2>(t, s, 1, place);
                float u = values.get(own, group, v, token, col, m, d) - w * scale;
                x[place] = b * u;
                dw[place] = -b * scale * e;
                if (token < m && has_column(col, d)) dv[(i64)token * d + col] = from_f32<T>(b * e);
                float db = e * u, dden = b * e * w * scale * scale;
#pragma unroll
                for (int mask = COLUMNS / 2; mask; mask >>= 1) {
                    db += __shfl_xor_sync(~0u, db, mask);
                    dden += __shfl_xor_sync(~0u, dden, mask);
                }
                if (column == 0) s.db[token] += db, s.dden[token] += dden;
            });
        if (more) values.load(v, m, d, tiles.column(i + 1));
        __syncthreads();
        if (HELD) {
            if constexpr (PROJECTED) of_psi.add(grad_held, x, t.keys(), ALL);
            else projections.add(grad_held, x, t.keys(), ALL);
            projections.add(held, dw, t.keys(), ALL);
        } else {
            project_to(t, grad_held, x, PROJECTED ? own_dpsi() : own_dphi(), i > 0);
            project_to(t, held, dw, own_dphi(), !PROJECTED || i > 0);
        }
        if (change) update(t, s, OF_PHI, grad_held, dw, false, false, grad, d, from);
    }
    if (HELD)
        projections.each([&](int token, int key, float value) {
            if (token < m && has_key(key, dk)) own_dphi()[(i64)token * dk + key] = value;
        });
    if constexpr (HELD && PROJECTED)
        of_psi.each([&](int token, int key, float value) {
            if (token < m && has_key(key, dk)) own_dpsi()[(i64)token * dk + key] = value;
        });
    __syncthreads();
    scalars += (i64)blockIdx.x * 2 * m;
    for (int i = threadIdx.x; i < m; i += THREADS) scalars[i] = s.db[i], scalars[m + i] = s.dden[i];
}

#if C_PROJECTED
// What is left of the projected write's way back: block n adds its sums, `count` of both kinds of dphi [n, count, 2, m, dk] and `splits` of db and
// dden [n, splits, 2, m], in order, takes psi's way back and finishes dk and dbeta. dz is dz' here, so that h is only read.
KERNEL(projected_backward_sum, __launch_bounds__(THREADS, 2))
(const T* k, const T* beta, const float* z, const int* empty, const float* h, const float* parts, const float* scalars,
    T* dk_out, T* dbeta, int m, int dm, int nu, int count, int splits, bool correction) {
    if (WHOLE) m = TOKENS, dm = DM, nu = NU;
    i64 n = blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tokens<GROUP> t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, correction, PROJECTED, empty && empty[n]};
    Held s(t, 1, 1, false);
    int dk = t.dk(), keys = t.keys();
    float* dphi = s.tiles; // [token][dk]
    h += n * dk, parts += n * count * 2 * m * dk, scalars += n * splits * 2 * m;
    load_written(t, s);
#pragma unroll 2
    for (int i = threadIdx.x; i < GROUP * keys; i += THREADS) {
        int token = i / keys, f = i % keys;
        float sum = 0, of_psi = 0;
        if (token < m && f < dk) {
            const float* own = parts + (i64)token * dk + f;
            sum = s.gamma[token] * h[f];
#pragma unroll 4
            for (int part = 0; part < count; part++) {
                sum += own[(i64)part * 2 * m * dk];
                of_psi += own[((i64)part * 2 + 1) * m * dk];
            }
            dphi[token * dk + f] = sum;
        }
        s.psi[at_feature<GROUP>(f, token)] = of_psi;
    }
    if (threadIdx.x < m)
        for (int split = 0; split < splits; split++) {
            s.db[threadIdx.x] += scalars[(i64)split * 2 * m + threadIdx.x];
            s.dden[threadIdx.x] += scalars[(i64)split * 2 * m + m + threadIdx.x];
        }
    turns_back(t, s, dphi);
    for (int i = warp; i < m; i += WARPS) {
        const T* token = t.k + i * dm;
        float* r = s.rows + i * t.width();
        for (int c = lane; c < t.width(); c += 32) r[c] = rectified(token, c, dm);
        __syncwarp();
        for (int c = lane; c < dm; c += 32) {
            float slope = dpfp_slope(to_f32(token[c]), c, dm, nu, [&](int j) { return r[j]; }, [&](int f) { return dphi[i * dk + f]; });
            dk_out[(n * m + i) * dm + c] = from_f32<T>(slope);
        }
        float b = s.b[i];
        if (lane == 0) dbeta[n * m + i] = from_f32<T>(s.db[i] * b * (1.f - b));
    }
}
#endif
