//! Qwen3: Llama with RMS norms of each head's queries and keys.

use serde_json::Value;

use super::fields::{Fields, sliding_window_of};
use super::llama::{described, kin, layer};
use super::{Family, FreshShape};
use crate::backbone::architecture::Architecture;
use crate::error::Result;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    root: "model",
    layers: "layers",
    embedding: "embed_tokens",
    last_norm: "norm",
    architecture,
    describe,
    layer,
};

/// Size of a head where the configuration does not say.
const HEAD: usize = 128;

fn architecture(r: &Fields<'_>) -> Result<Architecture> {
    let biased = r.flag_or("attention_bias", false)?;
    let window = sliding_window_of(r, false)?;
    let kin = kin(r, Some(HEAD))?;
    Ok(Architecture { attention_bias: biased, output_bias: biased, head_norms: true, sliding_window: window, ..kin })
}

fn describe(s: &FreshShape) -> Value {
    described("qwen3", s)
}
