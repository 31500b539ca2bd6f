// Conversion between element types, and sums of gradients of different types. The element type of the file plays no part.
extern "C" __global__ void f32_to_bf16(const float* x, bf16* y, i64 n) { EACH(i, n) y[i] = from_f32<bf16>(x[i]); }
extern "C" __global__ void bf16_to_f32(const bf16* x, float* y, i64 n) { EACH(i, n) y[i] = to_f32(x[i]); }
extern "C" __global__ void i32_to_f32(const int* x, float* y, i64 n) { EACH(i, n) y[i] = (float)x[i]; }

extern "C" __global__ void add_f32_to_f32(float* sum, const float* x, i64 n) { EACH(i, n) sum[i] += x[i]; }
extern "C" __global__ void add_bf16_to_f32(float* sum, const bf16* x, i64 n) { EACH(i, n) sum[i] += to_f32(x[i]); }
extern "C" __global__ void add_bf16_to_bf16(bf16* sum, const bf16* x, i64 n) {
    EACH(i, n) sum[i] = from_f32<bf16>(to_f32(sum[i]) + to_f32(x[i]));
}
