// The products of the kernels that walk over a memory, on tensor cores: recall, update and project, and products of features with each other. What
// they are is said in assoc_tile.cuh, which comes before this text.

// A warp's sums of phi_i[f] tile[f][c] for a group, over the keys from `first` on that it is given, eight at a time.
template <int GROUP> struct Recaller {
    static constexpr int EIGHTS = GROUP / 8;
    float sum[EIGHTS][4] = {}, rest[EIGHTS][4] = {};
    const float* phi;
    int turn; // the swizzle of features turns the eights around
    __device__ __forceinline__ Recaller(const float* features, int first, const Own& own)
        : phi(features + at_feature<GROUP>(first + own.lane % 4, own.lane / 4)), turn((own.lane & 2) == 0 ? 8 : -8) {}
    // Keys `from` behind the first, as operand a.
    __device__ __forceinline__ void add(const Operand<4>& a, int from) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            Operand<2> b;
            b.set(0, phi[from * GROUP + e * turn]), b.set(1, phi[(from + 4) * GROUP + e * turn]);
            multiply(sum[e], rest[e], a, b);
        }
    }
    // To rows [token][column], of the first `tokens` tokens.
    __device__ __forceinline__ void store(float* rows, int tokens, const Own& own) const {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (int token = e * 8 + own.lane % 4 * 2 + i; token < tokens)
                    *(float2*)(rows + at_row(token, own.side * 16 + own.lane / 4 * 2)) =
                        make_float2(sum[e][i] + rest[e][i], sum[e][2 + i] + rest[e][2 + i]);
    }
};
// A lane's part of a tile's eight keys as an operand of recall, where `column` is its place in the first: element 2g + i of 16 columns is row
// g + 8i of the product. The turn of rows f and f + 4 is the same.
__device__ __forceinline__ const float* recall_column(const float* tile, int first, const Own& own) {
    return tile + at(first + own.lane % 4, own.side * 16 + own.lane / 4 * 2);
}
__device__ __forceinline__ Operand<4> recall_operand(const float* column, int from) {
    float2 low = *(const float2*)(column + from * COLUMNS), high = *(const float2*)(column + (from + 4) * COLUMNS);
    Operand<4> a;
    a.set(0, low.x), a.set(1, low.y), a.set(2, high.x), a.set(3, high.y);
    return a;
}

// rows[product][split][token][column] = sums of phi_i[f] tile[f][c] over a split's keys, for one or two tiles that lie `apart`. The second, which
// is of a gradient, is asked with psi.
template <int PRODUCTS, int GROUP>
__device__ __forceinline__ void recall(const Tokens<GROUP>& t, const Held& s, const float* tile, int apart) {
    constexpr int SPLITS = WALKERS / PRODUCTS;
    Own own;
    int split = own.walker % SPLITS, keys = t.keys();
    tile += own.walker / SPLITS * apart;
    const float* column = recall_column(tile, split * 8, own);
#pragma unroll 1
    for (int group = 0; group < t.groups(); group++) {
        const float* features = PROJECTED && own.walker >= SPLITS ? s.psi : s.phi;
        Recaller<GROUP> sums(features + group * GROUP * keys, split * 8, own);
#pragma unroll (3 - GROUP / 8)
        for (int from = 0; from < keys - split * 8; from += SPLITS * 8) sums.add(recall_operand(column, from), from);
        sums.store(s.rows + (own.walker * t.slots() + group * GROUP) * COLUMNS, GROUP, own);
    }
}
// An element of what `recall` left, by its offset among the rows, in the order of the splits.
template <int PRODUCTS, int GROUP>
__device__ __forceinline__ float recalled(const Tokens<GROUP>& t, const Held& s, int product, int offset) {
    constexpr int SPLITS = WALKERS / PRODUCTS;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SPLITS; i++) sum += s.rows[(product * SPLITS + i) * t.slots() * COLUMNS + offset];
    return sum;
}

// An element of x [token][column], or of one half of a group: nothing in the slots of the other.
template <int GROUP> __device__ __forceinline__ float row_element(const float* x, int slot, int column, Half half) {
    if (!PACKED || half == ALL) return x[at_row(slot, column)];
    float value = x[at_row(slot % SLOTS<GROUP>, column)];
    return slot < SLOTS<GROUP> == (half == OF_PHI) ? value : 0.f;
}

// The right operand of `update`, a group's x [token][column] in a side's columns. Column n of half h is column 4 (n / 2) + 2h + n % 2 of 16.
template <int GROUP> struct Updater {
    static constexpr int EIGHTS = GROUP / 8;
    Operand<2> b[EIGHTS][2];
    __device__ __forceinline__ Updater(const float* x, const Own& own, Half half) {
        int g = own.lane / 4, l = own.lane % 4;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    b[e][h].set(i, row_element<GROUP>(x, e * 8 + 2 * l + i, own.side * 16 + g / 2 * 4 + 2 * h + g % 2, half));
    }
    // Adds phi x in 16 keys from `first` on to a lane's elements of them: rows g and g + 8.
    __device__ __forceinline__ void add(float4 (&v)[2], const float* phi, int first, const Own& own) const {
        int f = first + own.lane / 4, l = own.lane % 4;
        float added[2][4] = {};
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            float2 low = *(const float2*)(phi + at_feature<GROUP>(f, e * 8 + 2 * l));
            float2 high = *(const float2*)(phi + at_feature<GROUP>(f + 8, e * 8 + 2 * l));
            Operand<4> a;
            a.set(0, low.x), a.set(1, high.x), a.set(2, low.y), a.set(3, high.y);
#pragma unroll
            for (int h = 0; h < 2; h++) multiply(added[h], a, b[e][h]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            v[i].x += added[0][2 * i], v[i].y += added[0][2 * i + 1], v[i].z += added[1][2 * i], v[i].w += added[1][2 * i + 1];
    }
};

// A lane's elements of 16 keys of a tile from `first` on: rows g and g + 8, columns 4l to 4l + 3 of a side's.
__device__ __forceinline__ int own_place(int first, const Own& own) { return at(first + own.lane / 4, own.side * 16 + own.lane % 4 * 4); }
constexpr int EIGHT_KEYS = 8 * COLUMNS; // the swizzle of rows f and f + 8 is the same
__device__ __forceinline__ void load_own(float4 (&v)[2], const float* tile, int first, const Own& own) {
    const float* from = tile + own_place(first, own);
    v[0] = *(const float4*)from, v[1] = *(const float4*)(from + EIGHT_KEYS);
}
__device__ __forceinline__ void store_own(const float4 (&v)[2], float* tile, int first, const Own& own) {
    float* to = tile + own_place(first, own);
    *(float4*)to = v[0], *(float4*)(to + EIGHT_KEYS) = v[1];
}
// A lane's elements of a tile in a [dk, d] matrix, of which the tile has columns [from, ..): where it has them, and how many columns are left from there.
struct Place {
    int offset, left;
    __device__ __forceinline__ Place(int d, int from, int first, const Own& own) {
        int col = from + own.side * 16 + own.lane % 4 * 4;
        offset = (first + own.lane / 4) * d + col, left = d - col;
    }
};
template <class U>
__device__ __forceinline__ void save_own(const float4 (&v)[2], U* matrix, int dk, int d, const Place& place, int first, const Own& own) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!WHOLE && first + own.lane / 4 + 8 * i >= dk) continue;
        U* out = matrix + place.offset + 8 * i * d;
        Vec<U, 4> four = {from_f32<U>(v[i].x), from_f32<U>(v[i].y), from_f32<U>(v[i].z), from_f32<U>(v[i].w)};
        if (d % 4 == 0) {
            if (WHOLE || place.left > 0) *(Vec<U, 4>*)out = four;
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (e < place.left) out[e] = four.v[e];
        }
    }
}

// tile += sum_i phi_i (x) x_i for all tokens, from features phi or psi and x [token][column]; from zero, if `blank`. The result goes to columns
// [from, ..) of the [dk, d] matrix `to` and, rounded, of `rounded` if given; with `stay` it also takes the tile's place.
template <int GROUP>
__device__ __forceinline__ void update(const Tokens<GROUP>& t, const Held& s, Half half, float* tile, const float* x, bool blank, bool stay,
                                       float* to, int d, int from, T* rounded = nullptr) {
    Own own;
    const float* phi = s.features(half);
    int keys = t.keys(), last = t.groups() - 1;
#pragma unroll 1
    for (int group = 0; group <= last; group++) {
        Updater<GROUP> x_group(x + group * GROUP * COLUMNS, own, half);
        Place place(d, from, own.walker * 16, own);
#pragma unroll 1
        for (int first = own.walker * 16; first < keys; first += WALKERS * 16, place.offset += WALKERS * 16 * d) {
            __syncwarp(); // stores may have parted the lanes
            float4 v[2] = {};
            if (!blank || group > 0) load_own(v, tile, first, own);
            x_group.add(v, phi + group * GROUP * keys, first, own);
            if (stay || group < last) store_own(v, tile, first, own);
            if (group < last) continue;
            save_own(v, to, t.dk(), d, place, first, own);
            if (rounded) save_own(v, rounded, t.dk(), d, place, first, own);
        }
    }
}

// The right operand of `project`, a group's x [token][column] in a side's columns. Columns 4l + 2h and 4l + 2h + 1 of 16 are l and l + 4 of
// half h.
template <int GROUP> struct Projector {
    static constexpr int EIGHTS = GROUP / 8;
    Operand<2> b[EIGHTS][2];
    __device__ __forceinline__ Projector(const float* x, const Own& own, Half half) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            int slot = e * 8 + own.lane / 4, column = own.side * 16 + own.lane % 4 * 4;
            bool halved = PACKED && half != ALL, other = halved && slot < SLOTS<GROUP> != (half == OF_PHI);
            float4 v = *(const float4*)(x + at_row(halved ? slot % SLOTS<GROUP> : slot, column));
            if (other) v = make_float4(0.f, 0.f, 0.f, 0.f);
            b[e][0].set(0, v.x), b[e][0].set(1, v.y), b[e][1].set(0, v.z), b[e][1].set(1, v.w);
        }
    }
    // sum [16 keys, tokens] += tile x^T over the side's columns, from a lane's elements of the tile.
    __device__ __forceinline__ void add(float (&sum)[EIGHTS][4], const float4 (&v)[2]) const {
        const float4 &low = v[0], &high = v[1];
        Operand<4> a[2];
        a[0].set(0, low.x), a[0].set(1, high.x), a[0].set(2, low.y), a[0].set(3, high.y);
        a[1].set(0, low.z), a[1].set(1, high.z), a[1].set(2, low.w), a[1].set(3, high.w);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            // Tensor cores cut off what they add, which tokens in f32 would feel.
            float part[4] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) multiply(TWO_PARTS ? part : sum[e], a[h], b[e][h]);
            if (TWO_PARTS)
#pragma unroll
                for (int i = 0; i < 4; i++) sum[e][i] += part[i];
        }
    }
};

// Sums [key, token] over the columns of a side, one group's, held from tile to tile: block i of a warp begins at key
// 16 (walker + i WALKERS).
template <int GROUP> struct Projections {
    static constexpr int EIGHTS = GROUP / 8, COUNT = HELD ? HELD : 1;
    float sum[COUNT][EIGHTS][4];
    __device__ __forceinline__ Projections() {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int e = 0; e < EIGHTS; e++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][e][j] = 0.f;
    }
    static __device__ __forceinline__ int key(int i, const Own& own) { return (own.walker + i * WALKERS) * 16; }
    // Adds tile x^T.
    __device__ __forceinline__ void add(const float* tile, const float* x, int keys, Half half) {
        Own own;
        Projector<GROUP> p(x, own, half);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (has_key(key(i, own), keys)) {
                float4 v[2];
                load_own(v, tile, key(i, own), own);
                p.add(sum[i], v);
            }
    }
    // Calls f(token, key, sum) with each of a lane's sums of a block of keys.
    template <class F> static __device__ __forceinline__ void visit(float (&sum)[EIGHTS][4], int first, const Own& own, F f) {
        int lane = own.lane;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
#pragma unroll
            for (int i = 0; i < 4; i++) f(e * 8 + lane % 4 * 2 + i % 2, first + lane / 4 + i / 2 * 8, sum[e][i]);
    }
    template <class F> __device__ __forceinline__ void each(F f) {
        Own own;
#pragma unroll
        for (int i = 0; i < COUNT; i++) visit(sum[i], key(i, own), own, f);
    }
};

// parts[warp][j][i] = phi_i . chi_j over the warp's keys, of DOWN tokens i and ACROSS tokens j. In two parts always: denominators are made of it.
template <int DOWN, int ACROSS>
__device__ __forceinline__ void near_parts(const float* phi, const float* chi, int keys, float* parts) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, l = lane % 4;
    float sum[ACROSS / 8][4] = {};
#pragma unroll 1
    for (int f = warp * 8 + l; f < keys; f += WARPS * 8) {
        Operand<4, true> a;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = g + i % 2 * 8;
            a.set(i, token < DOWN ? phi[at_feature<DOWN>(f + i / 2 * 4, token)] : 0.f);
        }
#pragma unroll
        for (int e = 0; e < ACROSS / 8; e++) {
            Operand<2, true> b;
#pragma unroll
            for (int i = 0; i < 2; i++) b.set(i, chi[at_feature<ACROSS>(f + i * 4, e * 8 + g)]);
            multiply(sum[e], a, b);
        }
    }
    float* part = parts + warp * ACROSS * DOWN;
#pragma unroll
    for (int e = 0; e < ACROSS / 8; e++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (int token = g + i / 2 * 8; token < DOWN) part[(e * 8 + l * 2 + i % 2) * DOWN + token] = sum[e][i];
}
// The sums of the parts, in order, by all threads.
template <int COUNT> __device__ __forceinline__ void near_sum(const float* parts, float* to) {
    for (int i = threadIdx.x; i < COUNT; i += THREADS) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += parts[w * COUNT + i];
        to[i] = total;
    }
}
