// Rotary embedding in halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the first `rotated` heads of each packed row, one
// thread an element. `table` rows share a table of t angles; sign -1 gives the inverse.
//
// I is the type of indices: divisions of 64 bits would take most of the time.
template <class I>
__device__ __forceinline__ void rotate(const T* x, const float* cos, const float* sin, T* y, i64 n, I row, I rotated, I size, I half, I t, I table,
                                       float sign) {
    EACH(j, n) {
        I i = (I)j, line = i / row, column = i - line * row, head = column / size, d = column - head * size;
        if (head >= rotated || d >= 2 * half) {
            y[i] = x[i];
            continue;
        }
        bool second = d >= half;
        I at = (line / table * t + line % t) * half + (second ? d - half : d);
        float own = to_f32(x[i]), other = to_f32(x[second ? i - half : i + half]);
        float c = cos[at], s = sign * sin[at];
        y[i] = from_f32<T>(second ? own * c + other * s : own * c - other * s);
    }
}
KERNEL(rotary)(const T* x, const float* cos, const float* sin, T* y, i64 n, i64 row, i64 rotated, i64 size, i64 half,
               i64 t, i64 table, float sign) {
    if (n < 1ll << 31)
        rotate<u32>(x, cos, sin, y, n, (u32)row, (u32)rotated, (u32)size, (u32)half, (u32)t, (u32)table, sign);
    else
        rotate<i64>(x, cos, sin, y, n, row, rotated, size, half, t, table, sign);
}
