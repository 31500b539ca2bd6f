//! Llama: rotary positions, RMS norms, grouped keys and values, a gated feed-forward part.

use serde_json::{Value, json};

use super::fields::{Fields, heads_of, rotary_of};
use super::{Family, POSITIONS, Shape, columns, norm};
use crate::backbone::architecture::{Architecture, Llama3Scaling, Mlp, Norm, Positions};
use crate::backbone::block::BlockWeights;
use crate::error::{Error, Result};
use crate::weights::EntryList;

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    root: "model",
    layers: "layers",
    embedding: "embed_tokens",
    last_norm: "norm",
    architecture,
    describe,
    layer,
};

fn architecture(r: &Fields<'_>) -> Result<Architecture> {
    let (width, heads) = (r.size("hidden_size")?, r.size("num_attention_heads")?);
    let key_heads = r.size_or("num_key_value_heads", heads)?;
    let size = if r.get("head_dim").is_some() { Some(r.size("head_dim")?) } else { None };
    let heads = heads_of(width, heads, key_heads, size)?;
    match r.text_or("hidden_act", "silu")? {
        "silu" | "swish" => {}
        other => return Err(Error::config("hidden_act", "silu", other)),
    }
    let rope = Fields(r.get("rope_parameters").unwrap_or(&Value::Null));
    let theta = rope.number_or("rope_theta", r.number_or("rope_theta", 10_000.0)?)?;
    let scaled = Fields(r.get("rope_scaling").or(r.get("rope_parameters")).unwrap_or(&Value::Null));
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
    Ok(Architecture {
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

fn describe(s: &Shape) -> Value {
    json!({
        "model_type": "llama", "vocab_size": s.vocab, "hidden_size": s.width, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.heads, "intermediate_size": s.inner,
        "max_position_embeddings": POSITIONS, "rope_theta": 10000.0, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": s.tied, "initializer_range": s.init, "eos_token_id": s.end,
    })
}

fn layer<'a>(list: &mut EntryList<'a>, inside: &str, w: &'a BlockWeights, a: &Architecture, l: usize) {
    norm(list, &format!("{inside}input_layernorm"), &w.norm1, l);
    norm(list, &format!("{inside}post_attention_layernorm"), &w.norm2, l);
    let (q, kv) = (a.heads.query * a.heads.size, a.heads.key * a.heads.size);
    for (name, range) in [("q_proj", 0..q), ("k_proj", q..q + kv), ("v_proj", q + kv..q + 2 * kv)] {
        columns(list, &format!("{inside}self_attn.{name}"), &w.qkv, l, range);
    }
    columns(list, &format!("{inside}self_attn.o_proj"), &w.out, l, 0..a.width);
    columns(list, &format!("{inside}mlp.gate_proj"), &w.up, l, 0..a.inner);
    columns(list, &format!("{inside}mlp.up_proj"), &w.up, l, a.inner..2 * a.inner);
    columns(list, &format!("{inside}mlp.down_proj"), &w.down, l, 0..a.width);
}
