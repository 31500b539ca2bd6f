// The projected write's part of the kernels that walk over A: tokens are written in turn, each against what the ones before it left. At most one
// group of them, m <= GROUP.
//
//   n_i = |phi_i|^2 + eps, G_ij = phi_i . phi_j, C_ij = b_i G_ij / n_i below the diagonal, T = (I + C)^-1
//   psi_j = sum_i T_ij phi_i, R_i = b_i (v_i - A^T phi_i / n_i), A' = A + sum_i psi_i (x) R_i
//
// psi_j is phi_j as the writes after it leave it, (I - b_m phi_m phi_m^T / n_m) .. phi_j, so it is never longer than phi_j. In the walk over
// tiles there is then nothing more to do than in the paper's write, with n_i for its denominator, phi to ask A with and psi to add with; and
// on the way back psi to ask dA' with. What comes back to psi is kept apart from what comes back to phi, and joins it behind the last tile.

// T and gamma of tokens whose features, n, z . phi_i + eps (for now in gamma) and `near` are there: T by the first warp, a column a lane, and gamma by the
// second. As soon as a token's row is known it is taken to all later ones, which do not wait for each other.
template <int GROUP> __device__ __forceinline__ void take_turns(const Tokens<GROUP>& t, const Held& s) {
    constexpr int TAKERS = SLOTS<GROUP>;
    int own = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= 2) return;
    float inverse = own < TAKERS ? 1.f / s.den[own] : 0.f, scale = own < TAKERS ? -s.b[own] * inverse : 0.f;
    if (warp == 0) {
        float sum[TAKERS] = {};
#pragma unroll
        for (int i = 0; i < TAKERS; i++) {
            float column = __shfl_sync(~0u, scale, i) * sum[i]; // nothing above the diagonal
            if (i == own) column = 1.f;
#pragma unroll
            for (int k = i + 1; k < TAKERS; k++) sum[k] += column * s.near[i * GROUP + k];
            if (own < TAKERS) s.turn[i * GROUP + own] = column;
        }
    } else {
        float met[TAKERS], gamma = 0.f;
#pragma unroll
        for (int i = 0; i < TAKERS; i++) met[i] = s.gamma[i];
#pragma unroll
        for (int i = 0; i < TAKERS; i++) {
            float left = fminf(fmaxf(1.f - met[i] * __shfl_sync(~0u, inverse, i), 0.f), 1.f);
            float now = !t.corrected || (i == 0 && t.first) ? 1.f : left;
            if (i == own) gamma = now;
#pragma unroll
            for (int k = i + 1; k < TAKERS; k++) met[k] += now * s.near[i * GROUP + k];
        }
        __syncwarp();
        if (own < TAKERS) s.gamma[own] = gamma;
    }
}

// psi from phi and T, a product [keys, tokens] in two parts: by all warps, 16 keys at a time.
template <int GROUP> __device__ __forceinline__ void make_psi(const Tokens<GROUP>& t, const Held& s) {
    constexpr int TAKERS = SLOTS<GROUP>, EIGHTS = GROUP / 8;
    int lane = threadIdx.x % 32, g = lane / 4, l = lane % 4;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 16; first < t.keys(); first += WARPS * 16) {
        int f = first + g;
        float sum[EIGHTS][4] = {};
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            int token = e * 8 + 2 * l;
            Operand<4, true> a;
            float2 low = {}, high = {};
            if (token < TAKERS) {
                low = *(const float2*)(s.phi + at_feature<GROUP>(f, token));
                high = *(const float2*)(s.phi + at_feature<GROUP>(f + 8, token));
            }
            a.set(0, low.x), a.set(1, high.x), a.set(2, low.y), a.set(3, high.y);
            // Tokens have no part in those that come after them.
#pragma unroll
            for (int h = 0; h <= e; h++) {
                Operand<2, true> b;
#pragma unroll
                for (int i = 0; i < 2; i++) b.set(i, token < TAKERS ? s.turn[(token + i) * GROUP + h * 8 + g] : 0.f);
                multiply(sum[h], a, b);
            }
        }
#pragma unroll
        for (int h = 0; h < EIGHTS; h++)
            if (int token = h * 8 + 2 * l; token < TAKERS) {
                *(float2*)(s.psi + at_feature<GROUP>(f, token)) = make_float2(sum[h][0], sum[h][1]);
                *(float2*)(s.psi + at_feature<GROUP>(f + 8, token)) = make_float2(sum[h][2], sum[h][3]);
            }
    }
}

// All of the above behind load_features. Ends with a barrier.
template <int GROUP> __device__ __forceinline__ void load_turns(const Tokens<GROUP>& t, const Held& s) {
    near_parts<GROUP, GROUP>(s.phi, s.phi, t.keys(), s.rows);
    __syncthreads();
    near_sum<GROUP * GROUP>(s.rows, s.near);
    __syncthreads();
    take_turns(t, s);
    __syncthreads();
    make_psi(t, s);
    __syncthreads();
}

// All tokens' features of one key, in order.
template <int GROUP> __device__ __forceinline__ void load_key(float (&p)[SLOTS<GROUP>], const float* features, int key) {
#pragma unroll
    for (int i = 0; i < SLOTS<GROUP>; i += 4) {
        float4 v = *(const float4*)(features + at_feature<GROUP>(key, i));
        p[i] = v.x, p[i + 1] = v.y, p[i + 2] = v.z, p[i + 3] = v.w;
    }
}

// The way back of psi: from its gradient, which has taken psi's place, to that of phi, added to dphi [token][dk], and to those of b and n, added
// to db and dden. With Q_ij = phi_i . dpsi_j, dC = -T^T Q T^T below the diagonal:
//   dphi_i += sum_j T_ij dpsi_j + sum_{j<i} dG_ij phi_j + sum_{j>i} dG_ji phi_j + 2 dn_i phi_i, dG_ij = b_i dC_ij / n_i,
//   db_i += sum_j G_ij dC_ij / n_i, dn_i -= b_i sum_j G_ij dC_ij / n_i^2.
// Begins and ends with a barrier. `rows` has room for every warp's part of Q.
template <int GROUP> __device__ __forceinline__ void turns_back(const Tokens<GROUP>& t, const Held& s, float* dphi) {
    constexpr int SQUARE = GROUP * GROUP, TAKERS = SLOTS<GROUP>;
    float *first = s.work, *second = s.work + SQUARE;
    int place = threadIdx.x, i = place / GROUP, j = place % GROUP;
    __syncthreads();
    near_parts<GROUP, GROUP>(s.phi, s.psi, t.keys(), s.rows);
    __syncthreads();
    near_sum<SQUARE>(s.rows, first); // [j][i]
    __syncthreads();
    // Q T^T at (i, j).
    if (place < SQUARE) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < TAKERS; k++) sum += first[k * GROUP + i] * s.turn[j * GROUP + k];
        second[place] = sum;
    }
    __syncthreads();
    // dC.
    if (place < SQUARE) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < TAKERS; k++) sum += s.turn[k * GROUP + i] * second[k * GROUP + j];
        first[place] = i > j ? -sum : 0.f;
    }
    __syncthreads();
    if (threadIdx.x < t.m) {
        int own = threadIdx.x;
        float sum = 0, n = s.den[own];
        for (int k = 0; k < own; k++) sum += s.near[own * GROUP + k] * first[own * GROUP + k];
        s.db[own] += sum / n;
        s.dden[own] -= s.b[own] * sum / (n * n);
    }
    __syncthreads();
    // What phi_j counts for in dphi_i.
    if (place < SQUARE) {
        float value = 0.f;
        if (i < t.m && j < t.m) {
            if (i == j) value = 2.f * s.dden[i];
            else value = i > j ? s.b[i] / s.den[i] * first[place] : s.b[j] / s.den[j] * first[j * GROUP + i];
        }
        second[place] = value;
    }
    __syncthreads();
    for (int f = threadIdx.x; f < t.dk(); f += THREADS) {
        float p[TAKERS], q[TAKERS];
        load_key<GROUP>(p, s.phi, f);
        load_key<GROUP>(q, s.psi, f);
#pragma unroll 1
        for (int token = 0; token < t.m; token++) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < TAKERS; k++) sum += s.turn[token * GROUP + k] * q[k] + second[token * GROUP + k] * p[k];
            dphi[token * t.dk() + f] += sum;
        }
    }
    __syncthreads();
}
