//! GPT-2: learned positions, layer norms, matrices stored `[in, out]`, queries, keys and values in one.

use serde_json::{Value, json};

use super::fields::{Fields, gelu_of, heads_of};
use super::{Family, FreshShape, POSITIONS, conv, norm};
use crate::backbone::architecture::{Architecture, Norm, Positions};
use crate::backbone::block::BlockWeights;
use crate::error::{Error, Result};
use crate::weights::EntryList;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt2",
    root: "transformer",
    layers: "h",
    embedding: "wte",
    last_norm: "ln_f",
    architecture,
    describe,
    layer,
};

fn architecture(r: &Fields<'_>) -> Result<Architecture> {
    let (width, heads) = (r.size("n_embd")?, r.size("n_head")?);
    for key in ["scale_attn_by_inverse_layer_idx", "add_cross_attention"] {
        if r.flag_or(key, false)? {
            return Err(Error::config(key, "false", true));
        }
    }
    if !r.flag_or("scale_attn_weights", true)? {
        return Err(Error::config("scale_attn_weights", "true", false));
    }
    Ok(Architecture {
        vocab: r.size("vocab_size")?,
        width,
        layers: r.size("n_layer")?,
        heads: heads_of(width, heads, heads, None)?,
        inner: r.size_or("n_inner", width.saturating_mul(4))?,
        norm: Norm::Layer,
        eps: r.number_or("layer_norm_epsilon", 1e-5)? as f32,
        positions: Positions::Learned(r.size("n_positions")?),
        mlp: gelu_of("activation_function", r.text_or("activation_function", "gelu_new")?)?,
        parallel: false,
        tied: r.flag_or("tie_word_embeddings", true)?,
        attention_bias: true,
        output_bias: true,
        head_norms: false,
        sliding_window: None,
        mlp_bias: true,
        init: r.number_or("initializer_range", 0.02)?,
    })
}

fn describe(s: &FreshShape) -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": s.vocab, "n_embd": s.width, "n_layer": s.layers, "n_head": s.heads, "n_inner": s.inner,
        "n_positions": POSITIONS, "activation_function": "gelu_new", "tie_word_embeddings": s.tied, "initializer_range": s.init,
        "eos_token_id": s.end,
    })
}

fn layer<'a>(list: &mut EntryList<'a>, inside: &str, w: &'a BlockWeights, _: &Architecture, l: usize) {
    norm(list, &format!("{inside}ln_1"), &w.norm1, l);
    conv(list, &format!("{inside}attn.c_attn"), &w.qkv, l);
    conv(list, &format!("{inside}attn.c_proj"), &w.out, l);
    norm(list, &format!("{inside}ln_2"), &w.norm2, l);
    conv(list, &format!("{inside}mlp.c_fc"), &w.up, l);
    conv(list, &format!("{inside}mlp.c_proj"), &w.down, l);
}
