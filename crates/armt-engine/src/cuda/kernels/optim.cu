// AdamW and the norm of all gradients. Everything is f32; the shadow is what bf16 computations use.

// numbers: lr, 1 - b1^t, 1 - b2^t, factor of clipping by norm, below 0 where the norm is not finite: then nothing is changed
KERNEL(adamw)(float* value, const float* grad, float* mean, float* square, bf16* shadow, const float* numbers,
              i64 n, float rate, float decay, float beta1, float beta2, float eps, float limit) {
    float lr = numbers[0] * rate, factor = numbers[3];
    if (factor < 0.f) return;
    float keep = 1.f - lr * decay, size = lr / numbers[1], root = rsqrtf(numbers[2]);
    EACH(i, n) {
        float g = grad[i] * factor;
        g = g > limit ? limit : g < -limit ? -limit : g; // NaN stays NaN
        float m = beta1 * mean[i] + (1.f - beta1) * g;
        float v = beta2 * square[i] + (1.f - beta2) * g * g;
        mean[i] = m;
        square[i] = v;
        float p = value[i] * keep - size * m / (sqrtf(v) * root + eps);
        value[i] = p;
        if (shadow) shadow[i] = from_f32<bf16>(p);
    }
}

// One block sums the squares of one piece.
KERNEL(sum_of_squares)(const float* x, float* partial, i64 n, i64 piece) {
    __shared__ float scratch[32];
    i64 from = blockIdx.x * piece, to = min(from + piece, n);
    float s = 0;
    for (i64 i = from + threadIdx.x; i < to; i += blockDim.x) s += x[i] * x[i];
    s = block_sum(s, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = s;
}

// One block adds the pieces, in a fixed order.
KERNEL(norm_factor)(const float* partial, i64 n, float* norm, float* numbers, float most) {
    __shared__ float scratch[32];
    float s = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) s += partial[i];
    s = sqrtf(block_sum(s, scratch));
    if (threadIdx.x == 0) {
        *norm = s;
        numbers[3] = s <= 3.4028234e38f ? fminf(most / (s + 1e-6f), 1.f) : -1.f;
    }
}
