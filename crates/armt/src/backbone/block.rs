//! One transformer block, for a range of layers at once: x `[n, B, T, d]`, weights of n layers.
//!
//! ```text
//! GPT-2, Llama:        h = x + attention(norm1 x);   y = h + mlp(norm2 h)
//! GPT-NeoX (parallel): y = x + attention(norm1 x) + mlp(norm2 x)
//! ```

use std::ops::Range;
use std::sync::Arc;

use armt_engine::ops::{self, Activation, Linear};
use armt_engine::{Param, Tape, Tensor};

use super::architecture::{Architecture, Mlp, Norm, Positions};
use super::rotary;
use crate::compute::Compute;
use crate::error::{Error, Result};
use crate::weights::{Fill, Maker};

/// A norm's gain, and bias where it has one.
pub struct NormWeights {
    /// `[L, d]`, or `[d]` for the last norm.
    pub gain: Param,
    /// As the gain.
    pub bias: Option<Param>,
}

impl NormWeights {
    pub(super) fn new(make: &mut Maker, name: &str, shape: &[usize], norm: Norm) -> Result<Self> {
        let bias = (norm == Norm::Layer).then(|| make.param(&format!("{name}.bias"), shape, Fill::Value(0.0))).transpose()?;
        Ok(NormWeights { gain: make.param(&format!("{name}.gain"), shape, Fill::Value(1.0))?, bias })
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.gain).chain(&self.bias)
    }
}

/// A linear layer's matrix and bias.
pub struct LinearWeights {
    /// `[L, in, out]`.
    pub weight: Param,
    /// `[L, out]`.
    pub bias: Option<Param>,
}

impl LinearWeights {
    fn new(make: &mut Maker, name: &str, [l, input, output]: [usize; 3], biased: bool, fill: Fill) -> Result<Self> {
        let bias = biased.then(|| make.param(&format!("{name}.bias"), &[l, output], Fill::Value(0.0))).transpose()?;
        let weight = make.matrices(|make| make.param(&format!("{name}.weight"), &[l, input, output], fill))?;
        Ok(LinearWeights { weight, bias })
    }

    fn params(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}

/// Parameters of all layers, stacked. Matrices are stored `[in, out]`.
pub struct BlockWeights {
    /// Norm before attention.
    pub norm1: NormWeights,
    /// Queries, keys and values of all heads, packed: `[L, d, (H + 2 Hk) size]`.
    pub qkv: LinearWeights,
    /// Norms of each head's queries and keys, `[L, size]`, where there are any.
    pub head_norms: Option<(NormWeights, NormWeights)>,
    /// Attention's output, `[L, H size, d]`.
    pub out: LinearWeights,
    /// Norm before the feed-forward part.
    pub norm2: NormWeights,
    /// `[L, d, f]`, or `[L, d, 2 f]` as gate and up.
    pub up: LinearWeights,
    /// `[L, f, d]`.
    pub down: LinearWeights,
}

/// What n segments with padding need beside their input.
#[derive(Clone)]
pub struct Padding {
    /// Which keys can be seen, `[n, B, T]`.
    pub mask: Tensor,
    /// Rotary positions, `[n, T]`.
    pub rows: Tensor,
}

impl Padding {
    /// The padding of n segments that have none.
    pub fn none(compute: &Compute, n: usize, texts: usize, width: usize) -> Result<Self> {
        let rows: Vec<i32> = (0..n * width).map(|i| (i % width) as i32).collect();
        Ok(Padding {
            mask: compute.constant(&vec![1i32; n * texts * width], &[n, texts, width])?,
            rows: compute.constant(&rows, &[n, width])?,
        })
    }

    /// Padding of several segments, stacked; `None` if none has any.
    pub fn stacked<'a>(
        compute: &Compute,
        parts: impl Iterator<Item = Option<&'a Padding>>,
        texts: usize,
        width: usize,
    ) -> Result<Option<Self>> {
        let parts: Vec<Option<&Padding>> = parts.collect();
        if parts.iter().all(Option::is_none) {
            return Ok(None);
        }
        let whole = Padding::none(compute, 1, texts, width)?;
        let masks: Vec<&Tensor> = parts.iter().map(|p| &p.unwrap_or(&whole).mask).collect();
        let rows: Vec<&Tensor> = parts.iter().map(|p| &p.unwrap_or(&whole).rows).collect();
        Ok(Some(Padding { mask: ops::concat(&masks, 0)?, rows: ops::concat(&rows, 0)? }))
    }

    /// That of a window and this segment after it, whose positions go on from the window's end.
    pub fn after_window(&self, seen: &Tensor) -> Result<Self> {
        let (n, t, width) = (self.rows.dims()[0], seen.dims()[2], self.rows.dims()[1]);
        let rows = self.rows.to_vec::<i32>()?;
        let both: Vec<i32> = rows.chunks(width).flat_map(|r| (0..t as i32).chain(r.iter().map(|p| p + t as i32))).collect();
        let rows = Tensor::from_slice(&both, [n, t + width], seen.device())?;
        Ok(Padding { mask: ops::concat(&[seen, &self.mask], 2)?, rows })
    }

    /// That of the segments before segment `at` of the n, and of those from it on.
    fn split(&self, at: usize) -> Result<[Self; 2]> {
        let ([mask, masks], [rows, more]) = (ops::split_rows(&self.mask, at)?, ops::split_rows(&self.rows, at)?);
        Ok([Padding { mask, rows }, Padding { mask: masks, rows: more }])
    }
}

/// What a block's queries may see.
pub enum Attend<'a> {
    /// The segment itself, but for its padding.
    Segment(Option<&'a Padding>),
    /// The previous segment too: its packed queries, keys and values `[n, B, T, ..]` before rotation, and the padding of both.
    Window(&'a Tensor, &'a Padding),
    /// Everything since the segment's start, kept in a cache.
    Cached(&'a mut Cache),
}

/// Keys and values of one layer since the segment's start, `[1, B, t, Hk size]`, after those of a window where there is one.
#[derive(Clone, Default)]
pub struct Cache {
    entries: Option<(Tensor, Tensor)>,
    /// Which of them can be seen, `[1, B, t]`; `None`: all.
    seen: Option<Tensor>,
}

impl Cache {
    /// Positions held.
    fn length(&self) -> usize {
        self.entries.as_ref().map_or(0, |(k, _)| k.dims()[2])
    }
}

/// The stack of blocks.
pub struct Blocks {
    /// Parameters of all layers.
    pub weights: BlockWeights,
    architecture: Arc<Architecture>,
    compute: Arc<Compute>,
    /// Tables of cos and sin.
    rotary: Option<(Tensor, Tensor)>,
}

impl Blocks {
    /// Fresh blocks for segments of up to `width` positions.
    pub fn new(make: &mut Maker, architecture: &Arc<Architecture>, width: usize) -> Result<Self> {
        let a = architecture.as_ref();
        let (l, d, heads, normal) = (a.layers, a.width, a.heads, Fill::Normal(a.init));
        let (attended, packed) = (heads.query * heads.size, (heads.query + 2 * heads.key) * heads.size);
        let up = if a.mlp == Mlp::SwiGlu { 2 * a.inner } else { a.inner };
        let weights = BlockWeights {
            norm1: NormWeights::new(make, "norm1", &[l, d], a.norm)?,
            qkv: LinearWeights::new(make, "qkv", [l, d, packed], a.attention_bias, normal)?,
            head_norms: match a.head_norms {
                true => {
                    let norm = |make: &mut Maker, name| NormWeights::new(make, name, &[l, heads.size], Norm::Rms);
                    Some((norm(make, "query_norm")?, norm(make, "key_norm")?))
                }
                false => None,
            },
            out: LinearWeights::new(make, "out", [l, attended, d], a.output_bias, normal)?,
            norm2: NormWeights::new(make, "norm2", &[l, d], a.norm)?,
            up: LinearWeights::new(make, "up", [l, d, up], a.mlp_bias, normal)?,
            down: LinearWeights::new(make, "down", [l, a.inner, d], a.mlp_bias, normal)?,
        };
        let rotary = match &a.positions {
            Positions::Learned(_) => None,
            // A window sees the previous segment too.
            Positions::Rotary(r) => Some(rotary::tables(r, 2 * width, make.compute().device())?),
        };
        Ok(Blocks { weights, architecture: architecture.clone(), compute: make.compute().clone(), rotary })
    }

    /// Its parameters, in a fixed order.
    pub fn params(&self) -> Vec<&Param> {
        let BlockWeights { norm1, qkv, head_norms, out, norm2, up, down } = &self.weights;
        let of_heads = head_norms.iter().flat_map(|(queries, keys)| queries.params().chain(keys.params()));
        let attention = norm1.params().chain(qkv.params()).chain(of_heads).chain(out.params());
        attention.chain(norm2.params()).chain(up.params()).chain(down.params()).collect()
    }

    /// Positions that there are for one segment.
    pub fn longest_segment(&self) -> usize {
        match (&self.architecture.positions, &self.rotary) {
            (Positions::Learned(rows), _) => *rows,
            // Half of the table is for the segment before, where a window sees it.
            (_, Some((cos, _))) => cos.dims()[0] / 2,
            (_, None) => usize::MAX,
        }
    }

    /// Numbers in a row of packed queries, keys and values.
    pub fn packed_width(&self) -> usize {
        let heads = self.architecture.heads;
        (heads.query + 2 * heads.key) * heads.size
    }

    /// The block within a segment.
    pub fn segment(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor, padding: Option<&Padding>) -> Result<Tensor> {
        Ok(self.run(tape, layers.clone(), x, Attend::Segment(padding))?.0)
    }

    /// The block within a segment, computed again when its gradient is asked for.
    pub fn segment_lean(
        self: &Arc<Self>,
        tape: &Tape,
        layers: &Range<usize>,
        x: &Tensor,
        padding: Option<&Padding>,
    ) -> Result<Tensor> {
        let (blocks, layers, padding) = (self.clone(), layers.clone(), padding.cloned());
        let mut y = tape.recompute(&[x], move |tape, x| {
            let y = blocks.segment(tape, &layers, &x[0], padding.as_ref());
            y.map(|y| vec![y]).map_err(Error::into_engine)
        })?;
        Ok(y.remove(0))
    }

    /// A cache that begins with the previous segment: its packed queries, keys and values before rotation, and its mask.
    pub fn window_cache(&self, qkv: &Tensor, seen: &Tensor) -> Result<Cache> {
        let (_, k, v) = self.split(&self.rotate(qkv, 0)?)?;
        Ok(Cache { entries: Some((k, v)), seen: Some(seen.clone()) })
    }

    /// Queries, keys and values of packed rows.
    fn split(&self, qkv: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let heads = self.architecture.heads;
        let (queries, keys) = (heads.query * heads.size, heads.key * heads.size);
        let axis = qkv.dims().len() - 1;
        let part = |from: usize, n: usize| ops::narrow(qkv, axis, from, n);
        Ok((part(0, queries)?, part(queries, keys)?, part(queries + keys, keys)?))
    }

    /// Runs layers `layers` on x `[n, B, T, d]`. The second result is the packed queries, keys and values before rotation.
    pub fn run(&self, tape: &Tape, layers: Range<usize>, x: &Tensor, attend: Attend<'_>) -> Result<(Tensor, Tensor)> {
        let qkv = self.packed(tape, &layers, x)?;
        let o = self.attend(&qkv, attend)?;
        Ok((self.after_attention(tape, &layers, x, &o)?, qkv))
    }

    /// Runs layers `layers` within a segment where of the last of them only the last m rows are wanted: the outputs `[n - 1, B, T, d]` of the
    /// layers before it, if there are any, and `[1, B, m, d]`.
    pub fn run_to_last_rows(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        x: &Tensor,
        padding: Option<&Padding>,
        m: usize,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let (heads, before) = (self.architecture.heads, layers.len() - 1);
        let [paddings, last_padding] = padding.map(|p| p.split(before)).transpose()?.map_or([None, None], |parts| parts.map(Some));
        // Parted here, where the gradient's two parts are put together in a third of the bytes that it would take after the product.
        let [xs, x] = ops::split_rows(x, before)?;
        let last = layers.end - 1..layers.end;
        let qkv = self.packed(tape, &last, &x)?;
        let qkv = last_padding.as_ref().map_or_else(|| self.rotate(&qkv, 0), |p| self.rotate_to(&qkv, &p.rows))?;
        let (q, k, v) = self.split(&qkv)?;
        let o = ops::attention_cached(&last_rows(&q, m)?, &k, &v, heads, last_padding.as_ref().map(|p| &p.mask))?;
        let tokens = self.after_attention(tape, &last, &last_rows(&x, m)?, &o)?;
        let attend = Attend::Segment(paddings.as_ref());
        let y = (before > 0).then(|| self.run(tape, layers.start..last.start, &xs, attend)).transpose()?;
        Ok((y.map(|(y, _)| y), tokens))
    }

    /// Packed queries, keys and values before rotation.
    fn packed(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor) -> Result<Tensor> {
        let h = self.norm(tape, &self.weights.norm1, layers, x)?;
        let qkv = self.linear(tape, &self.weights.qkv, layers, &h, Linear::default())?;
        let Some((queries, keys)) = &self.weights.head_norms else { return Ok(qkv) };
        let (q, k, v) = self.split(&qkv)?;
        let normed = |x: &Tensor, norm: &NormWeights| -> Result<Tensor> {
            let (dims, size) = (x.dims().to_vec(), self.architecture.heads.size);
            let rows = ops::reshape(x, [dims[0], dims[1], dims[2] * (dims[3] / size), size])?; // [n, B, T H, size]
            let gain = tape.param_rows(&norm.gain, layers.clone())?;
            Ok(ops::reshape(&ops::rms_norm(&rows, &gain, self.architecture.eps)?, &dims[..])?)
        };
        Ok(ops::concat(&[&normed(&q, queries)?, &normed(&k, keys)?, &v], 3)?)
    }

    /// The block's outputs from what attention gave for x.
    fn after_attention(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor, o: &Tensor) -> Result<Tensor> {
        let w = &self.weights;
        let plain = Linear::default();
        let h = self.linear(tape, &w.out, layers, o, Linear { residual: Some(x), ..plain })?;
        let from = if self.architecture.parallel { x } else { &h };
        let u = self.norm(tape, &w.norm2, layers, from)?;
        let u = match self.architecture.mlp {
            Mlp::Gelu => self.linear(tape, &w.up, layers, &u, Linear { activation: Activation::Gelu, ..plain })?,
            Mlp::GeluErf => ops::gelu_erf(&self.linear(tape, &w.up, layers, &u, plain)?)?,
            Mlp::SwiGlu => ops::swiglu(&self.linear(tape, &w.up, layers, &u, plain)?)?,
        };
        // The diagonal schedule puts the next segment in front.
        self.linear(tape, &w.down, layers, &u, Linear { residual: Some(&h), room: true, ..plain })
    }

    fn norm(&self, tape: &Tape, norm: &NormWeights, layers: &Range<usize>, x: &Tensor) -> Result<Tensor> {
        let gain = tape.param_rows(&norm.gain, layers.clone())?;
        apply_norm(
            &self.architecture,
            x,
            &gain,
            norm.bias.as_ref().map(|b| tape.param_rows(b, layers.clone())).transpose()?.as_ref(),
        )
    }

    fn linear(&self, tape: &Tape, linear: &LinearWeights, layers: &Range<usize>, x: &Tensor, with: Linear<'_>) -> Result<Tensor> {
        let bias = linear.bias.as_ref().map(|b| tape.param_rows(b, layers.clone())).transpose()?;
        Ok(tape.linear_rows(x, &linear.weight, layers.clone(), Linear { bias: bias.as_ref(), ..with })?)
    }

    /// Rotates queries and keys to the positions `rows` of each of n segments.
    fn rotate_to(&self, qkv: &Tensor, rows: &Tensor) -> Result<Tensor> {
        let Some((cos, sin)) = &self.rotary else { return Ok(qkv.clone()) };
        let (cos, sin) = (ops::embedding(cos, rows)?, ops::embedding(sin, rows)?); // [n, T, dims / 2]
        Ok(ops::rotary(qkv, self.architecture.heads, &cos, &sin)?)
    }

    /// Rotates queries and keys whose first row has position `from`.
    fn rotate(&self, qkv: &Tensor, from: usize) -> Result<Tensor> {
        let Some((cos, sin)) = &self.rotary else { return Ok(qkv.clone()) };
        let rows = from..from + qkv.dims()[qkv.dims().len() - 2];
        Ok(ops::rotary(qkv, self.architecture.heads, &ops::rows(cos, rows.clone())?, &ops::rows(sin, rows)?)?)
    }

    fn attend(&self, qkv: &Tensor, attend: Attend<'_>) -> Result<Tensor> {
        let heads = self.architecture.heads;
        match attend {
            Attend::Segment(None) => Ok(ops::attention(&self.rotate(qkv, 0)?, heads, None)?),
            Attend::Segment(Some(p)) => Ok(ops::attention(&self.rotate_to(qkv, &p.rows)?, heads, Some(&p.mask))?),
            Attend::Window(previous, p) => {
                let t = previous.dims()[2];
                let (q, k, v) = self.split(&self.rotate_to(&ops::concat(&[previous, qkv], 2)?, &p.rows)?)?;
                let q = ops::narrow(&q, 2, t, qkv.dims()[2])?;
                Ok(ops::attention_cached(&q, &k, &v, heads, Some(&p.mask))?)
            }
            Attend::Cached(cache) => {
                let (q, mut k, mut v) = self.split(&self.rotate(qkv, cache.length())?)?;
                if let Some((old_k, old_v)) = &cache.entries {
                    k = ops::concat(&[old_k, &k], 2)?;
                    v = ops::concat(&[old_v, &v], 2)?;
                }
                if let Some(seen) = &cache.seen {
                    let new = Tensor::from_slice(&vec![1i32; qkv.shape().rows()], &qkv.dims()[..3], self.compute.device())?;
                    cache.seen = Some(ops::concat(&[seen, &new], 2)?);
                }
                cache.entries = Some((k.clone(), v.clone()));
                Ok(ops::attention_cached(&q, &k, &v, heads, cache.seen.as_ref())?)
            }
        }
    }
}

pub(super) fn apply_norm(a: &Architecture, x: &Tensor, gain: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    Ok(match (a.norm, bias) {
        (Norm::Layer, Some(bias)) => ops::layer_norm(x, gain, bias, a.eps)?,
        _ => ops::rms_norm(x, gain, a.eps)?,
    })
}

/// The last m rows of `[n, B, T, ..]`.
pub fn last_rows(x: &Tensor, m: usize) -> Result<Tensor> {
    Ok(ops::narrow(x, 2, x.dims()[2] - m, m)?)
}
