// The projected write's part of the kernels that walk over A: tokens are written in turn, each against what the ones before it left. At most one
// group of them, m <= GROUP.
//
//   n_i = |phi_i|^2 + eps, G_ij = phi_i . phi_j, C_ij = b_i G_ij / n_i below the diagonal, T = (I + C)^-1
//   psi_j = sum_i T_ij phi_i, R_i = b_i (v_i - A^T phi_i / n_i), A' = A + sum_i psi_i (x) R_i
//
// psi_j is phi_j as the writes after it leave it, (I - b_m phi_m phi_m^T / n_m) .. phi_j, so it is never longer than phi_j. In the walk over
// tiles there is then nothing more to do than in the paper's write, with n_i for its denominator, phi to ask A with and psi to add with; and
// on the way back psi to ask dA' with. What comes back to psi is kept apart from what comes back to phi, and joins it behind the last tile.

// T and gamma of tokens whose features, n, z . phi_i + eps (for now in gamma) and `near` are there: by the first warp, a column of T a lane.
template <int GROUP> __device__ __forceinline__ void take_turns(const Tokens<GROUP>& t, const Held& s) {
    if (threadIdx.x >= 32) return;
    int own = threadIdx.x;
    constexpr int TAKERS = SLOTS<GROUP>;
    float column[TAKERS], gamma[TAKERS];
#pragma unroll
    for (int i = 0; i < TAKERS; i++) {
        column[i] = gamma[i] = 0.f;
        if (i >= t.m) continue;
        float met = s.gamma[i], sum = 0.f, n = s.den[i];
#pragma unroll
        for (int k = 0; k < i; k++) {
            float near = s.near[i * GROUP + k];
            met += gamma[k] * near;
            sum += column[k] * near;
        }
        gamma[i] = !t.corrected || (i == 0 && t.first) ? 1.f : fminf(fmaxf(1.f - met / n, 0.f), 1.f);
        column[i] = i == own ? 1.f : -s.b[i] / n * sum; // nothing above the diagonal
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TAKERS; i++) {
        if (own < TAKERS) s.turn[i * GROUP + own] = column[i];
        if (own == i) s.gamma[i] = gamma[i];
    }
}

// All tokens' features of one key, in order.
template <int GROUP> __device__ __forceinline__ void load_key(float (&p)[SLOTS<GROUP>], const float* features, int key) {
#pragma unroll
    for (int i = 0; i < SLOTS<GROUP>; i += 4) {
        float4 v = *(const float4*)(features + at_feature<GROUP>(key, i));
        p[i] = v.x, p[i + 1] = v.y, p[i + 2] = v.z, p[i + 3] = v.w;
    }
}

// psi from phi and T, by all threads.
template <int GROUP> __device__ __forceinline__ void make_psi(const Tokens<GROUP>& t, const Held& s) {
    for (int f = threadIdx.x; f < t.keys(); f += THREADS) {
        constexpr int TAKERS = SLOTS<GROUP>;
        float p[TAKERS], q[TAKERS] = {};
        load_key<GROUP>(p, s.phi, f);
#pragma unroll
        for (int i = 0; i < TAKERS; i++)
            if (i < t.m)
#pragma unroll
                for (int j = 0; j <= i; j++) q[j] += s.turn[i * GROUP + j] * p[i];
#pragma unroll
        for (int i = 0; i < TAKERS; i += 4) *(float4*)(s.psi + at_feature<GROUP>(f, i)) = make_float4(q[i], q[i + 1], q[i + 2], q[i + 3]);
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
