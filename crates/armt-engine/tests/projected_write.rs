//! What the projected write promises: a bound on what it leaves, and that a key which was written reads back what was written.

#![allow(clippy::unwrap_used)]

mod support;

use armt_engine::ops::memory::naive::{EPSILON, Memory, Token, dpfp};
use armt_engine::ops::{self, AssocWrite, WriteRule};
use armt_engine::{Device, Tensor};
use support::Rng;

const NU: usize = 3;
const TOKENS: usize = 4;
const DM: usize = 4;
const D: usize = 4;
const DK: usize = 2 * NU * DM;

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

fn tensor(data: Vec<f32>, shape: &[usize]) -> Tensor {
    Tensor::from_slice(&data, shape, &Device::cpu()).unwrap()
}

/// A memory that is written to with keys near one that it knows, of importance near 1.
struct Text {
    rng: Rng,
    centre: Vec<f64>,
    a: Tensor,
    z: Tensor,
}

impl Text {
    fn new(seed: u64, size: f64) -> Self {
        let mut rng = Rng(seed);
        let mut random = |n: usize, size: f64| -> Vec<f32> { (0..n).map(|_| (size * rng.normal()) as f32).collect() };
        let (a, centre) = (random(DK * D, size), random(DM, 1.0));
        let centre: Vec<f64> = centre.iter().map(|x| f64::from(*x)).collect();
        let z = dpfp(&centre, NU).iter().map(|x| *x as f32).collect();
        Text { rng, centre, a: tensor(a, &[1, DK, D]), z: tensor(z, &[1, DK]) }
    }

    /// Writes a segment; gives what the bound's square grows by, sum_i b_i n_i |v_i|^2.
    fn write(&mut self, rule: WriteRule) -> f64 {
        let spread = 0.05;
        let keys: Vec<f64> = (0..TOKENS * DM).map(|i| self.centre[i % DM] + spread * self.rng.normal()).collect();
        let values: Vec<f64> = (0..TOKENS * D).map(|_| self.rng.normal()).collect();
        let beta: Vec<f64> = (0..TOKENS).map(|_| 4.0 + self.rng.normal()).collect();
        let to = |x: &[f64], shape: &[usize]| tensor(x.iter().map(|x| *x as f32).collect(), shape);
        let (k, v, b) = (to(&keys, &[1, TOKENS, DM]), to(&values, &[1, TOKENS, D]), to(&beta, &[1, TOKENS]));
        let w = AssocWrite { k: &k, v: &v, beta: &b, a: &self.a, z: &self.z, first: None, correction: true, nu: NU, rule };
        (self.a, self.z) = ops::assoc_write_in_place(w, 0..1).unwrap();
        let square = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
        let token = |i: usize| {
            let token = Token::new(&keys[i * DM..][..DM], &values[i * D..][..D], beta[i], NU);
            token.b * (square(&token.phi) + EPSILON) * square(&token.v)
        };
        (0..TOKENS).map(token).sum()
    }

    fn norm(&self) -> f64 {
        norm(&self.a.to_vec::<f32>().unwrap())
    }
}

#[test]
fn twenty_thousand_writes_of_keys_much_alike_stay_below_the_bound_where_the_papers_pass_it_a_hundredfold() {
    for (seed, size) in [(1, 0.0), (2, 1.0), (3, 100.0)] {
        let mut text = Text::new(seed, size);
        let mut bound = text.norm().powi(2);
        for i in 0..20_000 {
            bound += text.write(WriteRule::Projected);
            assert!(
                text.norm() <= 1.001 * bound.sqrt() + 1e-3,
                "write {i} from size {size}: {} above {}",
                text.norm(),
                bound.sqrt()
            );
        }
        let mut papers = Text::new(seed, size);
        let far = (0..20_000).any(|_| {
            papers.write(WriteRule::Paper);
            let norm = papers.norm();
            norm.is_nan() || norm > 100.0 * bound.sqrt()
        });
        assert!(far, "the paper's write ends at {} where the bound is {}", papers.norm(), bound.sqrt());
    }
}

#[test]
fn a_written_key_reads_its_value_back_whatever_was_there() {
    let mut rng = Rng(9);
    let mut random = |n: usize| -> Vec<f64> { (0..n).map(|_| rng.normal()).collect() };
    let mut memory = Memory { a: random(DK * D), z: random(DK).iter().map(|z| 0.01 * z.abs()).collect() };
    for _ in 0..50 {
        let (k, v) = (random(DM), random(D));
        let before = memory.clone();
        let token = Token { b: 1.0, ..Token::new(&k, &v, 0.0, NU) };
        memory =
            memory.write_projected(std::slice::from_ref(&token), &before.gammas_in_turn(std::slice::from_ref(&token), true, false));
        // z . phi is |phi|^2 unless there was more of it already.
        if before.gamma(&token.phi) > 0.0 {
            memory.read(&token.phi).iter().zip(&v).for_each(|(y, v)| assert!((y - v).abs() < 1e-3, "{y} instead of {v}"));
        }
    }
}

#[test]
fn tokens_of_one_write_are_those_of_as_many_writes_of_one() {
    let mut rng = Rng(10);
    let mut random = |shape: &[usize]| tensor((0..shape.iter().product()).map(|_| rng.normal() as f32).collect(), shape);
    let (k, v, beta) = (random(&[2, TOKENS, DM]), random(&[2, TOKENS, D]), random(&[2, TOKENS]));
    let first = Tensor::from_slice(&[1, 0], [2], &Device::cpu()).unwrap();
    let clear = |t: Tensor| {
        let mut data = t.to_vec::<f32>().unwrap();
        let half = data.len() / 2;
        data[..half].fill(0.0);
        tensor(data.iter().map(|x| x.abs()).collect(), t.dims())
    };
    let (a, z) = (clear(random(&[2, DK, D])), clear(random(&[2, DK])));
    let write = AssocWrite {
        k: &k,
        v: &v,
        beta: &beta,
        a: &a,
        z: &z,
        first: Some(&first),
        correction: true,
        nu: NU,
        rule: WriteRule::Projected,
    };
    let (a_once, z_once) = ops::assoc_write(write).unwrap();
    let (mut a_each, mut z_each) = (a.clone(), z.clone());
    for i in 0..TOKENS {
        let [k, v, beta] = [&k, &v, &beta].map(|t| ops::narrow(t, 1, i, 1).unwrap());
        let own = AssocWrite { k: &k, v: &v, beta: &beta, a: &a_each, z: &z_each, first: (i == 0).then_some(&first), ..write };
        (a_each, z_each) = ops::assoc_write(own).unwrap();
    }
    for (once, each) in [(a_once, a_each), (z_once, z_each)] {
        let (once, each) = (once.to_vec::<f32>().unwrap(), each.to_vec::<f32>().unwrap());
        assert!(support::norm_error(&once, &each) < 1e-5);
    }
}
