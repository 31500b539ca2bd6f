//! What a transformer is made of: the numbers and choices that the computation needs to know, whichever family they come from.

use armt_engine::ops::Heads;

/// Norms of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// Layer norm with gain and bias.
    Layer,
    /// RMS norm with gain.
    Rms,
}

/// How positions enter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    /// A learned table of this many rows, memory positions not counted.
    Learned(usize),
    /// Rotary embedding.
    Rotary(Rotary),
}

/// Rotary embedding's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions of each head, from its first.
    pub dims: usize,
    /// Llama 3's scaling of low frequencies.
    pub scaling: Option<Llama3Scaling>,
}

/// Llama 3's rotary scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// How much slower low frequencies turn.
    pub factor: f64,
    /// Wave lengths above `original / low` are slowed fully.
    pub low: f64,
    /// Wave lengths below `original / high` are left alone.
    pub high: f64,
    /// Context length of the original training.
    pub original: f64,
}

/// The feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// Two layers with GELU in its tanh form.
    Gelu,
    /// Two layers with GELU in its exact form.
    GeluErf,
    /// Gate, up and down with SiLU.
    SwiGlu,
}

/// The architecture of a backbone, checked: what the computation needs to know.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Architecture {
    /// Tokens.
    pub vocab: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Heads of attention.
    pub heads: Heads,
    /// Inner width of the feed-forward part.
    pub inner: usize,
    /// Norms.
    pub norm: Norm,
    /// Added to the variance in norms.
    pub eps: f32,
    /// Positions.
    pub positions: Positions,
    /// Feed-forward part.
    pub mlp: Mlp,
    /// Attention and feed-forward both read the block's input (GPT-NeoX).
    pub parallel: bool,
    /// The head is the embedding table.
    pub tied: bool,
    /// Biases in attention's projections.
    pub attention_bias: bool,
    /// Biases in the feed-forward part.
    pub mlp_bias: bool,
    /// Standard deviation of fresh weights.
    pub init: f64,
}
