//! The associative read: y = A^T phi(q) / (z . phi(q) + eps) (+ residual), phi = DPFP-nu, eps = 1e-5.
//!
//! One kernel makes the normalised features qn = phi(q) / (z . phi(q) + eps), and a batched product adds qn A to the residual. Dividing
//! before the product rather than after lets the residual ride in it. qn is made again in the backward pass: it is nu times 2
//! as wide as q. With bf16 queries on CUDA the product is one of bf16 operands, with A rounded for it; A itself stays f32. A few queries of
//! many memories, as small segments in training have them, are served by kernels that walk over A once, in f32, on the CPU too.

use std::ops::Range;

use super::cut::{Cut, Held};
use super::dpfp::feature_width;
use super::{MemorySizes, expect_rows, part};
use crate::cpu::memory::read::{self as cpu, FewQueries};
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::ops::matmul::{Linear, Sizes, forward, multiply};
use crate::ops::reduce::sum_middle_into;
use crate::ops::{cast, cuda_of, to_f32, via_f32};
use crate::paths;
use crate::tape::{Backward, Grads, Target, record};
use crate::tensor::{DType, Shape, Tensor};

const OP: &str = "assoc_read";

/// Queries that one block of the read kernels takes, a warp each.
const ROWS: usize = 4;

/// Reads the memory A `[.., dk, d]`, z `[.., dk]` (f32) with raw queries q = W_Q x `[.., T, dm]`; the result, plus `residual` if given,
/// is `[.., T, d]` in q's type. dk = 2 nu dm. Leading axes must agree; anything else is an error.
pub fn assoc_read(q: &Tensor, a: &Tensor, z: &Tensor, nu: usize, residual: Option<&Tensor>) -> Result<Tensor> {
    read(q, a, z, None, nu, residual, None)
}

/// Reads, as [`assoc_read`], the memories `rows` of the leading axis of A `[L, .., dk, d]` and z `[L, .., dk]`: q is `[rows, .., T, dm]`. The gradients
/// of A and z have the whole shape, so that a memory of which some layers rest needs no copies.
pub fn assoc_read_rows(
    q: &Tensor,
    a: &Tensor,
    z: &Tensor,
    rows: Range<usize>,
    nu: usize,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    expect_rows(OP, a, &rows)?;
    expect_rows(OP, z, &rows)?;
    read(q, a, z, Some(rows), nu, residual, None)
}

/// Whether such queries are served by a product that A is rounded for.
pub(super) fn rounds(q: &Tensor) -> bool {
    let rank = q.shape().rank();
    cuda_of(q).is_some() && q.dtype() == DType::BF16 && rank >= 2 && paths::write_rounds(q.shape()[rank - 2])
}

/// `rounded`: the rows of A in the type of the queries, where they are at hand.
pub(super) fn read(
    q: &Tensor,
    whole_a: &Tensor,
    whole_z: &Tensor,
    rows: Option<Range<usize>>,
    nu: usize,
    residual: Option<&Tensor>,
    rounded: Option<Tensor>,
) -> Result<Tensor> {
    let (a, z) = (&part(whole_a, rows.as_ref()), &part(whole_z, rows.as_ref()));
    let sizes = checked(q, a, z, nu, residual)?;
    if via_f32(q) {
        let residual = residual.map(to_f32).transpose()?;
        return cast(&self::read(&to_f32(q)?, whole_a, whole_z, rows, nu, residual.as_ref(), None)?, DType::BF16);
    }
    let (Sizes { m: t, n: d, .. }, dm) = (sizes, q.shape().last());
    let shape = q.shape().with_last(d);
    let read = Read { q: q.detach(), a: a.clone(), z: z.clone(), rows, nu, sizes };
    let y = Tensor::uninit(shape, q.dtype(), q.device())?; // [.., T, d]
    if let Some((cuda, cut)) = read.walk(Held { tiles: 1, recalls: true, rule: None }) {
        let launch = cut.launch(cuda, q.dtype(), "read_few")?.arg(q).arg(a).arg(z).arg(residual).arg(&y);
        let launch = launch.arg(t as i32).arg(dm as i32).arg(nu as i32).arg(d as i32);
        launch.arg(cut.buffers as i32).run()?;
    } else if read.by_task() {
        let residual = residual.map(|t| t.read::<f32>(OP)).transpose()?;
        let (q, a, z) = (q.read::<f32>(OP)?, a.read::<f32>(OP)?, z.read::<f32>(OP)?);
        let asked = FewQueries { q: &q, z: &z, sizes: read.widths() };
        cpu::read_few(&asked, &a, residual.as_deref(), &mut y.write::<f32>(OP)?);
    } else {
        let qn = read.features()?;
        let rounded = rounded.map_or_else(|| read.rounded_memory(), Ok)?;
        forward(&qn, &rounded, &Linear { residual, ..Linear::default() }, read.sizes, &y, None)?;
    }
    let inputs: Vec<&Tensor> = [Some(q), Some(whole_a), Some(whole_z), residual].into_iter().flatten().collect();
    Ok(record(&inputs, y, || ReadBackward { read, has_residual: residual.is_some() }))
}

/// T queries of each memory against dk keys of d values, if the operands of a read fit together.
pub(super) fn checked(q: &Tensor, a: &Tensor, z: &Tensor, nu: usize, residual: Option<&Tensor>) -> Result<Sizes> {
    q.expect_float(OP, "the queries")?;
    let rank = q.shape().rank();
    if rank < 2 || q.elements() == 0 {
        return Err(Error::shape(OP, "the queries", "[.., T, dm] with at least one query", q.shape()));
    }
    let (lead, t, dm) = (&q.dims()[..rank - 2], q.shape()[rank - 2], q.shape()[rank - 1]);
    let dk = feature_width(OP, dm, nu)?;
    for (what, memory) in [("A", a), ("z", z)] {
        memory.expect_dtype(OP, what, DType::F32)?;
        memory.expect_device_of(OP, what, q)?;
    }
    z.expect_shape(OP, "z", Shape::new(&[lead, &[dk]].concat()))?;
    if a.shape().rank() != rank || a.dims()[..rank - 1] != *z.dims() {
        return Err(Error::shape(OP, "A", format!("{:?} and an axis of values", z.dims()), a.shape()));
    }
    let d = a.shape().last();
    if d == 0 {
        return Err(Error::shape(OP, "A", "values of at least one number", a.shape()));
    }
    if let Some(residual) = residual {
        residual.expect_dtype(OP, "the residual", q.dtype())?;
        residual.expect_device_of(OP, "the residual", q)?;
        residual.expect_shape(OP, "the residual", Shape::new(&[lead, &[t, d]].concat()))?;
    }
    Ok(Sizes { batch: z.elements() / dk, m: t, n: d, k: dk })
}

struct Read {
    q: Tensor,
    a: Tensor,
    z: Tensor,
    /// Which rows of the whole memory these are; `None`: all.
    rows: Option<Range<usize>>,
    nu: usize,
    /// T queries of each memory against dk keys of d values.
    sizes: Sizes,
}

/// How the queries of a memory are shared out: blocks, and queries for each of their warps.
struct Lanes {
    chunks: usize,
    each: usize,
}

impl Read {
    /// How a kernel that walks over A once goes about it, where that is the way.
    fn walk(&self, held: Held) -> Option<(&CudaDevice, Cut)> {
        let s = self.widths();
        let cuda = cuda_of(&self.q).filter(|cuda| paths::read_by_walk(cuda.card(), s))?;
        // A memory too wide for it takes the general way.
        Cut::new(cuda.card(), s, held).ok().filter(|cut| cut.splits == 1 && cut.held > 0).map(|cut| (cuda, cut))
    }

    /// Whether one task of the CPU does all of a memory.
    fn by_task(&self) -> bool {
        cuda_of(&self.q).is_none() && paths::read_by_task(self.widths(), rayon::current_num_threads())
    }

    fn widths(&self) -> MemorySizes {
        MemorySizes { n: self.sizes.batch, m: self.sizes.m, dm: self.q.shape().last(), d: self.sizes.n, nu: self.nu }
    }

    /// A kernel of `read_lanes.cu` on its share of the queries, where that is the way.
    fn by_lanes<'a>(&self, cuda: &'a CudaDevice, name: &str) -> Result<Option<(Launch<'a>, Lanes)>> {
        let s = self.widths();
        let Some(each) = paths::read_by_lanes(cuda.card(), s) else { return Ok(None) };
        let chunks = s.m.div_ceil(ROWS * each);
        let launch = cuda.kernel_with("read_lanes", self.q.dtype(), &[("C_OWN", s.dm / 16)], name)?;
        Ok(Some((launch.block(32 * ROWS).grid(s.n * chunks, 1, 1), Lanes { each, chunks })))
    }

    /// This part of a gradient of the whole memory, to be added to.
    fn target(&self, target: Target) -> Result<Target> {
        if self.rows.is_some() && !target.accumulate {
            target.tensor.fill_zero()?;
        }
        let accumulate = target.accumulate || self.rows.is_some();
        Ok(Target { tensor: part(&target.tensor, self.rows.as_ref()), accumulate })
    }

    /// A in the type of the queries, for the products.
    fn rounded_memory(&self) -> Result<Tensor> {
        cast(&self.a, self.q.dtype())
    }

    /// qn = phi(q) / (z . phi(q) + eps).
    fn features(&self) -> Result<Tensor> {
        let Read { q, z, nu, sizes: s, .. } = self;
        let dm = q.shape().last();
        let qn = Tensor::uninit([s.batch, s.m, s.k], q.dtype(), q.device())?;
        match cuda_of(q) {
            None => cpu::read_features(&q.read::<f32>(OP)?, &z.read::<f32>(OP)?, &mut qn.write::<f32>(OP)?, self.widths()),
            Some(cuda) => match self.by_lanes(cuda, "read_features")? {
                Some((launch, by)) => {
                    launch.arg(q).arg(z).arg(&qn).arg(s.m as i32).arg(*nu as i32).arg(by.each as i32).run()?;
                }
                None => {
                    let rows = s.batch * s.m;
                    let launch = cuda.kernel("assoc", q.dtype(), "read_features")?.block(32 * ROWS).grid(rows.div_ceil(ROWS), 1, 1);
                    let launch = launch.shared(ROWS * 2 * dm * 4).arg(q).arg(z).arg(&qn).arg(rows);
                    launch.arg(s.m as i32).arg(dm as i32).arg(*nu as i32).run()?;
                }
            },
        }
        Ok(qn)
    }

    /// dq and, in f32, dz (+)= sum_t dden_t phi_t from dqn. `dz` is where to put the latter, if wanted.
    fn features_backward(&self, qn: &Tensor, dqn: &Tensor, dz: Option<(&Tensor, bool)>) -> Result<Tensor> {
        let Read { q, z, nu, sizes: s, .. } = self;
        let dm = q.shape().last();
        let dq = Tensor::uninit(q.shape(), q.dtype(), q.device())?;
        match cuda_of(q) {
            None => {
                let unwanted = Tensor::uninit(z.shape(), DType::F32, z.device())?;
                let (dz, add) = dz.unwrap_or((&unwanted, false));
                let (q, z, dqn) = (q.read::<f32>(OP)?, z.read::<f32>(OP)?, dqn.read::<f32>(OP)?);
                cpu::read_backward(&q, &z, &dqn, &mut dq.write::<f32>(OP)?, (&mut dz.write::<f32>(OP)?, add), self.widths());
            }
            Some(cuda) => {
                if let Some((launch, by)) = self.by_lanes(cuda, "read_backward")? {
                    let parts = dz.map(|_| Tensor::uninit([s.batch, by.chunks, s.k], DType::F32, q.device())).transpose()?;
                    let launch = launch.arg(q).arg(z).arg(dqn).arg(&dq).arg(parts.as_ref());
                    launch.arg(s.m as i32).arg(*nu as i32).arg(by.each as i32).run()?;
                    if let Some((parts, (dz, accumulate))) = parts.zip(dz) {
                        sum_middle_into(&parts, [s.batch, by.chunks, s.k], dz, accumulate)?;
                    }
                    return Ok(dq);
                }
                let rows = s.batch * s.m;
                // dden_t den_t, so that the sum over t can use qn.
                let weights = Tensor::uninit([rows], DType::F32, q.device())?;
                let launch = cuda.kernel("assoc", q.dtype(), "read_backward")?.block(32 * ROWS).grid(rows.div_ceil(ROWS), 1, 1);
                let launch = launch.shared(ROWS * (2 * dm + s.k) * 4).arg(q).arg(z).arg(dqn).arg(&dq).arg(&weights).arg(rows);
                launch.arg(s.m as i32).arg(dm as i32).arg(*nu as i32).run()?;
                if let Some((dz, accumulate)) = dz {
                    let launch =
                        cuda.kernel("assoc", q.dtype(), "read_backward_z")?.block(128).grid(s.batch * s.k.div_ceil(32), 1, 1);
                    launch.arg(qn).arg(&weights).arg(dz).arg(s.m as i32).arg(s.k as i32).arg(accumulate).run()?;
                }
            }
        }
        Ok(dq)
    }

    /// On the CPU: dq, and what is wanted of dA and dz, from dy in one walk over A.
    fn few_backward(&self, dy: &Tensor, da: Option<&Target>, dz: Option<&Target>) -> Result<Tensor> {
        let dq = Tensor::uninit(self.q.shape(), DType::F32, self.q.device())?;
        let unwanted = Tensor::uninit(self.z.shape(), DType::F32, self.z.device())?;
        let (dz, add) = dz.map_or((&unwanted, false), |t| (&t.tensor, t.accumulate));
        let (q, a, z, dy) = (self.q.read::<f32>(OP)?, self.a.read::<f32>(OP)?, self.z.read::<f32>(OP)?, dy.read::<f32>(OP)?);
        let asked = FewQueries { q: &q, z: &z, sizes: self.widths() };
        let mut da_out = da.map(|t| t.tensor.write::<f32>(OP)).transpose()?;
        let da = da_out.as_deref_mut().zip(da.map(|t| t.accumulate));
        let dz = (&mut *dz.write::<f32>(OP)?, add);
        cpu::read_few_backward(&asked, &a, &dy, &mut dq.write::<f32>(OP)?, dz, da);
        Ok(dq)
    }
}

struct ReadBackward {
    read: Read,
    has_residual: bool,
}

impl Backward for ReadBackward {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?; // [.., T, d]
        let read = &self.read;
        let Sizes { batch, m: t, n: d, k: dk } = read.sizes;
        if let Some((cuda, cut)) = read.walk(Held { tiles: 2, recalls: false, rule: None }) {
            let da = grads.target(1)?.map(|target| read.target(target)).transpose()?;
            let dz = grads.target(2)?.map(|target| read.target(target)).transpose()?;
            let dq = Tensor::uninit(read.q.shape(), read.q.dtype(), read.q.device())?;
            let launch = cut.launch(cuda, read.q.dtype(), "read_few_backward")?.arg(&read.q).arg(&read.a).arg(&read.z).arg(&dy);
            let launch = launch.arg(&dq).arg(da.as_ref().map(|t| &t.tensor)).arg(dz.as_ref().map(|t| &t.tensor));
            let launch = launch.arg(t as i32).arg(read.q.shape().last() as i32).arg(read.nu as i32).arg(d as i32);
            let launch = launch.arg(cut.buffers as i32);
            launch.arg(da.is_some_and(|t| t.accumulate)).arg(dz.is_some_and(|t| t.accumulate)).run()?;
            grads.give(0, dq)?;
            return if self.has_residual { grads.give(3, dy) } else { Ok(()) };
        }
        if read.by_task() {
            let da = grads.target(1)?.map(|target| read.target(target)).transpose()?;
            let dz = grads.target(2)?.map(|target| read.target(target)).transpose()?;
            let dq = read.few_backward(&dy, da.as_ref(), dz.as_ref())?;
            grads.give(0, dq)?;
            return if self.has_residual { grads.give(3, dy) } else { Ok(()) };
        }
        let qn = read.features()?;
        if let Some(target) = grads.target(1)? {
            let target = read.target(target)?;
            multiply(&qn, true, &dy, false, Sizes { batch, m: dk, n: d, k: t }, &target.tensor, target.accumulate)?;
        }
        if grads.wants(0) || grads.wants(2) {
            let dqn = Tensor::uninit(qn.shape(), qn.dtype(), qn.device())?; // [N, T, dk]
            multiply(&dy, false, &read.rounded_memory()?, true, Sizes { batch, m: t, n: dk, k: d }, &dqn, false)?;
            let dz = grads.target(2)?.map(|target| read.target(target)).transpose()?;
            let dq = read.features_backward(&qn, &dqn, dz.as_ref().map(|z| (&z.tensor, z.accumulate)))?;
            grads.give(0, dq)?;
        }
        if self.has_residual {
            grads.give(3, dy)?;
        }
        Ok(())
    }
}
