use armt_engine::ops;

use super::super::{Array, Case, Rng, integers, normal};
use super::ODD;

fn gather(a: &[Array]) -> Array {
    let (d, n) = (a[0].last(), a[1].data.len());
    Array::from_fn(&[n, d], |i| a[0].data[a[1].data[i / d] as usize * d + i % d])
}

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(31);
    let mut cases = Vec::new();
    let mut case = |rng: &mut Rng, v: usize, d: usize, ids: &[usize], skewed: bool| {
        let table = normal(rng, &[v, d]);
        // Skewed: two of three positions hold one id.
        let ids = integers(ids, |i| if skewed && i % 3 > 0 { v as i32 / 2 } else { rng.below(v) as i32 });
        let name = format!("embedding [{v}, {d}] of {:?}{}", ids.array.shape, if skewed { " skewed" } else { "" });
        cases.push(Case::new(name, vec![table, ids], |t| ops::embedding(&t[0], &t[1]), gather));
    };
    for v in ODD {
        for d in ODD {
            case(&mut rng, v, d, &[3], false);
            case(&mut rng, v, d, &[2, 17], true);
        }
    }
    case(&mut rng, 17, 64, &[65], false);
    // More columns than a block has, more positions than a block lists at a time, pieces of positions, and many table rows.
    case(&mut rng, 7, 300, &[40], true);
    case(&mut rng, 5, 3, &[2100], true);
    case(&mut rng, 3, 2, &[4500], true);
    case(&mut rng, 5000, 2, &[65], false);
    cases
}
