use armt_engine::ops::{self, TokenMaps};

use super::super::super::{Array, Case, Input, Rng, normal, spread};

/// Layers, texts, their rows, and how many of these are memory tokens; widths of a row, of keys and of values.
type Sizes = [usize; 7];

pub fn cases() -> Vec<Case> {
    let mut rng = Rng(37);
    let mut all = Vec::new();
    for sizes in [[2, 2, 5, 3, 16, 4, 8], [1, 1, 1, 1, 1, 1, 1], [2, 2, 3, 2, 17, 5, 7]] {
        all.push(case(&mut rng, "recorded", sizes, |input| input));
    }
    // w1's, widths that end within a tile or a round of warps, all rows, more rows than a tile has, and widths that are no multiples.
    let used = [
        [2, 1, 20, 16, 768, 64, 768],
        [3, 2, 9, 5, 48, 12, 40],
        [2, 1, 16, 16, 144, 64, 100],
        [1, 1, 3, 1, 16, 4, 4],
        [2, 3, 7, 6, 32, 8, 36],
        [2, 2, 3, 2, 17, 5, 7],
    ];
    all.extend(used.map(|sizes| case(&mut rng, "in use", sizes, Input::constant)));
    all
}

fn case(rng: &mut Rng, how: &str, sizes: Sizes, given: fn(Input) -> Input) -> Case {
    let [layers, texts, t, m, width, dm, d] = sizes;
    let mut map = |n: usize| spread(rng, &[layers, width, n], 1.0 / (width as f64).sqrt());
    let maps = [map(dm), map(d), map(1)];
    let inputs = [normal(rng, &[layers, texts, t, width])].into_iter().chain(maps).chain([normal(rng, &[layers, 1])]);
    Case {
        name: format!("tokens {how} {sizes:?}"),
        inputs: inputs.map(given).collect(),
        run: Box::new(move |x| {
            let maps = TokenMaps { key: &x[1], value: &x[2], beta: &x[3], bias: &x[4] };
            ops::assoc_tokens(&x[0], m, maps).map(Vec::from)
        }),
        naive: Box::new(move |x, _| {
            let [k, v, mut beta] = [1, 2, 3].map(|map| mapped(&x[0], &x[map], m));
            beta.shape.pop();
            beta.data.iter_mut().enumerate().for_each(|(i, b)| *b += x[4].data[i / (texts * m)]);
            vec![k, v, beta]
        }),
    }
}

/// The last m rows of each text of x `[L, B, T, w]` by a layer's w `[L, w, n]`.
fn mapped(x: &Array, w: &Array, m: usize) -> Array {
    let [layers, texts, t, width] = [0, 1, 2, 3].map(|axis| x.shape[axis]);
    let n = w.last();
    let mut y = Array::zeros(&[layers, texts, m, n]);
    for (i, y) in y.data.iter_mut().enumerate() {
        let (column, row) = (i % n, i / n);
        let (token, text) = (row % m, row / m);
        let x = &x.data[(text * t + t - m + token) * width..][..width];
        let w = &w.data[text / texts * width * n..][..width * n];
        *y = x.iter().zip(w.chunks(n)).map(|(x, w)| x * w[column]).sum();
    }
    y
}
