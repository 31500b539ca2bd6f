//! Writes to the associative memory on the CPU, by either rule.
//!
//! One memory (n) is one task: it is read from main memory once, and the products that follow find it in the cache.

use rayon::prelude::*;

use super::dpfp::features;
use super::{From, add_outer, add_rows, paper, projected, with_scratch};
use crate::ops::memory::{MemorySizes, WriteRule};

/// What a write reads beside the memory; all of it also needed to go back.
#[derive(Clone, Copy)]
pub(crate) struct WriteInputs<'a> {
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) beta: &'a [f32],
    pub(crate) z: &'a [f32],
    pub(crate) first: Option<&'a [i32]>,
    pub(crate) correction: bool,
    pub(crate) rule: WriteRule,
    pub(crate) sizes: MemorySizes,
}

impl<'a> WriteInputs<'a> {
    /// Those of memory n alone.
    pub(super) fn memory(&self, n: usize) -> WriteInputs<'a> {
        let MemorySizes { m, dm, d, .. } = self.sizes;
        let dk = self.sizes.dk();
        WriteInputs {
            k: &self.k[n * m * dm..][..m * dm],
            v: &self.v[n * m * d..][..m * d],
            beta: &self.beta[n * m..][..m],
            z: &self.z[n * dk..][..dk],
            first: self.first.map(|first| &first[n..=n]),
            ..*self
        }
    }

    /// Whether the first memory was empty.
    pub(super) fn was_empty(&self) -> bool {
        self.first.is_some_and(|first| first[0] != 0)
    }

    /// What [`write`] does with one memory.
    pub(super) fn write(&self, old: Option<&[f32]>, new: Written<'_>) {
        match self.rule {
            WriteRule::Paper => paper::write(self, old, new),
            WriteRule::Projected => projected::write(self, old, new),
        }
    }

    /// What [`write_backward`] does with one memory.
    pub(super) fn write_backward(&self, a: &[f32], out: WriteGradients<'_>) {
        match self.rule {
            WriteRule::Paper => paper::write_backward(self, a, out),
            WriteRule::Projected => projected::write_backward(self, a, out),
        }
    }
}

/// Where a write goes: A', z' and, if it is to be taken back, the x_i that it adds to each key.
pub(crate) struct Written<'a> {
    pub(crate) a: &'a mut [f32],
    pub(crate) z: &'a mut [f32],
    pub(crate) x: Option<&'a mut [f32]>,
}

impl<'a> Written<'a> {
    /// Of each memory.
    pub(super) fn memories(self, s: MemorySizes) -> impl IndexedParallelIterator<Item = Written<'a>> {
        let xs: Vec<Option<&mut [f32]>> = match self.x {
            Some(x) => x.chunks_mut(s.m * s.d).map(Some).collect(),
            None => (0..s.n).map(|_| None).collect(),
        };
        let memories = self.a.par_chunks_mut(s.dk() * s.d).zip(self.z.par_chunks_mut(s.dk())).zip(xs);
        memories.map(|((a, z), x)| Written { a, z, x })
    }

    /// A' and z' of one memory from what is added to each key, and that itself where it is kept.
    pub(super) fn put(self, w: &WriteInputs<'_>, old: Option<&[f32]>, phi: &[f32], gamma: &[f32], x: &[f32]) {
        let (dk, d) = (w.sizes.dk(), w.sizes.d);
        self.z.copy_from_slice(w.z);
        simd!(add_rows(self.z, gamma, 1, phi));
        add_outer(self.a, old.map_or(From::Itself, From::Old), phi, x, [dk, d], if old.is_some() { dk * d } else { 0 });
        if let Some(kept) = self.x {
            kept.copy_from_slice(x);
        }
    }
}

/// A' = A + sum_i phi_i (x) x_i, from `old` or in place, and z' = z + sum_i gamma_i phi_i.
pub(crate) fn write(w: &WriteInputs<'_>, old: Option<&[f32]>, new: Written<'_>) {
    let memory = w.sizes.dk() * w.sizes.d;
    new.memories(w.sizes).enumerate().for_each(|(n, new)| w.memory(n).write(old.map(|old| &old[n * memory..][..memory]), new));
}

/// A -= sum_i phi_i (x) x_i in place; exactly nothing where the memory was empty.
pub(crate) fn undo(w: &WriteInputs<'_>, a: &mut [f32], x: &[f32]) {
    let MemorySizes { m, dm, d, .. } = w.sizes;
    let dk = w.sizes.dk();
    a.par_chunks_mut(dk * d).zip(x.par_chunks(m * d)).enumerate().for_each(|(n, (a, x))| {
        let w = w.memory(n);
        if w.was_empty() {
            a.fill(0.0);
            return;
        }
        with_scratch([2 * dm, m * dk], |[r, phi]| {
            simd!({
                for (k, phi) in w.k.chunks_exact(dm).zip(phi.chunks_exact_mut(dk)) {
                    features(k, r, phi);
                    phi.iter_mut().for_each(|p| *p = -*p);
                }
            });
            add_outer(a, From::Itself, phi, x, [dk, d], dk * d);
        });
    });
}

/// Where the gradients of a write go. `da` and `dz` hold G = dA' and h = dz', and become those of A and z.
pub(crate) struct WriteGradients<'a> {
    pub(crate) dk: &'a mut [f32],
    pub(crate) dv: &'a mut [f32],
    pub(crate) dbeta: &'a mut [f32],
    pub(crate) da: &'a mut [f32],
    pub(crate) dz: &'a mut [f32],
}

impl<'a> WriteGradients<'a> {
    /// Of each memory.
    pub(super) fn memories(self, s: MemorySizes) -> impl IndexedParallelIterator<Item = WriteGradients<'a>> {
        let tokens = self.dk.par_chunks_mut(s.m * s.dm).zip(self.dv.par_chunks_mut(s.m * s.d)).zip(self.dbeta.par_chunks_mut(s.m));
        let memories = self.da.par_chunks_mut(s.dk() * s.d).zip(self.dz.par_chunks_mut(s.dk()));
        tokens.zip(memories).map(|(((dk, dv), dbeta), (da, dz))| WriteGradients { dk, dv, dbeta, da, dz })
    }
}

/// From G = dA' and h = dz' to the gradients of everything but gamma, which is detached.
pub(crate) fn write_backward(w: &WriteInputs<'_>, a: &[f32], out: WriteGradients<'_>) {
    let memories = out.memories(w.sizes).zip(a.par_chunks(w.sizes.dk() * w.sizes.d));
    memories.enumerate().for_each(|(n, (out, a))| w.memory(n).write_backward(a, out));
}
