// y = e^(x - max) / sum over rows of d. Rows of up to 1024 are held in registers by one warp, HELD elements a lane, eight rows a block;
// longer rows take a block each and are read again for each pass.
#define WARPS 8
#define LOWEST __int_as_float(0xff800000)

template <int HELD> __device__ __forceinline__ void forward(const T* x, T* y, i64 rows, int d) {
    int lane = threadIdx.x % 32;
    i64 r = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (r >= rows) return;
    x += r * d;
    y += r * d;
    float v[HELD], max = LOWEST, sum = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int c = j * 32 + lane;
        v[j] = c < d ? to_f32(x[c]) : LOWEST;
        max = fmaxf(max, v[j]);
    }
    max = warp_max(max);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        v[j] = j * 32 + lane < d ? __expf(v[j] - max) : 0.f;
        sum += v[j];
    }
    float scale = 1.f / warp_sum(sum);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int c = j * 32 + lane;
        if (c < d) y[c] = from_f32<T>(v[j] * scale);
    }
}

template <int HELD> __device__ __forceinline__ void backward(const T* y, const T* dy, T* dx, i64 rows, int d) {
    int lane = threadIdx.x % 32;
    i64 r = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (r >= rows) return;
    y += r * d;
    dy += r * d;
    dx += r * d;
    float v[HELD], u[HELD], along = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int c = j * 32 + lane;
        v[j] = c < d ? to_f32(y[c]) : 0.f;
        u[j] = c < d ? to_f32(dy[c]) : 0.f;
        along += v[j] * u[j];
    }
    along = warp_sum(along);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int c = j * 32 + lane;
        if (c < d) dx[c] = from_f32<T>(v[j] * (u[j] - along));
    }
}

#define HELD_ROWS(held)                                                                                                             \
    KERNEL(softmax_##held, __launch_bounds__(256))(const T* x, T* y, i64 rows, i64 d) {                                             \
        forward<held>(x, y, rows, (int)d);                                                                                          \
    }                                                                                                                               \
    KERNEL(softmax_backward_##held, __launch_bounds__(256))                                                                         \
        (const T* y, const T* dy, T* dx, i64 rows, i64 d) {                                                                         \
        backward<held>(y, dy, dx, rows, (int)d);                                                                                    \
    }
HELD_ROWS(2)
HELD_ROWS(8)
HELD_ROWS(32)

KERNEL(softmax_wide, __launch_bounds__(256))(const T* x, T* y, i64 rows, i64 d) {
    __shared__ float scratch[32];
    x += blockIdx.x * d;
    y += blockIdx.x * d;
    float max = LOWEST, sum = 0;
    for (i64 c = threadIdx.x; c < d; c += blockDim.x) max = fmaxf(max, to_f32(x[c]));
    max = block_max(max, scratch);
    for (i64 c = threadIdx.x; c < d; c += blockDim.x) sum += __expf(to_f32(x[c]) - max);
    float scale = 1.f / block_sum(sum, scratch);
    for (i64 c = threadIdx.x; c < d; c += blockDim.x) y[c] = from_f32<T>(__expf(to_f32(x[c]) - max) * scale);
}
KERNEL(softmax_backward_wide, __launch_bounds__(256))(const T* y, const T* dy, T* dx, i64 rows, i64 d) {
    __shared__ float scratch[32];
    y += blockIdx.x * d;
    dy += blockIdx.x * d;
    dx += blockIdx.x * d;
    float along = 0;
    for (i64 c = threadIdx.x; c < d; c += blockDim.x) along += to_f32(y[c]) * to_f32(dy[c]);
    along = block_sum(along, scratch);
    for (i64 c = threadIdx.x; c < d; c += blockDim.x) dx[c] = from_f32<T>(to_f32(y[c]) * (to_f32(dy[c]) - along));
}
