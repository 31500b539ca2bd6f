//! Causal attention: o_i = sum_j p_ij v_j, p_i = softmax over the visible keys j <= i of q_i . k_j / sqrt(size).
//!
//! Nothing of size T x T is kept: the forward pass saves the log-sum-exp of each row, and the backward pass computes p again from it,
//! with ds_ij = p_ij (do_i . v_j - do_i . o_i) / sqrt(size). [`naive`] is the plain twin; `paths.rs` says which kernels run when.

mod launch;
pub mod naive;

use launch::Plan;

use super::{cast, cuda_of, to_f32, via_f32};
use crate::cpu::attention::{self as cpu, Out};
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, is_recorded, record};
use crate::tensor::{DType, Shape, Tensor};

/// How a row is cut into heads: query heads share key and value heads in groups of `query / key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key heads, and as many value heads. Divides `query`.
    pub key: usize,
    /// Dimensions of a head.
    pub size: usize,
}

impl Heads {
    /// Width of a row packed as [q heads | k heads | v heads].
    pub(crate) fn packed(&self) -> usize {
        (self.query + 2 * self.key) * self.size
    }

    fn check(&self, op: &'static str) -> Result<()> {
        if self.size == 0 || self.key == 0 || self.query == 0 || !self.query.is_multiple_of(self.key) {
            let message =
                format!("expected at least one head of at least one dimension and key heads that divide query heads, got {self:?}");
            return Err(Error::argument(op, message));
        }
        Ok(())
    }

    /// Checks packed rows `[.., T, packed]`; returns the number of sequences and T.
    pub(crate) fn expect_packed(&self, op: &'static str, qkv: &Tensor) -> Result<(usize, usize)> {
        self.check(op)?;
        qkv.expect_float(op, "qkv")?;
        expect_rows(op, "qkv", qkv, self.packed())
    }
}

/// How sequences lie in memory: `n` of them, `tq` queries of `tk` keys, rows `q_row` and `k_row` elements apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) n: usize,
    pub(crate) tq: usize,
    pub(crate) tk: usize,
    pub(crate) heads: Heads,
    pub(crate) q_row: usize,
    pub(crate) k_row: usize,
}

impl Layout {
    /// Query heads that share a key head.
    pub(crate) fn group(&self) -> usize {
        self.heads.query / self.heads.key
    }

    /// What scores are multiplied by.
    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.heads.size as f32).sqrt()
    }
}

/// `[.., T, width]`: the number of sequences and T.
fn expect_rows(op: &'static str, what: &'static str, x: &Tensor, width: usize) -> Result<(usize, usize)> {
    let rank = x.shape().rank();
    if rank < 2 || x.shape().last() != width {
        return Err(Error::shape(op, what, format!("[.., T, {width}]"), x.shape()));
    }
    Ok((x.shape().outer(rank - 2), x.shape()[rank - 2]))
}

/// The mask is i32, one row of `tk` keys for each sequence of `rows` `[.., tk, width]`.
fn expect_mask(op: &'static str, mask: Option<&Tensor>, keys: &Tensor) -> Result<()> {
    let Some(mask) = mask else { return Ok(()) };
    mask.expect_dtype(op, "the mask", DType::I32)?;
    mask.expect_device_of(op, "the mask", keys)?;
    mask.expect_shape(op, "the mask", Shape::new(&keys.dims()[..keys.shape().rank() - 1]))
}

/// Largest head that the plain CUDA kernels take.
const LARGEST: usize = 256;

fn expect_size(op: &'static str, x: &Tensor, heads: Heads) -> Result<()> {
    if x.device().is_cuda() && heads.size > LARGEST {
        return Err(Error::unsupported(op, format!("expected heads of at most {LARGEST} dimensions on CUDA, got {}", heads.size)));
    }
    Ok(())
}

/// Causal attention within each sequence of qkv `[.., T, (H + 2 Hk) size]`, rows packed as [q heads | k heads | v heads]. The result is
/// `[.., T, H size]`.
///
/// The mask is i32 `[.., T]`, zero for keys that nothing may see. A row that sees no key gives zeros, and takes no gradient.
pub fn attention(qkv: &Tensor, heads: Heads, mask: Option<&Tensor>) -> Result<Tensor> {
    const OP: &str = "attention";
    let (n, t) = heads.expect_packed(OP, qkv)?;
    expect_mask(OP, mask, qkv)?;
    expect_size(OP, qkv, heads)?;
    if via_f32(qkv) {
        return cast(&attention(&to_f32(qkv)?, heads, mask)?, DType::BF16);
    }
    let row = heads.packed();
    let layout = Layout { n, tq: t, tk: t, heads, q_row: row, k_row: row };
    let o = Tensor::uninit(qkv.shape().with_last(heads.query * heads.size), qkv.dtype(), qkv.device())?;
    let [q, k, v] = parts(qkv, heads);
    let lse = forward(&q, &k, &v, mask, layout, &o, is_recorded(&[qkv]))?;
    let saved = o.detach();
    Ok(record(&[qkv], o, || AttentionBackward { q, k, v, mask: mask.map(Tensor::detach), layout, o: saved, lse, apart: None }))
}

/// Causal attention of queries q `[.., Tq, H size]` over keys and values `[.., Tk, Hk size]`, Tk >= Tq, aligned at the end: the last query
/// sees every key. For key/value caches, and for windows that reach into the previous segment. The mask is i32 `[.., Tk]`.
pub fn attention_cached(q: &Tensor, k: &Tensor, v: &Tensor, heads: Heads, mask: Option<&Tensor>) -> Result<Tensor> {
    const OP: &str = "attention_cached";
    heads.check(OP)?;
    q.expect_float(OP, "q")?;
    let (q_row, k_row) = (heads.query * heads.size, heads.key * heads.size);
    let (n, tq) = expect_rows(OP, "q", q, q_row)?;
    for (what, x) in [("k", k), ("v", v)] {
        x.expect_dtype(OP, what, q.dtype())?;
        x.expect_device_of(OP, what, q)?;
        expect_rows(OP, what, x, k_row)?;
    }
    let rank = q.shape().rank();
    let tk = k.shape()[k.shape().rank() - 2];
    if k.shape().rank() != rank || k.dims()[..rank - 2] != q.dims()[..rank - 2] || tk < tq {
        let expected = format!("{:?} with at least {tq} rows in the last axis but one", q.shape().with_last(k_row));
        return Err(Error::shape(OP, "k", expected, k.shape()));
    }
    v.expect_shape(OP, "v", k.shape())?;
    expect_mask(OP, mask, k)?;
    expect_size(OP, q, heads)?;
    if via_f32(q) {
        return cast(&attention_cached(&to_f32(q)?, &to_f32(k)?, &to_f32(v)?, heads, mask)?, DType::BF16);
    }
    let layout = Layout { n, tq, tk, heads, q_row, k_row };
    let o = Tensor::uninit(q.shape(), q.dtype(), q.device())?;
    let lse = forward(q, k, v, mask, layout, &o, is_recorded(&[q, k, v]))?;
    let saved = o.detach();
    Ok(record(&[q, k, v], o, || AttentionBackward {
        q: q.detach(),
        k: k.detach(),
        v: v.detach(),
        mask: mask.map(Tensor::detach),
        layout,
        o: saved,
        lse,
        apart: Some([q.shape(), k.shape()]),
    }))
}

/// Where q, k and v begin in packed rows: flat views whose rows lie a packed row apart.
fn parts(qkv: &Tensor, heads: Heads) -> [Tensor; 3] {
    let total = qkv.elements();
    let flat = qkv.view([total]);
    starts(heads).map(|from| flat.view_rows(from.min(total)..total))
}

fn starts(heads: Heads) -> [usize; 3] {
    [0, heads.query * heads.size, (heads.query + heads.key) * heads.size]
}

/// Fills o; returns the rows' log-sum-exp `[n, H, tq]` if the backward pass will need it.
fn forward(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, l: Layout, o: &Tensor, keep: bool) -> Result<Option<Tensor>> {
    const OP: &str = "attention";
    let lse = keep.then(|| Tensor::uninit([l.n, l.heads.query, l.tq], DType::F32, q.device())).transpose()?;
    if o.elements() == 0 {
        return Ok(lse);
    }
    match cuda_of(q) {
        None => {
            let mask = mask.map(|m| m.read::<i32>(OP)).transpose()?;
            let mut lse = lse.as_ref().map(|t| t.write::<f32>(OP)).transpose()?;
            let (q, k, v) = (q.read::<f32>(OP)?, k.read::<f32>(OP)?, v.read::<f32>(OP)?);
            cpu::forward(&q, &k, &v, mask.as_deref(), l, &mut o.write::<f32>(OP)?, lse.as_deref_mut());
        }
        Some(cuda) => {
            let plan = Plan::new(cuda, l, &[q, k, v, o]);
            let launch = plan.launch(cuda, q.dtype(), "attention_forward", l.tq, l.heads.query, plan.forward_shared())?;
            let launch = launch.arg(q).arg(k).arg(v).arg(mask).arg(o).arg(lse.as_ref());
            plan.sizes(launch).run()?;
        }
    }
    Ok(lse)
}

struct AttentionBackward {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Option<Tensor>,
    layout: Layout,
    o: Tensor,
    lse: Option<Tensor>,
    /// Shapes of q and of k and v where they are tensors of their own.
    apart: Option<[Shape; 2]>,
}

impl Backward for AttentionBackward {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        const OP: &str = "attention";
        let d_o = grads.output(0)?;
        let l = self.layout;
        let new = |shape: Shape| Tensor::uninit(shape, d_o.dtype(), d_o.device());
        match self.apart {
            None => {
                let shape = d_o.shape().with_last(l.heads.packed());
                let d = new(shape)?;
                if cuda_of(&d).is_some() {
                    self.run_cuda(&d_o, parts(&d, l.heads).each_ref())?;
                } else {
                    let mut out = d.write::<f32>(OP)?;
                    let first = out.as_mut_ptr();
                    self.run_cpu(&d_o, starts(l.heads).map(|at| Out(first.wrapping_add(at))))?;
                }
                grads.give(0, d)
            }
            Some([q, k]) => {
                let d = [new(q)?, new(k)?, new(k)?];
                if cuda_of(&d_o).is_some() {
                    self.run_cuda(&d_o, d.each_ref())?;
                } else {
                    let (mut dq, mut dk, mut dv) = (d[0].write::<f32>(OP)?, d[1].write::<f32>(OP)?, d[2].write::<f32>(OP)?);
                    self.run_cpu(&d_o, [Out(dq.as_mut_ptr()), Out(dk.as_mut_ptr()), Out(dv.as_mut_ptr())])?;
                }
                let [dq, dk, dv] = d;
                grads.give(0, dq)?;
                grads.give(1, dk)?;
                grads.give(2, dv)
            }
        }
    }
}

impl AttentionBackward {
    fn lse(&self) -> Result<&Tensor> {
        self.lse.as_ref().ok_or_else(|| Error::Tape("attention was recorded without its log-sum-exp".into()))
    }

    fn run_cpu(&self, d_o: &Tensor, out: [Out; 3]) -> Result<()> {
        const OP: &str = "attention";
        let mask = self.mask.as_ref().map(|m| m.read::<i32>(OP)).transpose()?;
        let (q, k, v) = (self.q.read::<f32>(OP)?, self.k.read::<f32>(OP)?, self.v.read::<f32>(OP)?);
        let (o, lse, d_o) = (self.o.read::<f32>(OP)?, self.lse()?.read::<f32>(OP)?, d_o.read::<f32>(OP)?);
        cpu::backward([&q, &k, &v], mask.as_deref(), self.layout, [&o, &lse, &d_o], out);
        Ok(())
    }

    fn run_cuda(&self, d_o: &Tensor, [dq, dk, dv]: [&Tensor; 3]) -> Result<()> {
        let Some(cuda) = cuda_of(d_o) else { return Ok(()) };
        let (l, lse, mask) = (self.layout, self.lse()?, self.mask.as_ref());
        let (q, k, v, o) = (&self.q, &self.k, &self.v, &self.o);
        let rows = l.n * l.tq * l.heads.query;
        if l.n * l.tk == 0 {
            return Ok(());
        }
        let plan = Plan::new(cuda, l, &[q, k, v, o, d_o, dq, dk, dv]);
        if plan.is_short() {
            let launch = plan.launch(cuda, d_o.dtype(), "attention_backward_short", l.tq, l.heads.query, plan.short_shared())?;
            let launch = launch.arg(q).arg(k).arg(v).arg(mask).arg(o).arg(d_o).arg(lse).arg(dq).arg(dk).arg(dv);
            return plan.sizes(launch).run();
        }
        // do_i . o_i for every row and head: a kernel of its own, or the first work of the tensor cores' kernel for q.
        let delta = Tensor::uninit(lse.shape(), DType::F32, d_o.device())?;
        if !plan.on_tensor_cores() {
            let chunks = [("C_CHUNKS", plan.chunks())];
            let launch = cuda.kernel_with("attention", d_o.dtype(), &chunks, "attention_delta")?.cover(32 * rows);
            launch.arg(o).arg(d_o).arg(&delta).arg(rows).arg(l.heads.query).arg(l.tq).arg(l.heads.size).run()?;
        }
        let launch = plan.launch(cuda, d_o.dtype(), "attention_backward_q", l.tq, l.heads.query, plan.backward_shared())?;
        let launch = launch.arg(q).arg(k).arg(v).arg(mask);
        let launch = if plan.on_tensor_cores() { launch.arg(o) } else { launch };
        let launch = launch.arg(d_o).arg(lse).arg(&delta).arg(dq);
        plan.sizes(launch).run()?;
        let launch = plan.launch(cuda, d_o.dtype(), "attention_backward_kv", l.tk, l.heads.key, plan.backward_shared())?;
        let launch = launch.arg(q).arg(k).arg(v).arg(mask).arg(d_o).arg(lse).arg(&delta).arg(dk).arg(dv);
        plan.sizes(launch).run()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Device;

    fn zeros(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::cpu()).unwrap()
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_was_expected() {
        let heads = Heads { query: 4, key: 2, size: 8 };
        let message = |result: Result<Tensor>| result.unwrap_err().to_string();
        let qkv = zeros(&[2, 5, 64], DType::F32);
        assert!(message(attention(&zeros(&[2, 5, 63], DType::F32), heads, None)).contains("[.., T, 64]"));
        assert!(message(attention(&qkv, Heads { key: 3, ..heads }, None)).contains("divide"));
        assert!(message(attention(&qkv, heads, Some(&zeros(&[2, 4], DType::I32)))).contains("[2, 5]"));
        assert!(message(attention(&qkv, heads, Some(&zeros(&[2, 5], DType::F32)))).contains("i32"));
        let (q, k) = (zeros(&[2, 5, 32], DType::F32), zeros(&[2, 4, 16], DType::F32));
        assert!(message(attention_cached(&q, &k, &k, heads, None)).contains("at least 5 rows"));
        let k = zeros(&[2, 6, 16], DType::F32);
        assert!(message(attention_cached(&q, &k, &zeros(&[2, 7, 16], DType::F32), heads, None)).contains("[2, 6, 16]"));
        let table = zeros(&[4, 4], DType::F32);
        assert!(message(super::super::rotary(&qkv, heads, &table, &table)).contains("[5, at most 4]"));
    }

    #[test]
    fn bf16_on_the_cpu_goes_through_f32() {
        let heads = Heads { query: 1, key: 1, size: 2 };
        let data: Vec<f32> = (0..18).map(|i| i as f32 / 8.0).collect();
        let qkv = Tensor::from_slice(&data, [1, 3, 6], &Device::cpu()).unwrap();
        let want = cast(&attention(&qkv, heads, None).unwrap(), DType::BF16).unwrap();
        let got = attention(&cast(&qkv, DType::BF16).unwrap(), heads, None).unwrap();
        assert_eq!(got.dtype(), DType::BF16);
        assert_eq!(got.to_f32_vec().unwrap(), want.to_f32_vec().unwrap());
    }
}
