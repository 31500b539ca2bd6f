//! Cases of the associative memory, against `ops::memory::naive`. Arrays stack n memories on their leading axis.

pub mod dpfp;
pub mod read;
pub mod tokens;
pub mod walk;
pub mod write;
pub mod write_read;

use std::ops::Range;

use armt_engine::ops::WriteRule;
use armt_engine::ops::memory::naive::{Memory, Token, dpfp as features};

use super::super::{Array, Input, Rng, normal};

/// Sizes of n memories with m tokens or queries of dm, and values of d.
pub type Sizes = [usize; 4];

/// A non-zero memory A, z. z is positive and near the size of one key's features, so that denominators stay away from 0 and gamma falls
/// on both sides of its bounds.
fn memory(rng: &mut Rng, n: usize, dk: usize, d: usize) -> (Input, Input) {
    (normal(rng, &[n, dk, d]).in_f32(), normal(rng, &[n, dk]).map(|x| 0.2 + 0.5 * x.abs()).in_f32())
}

/// Memory i of stacked A and z.
fn memory_of(a: &Array, z: &Array, i: usize) -> Memory {
    let (a_size, z_size) = (a.data.len() / a.shape[0], z.data.len() / z.shape[0]);
    Memory { a: a.data[i * a_size..][..a_size].to_vec(), z: z.data[i * z_size..][..z_size].to_vec() }
}

/// The tokens of memory i: inputs k, v, beta.
fn tokens_of(x: &[Array], i: usize, [_, m, dm, d]: Sizes, nu: usize) -> Vec<Token> {
    let token = |row: usize| Token::new(&x[0].data[row * dm..][..dm], &x[1].data[row * d..][..d], x[2].data[row], nu);
    (i * m..(i + 1) * m).map(token).collect()
}

/// Inputs q, A, z and maybe the residual.
fn read_all(x: &[Array], [n, t, dm, d]: Sizes, nu: usize) -> Array {
    let mut y = Vec::new();
    for i in 0..n {
        let memory = memory_of(&x[1], &x[2], i);
        let queries = x[0].data[i * t * dm..][..t * dm].chunks(dm);
        y.extend(queries.flat_map(|q| memory.read(&features(q, nu))));
    }
    if let Some(residual) = x.get(3) {
        y.iter_mut().zip(&residual.data).for_each(|(y, r)| *y += r);
    }
    Array { shape: vec![n, t, d], data: y }
}

/// What a write is beside its sizes.
#[derive(Clone, Copy, Debug)]
struct Way {
    rule: WriteRule,
    nu: usize,
    correction: bool,
}

/// gamma of every token at a point with inputs k, v, beta, A, z and maybe first.
fn gammas(x: &[Array], sizes: Sizes, way: Way) -> Vec<Vec<f64>> {
    let first = |i: usize| x.get(5).is_some_and(|first| first.data[i] != 0.0);
    let of = |i: usize| {
        let (memory, tokens) = (memory_of(&x[3], &x[4], i), tokens_of(x, i, sizes, way.nu));
        match way.rule {
            WriteRule::Projected => memory.gammas_in_turn(&tokens, way.correction, first(i)),
            _ => memory.gammas(&tokens, way.correction && !first(i)),
        }
    };
    (0..sizes[0]).map(of).collect()
}

/// Inputs k, v, beta, A, z and maybe first; gamma comes from the unperturbed point `base`, since it is not differentiated.
fn write_all(x: &[Array], base: &[Array], sizes: Sizes, way: Way) -> Vec<Array> {
    let gammas = gammas(base, sizes, way);
    let (mut a, mut z) = (x[3].clone(), x[4].clone());
    a.data.clear();
    z.data.clear();
    for (i, gammas) in gammas.iter().enumerate() {
        let (memory, tokens) = (memory_of(&x[3], &x[4], i), tokens_of(x, i, sizes, way.nu));
        let new = match way.rule {
            WriteRule::Projected => memory.write_projected(&tokens, gammas),
            _ => memory.write(&tokens, gammas),
        };
        a.data.extend(new.a);
        z.data.extend(new.z);
    }
    vec![a, z]
}

/// Rows `rows` of the leading axis.
fn rows_of(x: &Array, rows: Range<usize>) -> Array {
    let inner = x.data.len() / x.shape[0];
    let shape = [&[rows.len()], &x.shape[1..]].concat();
    Array { shape, data: x.data[rows.start * inner..rows.end * inner].to_vec() }
}

/// Puts new rows `rows` into a whole A and z.
fn put_rows(whole: [&mut Array; 2], rows: &Range<usize>, new: &[Array]) {
    for (whole, new) in whole.into_iter().zip(new) {
        let at = rows.start * (whole.data.len() / whole.shape[0]);
        whole.data[at..at + new.data.len()].copy_from_slice(&new.data);
    }
}

/// Keys of unequal size: a large key is new to the memory, a small one is not.
fn unequal(mut k: Input, dm: usize) -> Input {
    for (i, x) in k.array.data.iter_mut().enumerate() {
        *x *= [0.5, 1.0, 2.0][i / dm % 3];
    }
    k
}
