use armt_engine::ops;
use armt_engine::ops::memory::naive;

use super::super::super::{Array, Case, Rng, normal};

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(31);
    let sizes = [(1, 1, 1), (3, 2, 3), (3, 3, 1), (17, 17, 3), (65, 17, 2), (2, 64, 3)];
    let case = |(rows, dm, nu): (usize, usize, usize)| {
        let x = normal(&mut rng, &[rows, dm]);
        Case::new(
            format!("dpfp-{nu} {rows} x {dm}"),
            vec![x],
            move |t| ops::dpfp(&t[0], nu),
            move |a| Array {
                shape: vec![rows, 2 * nu * dm],
                data: a[0].data.chunks(dm).flat_map(|x| naive::dpfp(x, nu)).collect(),
            },
        )
    };
    sizes.into_iter().map(case).collect()
}
