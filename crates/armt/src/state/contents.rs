//! What a state file says, for people: without the model that it belongs to.

use std::path::Path;

use half::bf16;
use safetensors::tensor::Dtype;
use serde::Serialize;

use super::Count;
use super::file::{Opened, TAILS, read};
use crate::error::{Error, Result};

/// What a whole, undamaged state file says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Contents {
    /// `armt-memory-2`, or `armt-memory-1`.
    pub format: String,
    /// The model's name, where it is known.
    pub name: Option<String>,
    /// The model's fingerprint.
    pub model: String,
    /// The fingerprint of its tokenizer and vocabulary, where it is known.
    pub tokenizer: Option<String>,
    /// The kind of memory.
    pub kind: String,
    /// Of each text, what was read.
    pub texts: Vec<TextContents>,
    /// The tensors of the memory, by their names.
    pub tensors: Vec<TensorContents>,
    /// Bytes of the file.
    pub bytes: usize,
}

/// What was read of a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TextContents {
    /// Tokens in the memory.
    pub tokens: u64,
    /// Segments in the memory.
    pub segments: u64,
    /// A hash of these tokens, where they are known.
    pub text_hash: Option<String>,
    /// Tokens after these that are not in the memory yet.
    pub open_tokens: usize,
    /// Bytes after these that are no tokens yet.
    pub open_bytes: usize,
    /// A hash of what is open; nothing where nothing is.
    pub open_hash: Option<String>,
}

/// A tensor of a memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorContents {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// Its axes.
    pub shape: Vec<usize>,
    /// The root of the sum of its squares.
    pub norm: f64,
    /// Its largest number, whatever the sign.
    pub largest: f64,
    /// Its numbers.
    #[serde(skip)]
    pub values: Vec<f32>,
}

impl Contents {
    /// What a file says. One that is no state file, or damaged, is refused.
    pub fn load(path: &Path) -> Result<Self> {
        Self::of(&read(path)?).map_err(|e| Error::file(path, e))
    }

    /// What the bytes of a file say, as [`Contents::load`] does.
    pub fn of(bytes: &[u8]) -> Result<Self> {
        let opened = Opened::new(bytes)?;
        let own = |key: &str| opened.metadata.get(key).cloned();
        let counts = opened.counts(None)?;
        let tails = opened.tails(counts.len())?;
        let text = |(count, tail): (&Count, &super::Tail)| {
            let open: Vec<u8> = tail.tokens.iter().flat_map(|token| token.to_le_bytes()).chain(tail.text.bytes.clone()).collect();
            TextContents {
                tokens: count.tokens,
                segments: count.segments,
                text_hash: count.text.map(|hash| hash.to_string()),
                open_tokens: tail.tokens.len(),
                open_bytes: tail.text.bytes.len(),
                open_hash: (!tail.is_empty()).then(|| blake3::hash(&open).to_string()),
            }
        };
        let mut tensors = Vec::new();
        for (name, view) in opened.tensors.iter().filter(|(name, _)| !TAILS.contains(&name.as_str())) {
            let values = numbers(view.dtype(), view.data()).ok_or_else(|| Error::StateFile(format!("{name} has no numbers")))?;
            tensors.push(TensorContents {
                name: name.clone(),
                dtype: view.dtype().to_string().to_lowercase(),
                shape: view.shape().to_vec(),
                norm: values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt(),
                largest: values.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max),
                values,
            });
        }
        Ok(Contents {
            format: opened.get("format").into(),
            name: own("name"),
            model: opened.get(if opened.is_first() { "fingerprint" } else { "model" }).into(),
            tokenizer: own("tokenizer"),
            kind: opened.get("kind").into(),
            texts: counts.iter().zip(&tails).map(text).collect(),
            tensors,
            bytes: bytes.len(),
        })
    }

    /// In what two files differ: nothing, where all that is said and kept is equal to the bit.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let mut found = Vec::new();
        let mut say = |what: &str, here: String, there: String| {
            if here != there {
                found.push(Difference::Said { what: what.into(), here, there });
            }
        };
        let shown = |text: &Option<String>| text.clone().unwrap_or_else(|| "nothing".into());
        say("format", self.format.clone(), other.format.clone());
        say("name", shown(&self.name), shown(&other.name));
        say("model", self.model.clone(), other.model.clone());
        say("tokenizer", shown(&self.tokenizer), shown(&other.tokenizer));
        say("kind", self.kind.clone(), other.kind.clone());
        say("texts", self.texts.len().to_string(), other.texts.len().to_string());
        for (i, (a, b)) in self.texts.iter().zip(&other.texts).enumerate() {
            let of = |what: &str| format!("{what} of text {}", i + 1);
            say(&of("tokens"), a.tokens.to_string(), b.tokens.to_string());
            say(&of("segments"), a.segments.to_string(), b.segments.to_string());
            say(&of("what was read"), shown(&a.text_hash), shown(&b.text_hash));
            say(&of("open tokens"), a.open_tokens.to_string(), b.open_tokens.to_string());
            say(&of("open bytes"), a.open_bytes.to_string(), b.open_bytes.to_string());
            say(&of("what is open"), shown(&a.open_hash), shown(&b.open_hash));
        }
        let axes = |t: Option<&TensorContents>| t.map_or("nothing".into(), |t| format!("{} {:?}", t.dtype, t.shape));
        let named = |all: &'_ [TensorContents], name: &str| all.iter().position(|t| t.name == name);
        let missing = other.tensors.iter().filter(|t| named(&self.tensors, &t.name).is_none());
        for name in self.tensors.iter().chain(missing).map(|t| &t.name) {
            let [a, b] = [self, other].map(|c| named(&c.tensors, name).map(|i| &c.tensors[i]));
            match (a, b) {
                (Some(a), Some(b)) if (&a.dtype, &a.shape) == (&b.dtype, &b.shape) => found.extend(a.difference(b)),
                _ => found.push(Difference::Said { what: name.clone(), here: axes(a), there: axes(b) }),
            }
        }
        found
    }
}

/// Something in which two files differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Difference {
    /// What one says and the other does not.
    Said {
        /// Of what.
        what: String,
        /// In the one.
        here: String,
        /// In the other.
        there: String,
    },
    /// Numbers of a tensor.
    Numbers {
        /// Its name.
        what: String,
        /// How many differ.
        differ: usize,
        /// Of how many.
        of: usize,
        /// The largest difference.
        largest: f64,
        /// The norm of the difference over that of the one.
        relative: f64,
    },
}

impl TensorContents {
    /// In what it differs from one of the same shape.
    fn difference(&self, other: &Self) -> Option<Difference> {
        let pairs = || self.values.iter().zip(&other.values);
        let differ = pairs().filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let off = || pairs().map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
        let norm = off().map(|d| d * d).sum::<f64>().sqrt();
        (differ > 0).then(|| Difference::Numbers {
            what: self.name.clone(),
            differ,
            of: self.values.len(),
            largest: off().fold(0.0, f64::max),
            relative: if norm == 0.0 { 0.0 } else { norm / self.norm.max(f64::MIN_POSITIVE) },
        })
    }
}

/// Numbers of a type that states have.
fn numbers(dtype: Dtype, data: &[u8]) -> Option<Vec<f32>> {
    match dtype {
        Dtype::F32 => Some(data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        Dtype::BF16 => Some(data.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()),
        Dtype::I32 => Some(data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b) as f32).collect()),
        _ => None,
    }
}
