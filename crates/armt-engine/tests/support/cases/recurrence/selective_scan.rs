use armt_engine::ops::recurrence::naive;
use armt_engine::ops::{SelectiveScan, selective_scan};

use super::super::super::{Array, Case, Rng, normal, spread};
use super::{MASKS, Seen, Sequences, cuts, in_pieces, seen};

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(71);
    // Strips of channels that are full and not, pieces of tokens likewise; the last two have several spans of channels, and several texts to
    // a task of the CPU.
    let sizes = [
        ([1, 1, 1], 1, 1),
        ([1, 1, 7], 3, 2),
        ([2, 3, 5], 17, 4),
        ([1, 2, 33], 32, 3),
        ([2, 1, 70], 40, 5),
        ([1, 2, 64], 33, 16),
        ([1, 2, 18], 150, 6),
        ([1, 70, 3], 5, 2),
    ];
    let mut cases = Vec::new();
    for (sequences, width, n) in sizes {
        for mask in MASKS {
            for ends in cuts(sequences[2]) {
                cases.push(case(&mut rng, sequences, width, n, mask, ends));
            }
        }
    }
    cases
}

pub(super) fn case(rng: &mut Rng, sequences: Sequences, width: usize, n: usize, mask: Seen, ends: Vec<usize>) -> Case {
    let [groups, texts, tokens] = sequences;
    let mut inputs = vec![
        normal(rng, &[groups, texts, tokens, width]),
        normal(rng, &[groups, texts, tokens, width]),
        spread(rng, &[groups, width], 0.5).map(|x| x - 1.0).in_f32(),
        spread(rng, &[groups, width, n], 0.5).in_f32(),
        normal(rng, &[groups, texts, tokens, n]),
        normal(rng, &[groups, texts, tokens, n]),
        normal(rng, &[groups, width]).in_f32(),
        normal(rng, &[groups, texts, width, n]).in_f32(),
    ];
    inputs.extend(mask.mask(sequences));
    Case {
        name: format!("selective_scan {sequences:?} of {width} by {n}, {mask:?} seen, to {ends:?}"),
        inputs,
        run: Box::new(move |t| {
            in_pieces(&ends, &t[7], |cut, state| {
                let (u, delta, b, c) = (cut(&t[0])?, cut(&t[1])?, cut(&t[4])?, cut(&t[5])?);
                let seen = t.get(8).map(cut).transpose()?;
                let (bias, a_log, d) = (&t[2], &t[3], &t[6]);
                selective_scan(SelectiveScan { u: &u, delta: &delta, bias, a_log, b: &b, c: &c, d, state, seen: seen.as_ref() })
            })
        }),
        naive: Box::new(move |a, _| plain(a, sequences, width, n)),
    }
}

fn plain(a: &[Array], [groups, texts, tokens]: Sequences, width: usize, n: usize) -> Vec<Array> {
    let (mut y, mut states) = (Vec::new(), Vec::new());
    for s in 0..groups * texts {
        let part = |i: usize, at: usize, length: usize| &a[i].data[at * length..][..length];
        let scan = naive::Scan {
            u: part(0, s, tokens * width),
            delta: part(1, s, tokens * width),
            bias: part(2, s / texts, width),
            a_log: part(3, s / texts, width * n),
            b: part(4, s, tokens * n),
            c: part(5, s, tokens * n),
            d: part(6, s / texts, width),
            seen: &seen(a.get(8), s, tokens),
        };
        let mut state = part(7, s, width * n).to_vec();
        y.extend(scan.run(&mut state));
        states.extend(state);
    }
    vec![Array { shape: a[0].shape.clone(), data: y }, Array { shape: a[7].shape.clone(), data: states }]
}
