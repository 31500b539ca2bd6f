//! A small seeded generator for weights and sampling: the same numbers on every machine.

use rayon::prelude::*;

/// What splitmix64 goes on by.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Numbers that one thread makes at a time.
const PIECE: usize = 1 << 14;

/// splitmix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// A generator for one of many things, as sample 3 of a seed: equal parts give equal numbers, and any other part quite others.
    pub fn of(parts: &[u64]) -> Self {
        Random(parts.iter().fold(0, |seed, part| Random(seed ^ part).bits()))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// `n` numbers of `f`, which takes 64 bits `draws` times for each: made on all threads, and the same as one after the other.
    pub fn many(&mut self, n: usize, draws: u64, f: impl Fn(&mut Random) -> f32 + Sync) -> Vec<f32> {
        let at = |i: usize| Random(self.0.wrapping_add(STEP.wrapping_mul(draws.wrapping_mul(i as u64))));
        let mut numbers = vec![0f32; n];
        numbers.par_chunks_mut(PIECE).enumerate().for_each(|(piece, numbers)| {
            let mut random = at(piece * PIECE);
            numbers.iter_mut().for_each(|x| *x = f(&mut random));
        });
        *self = at(n);
        numbers
    }

    /// Goes on as if `n` numbers had been made that take 64 bits `draws` times each.
    pub fn pass_over(&mut self, n: usize, draws: u64) {
        self.0 = self.0.wrapping_add(STEP.wrapping_mul(draws.wrapping_mul(n as u64)));
    }

    /// Uniform below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_numbers_are_those_of_one_after_the_other() {
        let (mut one, mut all) = (Random::new(3), Random::new(3));
        for n in [1, PIECE, 3 * PIECE + 5, 0] {
            let expected: Vec<f32> = (0..n).map(|_| one.normal() as f32).collect();
            assert_eq!(all.many(n, 2, |r| r.normal() as f32), expected);
        }
        let mut passed = Random::new(3);
        passed.pass_over(1 + PIECE + 3 * PIECE + 5, 2);
        assert_eq!(passed.bits(), one.clone().bits());
        assert_eq!(all.bits(), one.bits());
    }

    #[test]
    fn parts_in_another_order_or_number_give_other_numbers() {
        let first = |parts: &[u64]| Random::of(parts).bits();
        assert_eq!(first(&[1, 2, 3]), first(&[1, 2, 3]));
        let all = [first(&[1, 2]), first(&[2, 1]), first(&[1, 3]), first(&[1, 2, 0]), first(&[0, 1, 2]), first(&[1])];
        assert!((0..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");
    }

    #[test]
    fn numbers_have_the_distribution_they_should() {
        let mut r = Random::new(1);
        let n = 20_000;
        let normal: Vec<f64> = (0..n).map(|_| r.normal()).collect();
        let mean = normal.iter().sum::<f64>() / n as f64;
        let variance = normal.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05);
        let mut counts = [0i32; 5];
        (0..n).for_each(|_| counts[r.below(5)] += 1);
        assert!(counts.iter().all(|c| (*c - n / 5).abs() < n / 50));
    }
}
