use armt_engine::{Tensor, ops};

use super::super::{Array, Case, Rng, integers, normal};

/// The elements of a range of one axis.
fn range(x: &Array, axis: usize, start: usize, len: usize) -> Array {
    let inner: usize = x.shape[axis + 1..].iter().product();
    let mut shape = x.shape.clone();
    shape[axis] = len;
    Array::from_fn(&shape, |i| x.data[i / (len * inner) * x.shape[axis] * inner + start * inner + i % (len * inner)])
}

/// Arrays joined along one axis.
fn joined(parts: &[Array], axis: usize) -> Array {
    let mut shape = parts[0].shape.clone();
    shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
    let outer: usize = shape[..axis].iter().product();
    let mut data = Vec::new();
    for o in 0..outer {
        for p in parts {
            let row = p.data.len() / outer;
            data.extend_from_slice(&p.data[o * row..][..row]);
        }
    }
    Array { shape, data }
}

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(23);
    let mut cases = Vec::new();
    let ranges: [(&[usize], usize, usize, usize); 10] = [
        (&[1], 0, 0, 1),
        (&[5, 3], 0, 1, 3),
        (&[3, 17], 1, 16, 1),
        (&[3, 65], 1, 3, 17),
        (&[2, 5, 17], 1, 2, 3),
        (&[2, 5, 17], 2, 0, 16),
        (&[2, 3, 4, 65], 2, 1, 2),
        (&[2, 9, 16], 1, 3, 5),
        (&[3, 64], 1, 16, 32),
        (&[2, 3], 1, 0, 3),
    ];
    // One layer's part of a stack after the other, each read before it is replaced, as steps do.
    for (rows, width) in [(1, 3), (3, 17), (4, 64)] {
        let stack = [rows, 2, width];
        cases.push(Case::new(
            format!("replace_rows {stack:?}"),
            vec![normal(&mut rng, &stack), normal(&mut rng, &stack)],
            move |t| {
                (0..rows).try_fold(t[0].clone(), |whole, l| {
                    let read = ops::mul(&ops::rows(&whole, l..l + 1)?, &ops::rows(&t[1], l..l + 1)?)?;
                    ops::replace_rows(&whole, l..l + 1, &read)
                })
            },
            |a| Array { shape: a[0].shape.clone(), data: a[0].data.iter().zip(&a[1].data).map(|(x, y)| x * y).collect() },
        ));
    }
    for (shape, axis, start, len) in ranges {
        cases.push(Case::new(
            format!("narrow {shape:?} axis {axis} from {start} by {len}"),
            vec![normal(&mut rng, shape)],
            move |t| ops::narrow(&t[0], axis, start, len),
            move |a| range(&a[0], axis, start, len),
        ));
    }
    // Ranges that overlap: gradients add up where they do and are zero where there is none.
    cases.push(Case::new(
        "narrow twice, overlapping",
        vec![normal(&mut rng, &[3, 17, 5])],
        |t| ops::mul(&ops::narrow(&t[0], 1, 2, 7)?, &ops::narrow(&t[0], 1, 5, 7)?),
        |a| {
            let (x, y) = (range(&a[0], 1, 2, 7), range(&a[0], 1, 5, 7));
            Array::from_fn(&x.shape, |i| x.data[i] * y.data[i])
        },
    ));
    cases.push(Case::new(
        "narrow of integers",
        vec![integers(&[3, 17], |i| 7 * i as i32)],
        |t| ops::cast(&ops::narrow(&t[0], 1, 3, 5)?, armt_engine::DType::F32),
        |a| range(&a[0], 1, 3, 5),
    ));
    for at in [0, 2, 5] {
        cases.push(Case::new(
            format!("rows split at {at} and swapped"),
            vec![normal(&mut rng, &[5, 3, 17])],
            move |t| ops::split_rows(&t[0], at).and_then(|[a, b]| ops::concat(&[&b, &a], 0)),
            move |a| joined(&[range(&a[0], 0, at, 5 - at), range(&a[0], 0, 0, at)], 0),
        ));
    }
    // One part has no gradient; the other's is added to that of the whole.
    cases.push(Case::new(
        "rows split, one part used beside the whole",
        vec![normal(&mut rng, &[5, 17])],
        |t| ops::split_rows(&t[0], 3).and_then(|[_, b]| ops::concat(&[&t[0], &b], 0)),
        |a| joined(&[a[0].clone(), range(&a[0], 0, 3, 2)], 0),
    ));
    let lists: [(&[&[usize]], usize); 8] = [
        (&[&[1]], 0),
        (&[&[1], &[3]], 0),
        (&[&[3, 5], &[1, 5], &[17, 5]], 0),
        (&[&[3, 1], &[3, 17], &[3, 65]], 1),
        (&[&[2, 3, 17], &[2, 1, 17]], 1),
        (&[&[2, 3, 8], &[2, 5, 8]], 1),
        (&[&[2, 3, 16], &[2, 3, 32]], 2),
        (&[&[2, 3, 3, 65], &[2, 17, 3, 65]], 1),
    ];
    for (shapes, axis) in lists {
        let inputs = shapes.iter().map(|s| normal(&mut rng, s)).collect();
        cases.push(Case::new(
            format!("concat {shapes:?} axis {axis}"),
            inputs,
            move |t| ops::concat(&t.iter().collect::<Vec<&Tensor>>(), axis),
            move |a| joined(a, axis),
        ));
    }
    cases
}
