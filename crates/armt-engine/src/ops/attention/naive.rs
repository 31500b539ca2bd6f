//! Causal attention as its equation says, in f64: the plain twin that the tests hold the fast ones to.

use super::Heads;

/// Where the rows of an operand are: row r of head h has the elements `r row + first + h size ..` of `data`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The operand, which may hold others' heads too.
    pub data: &'a [f64],
    /// From one row to the next.
    pub row: usize,
    /// First element of the first head.
    pub first: usize,
}

impl<'a> Rows<'a> {
    fn head(self, row: usize, head: usize, size: usize) -> &'a [f64] {
        &self.data[row * self.row + self.first + head * size..][..size]
    }
}

/// Sizes of a call: `n` sequences of `tq` queries and `tk` keys, aligned at the end.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Sequences.
    pub n: usize,
    /// Queries of each.
    pub tq: usize,
    /// Keys of each, at least `tq`.
    pub tk: usize,
}

/// o_i = sum_j p_ij v_j, p_i = softmax over the visible keys j <= i + tk - tq of q_i . k_j / sqrt(size), as `[n, tq, H size]`; zeros
/// where no key is visible. The mask `[n, tk]` is zero for keys that nothing may see.
pub fn attention([q, k, v]: [Rows<'_>; 3], mask: Option<&[f64]>, heads: Heads, extent: Extent) -> Vec<f64> {
    let Heads { query, key, size } = heads;
    let Extent { n, tq, tk } = extent;
    let mut o = vec![0.0; n * tq * query * size];
    for (s, head, i) in (0..n).flat_map(|s| (0..query).flat_map(move |head| (0..tq).map(move |i| (s, head, i)))) {
        let shared = head / (query / key);
        let q_i = q.head(s * tq + i, head, size);
        let seen: Vec<usize> =
            (0..=i + tk - tq).filter(|j| mask.is_none_or(|m| m[s * tk + j] != 0.0)).map(|j| s * tk + j).collect();
        let score = |j: &usize| q_i.iter().zip(k.head(*j, shared, size)).map(|(q, k)| q * k).sum::<f64>() / (size as f64).sqrt();
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
        let out = &mut o[(s * tq + i) * query * size + head * size..][..size];
        for (j, score) in seen.iter().zip(&scores) {
            let p = (score - most).exp() / sum;
            out.iter_mut().zip(v.head(*j, shared, size)).for_each(|(o, v)| *o += p * v);
        }
    }
    o
}
