use std::ops::Range;

use armt_engine::ops::{self, AssocWrite};

use super::super::{Array, Case, Input, Rng, integers, normal, spread};

const EPSILON: f64 = 1e-5;

/// DPFP-nu of one row.
pub fn dpfp(x: &[f64], nu: usize) -> Vec<f64> {
    let r: Vec<f64> = x.iter().map(|x| x.max(0.0)).chain(x.iter().map(|x| (-x).max(0.0))).collect();
    let width = r.len();
    (1..=nu).flat_map(|j| (0..width).map(move |i| (i, j))).map(|(i, j)| r[i] * r[(i + width - j) % width]).collect()
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// A non-zero memory A, z. z is positive and near the size of one key's features, so that denominators stay away from 0 and gamma falls
/// on both sides of its bounds.
fn memory(rng: &mut Rng, n: usize, dk: usize, d: usize) -> (Input, Input) {
    (normal(rng, &[n, dk, d]).in_f32(), normal(rng, &[n, dk]).map(|x| 0.2 + 0.5 * x.abs()).in_f32())
}

/// A^T phi.
fn recalled(a: &[f64], phi: &[f64], d: usize) -> Vec<f64> {
    let mut w = vec![0.0; d];
    for (row, p) in a.chunks(d).zip(phi) {
        w.iter_mut().zip(row).for_each(|(w, a)| *w += p * a);
    }
    w
}

/// Inputs q, a, z and maybe the residual.
fn read(a: &[Array], [n, t, dm, d]: [usize; 4], nu: usize) -> Array {
    let dk = 2 * nu * dm;
    let mut y = Vec::new();
    for row in 0..n * t {
        let memory = row / t;
        let phi = dpfp(&a[0].data[row * dm..][..dm], nu);
        let den = dot(&phi, &a[2].data[memory * dk..][..dk]) + EPSILON;
        y.extend(recalled(&a[1].data[memory * dk * d..][..dk * d], &phi, d).iter().map(|y| y / den));
    }
    if let Some(residual) = a.get(3) {
        y.iter_mut().zip(&residual.data).for_each(|(y, r)| *y += r);
    }
    Array { shape: vec![n, t, d], data: y }
}

/// gamma of every token at a point.
fn gammas(a: &[Array], [n, m, dm, _]: [usize; 4], nu: usize, correction: bool) -> Vec<f64> {
    let dk = 2 * nu * dm;
    let gamma = |row: usize| {
        let first = a.get(5).is_some_and(|first| first.data[row / m] != 0.0);
        let phi = dpfp(&a[0].data[row * dm..][..dm], nu);
        let den = dot(&phi, &a[4].data[row / m * dk..][..dk]) + EPSILON;
        if first || !correction { 1.0 } else { (1.0 - den / (dot(&phi, &phi) + EPSILON)).clamp(0.0, 1.0) }
    };
    (0..n * m).map(gamma).collect()
}

/// Inputs k, v, beta, a, z and maybe first; gamma comes from the unperturbed point, since it is not differentiated.
fn write(a: &[Array], base: &[Array], sizes: [usize; 4], nu: usize, correction: bool) -> Vec<Array> {
    let [_, m, dm, d] = sizes;
    let dk = 2 * nu * dm;
    let gamma = gammas(base, sizes, nu, correction);
    let (mut a_new, mut z_new) = (a[3].clone(), a[4].clone());
    for (row, gamma) in gamma.into_iter().enumerate() {
        let at = row / m;
        let phi = dpfp(&a[0].data[row * dm..][..dm], nu);
        let den = dot(&phi, &a[4].data[at * dk..][..dk]) + EPSILON;
        let old = recalled(&a[3].data[at * dk * d..][..dk * d], &phi, d);
        let b = 1.0 / (1.0 + (-a[2].data[row]).exp());
        let dv: Vec<f64> = (0..d).map(|c| b * (a[1].data[row * d + c] - old[c] / den)).collect();
        for (f, phi) in phi.iter().enumerate() {
            for (c, dv) in dv.iter().enumerate() {
                a_new.data[(at * dk + f) * d + c] += phi * dv;
            }
            z_new.data[at * dk + f] += gamma * phi;
        }
    }
    vec![a_new, z_new]
}

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(31);
    let mut cases = Vec::new();
    for (rows, dm, nu) in [(1, 1, 1), (3, 2, 3), (3, 3, 1), (17, 17, 3), (65, 17, 2), (2, 64, 3)] {
        let x = normal(&mut rng, &[rows, dm]);
        cases.push(Case::new(
            format!("dpfp-{nu} {rows} x {dm}"),
            vec![x],
            move |t| ops::dpfp(&t[0], nu),
            move |a| Array { shape: vec![rows, 2 * nu * dm], data: a[0].data.chunks(dm).flat_map(|x| dpfp(x, nu)).collect() },
        ));
    }
    for (sizes, nu) in [
        ([1, 1, 2, 1], 1),
        ([3, 3, 2, 3], 3),
        ([1, 17, 3, 17], 3),
        ([3, 3, 17, 65], 3),
        ([2, 17, 17, 65], 2),
        ([3, 1, 3, 1], 2),
        ([2, 33, 32, 64], 3),
        // Few queries of many memories.
        ([134, 1, 3, 5], 3),
        ([133, 6, 3, 36], 3),
        ([133, 13, 3, 9], 1),
    ] {
        cases.extend([false, true].map(|residual| reading(&mut rng, sizes, nu, residual)));
    }
    let mut inside = 0;
    let mut clipped = 0;
    for (sizes, nu) in [
        ([1, 1, 2, 1], 1),
        ([3, 3, 2, 3], 3),
        ([3, 3, 3, 17], 3),
        ([1, 17, 3, 65], 3),
        ([3, 17, 17, 17], 3),
        ([2, 35, 5, 36], 2),
        ([3, 4, 32, 64], 3),
        ([2, 6, 17, 33], 3),
        ([1, 16, 64, 40], 3),
        ([1, 9, 128, 4], 3),
    ] {
        let [n, m, dm, d] = sizes;
        for (correction, first) in [(true, false), (true, true), (false, false)] {
            let (a, z) = memory(&mut rng, n, 2 * nu * dm, d);
            // Keys of unequal size: a large key is new to the memory, a small one is not.
            let mut k = spread(&mut rng, &[n, m, dm], 1.0);
            for (i, x) in k.array.data.iter_mut().enumerate() {
                *x *= [0.5, 1.0, 2.0][i / dm % 3];
            }
            let mut inputs = vec![k, normal(&mut rng, &[n, m, d]), normal(&mut rng, &[n, m]), a, z];
            if first {
                inputs.push(integers(&[n], |i| i32::from(i % 2 == 0)));
            }
            let point: Vec<Array> = inputs.iter().map(|i| i.array.clone()).collect();
            if correction && !first {
                let gamma = gammas(&point, sizes, nu, true);
                inside += gamma.iter().filter(|g| (0.01..0.99).contains(*g)).count();
                clipped += gamma.iter().filter(|g| **g == 0.0).count();
            }
            cases.push(Case {
                name: format!("assoc_write-{nu} {n} x [{m}, {dm}] of {d}, correction {correction}, first {first}"),
                inputs,
                run: Box::new(move |t| {
                    let [k, v, beta, a, z] = [&t[0], &t[1], &t[2], &t[3], &t[4]];
                    let (a, z) = ops::assoc_write(AssocWrite { k, v, beta, a, z, first: t.get(5), correction, nu })?;
                    Ok(vec![a, z])
                }),
                naive: Box::new(move |a, base| write(a, base, sizes, nu, correction)),
            });
        }
    }
    for sizes in [[2, 3, 3, 5], [1, 17, 5, 40], [2, 6, 17, 33], [3, 4, 32, 64], [265, 2, 3, 36], [140, 5, 3, 36]] {
        // The same numbers both ways.
        cases.push(walk(&mut rng.clone(), sizes, true));
        cases.push(walk(&mut rng, sizes, false));
    }
    for (sizes, rows) in [
        ([1, 1, 1, 3, 5], 0..1),
        ([3, 3, 5, 3, 40], 1..3),
        ([3, 8, 16, 17, 33], 0..2),
        ([2, 4, 9, 32, 17], 0..2),
        ([2, 9, 3, 5, 36], 0..1),
        ([2, 17, 20, 3, 6], 1..2),
        ([3, 4, 18, 5, 40], 0..2),
    ] {
        for (correction, first) in [(true, false), (true, true), (false, false)] {
            cases.push(write_read(&mut rng, sizes, rows.clone(), correction, first));
        }
    }
    // Rows that fill a warp's lanes, of every order.
    for (sizes, nu) in [([3, 21, 16, 9], 1), ([2, 18, 16, 5], 3), ([1, 70, 32, 6], 2), ([2, 19, 64, 12], 3)] {
        cases.extend([false, true].map(|residual| reading(&mut rng, sizes, nu, residual)));
    }
    assert!(inside > 10 && clipped > 10, "cases must exercise gamma inside its bounds ({inside} tokens) and at them ({clipped})");
    cases
}

fn reading(rng: &mut Rng, [n, t, dm, d]: [usize; 4], nu: usize, residual: bool) -> Case {
    let (a, z) = memory(rng, n, 2 * nu * dm, d);
    let q = normal(rng, &[n, t, dm]);
    // With dm = 2 all active features are one product: the read does not depend on q but through eps, and its gradient is what rounding
    // leaves of that.
    let mut inputs = vec![if dm == 2 { q.constant() } else { q }, a, z];
    if residual {
        inputs.push(normal(rng, &[n, t, d]));
    }
    let with = if residual { " with residual" } else { "" };
    Case::new(
        format!("assoc_read-{nu} {n} x [{t}, {dm}] of {d}{with}"),
        inputs,
        move |t| ops::assoc_read(&t[0], &t[1], &t[2], nu, t.get(3)),
        move |a| read(a, [n, t, dm, d], nu),
    )
}

/// Cases too large for differences of plain loops, where one device is compared with another.
pub fn large() -> Vec<Case> {
    let mut rng = Rng(32);
    let sizes =
        [[4, 10, 32, 128], [4, 9, 64, 128], [8, 16, 17, 33], [3, 5, 3, 40], [12, 10, 32, 64], [16, 16, 9, 70], [1, 3, 128, 24]];
    let mut cases = Vec::new();
    for [m, t, dm, d] in sizes {
        for (correction, first) in [(true, false), (true, true), (false, false)] {
            cases.push(write_read(&mut rng, [300, m, t, dm, d], 5..295, correction, first));
        }
    }
    cases
}

/// A write to rows of n memories and a read of the same, with a residual if `correction`. If `first`, every other memory is empty.
/// Inputs k, v, beta, A, z, q, residual, first.
fn write_read(rng: &mut Rng, [n, m, t, dm, d]: [usize; 5], rows: Range<usize>, correction: bool, first: bool) -> Case {
    let (nu, count) = (3, rows.len());
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
    let (mut k, q) = (normal(rng, &[count, m, dm]).map(clear), normal(rng, &[count, t, dm]).map(clear));
    for (i, x) in k.array.data.iter_mut().enumerate() {
        *x *= [0.5, 1.0, 2.0][i / dm % 3];
    }
    let (v, beta, residual) = (normal(rng, &[count, m, d]), normal(rng, &[count, m]), normal(rng, &[count, t, d]));
    let inputs = vec![k, v, beta, a, z, q, residual, integers(&[count], move |i| i32::from(empty(i)))];
    let with_residual = correction;
    let own = rows.clone();
    Case {
        name: format!("assoc_write_read {count} of {n} x [{m} and {t}, {dm}] of {d}, correction {correction}, first {first}"),
        inputs,
        run: Box::new(move |x| {
            // A buffer of its own: the inputs are not ours to overwrite.
            let a = ops::scale(&x[3], 1.0)?;
            let [k, v, beta, z] = [&x[0], &x[1], &x[2], &x[4]];
            let w = AssocWrite { k, v, beta, a: &a, z, first: first.then_some(&x[7]), correction, nu };
            let (a, z, y) = ops::assoc_write_read(w, own.clone(), &x[5], with_residual.then_some(&x[6]))?;
            // The way back takes A' away.
            Ok(vec![ops::scale(&a, 1.0)?, z, y])
        }),
        naive: Box::new(move |x, base| {
            let part = |x: &[Array]| -> Vec<Array> {
                let memory = [rows_of(&x[3], rows.clone()), rows_of(&x[4], rows.clone())];
                x[..3].iter().cloned().chain(memory).chain([x[7].clone()]).collect()
            };
            let new = write(&part(x), &part(base), [count, m, dm, d], nu, correction);
            let asked = [&x[5], &new[0], &new[1], &x[6]].map(Clone::clone);
            let y = read(&asked[..if with_residual { 4 } else { 3 }], [count, t, dm, d], nu);
            let (mut a, mut z) = (x[3].clone(), x[4].clone());
            for (whole, new) in [&mut a, &mut z].into_iter().zip(new) {
                let at = rows.start * (whole.data.len() / whole.shape[0]);
                whole.data[at..at + new.data.len()].copy_from_slice(&new.data);
            }
            vec![a, z, y]
        }),
    }
}

/// Rows `rows` of the leading axis.
fn rows_of(x: &Array, rows: Range<usize>) -> Array {
    let inner = x.data.len() / x.shape[0];
    let shape = [&[rows.len()], &x.shape[1..]].concat();
    Array { shape, data: x.data[rows.start * inner..rows.end * inner].to_vec() }
}

/// Reads and writes in turn, in place or not, some on a part of n + 1 memories. The last write is seen by nobody; in place, it must be taken
/// back all the same.
/// Inputs q of each of three reads, k, v, beta of each of three writes, A, z.
fn walk(rng: &mut Rng, [n, m, dm, d]: [usize; 4], in_place: bool) -> Case {
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
        name: format!("assoc {} x [{m}, {dm}] of {d}, in place {in_place}", n + 1),
        inputs,
        run: Box::new(move |x| {
            // A buffer of its own: the inputs are not ours to overwrite.
            let (mut a, mut z) = (ops::scale(&x[12], 1.0)?, x[13].clone());
            let mut seen = Vec::new();
            for (i, rows) in steps.iter().enumerate() {
                seen.push(ops::assoc_read_rows(&x[i], &a, &z, rows.clone(), nu, None)?);
                let [k, v, beta] = [&x[3 + 3 * i], &x[4 + 3 * i], &x[5 + 3 * i]];
                let w = AssocWrite { k, v, beta, a: &a, z: &z, first: None, correction: false, nu };
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
                seen.push(read(&[x[i].clone(), part_a.clone(), part_z.clone()], [rows.len(), t, dm, d], nu));
                let inputs: Vec<Array> = x[3 + 3 * i..6 + 3 * i].iter().cloned().chain([part_a, part_z]).collect();
                let new = write(&inputs, &inputs, [rows.len(), m, dm, d], nu, false);
                for (whole, new) in [&mut a, &mut z].into_iter().zip(new) {
                    let at = rows.start * (whole.data.len() / whole.shape[0]);
                    whole.data[at..at + new.data.len()].copy_from_slice(&new.data);
                }
            }
            seen
        }),
    }
}
