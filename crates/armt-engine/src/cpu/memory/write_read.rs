//! A segment's write and the next segment's read of the same memories on the CPU: what the two do one after the other, a memory at a time, so that the read
//! finds A' in the cache, and the way back its gradient. The formulas are in `ops/memory/write_read.rs`.

use rayon::prelude::*;

use super::read::FewQueries;
use super::write::{WriteGradients, WriteInputs, Written};
use crate::ops::memory::MemorySizes;

/// A' and z' from `old`, and y = A'^T qn (+ residual) of queries q.
pub(crate) fn write_read(
    w: &WriteInputs<'_>,
    old: &[f32],
    new: Written<'_>,
    (q, asked): (&[f32], MemorySizes),
    residual: Option<&[f32]>,
    y: &mut [f32],
) {
    let (memory, values) = (w.sizes.dk() * w.sizes.d, asked.m * asked.d);
    let queries = q.par_chunks(asked.m * asked.dm).zip(y.par_chunks_mut(values));
    let memories = new.memories(w.sizes).zip(old.par_chunks(memory)).zip(queries);
    memories.enumerate().for_each(|(n, ((Written { a, z, x }, old), (q, y)))| {
        w.memory(n).write(Some(old), Written { a, z, x });
        let residual = residual.map(|residual| &residual[n * values..][..values]);
        // The next A' is not there yet.
        FewQueries { q, z, sizes: asked }.read(a, residual, y, 0);
    });
}

/// From dA', dz' and dy to the gradients of everything but gamma: those of the queries to `dq`, the others to `out`. A is `old`,
/// A' `new`.
pub(crate) fn write_read_backward(
    w: &WriteInputs<'_>,
    [old, new]: [&[f32]; 2],
    (asked, dy): (&FewQueries<'_>, &[f32]),
    dq: &mut [f32],
    out: WriteGradients<'_>,
) {
    let MemorySizes { m: t, dm, d, .. } = asked.sizes;
    let memory = w.sizes.dk() * d;
    let memories = out.memories(w.sizes).zip(old.par_chunks(memory)).zip(new.par_chunks(memory));
    let queries = dy.par_chunks(t * d).zip(dq.par_chunks_mut(t * dm));
    memories.zip(queries).enumerate().for_each(|(n, (((out, old), new), (dy, dq)))| {
        asked.memory(n).read_backward(new, dy, dq, out.dz, Some((out.da, true)), memory);
        w.memory(n).write_backward(old, out);
    });
}
