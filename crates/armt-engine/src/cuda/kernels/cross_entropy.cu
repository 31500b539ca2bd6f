// Rows of logits: log-sum-exp, loss, gradient, index of the largest. Kernels come twice: a block a row, and for short rows a warp a
// row (`_short`). Rows may start at any element: the part up to the next 16 bytes, and what is left at the end, go one by one.

// Calls f(index, elements) on this thread's part of `length` elements of x, as single elements and as vectors of 16 bytes.
template <class F> __device__ __forceinline__ void each_part(const T* x, i64 length, int rank, int ranks, bool wide, F f) {
    constexpr int N = 16 / sizeof(T);
    i64 head = wide ? min((i64)((16 - (u64)x % 16) % 16 / sizeof(T)), length) : length;
    i64 vectors = (length - head) / N;
    for (i64 i = rank; i < head; i += ranks) f(i, *(const Vec<T, 1>*)(x + i));
    for (i64 i = rank; i < vectors; i += ranks) f(head + i * N, *(const Vec<T, N>*)(x + head + i * N));
    for (i64 i = head + vectors * N + rank; i < length; i += ranks) f(i, *(const Vec<T, 1>*)(x + i));
}

template <class V> struct Width;
template <class U, int N> struct Width<Vec<U, N>> { static constexpr int value = N; };

// Which row this thread works on, and as which of how many.
template <bool SHORT> struct Place {
    i64 row;
    int rank, ranks;
    __device__ Place() {
        row = SHORT ? ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32 : (i64)blockIdx.x;
        rank = SHORT ? threadIdx.x % 32 : threadIdx.x;
        ranks = SHORT ? 32 : blockDim.x;
    }
};
template <bool SHORT> __device__ __forceinline__ float row_sum(float x, float* scratch) {
    return SHORT ? warp_sum(x) : block_sum(x, scratch);
}
template <bool SHORT> __device__ __forceinline__ float row_max(float x, float* scratch) {
    return SHORT ? warp_max(x) : block_max(x, scratch);
}

// losses[r] = lse[r] - logits[r, target], both 0 for an ignored row. A target beyond the classes is reported in the fault words.
template <bool SHORT>
__device__ __forceinline__ void losses_of(const T* logits, const int* targets, float* lse, float* losses, i64 rows, i64 classes,
                                          int* fault) {
    __shared__ float scratch[32];
    Place<SHORT> at;
    if (at.row >= rows) return;
    i64 target = targets[at.row];
    if (target >= classes) {
        if (at.rank == 0 && atomicCAS(fault, 0, 2) == 0) fault[1] = (int)target;
        target = -1;
    }
    if (target < 0) {
        if (at.rank == 0) {
            losses[at.row] = 0.f;
            if (lse) lse[at.row] = 0.f;
        }
        return;
    }
    const T* x = logits + at.row * classes;
    // In one pass: the sum is kept relative to the largest so far. That starts at the least finite number, not at minus infinity,
    // whose difference with itself is not a number.
    float most = -3.4028235e38f, sum = 0;
    each_part(x, classes, at.rank, at.ranks, true, [&](i64, auto part) {
        constexpr int N = Width<decltype(part)>::value;
        float v[N], largest = most;
#pragma unroll
        for (int k = 0; k < N; k++) {
            v[k] = to_f32(part.v[k]);
            largest = fmaxf(largest, v[k]);
        }
        sum *= __expf(most - largest);
        most = largest;
#pragma unroll
        for (int k = 0; k < N; k++) sum += __expf(v[k] - most);
    });
    float largest = row_max<SHORT>(most, scratch);
    sum = row_sum<SHORT>(sum * __expf(most - largest), scratch);
    if (at.rank == 0) {
        float total = largest + logf(sum);
        losses[at.row] = total - to_f32(x[target]);
        if (lse) lse[at.row] = total;
    }
}

KERNEL(row_losses, __launch_bounds__(256))
(const T* logits, const int* targets, float* lse, float* losses, i64 rows, i64 classes, int* fault) {
    losses_of<false>(logits, targets, lse, losses, rows, classes, fault);
}
KERNEL(row_losses_short, __launch_bounds__(256))
(const T* logits, const int* targets, float* lse, float* losses, i64 rows, i64 classes, int* fault) {
    losses_of<true>(logits, targets, lse, losses, rows, classes, fault);
}

// One block: loss = the mean of the losses of rows with a target, and share = 1 / their number; both 0 where there is none.
KERNEL(mean_loss, __launch_bounds__(1024))
(const float* losses, const int* targets, float* loss, float* share, i64 rows) {
    __shared__ float scratch[32];
    float sum = 0, count = 0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < rows; i += blockDim.x) {
        sum += losses[i];
        count += targets[i] >= 0 ? 1.f : 0.f;
    }
    sum = block_sum(sum, scratch);
    count = block_sum(count, scratch);
    if (threadIdx.x == 0) {
        float one = count > 0.f ? 1.f / count : 0.f;
        *share = one;
        *loss = sum * one;
    }
}

// dlogits = (softmax(logits) - onehot(target)) * share * dloss, possibly in place.
template <bool SHORT>
__device__ __forceinline__ void gradient_of(const T* logits, const int* targets, const float* lse, const float* share,
                                            const float* dloss, T* dlogits, i64 rows, i64 classes) {
    Place<SHORT> at;
    if (at.row >= rows) return;
    i64 target = targets[at.row];
    const T* x = logits + at.row * classes;
    T* dx = dlogits + at.row * classes;
    bool counts = target >= 0 && target < classes, wide = ((u64)x & 15) == ((u64)dx & 15);
    float total = counts ? lse[at.row] : 0.f, scale = counts ? *share * *dloss : 0.f;
    each_part(x, classes, at.rank, at.ranks, wide, [&](i64 i, auto part) {
        constexpr int N = Width<decltype(part)>::value;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float p = __expf(to_f32(part.v[k]) - total) - (i + k == target ? 1.f : 0.f);
            part.v[k] = from_f32<T>(counts ? p * scale : 0.f);
        }
        *(decltype(part)*)(dx + i) = part;
    });
}

KERNEL(cross_entropy_backward, __launch_bounds__(256))
(const T* logits, const int* targets, const float* lse, const float* share, const float* dloss, T* dlogits,
    i64 rows, i64 classes) {
    gradient_of<false>(logits, targets, lse, share, dloss, dlogits, rows, classes);
}
KERNEL(cross_entropy_backward_short, __launch_bounds__(256))
(const T* logits, const int* targets, const float* lse, const float* share, const float* dloss,
    T* dlogits, i64 rows, i64 classes) {
    gradient_of<true>(logits, targets, lse, share, dloss, dlogits, rows, classes);
}

// Whether (v, i) comes before (w, j): larger, or as large and earlier. NaN never does.
__device__ __forceinline__ bool beats(float v, int i, float w, int j) { return v > w || (v == w && i < j); }

__device__ __forceinline__ void warp_best(float& best, int& where) {
#pragma unroll
    for (int m = 16; m; m >>= 1) {
        float v = __shfl_xor_sync(~0u, best, m);
        int i = __shfl_xor_sync(~0u, where, m);
        if (beats(v, i, best, where)) { best = v; where = i; }
    }
}

// y[r] = index of the largest of row r, the first among equals; 0 if all are NaN.
template <bool SHORT> __device__ __forceinline__ void largest_of(const T* x, int* y, i64 rows, i64 length) {
    __shared__ float values[8];
    __shared__ int places[8];
    constexpr int NOWHERE = 0x7fffffff;
    Place<SHORT> at;
    if (at.row >= rows) return;
    float best = __int_as_float(0xff800000);
    int where = NOWHERE;
    each_part(x + at.row * length, length, at.rank, at.ranks, true, [&](i64 i, auto part) {
        constexpr int N = Width<decltype(part)>::value;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float v = to_f32(part.v[k]);
            if (beats(v, (int)i + k, best, where)) { best = v; where = (int)i + k; }
        }
    });
    warp_best(best, where);
    if (!SHORT) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) { values[warp] = best; places[warp] = where; }
        __syncthreads();
        best = lane < 8 ? values[lane] : __int_as_float(0xff800000);
        where = lane < 8 ? places[lane] : NOWHERE;
        warp_best(best, where);
    }
    if (at.rank == 0) y[at.row] = where == NOWHERE ? 0 : where;
}

KERNEL(argmax, __launch_bounds__(256))(const T* x, int* y, i64 rows, i64 length) {
    largest_of<false>(x, y, rows, length);
}
KERNEL(argmax_short, __launch_bounds__(256))(const T* x, int* y, i64 rows, i64 length) {
    largest_of<true>(x, y, rows, length);
}
