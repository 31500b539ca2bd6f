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
    /// How frequencies are slowed for contexts that are longer than those of the first training.
    pub scaling: Option<Scaling>,
}

/// Ways of slowing rotary frequencies, by the names that Hugging Face has for them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// `linear`: all by this factor.
    Linear(f64),
    /// `llama3`: low frequencies only.
    Llama3(Llama3Scaling),
    /// `yarn`: low frequencies, along a ramp, and attention made sharper.
    Yarn(YarnScaling),
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

/// YaRN's rotary scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnScaling {
    /// How much slower low frequencies turn.
    pub factor: f64,
    /// Frequencies of more turns than this within the original context are left alone.
    pub fast: f64,
    /// Those of fewer turns than this are slowed fully.
    pub slow: f64,
    /// Context length of the original training.
    pub original: f64,
    /// What cos and sin are multiplied by.
    pub attention: f64,
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
    /// Biases in the projections to queries, keys and values.
    pub attention_bias: bool,
    /// Biases in attention's output.
    pub output_bias: bool,
    /// RMS norms of each head's queries and keys, before they are rotated (Qwen3).
    pub head_norms: bool,
    /// Positions before it that a token sees, itself among them, where not all (Mistral).
    pub sliding_window: Option<usize>,
    /// Biases in the feed-forward part.
    pub mlp_bias: bool,
    /// Standard deviation of fresh weights.
    pub init: f64,
}
