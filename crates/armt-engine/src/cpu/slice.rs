//! Moving ranges of an axis: `[outer, size, inner]` seen as `outer` rows of which one stretch is taken.

use super::par_rows;

/// A stretch of every row: rows lie `stride` elements apart, the stretch starts `at` elements into each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    pub(crate) stride: usize,
    pub(crate) at: usize,
}

/// y = f(y, x) over `width` elements of every row; the rest of y stays.
pub(crate) fn update<X: Copy + Sync, Y: Copy + Send>(
    (x, from): (&[X], Stretch),
    (y, to): (&mut [Y], Stretch),
    width: usize,
    f: impl Fn(Y, X) -> Y + Sync,
) {
    par_rows(y, to.stride, width, |first, y| {
        for (i, y) in y.chunks_exact_mut(to.stride).enumerate() {
            let x = &x[(first + i) * from.stride + from.at..][..width];
            for (y, x) in y[to.at..to.at + width].iter_mut().zip(x) {
                *y = f(*y, *x);
            }
        }
    });
}
