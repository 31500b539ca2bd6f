//! Llama: rotary positions, RMS norms, grouped keys and values, a gated feed-forward part. Its kin differ from it in what `architecture` of their
//! files says.

use serde_json::{Value, json};

use super::fields::{Fields, heads_of, rotary_of};
use super::{Family, FreshShape, POSITIONS, columns, norm};
use crate::backbone::architecture::{Architecture, Mlp, Norm, Positions};
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
    let biased = r.flag_or("attention_bias", false)?;
    Ok(Architecture { attention_bias: biased, output_bias: biased, mlp_bias: r.flag_or("mlp_bias", false)?, ..kin(r, None)? })
}

/// What Llama and its kin have in common: no bias anywhere, every position seen. `size` is that of a head where the configuration does not say;
/// the width by the heads if that is not given.
pub(super) fn kin(r: &Fields<'_>, size: Option<usize>) -> Result<Architecture> {
    let (width, heads) = (r.size("hidden_size")?, r.size("num_attention_heads")?);
    let key_heads = r.size_or("num_key_value_heads", heads)?;
    let size = if r.get("head_dim").is_some() { Some(r.size("head_dim")?) } else { size };
    let heads = heads_of(width, heads, key_heads, size)?;
    match r.text_or("hidden_act", "silu")? {
        "silu" | "swish" => {}
        other => return Err(Error::config("hidden_act", "silu", other)),
    }
    let rotary = rotary_of(r, heads.size, 1.0)?;
    if rotary.dims != heads.size {
        return Err(Error::config("partial_rotary_factor", "1", format!("{} of {} dimensions", rotary.dims, heads.size)));
    }
    Ok(Architecture {
        vocab: r.size("vocab_size")?,
        width,
        layers: r.size("num_hidden_layers")?,
        heads,
        inner: r.size("intermediate_size")?,
        norm: Norm::Rms,
        eps: r.number_or("rms_norm_eps", 1e-6)? as f32,
        positions: Positions::Rotary(rotary),
        mlp: Mlp::SwiGlu,
        parallel: false,
        tied: r.flag_or("tie_word_embeddings", false)?,
        attention_bias: false,
        output_bias: false,
        head_norms: false,
        sliding_window: None,
        mlp_bias: false,
        init: r.number_or("initializer_range", 0.02)?,
    })
}

fn describe(s: &FreshShape) -> Value {
    described("llama", s)
}

/// The configuration of Llama or of one of its kin.
pub(super) fn described(model_type: &str, s: &FreshShape) -> Value {
    json!({
        "model_type": model_type, "vocab_size": s.vocab, "hidden_size": s.width, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.heads, "intermediate_size": s.inner,
        "max_position_embeddings": POSITIONS, "rope_theta": 10000.0, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": s.tied, "initializer_range": s.init, "eos_token_id": s.end,
    })
}

pub(super) fn layer<'a>(list: &mut EntryList<'a>, inside: &str, w: &'a BlockWeights, a: &Architecture, l: usize) {
    norm(list, &format!("{inside}input_layernorm"), &w.norm1, l);
    norm(list, &format!("{inside}post_attention_layernorm"), &w.norm2, l);
    let (q, kv) = (a.heads.query * a.heads.size, a.heads.key * a.heads.size);
    for (name, range) in [("q_proj", 0..q), ("k_proj", q..q + kv), ("v_proj", q + kv..q + 2 * kv)] {
        columns(list, &format!("{inside}self_attn.{name}"), &w.qkv, l, range);
    }
    if let Some((queries, keys)) = &w.head_norms {
        norm(list, &format!("{inside}self_attn.q_norm"), queries, l);
        norm(list, &format!("{inside}self_attn.k_norm"), keys, l);
    }
    columns(list, &format!("{inside}self_attn.o_proj"), &w.out, l, 0..a.width);
    columns(list, &format!("{inside}mlp.gate_proj"), &w.up, l, 0..a.inner);
    columns(list, &format!("{inside}mlp.up_proj"), &w.up, l, a.inner..2 * a.inner);
    columns(list, &format!("{inside}mlp.down_proj"), &w.down, l, 0..a.width);
}
