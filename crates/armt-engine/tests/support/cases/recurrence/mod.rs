//! The recurrences over tokens: each in one call and in pieces with the state carried, without padding and with it, from states that are not
//! zero.

pub mod causal_conv;
pub mod gated;
pub mod selective_scan;
pub mod token_mix;
pub mod wkv5;

use armt_engine::{Result, Tensor, ops};

use super::super::{Array, Case, Input, Rng, integers};

/// Layers, texts and tokens.
type Sequences = [usize; 3];

/// Which tokens of the texts are seen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    All,
    /// All but a third at the left, as in a short segment.
    NotTheLeft,
    /// Any: the first text has gaps, the last nothing at all.
    Some,
}

const MASKS: [Seen; 3] = [Seen::All, Seen::NotTheLeft, Seen::Some];

impl Seen {
    /// As an operand of the operation.
    fn mask(self, [groups, texts, tokens]: Sequences) -> Option<Input> {
        let mut rng = Rng(5);
        (self != Seen::All).then(|| {
            integers(&[groups, texts, tokens], |i| match self {
                Seen::NotTheLeft => i32::from(i % tokens >= tokens.div_ceil(3)),
                _ => i32::from(rng.below(3) > 0 && (texts == 1 || i / tokens % texts != texts - 1)),
            })
        })
    }
}

/// A mask for the plain loops.
fn seen(mask: Option<&Array>, sequence: usize, tokens: usize) -> Vec<bool> {
    mask.map_or(vec![true; tokens], |mask| mask.data[sequence * tokens..][..tokens].iter().map(|x| *x != 0.0).collect())
}

/// An operation of tokens and a state, in the pieces that end at `ends`: outputs one after the other, and the last state.
fn in_pieces(
    ends: &[usize],
    state: &Tensor,
    mut run: impl FnMut(&dyn Fn(&Tensor) -> Result<Tensor>, &Tensor) -> Result<(Tensor, Tensor)>,
) -> Result<Vec<Tensor>> {
    let (mut from, mut state, mut outputs) = (0, state.clone(), Vec::new());
    for end in ends {
        let (start, length) = (from, end - from);
        let (y, next) = run(&|x| ops::narrow(x, 2, start, length), &state)?;
        outputs.push(y);
        (from, state) = (*end, next);
    }
    Ok(vec![ops::concat(&outputs.iter().collect::<Vec<_>>(), 2)?, state])
}

/// Ways to cut so many tokens: not at all, and in pieces that differ.
fn cuts(tokens: usize) -> Vec<Vec<usize>> {
    let mut ways = vec![vec![tokens]];
    if tokens > 2 {
        ways.push(vec![1, tokens / 2 + 1, tokens]);
    }
    ways
}

/// Texts that are long enough to be cut into several chunks on a GPU.
pub fn large() -> Vec<Case> {
    let mut rng = Rng(74);
    let mut cases = Vec::new();
    for mask in MASKS {
        cases.push(selective_scan::case(&mut rng, [2, 2, 301], 70, 16, mask, vec![301]));
        cases.push(selective_scan::case(&mut rng, [1, 1, 130], 33, 96, mask, vec![77, 130]));
        cases.push(gated::case(&mut rng, [2, 2, 301], [72, 16, 4, 8], mask, vec![301]));
        cases.push(gated::case(&mut rng, [1, 3, 130], [100, 16, 4, 4], mask, vec![50, 130]));
        cases.push(wkv5::case(&mut rng, [2, 2, 301], 2, 16, mask, vec![301]));
        cases.push(wkv5::case(&mut rng, [1, 1, 130], 1, 64, mask, vec![77, 130]));
        cases.push(token_mix::case(&mut rng, [2, 3, 200], 72, 4, mask, vec![200]));
        cases.push(causal_conv::case(&mut rng, [2, 3, 700], [300, 4], mask, vec![700], true));
    }
    cases
}
