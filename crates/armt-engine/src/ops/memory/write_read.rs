//! A segment's write and the next segment's read of the same memories as one operation:
//!
//! A', z' = write(k, v, beta; A, z), y = read(q; A', z') (+ residual), as in `write.rs` and `read.rs`.
//!
//! Its plain twin is those two after each other, which is also what it does for many tokens or queries, and for few memories; a read by a
//! product then finds A' rounded for it by the write. In between nothing touches A, so that A' need not go to main memory and back. On CUDA,
//! where A' takes A's place, one walk over it does both (`assoc_step.cu`): A is read and written once instead of read twice and written
//! once, and on the way back A' and its gradient are read and written once instead of twice. On the CPU, where both are kept, a task does
//! both of one memory while that is in its cache.
//!
//! Backward, with dA', dz' and dy: y_q = dy_q / den_q, dqn_q = A' y_q, dden_q = -(dqn_q . phi_q) / den_q, dphi_q = dqn_q + dden_q z' gives dq;
//! G = dA' + sum_q phi_q (x) y_q and h = dz' + sum_q dden_q phi_q are what the write's way back begins with, once A' is A again. All of this
//! holds for either rule of the write.

use std::ops::Range;

use super::cut::StepCut;
use super::write::{AssocWrite, Saved};
use super::{MemorySizes, expect_rows, part, read, write};
use crate::cpu::memory::read::FewQueries;
use crate::cpu::memory::write::Written;
use crate::cpu::memory::write_read as cpu;
use crate::error::Result;
use crate::ops::cuda_of;
use crate::paths;
use crate::tape::{Backward, Grads, is_recorded, record_all};
use crate::tensor::{DType, Tensor};

const OP: &str = "assoc_write_read";

/// Writes to the memories `rows` of the leading axis of A and z, as [`assoc_write_rows`](super::assoc_write_rows), and reads the same memories
/// with raw queries q `[rows, .., T, dm]`, as [`assoc_read_rows`](super::assoc_read_rows). Gives A', z' and y `[rows, .., T, d]`. Operands that do
/// not fit together are an error.
pub fn assoc_write_read(
    w: AssocWrite<'_>,
    rows: Range<usize>,
    q: &Tensor,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    write_read(w, rows, q, residual, false)
}

/// As [`assoc_write_read`], with A' in the place of A as by [`assoc_write_in_place`](super::assoc_write_in_place). Operands that do not fit
/// together leave A as it was; where the machine has no room for y, A is written.
pub fn assoc_write_read_in_place(
    w: AssocWrite<'_>,
    rows: Range<usize>,
    q: &Tensor,
    residual: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    write_read(w, rows, q, residual, true)
}

fn write_read(
    w: AssocWrite<'_>,
    rows: Range<usize>,
    q: &Tensor,
    residual: Option<&Tensor>,
    in_place: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    expect_rows(OP, w.a, &rows)?;
    expect_rows(OP, w.z, &rows)?;
    let (old_a, old_z) = (part(w.a, Some(&rows)), part(w.z, Some(&rows)));
    let sizes = write::checked(&AssocWrite { a: &old_a, z: &old_z, ..w })?;
    let asked = read::checked(q, &old_a, &old_z, w.nu, residual)?;
    let asked = MemorySizes { m: asked.m, ..sizes };
    let Some(way) = Way::of(&w, sizes, q, asked, in_place) else {
        let rounds = read::rounds(q) && q.dtype() == w.k.dtype();
        let rounded = rounds.then(|| Tensor::uninit(old_a.shape(), q.dtype(), q.device())).transpose()?;
        let (a, z) = write::write(w, Some(rows.clone()), in_place, rounded.as_ref())?;
        let y = read::read(q, &a, &z, Some(rows), w.nu, residual, rounded)?;
        return Ok((a, z, y));
    };
    let inputs: Vec<&Tensor> = [w.k, w.v, w.beta, w.a, w.z, q].into_iter().chain(residual).collect();
    let (write, a, z) = Saved::new(w, Some(rows), in_place, in_place && is_recorded(&inputs))?;
    let y = Tensor::uninit(q.shape().with_last(sizes.d), q.dtype(), q.device())?; // [.., T, d]
    let [a_new, z_new] = [&a, &z].map(|t| part(t, write.rows.as_ref()));
    let step = Step { write, a_new, z_new, q: q.detach(), asked, has_residual: residual.is_some(), way };
    step.forward(residual, &y)?;
    let [a, z, y] = record_all(&inputs, [a, z, y], || step);
    Ok((a, z, y))
}

/// How a write and a read are done at once.
enum Way {
    /// By walks over A there and back, with A' in its place, on CUDA.
    Walk(Box<[StepCut; 2]>),
    /// By a task for each memory, with A kept, on the CPU.
    Task,
}

impl Way {
    /// The way, if they are to be done at once.
    fn of(w: &AssocWrite<'_>, sizes: MemorySizes, q: &Tensor, asked: MemorySizes, in_place: bool) -> Option<Self> {
        if q.dtype() != w.k.dtype() {
            return None;
        }
        match cuda_of(w.k) {
            Some(cuda) if in_place => StepCut::new(cuda.card(), sizes, asked.m, w.rule).map(|cuts| Way::Walk(Box::new(cuts))),
            None if !in_place && q.dtype() == DType::F32 => {
                paths::read_by_task(asked, rayon::current_num_threads()).then_some(Way::Task)
            }
            _ => None,
        }
    }
}

/// What a write and a read that were done at once leave for the way back.
struct Step {
    write: Saved,
    /// A' and z', `[rows, .., dk, d]` and `[rows, .., dk]`.
    a_new: Tensor,
    z_new: Tensor,
    q: Tensor,
    /// Sizes of the read.
    asked: MemorySizes,
    has_residual: bool,
    way: Way,
}

impl Step {
    fn forward(&self, residual: Option<&Tensor>, y: &Tensor) -> Result<()> {
        let (w, s) = (&self.write, self.write.sizes);
        if let (Some(cuda), Way::Walk(cuts)) = (cuda_of(&w.k), &self.way) {
            let cut = &cuts[0];
            let launch = cut.launch(cuda, w.k.dtype(), "write_read")?.arg(&w.k).arg(&w.v).arg(&w.beta).arg(&w.a).arg(&w.z);
            let launch = launch.arg(w.first.as_ref()).arg(&self.z_new).arg(w.x.as_ref()).arg(&self.q).arg(residual).arg(y);
            let launch = launch.arg(s.m as i32).arg(self.asked.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32);
            return launch.arg(cut.buffers as i32).arg(w.correction).run();
        }
        w.on_cpu(|inputs| {
            let (old, q) = (w.a.read::<f32>(OP)?, self.q.read::<f32>(OP)?);
            let new = Written { a: &mut self.a_new.write::<f32>(OP)?, z: &mut self.z_new.write::<f32>(OP)?, x: None };
            let residual = residual.map(|t| t.read::<f32>(OP)).transpose()?;
            cpu::write_read(inputs, &old, new, (&q, self.asked), residual.as_deref(), &mut y.write::<f32>(OP)?);
            Ok(())
        })
    }
}

impl Backward for Step {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (w, s) = (&self.write, self.write.sizes);
        let (whole_g, whole_h, dy) = (grads.output_owned(0)?, grads.output_owned(1)?, grads.output(2)?);
        let (g, h) = (part(&whole_g, w.rows.as_ref()), part(&whole_h, w.rows.as_ref()));
        let like = |t: &Tensor| Tensor::uninit(t.shape(), t.dtype(), t.device());
        let (dk, dv, dbeta, dq) = (like(&w.k)?, like(&w.v)?, like(&w.beta)?, like(&self.q)?);
        match (cuda_of(&w.k), &self.way) {
            (Some(cuda), Way::Walk(cuts)) => {
                let cut = &cuts[1];
                let launch = cut.launch(cuda, w.k.dtype(), "write_read_backward")?;
                let launch = launch.arg(&w.k).arg(&w.v).arg(&w.beta).arg(&w.a).arg(&w.z).arg(&self.z_new);
                let launch = launch.arg(w.first.as_ref()).arg(w.x.as_ref()).arg(&self.q).arg(&dy);
                let launch = launch.arg(&g).arg(&h).arg(grads.wants(3)).arg(&dk).arg(&dv).arg(&dbeta).arg(&dq);
                let launch = launch.arg(s.m as i32).arg(self.asked.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32);
                launch.arg(cut.buffers as i32).arg(w.correction).run()?;
            }
            _ => w.back_on_cpu([&g, &h], [&dk, &dv, &dbeta], |inputs, out| {
                let asked = FewQueries { q: &self.q.read::<f32>(OP)?, z: &self.z_new.read::<f32>(OP)?, sizes: self.asked };
                let (old, new, dy) = (w.a.read::<f32>(OP)?, self.a_new.read::<f32>(OP)?, dy.read::<f32>(OP)?);
                cpu::write_read_backward(inputs, [&old, &new], (&asked, &dy), &mut dq.write::<f32>(OP)?, out);
                Ok(())
            })?,
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
