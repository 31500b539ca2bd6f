use armt_engine::ops::{self, AssocWrite, WriteRule};

use super::super::super::{Array, Case, Input, Rng, normal};
use super::{Sizes, Way, memory, put_rows, read_all, rows_of, write_all};

pub fn papers() -> Vec<Case> {
    cases(WriteRule::Paper)
}

pub fn projected() -> Vec<Case> {
    cases(WriteRule::Projected)
}

fn cases(rule: WriteRule) -> Vec<Case> {
    let mut rng = Rng(36);
    let sizes = [[2, 3, 3, 5], [1, 17, 5, 40], [2, 6, 17, 33], [3, 4, 32, 64], [265, 2, 3, 36], [140, 5, 3, 36]];
    // Each with the same numbers both ways.
    sizes.into_iter().flat_map(|sizes| [walk(&mut rng.clone(), rule, sizes, true), walk(&mut rng, rule, sizes, false)]).collect()
}

/// Reads and writes in turn, in place or not, some on a part of n + 1 memories. The last write is seen by nobody; in place, it must be taken
/// back all the same.
/// Inputs q of each of three reads, k, v, beta of each of three writes, A, z.
fn walk(rng: &mut Rng, rule: WriteRule, [n, m, dm, d]: Sizes, in_place: bool) -> Case {
    let (nu, t) = (3, 2);
    let steps = [0..n + 1, 1..n + 1, 0..n];
    let mut inputs: Vec<Input> = steps.iter().map(|r| normal(rng, &[r.len(), t, dm])).collect();
    for r in &steps {
        inputs.extend([normal(rng, &[r.len(), m, dm]), normal(rng, &[r.len(), m, d]), normal(rng, &[r.len(), m])]);
    }
    let (a, z) = memory(rng, n + 1, 2 * nu * dm, d);
    inputs.extend([a, z]);
    let naive_steps = steps.clone();
    Case {
        name: format!("assoc {rule:?} {} x [{m}, {dm}] of {d}, in place {in_place}", n + 1),
        inputs,
        run: Box::new(move |x| {
            // A buffer of its own: the inputs are not ours to overwrite.
            let (mut a, mut z) = (ops::scale(&x[12], 1.0)?, x[13].clone());
            let mut seen = Vec::new();
            for (i, rows) in steps.iter().enumerate() {
                seen.push(ops::assoc_read_rows(&x[i], &a, &z, rows.clone(), nu, None)?);
                let [k, v, beta] = [&x[3 + 3 * i], &x[4 + 3 * i], &x[5 + 3 * i]];
                let w = AssocWrite { k, v, beta, a: &a, z: &z, first: None, correction: false, nu, rule };
                let write = if in_place { ops::assoc_write_in_place } else { ops::assoc_write_rows };
                (a, z) = write(w, rows.clone())?;
            }
            Ok(seen)
        }),
        naive: Box::new(move |x, _| {
            let (mut a, mut z) = (x[12].clone(), x[13].clone());
            let mut seen = Vec::new();
            for (i, rows) in naive_steps.iter().enumerate() {
                let (part_a, part_z) = (rows_of(&a, rows.clone()), rows_of(&z, rows.clone()));
                seen.push(read_all(&[x[i].clone(), part_a.clone(), part_z.clone()], [rows.len(), t, dm, d], nu));
                let inputs: Vec<Array> = x[3 + 3 * i..6 + 3 * i].iter().cloned().chain([part_a, part_z]).collect();
                let new = write_all(&inputs, &inputs, [rows.len(), m, dm, d], Way { rule, nu, correction: false });
                put_rows([&mut a, &mut z], rows, &new);
            }
            seen
        }),
    }
}
