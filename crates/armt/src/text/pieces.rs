//! A tokenizer from its pieces, as GGUF files have them: `tokenizer.json` is written for it and read.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::Tokenizer;
use super::border::{LLAMA3, QWEN2};
use crate::error::{Error, Result};

/// What a GGUF file says of its tokenizer, by its names: `tokenizer.ggml.NAME`.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    /// `gpt2`, byte-level pieces that are merged in an order, or `llama`, pieces of SentencePiece with scores.
    pub model: String,
    /// How `gpt2` cuts a text before it.
    pub pre: String,
    /// The pieces.
    pub tokens: Vec<String>,
    /// What each is: 1 an ordinary one, 2 for what is unknown, 3 a mark, 4 one of a user's, 6 a byte.
    pub kinds: Vec<u64>,
    /// Of `llama`.
    pub scores: Vec<f64>,
    /// Of `gpt2`: pairs with a space between them.
    pub merges: Vec<String>,
    /// The piece that texts begin with, where they do.
    pub begin: Option<usize>,
    /// Whether `llama` puts a space before a text.
    pub space_before: bool,
}

/// llama.cpp's names of Llama 3's way to cut a text. Where a file says nothing else, its texts begin with a token, and a word that is a piece is
/// that piece whatever the merges are.
const LLAMA3_NAMES: [&str; 3] = ["llama3", "llama-v3", "llama-bpe"];

const MARK: u64 = 3;
const USERS: u64 = 4;
const UNKNOWN: u64 = 2;

impl Tokenizer {
    /// A tokenizer from its pieces. A kind, or a way to cut texts, that is not known is refused by its name.
    pub fn from_pieces(pieces: &Pieces) -> Result<Self> {
        let (model, normalizer, pre, decoder) = match pieces.model.as_str() {
            "gpt2" => (
                pieces.merged(),
                Value::Null,
                pieces.cut()?,
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            ),
            "llama" => (pieces.scored(), pieces.spaces(), Value::Null, pieces.unspaced()),
            other => return Err(Error::Tokenizer(format!("expected a tokenizer of the kind gpt2 or llama, got {other}"))),
        };
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": pieces.added(), "normalizer": normalizer,
            "pre_tokenizer": pre, "post_processor": pieces.beginning(), "decoder": decoder, "model": model,
        });
        Tokenizer::from_json(json.to_string().as_bytes())
    }
}

impl Pieces {
    /// Whether texts begin with a token where a file of this `model` and `pre` does not say so.
    pub fn usually_begin(model: &str, pre: &str) -> bool {
        model == "llama" || LLAMA3_NAMES.contains(&pre)
    }

    fn kind(&self, piece: usize) -> u64 {
        self.kinds.get(piece).copied().unwrap_or(1)
    }

    fn vocab(&self) -> Value {
        self.tokens.iter().enumerate().map(|(i, token)| (token.clone(), i.into())).collect::<serde_json::Map<_, _>>().into()
    }

    fn added(&self) -> Value {
        let added = (0..self.tokens.len()).filter(|i| [MARK, USERS].contains(&self.kind(*i))).map(|i| {
            json!({"id": i, "content": self.tokens[i], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": self.kind(i) == MARK})
        });
        added.collect()
    }

    fn beginning(&self) -> Value {
        let Some((i, token)) = self.begin.and_then(|i| Some((i, self.tokens.get(i)?))) else { return Value::Null };
        json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {token.as_str(): {"id": token, "ids": [i], "tokens": [token]}},
        })
    }

    fn merged(&self) -> Value {
        json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": LLAMA3_NAMES.contains(&self.pre.as_str()),
            "vocab": self.vocab(), "merges": self.merges})
    }

    fn cut(&self) -> Result<Value> {
        let bytes =
            |own_cut: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": own_cut});
        let split = |pattern: &str| {
            let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            json!({"type": "Sequence", "pretokenizers": [split, bytes(false)]})
        };
        Ok(match self.pre.as_str() {
            "gpt-2" | "gpt2" => bytes(true),
            "smollm" => json!({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, bytes(true)]}),
            llama3 if LLAMA3_NAMES.contains(&llama3) => split(LLAMA3),
            "qwen2" => split(QWEN2),
            other => {
                let known = "gpt-2, smollm, llama-bpe and qwen2";
                return Err(Error::Tokenizer(format!("it cuts texts in the way {other}; known are {known}")));
            }
        })
    }

    /// SentencePiece's pieces as merges: any two that make a third, those of better scores first.
    fn scored(&self) -> Value {
        let ids: HashMap<&str, usize> = self.tokens.iter().enumerate().map(|(i, token)| (token.as_str(), i)).collect();
        let score = |i: usize| self.scores.get(i).copied().unwrap_or_default();
        let mut merges: Vec<(f64, usize, usize, &str, &str)> = Vec::new();
        for (i, token) in self.tokens.iter().enumerate() {
            let mut own: Vec<(usize, usize, &str, &str)> = Vec::new();
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(l), Some(r)) = (ids.get(left), ids.get(right)) {
                    own.push((*l, *r, left, right));
                }
            }
            own.sort_unstable();
            merges.extend(own.into_iter().map(|(_, _, l, r)| (score(i), l.chars().count(), r.chars().count(), l, r)));
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((b.1, b.2).cmp(&(a.1, a.2))));
        let merges: Vec<Value> = merges.into_iter().map(|(_, _, _, l, r)| json!([l, r])).collect();
        let unknown = (0..self.tokens.len()).find(|i| self.kind(*i) == UNKNOWN).map(|i| self.tokens[i].as_str());
        json!({"type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": self.vocab(), "merges": merges})
    }

    fn spaces(&self) -> Value {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        match self.space_before {
            true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}),
            false => replace,
        }
    }

    fn unspaced(&self) -> Value {
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if self.space_before {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({"type": "Sequence", "decoders": decoders})
    }
}
