use armt_engine::ops;

use super::super::super::{Case, Rng, normal};
use super::{Sizes, memory, read_all};

pub fn cases() -> Vec<Case> {
    let sizes = [
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
        // Rows that fill a warp's lanes, of every order.
        ([3, 21, 16, 9], 1),
        ([2, 18, 16, 5], 3),
        ([1, 70, 32, 6], 2),
        ([2, 19, 64, 12], 3),
    ];
    let mut rng = Rng(33);
    sizes.into_iter().flat_map(|(sizes, nu)| [false, true].map(|residual| reading(&mut rng, sizes, nu, residual))).collect()
}

fn reading(rng: &mut Rng, [n, t, dm, d]: Sizes, nu: usize, residual: bool) -> Case {
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
        move |a| read_all(a, [n, t, dm, d], nu),
    )
}
