// Stretches of `width` elements from rows that lie x_stride apart to rows that lie y_stride apart; n = rows * width.
#define STRETCHES(name, X, Y, change)                                                                                               \
    KERNEL(name)(const X* x, Y* y, i64 n, i64 width, i64 x_stride, i64 x_at, i64 y_stride, i64 y_at) {                              \
        EACH(i, n) {                                                                                                                \
            i64 row = i / width, column = i - row * width;                                                                          \
            X from = x[row * x_stride + x_at + column];                                                                             \
            Y* to = y + row * y_stride + y_at + column;                                                                             \
            change;                                                                                                                 \
        }                                                                                                                           \
    }
typedef Vec<u32, 4> Sixteen;
STRETCHES(copy, T, T, *to = from)
STRETCHES(copy_vectors, Sixteen, Sixteen, *to = from)
STRETCHES(add, T, T, *to = from_f32<T>(to_f32(*to) + to_f32(from)))
typedef Vec<T, 16 / sizeof(T)> Several;
STRETCHES(add_vectors, Several, Several,
          for (int e = 0; e < 16 / sizeof(T); e++) to->v[e] = from_f32<T>(to_f32(to->v[e]) + to_f32(from.v[e])))
STRETCHES(add_to_f32, T, float, *to += to_f32(from))
