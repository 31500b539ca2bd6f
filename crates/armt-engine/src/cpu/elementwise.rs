//! Loops over elements.

use half::bf16;

use super::par_rows;
use crate::ops::binary::Spread;

/// y = f(x).
pub(crate) fn map<X: Copy + Sync, Y: Send>(x: &[X], y: &mut [Y], f: impl Fn(X) -> Y + Sync) {
    par_rows(y, 1, 1, |first, y| {
        let x = &x[first..first + y.len()];
        simd!({
            for (y, x) in y.iter_mut().zip(x) {
                *y = f(*x);
            }
        });
    });
}

/// y = f(y, x).
pub(crate) fn update<X: Copy + Sync, Y: Copy + Send>(y: &mut [Y], x: &[X], f: impl Fn(Y, X) -> Y + Sync) {
    par_rows(y, 1, 1, |first, y| {
        let x = &x[first..first + y.len()];
        simd!({
            for (y, x) in y.iter_mut().zip(x) {
                *y = f(*y, *x);
            }
        });
    });
}

/// z = f(x, y), all of one length.
pub(crate) fn zip(x: &[f32], y: &[f32], z: &mut [f32], f: impl Fn(f32, f32) -> f32 + Sync) {
    par_rows(z, 1, 1, |first, z| {
        let (x, y) = (&x[first..first + z.len()], &y[first..first + z.len()]);
        simd!({
            for ((z, x), y) in z.iter_mut().zip(x).zip(y) {
                *z = f(*x, *y);
            }
        });
    });
}

/// z = f(x, y) with y spread over x.
pub(crate) fn zip_spread(x: &[f32], y: &[f32], z: &mut [f32], s: Spread, f: impl Fn(f32, f32) -> f32 + Sync) {
    let [_, middle, inner] = s.sizes;
    par_rows(z, inner, inner, |first, z| {
        let x = &x[first * inner..first * inner + z.len()];
        for (i, (z, x)) in z.chunks_mut(inner).zip(x.chunks(inner)).enumerate() {
            let row = first + i;
            let at = row / middle * s.strides[0] + row % middle * s.strides[1];
            if s.strides[2] == 0 {
                let y = y[at];
                simd!(z.iter_mut().zip(x).for_each(|(z, x)| *z = f(*x, y)));
            } else {
                let y = &y[at..at + inner];
                simd!(z.iter_mut().zip(x).zip(y).for_each(|((z, x), y)| *z = f(*x, *y)));
            }
        }
    });
}

/// f32 to bf16, to nearest even, as integer arithmetic that vectorises. NaN stays NaN.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { nan as u16 } else { rounded as u16 })
}

/// bf16 to f32, exact.
#[inline(always)]
pub(crate) fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_is_that_of_the_half_crate() {
        for bits in (0..u32::MAX - 70_000).step_by(65_537 / 3) {
            let x = f32::from_bits(bits);
            if x.is_nan() {
                assert!(round_bf16(x).is_nan());
            } else {
                assert_eq!(round_bf16(x), bf16::from_f32(x), "{x}");
            }
        }
    }
}
