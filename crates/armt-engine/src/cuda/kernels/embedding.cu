// Rows of a table, and the sum of gradient rows into one.

// y[r] = table[ids[r]]: a warp a row. An id outside the table is reported in the fault words, and row 0 stands in for it.
KERNEL(embedding)(const T* table, const int* ids, T* y, i64 rows, i64 d, i64 vocabulary, int* fault) {
    constexpr int N = 16 / sizeof(T);
    bool wide = (((u64)table | (u64)y | (u64)d * sizeof(T)) & 15) == 0;
    int lane = threadIdx.x % 32;
    i64 warps = (i64)gridDim.x * blockDim.x / 32;
    for (i64 r = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32; r < rows; r += warps) {
        i64 id = ids[r];
        if (id < 0 || id >= vocabulary) {
            if (lane == 0 && atomicCAS(fault, 0, 1) == 0) fault[1] = (int)id;
            id = 0;
        }
        const T* from = table + id * d;
        T* to = y + r * d;
        if (wide) {
            for (i64 i = lane; i < d / N; i += 32) ((Vec<T, N>*)to)[i] = ((const Vec<T, N>*)from)[i];
        } else {
            for (i64 i = lane; i < d; i += 32) to[i] = from[i];
        }
    }
}

// dtable[ids[i]] += dy[i], in the order of i. Block (range of `span` table rows; 256 columns; piece of `length` positions) of 256
// threads; piece p adds to the p-th table. The block lists the positions of a chunk whose ids are in its range, in order (each
// warp's matches follow from ballots), then adds the listed rows, a thread a column.
constexpr int CHUNK = 2048, TAKE = CHUNK / 256, AHEAD = 8;

KERNEL(embedding_backward, __launch_bounds__(256))
(const T* dy, const int* ids, float* dtable, i64 n, i64 d, i64 vocabulary, i64 span, i64 length) {
    __shared__ int list[CHUNK]; // row in the range * CHUNK + position in the chunk
    __shared__ int counts[8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 first = (i64)blockIdx.x * span, last = min(first + span, vocabulary);
    i64 column = (i64)blockIdx.y * 256 + threadIdx.x;
    i64 from = (i64)blockIdx.z * length, to = min(from + length, n);
    float* table = dtable + ((i64)blockIdx.z * vocabulary + first) * d + column; // [span, d] of this range
    // The row whose sum is in the register; rows alternate rarely where it matters, with many positions on few rows.
    int held = -1;
    float sum = 0;
    for (i64 chunk = from; chunk < to; chunk += CHUNK) {
        int row[TAKE], total = 0;
        u32 votes[TAKE];
#pragma unroll
        for (int k = 0; k < TAKE; k++) {
            i64 at = chunk + warp * (TAKE * 32) + k * 32 + lane;
            i64 id = at < to ? ids[at] : -1;
            row[k] = id >= first && id < last ? (int)(id - first) : -1;
        }
#pragma unroll
        for (int k = 0; k < TAKE; k++) {
            votes[k] = __ballot_sync(~0u, row[k] >= 0);
            total += __popc(votes[k]);
        }
        __syncthreads(); // the list of the chunk before has been read
        if (lane == 0) counts[warp] = total;
        __syncthreads();
        int before = 0, count = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) {
            if (w < warp) before += counts[w];
            count += counts[w];
        }
#pragma unroll
        for (int k = 0; k < TAKE; k++) {
            if (row[k] >= 0)
                list[before + __popc(votes[k] & ((1u << lane) - 1))] = row[k] * CHUNK + warp * (TAKE * 32) + k * 32 + lane;
            before += __popc(votes[k]);
        }
        __syncthreads();
        if (column >= d) continue;
        const T* rows = dy + chunk * d + column;
        for (int m = 0; m < count; m += AHEAD) {
            float ahead[AHEAD];
            int entry[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                entry[u] = m + u < count ? list[m + u] : -1;
                ahead[u] = entry[u] >= 0 ? to_f32(rows[(i64)(entry[u] % CHUNK) * d]) : 0.f;
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (entry[u] < 0) break;
                int to_row = entry[u] / CHUNK;
                if (to_row != held) {
                    if (held >= 0) table[held * d] = sum;
                    held = to_row;
                    sum = table[held * d];
                }
                sum += ahead[u];
            }
        }
    }
    if (held >= 0) table[held * d] = sum;
}
