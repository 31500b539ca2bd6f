//! Qwen2: Llama with biases in queries, keys and values.

use serde_json::Value;

use super::fields::{Fields, sliding_window_of};
use super::llama::{described, kin, layer};
use super::{Family, FreshShape};
use crate::backbone::architecture::Architecture;
use crate::error::Result;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    root: "model",
    layers: "layers",
    embedding: "embed_tokens",
    last_norm: "norm",
    architecture,
    describe,
    layer,
};

fn architecture(r: &Fields<'_>) -> Result<Architecture> {
    Ok(Architecture { attention_bias: true, sliding_window: sliding_window_of(r, false)?, ..kin(r, None)? })
}

fn describe(s: &FreshShape) -> Value {
    described("qwen2", s)
}
