use armt_engine::ops::recurrence::naive;
use armt_engine::ops::{ConvSilu, Gate, GatedScan, conv_silu, gated_scan};
use armt_engine::{Result, Tensor, ops};

use super::super::super::{Array, Case, Rng, normal, spread};
use super::{MASKS, Seen, Sequences, cuts, seen};

/// Channels, numbers of state, weights of the convolution, and columns before B and C.
type Widths = [usize; 4];

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(75);
    // States of sixteen, which have kernels of their own, and of others; channels and tokens that fill a block or a tile and not; texts
    // shorter than the weights.
    let sizes = [
        ([1, 1, 1], [4, 16, 4, 0]),
        ([1, 1, 7], [3, 5, 3, 1]),
        ([2, 2, 5], [12, 16, 4, 4]),
        ([1, 2, 33], [36, 16, 2, 8]),
        ([1, 1, 2], [8, 16, 5, 3]),
        ([2, 1, 18], [8, 16, 3, 12]),
    ];
    let mut cases = Vec::new();
    for (sequences, widths) in sizes {
        for mask in MASKS {
            for ends in cuts(sequences[2]) {
                cases.push(case(&mut rng, sequences, widths, mask, ends));
            }
        }
    }
    cases
}

/// The convolution, and the scan that takes its output and the gate beside it.
pub(super) fn case(rng: &mut Rng, sequences: Sequences, widths: Widths, mask: Seen, ends: Vec<usize>) -> Case {
    let ([groups, texts, tokens], [width, n, k, before]) = (sequences, widths);
    let mut inputs = vec![
        normal(rng, &[groups, texts, tokens, 2 * width]),
        normal(rng, &[groups, width, k]),
        normal(rng, &[groups, width]),
        normal(rng, &[groups, texts, k - 1, width]).in_f32(),
        normal(rng, &[groups, texts, tokens, width]),
        spread(rng, &[groups, width], 0.5).map(|x| x - 1.0).in_f32(),
        spread(rng, &[groups, width, n], 0.5).in_f32(),
        normal(rng, &[groups, width]).in_f32(),
        normal(rng, &[groups, texts, tokens, before + 2 * n]),
        normal(rng, &[groups, texts, width, n]).in_f32(),
    ];
    inputs.extend(mask.mask(sequences));
    Case {
        name: format!("gated_scan {sequences:?} of {widths:?}, {mask:?} seen, to {ends:?}"),
        inputs,
        run: Box::new(move |t| on_engine(t, &ends)),
        naive: Box::new(move |a, _| plain(a, sequences, widths)),
    }
}

/// In the pieces that end at `ends`; where there is but one, z once more as a gate of its own.
fn on_engine(t: &[Tensor], ends: &[usize]) -> Result<Vec<Tensor>> {
    let (mut from, mut outputs, mut tail, mut state) = (0, Vec::new(), t[3].clone(), t[9].clone());
    let mut alone = None;
    for end in ends {
        let cut = |x: &Tensor| ops::narrow(x, 2, from, end - from);
        let (x, delta, shared, seen) = (cut(&t[0])?, cut(&t[4])?, cut(&t[8])?, t.get(10).map(cut).transpose()?);
        let conv = ConvSilu { x: &x, weight: &t[1], bias: Some(&t[2]), tail: &tail, seen: seen.as_ref() };
        let (u, gate, next) = conv_silu(conv)?;
        let scan = |gate: &Gate, state: &Tensor| {
            let (bias, a_log, d, delta, shared) = (&t[5], &t[6], &t[7], &delta, &shared);
            gated_scan(GatedScan { u: &u, delta, bias, a_log, d, shared, gate, state, seen: seen.as_ref() })
        };
        if ends.len() == 1 {
            let width = u.shape().last();
            alone = Some(scan(&Gate::of(&ops::narrow(&x, 3, width, width)?), &state)?.0);
        }
        let y;
        (y, state) = scan(&gate, &state)?;
        outputs.push(y);
        (from, tail) = (*end, next);
    }
    let y = ops::concat(&outputs.iter().collect::<Vec<_>>(), 2)?;
    Ok(vec![alone.unwrap_or(y.clone()), y, tail, state])
}

fn plain(a: &[Array], [groups, texts, tokens]: Sequences, [width, n, k, before]: Widths) -> Vec<Array> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let (mut all, mut tails, mut states) = (Vec::new(), Vec::new(), Vec::new());
    for s in 0..groups * texts {
        let part = |i: usize, at: usize, length: usize| &a[i].data[at * length..][..length];
        let columns = |i: usize, from: usize, length: usize| -> Vec<f64> {
            let row = a[i].last();
            part(i, s, tokens * row).chunks(row).flat_map(|row| row[from..from + length].to_vec()).collect()
        };
        let group = s / texts;
        let seen = seen(a.get(10), s, tokens);
        let (weight, bias) = (part(1, group, width * k), part(2, group, width));
        let mut tail = part(3, s, (k - 1) * width).to_vec();
        // What is not seen has an output of zero, of silu too.
        let u: Vec<f64> =
            naive::Conv { x: &columns(0, 0, width), weight, bias, seen: &seen }.run(&mut tail).into_iter().map(silu).collect();
        let scan = naive::Scan {
            u: &u,
            delta: part(4, s, tokens * width),
            bias: part(5, group, width),
            a_log: part(6, group, width * n),
            b: &columns(8, before, n),
            c: &columns(8, before + n, n),
            d: part(7, group, width),
            seen: &seen,
        };
        let mut state = part(9, s, width * n).to_vec();
        let y = scan.run(&mut state);
        all.extend(y.into_iter().zip(columns(0, width, width)).map(|(y, z)| y * silu(z)));
        tails.extend(tail);
        states.extend(state);
    }
    let y = Array { shape: vec![groups, texts, tokens, width], data: all };
    vec![y.clone(), y, Array { shape: a[3].shape.clone(), data: tails }, Array { shape: a[9].shape.clone(), data: states }]
}
