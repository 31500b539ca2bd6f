//! The associative write of a segment's m memory tokens, by the paper's rule (`projected.rs` has the other) all against the old memory:
//!
//! phi_i = DPFP(k_i), den_i = z . phi_i + eps, vbar_i = A^T phi_i / den_i, b_i = sigmoid(beta_i),
//! gamma_i = clip(1 - den_i / (|phi_i|^2 + eps), 0, 1), or 1 in a first segment or without correction, never differentiated;
//! A' = A + sum_i phi_i (x) b_i (v_i - vbar_i), z' = z + sum_i gamma_i phi_i.
//!
//! Backward, with G = dA', h = dz', e_i = G^T phi_i, w_i = A^T phi_i, u_i = v_i - vbar_i: dbeta_i = (e_i . u_i) b_i (1 - b_i), the value's
//! gradient is b_i e_i, dw_i = -(b_i / den_i) e_i, dden_i = b_i (e_i . w_i) / den_i^2; dA = G + sum_i phi_i (x) dw_i,
//! dz = h + sum_i dden_i phi_i, dphi_i = b_i G u_i + A dw_i + gamma_i h + dden_i z, and from there through DPFP.
//!
//! Backward passes turn G and h into dA and dz in place. A write in place goes further: A' takes the place of A, and the backward pass puts A
//! back, A = A' - sum_i phi_i (x) x_i, from the small x_i = b_i u_i that it kept. A memory of any number of segments is then one buffer. What
//! was empty becomes exactly zero again: its denominators are eps, which would blow the rounding up.
//!
//! Everything is local to a column of A but for sums over columns in dphi, dbeta and dden. On CUDA a block walks over tiles of columns, reads
//! each once, and leaves sums that a second kernel adds in order: no atomics, the same bits in every run.

use std::ops::Range;

use super::cut::{Cut, Held};
use super::dpfp::feature_width;
use super::{MemorySizes, WriteRule, expect_rows, part, projected};
use crate::cpu::memory::write::{self as cpu, WriteGradients, WriteInputs, Written};
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use crate::ops::{cuda_of, to_f32, via_f32};
use crate::tape::{Backward, Grads, is_recorded, record_all};
use crate::tensor::{DType, Shape, Tensor};

const OP: &str = "assoc_write";

/// What a write takes. k, v and beta share a float type; A and z are f32.
#[derive(Clone, Copy)]
pub struct AssocWrite<'a> {
    /// Raw keys W_K x, `[.., m, dm]`.
    pub k: &'a Tensor,
    /// Values, `[.., m, d]`.
    pub v: &'a Tensor,
    /// Importance before its sigmoid, `[.., m]`.
    pub beta: &'a Tensor,
    /// The memory, `[.., dk, d]` with dk = 2 nu dm.
    pub a: &'a Tensor,
    /// Its normaliser, `[.., dk]`.
    pub z: &'a Tensor,
    /// i32, one for each memory: nonzero where it is empty (all zero), so that gamma is 1: of all tokens, or of the first where they take
    /// turns.
    pub first: Option<&'a Tensor>,
    /// Whether gamma corrects z for keys that are there already.
    pub correction: bool,
    /// The order of DPFP.
    pub nu: usize,
    /// How the memory changes.
    pub rule: WriteRule,
}

/// The new (A, z), in f32. Operands whose shapes, types or devices do not fit together are an error.
pub fn assoc_write(w: AssocWrite<'_>) -> Result<(Tensor, Tensor)> {
    write(w, None, false, None)
}

/// Writes, as [`assoc_write`], to the memories `rows` of the leading axis of A `[L, .., dk, d]` and z `[L, .., dk]`: the other rows stay, and k, v, beta and
/// `first` are `[rows, ..]`.
pub fn assoc_write_rows(w: AssocWrite<'_>, rows: Range<usize>) -> Result<(Tensor, Tensor)> {
    expect_rows(OP, w.a, &rows)?;
    expect_rows(OP, w.z, &rows)?;
    write(w, Some(rows), false, None)
}

/// Writes, as [`assoc_write_rows`], with A' in the place of A. The way back takes A from A', with its rounding: of the size of the largest values that the memory
/// ever held, not of those it held then.
///
/// Whatever shares A's buffer sees A' from here on, until the backward pass has gone through this write and put A back. So the caller
/// owns the buffer: no one else may still want to read the old A, but for operations that are on the tape already.
pub fn assoc_write_in_place(w: AssocWrite<'_>, rows: Range<usize>) -> Result<(Tensor, Tensor)> {
    expect_rows(OP, w.a, &rows)?;
    expect_rows(OP, w.z, &rows)?;
    write(w, Some(rows), true, None)
}

/// On CUDA, the new memories of the written rows go to `rounded` too, if given, in its type, which is the tokens'.
pub(super) fn write(
    w: AssocWrite<'_>,
    rows: Option<Range<usize>>,
    in_place: bool,
    rounded: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    if via_f32(w.k) {
        let (k, v, beta) = (to_f32(w.k)?, to_f32(w.v)?, to_f32(w.beta)?);
        return write(AssocWrite { k: &k, v: &v, beta: &beta, ..w }, rows, in_place, None);
    }
    if let Some(tokens) = projected::passes(&w, rows.as_ref())? {
        return projected::write_in_passes(w, tokens, rows, in_place, rounded);
    }
    let inputs = [w.k, w.v, w.beta, w.a, w.z];
    let (saved, a, z) = Saved::new(w, rows, in_place, in_place && is_recorded(&inputs))?;
    saved.forward(&part(&a, saved.rows.as_ref()), &part(&z, saved.rows.as_ref()), in_place, rounded)?;
    let [a, z] = record_all(&inputs, [a, z], || saved);
    Ok((a, z))
}

pub(super) fn checked(w: &AssocWrite<'_>) -> Result<MemorySizes> {
    w.k.expect_float(OP, "the keys")?;
    let rank = w.k.shape().rank();
    if rank < 2 || w.k.elements() == 0 {
        return Err(Error::shape(OP, "the keys", "[.., m, dm] with at least one token", w.k.shape()));
    }
    for (what, t, dtype) in [
        ("the values", Some(w.v), w.k.dtype()),
        ("beta", Some(w.beta), w.k.dtype()),
        ("A", Some(w.a), DType::F32),
        ("z", Some(w.z), DType::F32),
        ("first", w.first, DType::I32),
    ] {
        if let Some(t) = t {
            t.expect_dtype(OP, what, dtype)?;
            t.expect_device_of(OP, what, w.k)?;
        }
    }
    let (lead, m, dm) = (&w.k.dims()[..rank - 2], w.k.shape()[rank - 2], w.k.shape()[rank - 1]);
    let dk = feature_width(OP, dm, w.nu)?;
    let n: usize = lead.iter().product();
    w.beta.expect_shape(OP, "beta", Shape::new(&[lead, &[m]].concat()))?;
    w.z.expect_shape(OP, "z", Shape::new(&[lead, &[dk]].concat()))?;
    let d = w.v.shape().last();
    if w.v.shape().rank() != rank || w.v.dims()[..rank - 1] != *w.beta.dims() || d == 0 {
        return Err(Error::shape(OP, "the values", format!("{:?} and an axis of values", w.beta.dims()), w.v.shape()));
    }
    w.a.expect_shape(OP, "A", Shape::new(&[lead, &[dk, d]].concat()))?;
    if let Some(first) = w.first
        && first.dims() != lead
        && first.dims() != [n]
    {
        return Err(Error::shape(OP, "first", format!("{lead:?} or [{n}]"), first.shape()));
    }
    Ok(MemorySizes { n, m, dm, d, nu: w.nu })
}

pub(super) struct Saved {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) beta: Tensor,
    /// The old memory, or where it was, if the write was in place.
    pub(super) a: Tensor,
    pub(super) z: Tensor,
    pub(super) first: Option<Tensor>,
    pub(super) correction: bool,
    pub(super) rule: WriteRule,
    pub(super) sizes: MemorySizes,
    /// Which rows of the whole memory these are; `None`: all.
    pub(super) rows: Option<Range<usize>>,
    /// What a write in place added to each key, f32 `[.., m, d]`, if it is to be taken back. On CUDA the projected write added it to psi.
    pub(super) x: Option<Tensor>,
}

impl Saved {
    /// The operands, checked, and whole tensors that the new A and z are to be written to: of rows that rest they have the old values.
    /// With `keep` there is room for what the write adds.
    pub(super) fn new(w: AssocWrite<'_>, rows: Option<Range<usize>>, in_place: bool, keep: bool) -> Result<(Self, Tensor, Tensor)> {
        let (old_a, old_z) = (part(w.a, rows.as_ref()), part(w.z, rows.as_ref()));
        let sizes = checked(&AssocWrite { a: &old_a, z: &old_z, ..w })?;
        let fresh = |t: &Tensor| {
            let new = Tensor::uninit(t.shape(), DType::F32, t.device())?;
            let written = rows.clone().unwrap_or(0..t.shape()[0]);
            for resting in [0..written.start, written.end..t.shape()[0]].into_iter().filter(|rows| !rows.is_empty()) {
                new.view_rows(resting.clone()).copy_from(&t.detach().view_rows(resting))?;
            }
            Ok::<_, Error>(new)
        };
        let a = if in_place { w.a.detach() } else { fresh(w.a)? };
        let z = fresh(w.z)?;
        let x = keep.then(|| Tensor::uninit(w.v.shape(), DType::F32, w.v.device())).transpose()?;
        let saved = Saved {
            k: w.k.detach(),
            v: w.v.detach(),
            beta: w.beta.detach(),
            a: old_a,
            z: old_z,
            first: w.first.map(Tensor::detach),
            correction: w.correction,
            rule: w.rule,
            sizes,
            rows,
            x,
        };
        Ok((saved, a, z))
    }

    fn forward(&self, a: &Tensor, z: &Tensor, in_place: bool, rounded: Option<&Tensor>) -> Result<()> {
        let Some(cuda) = cuda_of(&self.k) else {
            return self.on_cpu(|w| {
                let mut x = self.x.as_ref().map(|x| x.write::<f32>(OP)).transpose()?;
                let old = if in_place { None } else { Some(self.a.read::<f32>(OP)?) };
                let new = Written { a: &mut a.write::<f32>(OP)?, z: &mut z.write::<f32>(OP)?, x: x.as_deref_mut() };
                cpu::write(w, old.as_deref(), new);
                Ok(())
            });
        };
        let s = self.sizes;
        let cut = Cut::new(cuda.card(), s, Held { tiles: 1, recalls: true, rule: Some(self.rule) })?;
        let launch = cut.launch(cuda, self.k.dtype(), "write")?;
        let launch =
            launch.arg(&self.k).arg(&self.v).arg(&self.beta).arg(&self.a).arg(&self.z).arg(self.first.as_ref()).arg(a).arg(z);
        let launch = launch.arg(self.x.as_ref()).arg(rounded);
        let launch = launch.arg(s.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32);
        launch.arg(cut.splits as i32).arg(cut.buffers as i32).arg(self.correction).run()
    }

    /// Puts the old memory back where it was.
    pub(super) fn undo(&self) -> Result<()> {
        let Some(x) = &self.x else { return Ok(()) };
        let Some(cuda) = cuda_of(&self.k) else {
            return self.on_cpu(|w| {
                cpu::undo(w, &mut self.a.write::<f32>(OP)?, &x.read::<f32>(OP)?);
                Ok(())
            });
        };
        let s = self.sizes;
        let cut = Cut::new(cuda.card(), s, Held { tiles: 1, recalls: false, rule: Some(self.rule) })?;
        let launch = cut.launch(cuda, self.k.dtype(), "write_undo")?.arg(&self.k).arg(&self.beta).arg(&self.z);
        let launch = launch.arg(self.first.as_ref()).arg(x).arg(&self.a);
        let launch = launch.arg(s.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32);
        launch.arg(cut.splits as i32).arg(cut.buffers as i32).run()
    }

    /// Calls `f` with host slices of the operands.
    pub(super) fn on_cpu(&self, f: impl FnOnce(&WriteInputs<'_>) -> Result<()>) -> Result<()> {
        let first = self.first.as_ref().map(|t| t.read::<i32>(OP)).transpose()?;
        f(&WriteInputs {
            k: &self.k.read::<f32>(OP)?,
            v: &self.v.read::<f32>(OP)?,
            beta: &self.beta.read::<f32>(OP)?,
            z: &self.z.read::<f32>(OP)?,
            first: first.as_deref(),
            correction: self.correction,
            rule: self.rule,
            sizes: self.sizes,
        })
    }

    /// Calls `f` with host slices of the operands and of where gradients go, of which g and h become those of A and z.
    pub(super) fn back_on_cpu(
        &self,
        [g, h]: [&Tensor; 2],
        [dk, dv, dbeta]: [&Tensor; 3],
        f: impl FnOnce(&WriteInputs<'_>, WriteGradients<'_>) -> Result<()>,
    ) -> Result<()> {
        self.on_cpu(|w| {
            let out = WriteGradients {
                dk: &mut dk.write::<f32>(OP)?,
                dv: &mut dv.write::<f32>(OP)?,
                dbeta: &mut dbeta.write::<f32>(OP)?,
                da: &mut g.write::<f32>(OP)?,
                dz: &mut h.write::<f32>(OP)?,
            };
            f(w, out)
        })
    }

    /// dk, dv and dbeta, and g and h turned into the gradients of A and z. Without `update`, g stays as it was.
    fn backward_on(&self, cuda: &CudaDevice, [g, h]: [&Tensor; 2], [dk, dv, dbeta]: [&Tensor; 3], update: bool) -> Result<()> {
        let s = self.sizes;
        let cut = Cut::new(cuda.card(), s, Held { tiles: 2, recalls: true, rule: Some(self.rule) })?;
        let (dtype, device) = (self.k.dtype(), self.k.device());
        // Sums over columns: of dphi, and of db and dden.
        let kinds = if self.rule == WriteRule::Projected { 2 } else { 1 };
        let features = Tensor::uninit([s.n, cut.sums(), kinds, s.m, s.dk()], DType::F32, device)?;
        let scalars = Tensor::uninit([s.n, cut.splits, 2, s.m], DType::F32, device)?;
        let launch = cut.launch(cuda, dtype, "write_backward")?;
        let launch = launch.arg(&self.k).arg(&self.v).arg(&self.beta).arg(&self.a).arg(&self.z).arg(g);
        let launch = launch.arg(dv).arg(update).arg(&features).arg(&scalars).arg(self.first.as_ref()).arg(self.x.as_ref());
        let launch = launch.arg(s.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32);
        launch.arg(cut.splits as i32).arg(cut.buffers as i32).run()?;

        let launch = match self.rule {
            WriteRule::Projected => cut.launch_sum(cuda, dtype)?,
            WriteRule::Paper => {
                let shared = 4 * (8 * (2 * s.dm + s.dk()) + s.dk() + 8);
                cuda.kernel("assoc", dtype, "write_backward_sum")?.grid(s.n, 1, 1).shared(shared)
            }
        };
        let launch = launch.arg(&self.k).arg(&self.beta).arg(&self.z).arg(self.first.as_ref()).arg(h).arg(&features).arg(&scalars);
        let launch = launch.arg(dk).arg(dbeta);
        let launch = launch.arg(s.m as i32).arg(s.dm as i32).arg(s.nu as i32);
        launch.arg(cut.sums() as i32).arg(cut.splits as i32).arg(self.correction).run()
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (whole_g, whole_h) = (grads.output_owned(0)?, grads.output_owned(1)?);
        let (g, h) = (part(&whole_g, self.rows.as_ref()), part(&whole_h, self.rows.as_ref()));
        let like = |t: &Tensor| Tensor::uninit(t.shape(), t.dtype(), t.device());
        let (dk, dv, dbeta) = (like(&self.k)?, like(&self.v)?, like(&self.beta)?);
        match cuda_of(&self.k) {
            // The kernel puts the old memory back on its way.
            Some(cuda) => self.backward_on(cuda, [&g, &h], [&dk, &dv, &dbeta], grads.wants(3))?,
            None => {
                self.undo()?;
                self.back_on_cpu([&g, &h], [&dk, &dv, &dbeta], |w, out| {
                    cpu::write_backward(w, &self.a.read::<f32>(OP)?, out);
                    Ok(())
                })?;
            }
        }
        grads.give(0, dk)?;
        grads.give(1, dv)?;
        grads.give(2, dbeta)?;
        drop((g, h));
        grads.give(3, whole_g)?;
        grads.give(4, whole_h)
    }

    fn skipped(self: Box<Self>) -> Result<()> {
        self.undo()
    }
}
