//! A segment's write and the next segment's read of the same memories as one operation:
//!
//! A', z' = write(k, v, beta; A, z), y = read(q; A', z') (+ residual), as in `write.rs` and `read.rs`.
//!
//! Its plain twin is those two after each other, which is also what it does on the CPU, for many tokens or queries, and for few memories; a
//! read by a product then finds A' rounded for it by the write. In between nothing touches A, so that on CUDA one walk over it can do both
//! (`assoc_step.cu`): A is read and written once instead of read twice and written once, and on the way back A' and its gradient are read and
//! written once instead of twice.
//!
//! Backward, with dA', dz' and dy: y_q = dy_q / den_q, dqn_q = A' y_q, dden_q = -(dqn_q . phi_q) / den_q, dphi_q = dqn_q + dden_q z' gives dq;
//! G = dA' + sum_q phi_q (x) y_q and h = dz' + sum_q dden_q phi_q are what the write's way back begins with, once A' is A again. All of this
//! holds for either rule of the write.

use std::ops::Range;

use super::cut::StepCut;
use super::write::{AssocWrite, Saved};
use super::{expect_rows, part, read, write};
use crate::cuda::CudaDevice;
use crate::error::Result;
use crate::ops::cuda_of;
use crate::tape::{Backward, Grads, is_recorded, record_all};
use crate::tensor::Tensor;

const OP: &str = "assoc_write_read";

/// Writes to the memories `rows` of the leading axis of A and z in place, as [`assoc_write_in_place`](super::assoc_write_in_place), and
/// reads the same memories with raw queries q `[rows, .., T, dm]`, as [`assoc_read_rows`](super::assoc_read_rows). Gives A', z' and y
/// `[rows, .., T, d]`. Operands that do not fit together are an error, and A is then as it was.
pub fn assoc_write_read(
    w: AssocWrite<'_>,
    rows: Range<usize>,
    q: &Tensor,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    expect_rows(OP, w.a, &rows)?;
    expect_rows(OP, w.z, &rows)?;
    let (old_a, old_z) = (part(w.a, Some(&rows)), part(w.z, Some(&rows)));
    let sizes = write::checked(&AssocWrite { a: &old_a, z: &old_z, ..w })?;
    let asked = read::checked(q, &old_a, &old_z, w.nu, residual)?;
    let one_walk =
        cuda_of(w.k).filter(|_| q.dtype() == w.k.dtype()).and_then(|cuda| StepCut::new(cuda.card(), sizes, asked.m, w.rule));
    let Some([there, back]) = one_walk else {
        let rounds = read::rounds(q) && q.dtype() == w.k.dtype();
        let rounded = rounds.then(|| Tensor::uninit(old_a.shape(), q.dtype(), q.device())).transpose()?;
        let (a, z) = write::write(w, Some(rows.clone()), true, rounded.as_ref())?;
        let y = read::read(q, &a, &z, Some(rows), w.nu, residual, rounded)?;
        return Ok((a, z, y));
    };
    let inputs: Vec<&Tensor> = [w.k, w.v, w.beta, w.a, w.z, q].into_iter().chain(residual).collect();
    let (write, a, z) = Saved::new(w, Some(rows), true, is_recorded(&inputs))?;
    let y = Tensor::uninit(q.shape().with_last(asked.n), q.dtype(), q.device())?; // [.., T, d]
    let z_new = part(&z, write.rows.as_ref());
    let step = Step { write, z_new, q: q.detach(), queries: asked.m, has_residual: residual.is_some(), back };
    if let Some(cuda) = cuda_of(w.k) {
        step.forward(cuda, &there, residual, &y)?;
    }
    let [a, z, y] = record_all(&inputs, [a, z, y], || step);
    Ok((a, z, y))
}

/// What one walk there leaves for the one back.
struct Step {
    write: Saved,
    /// z', `[rows, .., dk]`.
    z_new: Tensor,
    q: Tensor,
    /// Queries of each memory.
    queries: usize,
    has_residual: bool,
    /// How the way back cuts the memory.
    back: StepCut,
}

impl Step {
    fn forward(&self, cuda: &CudaDevice, cut: &StepCut, residual: Option<&Tensor>, y: &Tensor) -> Result<()> {
        let (w, s) = (&self.write, self.write.sizes);
        let launch = cut.launch(cuda, w.k.dtype(), "write_read")?.arg(&w.k).arg(&w.v).arg(&w.beta).arg(&w.a).arg(&w.z);
        let launch = launch.arg(w.first.as_ref()).arg(&self.z_new).arg(w.x.as_ref()).arg(&self.q).arg(residual).arg(y);
        let launch = launch.arg(s.m as i32).arg(self.queries as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32);
        launch.arg(cut.buffers as i32).arg(w.correction).run()
    }
}

impl Backward for Step {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (w, s) = (&self.write, self.write.sizes);
        let (whole_g, whole_h, dy) = (grads.output_owned(0)?, grads.output_owned(1)?, grads.output(2)?);
        let (g, h) = (part(&whole_g, w.rows.as_ref()), part(&whole_h, w.rows.as_ref()));
        let like = |t: &Tensor| Tensor::uninit(t.shape(), t.dtype(), t.device());
        let (dk, dv, dbeta, dq) = (like(&w.k)?, like(&w.v)?, like(&w.beta)?, like(&self.q)?);
        if let Some(cuda) = cuda_of(&w.k) {
            let launch = self.back.launch(cuda, w.k.dtype(), "write_read_backward")?;
            let launch = launch.arg(&w.k).arg(&w.v).arg(&w.beta).arg(&w.a).arg(&w.z).arg(&self.z_new);
            let launch = launch.arg(w.first.as_ref()).arg(w.x.as_ref()).arg(&self.q).arg(&dy);
            let launch = launch.arg(&g).arg(&h).arg(grads.wants(3)).arg(&dk).arg(&dv).arg(&dbeta).arg(&dq);
            let launch = launch.arg(s.m as i32).arg(self.queries as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32);
            launch.arg(self.back.buffers as i32).arg(w.correction).run()?;
        }
        drop((g, h));
        for (i, gradient) in [dk, dv, dbeta, whole_g, whole_h, dq].into_iter().enumerate() {
            grads.give(i, gradient)?;
        }
        if self.has_residual { grads.give(6, dy) } else { Ok(()) }
    }

    fn skipped(self: Box<Self>) -> Result<()> {
        self.write.undo()
    }
}
