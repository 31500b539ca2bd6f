use armt_engine::ops::recurrence::naive;
use armt_engine::ops::{CausalConv, causal_conv};

use super::super::super::{Array, Case, Rng, normal};
use super::{MASKS, Seen, Sequences, cuts, in_pieces, seen};

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(73);
    // Segments shorter than the weights, and longer ones.
    let sizes = [([1, 1, 1], 1, 4), ([1, 2, 2], 3, 5), ([2, 3, 5], 17, 4), ([1, 2, 33], 20, 2), ([2, 1, 19], 65, 3)];
    let mut cases = Vec::new();
    for (sequences, width, k) in sizes {
        for mask in MASKS {
            for ends in cuts(sequences[2]) {
                for biased in [false, true] {
                    cases.push(case(&mut rng, sequences, [width, k], mask, ends.clone(), biased));
                }
            }
        }
    }
    cases
}

pub(super) fn case(
    rng: &mut Rng,
    sequences: Sequences,
    [width, k]: [usize; 2],
    mask: Seen,
    ends: Vec<usize>,
    biased: bool,
) -> Case {
    let [groups, texts, tokens] = sequences;
    let mut inputs = vec![
        normal(rng, &[groups, texts, tokens, width]),
        normal(rng, &[groups, width, k]),
        normal(rng, &[groups, texts, k - 1, width]).in_f32(),
    ];
    inputs.extend(biased.then(|| normal(rng, &[groups, width])));
    inputs.extend(mask.mask(sequences));
    let with = if biased { " with bias" } else { "" };
    let at = 3 + usize::from(biased);
    Case {
        name: format!("causal_conv {sequences:?} of {width} by {k}{with}, {mask:?} seen, to {ends:?}"),
        inputs,
        run: Box::new(move |t| {
            in_pieces(&ends, &t[2], |cut, tail| {
                let (x, seen) = (cut(&t[0])?, t.get(at).map(cut).transpose()?);
                causal_conv(CausalConv { x: &x, weight: &t[1], bias: biased.then(|| &t[3]), tail, seen: seen.as_ref() })
            })
        }),
        naive: Box::new(move |a, _| plain(a, sequences, [width, k], biased.then(|| &a[3]), a.get(at))),
    }
}

fn plain(
    a: &[Array],
    [groups, texts, tokens]: Sequences,
    [width, k]: [usize; 2],
    bias: Option<&Array>,
    mask: Option<&Array>,
) -> Vec<Array> {
    let (mut y, mut tails) = (Vec::new(), Vec::new());
    for s in 0..groups * texts {
        let part = |x: &Array, at: usize, length: usize| x.data[at * length..][..length].to_vec();
        let conv = naive::Conv {
            x: &part(&a[0], s, tokens * width),
            weight: &part(&a[1], s / texts, width * k),
            bias: &bias.map_or(vec![0.0; width], |bias| part(bias, s / texts, width)),
            seen: &seen(mask, s, tokens),
        };
        let mut tail = part(&a[2], s, (k - 1) * width);
        y.extend(conv.run(&mut tail));
        tails.extend(tail);
    }
    vec![Array { shape: a[0].shape.clone(), data: y }, Array { shape: a[2].shape.clone(), data: tails }]
}
