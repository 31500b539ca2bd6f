//! GPT-NeoX and Pythia: rotary positions on part of each head, attention and feed-forward side by side, queries, keys and values
//! interleaved by head.

use serde_json::{Value, json};

use super::fields::{Fields, gelu_of, heads_of, rotary_of};
use super::{Family, FreshShape, POSITIONS, columns, linear, norm};
use crate::backbone::architecture::{Architecture, Norm, Positions};
use crate::backbone::block::BlockWeights;
use crate::error::Result;
use crate::weights::{EntryList, Layout};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_neox",
    root: "gpt_neox",
    layers: "layers",
    embedding: "embed_in",
    last_norm: "final_layer_norm",
    architecture,
    describe,
    layer,
};

fn architecture(r: &Fields<'_>) -> Result<Architecture> {
    let (width, heads) = (r.size("hidden_size")?, r.size("num_attention_heads")?);
    let heads = heads_of(width, heads, heads, None)?;
    Ok(Architecture {
        vocab: r.size("vocab_size")?,
        width,
        layers: r.size("num_hidden_layers")?,
        heads,
        inner: r.size("intermediate_size")?,
        norm: Norm::Layer,
        eps: r.number_or("layer_norm_eps", 1e-5)? as f32,
        positions: Positions::Rotary(rotary_of(r, heads.size, 0.25)?),
        mlp: gelu_of("hidden_act", r.text_or("hidden_act", "gelu")?)?,
        parallel: r.flag_or("use_parallel_residual", true)?,
        tied: r.flag_or("tie_word_embeddings", false)?,
        attention_bias: r.flag_or("attention_bias", true)?,
        output_bias: r.flag_or("attention_bias", true)?,
        head_norms: false,
        sliding_window: None,
        mlp_bias: true,
        init: r.number_or("initializer_range", 0.02)?,
    })
}

fn describe(s: &FreshShape) -> Value {
    json!({
        "model_type": "gpt_neox", "vocab_size": s.vocab, "hidden_size": s.width, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "intermediate_size": s.inner, "max_position_embeddings": POSITIONS,
        "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": true, "hidden_act": "gelu",
        "tie_word_embeddings": s.tied, "initializer_range": s.init, "eos_token_id": s.end,
    })
}

fn layer<'a>(list: &mut EntryList<'a>, inside: &str, w: &'a BlockWeights, a: &Architecture, l: usize) {
    norm(list, &format!("{inside}input_layernorm"), &w.norm1, l);
    norm(list, &format!("{inside}post_attention_layernorm"), &w.norm2, l);
    let layout = Layout::Interleaved { heads: a.heads.query, size: a.heads.size };
    linear(list, &format!("{inside}attention.query_key_value"), &w.qkv, l, 3 * a.heads.query * a.heads.size, layout);
    columns(list, &format!("{inside}attention.dense"), &w.out, l, 0..a.width);
    columns(list, &format!("{inside}mlp.dense_h_to_4h"), &w.up, l, 0..a.inner);
    columns(list, &format!("{inside}mlp.dense_4h_to_h"), &w.down, l, 0..a.width);
}
