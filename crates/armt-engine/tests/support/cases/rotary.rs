use armt_engine::ops::{self, Heads};

use super::super::{Array, Case, Rng, normal};

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(31);
    let mut cases = Vec::new();
    let sizes = [(1, 1, 2, 1, 1), (2, 1, 16, 8, 3), (4, 2, 17, 3, 5), (2, 2, 32, 16, 17), (3, 1, 64, 8, 65), (2, 2, 5, 0, 3)];
    for ((query, key, size, half, t), tables) in sizes.into_iter().flat_map(|s| [(s, 1), (s, 2)]) {
        let row = (query + 2 * key) * size;
        let turn = |sine: bool| {
            let shape = if tables == 1 { vec![t, half] } else { vec![tables, t, half] };
            let table = normal(&mut Rng(32), &shape).map(|x| if sine { x.sin() } else { x.cos() });
            table.in_f32().constant()
        };
        let inputs = vec![normal(&mut rng, &[2, 2, t, row]), turn(false), turn(true)];
        cases.push(Case::new(
            format!("rotary {query}/{key} heads of {size}, {} rotated, T {t}, {tables} tables", 2 * half),
            inputs,
            move |x| ops::rotary(&x[0], Heads { query, key, size }, &x[1], &x[2]),
            move |a| {
                let x = &a[0].data;
                Array::from_fn(&a[0].shape, |i| {
                    let (position, column) = (i / row / (4 * t / tables) * t + i / row % t, i % row);
                    let d = column % size;
                    if column / size >= query + key || d >= 2 * half {
                        return x[i];
                    }
                    let at = position * half + d % half;
                    let (cos, sin) = (a[1].data[at], a[2].data[at]);
                    if d < half { x[i] * cos - x[i + half] * sin } else { x[i] * cos + x[i - half] * sin }
                })
            },
        ));
    }
    cases
}
