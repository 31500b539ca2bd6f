//! Gradients of random compositions of operations agree with central differences of the same composition in f64.
//!
//! A program is a list of instructions on matrices `[N, N]`: each takes one or two earlier values and appends its result. It runs on the
//! engine, and as plain loops in f64.

#![allow(clippy::unwrap_used)]

mod support;

use armt_engine::ops::{self, Activation, Linear};
use armt_engine::{DType, Device, Result, Tape, Tensor};
use proptest::prelude::*;
use support::Rng;

const N: usize = 4;
const INPUTS: usize = 3;
type Matrix = [f64; N * N];

#[derive(Clone, Copy, Debug)]
enum Op {
    Add,
    Sub,
    Mul,
    MatMul,
    MatMulNt,
    MatMulTn,
    LinearGelu,
    LinearResidual,
    Scale,
    Gelu,
    GeluErf,
    Sigmoid,
    Silu,
    Softmax,
    LayerNorm,
    RmsNorm,
    /// Rows 2.., then rows ..2.
    SwapRows,
    /// Columns joined in another order.
    SwapColumns,
    /// Each column's sum, added to every row.
    AddColumnSums,
    /// Inside a region that is recomputed: gelu(a b).
    Recomputed,
}

const OPS: [Op; 20] = [
    Op::Add,
    Op::Sub,
    Op::Mul,
    Op::MatMul,
    Op::MatMulNt,
    Op::MatMulTn,
    Op::LinearGelu,
    Op::LinearResidual,
    Op::Scale,
    Op::Gelu,
    Op::GeluErf,
    Op::Sigmoid,
    Op::Silu,
    Op::Softmax,
    Op::LayerNorm,
    Op::RmsNorm,
    Op::SwapRows,
    Op::SwapColumns,
    Op::AddColumnSums,
    Op::Recomputed,
];

#[derive(Clone, Debug)]
struct Instruction {
    op: Op,
    a: usize,
    b: usize,
}

/// Indices are taken modulo the number of values there are, so that any numbers make a program.
fn program() -> impl Strategy<Value = Vec<Instruction>> {
    let instruction = (0..OPS.len(), any::<u8>(), any::<u8>());
    prop::collection::vec(instruction.prop_map(|(op, a, b)| Instruction { op: OPS[op], a: a.into(), b: b.into() }), 1..10)
}

fn on_engine(tape: &Tape, op: Op, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match op {
        Op::Add => ops::add(a, b),
        Op::Sub => ops::sub(a, b),
        Op::Mul => ops::mul(a, b),
        Op::MatMul => ops::matmul(a, b),
        Op::MatMulNt => ops::matmul_nt(a, b),
        Op::MatMulTn => ops::matmul_tn(a, b),
        Op::LinearGelu => {
            let bias = ops::reshape(&ops::rows(a, 0..1)?, [N])?;
            ops::linear(a, b, Linear { bias: Some(&bias), activation: Activation::Gelu, ..Linear::default() })
        }
        Op::LinearResidual => ops::linear(a, b, Linear { residual: Some(b), ..Linear::default() }),
        Op::Scale => ops::scale(a, -0.75),
        Op::Gelu => ops::gelu(a),
        Op::GeluErf => ops::gelu_erf(a),
        Op::Sigmoid => ops::sigmoid(a),
        Op::Silu => ops::silu(a),
        Op::Softmax => ops::softmax(a),
        Op::LayerNorm => {
            let row = |i: usize| ops::reshape(&ops::rows(b, i..i + 1)?, [N]);
            ops::layer_norm(a, &row(0)?, &row(1)?, 0.1)
        }
        Op::RmsNorm => ops::rms_norm(a, &ops::reshape(&ops::rows(b, 0..1)?, [N])?, 0.1),
        Op::SwapRows => ops::concat(&[&ops::rows(a, 2..N)?, &ops::rows(a, 0..2)?], 0),
        Op::SwapColumns => ops::concat(&[&ops::narrow(a, 1, 1, N - 1)?, &ops::narrow(a, 1, 0, 1)?], 1),
        Op::AddColumnSums => ops::add(a, &ops::sum_axis(b, 0)?),
        Op::Recomputed => {
            let region = |_: &Tape, t: &[Tensor]| Ok(vec![ops::gelu(&ops::matmul(&t[0], &t[1])?)?]);
            tape.recompute(&[a, b], region).map(|mut y| y.remove(0))
        }
    }
}

fn product(a: &Matrix, b: &Matrix, ta: bool, tb: bool) -> Matrix {
    std::array::from_fn(|i| {
        let (row, col) = (i / N, i % N);
        let at = |m: &Matrix, t: bool, r: usize, c: usize| if t { m[c * N + r] } else { m[r * N + c] };
        (0..N).map(|k| at(a, ta, row, k) * at(b, tb, k, col)).sum()
    })
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// erf by numerical integration: slow, and right for any argument.
fn erf(x: f64) -> f64 {
    let (x, steps) = (x.clamp(-6.0, 6.0), 400);
    let h = x / steps as f64;
    let f = |t: f64| (-t * t).exp();
    let simpson: f64 = (0..steps).map(|i| i as f64 * h).map(|t| f(t) + 4.0 * f(t + h / 2.0) + f(t + h)).sum();
    simpson * h / 6.0 * 2.0 / std::f64::consts::PI.sqrt()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Applies `f(row, element)` where `f` sees the whole row.
fn by_rows(a: &Matrix, f: impl Fn(&[f64], usize) -> f64) -> Matrix {
    std::array::from_fn(|i| f(&a[i / N * N..][..N], i % N))
}

fn as_loops(op: Op, a: &Matrix, b: &Matrix) -> Matrix {
    let each = |f: &dyn Fn(usize) -> f64| -> Matrix { std::array::from_fn(f) };
    match op {
        Op::Add => each(&|i| a[i] + b[i]),
        Op::Sub => each(&|i| a[i] - b[i]),
        Op::Mul => each(&|i| a[i] * b[i]),
        Op::MatMul => product(a, b, false, false),
        Op::MatMulNt => product(a, b, false, true),
        Op::MatMulTn => product(a, b, true, false),
        Op::LinearGelu => {
            let y = product(a, b, false, false);
            each(&|i| gelu(y[i] + a[i % N]))
        }
        Op::LinearResidual => {
            let y = product(a, b, false, false);
            each(&|i| y[i] + b[i])
        }
        Op::Scale => each(&|i| -0.75 * a[i]),
        Op::Gelu => each(&|i| gelu(a[i])),
        Op::GeluErf => each(&|i| 0.5 * a[i] * (1.0 + erf(a[i] / std::f64::consts::SQRT_2))),
        Op::Sigmoid => each(&|i| sigmoid(a[i])),
        Op::Silu => each(&|i| a[i] * sigmoid(a[i])),
        Op::Softmax => by_rows(a, |row, i| {
            let most = row.iter().fold(f64::MIN, |m, x| m.max(*x));
            (row[i] - most).exp() / row.iter().map(|x| (x - most).exp()).sum::<f64>()
        }),
        Op::LayerNorm => by_rows(a, |row, i| {
            let mean = row.iter().sum::<f64>() / N as f64;
            let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / N as f64;
            (row[i] - mean) / (variance + f64::from(0.1f32)).sqrt() * b[i] + b[N + i]
        }),
        Op::RmsNorm => by_rows(a, |row, i| {
            let square = row.iter().map(|x| x * x).sum::<f64>() / N as f64;
            row[i] / (square + f64::from(0.1f32)).sqrt() * b[i]
        }),
        Op::SwapRows => each(&|i| a[(i + 2 * N) % (N * N)]),
        Op::SwapColumns => each(&|i| a[i / N * N + (i + 1) % N]),
        Op::AddColumnSums => each(&|i| a[i] + (0..N).map(|r| b[r * N + i % N]).sum::<f64>()),
        Op::Recomputed => product(a, b, false, false).map(gelu),
    }
}

/// The weighted sum of the last value, and the largest number on the way.
fn objective(program: &[Instruction], inputs: &[Matrix], weights: &Matrix) -> (f64, f64) {
    let mut values = inputs.to_vec();
    for i in program {
        let (a, b) = (values[i.a % values.len()], values[i.b % values.len()]);
        values.push(as_loops(i.op, &a, &b));
    }
    let largest = values.iter().flatten().fold(0f64, |m, x| m.max(x.abs()));
    (values[values.len() - 1].iter().zip(weights).map(|(y, w)| y * w).sum(), largest)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn gradients_of_random_compositions_agree_with_differences(program in program(), seed in any::<u64>()) {
        let mut rng = Rng(seed);
        let mut random = || -> Matrix { std::array::from_fn(|_| f64::from((0.7 * rng.normal()) as f32)) };
        let inputs: Vec<Matrix> = (0..INPUTS).map(|_| random()).collect();
        let weights = random();
        let (want, largest) = objective(&program, &inputs, &weights);
        // Products of products grow without bound; beyond this f32 itself is too coarse to compare.
        prop_assume!(largest < 30.0);

        let device = Device::cpu();
        let tensor = |m: &Matrix| Tensor::from_slice(&m.map(|x| x as f32), [N, N], &device).unwrap();
        let tape = Tape::new();
        let variables: Vec<Tensor> = inputs.iter().map(|m| tape.variable(&tensor(m))).collect();
        let mut values = variables.clone();
        for i in &program {
            let (a, b) = (&values[i.a % values.len()], &values[i.b % values.len()]);
            let y = on_engine(&tape, i.op, a, b).unwrap();
            prop_assert_eq!(y.dtype(), DType::F32);
            values.push(y);
        }
        let loss = ops::sum(&ops::mul(&values[values.len() - 1], &tensor(&weights)).unwrap()).unwrap();
        let scale = 1.0 + want.abs() + largest * largest;
        prop_assert!((f64::from(loss.item().unwrap()) - want).abs() < 1e-4 * scale);

        tape.backward(&loss).unwrap();
        let h = 1e-5;
        for (v, variable) in variables.iter().enumerate() {
            let got = tape.grad(variable).map_or(vec![0.0; N * N], |g| g.to_vec::<f32>().unwrap());
            let slope = |e: usize| {
                let at = |x: f64| {
                    let mut inputs = inputs.clone();
                    inputs[v][e] += x;
                    objective(&program, &inputs, &weights).0
                };
                (at(h) - at(-h)) / (2.0 * h)
            };
            let slopes: Vec<f64> = (0..N * N).map(slope).collect();
            let most = slopes.iter().fold(0.01 * scale, |m: f64, s| m.max(s.abs()));
            for (e, (g, s)) in got.iter().zip(&slopes).enumerate() {
                prop_assert!((f64::from(*g) - s).abs() < 1e-3 * most, "input {} element {}: {} instead of {}", v, e, g, s);
            }
        }
    }
}
