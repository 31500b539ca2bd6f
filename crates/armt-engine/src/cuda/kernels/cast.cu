// Conversion between element types, and sums of gradients of different types. The element type of the file plays no part.
KERNEL(f32_to_bf16)(const float* x, bf16* y, i64 n) {
    each_wide<4>(n, aligned(x, y), [&](auto count, i64 i) {
        Vec<float, count.k> own = *(const Vec<float, count.k>*)(x + i);
        Vec<bf16, count.k> out;
        for (int e = 0; e < count.k; e++) out.v[e] = from_f32<bf16>(own.v[e]);
        *(Vec<bf16, count.k>*)(y + i) = out;
    });
}
KERNEL(bf16_to_f32)(const bf16* x, float* y, i64 n) { EACH(i, n) y[i] = to_f32(x[i]); }
KERNEL(i32_to_f32)(const int* x, float* y, i64 n) { EACH(i, n) y[i] = (float)x[i]; }

KERNEL(add_f32_to_f32)(float* sum, const float* x, i64 n) { EACH(i, n) sum[i] += x[i]; }
KERNEL(add_bf16_to_f32)(float* sum, const bf16* x, i64 n) { EACH(i, n) sum[i] += to_f32(x[i]); }
KERNEL(add_bf16_to_bf16)(bf16* sum, const bf16* x, i64 n) {
    each_wide<8>(n, aligned(x, sum), [&](auto count, i64 i) {
        Vec<bf16, count.k> own = *(const Vec<bf16, count.k>*)(x + i), out = *(const Vec<bf16, count.k>*)(sum + i);
        for (int e = 0; e < count.k; e++) out.v[e] = from_f32<bf16>(to_f32(out.v[e]) + to_f32(own.v[e]));
        *(Vec<bf16, count.k>*)(sum + i) = out;
    });
}
