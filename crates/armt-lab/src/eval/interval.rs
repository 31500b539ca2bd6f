//! How far a share that was counted on some samples may lie from the true one: Wilson's interval,
//!
//! ```text
//! (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)        z = 1.96 for 95 %
//! ```
//!
//! Unlike p -+ z sqrt(p (1 - p) / n) it stays within 0 and 1, and is no point where all samples were right.

/// 95 of 100 draws of a normal distribution lie within so many standard deviations.
const Z: f64 = 1.959_963_984_540_054;

/// The 95 % interval of a share of `samples`; 0 to 1 without any.
pub fn wilson(share: f64, samples: usize) -> (f64, f64) {
    if samples == 0 {
        return (0.0, 1.0);
    }
    let n = samples as f64;
    let middle = share + Z * Z / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).max(0.0).sqrt();
    let whole = 1.0 + Z * Z / n;
    (((middle - half) / whole).max(0.0), ((middle + half) / whole).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_wilsons() {
        let near = |share, samples, low: f64, high: f64| {
            let (l, h) = wilson(share, samples);
            assert!((l - low).abs() < 5e-4 && (h - high).abs() < 5e-4, "{share} of {samples}: {l} to {h}");
        };
        near(1.0, 100, 0.963, 1.0);
        near(0.0, 10, 0.0, 0.2775);
        near(0.5, 100, 0.4038, 0.5962);
        near(0.975, 200, 0.9428, 0.9893);
        assert_eq!(wilson(0.3, 0), (0.0, 1.0));
    }
}
