//! Which tensor of a file is which part of which parameter.
//!
//! Ours are stacked over layers and stored `[in, out]`, with queries, keys and values (and gate and up) side by side. Files have one tensor
//! a layer: GPT-2's as `[in, out]`, the other families' as `[out, in]`, GPT-NeoX's queries, keys and values interleaved by head.

use std::path::Path;

use armt_engine::Param;

use crate::config::{Family, MemoryConfig};
use crate::error::{Error, Result};
use crate::model::{LinearWeights, Model, NormWeights};

/// How a file's tensor is stored in our parameter.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// As it is.
    Plain,
    /// `[out, in]`, or a bias `[out]`: output r is our column `from + r` of `columns`.
    Columns { from: usize, columns: usize },
    /// GPT-NeoX: output (head, q k or v, i) is our column (q k or v, head, i).
    Interleaved { heads: usize, size: usize },
}

/// One tensor of a file.
pub(super) struct Entry<'a> {
    /// The authors' name.
    pub(super) name: String,
    /// Its shape in a file.
    pub(super) shape: Vec<usize>,
    /// Where it belongs.
    pub(super) param: &'a Param,
    /// Our elements that belong to its layer.
    at: std::ops::Range<usize>,
    layout: Layout,
}

const CELL: &str = "memory_cell.model.";

impl Entry<'_> {
    /// Names that are taken for it, the authors' first: without the memory's wrapping, and without the family's prefix.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names = vec![self.name.clone()];
        let plain = self.name.strip_prefix(CELL).unwrap_or(&self.name).replacen(".layer.", ".", 1);
        for prefix in ["", "transformer.", "gpt_neox.", "model."] {
            if let Some(short) = plain.strip_prefix(prefix) {
                names.push(short.to_string());
            }
        }
        if plain == "lm_head.weight" {
            names.extend([format!("{CELL}embed_out.weight"), "embed_out.weight".into()]);
        }
        names.dedup();
        names
    }

    /// Whether it belongs to the memory and not to the backbone.
    pub(super) fn is_memory(&self) -> bool {
        self.name.contains(".W_m") || self.name.ends_with("memory")
    }

    /// Whether it is the table of learned positions.
    pub(super) fn is_positions(&self) -> bool {
        self.name.ends_with("wpe.weight")
    }

    pub(super) fn expect_shape(&self, path: &Path, name: &str, shape: &[usize]) -> Result<()> {
        if shape == self.shape {
            return Ok(());
        }
        Err(Error::file(path, format!("{name} should be {:?}, but is {shape:?}", self.shape)))
    }

    /// For each element of the file's tensor, in order, our element of this layer.
    fn each(&self, mut f: impl FnMut(usize, usize)) {
        let n: usize = self.shape.iter().product();
        let (columns, column): (usize, Box<dyn Fn(usize) -> usize>) = match self.layout {
            Layout::Plain => return (0..n).for_each(|i| f(i, i)),
            Layout::Columns { from, columns } => (columns, Box::new(move |r| from + r)),
            Layout::Interleaved { heads, size } => {
                (3 * heads * size, Box::new(move |r| (r / size % 3) * heads * size + r / (3 * size) * size + r % size))
            }
        };
        let inner = if self.shape.len() == 2 { self.shape[1] } else { 1 };
        for r in 0..self.shape[0] {
            let column = column(r);
            (0..inner).for_each(|i| f(r * inner + i, i * columns + column));
        }
    }

    /// Puts a file's values where they belong in the whole parameter's.
    pub(super) fn import(&self, data: &[f32], values: &mut [f32]) {
        let own = &mut values[self.at.clone()];
        self.each(|file, ours| own[ours] = data[file]);
    }

    /// Takes a file's values out of the whole parameter's.
    pub(super) fn export(&self, values: &[f32]) -> Vec<f32> {
        let own = &values[self.at.clone()];
        let mut data = vec![0.0; self.shape.iter().product()];
        self.each(|file, ours| data[file] = own[ours]);
        data
    }
}

/// Every tensor of a model's file.
pub(super) fn entries(model: &Model) -> Vec<Entry<'_>> {
    let (b, w) = (model.backbone(), model.weights());
    let memory = &model.config().memory;
    let cell = if matches!(memory, MemoryConfig::None { .. }) { "" } else { CELL };
    // ARMT and PRMT wrap each layer; RMT leaves them as they are.
    let wrap = if matches!(memory, MemoryConfig::Associative(_) | MemoryConfig::Prmt { .. }) { "layer." } else { "" };
    let mut all = List { entries: Vec::new(), layers: b.layers };
    let (root, stem) = match b.family {
        Family::Gpt2 => ("transformer", "h"),
        Family::GptNeoX => ("gpt_neox", "layers"),
        Family::Llama => ("model", "layers"),
    };
    if let Some(m) = &w.memory {
        all.whole("memory_cell.memory".into(), m);
    }
    let embed = match b.family {
        Family::Gpt2 => "wte",
        Family::GptNeoX => "embed_in",
        Family::Llama => "embed_tokens",
    };
    all.whole(format!("{cell}{root}.{embed}.weight"), &w.embed);
    if let Some(p) = &w.positions {
        all.whole(format!("{cell}{root}.wpe.weight"), p);
    }
    for l in 0..b.layers {
        let outside = format!("{cell}{root}.{stem}.{l}.");
        let inside = format!("{outside}{wrap}");
        if let Some(a) = &w.associative {
            for (name, param) in [("W_mq", &a.query), ("W_mk", &a.key), ("W_mv", &a.value), ("W_mb", &a.beta)] {
                let (input, output) = (param.value().dims()[1], param.value().dims()[2]);
                let layout = Layout::Columns { from: 0, columns: output };
                all.layer(format!("{outside}{name}.weight"), param, l, vec![output, input], layout);
            }
            all.layer(format!("{outside}W_mb.bias"), &a.beta_bias, l, vec![1], Layout::Plain);
        }
        if let Some(m) = &w.layer_memory {
            let shape = vec![1, m.value().dims()[1], m.value().dims()[2]];
            all.layer(format!("{outside}memory"), m, l, shape, Layout::Plain);
        }
        let (q, kv) = (b.heads.query * b.heads.size, b.heads.key * b.heads.size);
        match b.family {
            Family::Gpt2 => {
                all.norm(&format!("{inside}ln_1"), &w.norm1, l);
                all.conv(&format!("{inside}attn.c_attn"), &w.qkv, l);
                all.conv(&format!("{inside}attn.c_proj"), &w.out, l);
                all.norm(&format!("{inside}ln_2"), &w.norm2, l);
                all.conv(&format!("{inside}mlp.c_fc"), &w.up, l);
                all.conv(&format!("{inside}mlp.c_proj"), &w.down, l);
            }
            Family::GptNeoX => {
                all.norm(&format!("{inside}input_layernorm"), &w.norm1, l);
                all.norm(&format!("{inside}post_attention_layernorm"), &w.norm2, l);
                let layout = Layout::Interleaved { heads: b.heads.query, size: b.heads.size };
                all.linear(&format!("{inside}attention.query_key_value"), &w.qkv, l, 3 * q, layout);
                all.columns(&format!("{inside}attention.dense"), &w.out, l, 0, b.width);
                all.columns(&format!("{inside}mlp.dense_h_to_4h"), &w.up, l, 0, b.inner);
                all.columns(&format!("{inside}mlp.dense_4h_to_h"), &w.down, l, 0, b.width);
            }
            Family::Llama => {
                all.norm(&format!("{inside}input_layernorm"), &w.norm1, l);
                all.norm(&format!("{inside}post_attention_layernorm"), &w.norm2, l);
                for (name, from, size) in [("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)] {
                    all.columns(&format!("{inside}self_attn.{name}"), &w.qkv, l, from, size);
                }
                all.columns(&format!("{inside}self_attn.o_proj"), &w.out, l, 0, b.width);
                all.columns(&format!("{inside}mlp.gate_proj"), &w.up, l, 0, b.inner);
                all.columns(&format!("{inside}mlp.up_proj"), &w.up, l, b.inner, b.inner);
                all.columns(&format!("{inside}mlp.down_proj"), &w.down, l, 0, b.width);
            }
        }
    }
    let last = match b.family {
        Family::Gpt2 => "ln_f",
        Family::GptNeoX => "final_layer_norm",
        Family::Llama => "norm",
    };
    all.whole(format!("{cell}{root}.{last}.weight"), &w.last_norm.gain);
    if let Some(bias) = &w.last_norm.bias {
        all.whole(format!("{cell}{root}.{last}.bias"), bias);
    }
    if let Some(head) = &w.head {
        all.whole(format!("{cell}lm_head.weight"), head);
    }
    all.entries
}

struct List<'a> {
    entries: Vec<Entry<'a>>,
    layers: usize,
}

impl<'a> List<'a> {
    fn whole(&mut self, name: String, param: &'a Param) {
        let at = 0..param.value().elements();
        self.entries.push(Entry { name, shape: param.value().dims().to_vec(), param, at, layout: Layout::Plain });
    }

    fn layer(&mut self, name: String, param: &'a Param, l: usize, shape: Vec<usize>, layout: Layout) {
        let size = param.value().elements() / self.layers;
        self.entries.push(Entry { name, shape, param, at: l * size..(l + 1) * size, layout });
    }

    fn norm(&mut self, name: &str, norm: &'a NormWeights, l: usize) {
        let d = norm.gain.value().dims()[1];
        self.layer(format!("{name}.weight"), &norm.gain, l, vec![d], Layout::Plain);
        if let Some(bias) = &norm.bias {
            self.layer(format!("{name}.bias"), bias, l, vec![d], Layout::Plain);
        }
    }

    /// GPT-2's `[in, out]`.
    fn conv(&mut self, name: &str, linear: &'a LinearWeights, l: usize) {
        let (input, output) = (linear.weight.value().dims()[1], linear.weight.value().dims()[2]);
        self.layer(format!("{name}.weight"), &linear.weight, l, vec![input, output], Layout::Plain);
        if let Some(bias) = &linear.bias {
            self.layer(format!("{name}.bias"), bias, l, vec![output], Layout::Plain);
        }
    }

    /// `[out, in]` into columns `from..from + output`.
    fn columns(&mut self, name: &str, linear: &'a LinearWeights, l: usize, from: usize, output: usize) {
        let columns = linear.weight.value().dims()[2];
        self.linear(name, linear, l, output, Layout::Columns { from, columns });
    }

    fn linear(&mut self, name: &str, linear: &'a LinearWeights, l: usize, output: usize, layout: Layout) {
        let input = linear.weight.value().dims()[1];
        self.layer(format!("{name}.weight"), &linear.weight, l, vec![output, input], layout);
        if let Some(bias) = &linear.bias {
            self.layer(format!("{name}.bias"), bias, l, vec![output], layout);
        }
    }
}
