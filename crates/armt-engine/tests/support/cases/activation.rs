use armt_engine::{Result, Tensor, ops};

use super::super::{Array, Case, Rng, normal};
use super::ODD;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// erf by its Taylor series, exact in f64 for the arguments that occur.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

pub fn cases() -> Vec<Case> {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let unary: [(&str, Op, fn(f64) -> f64); 5] = [
        ("relu", ops::relu, |x| x.max(0.0)),
        ("sigmoid", ops::sigmoid, sigmoid),
        ("silu", ops::silu, |x| x * sigmoid(x)),
        ("gelu", ops::gelu, gelu),
        ("gelu_erf", ops::gelu_erf, |x| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2))),
    ];
    let mut cases = Vec::new();
    let mut rng = Rng(11);
    for (name, op, value) in unary {
        for n in ODD {
            let x = normal(&mut rng, &[3, n]);
            cases.push(Case::new(
                format!("{name} {n}"),
                vec![x],
                move |t| op(&t[0]),
                move |a| Array::from_fn(&a[0].shape, |i| value(a[0].data[i])),
            ));
        }
    }
    for f in ODD {
        let x = normal(&mut rng, &[3, 2 * f]);
        cases.push(Case::new(
            format!("swiglu {f}"),
            vec![x],
            |t| ops::swiglu(&t[0]),
            move |a| {
                Array::from_fn(&[3, f], |i| {
                    let at = i / f * 2 * f + i % f;
                    let (g, u) = (a[0].data[at], a[0].data[at + f]);
                    g * sigmoid(g) * u
                })
            },
        ));
    }
    cases
}
