use armt_engine::ops::{self, AssocWrite, WriteRule};

use super::super::super::{Array, Case, Rng, integers, normal, spread};
use super::{Way, gammas, memory, unequal, write_all};

pub fn papers() -> Vec<Case> {
    cases(WriteRule::Paper)
}

pub fn projected() -> Vec<Case> {
    cases(WriteRule::Projected)
}

fn cases(rule: WriteRule) -> Vec<Case> {
    let mut rng = Rng(34);
    let mut cases = Vec::new();
    let (mut inside, mut clipped) = (0, 0);
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
            let way = Way { rule, nu, correction };
            let (a, z) = memory(&mut rng, n, 2 * nu * dm, d);
            let k = unequal(spread(&mut rng, &[n, m, dm], 1.0), dm);
            let mut v = normal(&mut rng, &[n, m, d]);
            if rule == WriteRule::Projected && dm < 3 {
                // Two numbers have one feature. What a write takes away does not depend on its size then, so that all of the key's gradient
                // is v's part: where v is small, it is what is left of terms hundreds of times as large.
                v = v.map(|x| 1.0 + x.abs());
            }
            let mut inputs = vec![k, v, normal(&mut rng, &[n, m]), a, z];
            if first {
                inputs.push(integers(&[n], |i| i32::from(i % 2 == 0)));
            }
            let point: Vec<Array> = inputs.iter().map(|i| i.array.clone()).collect();
            if correction && !first {
                let gamma = gammas(&point, sizes, way).concat();
                inside += gamma.iter().filter(|g| (0.01..0.99).contains(*g)).count();
                clipped += gamma.iter().filter(|g| **g == 0.0).count();
            }
            cases.push(Case {
                name: format!("assoc_write {rule:?}-{nu} {n} x [{m}, {dm}] of {d}, correction {correction}, first {first}"),
                inputs,
                run: Box::new(move |t| {
                    let [k, v, beta, a, z] = [&t[0], &t[1], &t[2], &t[3], &t[4]];
                    let (a, z) = ops::assoc_write(AssocWrite { k, v, beta, a, z, first: t.get(5), correction, nu, rule })?;
                    Ok(vec![a, z])
                }),
                naive: Box::new(move |a, base| write_all(a, base, sizes, way)),
            });
        }
    }
    assert!(inside > 10 && clipped > 10, "cases must exercise gamma inside its bounds ({inside} tokens) and at them ({clipped})");
    cases
}
