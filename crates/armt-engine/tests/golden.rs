//! The associative memory against values that the published PyTorch code gave, step by step over six segments.
//!
//! The files are in `tests/fixtures/golden`, or in the folder that `ARMT_GOLDEN` names; `manifest.json` there says what each holds.

#![allow(clippy::unwrap_used)] // also in the functions that the tests share

mod support;

use std::path::PathBuf;

use armt_engine::ops::{self, AssocWrite, Linear, WriteRule};
use armt_engine::{DType, Device, Tensor};
use safetensors::SafeTensors;

/// Relative to the largest value: both sides are f32.
const TOLERANCE: f64 = 1e-5;

struct Golden(Vec<u8>);

impl Golden {
    fn open(name: &str) -> Self {
        let folder = std::env::var_os("ARMT_GOLDEN")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden"), PathBuf::from);
        let path = folder.join(name).with_extension("safetensors");
        Golden(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn tensor(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype(), safetensors::Dtype::F32);
        let data: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        Tensor::from_slice(&data, view.shape(), &Device::cpu()).unwrap()
    }

    fn assert_close(&self, got: &Tensor, name: &str) {
        let want = self.tensor(name);
        assert_eq!(got.dims(), want.dims(), "{name}");
        let want = want.to_vec::<f32>().unwrap();
        let e = support::error(&got.to_vec::<f32>().unwrap(), want.iter().map(|&x| f64::from(x)));
        assert!(e <= TOLERANCE, "{name} is off by {e:.2e}");
    }
}

#[test]
fn dpfp_is_that_of_the_published_code() {
    let golden = Golden::open("dpfp");
    let x = golden.tensor("x");
    for nu in 1..=3 {
        golden.assert_close(&ops::dpfp(&x, nu).unwrap(), &format!("dpfp_nu{nu}"));
    }
}

/// x W^T (+ bias).
fn project(golden: &Golden, x: &Tensor, name: &str, bias: bool) -> Tensor {
    let w = golden.tensor(&format!("param.{name}.weight"));
    let bias = bias.then(|| golden.tensor(&format!("param.{name}.bias")));
    ops::linear(x, &w, Linear { bias: bias.as_ref(), transposed: true, ..Linear::default() }).unwrap()
}

/// Writes six segments' memory tokens and reads after each.
fn walk(file: &str, correction: bool) {
    let (golden, cpu, nu) = (Golden::open(file), Device::cpu(), 3);
    let (tokens, queries) = (golden.tensor("mem_tokens"), golden.tensor("queries")); // [S, B, m, d], [S, B, T, d]
    let at = |t: &Tensor, s: usize| ops::reshape(&ops::rows(t, s..s + 1).unwrap(), &t.dims()[1..]).unwrap();
    let shape = golden.tensor("W_mem_0").shape(); // [B, dk, d]
    let mut a = Tensor::zeros(shape, DType::F32, &cpu).unwrap();
    let mut z = Tensor::zeros([shape[0], shape[1]], DType::F32, &cpu).unwrap();
    for s in 0..tokens.dims()[0] {
        let memory = at(&tokens, s);
        let k = project(&golden, &memory, "W_mk", false);
        let v = project(&golden, &memory, "W_mv", false);
        let beta = project(&golden, &memory, "W_mb", true); // [B, m, 1]
        let beta = ops::reshape(&beta, &memory.dims()[..2]).unwrap();
        let first = Tensor::from_slice(&vec![i32::from(s == 0); shape[0]], [shape[0]], &cpu).unwrap();
        let write =
            AssocWrite { k: &k, v: &v, beta: &beta, a: &a, z: &z, first: Some(&first), correction, nu, rule: WriteRule::Paper };
        (a, z) = ops::assoc_write(write).unwrap();
        golden.assert_close(&a, &format!("W_mem_{s}"));
        golden.assert_close(&z, &format!("z_{s}"));
        let q = project(&golden, &at(&queries, s), "W_mq", false);
        golden.assert_close(&ops::assoc_read(&q, &a, &z, nu, None).unwrap(), &format!("assoc_{s}"));
    }
}

#[test]
fn six_segments_of_memory_with_correction_are_those_of_the_published_code() {
    walk("assoc_layer_corr", true);
}

#[test]
fn six_segments_of_memory_without_correction_are_those_of_the_published_code() {
    walk("assoc_layer_nocorr", false);
}

#[test]
fn an_empty_memory_reads_exactly_zero_and_has_finite_gradients() {
    let tape = armt_engine::Tape::new();
    let cpu = Device::cpu();
    let mut rng = support::Rng(5);
    let q: Vec<f32> = (0..2 * 3 * 4).map(|_| rng.normal() as f32).collect();
    let q = tape.variable(&Tensor::from_slice(&q, [2, 3, 4], &cpu).unwrap());
    let a = tape.variable(&Tensor::zeros([2, 24, 5], DType::F32, &cpu).unwrap());
    let z = tape.variable(&Tensor::zeros([2, 24], DType::F32, &cpu).unwrap());
    let y = ops::assoc_read(&q, &a, &z, 3, None).unwrap();
    assert!(y.to_vec::<f32>().unwrap().iter().all(|y| *y == 0.0));
    tape.backward(&ops::sum(&y).unwrap()).unwrap();
    for t in [&q, &a, &z] {
        let gradient = tape.grad(t).unwrap().to_vec::<f32>().unwrap();
        assert!(gradient.iter().all(|g| g.is_finite()));
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_with_what_was_expected() {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::cpu()).unwrap();
    let message = |r: armt_engine::Result<Tensor>| r.unwrap_err().to_string();
    let (q, a, z) = (zeros(&[2, 3, 4]), zeros(&[2, 24, 5]), zeros(&[2, 24]));
    assert!(message(ops::dpfp(&q, 0)).contains("at least 1"));
    assert!(message(ops::dpfp(&q, 8)).contains("less than 2 x 4"));
    assert!(message(ops::assoc_read(&q, &a, &z, 2, None)).contains("expected z of shape [2, 16], got [2, 24]"));
    assert!(message(ops::assoc_read(&q, &zeros(&[1, 24, 5]), &z, 3, None)).contains("A of shape"));
    assert!(message(ops::assoc_read(&q, &a, &z, 3, Some(&zeros(&[2, 3, 4])))).contains("expected the residual of shape [2, 3, 5]"));
    let (v, beta) = (zeros(&[2, 3, 5]), zeros(&[2, 3]));
    let write =
        AssocWrite { k: &q, v: &v, beta: &beta, a: &a, z: &z, first: None, correction: true, nu: 3, rule: WriteRule::Paper };
    let refused = |w: AssocWrite<'_>| ops::assoc_write(w).unwrap_err().to_string();
    assert!(refused(AssocWrite { v: &zeros(&[2, 4, 5]), ..write }).contains("the values"));
    assert!(refused(AssocWrite { a: &zeros(&[2, 24, 6]), ..write }).contains("expected A of shape [2, 24, 5], got [2, 24, 6]"));
    assert!(refused(AssocWrite { first: Some(&beta), ..write }).contains("first of type i32"));
}
