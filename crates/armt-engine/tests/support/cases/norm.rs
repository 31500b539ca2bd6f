use armt_engine::ops;

use super::super::{Array, Case, Input, Rng, normal, spread};
use super::ODD;

/// Large for rows of one element: with a small one their gradient is a difference of nearly equal numbers.
fn eps_of(d: usize) -> f64 {
    if d == 1 { 0.5 } else { 1e-5 }
}

/// Rows of `d`, `m` in a group; inputs x, gain and, for layer norm, bias.
fn naive(a: &[Array], m: usize, d: usize) -> Array {
    let centred = a.len() == 3;
    let mut y = Array::zeros(&a[0].shape);
    for (row, (x, y)) in a[0].data.chunks(d).zip(y.data.chunks_mut(d)).enumerate() {
        let at = row / m * d;
        let mean = if centred { x.iter().sum::<f64>() / d as f64 } else { 0.0 };
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / d as f64;
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            *y = (x - mean) / (variance + eps_of(d)).sqrt() * a[1].data[at + i];
            if centred {
                *y += a[2].data[at + i];
            }
        }
    }
    y
}

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(21);
    let mut cases = Vec::new();
    let mut push = |x: &[usize], gain: &[usize], own: fn(Input) -> Input| {
        let d = gain[gain.len() - 1];
        let m = x.iter().product::<usize>() / gain.iter().product::<usize>();
        // One element is its own mean: layer norm has nothing left there but the bias.
        let inputs = vec![normal(&mut rng, x), own(normal(&mut rng, gain)), own(normal(&mut rng, gain))];
        cases.push(Case::new(
            format!("layer_norm {x:?} {gain:?}"),
            inputs.clone(),
            move |t| ops::layer_norm(&t[0], &t[1], &t[2], eps_of(d) as f32),
            move |a| naive(a, m, d),
        ));
        cases.push(Case::new(
            format!("rms_norm {x:?} {gain:?}"),
            inputs[..2].to_vec(),
            move |t| ops::rms_norm(&t[0], &t[1], eps_of(d) as f32),
            move |a| naive(a, m, d),
        ));
    };
    for d in ODD {
        push(&[5, d], &[d], |i| i);
        push(&[3, 2, 7, d], &[3, d], |i| i);
    }
    push(&[17], &[17], |i| i);
    push(&[2, 65], &[2, 65], |i| i);
    // Parameters, whose gradients take one launch. Multiples of a vector, rows in registers and longer ones, more rows than one partial sum
    // takes.
    for d in [32, 64, 128, 200, 256, 384, 512, 768, 1000] {
        push(&[2, 19, d], &[2, d], Input::parameter);
    }
    push(&[700, 8], &[8], Input::parameter);
    push(&[3, 1040], &[1040], |i| i);
    push(&[2, 3, 1041], &[2, 1041], Input::parameter);
    push(&[20, 2056], &[2056], Input::parameter);
    // A mean far larger than the deviation must not cancel.
    let inputs = vec![spread(&mut rng, &[3, 65], 0.25).map(|x| x + 32.0), normal(&mut rng, &[65]), normal(&mut rng, &[65])];
    cases.push(Case::new(
        "layer_norm with a large mean",
        inputs,
        |t| ops::layer_norm(&t[0], &t[1], &t[2], eps_of(65) as f32),
        |a| naive(a, 3, 65),
    ));
    cases
}
