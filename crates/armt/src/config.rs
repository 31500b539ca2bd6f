//! One configuration of a model: backbone, memory, segments. It is what `config.json` of a model folder holds.
//!
//! The backbone part is a Hugging Face configuration, kept as it came (those have many keys that do not matter here); it is checked into
//! a [`Backbone`] that knows only what the computation needs. Our own parts refuse unknown keys.

use std::path::Path;

use armt_engine::ops::Heads;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};

/// `config.json` of a model folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Always `armt`: tells our folders from those of plain backbones.
    pub model_type: ModelType,
    /// Ordinary tokens in a segment.
    pub segment_size: usize,
    /// Where a text that does not fill its segments is short.
    #[serde(default)]
    pub segment_alignment: Alignment,
    /// What `armt ask` puts after a question, if anything: the model was trained to answer after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_question: Option<String>,
    /// What is kept between segments.
    pub memory: MemoryConfig,
    /// The transformer, as Hugging Face describes it.
    pub backbone: Value,
}

/// The one value that `model_type` has in our folders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Ours.
    #[default]
    Armt,
}

/// How a text is cut into segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Alignment {
    /// From the start; the last segment may be short.
    #[default]
    Left,
    /// From the end; the first segment may be short.
    Right,
    /// Into pieces of nearly equal length.
    Center,
}

/// What is kept between segments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum MemoryConfig {
    /// Nothing: each segment is read on its own, or sees the previous one.
    None {
        /// Attend to the previous segment's keys and values, without gradient.
        #[serde(default)]
        sliding_window: bool,
    },
    /// ARMT: an associative matrix in each layer.
    Associative(Associative),
    /// RMT: the last layer's memory tokens go to the next segment's input.
    Rmt {
        /// Memory tokens.
        tokens: usize,
        /// GPT-2 only: memory tokens have position rows of their own.
        #[serde(default)]
        wrap_pos: bool,
    },
    /// PRMT: each layer's memory tokens go to the same layer of the next segment.
    Prmt {
        /// Memory tokens.
        tokens: usize,
        /// GPT-2 only: memory tokens have position rows of their own.
        #[serde(default)]
        wrap_pos: bool,
    },
}

/// The associative memory's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Associative {
    /// Memory tokens of a segment. 16 in the paper's BABILong experiments.
    pub tokens: usize,
    /// Width of keys and queries before DPFP. 64 for GPT-2, 32 or 64 for retrieval.
    pub d_mem: usize,
    /// DPFP's number of rolled products. The paper's is 3.
    #[serde(default = "three")]
    pub nu: usize,
    /// Gamma-correction of the normalisation vector. On in the paper; off is its ablation.
    #[serde(default = "yes")]
    pub correction: bool,
    /// GPT-2 only: memory tokens have position rows of their own, the last of the table.
    #[serde(default)]
    pub wrap_pos: bool,
    /// Layers that have a memory; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_layers: Option<Vec<usize>>,
}

fn three() -> usize {
    3
}

fn yes() -> bool {
    true
}

impl MemoryConfig {
    /// Memory tokens before the text: RMT and PRMT read theirs there.
    pub fn tokens_before(&self) -> usize {
        match self {
            MemoryConfig::Rmt { tokens, .. } | MemoryConfig::Prmt { tokens, .. } => *tokens,
            MemoryConfig::None { .. } | MemoryConfig::Associative(_) => 0,
        }
    }

    /// Memory tokens after the text.
    pub fn tokens_after(&self) -> usize {
        match self {
            MemoryConfig::None { .. } => 0,
            MemoryConfig::Associative(a) => a.tokens,
            MemoryConfig::Rmt { tokens, .. } | MemoryConfig::Prmt { tokens, .. } => *tokens,
        }
    }

    /// Whether memory tokens have rows of their own in a table of learned positions.
    pub fn wrap_pos(&self) -> bool {
        match self {
            MemoryConfig::None { .. } => false,
            MemoryConfig::Associative(a) => a.wrap_pos,
            MemoryConfig::Rmt { wrap_pos, .. } | MemoryConfig::Prmt { wrap_pos, .. } => *wrap_pos,
        }
    }

    /// The name that `kind` has in the file.
    pub fn kind(&self) -> &'static str {
        match self {
            MemoryConfig::None { .. } => "none",
            MemoryConfig::Associative(_) => "associative",
            MemoryConfig::Rmt { .. } => "rmt",
            MemoryConfig::Prmt { .. } => "prmt",
        }
    }
}

/// The families of backbones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GPT-2.
    Gpt2,
    /// GPT-NeoX and Pythia.
    GptNeoX,
    /// Llama.
    Llama,
}

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

/// A checked backbone: what the computation needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Backbone {
    /// Which family, for names of tensors.
    pub family: Family,
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

/// Reads values of a Hugging Face configuration, with errors that name the key.
struct Reader<'a>(&'a Value);

impl Reader<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn size(&self, key: &str) -> Result<usize> {
        let value = self.get(key).ok_or_else(|| Error::config(key, "a positive integer", "nothing"))?;
        value.as_u64().filter(|n| *n > 0).map(|n| n as usize).ok_or_else(|| Error::config(key, "a positive integer", value))
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        self.get(key).map_or(Ok(default), |v| v.as_f64().ok_or_else(|| Error::config(key, "a number", v)))
    }

    fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        self.get(key).map_or(Ok(default), |v| v.as_bool().ok_or_else(|| Error::config(key, "true or false", v)))
    }

    fn text_or<'s>(&'s self, key: &str, default: &'s str) -> Result<&'s str> {
        self.get(key).map_or(Ok(default), |v| v.as_str().ok_or_else(|| Error::config(key, "a string", v)))
    }
}

impl Backbone {
    /// Checks a Hugging Face configuration of GPT-2, GPT-NeoX or Llama.
    pub fn from_hugging_face(config: &Value) -> Result<Self> {
        let r = Reader(config);
        match r.text_or("model_type", "")? {
            "gpt2" => Self::gpt2(&r),
            "gpt_neox" => Self::gpt_neox(&r),
            "llama" => Self::llama(&r),
            other => Err(Error::config("model_type", "gpt2, gpt_neox or llama", other)),
        }
    }

    fn gpt2(r: &Reader<'_>) -> Result<Self> {
        let (width, heads) = (r.size("n_embd")?, r.size("n_head")?);
        for key in ["scale_attn_by_inverse_layer_idx", "add_cross_attention"] {
            if r.flag_or(key, false)? {
                return Err(Error::config(key, "false", true));
            }
        }
        if !r.flag_or("scale_attn_weights", true)? {
            return Err(Error::config("scale_attn_weights", "true", false));
        }
        Ok(Backbone {
            family: Family::Gpt2,
            vocab: r.size("vocab_size")?,
            width,
            layers: r.size("n_layer")?,
            heads: heads_of(width, heads, heads, None)?,
            inner: r.size_or("n_inner", 4 * width)?,
            norm: Norm::Layer,
            eps: r.number_or("layer_norm_epsilon", 1e-5)? as f32,
            positions: Positions::Learned(r.size("n_positions")?),
            mlp: gelu_of("activation_function", r.text_or("activation_function", "gelu_new")?)?,
            parallel: false,
            tied: r.flag_or("tie_word_embeddings", true)?,
            attention_bias: true,
            mlp_bias: true,
            init: r.number_or("initializer_range", 0.02)?,
        })
    }

    fn gpt_neox(r: &Reader<'_>) -> Result<Self> {
        let (width, heads) = (r.size("hidden_size")?, r.size("num_attention_heads")?);
        let heads = heads_of(width, heads, heads, None)?;
        // Older files have rotary_pct and rotary_emb_base, newer ones rope_parameters.
        let rope = Reader(r.get("rope_parameters").unwrap_or(&Value::Null));
        match rope.text_or("rope_type", "default")? {
            "default" => {}
            other => return Err(Error::config("rope_parameters.rope_type", "default", other)),
        }
        let share = rope.number_or("partial_rotary_factor", r.number_or("rotary_pct", 0.25)?)?;
        let theta = rope.number_or("rope_theta", r.number_or("rotary_emb_base", 10_000.0)?)?;
        let dims = (heads.size as f64 * share) as usize;
        Ok(Backbone {
            family: Family::GptNeoX,
            vocab: r.size("vocab_size")?,
            width,
            layers: r.size("num_hidden_layers")?,
            heads,
            inner: r.size("intermediate_size")?,
            norm: Norm::Layer,
            eps: r.number_or("layer_norm_eps", 1e-5)? as f32,
            positions: Positions::Rotary(rotary_of(theta, dims, heads.size, None)?),
            mlp: gelu_of("hidden_act", r.text_or("hidden_act", "gelu")?)?,
            parallel: r.flag_or("use_parallel_residual", true)?,
            tied: r.flag_or("tie_word_embeddings", false)?,
            attention_bias: r.flag_or("attention_bias", true)?,
            mlp_bias: true,
            init: r.number_or("initializer_range", 0.02)?,
        })
    }

    fn llama(r: &Reader<'_>) -> Result<Self> {
        let (width, heads) = (r.size("hidden_size")?, r.size("num_attention_heads")?);
        let key_heads = r.size_or("num_key_value_heads", heads)?;
        let size = if r.get("head_dim").is_some() { Some(r.size("head_dim")?) } else { None };
        let heads = heads_of(width, heads, key_heads, size)?;
        match r.text_or("hidden_act", "silu")? {
            "silu" | "swish" => {}
            other => return Err(Error::config("hidden_act", "silu", other)),
        }
        let rope = Reader(r.get("rope_parameters").unwrap_or(&Value::Null));
        let theta = rope.number_or("rope_theta", r.number_or("rope_theta", 10_000.0)?)?;
        let scaled = Reader(r.get("rope_scaling").or(r.get("rope_parameters")).unwrap_or(&Value::Null));
        let kind = scaled.text_or("rope_type", scaled.text_or("type", "default")?)?;
        let scaling = match kind {
            "default" => None,
            "llama3" => Some(Llama3Scaling {
                factor: scaled.number_or("factor", 8.0)?,
                low: scaled.number_or("low_freq_factor", 1.0)?,
                high: scaled.number_or("high_freq_factor", 4.0)?,
                original: scaled.number_or("original_max_position_embeddings", 8192.0)?,
            }),
            other => return Err(Error::config("rope_scaling.rope_type", "default or llama3", other)),
        };
        Ok(Backbone {
            family: Family::Llama,
            vocab: r.size("vocab_size")?,
            width,
            layers: r.size("num_hidden_layers")?,
            heads,
            inner: r.size("intermediate_size")?,
            norm: Norm::Rms,
            eps: r.number_or("rms_norm_eps", 1e-6)? as f32,
            positions: Positions::Rotary(rotary_of(theta, heads.size, heads.size, scaling)?),
            mlp: Mlp::SwiGlu,
            parallel: false,
            tied: r.flag_or("tie_word_embeddings", false)?,
            attention_bias: r.flag_or("attention_bias", false)?,
            mlp_bias: r.flag_or("mlp_bias", false)?,
            init: r.number_or("initializer_range", 0.02)?,
        })
    }
}

fn heads_of(width: usize, query: usize, key: usize, size: Option<usize>) -> Result<Heads> {
    if size.is_none() && !width.is_multiple_of(query) {
        return Err(Error::config("the number of heads", &format!("a divisor of the width {width}"), query));
    }
    if !query.is_multiple_of(key) {
        return Err(Error::config("num_key_value_heads", &format!("a divisor of {query}"), key));
    }
    Ok(Heads { query, key, size: size.unwrap_or(width / query) })
}

fn rotary_of(theta: f64, dims: usize, size: usize, scaling: Option<Llama3Scaling>) -> Result<Rotary> {
    if !dims.is_multiple_of(2) || dims > size {
        return Err(Error::config("rotary dimensions", &format!("an even number up to {size}"), dims));
    }
    if theta <= 0.0 {
        return Err(Error::config("rope_theta", "a positive number", theta));
    }
    Ok(Rotary { theta, dims, scaling })
}

fn gelu_of(key: &str, name: &str) -> Result<Mlp> {
    match name {
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Mlp::Gelu),
        "gelu" => Ok(Mlp::GeluErf),
        other => Err(Error::config(key, "gelu, gelu_new, gelu_fast or gelu_pytorch_tanh", other)),
    }
}

impl Config {
    /// Reads and checks `config.json` of a folder.
    pub fn load(folder: &Path) -> Result<(Self, Backbone)> {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let config: Config = serde_json::from_str(&text).map_err(|e| Error::file(&path, e))?;
        let backbone = config.check().map_err(|e| Error::file(&path, e))?;
        Ok((config, backbone))
    }

    /// Checks that the parts fit together, and gives the checked backbone.
    pub fn check(&self) -> Result<Backbone> {
        let backbone = Backbone::from_hugging_face(&self.backbone)?;
        if self.segment_size == 0 {
            return Err(Error::config("segment_size", "at least 1", 0));
        }
        let around = self.memory.tokens_before() + self.memory.tokens_after();
        if !matches!(self.memory, MemoryConfig::None { .. }) && self.memory.tokens_after() == 0 {
            return Err(Error::config("memory.tokens", "at least 1", 0));
        }
        match backbone.positions {
            Positions::Learned(rows) => {
                let needed = self.segment_size + if self.memory.wrap_pos() { 0 } else { around };
                if needed > rows {
                    let expected = format!("at most {rows} positions for a segment and its memory tokens");
                    return Err(Error::config("segment_size", &expected, needed));
                }
            }
            Positions::Rotary(_) if self.memory.wrap_pos() => {
                return Err(Error::config("memory.wrap_pos", "false: only GPT-2 has a table of positions", true));
            }
            Positions::Rotary(_) => {}
        }
        if let MemoryConfig::Associative(a) = &self.memory {
            if a.d_mem == 0 || a.nu == 0 || a.nu >= 2 * a.d_mem {
                return Err(Error::config("memory", "d_mem >= 1 and 1 <= nu < 2 d_mem", format!("d_mem {}, nu {}", a.d_mem, a.nu)));
            }
            if let Some(bad) = a.memory_layers.iter().flatten().find(|l| **l >= backbone.layers) {
                return Err(Error::config("memory.memory_layers", &format!("layers below {}", backbone.layers), bad));
            }
        }
        Ok(backbone)
    }
}
