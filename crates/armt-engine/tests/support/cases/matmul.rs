use armt_engine::ops::{self, Activation, Linear};

use super::super::{Array, Case, Rng, normal, spread};

/// y[g] = op(a[g]) op(b[g]).
pub fn product(a: &Array, ta: bool, b: &Array, tb: bool, [batch, m, n, k]: [usize; 4]) -> Array {
    Array::from_fn(&[batch, m, n], |i| {
        let (g, row, col) = (i / (m * n), i / n % m, i % n);
        let at_a = |j: usize| g * m * k + if ta { j * m + row } else { row * k + j };
        let at_b = |j: usize| g * k * n + if tb { col * k + j } else { j * n + col };
        (0..k).map(|j| a.data[at_a(j)] * b.data[at_b(j)]).sum()
    })
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

pub fn products() -> Vec<Case> {
    let mut rng = Rng(14);
    let mut cases = Vec::new();
    for [m, n, k] in [[1, 1, 1], [3, 17, 65], [65, 3, 17], [17, 65, 3], [64, 128, 32], [1, 65, 17]] {
        for batch in [1, 3] {
            for (name, ta, tb) in [("matmul", false, false), ("matmul_nt", false, true), ("matmul_tn", true, false)] {
                let a = normal(&mut rng, &if ta { [batch, k, m] } else { [batch, m, k] });
                let b = normal(&mut rng, &if tb { [batch, n, k] } else { [batch, k, n] });
                cases.push(Case::new(
                    format!("{name} {batch} x [{m}, {k}] [{k}, {n}]"),
                    vec![a, b],
                    move |t| match (ta, tb) {
                        (false, false) => ops::matmul(&t[0], &t[1]),
                        (false, true) => ops::matmul_nt(&t[0], &t[1]),
                        _ => ops::matmul_tn(&t[0], &t[1]),
                    },
                    move |a| product(&a[0], ta, &a[1], tb, [batch, m, n, k]),
                ));
            }
        }
    }
    // One weight for all leading axes.
    let inputs = vec![normal(&mut rng, &[2, 3, 17]), normal(&mut rng, &[17, 5])];
    cases.push(Case::new(
        "matmul [2, 3, 17] [17, 5]",
        inputs,
        |t| ops::matmul(&t[0], &t[1]),
        |a| product(&a[0], false, &a[1], false, [1, 6, 5, 17]),
    ));
    cases
}

pub fn linear() -> Vec<Case> {
    let mut rng = Rng(15);
    let mut cases = Vec::new();
    for [groups, m, n, k] in [[1, 1, 1, 1], [3, 17, 65, 3], [2, 65, 24, 32], [1, 130, 65, 17], [2, 200, 264, 8], [2, 5, 1, 24]] {
        for transposed in [false, true] {
            for (name, bias, activation, residual) in [
                ("plain", false, Activation::None, false),
                ("bias", true, Activation::None, false),
                ("bias gelu", true, Activation::Gelu, false),
                ("gelu", false, Activation::Gelu, false),
                ("bias residual", true, Activation::None, true),
                ("residual", false, Activation::None, true),
            ] {
                let deviation = 1.0 / (k as f64).sqrt();
                let mut inputs = vec![
                    normal(&mut rng, &[groups, m, k]),
                    spread(&mut rng, &if transposed { [groups, n, k] } else { [groups, k, n] }, deviation),
                ];
                if bias {
                    inputs.push(normal(&mut rng, &[groups, n]));
                }
                if residual {
                    inputs.push(normal(&mut rng, &[groups, m, n]));
                }
                // As in a model, for some of the sizes: weights and biases are parameters, whose gradients are f32 also where x is bf16.
                if groups == 2 {
                    for own in inputs.iter_mut().skip(1).take(1 + usize::from(bias)) {
                        own.parameter = true;
                    }
                }
                cases.push(Case::new(
                    format!("linear {name} {groups} x [{m}, {k}] [{k}, {n}]{}", if transposed { "^T" } else { "" }),
                    inputs,
                    move |t| {
                        let with = Linear {
                            bias: bias.then(|| &t[2]),
                            activation,
                            residual: residual.then(|| &t[2 + usize::from(bias)]),
                            transposed,
                            scales: None,
                            room: residual,
                        };
                        ops::linear(&t[0], &t[1], with)
                    },
                    move |a| {
                        let mut y = product(&a[0], false, &a[1], transposed, [groups, m, n, k]);
                        for (i, y) in y.data.iter_mut().enumerate() {
                            if bias {
                                *y += a[2].data[i / (m * n) * n + i % n];
                            }
                            if activation == Activation::Gelu {
                                *y = gelu(*y);
                            }
                            if residual {
                                *y += a[2 + usize::from(bias)].data[i];
                            }
                        }
                        y
                    },
                ));
            }
        }
    }
    cases
}
