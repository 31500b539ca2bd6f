//! The projected write: a segment's m tokens in turn, each against what the ones before it left, n_i = |phi_i|^2 + eps:
//!
//! vbar_i = A_{i-1}^T phi_i / n_i, A_i = A_{i-1} + phi_i (x) b_i (v_i - vbar_i),
//! gamma_i = clip(1 - (z_{i-1} . phi_i + eps) / n_i, 0, 1), or 1 without correction and for the first token of an empty memory, never
//! differentiated; z_i = z_{i-1} + gamma_i phi_i. The read is that of the paper's memory.
//!
//! Why. The paper's write is A' = (I - b phi phi^T / (z . phi)) A + b phi (x) v: along phi it has the eigenvalue 1 - b |phi|^2 / (z . phi), and
//! nothing keeps z . phi near |phi|^2. For a key that the memory knows little of it is below -1, and what lies along phi is thrown to the
//! other side, larger than before; m tokens that are alike do so m times over. Here the factor is I - b phi phi^T / n, whose eigenvalues are 1
//! and 1 - c with c = b |phi|^2 / n in [0, 1): no write makes anything larger that was there. After it z . phi = |phi|^2, unless gamma
//! was clipped, so that reading with the same key gives (1 - b) old + b v.
//!
//! Bound. Let a be what A has along phi / |phi|, a row of d. A write replaces it by (1 - c) a + c t with t = (n / |phi|) v and leaves the rest, so that
//! in squares of Frobenius norms |A_i|^2 - |A_{i-1}|^2 = |(1 - c) a + c t|^2 - |a|^2 <= c (|t|^2 - |a|^2) <= c |t|^2 = b n |v|^2, because the square
//! is convex. Over any writes from any memory therefore |A|^2 <= |A_0|^2 + sum_i b_i n_i |v_i|^2: whatever the keys, at most the root of
//! the number of writes, and where a is as large as t nothing at all. The paper's write has no bound.
//!
//! One pass over A. With S = Phi A and G = Phi Phi^T the tokens' x_i = b_i (v_i - (S_i + sum_{j<i} G_ij x_j) / n_i) need no other look at A, and
//! A' = A + Phi^T X. Backward, with D = dA', h = dz' and w_i = S_i + sum_{j<i} G_ij x_j, from the last token to the first:
//! e_i = D^T phi_i + sum_{k>i} G_ki dw_k, dw_i = -(b_i / n_i) e_i, the value's gradient is b_i e_i,
//! dbeta_i = (e_i . (v_i - w_i / n_i)) b_i (1 - b_i), dn_i = b_i (e_i . w_i) / n_i^2, dG_ij = dw_i . x_j; dA = D + Phi^T dW, dz = h,
//! dphi_i = D x_i + A dw_i + gamma_i h + 2 dn_i phi_i + sum_{j<i} dG_ij phi_j + sum_{k>i} dG_ki phi_k.
//!
//! The CPU does just that. CUDA solves for X once and for all columns, X = T R with R_i = b_i (v_i - S_i / n_i) and T = (I + C)^-1, C_ij = b_i G_ij / n_i
//! below the diagonal, and puts T to the features: A' = A + Psi^T R, Psi = T^T Phi. The walk over tiles of A is then that of the paper's write
//! (`cuda/kernels/assoc_turns.cuh`). It has room for 16 tokens' turns, or 8 of very wide keys; more tokens
//! take several passes over A, which is what turns mean.

use std::ops::Range;

use super::cut::tokens_in_a_pass;
use super::write::{AssocWrite, checked, write};
use super::{WriteRule, part};
use crate::error::Result;
use crate::ops::{cuda_of, narrow};
use crate::tensor::Tensor;

/// How many tokens a pass over A takes, where they are fewer than all. Operands that do not fit together are an error.
pub(super) fn passes(w: &AssocWrite<'_>, rows: Option<&Range<usize>>) -> Result<Option<usize>> {
    let Some(cuda) = cuda_of(w.k).filter(|_| w.rule == WriteRule::Projected) else { return Ok(None) };
    let sizes = checked(&AssocWrite { a: &part(w.a, rows), z: &part(w.z, rows), ..*w })?;
    Ok(Some(tokens_in_a_pass(cuda.card(), sizes)).filter(|tokens| *tokens < sizes.m))
}

/// Writes of `tokens` tokens each, one after the other.
pub(super) fn write_in_passes(
    w: AssocWrite<'_>,
    tokens: usize,
    rows: Option<Range<usize>>,
    in_place: bool,
    rounded: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let axis = w.k.shape().rank() - 2;
    let m = w.k.shape()[axis];
    let (mut a, mut z) = (w.a.clone(), w.z.clone());
    for from in (0..m).step_by(tokens) {
        let count = tokens.min(m - from);
        let (k, v, beta) = (narrow(w.k, axis, from, count)?, narrow(w.v, axis, from, count)?, narrow(w.beta, axis, from, count)?);
        let pass = AssocWrite { k: &k, v: &v, beta: &beta, a: &a, z: &z, first: w.first.filter(|_| from == 0), ..w };
        (a, z) = write(pass, rows.clone(), in_place, rounded.filter(|_| from + count == m))?;
    }
    Ok((a, z))
}
