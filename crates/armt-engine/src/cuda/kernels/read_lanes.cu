// The features of the general read and their way back, where r = relu([q, -q]) has C_OWN elements for each lane of a warp and nu is at most
// 3. A warp takes several queries of one memory, whose z stays in registers, and lanes ask their neighbours for what lies beyond their own
// elements. Twins of the kernels of the same names in assoc.cu, which take any width and any order.
constexpr int OWN = C_OWN, WIDTH = 32 * OWN, HALF = WIDTH / 2, ORDERS = 3, WARPS = 4;
constexpr float EPSILON = 1e-5f;

// Where a warp works: queries first, first + WARPS, ... of the t of memory n, `each` of them at most. Block (n, chunk).
struct Share {
    i64 n;
    int lane, first, end;
    __device__ __forceinline__ Share(int t, int each) {
        int length = WARPS * each, chunks = (t + length - 1) / length, from = blockIdx.x % chunks * length;
        n = blockIdx.x / chunks, lane = threadIdx.x % 32, first = from + threadIdx.x / 32, end = min(from + length, t);
    }
};

// A query's raw elements that make a lane's elements of r: both halves of r are made of the same.
__device__ __forceinline__ Vec<T, OWN> load_query(const T* q, int lane) { return *(const Vec<T, OWN>*)(q + lane % 16 * OWN); }

// A lane's elements of a [nu, WIDTH] row: those of order j are at (j - 1) WIDTH + lane OWN.
template <class U> struct Orders {
    Vec<U, OWN> v[ORDERS];
    __device__ __forceinline__ Orders(const U* row, int lane, int nu) {
#pragma unroll
        for (int j = 0; j < ORDERS; j++) v[j] = j < nu ? *(const Vec<U, OWN>*)(row + j * WIDTH + lane * OWN) : Vec<U, OWN>{};
    }
};

struct Row {
    float x[OWN];          // of q
    float r[ORDERS + OWN]; // the lane's elements, and before them ORDERS of the lanes below
    __device__ __forceinline__ Row(const Vec<T, OWN>& raw, int lane) {
#pragma unroll
        for (int e = 0; e < OWN; e++) {
            x[e] = to_f32(raw.v[e]);
            r[ORDERS + e] = fmaxf(lane < 16 ? x[e] : -x[e], 0.f);
        }
#pragma unroll
        for (int k = 1; k <= ORDERS; k++) {
            int below = (k + OWN - 1) / OWN;
            r[ORDERS - k] = __shfl_sync(~0u, r[ORDERS + below * OWN - k], lane - below & 31);
        }
    }
    __device__ __forceinline__ float own(int e) const { return r[ORDERS + e]; }
    // r[c - j] where own(e) is r[c].
    __device__ __forceinline__ float before(int e, int j) const { return r[ORDERS + e - j]; }
    __device__ __forceinline__ float feature(int e, int j) const { return own(e) * before(e, j); }
};

// qn = phi(q) / (z . phi(q) + eps).
KERNEL(read_features, __launch_bounds__(32 * WARPS))(const T* q, const float* z, T* qn, int t, int nu, int each) {
    Share s(t, each);
    q += s.n * t * HALF, qn += s.n * t * nu * WIDTH;
    Orders<float> zs(z + s.n * nu * WIDTH, s.lane, nu);
    if (s.first >= s.end) return;
    Vec<T, OWN> next = load_query(q + s.first * HALF, s.lane);
    for (int i = s.first; i < s.end; i += WARPS) {
        Row row(next, s.lane);
        if (i + WARPS < s.end) next = load_query(q + (i + WARPS) * HALF, s.lane);
        float den = 0;
#pragma unroll
        for (int j = 1; j <= ORDERS; j++)
#pragma unroll
            for (int e = 0; e < OWN; e++) den += zs.v[j - 1].v[e] * row.feature(e, j);
        float scale = 1.f / (warp_sum(den) + EPSILON);
        T* out = qn + (i64)i * nu * WIDTH + s.lane * OWN;
#pragma unroll
        for (int j = 1; j <= ORDERS; j++) {
            Vec<T, OWN> own;
#pragma unroll
            for (int e = 0; e < OWN; e++) own.v[e] = from_f32<T>(row.feature(e, j) * scale);
            if (j <= nu) *(Vec<T, OWN>*)(out + (j - 1) * WIDTH) = own;
        }
    }
}

// dq from dqn, and the chunk's sum of dden_t phi_t to parts [n, chunk, nu WIDTH], if wanted: dden = -(dqn . phi) / den^2.
KERNEL(read_backward, __launch_bounds__(32 * WARPS))
(const T* q, const float* z, const T* dqn, T* dq, float* parts, int t, int nu, int each) {
    __shared__ float sums[WARPS][ORDERS * WIDTH];
    Share s(t, each);
    q += s.n * t * HALF, dq += s.n * t * HALF, dqn += s.n * t * nu * WIDTH;
    Orders<float> zs(z + s.n * nu * WIDTH, s.lane, nu);
    float dz[ORDERS][OWN] = {};
    for (int i = s.first; i < s.end; i += WARPS) {
        Row row(load_query(q + i * HALF, s.lane), s.lane);
        Orders<T> grad(dqn + (i64)i * nu * WIDTH, s.lane, nu);
        float zk = 0, gk = 0;
#pragma unroll
        for (int j = 1; j <= ORDERS; j++)
#pragma unroll
            for (int e = 0; e < OWN; e++) {
                float phi = row.feature(e, j);
                zk += zs.v[j - 1].v[e] * phi;
                gk += to_f32(grad.v[j - 1].v[e]) * phi;
            }
        float scale = 1.f / (warp_sum(zk) + EPSILON), dden = -warp_sum(gk) * scale * scale;
        float dr[OWN] = {};
#pragma unroll
        for (int j = 1; j <= ORDERS; j++) {
            // dphi = dqn / den + dden z counts for r[c] by r[c - j], and the other way round.
            float back[OWN];
#pragma unroll
            for (int e = 0; e < OWN; e++) {
                float dphi = to_f32(grad.v[j - 1].v[e]) * scale + dden * zs.v[j - 1].v[e];
                dr[e] += dphi * row.before(e, j);
                back[e] = dphi * row.own(e);
                dz[j - 1][e] += dden * row.feature(e, j);
            }
#pragma unroll
            for (int e = 0; e < OWN; e++) {
                int above = (e + j) / OWN;
                dr[e] += above ? __shfl_sync(~0u, back[(e + j) % OWN], s.lane + above & 31) : back[(e + j) % OWN];
            }
        }
        Vec<T, OWN> out;
#pragma unroll
        for (int e = 0; e < OWN; e++) {
            float negative = __shfl_xor_sync(~0u, dr[e], 16);
            out.v[e] = from_f32<T>(row.x[e] > 0.f ? dr[e] : row.x[e] < 0.f ? -negative : 0.f);
        }
        if (s.lane < 16) *(Vec<T, OWN>*)(dq + i * HALF + s.lane * OWN) = out;
    }
    if (!parts) return;
#pragma unroll
    for (int j = 0; j < ORDERS; j++)
#pragma unroll
        for (int e = 0; e < OWN; e++) sums[threadIdx.x / 32][j * WIDTH + s.lane * OWN + e] = dz[j][e];
    __syncthreads();
    parts += (i64)blockIdx.x * nu * WIDTH;
    for (int f = threadIdx.x; f < nu * WIDTH; f += 32 * WARPS) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][f];
        parts[f] = sum;
    }
}
