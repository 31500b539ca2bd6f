//! Mistral: Llama that sees so many positions back and no further (`sliding_window`).

use serde_json::Value;

use super::fields::{Fields, sliding_window_of};
use super::llama::{described, kin, layer};
use super::{Family, FreshShape};
use crate::backbone::architecture::Architecture;
use crate::error::Result;

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    root: "model",
    layers: "layers",
    embedding: "embed_tokens",
    last_norm: "norm",
    architecture,
    describe,
    layer,
};

fn architecture(r: &Fields<'_>) -> Result<Architecture> {
    Ok(Architecture { sliding_window: sliding_window_of(r, true)?, ..kin(r, None)? })
}

fn describe(s: &FreshShape) -> Value {
    described("mistral", s)
}
