//! A model's parameters. Those of layers are stacked on a leading axis `[L, ...]`, so that any range of layers can run as one batched
//! block. Matrices are stored `[in, out]`.

use armt_engine::{DType, Device, Param, Tensor};

use crate::config::{Backbone, Config, MemoryConfig, Mlp, Norm, Positions};
use crate::error::Result;
use crate::random::Random;

/// A norm's gain, and bias where it has one.
pub struct NormWeights {
    /// `[L, d]`, or `[d]` for the last norm.
    pub gain: Param,
    /// The same shape.
    pub bias: Option<Param>,
}

/// A linear layer's matrix and bias.
pub struct LinearWeights {
    /// `[L, in, out]`.
    pub weight: Param,
    /// `[L, out]`.
    pub bias: Option<Param>,
}

/// The associative memory's maps (equations 1 and 4 of the paper).
pub struct AssociativeWeights {
    /// W_Q, `[L, d, d_mem]`.
    pub query: Param,
    /// W_K, `[L, d, d_mem]`.
    pub key: Param,
    /// W_V, `[L, d, d]`. Zero at first.
    pub value: Param,
    /// W_beta, `[L, d, 1]`.
    pub beta: Param,
    /// Its bias, `[L, 1]`.
    pub beta_bias: Param,
}

/// All parameters.
pub struct Weights {
    /// Token embeddings `[V, d]`.
    pub embed: Param,
    /// Learned positions, memory rows included.
    pub positions: Option<Param>,
    /// Memory tokens `[m, d]`.
    pub memory: Option<Param>,
    /// Norm before attention.
    pub norm1: NormWeights,
    /// Queries, keys and values of all heads, packed: `[L, d, (H + 2 Hk) size]`.
    pub qkv: LinearWeights,
    /// Attention's output, `[L, H size, d]`.
    pub out: LinearWeights,
    /// Norm before the feed-forward part.
    pub norm2: NormWeights,
    /// `[L, d, f]`, or `[L, d, 2 f]` as gate and up.
    pub up: LinearWeights,
    /// `[L, f, d]`.
    pub down: LinearWeights,
    /// ARMT's maps.
    pub associative: Option<AssociativeWeights>,
    /// PRMT's first memory `[L, m, d]`.
    pub layer_memory: Option<Param>,
    /// Norm after the last layer.
    pub last_norm: NormWeights,
    /// Output head `[V, d]`, unless it is the embedding.
    pub head: Option<Param>,
}

/// Rows of the table of learned positions.
pub(crate) fn position_rows(config: &Config, rows: usize) -> usize {
    let around = config.memory.tokens_before() + config.memory.tokens_after();
    rows + if config.memory.wrap_pos() { around } else { 0 }
}

impl Weights {
    /// Fresh parameters: the backbone's as its family initialises them, the memory's as the authors do. Without a seed all are zero, to be
    /// set.
    pub fn fresh(config: &Config, b: &Backbone, seed: Option<u64>, compute: DType, device: &Device) -> Result<Self> {
        let mut random = seed.map(Random::new);
        let (l, d) = (b.layers, b.width);
        let mut make = |name: &str, shape: &[usize], fill: Fill| -> Result<Param> {
            let n: usize = shape.iter().product();
            let data: Vec<f32> = match (&mut random, fill) {
                (None, _) => vec![0.0; n],
                (Some(random), Fill::Normal(deviation)) => random.many(n, 2, |r| (deviation * r.normal()) as f32),
                (Some(random), Fill::Uniform(bound)) => random.many(n, 1, |r| (bound * (2.0 * r.uniform() - 1.0)) as f32),
                (_, Fill::Value(value)) => vec![value; n],
            };
            Ok(Param::new(name, &Tensor::from_slice(&data, shape, device)?, compute)?)
        };
        let heads = b.heads;
        let packed = (heads.query + 2 * heads.key) * heads.size;
        let up = if b.mlp == Mlp::SwiGlu { 2 * b.inner } else { b.inner };
        let normal = Fill::Normal(b.init);
        let embed = make("embed", &[b.vocab, d], normal)?;
        // The authors take memory tokens from the embedding's spread, and new position rows from a standard normal.
        let positions = match b.positions {
            Positions::Learned(rows) => Some(make("positions", &[position_rows(config, rows), d], normal)?),
            Positions::Rotary(_) => None,
        };
        let memory = match config.memory.tokens_after() {
            0 => None,
            m => Some(make("memory", &[m, d], normal)?),
        };
        let mut norm = |name: &str, shape: &[usize]| -> Result<NormWeights> {
            let bias = (b.norm == Norm::Layer).then(|| make(&format!("{name}.bias"), shape, Fill::Value(0.0))).transpose()?;
            Ok(NormWeights { gain: make(&format!("{name}.gain"), shape, Fill::Value(1.0))?, bias })
        };
        let (norm1, norm2, last_norm) = (norm("norm1", &[l, d])?, norm("norm2", &[l, d])?, norm("last_norm", &[d])?);
        let mut linear = |name: &str, input: usize, output: usize, bias: bool| -> Result<LinearWeights> {
            let bias = bias.then(|| make(&format!("{name}.bias"), &[l, output], Fill::Value(0.0))).transpose()?;
            Ok(LinearWeights { weight: make(&format!("{name}.weight"), &[l, input, output], normal)?, bias })
        };
        let qkv = linear("qkv", d, packed, b.attention_bias)?;
        let out = linear("out", heads.query * heads.size, d, b.attention_bias)?;
        let up = linear("up", d, up, b.mlp_bias)?;
        let down = linear("down", b.inner, d, b.mlp_bias)?;
        let associative = match &config.memory {
            MemoryConfig::Associative(a) => {
                // PyTorch's default for a linear layer: uniform within 1 / sqrt(in).
                let uniform = Fill::Uniform(1.0 / (d as f64).sqrt());
                Some(AssociativeWeights {
                    query: make("assoc.query", &[l, d, a.d_mem], uniform)?,
                    key: make("assoc.key", &[l, d, a.d_mem], uniform)?,
                    value: make("assoc.value", &[l, d, d], Fill::Value(0.0))?,
                    beta: make("assoc.beta", &[l, d, 1], uniform)?,
                    beta_bias: make("assoc.beta_bias", &[l, 1], uniform)?,
                })
            }
            _ => None,
        };
        let layer_memory = match &config.memory {
            MemoryConfig::Prmt { tokens, .. } => Some(make("layer_memory", &[l, *tokens, d], Fill::Normal(1.0))?),
            _ => None,
        };
        let head = (!b.tied).then(|| make("head", &[b.vocab, d], normal)).transpose()?;
        Ok(Weights { embed, positions, memory, norm1, qkv, out, norm2, up, down, associative, layer_memory, last_norm, head })
    }

    /// Every parameter, in a fixed order.
    pub fn params(&self) -> Vec<&Param> {
        fn norm(n: &NormWeights) -> impl Iterator<Item = &Param> {
            [Some(&n.gain), n.bias.as_ref()].into_iter().flatten()
        }
        fn linear(l: &LinearWeights) -> impl Iterator<Item = &Param> {
            [Some(&l.weight), l.bias.as_ref()].into_iter().flatten()
        }
        let mut all: Vec<&Param> = vec![&self.embed];
        all.extend([&self.positions, &self.memory].into_iter().flatten());
        for (n, l) in [(&self.norm1, [&self.qkv, &self.out]), (&self.norm2, [&self.up, &self.down])] {
            all.extend(norm(n));
            l.into_iter().for_each(|l| all.extend(linear(l)));
        }
        if let Some(a) = &self.associative {
            all.extend([&a.query, &a.key, &a.value, &a.beta, &a.beta_bias]);
        }
        all.extend(&self.layer_memory);
        all.extend(norm(&self.last_norm));
        all.extend(&self.head);
        all
    }

    /// The output head: its own, or the embedding.
    pub fn head(&self) -> &Param {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

#[derive(Clone, Copy)]
enum Fill {
    Normal(f64),
    Uniform(f64),
    Value(f32),
}
