use armt_engine::ops::recurrence::naive;
use armt_engine::ops::{Wkv5, wkv5};

use super::super::super::{Array, Case, Rng, normal, spread};
use super::{MASKS, Seen, Sequences, cuts, in_pieces, seen};

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(72);
    let sizes =
        [([1, 1, 1], 1, 1), ([1, 1, 7], 1, 3), ([2, 3, 5], 2, 8), ([1, 2, 37], 3, 5), ([2, 1, 50], 1, 17), ([1, 1, 33], 2, 64)];
    let mut cases = Vec::new();
    for (sequences, heads, n) in sizes {
        for mask in MASKS {
            for ends in cuts(sequences[2]) {
                cases.push(case(&mut rng, sequences, heads, n, mask, ends));
            }
        }
    }
    cases
}

pub(super) fn case(rng: &mut Rng, sequences: Sequences, heads: usize, n: usize, mask: Seen, ends: Vec<usize>) -> Case {
    let ([groups, texts, tokens], width) = (sequences, heads * n);
    let mut inputs = vec![
        normal(rng, &[groups, texts, tokens, width]),
        normal(rng, &[groups, texts, tokens, width]),
        normal(rng, &[groups, texts, tokens, width]),
        spread(rng, &[groups, width], 1.5).map(|x| x - 1.0).in_f32(),
        normal(rng, &[groups, width]).in_f32(),
        normal(rng, &[groups, texts, heads, n, n]).in_f32(),
    ];
    inputs.extend(mask.mask(sequences));
    Case {
        name: format!("wkv5 {sequences:?} of {heads} by {n}, {mask:?} seen, to {ends:?}"),
        inputs,
        run: Box::new(move |t| {
            in_pieces(&ends, &t[5], |cut, state| {
                let (r, k, v) = (cut(&t[0])?, cut(&t[1])?, cut(&t[2])?);
                let seen = t.get(6).map(cut).transpose()?;
                wkv5(Wkv5 { r: &r, k: &k, v: &v, decay: &t[3], bonus: &t[4], state, seen: seen.as_ref() })
            })
        }),
        naive: Box::new(move |a, _| plain(a, sequences, heads, n)),
    }
}

fn plain(a: &[Array], [groups, texts, tokens]: Sequences, heads: usize, n: usize) -> Vec<Array> {
    let (mut y, mut states) = (vec![0.0; a[0].data.len()], Vec::new());
    for s in 0..groups * texts {
        let seen = seen(a.get(6), s, tokens);
        for h in 0..heads {
            let at = |t: usize| ((s * tokens + t) * heads + h) * n;
            let part = |i: usize| (0..tokens).flat_map(|t| a[i].data[at(t)..][..n].to_vec()).collect::<Vec<f64>>();
            let param = |i: usize| &a[i].data[(s / texts * heads + h) * n..][..n];
            let (r, k, v) = (part(0), part(1), part(2));
            let wkv = naive::Wkv { r: &r, k: &k, v: &v, decay: param(3), bonus: param(4), seen: &seen };
            let mut state = a[5].data[(s * heads + h) * n * n..][..n * n].to_vec();
            let out = wkv.run(&mut state);
            (0..tokens).for_each(|t| y[at(t)..][..n].copy_from_slice(&out[t * n..][..n]));
            states.extend(state);
        }
    }
    vec![Array { shape: a[0].shape.clone(), data: y }, Array { shape: a[5].shape.clone(), data: states }]
}
