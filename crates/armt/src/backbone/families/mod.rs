//! The families of backbones: how Hugging Face describes each, and what it calls its tensors. A new family is a file here and a line of
//! [`FAMILIES`].

pub(crate) mod fields;
mod gpt2;
mod gpt_neox;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use std::ops::Range;

use fields::Fields;
use serde_json::Value;

use super::Backbone;
use super::architecture::Architecture;
use super::block::{BlockWeights, LinearWeights, NormWeights};
use crate::error::{Error, Result};
use crate::weights::{EntryList, Layout};

/// Every family there is.
pub static FAMILIES: &[&Family] =
    &[&gpt2::FAMILY, &gpt_neox::FAMILY, &llama::FAMILY, &mistral::FAMILY, &qwen2::FAMILY, &qwen3::FAMILY];

/// The sizes of a backbone that is made from scratch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FreshShape {
    /// Tokens.
    pub vocab: usize,
    /// The token that ends a text.
    pub end: i32,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Inner width of the feed-forward part.
    pub inner: usize,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// Standard deviation of fresh weights.
    pub init: f64,
}

/// Positions that a backbone made from scratch has.
const POSITIONS: usize = 2048;

/// A family of backbones.
pub struct Family {
    /// `model_type` of its `config.json`.
    pub model_type: &'static str,
    /// What its tensors' names begin with.
    root: &'static str,
    /// What its stack of layers is called.
    layers: &'static str,
    /// What its table of tokens is called.
    embedding: &'static str,
    /// What its last norm is called.
    last_norm: &'static str,
    architecture: fn(&Fields<'_>) -> Result<Architecture>,
    describe: fn(&FreshShape) -> Value,
    /// Lists the tensors of layer l, whose names begin with a prefix.
    layer: for<'a> fn(&mut EntryList<'a>, &str, &'a BlockWeights, &Architecture, usize),
}

impl Family {
    /// The family of a Hugging Face configuration. One that is not known is an error that names those that are.
    pub fn of(config: &Value) -> Result<&'static Self> {
        Self::named(config.get("model_type").and_then(Value::as_str).unwrap_or("nothing"))
    }

    /// The family of a `model_type`. One that is not known is an error that names those that are.
    pub fn named(name: &str) -> Result<&'static Self> {
        let known = || FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", ");
        FAMILIES
            .iter()
            .find(|f| f.model_type == name)
            .copied()
            .ok_or_else(|| Error::config("model_type", &format!("one of {}", known()), name))
    }

    /// Checks a Hugging Face configuration.
    pub fn architecture(&self, config: &Value) -> Result<Architecture> {
        (self.architecture)(&Fields(config))
    }

    /// The configuration, as Hugging Face has it, of a backbone made from scratch.
    pub fn describe(&self, shape: &FreshShape) -> Value {
        (self.describe)(shape)
    }

    /// What names of tensors of layer l begin with.
    pub fn layer_prefix(&self, l: usize) -> String {
        format!("{}.{}.{l}.", self.root, self.layers)
    }

    /// Lists the tensors before the layers, behind a prefix.
    pub fn embedding_entries<'a>(&self, list: &mut EntryList<'a>, prefix: &str, backbone: &'a Backbone) {
        list.whole(format!("{prefix}{}.{}.weight", self.root, self.embedding), &backbone.embedding.tokens);
        if let Some(p) = &backbone.embedding.positions {
            list.whole(format!("{prefix}{}.wpe.weight", self.root), p);
        }
    }

    /// Lists the tensors of layer l, behind a prefix.
    pub fn layer_entries<'a>(&self, list: &mut EntryList<'a>, prefix: &str, backbone: &'a Backbone, l: usize) {
        (self.layer)(list, prefix, &backbone.blocks.weights, &backbone.architecture, l);
    }

    /// Lists the tensors after the layers, behind a prefix.
    pub fn head_entries<'a>(&self, list: &mut EntryList<'a>, prefix: &str, backbone: &'a Backbone) {
        let last = format!("{prefix}{}.{}", self.root, self.last_norm);
        list.whole(format!("{last}.weight"), &backbone.head.norm.gain);
        if let Some(bias) = &backbone.head.norm.bias {
            list.whole(format!("{last}.bias"), bias);
        }
        if let Some(table) = &backbone.head.table {
            list.whole(format!("{prefix}lm_head.weight"), table);
        }
    }
}

impl Family {
    /// A tensor's name as Hugging Face has it: GPT-NeoX calls its head by another than the authors' files.
    pub fn head_name(&self, name: String) -> String {
        if self.model_type == "gpt_neox" && name == "lm_head.weight" { "embed_out.weight".into() } else { name }
    }
}

fn norm<'a>(list: &mut EntryList<'a>, name: &str, norm: &'a NormWeights, l: usize) {
    let d = norm.gain.value().dims()[1];
    list.layer(format!("{name}.weight"), &norm.gain, l, vec![d], Layout::Plain);
    if let Some(bias) = &norm.bias {
        list.layer(format!("{name}.bias"), bias, l, vec![d], Layout::Plain);
    }
}

/// GPT-2's `[in, out]`.
fn conv<'a>(list: &mut EntryList<'a>, name: &str, linear: &'a LinearWeights, l: usize) {
    let (input, output) = (linear.weight.value().dims()[1], linear.weight.value().dims()[2]);
    list.layer(format!("{name}.weight"), &linear.weight, l, vec![input, output], Layout::Plain);
    if let Some(bias) = &linear.bias {
        list.layer(format!("{name}.bias"), bias, l, vec![output], Layout::Plain);
    }
}

/// `[out, in]` into some of our columns.
fn columns<'a>(list: &mut EntryList<'a>, name: &str, weights: &'a LinearWeights, l: usize, range: Range<usize>) {
    let columns = weights.weight.value().dims()[2];
    linear(list, name, weights, l, range.len(), Layout::Columns { from: range.start, columns });
}

fn linear<'a>(list: &mut EntryList<'a>, name: &str, linear: &'a LinearWeights, l: usize, output: usize, layout: Layout) {
    let input = linear.weight.value().dims()[1];
    list.layer(format!("{name}.weight"), &linear.weight, l, vec![output, input], layout);
    if let Some(bias) = &linear.bias {
        list.layer(format!("{name}.bias"), bias, l, vec![output], layout);
    }
}
