// A write of at most C_GROUP tokens and the read of at most C_QUERIES queries that follows it, in one walk over A, and the way back of both
// in one walk over A' and its gradient. A block has one memory. The pieces are in assoc_tile.cuh, the formulas in ops/memory/write_read.rs.
//
// What passes between the two goes through S_iq = phi_i . phi_q, of written token i and query q, which is made once for all tiles:
//   forward   A'^T phi_q = A^T phi_q + sum_i S_iq x_i: tokens and queries ask the same tile, and no one waits for A',
//   back      with G = dA' + sum_q phi_q (x) y_q, G^T phi_i = dA'^T phi_i + sum_q S_iq y_q: G is made where it is used, in registers.
// In the projected write it is psi_i . phi_q, once the queries' denominators are made.
constexpr int WRITTEN = C_GROUP, ASKED = C_QUERIES;
// Blocks on a multiprocessor of the way there, and of the way back.
constexpr bool FULL = PROJECTED && COLUMNS == 16 && ASKED == 16; // a third block would lack a few registers
constexpr int LIGHT = WRITTEN == 8 && !TWO_PARTS && !FULL ? 3 : 2;
constexpr int SUMS = HELD * ((PROJECTED && !PACKED ? 2 : 1) * WRITTEN + ASKED) / 8, MOST_SUMS = PROJECTED && !TWO_PARTS ? 12 : 9;
// Where a second block would lack a few registers.
constexpr bool TIGHT = (WRITTEN == 16 && SUMS >= 9) || (WHOLE && COLUMNS == 16 && (TWO_PARTS || HELD == 6)) || (WHOLE && TWO_PARTS && !HOPPER);
constexpr int HEAVY = SUMS > MOST_SUMS || (TWO_PARTS && WRITTEN == 16) || TIGHT ? 1 : 2;

// What a block has in shared memory: `tiles` tiles, features of the tokens and of the queries, S [token][query], `rows` floats for sums and
// what is made of them, and numbers of each token and query.
struct Step {
    float *tiles, *s, *rows;
    Held written, asked;
    __device__ __forceinline__ Step(const Tokens<WRITTEN>& t, int count, int floats) {
        tiles = (float*)shared_floats;
        written.phi = tiles + count * t.keys() * COLUMNS;
        written.psi = Held::behind<WRITTEN>(written.phi, t.keys());
        asked.phi = (PACKED ? written.phi : written.psi) + WRITTEN * t.keys();
        s = asked.phi + ASKED * t.keys();
        rows = s + WRITTEN * ASKED;
        // r of a token of every warp, and every warp's part of S and of `near`, before the first tile.
        constexpr int PARTS = WRITTEN * ASKED + (PROJECTED ? WRITTEN * WRITTEN : 0);
        float* end = asked.numbers(written.numbers(rows + max(floats, WARPS * max(t.width(), PARTS)), WRITTEN), ASKED);
        if (PROJECTED) written.squares<WRITTEN>(end);
        written.rows = rows;
    }
};

// Features of all tokens and queries, with the old normaliser, and S; den of the queries is then made that of z' = z + sum_i gamma_i phi_i, and
// their b is 1 / den. Ends with a barrier.
__device__ __forceinline__ void load_both(const Tokens<WRITTEN>& t, const Tokens<ASKED>& q, const Step& s) {
    int warp = threadIdx.x / 32;
    float* r = s.rows + warp * t.width();
    Normaliser z(t.z, t.dk(), t.width());
    RawToken<WRITTEN> token;
    RawToken<ASKED> query;
    token.load(t, warp), query.load(q, warp);
    load_tokens(t, s.written, z, token, SLOTS<WRITTEN>, r);
    load_tokens(q, s.asked, z, query, ASKED, r);
    __syncthreads();
    // Queries are the product's rows, tokens its columns.
    constexpr int COUNT = WRITTEN * ASKED;
    near_parts<ASKED, WRITTEN>(s.asked.phi, s.written.phi, t.keys(), s.rows);
    if (PROJECTED) near_parts<WRITTEN, WRITTEN>(s.written.phi, s.written.phi, t.keys(), s.rows + WARPS * COUNT);
    __syncthreads();
    near_sum<COUNT>(s.rows, s.s);
    if (PROJECTED) near_sum<WRITTEN * WRITTEN>(s.rows + WARPS * COUNT, s.written.near);
    __syncthreads();
    if (PROJECTED) {
        take_turns(t, s.written);
        __syncthreads();
    }
    if (threadIdx.x < ASKED) {
        float den = s.asked.den[threadIdx.x];
        for (int i = 0; i < t.m; i++) den += s.written.gamma[i] * s.s[i * ASKED + threadIdx.x];
        s.asked.den[threadIdx.x] = den;
        s.asked.b[threadIdx.x] = 1.f / den;
    }
    if (PROJECTED) {
        make_psi(t, s.written);
        int own = threadIdx.x / ASKED, query = threadIdx.x % ASKED;
        float near = 0;
        if (threadIdx.x < COUNT)
            for (int i = own; i < t.m; i++) near += s.written.turn[i * WRITTEN + own] * s.s[i * ASKED + query];
        __syncthreads();
        if (threadIdx.x < COUNT) s.s[threadIdx.x] = near;
    }
    __syncthreads();
}

// A' takes A's place, z' = z + sum_i gamma_i phi_i, y = residual + A'^T phi_q / (z' . phi_q + eps): block n, for m tokens and `count` queries.
// `kept`, if given, receives what was added to each key, [n, m, d].
KERNEL(write_read, __launch_bounds__(THREADS, LIGHT))
(const T* k, const T* v, const T* beta, float* a, const float* z, const int* empty, float* z_new, float* kept, const T* queries,
    const T* residual, T* y, int m, int count, int dm, int nu, int d, int buffers, bool correction) {
    settle(m, dm, nu, d, buffers);
    i64 n = blockIdx.x;
    bool blank = empty && empty[n];
    Tokens<WRITTEN> t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, correction && (PROJECTED || !blank), PROJECTED, blank};
    Tokens<ASKED> q = {queries + n * count * dm, nullptr, t.z, count, dm, nu, false};
    Step s(t, buffers, (m + count) * WALKERS * COLUMNS);
    Tiles tiles(d, 0, 1, buffers);
    int size = t.keys() * COLUMNS;
    // Sums of every walker for the tokens, [walker][token][column], and behind them for the queries. x takes the place of the first walker's.
    float* asked_rows = s.rows + WALKERS * m * COLUMNS;
    a += n * t.dk() * d, v += n * m * d, y += n * count * d;
    if (kept) kept += n * m * d;
    if (residual) residual += n * count * d;
    auto fetch = [&](int i) { fetch_tile(s.tiles + i % buffers * size, a, t.dk(), d, tiles.column(i)); };
    tiles.begin(fetch);
    Ahead<WRITTEN> values;
    Ahead<ASKED> old = {};
    values.load(v, m, d, tiles.column(0));
    if (residual) old.load(residual, count, d, tiles.column(0));
    fill_up(t, s.tiles, buffers);
    load_both(t, q, s);
    add_features(t, s.written, s.written.gamma, t.z, z_new + n * t.dk());
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++) {
        float* held = s.tiles + i % buffers * size;
        int from = tiles.column(i);
        bool more = i + 1 < tiles.count;
        tiles.next(i, fetch);
        tiles.ready();
        {
            Own own;
            int first = own.walker * 8;
            const float* column = recall_column(held, first, own);
            Recaller<WRITTEN> tokens(s.written.phi, first, own);
            Recaller<ASKED> asked(s.asked.phi, first, own);
#pragma unroll 2
            for (int f = 0; f < t.keys() - first; f += WALKERS * 8) {
                Operand<4> part = recall_operand(column, f);
                tokens.add(part, f);
                asked.add(part, f);
            }
            tokens.store(s.rows + own.walker * m * COLUMNS, m, own);
            asked.store(asked_rows + own.walker * count * COLUMNS, count, own);
        }
        __syncthreads();
        each_own<WRITTEN>([&](int e, int token, int column) {
            if (token >= m) return;
            int col = from + column, place = at_row(token, column);
            float w = 0;
#pragma unroll
            for (int walker = 0; walker < WALKERS; walker++) w += s.rows[walker * m * COLUMNS + place];
            float added = s.written.b[token] * (values[e] - __fdividef(w, s.written.den[token]));
            s.rows[place] = added;
            if (kept && has_column(col, d)) kept[(i64)token * d + col] = added;
        });
        if (more) values.load(v, m, d, tiles.column(i + 1));
        __syncthreads();
        // Behind the last token's x there are sums, which zero features make nothing of.
        update(t, s.written, OF_PSI, held, s.rows, false, false, a, d, from);
        each_own<ASKED>([&](int e, int query, int column) {
            int col = from + column;
            if (query >= count || !has_column(col, d)) return;
            float sum = 0;
#pragma unroll
            for (int walker = 0; walker < WALKERS; walker++) sum += asked_rows[walker * count * COLUMNS + at_row(query, column)];
            for (int token = 0; token < m; token++) sum += s.s[token * ASKED + query] * s.rows[at_row(token, column)];
            y[(i64)query * d + col] = from_f32<T>(sum * s.asked.b[query] + old[e]);
        });
        if (residual && more) old.load(residual, count, d, tiles.column(i + 1));
    }
}

// The way back of both: block n. a is A' and becomes A, taking `kept` back, or zero where it was empty; h turns from dz' to dz and, if `change`,
// grad from dA' to dA; with dk, dv and dbeta of the tokens and dq of the queries. Tiles of A' and of its gradient take turns in two pieces
// of shared memory, or with two `buffers` in three, so that the next tile of A' is on its way.
KERNEL(write_read_backward, __launch_bounds__(THREADS, HEAVY))
(const T* k, const T* v, const T* beta, float* a, const float* z, const float* z_new, const int* empty, const float* kept,
    const T* queries, const T* dy, float* grad, float* h, bool change, T* dk_out, T* dv, T* dbeta, T* dq, int m, int count,
    int dm, int nu, int d, int buffers, bool correction) {
    settle(m, dm, nu, d, buffers);
    i64 n = blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool blank = empty && empty[n];
    Tokens<WRITTEN> t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, correction && (PROJECTED || !blank), PROJECTED, blank};
    Tokens<ASKED> q = {queries + n * count * dm, nullptr, t.z, count, dm, nu, false};
    bool early = buffers == 2; // the next tile of A' has a piece of its own
    int pieces = buffers + 1, dk = t.dk(), size = t.keys() * COLUMNS;
    Step s(t, pieces, (WRITTEN * WALKERS + ASKED) * COLUMNS);
    Tiles tiles(d, 0, 1, 1);
    // x and dw of each token take the place of the first split's sums; y = dy / den of each query is behind them.
    float *x = s.rows, *dw = s.rows + WALKERS / 2 * WRITTEN * COLUMNS, *ys = s.rows + WALKERS * WRITTEN * COLUMNS;
    a += n * dk * d, grad += n * dk * d, v += n * m * d, dv += n * m * d, kept += n * m * d, dy += n * count * d;
    // Pieces take A' and dA' of a tile and then of the next one, around and around.
    auto behind = [&](int piece, int steps) { return piece + steps < pieces ? piece + steps : piece + steps - pieces; };
    auto piece_of = [&](int piece) { return s.tiles + piece * size; };
    auto fetch = [&](int piece, const float* matrix, int i) {
        if (i < tiles.count) fetch_tile(piece_of(piece), matrix, dk, d, tiles.column(i));
        commit();
    };
    fetch(0, a, 0);
    fetch(1, grad, 0);
    if (early) fetch(2, a, 1);
    Ahead<WRITTEN> values;
    Ahead<WRITTEN, float> taken;
    Ahead<ASKED> asked;
    values.load(v, m, d, 0);
    taken.load(kept, m, d, 0);
    asked.load(dy, count, d, 0);
    fill_up(t, s.tiles, pieces);
    load_both(t, q, s);
    Projections<ASKED> dqn;
    Projections<WRITTEN> dphi, dpsi;
    // A thread's share of db and dden: its elements are of the same tokens in every tile, so that lanes add up once, where there are
    // registers for it.
    constexpr int OWN = own_of(WRITTEN);
    constexpr bool ONCE = !TWO_PARTS && HELD == 3 && (WHOLE || (ASKED == 16 && COLUMNS == 32 && !PROJECTED));
    float db[OWN] = {}, dden[OWN] = {};
    auto add_up = [&](int token, int column, float to_b, float to_den) {
#pragma unroll
        for (int mask = COLUMNS / 2; mask; mask >>= 1) {
            to_b += __shfl_xor_sync(~0u, to_b, mask);
            to_den += __shfl_xor_sync(~0u, to_den, mask);
        }
        if (column == 0) s.written.db[token] += to_b, s.written.dden[token] += to_den;
    };
    int piece = 0; // that of A'
#pragma unroll 1
    for (int i = 0; i < tiles.count; i++, piece = behind(piece, 2)) {
        float *held = piece_of(piece), *grad_held = piece_of(behind(piece, 1));
        int from = tiles.column(i);
        bool more = i + 1 < tiles.count;
        if (i > 0) {
            __syncthreads(); // the last tile's pieces are free
            if (early) {
                fetch(behind(piece, 2), a, i + 1);
            } else {
                fetch(piece, a, i);
                fetch(behind(piece, 1), grad, i);
            }
        }
        // y serves features as qn does, and dqn is divided by den.
        each_own<ASKED>([&](int e, int query, int column) { ys[at_row(query, column)] = asked[e] * s.asked.b[query]; });
        each_own<WRITTEN>([&](int e, int token, int column) { x[at_row(token, column)] = blank ? 0.f : -taken[e]; });
        if (more) {
            asked.load(dy, count, d, tiles.column(i + 1));
            taken.load(kept, m, d, tiles.column(i + 1));
        }
        if (early) wait<2>();
        else wait<1>();
        __syncthreads();
        // The tile is A': what the queries make of it, and back to A, here and where it lies.
        {
            Own own;
            Projector<ASKED> by_y(ys, own, ALL);
            Updater<WRITTEN> back(x, own, OF_PSI);
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                int first = dqn.key(j, own);
                if (!has_key(first, t.keys())) continue;
                __syncwarp(); // stores may have parted the lanes
                float4 tile[2];
                load_own(tile, held, first, own);
                by_y.add(dqn.sum[j], tile);
                if (blank) tile[0] = tile[1] = make_float4(0.f, 0.f, 0.f, 0.f);
                back.add(tile, s.written.features(OF_PSI), first, own);
                store_own(tile, held, first, own);
                save_own(tile, a, dk, d, Place(d, from, first, own), first, own);
            }
        }
        if (early) wait<1>();
        else wait<0>();
        __syncthreads();
        recall<2>(t, s.written, held, (int)(grad_held - held));
        __syncthreads();
        each_own<WRITTEN>([&](int own, int token, int column) {
            if (token >= SLOTS<WRITTEN>) return;
            int col = from + column, place = at_row(token, column);
            float b = s.written.b[token], scale = __fdividef(1.f, s.written.den[token]);
            float w = recalled<2>(t, s.written, 0, place), e = recalled<2>(t, s.written, 1, place);
            const float* turned[COLUMNS / 8]; // where a column is in rows whose swizzle is the same
#pragma unroll
            for (int turn = 0; turn < COLUMNS / 8; turn++) turned[turn] = ys + at_row(2 * turn, column) - 2 * turn * COLUMNS;
            auto y = [&](int query) { return turned[query / 2 % (COLUMNS / 8)][query * COLUMNS]; };
#pragma unroll
            for (int query = 0; query < ASKED; query += 4) {
                float4 near = *(const float4*)(s.s + token * ASKED + query);
                e += near.x * y(query) + near.y * y(query + 1);
                e += near.z * y(query + 2) + near.w * y(query + 3);
            }
            float u = values[own] - w * scale;
            x[place] = b * u;
            dw[place] = -b * scale * e;
            if (token < m && has_column(col, d)) dv[(i64)token * d + col] = from_f32<T>(b * e);
            float to_b = e * u, to_den = b * e * w * scale * scale;
            if (ONCE) db[own] += to_b, dden[own] += to_den;
            else add_up(token, column, to_b, to_den);
        });
        if (more) values.load(v, m, d, tiles.column(i + 1));
        __syncthreads();
        // dphi += A dw + G x, where G x is dpsi in the projected write, and G becomes dA.
        dphi.add(held, dw, t.keys(), OF_PHI);
        if (early && more) {
            __syncthreads(); // A's piece is free: the next tile's gradient need not wait for this one's
            fetch(piece, grad, i + 1);
        }
        {
            Own own;
            Projector<WRITTEN> by_x(x, own, OF_PSI);
            Updater<ASKED> read(ys, own, ALL);
            Updater<WRITTEN> wrote(dw, own, OF_PHI);
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                int first = dphi.key(j, own);
                if (!has_key(first, t.keys())) continue;
                __syncwarp(); // stores may have parted the lanes
                float4 tile[2];
                load_own(tile, grad_held, first, own);
                read.add(tile, s.asked.phi, first, own);
                if constexpr (PROJECTED && !PACKED) by_x.add(dpsi.sum[j], tile);
                else by_x.add(dphi.sum[j], tile);
                if (change) {
                    wrote.add(tile, s.written.phi, first, own);
                    save_own(tile, grad, dk, d, Place(d, from, first, own), first, own);
                }
            }
        }
    }
    if (ONCE) each_own<WRITTEN>([&](int own, int token, int column) { add_up(token, column, db[own], dden[own]); });
    // What follows takes its pointers anew: they would be in the way above.
    h += n * dk, z += n * dk, z_new += n * dk;
    // The sides' sums are added in order where the tiles were: [query][dk], then [token][dk]. Behind the first piece there is room for dz', z and z', which
    // are on their way meanwhile.
    float *asked_sums = s.tiles, *written_sums = s.tiles + count * dk;
    float *dz = s.tiles + size, *old_z = dz + dk, *now_z = old_z + dk;
    static_assert(COLUMNS == 16 || WRITTEN + ASKED <= COLUMNS, "sums fill the first piece");
    __syncthreads();
    if (COLUMNS == 32) {
        for (int f = threadIdx.x; f < dk; f += THREADS) {
            copy_one(shared_address(dz + f), h + f, 4);
            copy_one(shared_address(old_z + f), z + f, 4);
            copy_one(shared_address(now_z + f), z_new + f, 4);
        }
        commit();
    } else {
        dz = h, old_z = const_cast<float*>(z), now_z = const_cast<float*>(z_new); // sums of two pieces leave no room
    }
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        if (side > 0) __syncthreads();
        if (warp % SIDES != side) continue;
        dqn.each([&](int query, int key, float value) {
            if (query < count && has_key(key, dk)) asked_sums[query * dk + key] = side == 0 ? value : asked_sums[query * dk + key] + value;
        });
        dphi.each([&](int token, int key, float value) {
            if (PACKED && token >= SLOTS<WRITTEN>) {
                if (!has_key(key, t.keys())) return;
                float* place = s.written.phi + at_feature<WRITTEN>(key, token);
                *place = side == 0 ? value : *place + value;
            } else if (token < m && has_key(key, dk)) written_sums[token * dk + key] = side == 0 ? value : written_sums[token * dk + key] + value;
        });
        if constexpr (PROJECTED && !PACKED)
            dpsi.each([&](int token, int key, float value) {
                if (!has_key(key, t.keys())) return;
                float* place = s.written.psi + at_feature<WRITTEN>(key, token);
                *place = side == 0 ? value : *place + value;
            });
    }
    wait<0>();
    __syncthreads();
    // From dphi of a token, `row`, through DPFP, by a warp.
    auto slopes = [&](const T* token, const float* row, T* out) {
        float* r = s.rows + warp * t.width();
        __syncwarp(); // the last one's are done with
        for (int c = lane; c < t.width(); c += 32) r[c] = rectified(token, c, dm);
        __syncwarp();
        for (int c = lane; c < dm; c += 32) {
            float slope = dpfp_slope(to_f32(token[c]), c, dm, nu, [&](int j) { return r[j]; }, [&](int f) { return row[f]; });
            out[c] = from_f32<T>(slope);
        }
    };
    // dphi = dqn / den + dden z' with dden = -(dqn . phi) / den^2. A warp for a query.
    for (int i = warp; i < count; i += WARPS) {
        float *row = asked_sums + i * dk, gk = 0;
        for (int f = lane; f < dk; f += 32) gk += row[f] * s.asked.phi[at_feature<ASKED>(f, i)];
        float dden = -warp_sum(gk) * s.asked.b[i];
        for (int f = lane; f < dk; f += 32) row[f] += dden * now_z[f];
        if (lane == 0) s.asked.dden[i] = dden;
        slopes(queries + (n * count + i) * dm, row, dq + (n * count + i) * dm);
    }
    __syncthreads();
    add_features(q, s.asked, s.asked.dden, dz, dz); // all of dz' from here on
    if constexpr (PROJECTED) turns_back(t, s.written, written_sums);
    else __syncthreads();
    for (int i = warp; i < m; i += WARPS) {
        float *row = written_sums + i * dk, gamma = s.written.gamma[i], dden = s.written.dden[i], b = s.written.b[i];
        for (int f = lane; f < dk; f += 32) row[f] += PROJECTED ? gamma * dz[f] : gamma * dz[f] + dden * old_z[f];
        slopes(k + (n * m + i) * dm, row, dk_out + (n * m + i) * dm);
        if (lane == 0) dbeta[n * m + i] = from_f32<T>(s.written.db[i] * b * (1.f - b));
    }
    if (PROJECTED) { // z' has nothing of z but z itself
        if (COLUMNS == 32)
            for (int f = threadIdx.x; f < dk; f += THREADS) h[f] = dz[f];
        return;
    }
    __syncthreads();
    add_features(t, s.written, s.written.dden, dz, h);
}
