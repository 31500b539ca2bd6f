use std::ops::Range;

use armt_engine::ops::{self, AssocWrite, WriteRule};

use super::super::super::{Array, Case, Rng, integers, normal};
use super::{Way, memory, put_rows, read_all, rows_of, unequal, write_all};

/// With and without correction, and where memories are empty.
const WAYS: [(bool, bool); 3] = [(true, false), (true, true), (false, false)];

pub fn papers() -> Vec<Case> {
    cases(WriteRule::Paper)
}

pub fn projected() -> Vec<Case> {
    cases(WriteRule::Projected)
}

fn cases(rule: WriteRule) -> Vec<Case> {
    let mut rng = Rng(35);
    let sizes = [
        ([1, 1, 1, 3, 5], 0..1),
        ([3, 3, 5, 3, 40], 1..3),
        ([3, 8, 16, 17, 33], 0..2),
        ([2, 4, 9, 32, 17], 0..2),
        ([2, 9, 3, 5, 36], 0..1),
        ([2, 17, 20, 3, 6], 1..2),
        ([3, 4, 18, 5, 40], 0..2),
    ];
    let in_place = sizes.into_iter().map(|(sizes, rows)| (sizes, rows, true));
    // Of the last there are so many that a task of the CPU does both.
    let kept = [([3, 3, 5, 3, 40], 1..3), ([67, 2, 3, 3, 5], 1..66)].into_iter().map(|(sizes, rows)| (sizes, rows, false));
    let all = in_place.chain(kept).flat_map(|(sizes, rows, in_place)| WAYS.map(|way| (sizes, rows.clone(), in_place, way)));
    all.map(|(sizes, rows, in_place, way)| write_read(&mut rng, rule, sizes, rows, in_place, way)).collect()
}

/// Cases too large for differences of plain loops, where one device is compared with another.
pub fn large(rule: WriteRule) -> Vec<Case> {
    let mut rng = Rng(32);
    let sizes =
        [[4, 10, 32, 128], [4, 9, 64, 128], [8, 16, 17, 33], [3, 5, 3, 40], [12, 10, 32, 64], [16, 16, 9, 70], [1, 3, 128, 24]];
    let all = sizes.into_iter().flat_map(|[m, t, dm, d]| WAYS.map(|way| ([300, m, t, dm, d], way)));
    all.map(|(sizes, way)| write_read(&mut rng, rule, sizes, 5..295, true, way)).collect()
}

/// A write to rows of n memories and a read of the same, with a residual if `correction`. If `first`, every other memory is empty.
/// Inputs k, v, beta, A, z, q, residual, first.
fn write_read(
    rng: &mut Rng,
    rule: WriteRule,
    [n, m, t, dm, d]: [usize; 5],
    rows: Range<usize>,
    in_place: bool,
    (correction, first): (bool, bool),
) -> Case {
    let (nu, count) = (3, rows.len());
    let way = Way { rule, nu, correction };
    let (mut a, mut z) = memory(rng, n, 2 * nu * dm, d);
    let empty = move |row: usize| first && row.is_multiple_of(2);
    for memory in [&mut a, &mut z] {
        let inner = memory.array.data.len() / n;
        for i in (0..count).filter(|i| empty(*i)) {
            memory.array.data[(rows.start + i) * inner..][..inner].fill(0.0);
        }
    }
    // Away from 0, where DPFP has a kink.
    let clear = |x: f64| if x.abs() < 0.01 { 0.01 } else { x };
    let (k, q) = (normal(rng, &[count, m, dm]).map(clear), normal(rng, &[count, t, dm]).map(clear));
    let (v, beta, residual) = (normal(rng, &[count, m, d]), normal(rng, &[count, m]), normal(rng, &[count, t, d]));
    let inputs = vec![unequal(k, dm), v, beta, a, z, q, residual, integers(&[count], move |i| i32::from(empty(i)))];
    let with_residual = correction;
    let own = rows.clone();
    Case {
        name: format!(
            "assoc_write_read {rule:?} {count} of {n} x [{m} and {t}, {dm}] of {d}, correction {correction}, first {first}, in place {in_place}"
        ),
        inputs,
        run: Box::new(move |x| {
            // A buffer of its own: the inputs are not ours to overwrite.
            let a = ops::scale(&x[3], 1.0)?;
            let [k, v, beta, z] = [&x[0], &x[1], &x[2], &x[4]];
            let w = AssocWrite { k, v, beta, a: &a, z, first: first.then_some(&x[7]), correction, nu, rule };
            let write_read = if in_place { ops::assoc_write_read_in_place } else { ops::assoc_write_read };
            let (a, z, y) = write_read(w, own.clone(), &x[5], with_residual.then_some(&x[6]))?;
            // The way back takes A' away.
            Ok(vec![ops::scale(&a, 1.0)?, z, y])
        }),
        naive: Box::new(move |x, base| {
            let part = |x: &[Array]| -> Vec<Array> {
                let memory = [rows_of(&x[3], rows.clone()), rows_of(&x[4], rows.clone())];
                x[..3].iter().cloned().chain(memory).chain([x[7].clone()]).collect()
            };
            let new = write_all(&part(x), &part(base), [count, m, dm, d], way);
            let asked = [&x[5], &new[0], &new[1], &x[6]].map(Clone::clone);
            let y = read_all(&asked[..if with_residual { 4 } else { 3 }], [count, t, dm, d], nu);
            let (mut a, mut z) = (x[3].clone(), x[4].clone());
            put_rows([&mut a, &mut z], &rows, &new);
            vec![a, z, y]
        }),
    }
}
