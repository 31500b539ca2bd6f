//! One transformer block, for a range of layers at once: x `[n, B, T, d]`, weights of n layers.
//!
//! ```text
//! GPT-2, Llama:        h = x + attention(norm1 x);   y = h + mlp(norm2 h)
//! GPT-NeoX (parallel): y = x + attention(norm1 x) + mlp(norm2 x)
//! ```

use std::ops::Range;

use armt_engine::ops::{self, Activation, Linear};
use armt_engine::{Tape, Tensor};

use super::weights::{LinearWeights, NormWeights};
use super::{Model, Padding};
use crate::config::{Mlp, Norm};
use crate::error::Result;
use crate::memory::last_rows;

/// What a block's queries may see.
pub(crate) enum Attend<'a> {
    /// The segment itself, but for its padding.
    Segment(Option<&'a Padding>),
    /// The previous segment too: its packed queries, keys and values `[n, B, T, ..]` before rotation, and the padding of both.
    Window(&'a Tensor, &'a Padding),
    /// Everything since the segment's start, kept in a cache.
    Cached(&'a mut Cache),
}

/// Keys and values of one layer since the segment's start, `[1, B, t, Hk size]`, after those of a window where there is one.
#[derive(Clone, Default)]
pub(crate) struct Cache {
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

impl Model {
    /// A cache that begins with the previous segment: its packed queries, keys and values before rotation, and its mask.
    pub(crate) fn window_cache(&self, qkv: &Tensor, seen: &Tensor) -> Result<Cache> {
        let (_, k, v) = self.split(&self.rotate(qkv, 0)?)?;
        Ok(Cache { entries: Some((k, v)), seen: Some(seen.clone()) })
    }

    /// Queries, keys and values of packed rows.
    fn split(&self, qkv: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let heads = self.backbone.heads;
        let (queries, keys) = (heads.query * heads.size, heads.key * heads.size);
        let axis = qkv.dims().len() - 1;
        let part = |from: usize, n: usize| ops::narrow(qkv, axis, from, n);
        Ok((part(0, queries)?, part(queries, keys)?, part(queries + keys, keys)?))
    }

    /// Runs layers `layers` on x `[n, B, T, d]`. The second result is the packed queries, keys and values before rotation.
    pub(crate) fn block(&self, tape: &Tape, layers: Range<usize>, x: &Tensor, attend: Attend<'_>) -> Result<(Tensor, Tensor)> {
        let qkv = self.packed(tape, &layers, x)?;
        let o = self.attend(&qkv, attend)?;
        Ok((self.after_attention(tape, &layers, x, &o)?, qkv))
    }

    /// The same within a segment, where of the last of the layers only the memory tokens' rows are wanted: the outputs `[n - 1, B, T, d]` of
    /// the layers before it, if there are any, and `[1, B, m, d]`.
    pub(crate) fn block_to_memory(
        &self,
        tape: &Tape,
        layers: Range<usize>,
        x: &Tensor,
        padding: Option<&Padding>,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let (heads, before, m) = (self.backbone.heads, layers.len() - 1, self.config.memory.tokens_after());
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
        let y = (before > 0).then(|| self.block(tape, layers.start..last.start, &xs, attend)).transpose()?;
        Ok((y.map(|(y, _)| y), tokens))
    }

    /// Packed queries, keys and values before rotation.
    fn packed(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor) -> Result<Tensor> {
        let h = self.norm(tape, &self.weights.norm1, layers, x)?;
        self.linear(tape, &self.weights.qkv, layers, &h, Linear::default())
    }

    /// The block's outputs from what attention gave for x.
    fn after_attention(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor, o: &Tensor) -> Result<Tensor> {
        let w = &self.weights;
        let plain = Linear::default();
        let h = self.linear(tape, &w.out, layers, o, Linear { residual: Some(x), ..plain })?;
        let from = if self.backbone.parallel { x } else { &h };
        let u = self.norm(tape, &w.norm2, layers, from)?;
        let u = match self.backbone.mlp {
            Mlp::Gelu => self.linear(tape, &w.up, layers, &u, Linear { activation: Activation::Gelu, ..plain })?,
            Mlp::GeluErf => ops::gelu_erf(&self.linear(tape, &w.up, layers, &u, plain)?)?,
            Mlp::SwiGlu => ops::swiglu(&self.linear(tape, &w.up, layers, &u, plain)?)?,
        };
        // The diagonal schedule puts the next segment in front.
        self.linear(tape, &w.down, layers, &u, Linear { residual: Some(&h), room: true, ..plain })
    }

    fn norm(&self, tape: &Tape, norm: &NormWeights, layers: &Range<usize>, x: &Tensor) -> Result<Tensor> {
        let gain = tape.param_rows(&norm.gain, layers.clone())?;
        self.apply_norm(x, &gain, norm.bias.as_ref().map(|b| tape.param_rows(b, layers.clone())).transpose()?.as_ref())
    }

    pub(crate) fn apply_norm(&self, x: &Tensor, gain: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        Ok(match (self.backbone.norm, bias) {
            (Norm::Layer, Some(bias)) => ops::layer_norm(x, gain, bias, self.backbone.eps)?,
            _ => ops::rms_norm(x, gain, self.backbone.eps)?,
        })
    }

    fn linear(&self, tape: &Tape, linear: &LinearWeights, layers: &Range<usize>, x: &Tensor, with: Linear<'_>) -> Result<Tensor> {
        let weight = tape.param_rows(&linear.weight, layers.clone())?;
        let bias = linear.bias.as_ref().map(|b| tape.param_rows(b, layers.clone())).transpose()?;
        Ok(ops::linear(x, &weight, Linear { bias: bias.as_ref(), ..with })?)
    }

    /// Rotates queries and keys to the positions `rows` of each of n segments.
    fn rotate_to(&self, qkv: &Tensor, rows: &Tensor) -> Result<Tensor> {
        let Some((cos, sin)) = &self.rotary else { return Ok(qkv.clone()) };
        let (cos, sin) = (ops::embedding(cos, rows)?, ops::embedding(sin, rows)?); // [n, T, dims / 2]
        Ok(ops::rotary(qkv, self.backbone.heads, &cos, &sin)?)
    }

    /// Rotates queries and keys whose first row has position `from`.
    fn rotate(&self, qkv: &Tensor, from: usize) -> Result<Tensor> {
        let Some((cos, sin)) = &self.rotary else { return Ok(qkv.clone()) };
        let rows = from..from + qkv.dims()[qkv.dims().len() - 2];
        Ok(ops::rotary(qkv, self.backbone.heads, &ops::rows(cos, rows.clone())?, &ops::rows(sin, rows)?)?)
    }

    fn attend(&self, qkv: &Tensor, attend: Attend<'_>) -> Result<Tensor> {
        let heads = self.backbone.heads;
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
                    let new = Tensor::from_slice(&vec![1i32; qkv.shape().rows()], &qkv.dims()[..3], &self.device)?;
                    cache.seen = Some(ops::concat(&[seen, &new], 2)?);
                }
                cache.entries = Some((k.clone(), v.clone()));
                Ok(ops::attention_cached(&q, &k, &v, heads, cache.seen.as_ref())?)
            }
        }
    }
}
