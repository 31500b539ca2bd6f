//! Elementary functions that vectorise: no branches, no calls, errors of a few units in the last place.

const LOG2_E: f32 = std::f32::consts::LOG2_E;
// ln 2 in two parts, so that x - n ln 2 is exact where it matters.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;
/// 1.5 * 2^23: adding it rounds to an integer and leaves that integer in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// e^x. Under- and overflow saturate at about 1e-38 and 3e38; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Written so that NaN survives both comparisons.
    let x = if x < -87.336_54 { -87.336_54 } else { x };
    let x = if x > 88.722_83 { 88.722_83 } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    let p = 1.987_569_2e-4f32
        .mul_add(r, 1.398_199_9e-3)
        .mul_add(r, 8.333_452e-3)
        .mul_add(r, 4.166_579_6e-2)
        .mul_add(r, 1.666_666_5e-1)
        .mul_add(r, 5e-1);
    let p = (r * r).mul_add(p, r) + 1.0;
    // 2^n in two factors, so that n = 128 does not overflow the exponent on the way.
    let n = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let half = n >> 1;
    let pow = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    p * pow(half) * pow(n - half)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// 2^x for x that is not above 0: half of the instructions of [`exp`]. Below -126 it stays what it is there; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp2_below_0(x: f32) -> f32 {
    // As ROUND, and leaves the exponent's offset beside the integer.
    const ROUND_AND_OFFSET: f32 = 12_583_039.0;
    let x = if x < -126.0 { -126.0 } else { x };
    let shifted = x + ROUND_AND_OFFSET;
    let r = x - (shifted - ROUND_AND_OFFSET);
    // (2^r - 1) / r through the roots of Chebyshev's polynomial: exact at 0, within 5e-9 of 2^r up to 1/2.
    let p = 1.545_316_3e-4f32
        .mul_add(r, 1.339_086_3e-3)
        .mul_add(r, 9.618_083e-3)
        .mul_add(r, 5.550_357e-2)
        .mul_add(r, 2.402_265e-1)
        .mul_add(r, 6.931_472e-1)
        .mul_add(r, 1.0);
    p * f32::from_bits(shifted.to_bits() << 23)
}

/// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|), and the latter is 2 atanh(e / (2 + e)): no cancellation, however small it is.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    let e = exp(-x.abs());
    let z = e / (2.0 + e);
    let w = z * z;
    // atanh(z) / z in z^2, of at most 1/9, through the roots of Chebyshev's polynomial: within 4e-9.
    let p = 1.407_889e-1f32.mul_add(w, 1.398_257_9e-1).mul_add(w, 2.001_229_8e-1).mul_add(w, 3.333_316e-1).mul_add(w, 1.0);
    // Written so that NaN survives.
    (2.0 * z).mul_add(p, if x < 0.0 { 0.0 } else { x })
}

/// The error function, within 2e-7 (Abramowitz and Stegun, 7.1.26).
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let a = x.abs();
    let t = 1.0 / 0.327_591_1f32.mul_add(a, 1.0);
    let p = 1.061_405_4f32.mul_add(t, -1.453_152_1).mul_add(t, 1.421_413_8).mul_add(t, -0.284_496_74).mul_add(t, 0.254_829_6);
    let y = 1.0 - p * t * exp(-a * a);
    y.copysign(x)
}

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

/// GELU in its tanh form: x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    let u = SQRT_2_OVER_PI * x * (GELU_CUBIC * x).mul_add(x, 1.0);
    x * sigmoid(2.0 * u)
}

/// Derivative of [`gelu`].
#[inline(always)]
pub(crate) fn gelu_slope(x: f32) -> f32 {
    let u = SQRT_2_OVER_PI * x * (GELU_CUBIC * x).mul_add(x, 1.0);
    let du = SQRT_2_OVER_PI * (3.0 * GELU_CUBIC * x).mul_add(x, 1.0);
    let s = sigmoid(2.0 * u);
    (2.0 * x * s * (1.0 - s)).mul_add(du, s)
}

/// GELU in its exact form: x/2 (1 + erf(x / sqrt 2)).
#[inline(always)]
pub(crate) fn gelu_erf(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// Derivative of [`gelu_erf`].
#[inline(always)]
pub(crate) fn gelu_erf_slope(x: f32) -> f32 {
    const INV_SQRT_2PI: f32 = 0.398_942_3;
    let cdf = 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2));
    (x * INV_SQRT_2PI).mul_add(exp(-0.5 * x * x), cdf)
}

/// Derivative of x sigmoid(x).
#[inline(always)]
pub(crate) fn silu_slope(x: f32) -> f32 {
    let s = sigmoid(x);
    s * x.mul_add(1.0 - s, 1.0)
}

/// The sum of interleaved parts, as a tree: one running sum would wait for each addition. Arrays of fixed size, because only those stay in
/// registers.
#[inline(always)]
pub(crate) fn total(parts: [f32; 16]) -> f32 {
    let b: [f32; 8] = std::array::from_fn(|i| parts[i] + parts[i + 8]);
    let c: [f32; 4] = std::array::from_fn(|i| b[i] + b[i + 4]);
    (c[0] + c[2]) + (c[1] + c[3])
}

/// The sum of 32 numbers, as a tree.
#[inline(always)]
pub(crate) fn total_32(parts: [f32; 32]) -> f32 {
    total(std::array::from_fn(|i| parts[i] + parts[i + 16]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_right_over_its_whole_range() {
        let mut x = -87.0f32;
        while x < 88.7 {
            let want = f64::from(x).exp();
            assert!(((f64::from(exp(x)) - want) / want).abs() < 3e-7, "exp({x})");
            x += 0.0137;
        }
        assert!(exp(-1e9) < 1.2e-38 && exp(1e9) > 3e38 && exp(1e9).is_finite());
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn powers_of_two_are_right_below_0() {
        let mut x = -126.0f32;
        while x <= 0.0 {
            let want = f64::from(x).exp2();
            assert!(((f64::from(exp2_below_0(x)) - want) / want).abs() < 1.5e-7, "2^{x}");
            x += 0.0137;
        }
        assert!(exp2_below_0(-1e9) < 1.2e-38 && exp2_below_0(f32::NEG_INFINITY) < 1.2e-38);
        assert!(exp2_below_0(f32::NAN).is_nan() && exp2_below_0(f32::from_bits(0x7f80_0001)).is_nan());
        assert_eq!(
            (exp2_below_0(0.0), exp2_below_0(-0.0), exp2_below_0(-1.0), exp2_below_0(-126.0)),
            (1.0, 1.0, 0.5, f32::MIN_POSITIVE)
        );
    }

    #[test]
    fn softplus_is_right_however_small_it_is() {
        let mut x = -87.0f32;
        while x < 100.0 {
            let want = f64::from(x).exp().ln_1p();
            assert!(((f64::from(softplus(x)) - want) / want).abs() < 4e-7, "softplus({x})");
            x += 0.0137;
        }
        assert_eq!(softplus(1e9), 1e9);
        assert!(softplus(f32::NAN).is_nan() && softplus(-1e9) < 1.2e-38);
    }

    #[test]
    fn sigmoid_saturates_without_nan() {
        assert!(sigmoid(-200.0) < 1e-37);
        assert_eq!(sigmoid(200.0), 1.0);
        assert_eq!(sigmoid(0.0), 0.5);
    }

    #[test]
    fn erf_matches_known_values() {
        for (x, want) in [(0.0, 0.0), (0.5, 0.520_499_88), (1.0, 0.842_700_79), (-1.5, -0.966_105_15), (3.0, 0.999_977_91)] {
            assert!((f64::from(erf(x)) - want).abs() < 2e-7, "erf({x})");
        }
    }
}
