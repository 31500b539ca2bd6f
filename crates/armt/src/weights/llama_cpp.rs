//! llama.cpp's names and shapes of Llama and its kin, as Hugging Face has them.
//!
//! Of `llama` files the rows of queries and keys are paired: rotary pairs lie side by side, where Hugging Face has the first of all pairs before
//! the second of all. Per head of size h, our row j is its row 2 j, and our row h/2 + j its row 2 j + 1.

use serde_json::{Map, Value, json};

use super::gguf::{Gguf, Listed};
use crate::error::{Error, Result};

/// A tensor under Hugging Face's name.
pub(super) struct Renamed<'g> {
    pub name: String,
    pub tensor: &'g Listed,
    /// Heads whose rows are paired.
    pub paired: Option<usize>,
}

/// Parts of a layer: llama.cpp's name, and Hugging Face's.
const PARTS: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The tensors of a file under Hugging Face's names. One that none of its parts is called is refused by name.
pub(super) fn names(gguf: &Gguf) -> Result<Vec<Renamed<'_>>> {
    let shape = Described::of(gguf)?;
    let rename = |tensor: &'_ Listed| -> Option<(String, Option<usize>)> {
        let whole = |name: &str| Some((name.to_string(), None));
        match tensor.name.as_str() {
            "token_embd.weight" => return whole("model.embed_tokens.weight"),
            "output_norm.weight" => return whole("model.norm.weight"),
            "output.weight" => return whole("lm_head.weight"),
            _ => {}
        }
        let (layer, rest) = tensor.name.strip_prefix("blk.")?.split_once('.')?;
        let (part, end) = rest.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end))?;
        let (_, ours) = PARTS.iter().find(|(theirs, _)| *theirs == part)?;
        let layer: usize = layer.parse().ok()?;
        let paired = match part {
            "attn_q" => Some(shape.heads),
            "attn_k" => Some(shape.key_heads),
            _ => None,
        };
        Some((format!("model.layers.{layer}.{ours}.{end}"), paired.filter(|_| shape.paired)))
    };
    let found = gguf.tensors.iter().map(|tensor| {
        let (name, paired) = rename(tensor).ok_or_else(|| {
            Error::file(gguf.path(), format!("it holds the tensor {}, which no part of a model of its kind is", tensor.name))
        })?;
        match paired.filter(|heads| tensor.shape.is_empty() || !tensor.shape[0].is_multiple_of(2 * heads)) {
            Some(heads) => {
                Err(Error::file(gguf.path(), format!("{} of shape {:?} has no {heads} heads", tensor.name, tensor.shape)))
            }
            None => Ok(Renamed { name, tensor, paired }),
        }
    });
    found.collect()
}

/// Rows that lie in pairs, head by head, with the first of all pairs before the second of all.
pub(super) fn unpaired(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let (width, size) = (values.len() / rows, rows / heads);
    let mut out = Vec::with_capacity(values.len());
    for head in 0..heads {
        for j in 0..size {
            let within = if j < size / 2 { 2 * j } else { 2 * (j - size / 2) + 1 };
            out.extend_from_slice(&values[(head * size + within) * width..][..width]);
        }
    }
    out
}

/// What a file says of its model.
struct Described<'g> {
    gguf: &'g Gguf,
    kind: &'g str,
    heads: usize,
    key_heads: usize,
    paired: bool,
}

impl<'g> Described<'g> {
    fn of(gguf: &'g Gguf) -> Result<Self> {
        let kind = gguf.text("general.architecture").unwrap_or("nothing");
        if !["llama", "qwen2", "qwen3"].contains(&kind) {
            return Err(Error::file(gguf.path(), format!("expected a model of the kind llama, qwen2 or qwen3, got {kind}")));
        }
        let mut made = Described { gguf, kind, heads: 0, key_heads: 0, paired: kind == "llama" };
        if let Some(experts) = made.key("expert_count").and_then(Value::as_u64).filter(|n| *n > 0) {
            return Err(Error::file(gguf.path(), format!("expected a model without experts, got one of {experts}")));
        }
        made.heads = made.size("attention.head_count")?;
        made.key_heads =
            if made.key("attention.head_count_kv").is_some() { made.size("attention.head_count_kv")? } else { made.heads };
        Ok(made)
    }

    fn key(&self, name: &str) -> Option<&'g Value> {
        self.gguf.key(&format!("{}.{name}", self.kind))
    }

    fn size(&self, name: &str) -> Result<usize> {
        let found = self.key(name).and_then(Value::as_u64).filter(|n| *n > 0).map(|n| n as usize);
        found.ok_or_else(|| Error::file(self.gguf.path(), format!("expected a positive number in {}.{name}", self.kind)))
    }

    fn rope(&self) -> Result<Value> {
        let mut rope = Map::from_iter([("rope_theta".into(), self.key("rope.freq_base").cloned().unwrap_or(json!(10_000.0)))]);
        match self.key("rope.scaling.type").and_then(Value::as_str).unwrap_or("none") {
            "none" => {
                rope.insert("rope_type".into(), json!("default"));
            }
            kind @ ("linear" | "yarn") => {
                rope.insert("rope_type".into(), json!(kind));
                for (theirs, ours) in [("factor", "factor"), ("original_context_length", "original_max_position_embeddings")] {
                    if let Some(value) = self.key(&format!("rope.scaling.{theirs}")) {
                        rope.insert(ours.into(), value.clone());
                    }
                }
            }
            other => {
                return Err(Error::file(self.gguf.path(), format!("expected rotary scaling none, linear or yarn, got {other}")));
            }
        }
        Ok(rope.into())
    }
}

impl Gguf {
    /// The model as a Hugging Face configuration. One of a kind that is not known is an error.
    pub fn config(&self) -> Result<Value> {
        let d = Described::of(self)?;
        let (heads, width) = (d.heads, d.size("embedding_length")?);
        let head = if d.key("attention.key_length").is_some() { d.size("attention.key_length")? } else { width / heads.max(1) };
        if let Some(dims) = d.key("rope.dimension_count").and_then(Value::as_u64).filter(|dims| *dims != head as u64) {
            return Err(Error::file(self.path(), format!("expected all {head} dimensions of a head rotated, got {dims}")));
        }
        let embedding = self.tensors.iter().find(|t| t.name == "token_embd.weight");
        let vocab = embedding.and_then(|t| t.shape.first().copied());
        let has = |name: &str| self.tensors.iter().any(|t| t.name == name);
        let biased = has("blk.0.attn_q.bias");
        let id = |name: &str| self.key(&format!("tokenizer.ggml.{name}_token_id")).cloned().unwrap_or(Value::Null);
        let mut config = json!({
            "model_type": d.kind, "vocab_size": vocab, "hidden_size": width, "intermediate_size": d.size("feed_forward_length")?,
            "num_hidden_layers": d.size("block_count")?, "num_attention_heads": heads, "num_key_value_heads": d.key_heads, "head_dim": head,
            "max_position_embeddings": d.size("context_length")?, "hidden_act": "silu",
            "rms_norm_eps": d.key("attention.layer_norm_rms_epsilon").cloned().unwrap_or(json!(1e-6)),
            "rope_parameters": d.rope()?, "tie_word_embeddings": !has("output.weight"),
            "bos_token_id": id("bos"), "eos_token_id": id("eos"),
        });
        if d.kind != "qwen2" {
            config["attention_bias"] = biased.into();
        }
        Ok(config)
    }
}
