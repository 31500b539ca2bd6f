use armt_engine::{DType, ops};

use super::super::{Array, Case, Rng, normal};
use super::ODD;

/// Inputs hold what bf16 can, so going there and back is exact, and so are the weights that come back as gradients.
pub fn cases() -> Vec<Case> {
    let mut rng = Rng(19);
    let there_and_back = |n: usize| {
        let x = normal(&mut rng, &[3, n]);
        Case::new(
            format!("cast {n}"),
            vec![x],
            |t| ops::cast(&ops::cast(&t[0], DType::BF16)?, DType::F32),
            move |a| Array::from_fn(&[3, n], |i| a[0].data[i]),
        )
    };
    ODD.into_iter().map(there_and_back).collect()
}
