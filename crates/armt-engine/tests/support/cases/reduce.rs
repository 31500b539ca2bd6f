use armt_engine::ops;

use super::super::{Array, Case, Rng, normal};

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(13);
    let mut cases = Vec::new();
    for shape in [&[1usize][..], &[3, 17], &[65, 65], &[20_000]] {
        let x = normal(&mut rng, shape);
        cases.push(Case::new(
            format!("sum {shape:?}"),
            vec![x.clone()],
            |t| ops::sum(&t[0]),
            |a| Array { shape: vec![1], data: vec![a[0].data.iter().sum()] },
        ));
        cases.push(Case::new(
            format!("mean {shape:?}"),
            vec![x],
            |t| ops::mean(&t[0]),
            |a| Array { shape: vec![1], data: vec![a[0].data.iter().sum::<f64>() / a[0].data.len() as f64] },
        ));
    }
    for shape in [[2usize, 3, 17], [1, 65, 3], [3, 1, 1], [1, 1000, 65], [2, 700, 132]] {
        for axis in 0..3 {
            let x = normal(&mut rng, &shape);
            let (outer, middle) = (shape[..axis].iter().product::<usize>(), shape[axis]);
            let inner = shape[axis + 1..].iter().product::<usize>();
            cases.push(Case::new(
                format!("sum_axis {shape:?} {axis}"),
                vec![x],
                move |t| ops::sum_axis(&t[0], axis),
                move |a| {
                    Array::from_fn(&[outer, inner], |i| {
                        (0..middle).map(|m| a[0].data[(i / inner * middle + m) * inner + i % inner]).sum()
                    })
                },
            ));
        }
    }
    cases
}
