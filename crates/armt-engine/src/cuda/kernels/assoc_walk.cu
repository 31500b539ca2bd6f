// The kernels of the associative memory that walk over A [dk, d] once, in tiles of C_COLUMNS columns. A block of 256 threads has one memory,
// or a share of its tiles, and the next tile is on its way while it works on this one.
//
// Products are taken on tensor cores. For tokens in f32 each operand is two tf32 parts, x = hi + lo: hi hi + hi lo + lo hi is as good as f32.
// For tokens in bf16 it is one, rounded: 2^-12 of it, where the tokens themselves are off by 2^-9. A stays f32, and what a write added is taken
// back with the same rounding. They are of three kinds, for C_GROUP tokens (8 or 16; more come in groups) and blocks of 16 keys or columns:
//   recall   tile^T phi [columns, tokens], summed over keys; the keys are dealt to the warps, whose sums are added in order,
//   update   tile += phi x [keys, columns], summed over tokens,
//   project  tile x^T [keys, tokens], summed over columns. It stays in registers from tile to tile, C_HELD blocks of keys in a warp; 0
//            is for keys too many for that, whose sums are in memory.
// In update and project a lane has the same elements of a tile: rows g and g + 8 of a block and columns 4t to 4t + 3 of 16, where
// g = lane / 4 and t = lane % 4. Operands' columns are taken in an order that makes them so.
//
// Everything in shared memory is swizzled in eighths of a row, so that no access meets a bank twice and nothing is spent on padding. Keys are
// filled up with zero rows to a multiple of 16, tokens with zero features.
constexpr int COLUMNS = C_COLUMNS, GROUP = C_GROUP, HELD = C_HELD, THREADS = 256, WARPS = THREADS / 32;
constexpr float EPSILON = 1e-5f;
constexpr bool TWO_PARTS = sizeof(T) == 4;
// Blocks of 16 columns of a tile, and the warps of each of them, which walk down the keys side by side.
constexpr int SIDES = COLUMNS / 16, WALKERS = WARPS / SIDES;
// Eights of tokens of a group, and a thread's elements of a group's rows in a tile.
constexpr int EIGHTS = GROUP / 8, OWN = (GROUP * COLUMNS + THREADS - 1) / THREADS;
// Blocks on a multiprocessor of the writes, and of kernels with sums over columns. Where many are held, shared memory has room for one.
constexpr int LIGHT = GROUP == 8 ? 3 : 2, HEAVY = HELD * EIGHTS > 6 ? 1 : 2;

extern __shared__ float4 shared_floats[];

// threadIdx.x, asked for anew, so that the many offsets made of it do not stay in registers from tile to tile.
__device__ __forceinline__ u32 thread() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// Offset of an element of a tile.
__device__ __forceinline__ int at(int key, int column) {
    int turn = COLUMNS == 32 ? (key & 1) << 1 | (key >> 1 & 1) : key >> 1 & 1;
    return key * COLUMNS + (column ^ turn << 3);
}
// Offset of an element of tokens' rows in a tile's columns.
__device__ __forceinline__ int at_row(int token, int column) { return token * COLUMNS + (column ^ (token >> 1 & COLUMNS / 8 - 1) << 3); }
// Offset of a feature among those of a token's group.
__device__ __forceinline__ int at_feature(int key, int token) { return key * GROUP + (token ^ (GROUP == 16 ? (key >> 1 & 1) << 3 : 0)); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Start a copy; of zero bytes, it is zero.
__device__ __forceinline__ void copy_four(u32 to, const float* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_one(u32 to, const float* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of copies are under way.
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A lane's N elements of an operand. In two parts, hi is cut off and lo is the rest, rounded. Bits below tf32's are not looked at.
template <int N> struct Operand {
    u32 hi[N], lo[N];
    __device__ __forceinline__ void set(int i, float x) {
        if (TWO_PARTS) {
            hi[i] = __float_as_uint(x) & 0xffffe000u;
            lo[i] = __float_as_uint(x - __uint_as_float(hi[i])) + 0x1000u;
        } else {
            hi[i] = __float_as_uint(x) + 0x1000u;
        }
    }
};
// c += a b; what is small of it may be added to `rest` instead.
__device__ __forceinline__ void multiply(float (&c)[4], float (&rest)[4], const Operand<4>& a, const Operand<2>& b) {
    if (TWO_PARTS) {
        mma(rest, a.lo, b.hi);
        mma(rest, a.hi, b.lo);
    }
    mma(c, a.hi, b.hi);
}
__device__ __forceinline__ void multiply(float (&c)[4], const Operand<4>& a, const Operand<2>& b) { multiply(c, c, a, b); }

// Starts copying columns [from, from + COLUMNS) of a [dk, d] matrix to a tile; columns past d become zero.
__device__ __forceinline__ void fetch_tile(float* tile, const float* matrix, int dk, int d, int from) {
    // A step keeps the swizzle.
    u32 own = thread();
    if (d % 4 == 0) {
        constexpr int STEP = THREADS * 4 / COLUMNS;
        int f = own * 4 / COLUMNS, c = own * 4 % COLUMNS;
        bool inside = from + c < d;
        const float* source = matrix + (i64)f * d + (inside ? from + c : 0);
        u32 to = shared_address(tile + at(f, c));
        for (; f < dk; f += STEP, source += (i64)STEP * d, to += STEP * COLUMNS * 4) copy_four(to, source, inside ? 16 : 0);
    } else {
        constexpr int STEP = THREADS / COLUMNS;
        int f = own / COLUMNS, c = own % COLUMNS;
        bool inside = from + c < d;
        const float* source = matrix + (i64)f * d + (inside ? from + c : 0);
        u32 to = shared_address(tile + at(f, c));
        for (; f < dk; f += STEP, source += (i64)STEP * d, to += STEP * COLUMNS * 4) copy_one(to, source, inside ? 4 : 0);
    }
}

// The tokens of one memory.
struct Tokens {
    const T *k, *beta;
    const float* z;
    int m, dm, nu;
    bool corrected;
    __device__ __forceinline__ int width() const { return 2 * dm; }
    __device__ __forceinline__ int dk() const { return 2 * dm * nu; }
    // Keys and tokens with those that fill up.
    __device__ __forceinline__ int keys() const { return (dk() + 15) / 16 * 16; }
    __device__ __forceinline__ int groups() const { return (m + GROUP - 1) / GROUP; }
    __device__ __forceinline__ int slots() const { return groups() * GROUP; }
};

// What a block has in shared memory: `buffers` times `matrices` tiles, and behind them what it keeps of its tokens. `rows` are
// [token][column] for products with a tile: sums of recall, then what is made of them.
struct Held {
    float *tiles, *phi, *rows, *den, *gamma, *b, *db, *dden;
    __device__ __forceinline__ Held(const Tokens& t, int buffers, int matrices, bool recalls) {
        tiles = (float*)shared_floats;
        phi = tiles + buffers * matrices * t.keys() * COLUMNS;
        rows = phi + t.slots() * t.keys(); // r of every token at first
        den = rows + t.slots() * max(recalls ? WALKERS * COLUMNS : COLUMNS, t.width());
        gamma = den + t.slots();
        b = gamma + t.slots();
        db = b + t.slots();
        dden = db + t.slots();
    }
};

// The tiles that a block works on, one after the other, in `buffers` (1 or 2) pieces of shared memory. `fetch` starts the copy of a tile.
struct Tiles {
    int first, count, step, buffers;
    __device__ __forceinline__ Tiles(int d, int split, int splits, int buffers)
        : first(split), count(((d + COLUMNS - 1) / COLUMNS - split + splits - 1) / splits), step(splits), buffers(buffers) {}
    __device__ __forceinline__ int column(int i) const { return (first + i * step) * COLUMNS; }
    // Sends for the first tile.
    template <class F> __device__ __forceinline__ void begin(F fetch) const {
        fetch(0);
        commit();
    }
    // Sends for tile i + 1 with two buffers, or else for tile i: the buffer is free once all threads are here.
    template <class F> __device__ __forceinline__ void next(int i, F fetch) const {
        if (buffers == 1 && i == 0) return;
        __syncthreads();
        int wanted = i + buffers - 1;
        if (wanted < count) fetch(wanted);
        commit();
    }
    // Tile i is there, and what threads wrote before.
    __device__ __forceinline__ void ready() const {
        if (buffers == 2) wait<1>();
        else wait<0>();
        __syncthreads();
    }
};

// Zero rows that fill the keys of `count` tiles up.
__device__ __forceinline__ void fill_up(const Tokens& t, float* tiles, int count) {
    int more = (t.keys() - t.dk()) * COLUMNS;
    for (int i = threadIdx.x; i < count * more; i += THREADS) tiles[(i / more * t.keys() + t.dk()) * COLUMNS + i % more] = 0.f;
}

// Features of all tokens, and den, gamma and b of each, a warp for a token; db and dden become zero. Ends with a barrier.
__device__ __forceinline__ void load_features(const Tokens& t, const Held& s) {
    // z of so many features of a lane is loaded at once, before anything waits for the keys.
    constexpr int BATCH = 12;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = t.width(), dk = t.dk(), keys = t.keys();
    float z[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) z[u] = lane + 32 * u < dk ? t.z[lane + 32 * u] : 0.f;
#pragma unroll 1
    for (int slot = warp; slot < t.slots(); slot += WARPS) {
        float* r = s.rows + slot * width;
        for (int c = lane; c < width; c += 32) r[c] = slot < t.m ? rectified(t.k + (i64)slot * t.dm, c, t.dm) : 0.f;
        __syncwarp();
        float* phi = s.phi + slot / GROUP * GROUP * keys;
        float zk = 0, kk = 0;
        int c = lane, j = 1;
        auto add = [&](int f, float zf) {
            while (c >= width) c -= width, j++;
            float p = f < dk ? r[c] * r[back(c, j, width)] : 0.f;
            phi[at_feature(f, slot % GROUP)] = p;
            zk += zf * p;
            kk += p * p;
            c += 32;
        };
#pragma unroll
        for (int u = 0; u < BATCH; u++)
            if (lane + 32 * u < keys) add(lane + 32 * u, z[u]);
#pragma unroll 1
        for (int f = lane + 32 * BATCH; f < keys; f += 32) add(f, f < dk ? t.z[f] : 0.f);
        float den = warp_sum(zk) + EPSILON;
        kk = warp_sum(kk) + EPSILON;
        if (lane == 0) {
            s.den[slot] = den;
            s.gamma[slot] = t.corrected ? fminf(fmaxf(1.f - den / kk, 0.f), 1.f) : 1.f;
            s.b[slot] = t.beta && slot < t.m ? sigmoid_of(to_f32(t.beta[slot])) : 0.f;
            s.db[slot] = s.dden[slot] = 0.f;
        }
    }
    __syncthreads();
}

// to[f] = from[f] + sum_i weight_i phi_i[f]
__device__ __forceinline__ void add_features(const Tokens& t, const Held& s, const float* weight, const float* from, float* to) {
    for (int f = threadIdx.x; f < t.dk(); f += THREADS) {
        float sum = from ? from[f] : 0.f;
        for (int i = 0; i < t.m; i++) sum += weight[i] * s.phi[i / GROUP * GROUP * t.keys() + at_feature(f, i % GROUP)];
        to[f] = sum;
    }
}

// A thread's elements of a group's rows in a tile: `f` is called with the number of each, its token and its column.
template <class F> __device__ __forceinline__ void each_own(F f) {
    u32 own = thread();
#pragma unroll
    for (int e = 0; e < OWN; e++) {
        int i = own + e * THREADS;
        if (i < GROUP * COLUMNS) f(e, i / COLUMNS, i % COLUMNS);
    }
}

// A thread's elements of the first group's rows of a [m, d] matrix in a tile's columns, loaded a tile ahead so that no one waits for them.
struct Ahead {
    float value[OWN];
    template <class U> static __device__ __forceinline__ float element(const U* x, int token, int column, int m, int d) {
        return token < m && column < d ? to_f32(x[(i64)token * d + column]) : 0.f;
    }
    template <class U> __device__ __forceinline__ void load(const U* x, int m, int d, int from) {
        each_own([&](int e, int token, int column) { value[e] = element(x, token, from + column, m, d); });
    }
    // An element of any group.
    template <class U>
    __device__ __forceinline__ float get(int e, int group, const U* x, int token, int column, int m, int d) const {
        return group == 0 ? value[e] : element(x, token, column, m, d);
    }
};

// rows[product][split][token][column] = sums of phi_i[f] tile[f][c] over a split's keys, for one or two tiles that lie `apart`.
template <int PRODUCTS> __device__ __forceinline__ void recall(const Tokens& t, const Held& s, const float* tile, int apart) {
    constexpr int SPLITS = WALKERS / PRODUCTS;
    u32 own = thread();
    int lane = own % 32, g = lane / 4, l = lane % 4, warp = own / 32;
    int side = warp % SIDES, split = warp / SIDES % SPLITS, part = warp / SIDES, keys = t.keys();
    tile += part / SPLITS * apart;
    // Element 2g + i of 16 columns is row g + 8i of the product: the turn of rows f and f + 4 is the same.
    const float* column = tile + at(split * 8 + l, side * 16 + 2 * g);
#pragma unroll 1
    for (int group = 0; group < t.groups(); group++) {
        const float* phi = s.phi + group * GROUP * keys + at_feature(split * 8 + l, g);
        float sum[EIGHTS][4] = {}, rest[EIGHTS][4] = {};
#pragma unroll (3 - EIGHTS)
        for (int f = split * 8; f < keys; f += SPLITS * 8) {
            int from = f - split * 8;
            float2 low = *(const float2*)(column + from * COLUMNS), high = *(const float2*)(column + (from + 4) * COLUMNS);
            Operand<4> a;
            a.set(0, low.x), a.set(1, low.y), a.set(2, high.x), a.set(3, high.y);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                // The swizzle of features turns the eights around.
                int turned = (l & 2) == 0 ? e * 8 : -e * 8;
                Operand<2> b;
                b.set(0, phi[from * GROUP + turned]), b.set(1, phi[(from + 4) * GROUP + turned]);
                multiply(sum[e], rest[e], a, b);
            }
        }
        float* rows = s.rows + (part * t.slots() + group * GROUP) * COLUMNS;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(float2*)(rows + at_row(e * 8 + 2 * l + i, side * 16 + 2 * g)) =
                    make_float2(sum[e][i] + rest[e][i], sum[e][2 + i] + rest[e][2 + i]);
    }
}
// An element of what `recall` left, by its offset among the rows, in the order of the splits.
template <int PRODUCTS> __device__ __forceinline__ float recalled(const Tokens& t, const Held& s, int product, int offset) {
    constexpr int SPLITS = WALKERS / PRODUCTS;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SPLITS; i++) sum += s.rows[(product * SPLITS + i) * t.slots() * COLUMNS + offset];
    return sum;
}

// tile += sum_i phi_i (x) x_i for all tokens, from x [token][column]; from zero, if `blank`. The result goes to columns [from, ..) of the
// [dk, d] matrix `to`, and with `stay` it also takes the tile's place.
__device__ __forceinline__ void update(const Tokens& t, const Held& s, float* tile, const float* x, bool blank, bool stay, float* to, int d,
                                       int from) {
    u32 own = thread();
    int lane = own % 32, g = lane / 4, l = lane % 4, warp = own / 32, side = warp % SIDES, dk = t.dk(), keys = t.keys();
    int last = t.groups() - 1, col = from + side * 16 + 4 * l;
#pragma unroll 1
    for (int group = 0; group <= last; group++) {
        const float *phi = s.phi + group * GROUP * keys, *xs = x + group * GROUP * COLUMNS;
        // Column n of half h is column 4 (n / 2) + 2h + n % 2 of 16.
        Operand<2> b[EIGHTS][2];
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < 2; i++) b[e][h].set(i, xs[at_row(e * 8 + 2 * l + i, side * 16 + g / 2 * 4 + 2 * h + g % 2)]);
#pragma unroll 1
        for (int first = warp / SIDES * 16; first < keys; first += WALKERS * 16) {
            int f = first + g;
            __syncwarp(); // stores may have parted the lanes
            float* places[2] = {tile + at(f, side * 16 + 4 * l), tile + at(f + 8, side * 16 + 4 * l)};
            float added[2][4] = {};
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                float2 low = *(const float2*)(phi + at_feature(f, e * 8 + 2 * l));
                float2 high = *(const float2*)(phi + at_feature(f + 8, e * 8 + 2 * l));
                Operand<4> a;
                a.set(0, low.x), a.set(1, high.x), a.set(2, low.y), a.set(3, high.y);
#pragma unroll
                for (int h = 0; h < 2; h++) multiply(added[h], a, b[e][h]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float4 v = blank && group == 0 ? make_float4(0.f, 0.f, 0.f, 0.f) : *(const float4*)places[i];
                v.x += added[0][2 * i], v.y += added[0][2 * i + 1], v.z += added[1][2 * i], v.w += added[1][2 * i + 1];
                if (stay || group < last) *(float4*)places[i] = v;
                int key = f + 8 * i;
                if (group < last || key >= dk) continue;
                float* out = to + (i64)key * d + col;
                if (d % 4 == 0) {
                    if (col < d) *(float4*)out = v;
                } else {
                    if (col < d) out[0] = v.x;
                    if (col + 1 < d) out[1] = v.y;
                    if (col + 2 < d) out[2] = v.z;
                    if (col + 3 < d) out[3] = v.w;
                }
            }
        }
    }
}

// The right operand of `project`, a group's x [token][column] in a side's columns. Columns 4l + 2h and 4l + 2h + 1 of 16 are l and l + 4 of
// half h.
struct Projector {
    Operand<2> b[EIGHTS][2];
    __device__ __forceinline__ Projector(const float* x, int side) {
        int lane = thread() % 32;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            float4 v = *(const float4*)(x + at_row(e * 8 + lane / 4, side * 16 + lane % 4 * 4));
            b[e][0].set(0, v.x), b[e][0].set(1, v.y), b[e][1].set(0, v.z), b[e][1].set(1, v.w);
        }
    }
    // sum [16 keys from `first` on, tokens] += tile x^T over the side's columns.
    __device__ __forceinline__ void add(float (&sum)[EIGHTS][4], const float* tile, int first, int side) const {
        int lane = thread() % 32, f = first + lane / 4, c = side * 16 + lane % 4 * 4;
        float4 low = *(const float4*)(tile + at(f, c)), high = *(const float4*)(tile + at(f + 8, c));
        Operand<4> a[2];
        a[0].set(0, low.x), a[0].set(1, high.x), a[0].set(2, low.y), a[0].set(3, high.y);
        a[1].set(0, low.z), a[1].set(1, high.z), a[1].set(2, low.w), a[1].set(3, high.w);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            float part[4] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) multiply(part, a[h], b[e][h]);
#pragma unroll
            for (int i = 0; i < 4; i++) sum[e][i] += part[i];
        }
    }
};

// Sums [key, token] over the columns of a side, one group's, held from tile to tile: block i of a warp begins at key
// 16 (walker + i WALKERS).
struct Projections {
    static constexpr int COUNT = HELD ? HELD : 1;
    float sum[COUNT][EIGHTS][4];
    __device__ __forceinline__ Projections() {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int e = 0; e < EIGHTS; e++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][e][j] = 0.f;
    }
    static __device__ __forceinline__ int key(int i) { return (thread() / 32 / SIDES + i * WALKERS) * 16; }
    // Adds tile x^T.
    __device__ __forceinline__ void add(const float* tile, const float* x, int keys) {
        int side = thread() / 32 % SIDES;
        Projector p(x, side);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (key(i) < keys) p.add(sum[i], tile, key(i), side);
    }
    // Calls f(token, key, sum) with each of a lane's sums of a block of keys.
    template <class F> static __device__ __forceinline__ void visit(float (&sum)[EIGHTS][4], int first, F f) {
        int lane = thread() % 32;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int i = 0; i < 4; i++) f(e * 8 + lane % 4 * 2 + i % 2, first + lane / 4 + i / 2 * 8, sum[e][i]);
    }
    template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) visit(sum[i], key(i), f);
    }
};

// The same with sums in memory, out [m][dk], for keys or tokens too many to be held. They begin with what is there, if `more`.
__device__ __forceinline__ void project_to(const Tokens& t, const float* tile, const float* x, float* out, bool more) {
    int side = thread() / 32 % SIDES;
#pragma unroll 1
    for (int group = 0; group < t.groups(); group++) {
        Projector p(x + group * GROUP * COLUMNS, side);
#pragma unroll 1
        for (int i = 0; Projections::key(i) < t.keys(); i++) {
            float sum[EIGHTS][4] = {};
            __syncwarp(); // stores may have parted the lanes
            p.add(sum, tile, Projections::key(i), side);
            Projections::visit(sum, Projections::key(i), [&](int token, int key, float value) {
                token += group * GROUP;
                if (token >= t.m || key >= t.dk()) return;
                float* place = out + (i64)token * t.dk() + key;
                *place = more ? *place + value : value;
            });
        }
    }
}

// y = residual + qn A for the few queries of a memory, at most one group: block n. Twin of read_features and a product.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
read_few(const T* q, const float* a, const float* z, const T* residual, T* y, int m, int dm, int nu, int d, int buffers) {
    i64 n = blockIdx.x;
    Tokens t = {q + n * m * dm, nullptr, z + n * 2 * dm * nu, m, dm, nu, false};
    Held s(t, buffers, 1, true);
    Tiles tiles(d, 0, 1, buffers);
    int size = t.keys() * COLUMNS;
    a += n * t.dk() * d, y += n * m * d;
    if (residual) residual += n * m * d;
    auto fetch = [&](int i) { fetch_tile(s.tiles + i % buffers * size, a, t.dk(), d, tiles.column(i)); };
    tiles.begin(fetch);
    Ahead old = {};
    if (residual) old.load(residual, m, d, tiles.column(0));
    fill_up(t, s.tiles, buffers);
    load_features(t, s);
    for (int i = 0; i < tiles.count; i++) {
        int from = tiles.column(i);
        tiles.next(i, fetch);
        tiles.ready();
        recall<1>(t, s, s.tiles + i % buffers * size, 0);
        __syncthreads();
        each_own([&](int e, int token, int column) {
            int col = from + column;
            float value = recalled<1>(t, s, 0, at_row(token, column)) / s.den[token] + old.value[e];
            if (token < m && col < d) y[(i64)token * d + col] = from_f32<T>(value);
        });
        if (residual && i + 1 < tiles.count) old.load(residual, m, d, tiles.column(i + 1));
    }
}

#if C_HELD > 0
// The whole way back of read_few: block n. da += sum_t qn_t (x) dy_t, dz += sum_t dden_t phi_t, and dq. What is null is not wanted.
extern "C" __global__ void __launch_bounds__(THREADS, HEAVY)
read_few_backward(const T* q, const float* a, const float* z, const T* dy, T* dq, float* da, float* dz, int m, int dm, int nu, int d,
                  int buffers, bool add_a, bool add_z) {
    i64 n = blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tokens t = {q + n * m * dm, nullptr, z + n * 2 * dm * nu, m, dm, nu, false};
    Held s(t, buffers, 2, false);
    Tiles tiles(d, 0, 1, buffers);
    int dk = t.dk(), size = t.keys() * COLUMNS;
    a += n * dk * d, dy += n * m * d, dq += n * m * dm;
    if (da) da += n * dk * d;
    if (dz) dz += n * dk;
    auto fetch = [&](int i) {
        float* to = s.tiles + i % buffers * 2 * size;
        fetch_tile(to, a, dk, d, tiles.column(i));
        if (da && add_a) fetch_tile(to + size, da, dk, d, tiles.column(i));
    };
    tiles.begin(fetch);
    Ahead grad;
    grad.load(dy, m, d, tiles.column(0));
    fill_up(t, s.tiles, 2 * buffers);
    load_features(t, s);
    Projections dqn;
    for (int i = 0; i < tiles.count; i++) {
        float* held = s.tiles + i % buffers * 2 * size;
        tiles.next(i, fetch);
        // x = dy / den, so that features serve as qn, and dqn is divided by den.
        each_own([&](int e, int token, int column) { s.rows[at_row(token, column)] = grad.value[e] / s.den[token]; });
        if (i + 1 < tiles.count) grad.load(dy, m, d, tiles.column(i + 1));
        tiles.ready();
        dqn.add(held, s.rows, t.keys());
        if (da) update(t, s, held + size, s.rows, !add_a, false, da, d, tiles.column(i));
    }
    // The sides' sums are added in order where the tiles were: [token][dk].
    float* sums = s.tiles;
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        __syncthreads();
        if (warp % SIDES == side)
            dqn.each([&](int token, int key, float value) {
                if (key < dk) sums[token * dk + key] = side == 0 ? value : sums[token * dk + key] + value;
            });
    }
    __syncthreads();
    // dphi = dqn / den + dden z with dden = -(dqn . phi) / den^2. A warp for a query.
    for (int i = warp; i < m; i += WARPS) {
        const T* x = t.k + (i64)i * dm;
        float *r = s.rows + i * t.width(), *row = sums + i * dk;
        for (int c = lane; c < t.width(); c += 32) r[c] = rectified(x, c, dm);
        float gk = 0;
        for (int f = lane; f < dk; f += 32) gk += row[f] * s.phi[at_feature(f, i)];
        float dden = -warp_sum(gk) / s.den[i];
        for (int f = lane; f < dk; f += 32) row[f] += dden * t.z[f];
        if (lane == 0) s.dden[i] = dden;
        __syncwarp();
        for (int c = lane; c < dm; c += 32) {
            float g = dpfp_slope(to_f32(x[c]), c, dm, nu, [&](int j) { return r[j]; }, [&](int f) { return row[f]; });
            dq[i * dm + c] = from_f32<T>(g);
        }
    }
    if (!dz) return;
    __syncthreads();
    add_features(t, s, s.dden, add_z ? dz : nullptr, dz);
}
#endif

// Block (n, split). The first split's block also makes z'. a_new may be a: every block keeps to its own columns. `kept`, if given, receives
// what was added to each key, [n, m, d].
extern "C" __global__ void __launch_bounds__(THREADS, LIGHT)
write(const T* k, const T* v, const T* beta, const float* a, const float* z, const int* empty, float* a_new, float* z_new, float* kept, int m,
      int dm, int nu, int d, int splits, int buffers, bool correction) {
    int split = blockIdx.x % splits;
    i64 n = blockIdx.x / splits;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, correction && !(empty && empty[n])};
    Held s(t, buffers, 1, true);
    Tiles tiles(d, split, splits, buffers);
    int size = t.keys() * COLUMNS;
    a += n * t.dk() * d, a_new += n * t.dk() * d, v += n * m * d;
    if (kept) kept += n * m * d;
    auto fetch = [&](int i) { fetch_tile(s.tiles + i % buffers * size, a, t.dk(), d, tiles.column(i)); };
    tiles.begin(fetch);
    Ahead values;
    values.load(v, m, d, tiles.column(0));
    fill_up(t, s.tiles, buffers);
    load_features(t, s);
    if (split == 0) add_features(t, s, s.gamma, t.z, z_new + n * t.dk());
    for (int i = 0; i < tiles.count; i++) {
        float* held = s.tiles + i % buffers * size;
        int from = tiles.column(i);
        tiles.next(i, fetch);
        tiles.ready();
        recall<1>(t, s, held, 0);
        __syncthreads();
#pragma unroll 1
        for (int group = 0; group < t.groups(); group++)
            each_own([&](int e, int token, int column) {
                token += group * GROUP;
                int col = from + column, place = at_row(token, column);
                float added = s.b[token] * (values.get(e, group, v, token, col, m, d) - recalled<1>(t, s, 0, place) / s.den[token]);
                s.rows[place] = added;
                if (kept && token < m && col < d) kept[(i64)token * d + col] = added;
            });
        if (i + 1 < tiles.count) values.load(v, m, d, tiles.column(i + 1));
        __syncthreads();
        update(t, s, held, s.rows, false, false, a_new, d, from);
    }
}

// rows = -kept, what a write added to each key in a tile's columns, ready to be added again; zero, if `blank`. `ahead` has the first group's.
__device__ __forceinline__ void take_back(const Tokens& t, const Held& s, const Ahead& ahead, const float* kept, bool blank, int d, int from) {
#pragma unroll 1
    for (int group = 0; group < t.groups(); group++)
        each_own([&](int e, int token, int column) {
            token += group * GROUP;
            s.rows[at_row(token, column)] = blank ? 0.f : -ahead.get(e, group, kept, token, from + column, t.m, d);
        });
}

// Block (n, split): a = a - sum_i phi_i (x) kept_i, in place; zero if it was empty.
extern "C" __global__ void __launch_bounds__(THREADS, LIGHT)
write_undo(const T* k, const T* beta, const float* z, const int* empty, const float* kept, float* a, int m, int dm, int nu, int d, int splits,
           int buffers) {
    i64 n = blockIdx.x / splits;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, false};
    Held s(t, buffers, 1, false);
    Tiles tiles(d, (int)(blockIdx.x % splits), splits, buffers);
    int size = t.keys() * COLUMNS;
    a += n * t.dk() * d, kept += n * m * d;
    bool blank = empty && empty[n];
    auto fetch = [&](int i) { fetch_tile(s.tiles + i % buffers * size, a, t.dk(), d, tiles.column(i)); };
    tiles.begin(fetch);
    Ahead taken;
    taken.load(kept, m, d, tiles.column(0));
    load_features(t, s);
    for (int i = 0; i < tiles.count; i++) {
        int from = tiles.column(i);
        tiles.next(i, fetch);
        take_back(t, s, taken, kept, blank, d, from);
        if (i + 1 < tiles.count) taken.load(kept, m, d, tiles.column(i + 1));
        tiles.ready();
        update(t, s, s.tiles + i % buffers * size, s.rows, blank, false, a, d, from);
    }
}

// Block (n, split): dv, sums over the columns of each side of the split's tiles of dphi [n, split, side, m, dk], and over all of them of db
// and dden [n, split, 2, m], and, if `change`, grad turned from dA' to dA. With `kept`, a is the new memory and becomes the old one.
extern "C" __global__ void __launch_bounds__(THREADS, HEAVY)
write_backward(const T* k, const T* v, const T* beta, float* a, const float* z, float* grad, T* dv, bool change, float* dphi, float* scalars,
               const int* empty, const float* kept, int m, int dm, int nu, int d, int splits, int buffers) {
    i64 n = blockIdx.x / splits;
    Tokens t = {k + n * m * dm, beta + n * m, z + n * 2 * dm * nu, m, dm, nu, false}; // gamma is not needed here
    Held s(t, buffers, 2, true);
    Tiles tiles(d, (int)(blockIdx.x % splits), splits, buffers);
    int dk = t.dk(), size = t.keys() * COLUMNS;
    // x and dw of each token take the place of the first split's sums.
    float *x = s.rows, *dw = s.rows + WALKERS / 2 * t.slots() * COLUMNS;
    a += n * dk * d, grad += n * dk * d, v += n * m * d, dv += n * m * d;
    if (kept) kept += n * m * d;
    bool blank = empty && empty[n];
    auto own_dphi = [&] { return dphi + ((i64)blockIdx.x * SIDES + threadIdx.x / 32 % SIDES) * m * dk; };
    auto fetch = [&](int i) {
        float* to = s.tiles + i % buffers * 2 * size;
        fetch_tile(to, a, dk, d, tiles.column(i));
        fetch_tile(to + size, grad, dk, d, tiles.column(i));
    };
    tiles.begin(fetch);
    Ahead values, taken = {};
    values.load(v, m, d, tiles.column(0));
    if (kept) taken.load(kept, m, d, tiles.column(0));
    fill_up(t, s.tiles, 2 * buffers);
    load_features(t, s);
    Projections projections;
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
            update(t, s, held, s.rows, blank, true, a, d, from);
            __syncthreads();
        }
        recall<2>(t, s, held, size);
        __syncthreads();
#pragma unroll 1
        for (int group = 0; group < t.groups(); group++)
            each_own([&](int own, int token, int column) {
                token += group * GROUP;
                int col = from + column, place = at_row(token, column);
                float b = s.b[token], scale = 1.f / s.den[token], w = recalled<2>(t, s, 0, place), e = recalled<2>(t, s, 1, place);
                float u = values.get(own, group, v, token, col, m, d) - w * scale;
                x[place] = b * u;
                dw[place] = -b * scale * e;
                if (token < m && col < d) dv[(i64)token * d + col] = from_f32<T>(b * e);
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
            projections.add(grad_held, x, t.keys());
            projections.add(held, dw, t.keys());
        } else {
            project_to(t, grad_held, x, own_dphi(), i > 0);
            project_to(t, held, dw, own_dphi(), true);
        }
        if (change) update(t, s, grad_held, dw, false, false, grad, d, from);
    }
    if (HELD)
        projections.each([&](int token, int key, float value) {
            if (token < m && key < dk) own_dphi()[(i64)token * dk + key] = value;
        });
    __syncthreads();
    scalars += (i64)blockIdx.x * 2 * m;
    for (int i = threadIdx.x; i < m; i += THREADS) scalars[i] = s.db[i], scalars[m + i] = s.dden[i];
}
