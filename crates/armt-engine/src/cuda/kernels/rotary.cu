// Rotary embedding in halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the first `rotated` heads of each packed row, one
// thread an element. `table` rows share a table of t angles; sign -1 gives the inverse.
extern "C" __global__ void rotary(const T* x, const float* cos, const float* sin, T* y, i64 n, i64 row, i64 rotated, i64 size, i64 half,
                                  i64 t, i64 table, float sign) {
    EACH(i, n) {
        i64 column = i % row, position = i / row / table * t + i / row % t;
        i64 d = column % size;
        if (column / size >= rotated || d >= 2 * half) {
            y[i] = x[i];
            continue;
        }
        bool second = d >= half;
        i64 at = position * half + (second ? d - half : d);
        float own = to_f32(x[i]), other = to_f32(x[second ? i - half : i + half]);
        float c = cos[at], s = sign * sin[at];
        y[i] = from_f32<T>(second ? own * c + other * s : own * c - other * s);
    }
}
