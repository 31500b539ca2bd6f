//! How many pairs a memory holds, told from how often it answers right.
//!
//! A memory that holds k of n pairs answers those and guesses the others among v values:
//! alpha = k / n + (n - k) / n / v, so k = (n v alpha - n) / (v - 1).

/// The pairs that a memory holds if it answers `exact_match` (0 to 1) of the questions about `pairs` pairs with `values` possible values.
/// Below 0 where it answers worse than guessing; NaN if there is but one value, as then every answer is right.
pub fn stored_pairs(exact_match: f64, pairs: usize, values: usize) -> f64 {
    let (n, v) = (pairs as f64, values as f64);
    if values < 2 { f64::NAN } else { (n * v * exact_match - n) / (v - 1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use armt::random::Random;

    #[test]
    fn a_perfect_memory_holds_all_pairs_and_a_guess_none() {
        for (n, v) in [(1, 2), (50, 16), (1000, 256)] {
            assert!((stored_pairs(1.0, n, v) - n as f64).abs() < 1e-9);
            assert!(stored_pairs(1.0 / v as f64, n, v).abs() < 1e-9);
        }
        assert!(stored_pairs(0.0, 10, 16) < 0.0);
        assert!(stored_pairs(1.0, 10, 1).is_nan());
    }

    #[test]
    fn a_memory_of_k_pairs_that_guesses_otherwise_is_found_to_hold_k() {
        let mut random = Random::new(1);
        let (n, v, samples) = (100, 16, 40_000);
        for k in [0, 30, 75, 100] {
            let right = (0..samples).filter(|_| random.below(n) < k || random.below(v) == 0).count();
            let stored = stored_pairs(right as f64 / samples as f64, n, v);
            assert!((stored - k as f64).abs() < 1.5, "{stored} for {k}");
        }
    }
}
