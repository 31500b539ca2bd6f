use armt_engine::{Result, Tensor, ops};

use super::super::{Array, Case, Rng, normal};

/// Index into a smaller operand whose axes, aligned at the right, are the larger one's or 1.
fn at(i: usize, large: &[usize], small: &[usize]) -> usize {
    let (mut rest, mut index, mut stride) = (i, 0, 1);
    for (back, size) in large.iter().rev().enumerate() {
        let own = if back < small.len() { small[small.len() - 1 - back] } else { 1 };
        let coordinate = rest % size;
        rest /= size;
        if own != 1 {
            index += coordinate * stride;
            stride *= own;
        }
    }
    index
}

pub fn cases() -> Vec<Case> {
    type Op = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let binary: [(&str, Op, fn(f64, f64) -> f64); 3] =
        [("add", ops::add, |a, b| a + b), ("sub", ops::sub, |a, b| a - b), ("mul", ops::mul, |a, b| a * b)];
    let shapes: [(&[usize], &[usize]); 11] = [
        (&[1], &[1]),
        (&[3, 17], &[3, 17]),
        (&[3, 17], &[17]),
        (&[2, 3, 65], &[3, 65]),
        (&[2, 3, 65], &[2, 1, 65]),
        (&[2, 3, 17], &[2, 3, 1]),
        (&[2, 3, 17], &[3, 1]),
        (&[2, 3, 4, 5], &[2, 1, 1, 5]),
        (&[5, 3], &[1]),
        // Rows that are read sixteen bytes at a time.
        (&[2, 3, 5, 48], &[2, 1, 1, 48]),
        (&[3, 2, 16], &[2, 16]),
    ];
    let mut rng = Rng(12);
    let mut cases = Vec::new();
    for (name, op, value) in binary {
        for (large, small) in shapes {
            let inputs = vec![normal(&mut rng, large), normal(&mut rng, small)];
            cases.push(Case::new(
                format!("{name} {large:?} {small:?}"),
                inputs,
                move |t| op(&t[0], &t[1]),
                move |a| Array::from_fn(large, |i| value(a[0].data[i], a[1].data[at(i, large, small)])),
            ));
        }
    }
    let x = normal(&mut rng, &[3, 17]);
    cases.push(Case::new("scale", vec![x], |t| ops::scale(&t[0], -2.5), |a| Array::from_fn(&[3, 17], |i| -2.5 * a[0].data[i])));
    // One tensor used twice: its gradients add up.
    let x = normal(&mut rng, &[3, 17]);
    cases.push(Case::new(
        "x * x + x",
        vec![x],
        |t| ops::add(&ops::mul(&t[0], &t[0])?, &t[0]),
        |a| Array::from_fn(&[3, 17], |i| a[0].data[i] * a[0].data[i] + a[0].data[i]),
    ));
    cases
}
