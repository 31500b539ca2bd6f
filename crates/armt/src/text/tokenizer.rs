//! `tokenizer.json` of a model folder, as Hugging Face writes it.
//!
//! A text is turned into tokens as it stands: no special token is put before or after it, nothing is cut off and nothing is padded,
//! whatever the file's settings for training were.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, DecodeStream};

use crate::checkpoint::write_beside;
use crate::error::{Error, Result};
use crate::model::Model;

/// GPT-2's one special token.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Text to tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    joint: Joint,
}

/// What becomes of the space at which a text is cut in two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joint {
    /// The second piece starts with it: byte-level tokenizers.
    Keep,
    /// It is dropped, because the tokenizer puts one before every text: SentencePiece-like ones.
    Drop,
    /// Pieces give other tokens than the whole, however it is cut.
    None,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a folder. A missing or damaged file is an error with its name.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| Error::file(&path, format!("expected a Hugging Face tokenizer: {e}")))?;
        Self::checked(inner).map_err(|e| Error::file(&path, e))
    }

    /// A folder's tokenizer for `model`. Refused if a token of it has no row in the model's embedding.
    pub fn load_for(folder: &Path, model: &Model) -> Result<Self> {
        let tokenizer = Self::load(folder)?;
        let (tokens, rows) = (tokenizer.vocabulary(), model.backbone().vocab);
        if tokens > rows {
            let path = folder.join("tokenizer.json");
            return Err(Error::file(&path, format!("its tokens go up to {}, but the model has {rows}", tokens - 1)));
        }
        Ok(tokenizer)
    }

    /// A folder's tokenizer, whichever files it is in: `tokenizer.json`, or GPT-2's `vocab.json` and `merges.txt` or `encoder.json` and
    /// `vocab.bpe`. `None` if none of these is there; a damaged file is an error with its name.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        if folder.join("tokenizer.json").is_file() {
            return Self::load(folder).map(Some);
        }
        for (encoder, merges) in [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")] {
            let (encoder, merges) = (folder.join(encoder), folder.join(merges));
            if encoder.is_file() && merges.is_file() {
                return Self::from_gpt2(&encoder, &merges).map(Some);
            }
        }
        Ok(None)
    }

    /// GPT-2's byte-level BPE from its two files: `encoder.json` (or `vocab.json`), tokens to numbers, and `vocab.bpe` (or `merges.txt`),
    /// one merge a line. A missing or damaged file is an error with its name.
    pub fn from_gpt2(encoder: &Path, merges: &Path) -> Result<Self> {
        let read = |path: &Path| std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source });
        let tokens: HashMap<String, u32> = serde_json::from_str(&read(encoder)?)
            .map_err(|e| Error::file(encoder, format!("expected tokens and their numbers: {e}")))?;
        let special = tokens.contains_key(END_OF_TEXT);
        let text = read(merges)?;
        let mut pairs: Merges = Vec::new();
        for (i, line) in text.lines().enumerate().filter(|(i, line)| !(line.is_empty() || *i == 0 && line.starts_with("#version")))
        {
            let pair = line.split_once(' ').filter(|(_, b)| !b.contains(' '));
            let (a, b) =
                pair.ok_or_else(|| Error::file(merges, format!("line {}: expected two tokens to merge, got '{line}'", i + 1)))?;
            pairs.push((a.into(), b.into()));
        }
        let bpe = BPE::builder().vocab_and_merges(tokens.into_iter().collect::<Vocab>(), pairs).build();
        let bpe = bpe.map_err(|e| Error::file(merges, format!("it does not fit {}: {e}", encoder.display())))?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        inner.with_decoder(Some(ByteLevel::new(true, true, true)));
        inner.with_post_processor(Some(ByteLevel::new(true, false, true)));
        if special {
            inner.add_special_tokens([AddedToken::from(END_OF_TEXT, true)]).map_err(|e| Error::file(encoder, e))?;
        }
        Self::checked(inner)
    }

    /// Takes out what a file may ask for that would lose or add text, and finds out how texts may be cut.
    fn checked(mut inner: tokenizers::Tokenizer) -> Result<Self> {
        inner.with_truncation(None).map_err(|e| Error::Argument(e.to_string()))?;
        inner.with_padding(None);
        let mut tokenizer = Tokenizer { inner, joint: Joint::None };
        for joint in [Joint::Drop, Joint::Keep] {
            if tokenizer.holds(joint)? {
                tokenizer.joint = joint;
            }
        }
        Ok(tokenizer)
    }

    /// Whether some texts, cut at a space, give the tokens of the whole.
    fn holds(&self, joint: Joint) -> Result<bool> {
        for (left, right) in [("a", "b"), ("One,", "two"), ("it's", "1999."), ("end.", "\"So"), ("é", "ö")] {
            let second = if joint == Joint::Keep { format!(" {right}") } else { right.to_string() };
            let pieces = [self.encode(left)?, self.encode(&second)?].concat();
            if pieces != self.encode(&format!("{left} {right}"))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn joint(&self) -> Joint {
        self.joint
    }

    /// Writes `tokenizer.json` into a folder, beside it first and then renamed.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join("tokenizer.json");
        let text = self.inner.to_string(false).map_err(|e| Error::file(&path, e))?;
        write_beside(&path, text.as_bytes())
    }

    /// One more than the largest token.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1)
    }

    /// The token that ends a text in GPT-2's vocabulary, `<|endoftext|>`; `None` if the tokenizer has none.
    pub fn end_of_text(&self) -> Option<i32> {
        self.inner.token_to_id(END_OF_TEXT).and_then(|id| i32::try_from(id).ok())
    }

    /// The tokens of a text. An error of the tokenizer, as for a character that it has no token for, is passed on.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| Error::Argument(format!("tokenizer: {e}")))?;
        Ok(encoding.get_ids().iter().map(|id| *id as i32).collect())
    }

    /// The text of tokens, special ones left out. Bytes that are no UTF-8 become U+FFFD; a negative token is an error.
    pub fn decode(&self, tokens: &[i32]) -> Result<String> {
        let ids = tokens.iter().map(|t| number(*t)).collect::<Result<Vec<_>>>()?;
        self.inner.decode(&ids, true).map_err(|e| Error::Argument(format!("tokenizer: {e}")))
    }

    /// Tokens to text, one by one.
    pub fn speech(&self) -> Speech<'_> {
        Speech(self.inner.decode_stream(true))
    }
}

fn number(token: i32) -> Result<u32> {
    u32::try_from(token).map_err(|_| Error::Argument(format!("expected tokens from 0 up, got {token}")))
}

/// Text that comes token by token; a character whose bytes are in several tokens is said with the last of them.
pub struct Speech<'t>(
    DecodeStream<
        't,
        tokenizers::ModelWrapper,
        tokenizers::NormalizerWrapper,
        tokenizers::PreTokenizerWrapper,
        tokenizers::PostProcessorWrapper,
        tokenizers::DecoderWrapper,
    >,
);

impl Speech<'_> {
    /// The text that one more token adds; empty while a character is not whole. A negative token is an error.
    pub fn say(&mut self, token: i32) -> Result<String> {
        let text = self.0.step(number(token)?).map_err(|e| Error::Argument(format!("tokenizer: {e}")))?;
        Ok(text.unwrap_or_default())
    }
}

/// The tokens that end a text, as a Hugging Face configuration names them: `eos_token_id`, a number or a list.
pub(crate) fn end_tokens(backbone: &Value) -> Vec<i32> {
    let id = |v: &Value| v.as_i64().and_then(|n| i32::try_from(n).ok());
    match backbone.get("eos_token_id") {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}
