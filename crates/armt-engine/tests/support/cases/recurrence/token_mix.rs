use armt_engine::ops::recurrence::naive;
use armt_engine::ops::{TokenMix, token_mix};
use armt_engine::{Result, ops};

use super::super::super::{Array, Case, Input, Rng, integers, normal};
use super::{MASKS, Seen, Sequences, cuts, in_pieces, seen};

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(76);
    // Widths of whole accesses and not, as many mixes as a kernel has and not, texts shorter and longer than what a thread takes.
    let sizes = [([1, 1, 1], 8, 4), ([2, 2, 5], 3, 2), ([1, 2, 33], 8, 2), ([2, 1, 70], 16, 4), ([1, 1, 9], 8, 5)];
    let mut cases = Vec::new();
    for (sequences, width, mixes) in sizes {
        for mask in MASKS {
            for ends in cuts(sequences[2]) {
                cases.push(case(&mut rng, sequences, width, mixes, mask, ends));
            }
        }
    }
    cases
}

pub(super) fn case(rng: &mut Rng, sequences: Sequences, width: usize, mixes: usize, mask: Seen, ends: Vec<usize>) -> Case {
    let [groups, texts, tokens] = sequences;
    let mut inputs = vec![
        normal(rng, &[groups, texts, tokens, width]),
        normal(rng, &[groups, texts, 1, width]).in_f32(),
        Input { integer: false, ..integers(&[groups, width, 2], |i| (i as i32 + 1) % 2) },
    ];
    inputs.extend((0..mixes).map(|_| normal(rng, &[groups, width])));
    inputs.extend(mask.mask(sequences));
    Case {
        name: format!("token_mix {sequences:?} of {width}, {mixes} times, {mask:?} seen, to {ends:?}"),
        inputs,
        run: Box::new(move |t| {
            in_pieces(&ends, &t[1], |cut, last| {
                let (x, seen) = (cut(&t[0])?, t.get(3 + mixes).map(cut).transpose()?);
                let shares: Vec<_> = t[3..3 + mixes].iter().collect();
                let (y, last) = token_mix(TokenMix { x: &x, last, shares: &shares, shift: &t[2], seen: seen.as_ref() })?;
                let stacked = y.iter().map(|y| ops::reshape(y, [groups, texts, x.dims()[2], 1, width]));
                let stacked = stacked.collect::<Result<Vec<_>>>()?;
                Ok((ops::concat(&stacked.iter().collect::<Vec<_>>(), 3)?, last))
            })
        }),
        naive: Box::new(move |a, _| plain(a, sequences, width, mixes)),
    }
}

fn plain(a: &[Array], [groups, texts, tokens]: Sequences, width: usize, mixes: usize) -> Vec<Array> {
    let (mut y, mut lasts) = (Vec::new(), Vec::new());
    for s in 0..groups * texts {
        let part = |x: &Array, at: usize, length: usize| x.data[at * length..][..length].to_vec();
        let (x, seen) = (part(&a[0], s, tokens * width), seen(a.get(3 + mixes), s, tokens));
        let mut last = part(&a[1], s, width);
        let weight: Vec<f64> = (0..2 * width).map(|i| ((i + 1) % 2) as f64).collect();
        let before = naive::Conv { x: &x, weight: &weight, bias: &vec![0.0; width], seen: &seen }.run(&mut last);
        for t in 0..tokens {
            for share in &a[3..3 + mixes] {
                let share = part(share, s / texts, width);
                y.extend((0..width).map(|c| before[t * width + c] + (x[t * width + c] - before[t * width + c]) * share[c]));
            }
        }
        lasts.extend(last);
    }
    vec![Array { shape: vec![groups, texts, tokens, mixes, width], data: y }, Array { shape: a[1].shape.clone(), data: lasts }]
}
