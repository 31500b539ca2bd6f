//! A segment's write and the next segment's read at once, as a task of the CPU does them, beside the same one after the other.

#![allow(clippy::unwrap_used)]

mod support;

use std::ops::Range;

use armt_engine::ops::{self, AssocWrite, WriteRule};
use armt_engine::{Device, Tape, Tensor};
use support::Rng;

const NU: usize = 3;
/// Memories enough for two threads to have tasks of their own; the first and the last rest.
const MEMORIES: usize = 14;
const WRITTEN: Range<usize> = 1..13;
const TOKENS: usize = 4;
const QUERIES: usize = 10;
const DM: usize = 5;
const D: usize = 37;

fn random(rng: &mut Rng, shape: &[usize]) -> Tensor {
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Tensor::from_slice(&data, shape, &Device::cpu()).unwrap()
}

/// A', z', y and the gradients of all inputs.
fn outcome(rule: WriteRule, with_residual: bool, at_once: bool) -> Vec<Vec<f32>> {
    let mut rng = Rng(7);
    let tape = Tape::new();
    let n = WRITTEN.len();
    let shapes: [&[usize]; 7] = [
        &[n, TOKENS, DM],
        &[n, TOKENS, D],
        &[n, TOKENS],
        &[MEMORIES, 2 * NU * DM, D],
        &[MEMORIES, 2 * NU * DM],
        &[n, QUERIES, DM],
        &[n, QUERIES, D],
    ];
    let inputs = shapes.map(|shape| tape.variable(&random(&mut rng, shape)));
    let [k, v, beta, a, z, q, residual] = &inputs;
    let empty: Vec<i32> = (0..n).map(|i| i32::from(i == 3)).collect();
    let first = Tensor::from_slice(&empty, [n], &Device::cpu()).unwrap();
    let w = AssocWrite { k, v, beta, a, z, first: Some(&first), correction: true, nu: NU, rule };
    let residual = with_residual.then_some(residual);
    let (a, z, y) = if at_once {
        ops::assoc_write_read(w, WRITTEN, q, residual).unwrap()
    } else {
        let (a, z) = ops::assoc_write_rows(w, WRITTEN).unwrap();
        let y = ops::assoc_read_rows(q, &a, &z, WRITTEN, NU, residual).unwrap();
        (a, z, y)
    };
    // What comes after both asks for all of A', z' and y.
    let weighed = [&a, &z, &y].map(|t| ops::sum(&ops::mul(t, &random(&mut rng, t.dims())).unwrap()).unwrap());
    let asked = ops::add(&ops::add(&weighed[0], &weighed[1]).unwrap(), &weighed[2]).unwrap();
    tape.backward(&asked).unwrap();
    let gradients = inputs.iter().filter_map(|x| tape.grad(x));
    [a, z, y].into_iter().chain(gradients).map(|t| t.to_vec::<f32>().unwrap()).collect()
}

#[test]
fn a_write_and_a_read_at_once_have_the_bits_of_one_after_the_other() {
    let two_threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    two_threads.install(|| {
        for rule in [WriteRule::Paper, WriteRule::Projected] {
            for with_residual in [false, true] {
                let expected = outcome(rule, with_residual, false);
                assert_eq!(expected.len(), if with_residual { 10 } else { 9 });
                assert!(outcome(rule, with_residual, true) == expected, "{rule:?}, residual {with_residual}");
            }
        }
    });
}
