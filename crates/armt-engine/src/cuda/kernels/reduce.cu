// Sums over the middle axis of [outer, middle, inner], in f32 and in a fixed order. gridDim.y pieces of the summed axis give
// gridDim.y partial sums [outer, pieces, inner]; one piece gives the result.

// inner = 1: block (o, piece)
extern "C" __global__ void sum_last(const T* x, float* y, i64 middle, bool accumulate) {
    __shared__ float scratch[32];
    i64 o = blockIdx.x, piece = blockIdx.y, pieces = gridDim.y;
    i64 length = (middle + pieces - 1) / pieces, from = piece * length, to = min(from + length, middle);
    float s = 0;
    for (i64 m = from + threadIdx.x; m < to; m += blockDim.x) s += to_f32(x[o * middle + m]);
    s = block_sum(s, scratch);
    if (threadIdx.x == 0) {
        float* out = y + o * pieces + piece;
        *out = accumulate ? *out + s : s;
    }
}

// block (o, 32 columns; piece) of 256 threads: 8 rows at a time
extern "C" __global__ void sum_middle(const T* x, float* y, i64 middle, i64 inner, bool accumulate) {
    __shared__ float part[8][33];
    i64 tiles = (inner + 31) / 32, o = blockIdx.x / tiles, tile = blockIdx.x % tiles, piece = blockIdx.y, pieces = gridDim.y;
    i64 length = (middle + pieces - 1) / pieces, from = piece * length, to = min(from + length, middle);
    int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    i64 i = tile * 32 + lane;
    float s = 0;
    if (i < inner)
        for (i64 m = from + row; m < to; m += 8) s += to_f32(x[(o * middle + m) * inner + i]);
    part[row][lane] = s;
    __syncthreads();
    if (row == 0 && i < inner) {
#pragma unroll
        for (int r = 1; r < 8; r++) s += part[r][lane];
        float* out = y + (o * pieces + piece) * inner + i;
        *out = accumulate ? *out + s : s;
    }
}

// dx[o, m, i] = dy[o, i]
extern "C" __global__ void spread(const float* dy, T* dx, i64 n, i64 middle, i64 inner) {
    EACH(j, n) dx[j] = from_f32<T>(dy[j / (middle * inner) * inner + j % inner]);
}
