use armt_engine::ops::{self, Generator};

use super::super::{Array, Case, Rng, normal};

const SEED: u64 = 0x1234_5678_9abc_def0;
const STATE: [i32; 3] = [0x9abc_def0_u32 as i32, 0x1234_5678, 2];

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(24);
    let shapes: [&[usize]; 5] = [&[1], &[3], &[17], &[65], &[2, 17, 65]];
    let probabilities = [0.0f32, 0.1, 0.5, 0.9];
    let all = shapes.into_iter().flat_map(|shape| probabilities.map(|p| (shape, p)));
    all.enumerate()
        .map(|(site, (shape, p))| {
            let site = site as u32;
            Case::new(
                format!("dropout {shape:?} of {p}"),
                vec![normal(&mut rng, shape)],
                move |t| {
                    let generator = Generator::new(SEED, t[0].device())?;
                    generator.advance()?;
                    generator.advance()?;
                    ops::dropout(&t[0], p, &generator, site)
                },
                move |a| {
                    let scale = 1.0 / (1.0 - f64::from(p));
                    Array::from_fn(shape, |i| if ops::dropout_keeps(STATE, site, i, p) { scale * a[0].data[i] } else { 0.0 })
                },
            )
        })
        .collect()
}
