//! A tiny GPT-2 as Hugging Face stores it: random weights, and a byte-level tokenizer with a few merges.

#![allow(dead_code)] // each test binary uses its part

use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

pub const VOCAB: usize = 257 + MERGES.len();
const WIDTH: usize = 16;
const LAYERS: usize = 2;
const POSITIONS: usize = 32;

/// Merges across spaces, runs of whitespace and words, so that a cut at a wrong place shows in the tokens.
const MERGES: [&str; 12] = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "Ċ Ġ", "Ġ a", "' s", "1 9", "x x"];

/// GPT-2's letter for a byte.
fn letter(byte: u8) -> char {
    let own = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if own(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !own(*b)).count() as u32;
    char::from_u32(256 + before).unwrap()
}

/// Writes `encoder.json` and `vocab.bpe`; gives their paths.
pub fn write_bpe(folder: &Path) -> (PathBuf, PathBuf) {
    let bytes = (0..=255u8).map(|b| letter(b).to_string());
    let merged = MERGES.iter().map(|m| m.replace(' ', ""));
    let tokens = bytes.chain(merged).chain(["<|endoftext|>".to_string()]);
    let encoder: serde_json::Map<_, _> = tokens.enumerate().map(|(i, t)| (t, json!(i))).collect();
    let paths = (folder.join("encoder.json"), folder.join("vocab.bpe"));
    std::fs::write(&paths.0, serde_json::to_string(&encoder).unwrap()).unwrap();
    std::fs::write(&paths.1, format!("#version: 0.2\n{}\n", MERGES.join("\n"))).unwrap();
    paths
}

/// Writes the folder: `config.json`, `model.safetensors` and the two files of the tokenizer.
pub fn write(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let config = json!({
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_positions": POSITIONS,
        "eos_token_id": VOCAB - 1,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("wte.weight".into(), vec![VOCAB, WIDTH]),
        ("wpe.weight".into(), vec![POSITIONS, WIDTH]),
        ("ln_f.weight".into(), vec![WIDTH]),
        ("ln_f.bias".into(), vec![WIDTH]),
    ];
    for l in 0..LAYERS {
        for norm in ["ln_1", "ln_2"] {
            shapes.extend(["weight", "bias"].map(|n| (format!("h.{l}.{norm}.{n}"), vec![WIDTH])));
        }
        for (name, input, output) in [
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ] {
            shapes.push((format!("h.{l}.{name}.weight"), vec![input, output]));
            shapes.push((format!("h.{l}.{name}.bias"), vec![output]));
        }
    }
    let mut seed = 1u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.3
    };
    let data: Vec<Vec<u8>> =
        shapes.iter().map(|(_, s)| (0..s.iter().product()).flat_map(|_| random().to_le_bytes()).collect()).collect();
    let views = shapes.iter().zip(&data).map(|((n, s), d)| (n.as_str(), TensorView::new(Dtype::F32, s.clone(), d).unwrap()));
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    write_bpe(folder);
}
