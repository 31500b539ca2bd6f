use armt_engine::{DType, ops};

use super::super::{Array, Case, Input, Rng, integers, normal, spread};
use super::ODD;
use super::matmul::product;

/// Loss of each row of `logits`, 0 where its target is negative.
fn losses(logits: &Array, targets: &Array) -> Vec<f64> {
    let row = |(x, &t): (&[f64], &f64)| {
        let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = most + x.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
        if t < 0.0 { 0.0 } else { lse - x[t as usize] }
    };
    logits.data.chunks(logits.last()).zip(&targets.data).map(row).collect()
}

fn mean(logits: &Array, targets: &Array) -> Array {
    let count = targets.data.iter().filter(|&&t| t >= 0.0).count();
    Array { shape: vec![1], data: vec![losses(logits, targets).iter().sum::<f64>() / count.max(1) as f64] }
}

/// Every `ignored`-th target is negative; 0 ignores none.
fn targets(rng: &mut Rng, shape: &[usize], classes: usize, ignored: usize) -> Input {
    integers(shape, |i| if ignored > 0 && i % ignored == 0 { -1 - i as i32 } else { rng.below(classes) as i32 })
}

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(32);
    let mut cases = Vec::new();
    let mut sizes: Vec<(usize, Vec<usize>, usize)> = Vec::new();
    for v in ODD {
        for rows in ODD {
            sizes.extend([0, 3].map(|ignored| (v, vec![rows], ignored)));
        }
        // Rows for a block each, at every alignment.
        sizes.push((1024 + v, vec![2, 5], 4));
    }
    sizes.push((64, vec![2, 3], 0));
    sizes.push((2048, vec![2], 0));
    sizes.push((17, vec![5], 1)); // none counts
    for (v, shape, ignored) in sizes {
        let logits = spread(&mut rng, &[&shape[..], &[v]].concat(), 3.0);
        let targets = targets(&mut rng, &shape, v, ignored);
        let name = format!("cross_entropy {shape:?} x {v}, ignored {ignored}");
        let inputs = vec![logits.clone(), targets.clone()];
        cases.push(Case::new(name, inputs, |t| ops::cross_entropy(&t[0], &t[1]), |a| mean(&a[0], &a[1])));
        cases.push(Case::new(
            format!("token_losses {shape:?} x {v}, ignored {ignored}"),
            vec![logits.clone().constant(), targets],
            |t| ops::token_losses(&t[0], &t[1]),
            |a| Array { shape: vec![a[1].data.len()], data: losses(&a[0], &a[1]) },
        ));
        // Few distinct values, so that the largest comes more than once; 0 and -0 among them are equal.
        cases.push(Case::new(
            format!("argmax {shape:?} x {v}"),
            vec![logits.constant().map(|x| (x / 3.0).round())],
            |t| ops::cast(&ops::argmax(&t[0])?, DType::F32),
            |a| {
                let first = |x: &[f64]| (1..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best }) as f64;
                let data: Vec<f64> = a[0].data.chunks(a[0].last()).map(first).collect();
                Array { shape: vec![data.len()], data }
            },
        ));
    }
    for (v, d, shape, ignored, chunk) in [
        (1, 1, vec![1], 0, 0),
        (17, 3, vec![65], 0, 7),
        (65, 17, vec![17], 3, 5),
        (3, 65, vec![3], 2, 1),
        (65, 17, vec![2, 3], 0, 0),
        (17, 3, vec![5], 1, 2),
        (1031, 8, vec![9], 4, 4),
        (17, 16, vec![3], 0, 100),
    ] {
        let h = normal(&mut rng, &[&shape[..], &[d]].concat());
        let weight = spread(&mut rng, &[v, d], 2.0 / (d as f64).sqrt());
        let targets = targets(&mut rng, &shape, v, ignored);
        cases.push(Case::new(
            format!("linear_cross_entropy {shape:?} x [{v}, {d}], ignored {ignored}, chunks of {chunk}"),
            vec![h, weight, targets],
            move |t| ops::linear_cross_entropy(&t[0], &t[1], &t[2], chunk),
            move |a| {
                let rows = a[2].data.len();
                let mut logits = product(&a[0], false, &a[1], true, [1, rows, v, d]);
                logits.shape = vec![rows, v];
                mean(&logits, &a[2])
            },
        ));
    }
    cases
}
