use armt_engine::ops;

use super::super::{Array, Case, Rng, spread};

fn naive(x: &Array) -> Array {
    let d = x.last();
    let mut y = Array::zeros(&x.shape);
    for (x, y) in x.data.chunks(d).zip(y.data.chunks_mut(d)) {
        let max = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
        let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
        y.iter_mut().zip(x).for_each(|(y, x)| *y = (x - max).exp() / sum);
    }
    y
}

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(22);
    let shapes: [&[usize]; 9] =
        [&[2, 3, 2], &[5, 3], &[3, 17], &[2, 9, 65], &[11, 64], &[3, 200], &[2, 1000], &[3, 1025], &[40, 130]];
    // Over one element the result is 1 and the gradient rounding alone, which the comparison of devices could not judge.
    let one =
        Case::new("softmax [5, 1]", vec![spread(&mut rng, &[5, 1], 3.0).constant()], |t| ops::softmax(&t[0]), |a| naive(&a[0]));
    let rest = shapes.into_iter().map(|shape| {
        // Short rows stay away from 0 and 1, where a bf16 result holds too little of its gradient.
        let x = spread(&mut rng, shape, if shape[shape.len() - 1] < 17 { 1.0 } else { 3.0 });
        Case::new(format!("softmax {shape:?}"), vec![x], |t| ops::softmax(&t[0]), |a| naive(&a[0]))
    });
    std::iter::once(one).chain(rest).collect()
}
