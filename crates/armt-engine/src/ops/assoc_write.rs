//! The associative write of a segment's m memory tokens, all against the old memory:
//!
//! phi_i = DPFP(k_i), den_i = z . phi_i + eps, vbar_i = A^T phi_i / den_i, b_i = sigmoid(beta_i),
//! gamma_i = clip(1 - den_i / (|phi_i|^2 + eps), 0, 1), or 1 in a first segment or without correction, never differentiated;
//! A' = A + sum_i phi_i (x) b_i (v_i - vbar_i), z' = z + sum_i gamma_i phi_i.
//!
//! Backward, with G = dA', h = dz', e_i = G^T phi_i, w_i = A^T phi_i, u_i = v_i - vbar_i: dbeta_i = (e_i . u_i) b_i (1 - b_i), the value's
//! gradient is b_i e_i, dw_i = -(b_i / den_i) e_i, dden_i = b_i (e_i . w_i) / den_i^2; dA = G + sum_i phi_i (x) dw_i,
//! dz = h + sum_i dden_i phi_i, dphi_i = b_i G u_i + A dw_i + gamma_i h + dden_i z, and from there through DPFP.
//!
//! Everything is local to a column of A but for sums over columns in dphi, dbeta and dden. On CUDA a block takes a tile of columns, reads
//! it once, and leaves partial sums that a second kernel adds in order: no atomics, the same bits in every run.

use super::dpfp::feature_width;
use super::{cuda_of, to_f32, via_f32};
use crate::cpu::assoc::{self as cpu, WriteGradients, WriteInputs, WriteSizes};
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, Target, record_all};
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
    /// i32, one for each memory: nonzero where it sees its first segment, so that gamma is 1.
    pub first: Option<&'a Tensor>,
    /// Whether gamma corrects z for keys that are there already.
    pub correction: bool,
    /// The order of DPFP.
    pub nu: usize,
}

/// The new (A, z), in f32. Operands whose shapes, types or devices do not fit together are an error.
pub fn assoc_write(w: AssocWrite<'_>) -> Result<(Tensor, Tensor)> {
    let sizes = checked(&w)?;
    if via_f32(w.k) {
        let (k, v, beta) = (to_f32(w.k)?, to_f32(w.v)?, to_f32(w.beta)?);
        return assoc_write(AssocWrite { k: &k, v: &v, beta: &beta, ..w });
    }
    let a = Tensor::uninit(w.a.shape(), DType::F32, w.a.device())?;
    let z = Tensor::uninit(w.z.shape(), DType::F32, w.z.device())?;
    let saved = Saved {
        k: w.k.detach(),
        v: w.v.detach(),
        beta: w.beta.detach(),
        a: w.a.detach(),
        z: w.z.detach(),
        first: w.first.map(Tensor::detach),
        correction: w.correction,
        sizes,
    };
    saved.forward(&a, &z)?;
    let [a, z] = record_all(&[w.k, w.v, w.beta, w.a, w.z], [a, z], || saved);
    Ok((a, z))
}

fn checked(w: &AssocWrite<'_>) -> Result<WriteSizes> {
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
    Ok(WriteSizes { n, m, dm, d, nu: w.nu })
}

struct Saved {
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    a: Tensor,
    z: Tensor,
    first: Option<Tensor>,
    correction: bool,
    sizes: WriteSizes,
}

/// How the CUDA kernels cut a write. `assoc.cu` lays its shared memory out by the same numbers.
struct Cut {
    /// Columns of A a block takes; the kernels are compiled for it.
    columns: usize,
    /// Blocks a memory.
    tiles: usize,
    /// Tokens whose features are in shared memory at once.
    chunk: usize,
    /// Bytes of shared memory a block.
    shared: usize,
}

impl Cut {
    /// A cut that fits into `limit` bytes, for a kernel that holds `held` tiles and, of every token, `rows` rows as wide as a tile.
    /// Narrower tiles mean smaller loads and more partial sums: they are taken only where wider ones do not fit.
    fn new(s: WriteSizes, held: usize, rows: usize, limit: usize) -> Result<Self> {
        let chunk = [4, 8, 16].into_iter().find(|c| *c >= s.m).unwrap_or(16);
        let group = chunk.min(8);
        let tokens = s.m.next_multiple_of(chunk);
        let stride = if chunk == 4 { 4 } else { chunk + 4 };
        let bytes = |columns: usize| {
            let scratch = (chunk * 2 * s.dm).max(8 * group * columns);
            4 * (held * s.dk() * (columns + 4)
                + s.dk() * stride
                + scratch
                + rows * tokens * columns
                + 2 * group * columns
                + 3 * tokens)
        };
        // Two blocks a multiprocessor hide each other's loads; the system takes a kilobyte of each.
        let pair = limit / 2 - 1024;
        let wide = [32, 16].into_iter().find(|c| bytes(*c) <= pair);
        let columns = wide.or_else(|| [32, 16, 8].into_iter().find(|c| bytes(*c) <= limit)).ok_or_else(|| {
            let needed = bytes(8);
            let message =
                format!("{} tokens of {} features need {needed} bytes of shared memory, this GPU has {limit}", s.m, s.dk());
            Error::argument(OP, message)
        })?;
        Ok(Cut { columns, tiles: s.d.div_ceil(columns), chunk, shared: bytes(columns) })
    }
}

impl Saved {
    fn forward(&self, a: &Tensor, z: &Tensor) -> Result<()> {
        let Some(cuda) = cuda_of(&self.k) else {
            return self.on_cpu(|w| {
                cpu::write(w, &mut a.write::<f32>(OP)?, &mut z.write::<f32>(OP)?);
                Ok(())
            });
        };
        let s = self.sizes;
        let cut = Cut::new(s, 1, 1, cuda.shared_limit())?;
        let launch = cuda.kernel_with("assoc", self.k.dtype(), &[("C_COLUMNS", cut.columns)], "write")?;
        let launch = launch.grid(s.n * cut.tiles, 1, 1).shared(cut.shared);
        let launch =
            launch.arg(&self.k).arg(&self.v).arg(&self.beta).arg(&self.a).arg(&self.z).arg(self.first.as_ref()).arg(a).arg(z);
        let launch = launch.arg(s.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32).arg(cut.chunk as i32);
        launch.arg(self.correction).run()
    }

    /// Calls `f` with host slices of the operands.
    fn on_cpu(&self, f: impl FnOnce(&WriteInputs<'_>) -> Result<()>) -> Result<()> {
        let first = self.first.as_ref().map(|t| t.read::<i32>(OP)).transpose()?;
        f(&WriteInputs {
            k: &self.k.read::<f32>(OP)?,
            v: &self.v.read::<f32>(OP)?,
            beta: &self.beta.read::<f32>(OP)?,
            a: &self.a.read::<f32>(OP)?,
            z: &self.z.read::<f32>(OP)?,
            first: first.as_deref(),
            correction: self.correction,
            sizes: self.sizes,
        })
    }

    #[expect(clippy::too_many_arguments, reason = "two gradients in, five out")]
    fn backward_on(
        &self,
        cuda: &CudaDevice,
        g: &Tensor,
        h: &Tensor,
        dk: &Tensor,
        dv: &Tensor,
        dbeta: &Tensor,
        da: Option<&Target>,
        dz: Option<&Target>,
    ) -> Result<()> {
        let s = self.sizes;
        let cut = Cut::new(s, 2, 2, cuda.shared_limit())?;
        let (dtype, device) = (self.k.dtype(), self.k.device());
        // Sums over a tile's columns: of dphi, and of db and dden.
        let features = Tensor::uninit([s.n, cut.tiles, s.m, s.dk()], DType::F32, device)?;
        let scalars = Tensor::uninit([s.n, cut.tiles, 2, s.m], DType::F32, device)?;
        let add = |target: Option<&Target>| target.is_some_and(|t| t.accumulate);
        let launch = cuda.kernel_with("assoc", dtype, &[("C_COLUMNS", cut.columns)], "write_backward")?;
        let launch = launch.grid(s.n * cut.tiles, 1, 1).shared(cut.shared);
        let launch = launch.arg(&self.k).arg(&self.v).arg(&self.beta).arg(&self.a).arg(&self.z).arg(g);
        let launch = launch.arg(dv).arg(da.map(|t| &t.tensor)).arg(&features).arg(&scalars);
        let launch = launch.arg(s.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(s.d as i32).arg(cut.chunk as i32);
        launch.arg(add(da)).run()?;

        let shared = 4 * (8 * (2 * s.dm + s.dk()) + s.dk() + 8);
        let launch = cuda.kernel_with("assoc", dtype, &[("C_COLUMNS", cut.columns)], "write_backward_sum")?;
        let launch = launch.grid(s.n, 1, 1).shared(shared);
        let launch = launch.arg(&self.k).arg(&self.beta).arg(&self.z).arg(self.first.as_ref()).arg(h).arg(&features).arg(&scalars);
        let launch = launch.arg(dk).arg(dbeta).arg(dz.map(|t| &t.tensor));
        let launch = launch.arg(s.m as i32).arg(s.dm as i32).arg(s.nu as i32).arg(cut.tiles as i32);
        launch.arg(self.correction).arg(add(dz)).run()
    }
}

impl Backward for Saved {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let (g, h) = (grads.output(0)?, grads.output(1)?);
        let like = |t: &Tensor| Tensor::uninit(t.shape(), t.dtype(), t.device());
        let (dk, dv, dbeta) = (like(&self.k)?, like(&self.v)?, like(&self.beta)?);
        let (da, dz) = (grads.target(3)?, grads.target(4)?);
        match cuda_of(&self.k) {
            Some(cuda) => self.backward_on(cuda, &g, &h, &dk, &dv, &dbeta, da.as_ref(), dz.as_ref())?,
            None => {
                // A memory that nothing asks about, as that of a first segment, still gets a place for its gradient.
                let place = |target: Option<Target>, t: &Tensor| match target {
                    Some(target) => Ok(target),
                    None => like(t).map(|tensor| Target { tensor, accumulate: false }),
                };
                let (da, dz) = (place(da, &self.a)?, place(dz, &self.z)?);
                self.on_cpu(|w| {
                    let out = WriteGradients {
                        dk: &mut dk.write::<f32>(OP)?,
                        dv: &mut dv.write::<f32>(OP)?,
                        dbeta: &mut dbeta.write::<f32>(OP)?,
                        da: &mut da.tensor.write::<f32>(OP)?,
                        add_a: da.accumulate,
                        dz: &mut dz.tensor.write::<f32>(OP)?,
                        add_z: dz.accumulate,
                    };
                    cpu::write_backward(w, &g.read::<f32>(OP)?, &h.read::<f32>(OP)?, out);
                    Ok(())
                })?;
            }
        }
        grads.give(0, dk)?;
        grads.give(1, dv)?;
        grads.give(2, dbeta)
    }
}
