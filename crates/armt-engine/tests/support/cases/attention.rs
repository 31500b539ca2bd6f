use armt_engine::ops::attention::naive::{Extent, Rows, attention};
use armt_engine::ops::{self, Heads};

use super::super::{Array, Case, Input, Rng, integers, spread};

/// Keys that are hidden, beside those to come.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Hidden {
    Nothing,
    /// Padding on the left: fewer in each sequence, none in the last.
    Left,
    /// Every key of the first sequence, and every third of the others.
    Holes,
}

fn mask(hidden: Hidden, n: usize, t: usize) -> Option<Input> {
    let visible = move |i: usize| match hidden {
        Hidden::Nothing => true,
        Hidden::Left => i % t >= (n - 1 - i / t) * t.div_ceil(3) / n.max(2) + usize::from(n == 1) * (t / 3),
        Hidden::Holes => i / t > 0 && i % t % 3 != 1,
    };
    (hidden != Hidden::Nothing).then(|| integers(&[n, t], move |i| i32::from(visible(i))))
}

/// Where an operand's heads are: which input, from one row to the next, and the first element.
#[derive(Clone, Copy)]
struct Place {
    operand: usize,
    row: usize,
    first: usize,
}

fn naive(a: &[Array], places: [Place; 3], mask: Option<&Array>, h: Heads, [n, tq, tk]: [usize; 3]) -> Array {
    let operands = places.map(|p| Rows { data: &a[p.operand].data, row: p.row, first: p.first });
    let data = attention(operands, mask.map(|m| m.data.as_slice()), h, Extent { n, tq, tk });
    Array { shape: vec![n, tq, h.query * h.size], data }
}

fn packed(rng: &mut Rng, n: usize, t: usize, h: Heads, hidden: Hidden) -> Case {
    let Heads { query, key, size } = h;
    let row = (query + 2 * key) * size;
    let mut inputs = vec![spread(rng, &[n, t, row], 1.0)];
    inputs.extend(mask(hidden, n, t));
    let place = |first: usize| Place { operand: 0, row, first: first * size };
    let places = [place(0), place(query), place(query + key)];
    Case::new(
        format!("attention {n} x {t}, {query}/{key} heads of {size}, hidden {hidden:?}"),
        inputs,
        move |x| ops::attention(&x[0], h, x.get(1)),
        move |a| naive(a, places, a.get(1), h, [n, t, t]),
    )
}

fn cached(rng: &mut Rng, n: usize, tq: usize, tk: usize, h: Heads, hidden: Hidden) -> Case {
    let (q_row, k_row) = (h.query * h.size, h.key * h.size);
    let mut inputs = vec![spread(rng, &[n, tq, q_row], 1.0), spread(rng, &[n, tk, k_row], 1.0), spread(rng, &[n, tk, k_row], 1.0)];
    inputs.extend(mask(hidden, n, tk));
    let place = |operand: usize, row: usize| Place { operand, row, first: 0 };
    let places = [place(0, q_row), place(1, k_row), place(2, k_row)];
    Case::new(
        format!("attention_cached {n} x {tq} of {tk}, {}/{} heads of {}, hidden {hidden:?}", h.query, h.key, h.size),
        inputs,
        move |x| ops::attention_cached(&x[0], &x[1], &x[2], h, x.get(3)),
        move |a| naive(a, places, a.get(3), h, [n, tq, tk]),
    )
}

const fn heads(query: usize, key: usize, size: usize) -> Heads {
    Heads { query, key, size }
}

const HIDDEN: [Hidden; 3] = [Hidden::Nothing, Hidden::Left, Hidden::Holes];

/// Within short sequences.
pub fn short() -> Vec<Case> {
    let mut rng = Rng(41);
    let sizes = [
        (2, 1, heads(2, 2, 3)),
        (2, 3, heads(1, 1, 1)),
        (3, 10, heads(4, 4, 32)),
        (2, 17, heads(4, 2, 16)),
        (2, 17, heads(2, 1, 33)),
        (2, 16, heads(2, 2, 64)),
        (2, 9, heads(2, 1, 128)),
        (2, 65, heads(2, 1, 32)),
        (2, 65, heads(2, 1, 64)),
        (1, 65, heads(1, 1, 100)),
    ];
    let all = HIDDEN.into_iter().flat_map(|hidden| sizes.map(|size| (size, hidden)));
    all.map(|((n, t, h), hidden)| packed(&mut rng, n, t, h, hidden)).collect()
}

/// Over a few keys that came before.
pub fn short_cached() -> Vec<Case> {
    let mut rng = Rng(42);
    let sizes = [
        (2, 1, 3, heads(2, 1, 16)),
        (2, 3, 17, heads(2, 2, 5)),
        (2, 17, 65, heads(4, 2, 32)),
        (2, 1, 65, heads(2, 1, 64)),
        (2, 5, 12, heads(2, 1, 32)),
        (2, 5, 13, heads(2, 2, 128)),
    ];
    let all = HIDDEN.into_iter().flat_map(|hidden| sizes.map(|size| (size, hidden)));
    all.map(|((n, tq, tk, h), hidden)| cached(&mut rng, n, tq, tk, h, hidden)).collect()
}

/// Large enough for several tiles of the tensor-core kernels; few heads, because the differences are taken in plain loops.
pub fn long() -> Vec<Case> {
    let mut rng = Rng(43);
    let sizes = [
        (130, heads(2, 1, 32), Hidden::Nothing),
        (130, heads(1, 1, 64), Hidden::Left),
        (130, heads(2, 1, 64), Hidden::Nothing),
        (130, heads(2, 1, 128), Hidden::Left),
        (193, heads(1, 1, 128), Hidden::Nothing),
        (130, heads(1, 1, 256), Hidden::Nothing),
    ];
    sizes.into_iter().map(|(t, h, hidden)| packed(&mut rng, 1, t, h, hidden)).collect()
}

/// Many tiles, and a few rows more.
pub fn longest() -> Vec<Case> {
    vec![packed(&mut Rng(44), 1, 528, heads(1, 1, 64), Hidden::Nothing)]
}

/// Over many keys that came before.
pub fn long_cached() -> Vec<Case> {
    let mut rng = Rng(45);
    vec![
        cached(&mut rng, 1, 70, 200, heads(2, 1, 64), Hidden::Left),
        cached(&mut rng, 2, 64, 129, heads(1, 1, 64), Hidden::Holes),
        cached(&mut rng, 1, 130, 160, heads(2, 1, 32), Hidden::Nothing),
        cached(&mut rng, 1, 130, 160, heads(1, 1, 128), Hidden::Nothing),
    ]
}
