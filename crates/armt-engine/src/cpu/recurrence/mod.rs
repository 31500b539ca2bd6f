//! Kernels of the recurrences over tokens on the CPU.

pub(crate) mod causal_conv;
mod lanes;
pub(crate) mod selective_scan;
pub(crate) mod wkv5;

/// Whether token t of sequence s is seen.
#[inline(always)]
fn is_seen(seen: Option<&[i32]>, tokens: usize, s: usize, t: usize) -> bool {
    seen.is_none_or(|seen| seen[s * tokens + t] != 0)
}

/// Rows of `part` columns into columns `first..` of rows of `width`; columns for which there is no room are left out.
fn join(x: &[f32], part: usize, first: usize, y: &mut [f32], width: usize) {
    let own = part.min(width - first);
    for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(part)) {
        y[first..first + own].copy_from_slice(&x[..own]);
    }
}
