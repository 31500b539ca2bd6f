// What the kernels share that walk over a memory A [dk, d] once, in tiles of C_COLUMNS columns (assoc_walk.cu, assoc_step.cu). A block of 256
// threads has one memory, or a share of its tiles, and the next tile is on its way while it works on this one.
//
// Products are taken on tensor cores. For tokens in f32 each operand is two tf32 parts, x = hi + lo: hi hi + hi lo + lo hi is as good as f32.
// For tokens in bf16 it is one, rounded: 2^-12 of it, where the tokens themselves are off by 2^-9. A stays f32, and what a write added is taken
// back with the same rounding. They are of three kinds, for GROUP tokens (8 or 16; more come in groups) and blocks of 16 keys or columns:
//   recall   tile^T phi [columns, tokens], summed over keys; the keys are dealt to the warps, whose sums are added in order,
//   update   tile += phi x [keys, columns], summed over tokens,
//   project  tile x^T [keys, tokens], summed over columns. It stays in registers from tile to tile, C_HELD blocks of keys in a warp; 0
//            is for keys too many for that, whose sums are in memory.
// In update and project a lane has the same elements of a tile: rows g and g + 8 of a block and columns 4t to 4t + 3 of 16, where
// g = lane / 4 and t = lane % 4. Operands' columns are taken in an order that makes them so.
//
// Everything in shared memory is swizzled in eighths of a row, so that no access meets a bank twice and nothing is spent on padding. Keys are
// filled up with zero rows to a multiple of 16, tokens with zero features.
//
// C_PROJECTED is the rule of the write. The paper's and the projected one differ in what is made of the tokens before the first tile and after the
// last (assoc_turns.cuh): the walk asks A with features phi and adds to it with features psi, which are phi itself in the paper's write. Where it is 2, tokens
// fill at most half of their group, and psi has the other half: what is made of tokens for the walk is then that of one half, and the other is nothing. So neither
// shared memory nor registers nor products are more than the paper's write has.
constexpr int COLUMNS = C_COLUMNS, HELD = C_HELD, THREADS = 256, WARPS = THREADS / 32;
constexpr bool PROJECTED = C_PROJECTED > 0, PACKED = C_PROJECTED == 2;
enum Half { ALL, OF_PHI, OF_PSI };
// Slots of a group that have tokens.
template <int GROUP> constexpr int SLOTS = PACKED ? GROUP / 2 : GROUP;
constexpr float EPSILON = 1e-5f;
constexpr bool TWO_PARTS = sizeof(T) == 4;
// Before Hopper the same code takes a few registers more.
constexpr bool HOPPER = __CUDA_ARCH__ >= 900;
// The shape that a kernel is compiled for, or zeros where it takes any (`paths::walk_knows_shape`). Then d is a multiple of all tiles' columns and the
// features are whole blocks of 16: nothing has to ask whether a key or a column is there, and offsets are numbers in the instructions.
constexpr int DM = C_DM, NU = C_NU, D = C_D, TOKENS = C_TOKENS, BUFFERS = C_BUFFERS;
constexpr bool WHOLE = D > 0;
// Blocks of 16 columns of a tile, and the warps of each of them, which walk down the keys side by side.
constexpr int SIDES = COLUMNS / 16, WALKERS = WARPS / SIDES;
// Whether all walkers have as many blocks of keys as they hold sums of.
constexpr bool EVEN = WHOLE && HELD * WALKERS * 16 == 2 * DM * NU;
// A kernel's own numbers take the place of its arguments; a write's tokens too, of which a model has always as many, where queries change with the
// length of a segment.
__device__ __forceinline__ void settle(int& dm, int& nu, int& d, int& buffers) {
    if (WHOLE) dm = DM, nu = NU, d = D, buffers = BUFFERS;
}
__device__ __forceinline__ void settle(int& m, int& dm, int& nu, int& d, int& buffers) {
    settle(dm, nu, d, buffers);
    if (WHOLE) m = TOKENS;
}
// Whether a tile has a column that a thread came to, and a memory the key of a held sum.
__device__ __forceinline__ bool has_column(int column, int d) { return WHOLE || column < d; }
__device__ __forceinline__ bool has_key(int key, int dk) { return EVEN || key < dk; }
// A thread's elements of a group's rows in a tile.
constexpr int own_of(int group) { return (group * COLUMNS + THREADS - 1) / THREADS; }

extern __shared__ float4 shared_floats[];

// threadIdx.x, asked for anew, so that the many offsets made of it do not stay in registers from tile to tile.
__device__ __forceinline__ u32 thread() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    if (WHOLE && sizeof(T) == 2) __builtin_assume(x < THREADS); // elsewhere it takes a few registers more than there are
    return x;
}

// Where a thread works on a tile: its lane, its warp's side, and which of the side's walkers the warp is.
struct Own {
    int lane, side, walker;
    __device__ __forceinline__ Own() {
        u32 own = thread();
        lane = own % 32, side = own / 32 % SIDES, walker = own / 32 / SIDES;
    }
};

// Offset of an element of a tile.
__device__ __forceinline__ int at(int key, int column) {
    int turn = COLUMNS == 32 ? (key & 1) << 1 | (key >> 1 & 1) : key >> 1 & 1;
    return key * COLUMNS + (column ^ turn << 3);
}
// Offset of an element of tokens' rows in a tile's columns.
__device__ __forceinline__ int at_row(int token, int column) { return token * COLUMNS + (column ^ (token >> 1 & COLUMNS / 8 - 1) << 3); }
// Offset of a feature among those of a token's group.
template <int GROUP> __device__ __forceinline__ int at_feature(int key, int token) {
    return key * GROUP + (token ^ (GROUP == 16 ? (key >> 1 & 1) << 3 : 0));
}

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
template <int N, bool PARTS = TWO_PARTS> struct Operand {
    u32 hi[N], lo[N];
    __device__ __forceinline__ void set(int i, float x) {
        if (PARTS) {
            hi[i] = __float_as_uint(x) & 0xffffe000u;
            lo[i] = __float_as_uint(x - __uint_as_float(hi[i])) + 0x1000u;
        } else {
            hi[i] = __float_as_uint(x) + 0x1000u;
        }
    }
};
// c += a b; what is small of it may be added to `rest` instead.
template <bool PARTS>
__device__ __forceinline__ void multiply(float (&c)[4], float (&rest)[4], const Operand<4, PARTS>& a, const Operand<2, PARTS>& b) {
    if (PARTS) {
        mma(rest, a.lo, b.hi);
        mma(rest, a.hi, b.lo);
    }
    mma(c, a.hi, b.hi);
}
template <bool PARTS> __device__ __forceinline__ void multiply(float (&c)[4], const Operand<4, PARTS>& a, const Operand<2, PARTS>& b) {
    multiply(c, c, a, b);
}

// Starts copying columns [from, from + COLUMNS) of a [dk, d] matrix to a tile; columns past d become zero.
__device__ __forceinline__ void fetch_tile(float* tile, const float* matrix, int dk, int d, int from) {
    // A step keeps the swizzle.
    u32 own = thread();
    if (d % 4 == 0) {
        constexpr int STEP = THREADS * 4 / COLUMNS;
        int f = own * 4 / COLUMNS, c = own * 4 % COLUMNS;
        bool inside = has_column(from + c, d);
        const float* source = matrix + (i64)f * d + (inside ? from + c : 0);
        u32 to = shared_address(tile + at(f, c));
        if constexpr (WHOLE) {
            constexpr int KEYS = 2 * DM * NU;
#pragma unroll
            for (int done = 0; done < KEYS; done += STEP)
                if (KEYS % STEP == 0 || f + done < KEYS) copy_four(to + done * COLUMNS * 4, source + done * D, 16);
        } else {
            for (; f < dk; f += STEP, source += (i64)STEP * d, to += STEP * COLUMNS * 4) copy_four(to, source, inside ? 16 : 0);
        }
    } else {
        constexpr int STEP = THREADS / COLUMNS;
        int f = own / COLUMNS, c = own % COLUMNS;
        bool inside = has_column(from + c, d);
        const float* source = matrix + (i64)f * d + (inside ? from + c : 0);
        u32 to = shared_address(tile + at(f, c));
        for (; f < dk; f += STEP, source += (i64)STEP * d, to += STEP * COLUMNS * 4) copy_one(to, source, inside ? 4 : 0);
    }
}

// The tokens of one memory, in groups of GROUP.
template <int GROUP> struct Tokens {
    const T *k, *beta;
    const float* z;
    int m, dm, nu;
    bool corrected;
    bool projected = false; // written by the projected rule
    bool first = false;     // to an empty memory; the projected rule asks
    __device__ __forceinline__ int width() const { return 2 * dm; }
    __device__ __forceinline__ int dk() const { return 2 * dm * nu; }
    // Keys and tokens with those that fill up.
    __device__ __forceinline__ int keys() const { return (dk() + 15) / 16 * 16; }
    __device__ __forceinline__ int groups() const { return (m + GROUP - 1) / GROUP; }
    __device__ __forceinline__ int slots() const { return groups() * GROUP; }
};

// What a block has in shared memory: `buffers` times `matrices` tiles, and behind them what it keeps of its tokens. `rows` are
// [token][column] for products with a tile: sums of recall, then what is made of them. The projected write also has psi and, behind the
// numbers, four squares [token][token]: `near`, the products of features; `turn`, the T of assoc_turns.cuh; and two to work with.
struct Held {
    float *tiles, *phi, *psi, *rows, *den, *gamma, *b, *db, *dden, *near, *turn, *work;
    Held() = default;
    // Where psi is: behind phi, in the second half of each key's features, or phi itself. Whoever asks for all slots of a half meets features that are not
    // its own in the last ones.
    template <int GROUP> static __device__ __forceinline__ float* behind(float* phi, int keys) {
        return PACKED ? phi + SLOTS<GROUP> : PROJECTED ? phi + GROUP * keys : phi;
    }
    // What serves products with x of a half.
    __device__ __forceinline__ const float* features(Half half) const { return half == OF_PSI && !PACKED ? psi : phi; }
    template <int GROUP> __device__ __forceinline__ Held(const Tokens<GROUP>& t, int buffers, int matrices, bool recalls) {
        tiles = (float*)shared_floats;
        phi = tiles + buffers * matrices * t.keys() * COLUMNS;
        psi = behind<GROUP>(phi, t.keys());
        rows = (PACKED ? phi : psi) + t.slots() * t.keys(); // r of every token at first, or every warp's part of `near`
        int floats = t.slots() * max(recalls ? WALKERS * COLUMNS : COLUMNS, t.width());
        float* end = numbers(rows + (PROJECTED ? max(floats, WARPS * GROUP * GROUP) : floats), t.slots());
        if (PROJECTED) squares<GROUP>(end);
    }
    template <int GROUP> __device__ __forceinline__ float* squares(float* from) {
        near = from;
        turn = near + GROUP * GROUP;
        work = turn + GROUP * GROUP;
        return work + 2 * GROUP * GROUP;
    }
    // What is one number for a token, `slots` of each; gives where they end.
    __device__ __forceinline__ float* numbers(float* from, int slots) {
        den = from;
        gamma = den + slots;
        b = gamma + slots;
        db = b + slots;
        dden = db + slots;
        return dden + slots;
    }
};

// The tiles that a block works on, one after the other, in `buffers` (1 or 2) pieces of shared memory. `fetch` starts the copy of a tile.
struct Tiles {
    int first, count, step, buffers;
    __device__ __forceinline__ Tiles(int d, int split, int splits, int buffers)
        : first(split), count(((d + COLUMNS - 1) / COLUMNS - split + splits - 1) / splits), step(splits), buffers(buffers) {}
    __device__ __forceinline__ int column(int i) const { return (first + i * step) * COLUMNS; }
    // Sends for the first tile, or with two buffers for two.
    template <class F> __device__ __forceinline__ void begin(F fetch) const {
        for (int i = 0; i < buffers; i++) {
            if (i < count) fetch(i);
            commit();
        }
    }
    // Sends for tile i + 1 with two buffers, or else for tile i, if it is not on its way yet: the buffer is free once all threads are here.
    template <class F> __device__ __forceinline__ void next(int i, F fetch) const {
        if (i == 0) return;
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
template <int GROUP> __device__ __forceinline__ void fill_up(const Tokens<GROUP>& t, float* tiles, int count) {
    int more = (t.keys() - t.dk()) * COLUMNS;
    for (int i = threadIdx.x; i < count * more; i += THREADS) tiles[(i / more * t.keys() + t.dk()) * COLUMNS + i % more] = 0.f;
}

// A lane's elements of z, so many of them loaded at once, before anything waits for the keys; and how far 32 features reach in rows of
// `width`: whole rows, and the rest.
struct Normaliser {
    static constexpr int BATCH = TWO_PARTS ? 6 : 12; // in f32 registers are short
    float first[BATCH];
    const float* z;
    int rows, rest;
    __device__ __forceinline__ Normaliser(const float* z, int dk, int width) : z(z), rows(32 / width), rest(32 % width) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int u = 0; u < BATCH; u++) first[u] = lane + 32 * u < dk ? z[lane + 32 * u] : 0.f;
    }
};

// How much of the token in a slot is written.
template <int GROUP> __device__ __forceinline__ float importance(const Tokens<GROUP>& t, int slot) {
    return t.beta && slot < t.m ? sigmoid_of(to_f32(t.beta[slot])) : 0.f;
}

// A lane's part of the key in a slot, and its beta, as far as they are loaded before anything waits for them.
template <int GROUP> struct RawToken {
    static constexpr int EARLY = 2;
    T key[EARLY], beta;
    __device__ __forceinline__ void load(const Tokens<GROUP>& t, int slot) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int e = 0; e < EARLY; e++) key[e] = slot < t.m && lane + 32 * e < t.dm ? t.k[slot * t.dm + lane + 32 * e] : T{};
        beta = t.beta && slot < t.m ? t.beta[slot] : T{};
    }
};

// Features of the token in a slot from its r, and its den and gamma, by a warp; db and dden become zero.
template <int GROUP>
__device__ __forceinline__ void make_features(const Tokens<GROUP>& t, const Held& s, const Normaliser& z, int slot, const float* r) {
    constexpr int BATCH = Normaliser::BATCH;
    int lane = threadIdx.x % 32, width = t.width(), dk = t.dk(), keys = t.keys();
    // A step of 32 features keeps the swizzle.
    float* phi = s.phi + slot / GROUP * GROUP * keys + at_feature<GROUP>(lane, slot % GROUP);
    float zk = 0, kk = 0;
    int c = lane % width, j = 1 + lane / width;
    auto next = [&](int f) {
        bool there = f < dk;
        float p = r[c] * r[back(c, there ? j : 0, width)]; // loaded in any case, which is less than a branch
        c += z.rest, j += z.rows;
        if (c >= width) c -= width, j++;
        // The compiler would count from the start again wherever a feature may be left out.
        asm volatile("" : "+r"(c), "+r"(j));
        return there ? p : 0.f;
    };
    // All loads of a batch before its stores, which they would wait for.
    float p[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
        p[u] = 0.f;
        if (32 * u >= dk) continue; // for all lanes alike
        p[u] = next(lane + 32 * u);
        zk += z.first[u] * p[u];
        kk += p[u] * p[u];
    }
#pragma unroll
    for (int u = 0; u < BATCH; u++)
        if (lane + 32 * u < keys) phi[32 * u * GROUP] = p[u];
#pragma unroll 1
    for (int f = lane + 32 * BATCH; f < keys; f += 32) {
        float more = next(f);
        phi[(f - lane) * GROUP] = more;
        zk += (f < dk ? z.z[f] : 0.f) * more;
        kk += more * more;
    }
    float den = warp_sum(zk) + EPSILON;
    kk = warp_sum(kk) + EPSILON;
    if (lane == 0) {
        if (t.projected) {
            s.den[slot] = kk;
            s.gamma[slot] = den; // `take_turns` makes gamma of it
        } else {
            s.den[slot] = den;
            s.gamma[slot] = t.corrected ? fminf(fmaxf(1.f - den / kk, 0.f), 1.f) : 1.f;
        }
        s.db[slot] = s.dden[slot] = 0.f;
    }
}

// Tokens in slots up to `slots` and their features, a warp for each; `raw` has the warp's first. The next one's key is on its way meanwhile. r has
// room for 2 dm.
template <int GROUP>
__device__ __forceinline__ void load_tokens(const Tokens<GROUP>& t, const Held& s, const Normaliser& z, RawToken<GROUP>& raw, int slots, float* r) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int slot = threadIdx.x / 32; slot < slots; slot += WARPS) {
        auto put = [&](int c, float x) { r[c] = fmaxf(x, 0.f), r[t.dm + c] = fmaxf(-x, 0.f); };
#pragma unroll
        for (int e = 0; e < raw.EARLY; e++)
            if (lane + 32 * e < t.dm) put(lane + 32 * e, to_f32(raw.key[e]));
        for (int c = lane + 32 * raw.EARLY; c < t.dm; c += 32) put(c, slot < t.m ? to_f32(t.k[slot * t.dm + c]) : 0.f);
        if (lane == 0) s.b[slot] = t.beta && slot < t.m ? sigmoid_of(to_f32(raw.beta)) : 0.f;
        raw.load(t, slot + WARPS);
        __syncwarp();
        make_features(t, s, z, slot, r);
        __syncwarp();
    }
}

// All tokens: first what is loaded, by all threads at once, then a warp for each. Ends with a barrier.
template <int GROUP> __device__ __forceinline__ void load_features(const Tokens<GROUP>& t, const Held& s) {
    int width = t.width(), given = t.m * t.dm, c = threadIdx.x % t.dm, rows = THREADS / t.dm, rest = THREADS % t.dm;
    float* r = s.rows + threadIdx.x / t.dm * width;
    Normaliser z(t.z, t.dk(), width);
#pragma unroll 4
    for (int i = threadIdx.x; i < t.slots() * t.dm; i += THREADS) {
        float x = i < given ? to_f32(t.k[i]) : 0.f;
        r[c] = fmaxf(x, 0.f), r[t.dm + c] = fmaxf(-x, 0.f);
        c += rest, r += rows * width;
        if (c >= t.dm) c -= t.dm, r += width;
    }
#pragma unroll 1
    for (int slot = threadIdx.x; slot < t.slots(); slot += THREADS) s.b[slot] = importance(t, slot);
    __syncthreads();
#pragma unroll 1
    for (int slot = threadIdx.x / 32; slot < t.slots(); slot += WARPS) make_features(t, s, z, slot, s.rows + slot * width);
    __syncthreads();
}

// to[f] = from[f] + sum_i weight_i phi_i[f]
template <int GROUP>
__device__ __forceinline__ void add_features(const Tokens<GROUP>& t, const Held& s, const float* weight, const float* from, float* to) {
    for (int f = threadIdx.x; f < t.dk(); f += THREADS) {
        float sum = from ? from[f] : 0.f;
        for (int i = 0; i < t.m; i++) sum += weight[i] * s.phi[i / GROUP * GROUP * t.keys() + at_feature<GROUP>(f, i % GROUP)];
        to[f] = sum;
    }
}

// A thread's elements of a group's rows in a tile: `f` is called with the number of each, its token and its column.
template <int GROUP, class F> __device__ __forceinline__ void each_own(F f) {
    u32 own = thread();
#pragma unroll
    for (int e = 0; e < own_of(GROUP); e++) {
        int i = own + e * THREADS;
        if (i < GROUP * COLUMNS) f(e, i / COLUMNS, i % COLUMNS);
    }
}

// A thread's elements of the first group's rows of a [m, d] matrix in a tile's columns, loaded a tile ahead so that no one waits for them: as they are in
// memory, since whoever makes floats of them waits.
template <int GROUP, class U = T> struct Ahead {
    U held[own_of(GROUP)];
    static __device__ __forceinline__ U element(const U* x, int token, int column, int m, int d) {
        return token < m && has_column(column, d) ? x[(i64)token * d + column] : U{};
    }
    __device__ __forceinline__ void load(const U* x, int m, int d, int from) {
        each_own<GROUP>([&](int e, int token, int column) { held[e] = element(x, token, from + column, m, d); });
    }
    __device__ __forceinline__ float operator[](int e) const { return to_f32(held[e]); }
    // An element of any group.
    __device__ __forceinline__ float get(int e, int group, const U* x, int token, int column, int m, int d) const {
        return to_f32(group == 0 ? held[e] : element(x, token, column, m, d));
    }
};
