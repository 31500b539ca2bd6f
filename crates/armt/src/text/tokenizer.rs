//! `tokenizer.json` of a model folder, as Hugging Face writes it.
//!
//! A text is turned into tokens as it stands: no special token is put before or after it, nothing is cut off and nothing is padded,
//! whatever the file's settings for training were. Who reads a text from its start puts [`Tokenizer::begin_of_text`] before it. Where a `vocabulary.json` lies beside it, tokens are numbered by that.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, DecodeStream};

use super::border::Borders;
use super::vocabulary::{FILE as VOCABULARY, Vocabulary};
use super::words::KnownWords;
use crate::error::{Error, Result};
use crate::files::{quietly, write_beside};

/// What many tokenizers end a text with.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Text to tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    joint: Joint,
    borders: Borders,
    vocabulary: Option<Vocabulary>,
    known: KnownWords,
}

/// More tokens than any tokenizer has. Numbers beyond it are damage, and tables by number would fill the machine.
const MOST_TOKENS: usize = 1 << 24;

/// The end of a text whose tokens depend on what comes after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenText {
    /// Its bytes, the last of which may be the start of a character.
    pub bytes: Vec<u8>,
    /// Whether other text came before it.
    pub cut: bool,
}

/// A model need not have a tokenizer: one that learns pairs of symbols has none.
const MISSING: &str =
    "expected tokenizer.json in this folder, found none; a model that was trained on tokens alone has none and reads no texts";

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
    /// Reads `tokenizer.json` of a folder, and `vocabulary.json` where it has one. A missing or damaged file is an error with its name.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => Error::io(folder, std::io::Error::new(ErrorKind::NotFound, MISSING)),
            _ => Error::io(&path, source),
        })?;
        Self::from_json(&bytes).map_err(|e| Error::file(&path, e))?.with_vocabulary_of(folder)
    }

    /// A tokenizer from the text of its `tokenizer.json`. Anything else is an error.
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        let refuse = |e: &dyn std::fmt::Display| Error::Tokenizer(format!("expected a Hugging Face tokenizer: {e}"));
        // The tokenizers crate panics on some of what is no JSON, and on parts that lack something.
        let _: serde::de::IgnoredAny = serde_json::from_slice(bytes).map_err(|e| refuse(&e))?;
        quietly(|| Self::checked(tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| refuse(&e))?))
            .unwrap_or_else(|| Err(refuse(&"a part of it is not as it should be")))
    }

    /// A folder's tokenizer for a model of `vocab` tokens, whichever files it is in. Refused if a token of it has no row in the model's embedding, and
    /// with a small vocabulary also if the model has more rows.
    pub fn load_for(folder: &Path, vocab: usize) -> Result<Self> {
        // Where there are no files at all, the usual one is said to be missing.
        let tokenizer = Self::find(folder)?.map_or_else(|| Self::load(folder), Ok)?;
        tokenizer.expect_fits(vocab, folder)?;
        Ok(tokenizer)
    }

    /// A small vocabulary of `size` numbers, `hashed` of them for what is not kept: every token of the texts in `needed`, and the most frequent
    /// ones by `counts`, which has how often each token of the tokenizer comes. Of tokens that come equally often, and where too few come
    /// at all, those that the tokenizer numbers first are kept. Refuses a size that does not hold what is needed, or that holds as much
    /// as the tokenizer itself.
    pub fn choose_vocabulary(&self, counts: &[u64], needed: &[String], size: usize, hashed: usize) -> Result<Vocabulary> {
        if self.is_small() {
            return Err(Error::Tokenizer("expected a tokenizer with all its tokens, got one with a small vocabulary".into()));
        }
        let tokens = self.vocabulary();
        if counts.len() != tokens {
            return Err(Error::Tokenizer(format!("expected counts of the tokenizer's {tokens} tokens, got {}", counts.len())));
        }
        let mut must = vec![false; tokens];
        let mut unlike = 0;
        for text in needed {
            for token in self.encode(text)? {
                // The tokenizer's own, which are below their number.
                unlike += usize::from(!std::mem::replace(&mut must[token as usize], true));
            }
        }
        if size >= tokens || size.saturating_sub(hashed) < unlike.max(1) {
            let expected =
                format!("at least {} ({unlike} needed tokens and {hashed} hashed) and below {tokens}", unlike.max(1) + hashed);
            return Err(Error::config("vocabulary size", &expected, size));
        }
        let rank = |t: &i32| (std::cmp::Reverse(counts[*t as usize]), *t);
        let mut kept: Vec<i32> = (0..tokens as i32).collect();
        kept.sort_by_key(|t| (!must[*t as usize], rank(t)));
        kept.truncate(size - hashed);
        kept.sort_by_key(rank);
        Vocabulary::new(tokens, kept, hashed)
    }

    /// Refuses a model of `vocab` tokens that the tokenizer, or its small vocabulary from `folder`, is not for.
    pub fn expect_fits(&self, vocab: usize, folder: &Path) -> Result<()> {
        let (tokens, rows) = (self.vocabulary(), vocab);
        match &self.vocabulary {
            Some(_) if tokens != rows => {
                let message = format!("it is for a model of vocab_size {tokens}, but this model's is {rows}");
                Err(Error::file(&folder.join(VOCABULARY), message))
            }
            None if tokens > rows => {
                let message = format!("its tokens go up to {}, but the model has {rows}", tokens - 1);
                Err(Error::file(&folder.join("tokenizer.json"), message))
            }
            _ => Ok(()),
        }
    }

    /// A folder's tokenizer, whichever files it is in: `tokenizer.json`, or GPT-2's `vocab.json` and `merges.txt` or `encoder.json` and
    /// `vocab.bpe`; with `vocabulary.json` where that is beside them. `None` if there is no tokenizer; a damaged file is an error with
    /// its name.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        if folder.join("tokenizer.json").is_file() {
            return Self::load(folder).map(Some);
        }
        for (encoder, merges) in [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")] {
            let (encoder, merges) = (folder.join(encoder), folder.join(merges));
            if encoder.is_file() && merges.is_file() {
                return Self::from_gpt2(&encoder, &merges)?.with_vocabulary_of(folder).map(Some);
            }
        }
        Ok(None)
    }

    /// The tokenizer with tokens numbered by `vocabulary.json` of a folder, where that has one. A damaged one, and one for another tokenizer,
    /// is an error with its name.
    pub fn with_vocabulary_of(self, folder: &Path) -> Result<Self> {
        match Vocabulary::find(folder)? {
            Some(vocabulary) => self.with_vocabulary(vocabulary).map_err(|e| Error::file(&folder.join(VOCABULARY), e)),
            None => Ok(self),
        }
    }

    /// The tokenizer with tokens numbered by a small vocabulary. One for a tokenizer of another size is refused.
    pub fn with_vocabulary(self, vocabulary: Vocabulary) -> Result<Self> {
        let (tokens, own) = (vocabulary.tokens(), self.all());
        if tokens != own {
            return Err(Error::Tokenizer(format!("it is for a tokenizer of {tokens} tokens, but this one has {own}")));
        }
        Ok(Tokenizer { vocabulary: Some(vocabulary), known: KnownWords::default(), ..self })
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
        inner.with_truncation(None).map_err(|e| Error::Tokenizer(e.to_string()))?;
        inner.with_padding(None);
        let tokens = tokens_of(&inner);
        if tokens > MOST_TOKENS {
            return Err(Error::Tokenizer(format!("expected tokens below {MOST_TOKENS}, got {}", tokens - 1)));
        }
        let value = as_json(&inner)?;
        let borders = Borders::of(&value, inner.get_added_tokens_decoder().into_values());
        let mut tokenizer = Tokenizer { inner, joint: Joint::None, borders, vocabulary: None, known: KnownWords::default() };
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
            let pieces = [self.encode_whole(left)?, self.encode_whole(&second)?].concat();
            if pieces != self.encode_whole(&format!("{left} {right}"))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn joint(&self) -> Joint {
        self.joint
    }

    pub(super) fn borders(&self) -> &Borders {
        &self.borders
    }

    /// Writes `tokenizer.json` into a folder, and `vocabulary.json` if it has a small vocabulary; beside them first and then renamed.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join("tokenizer.json");
        let text = broken_or(|| self.inner.to_string(false)).map_err(|e| Error::file(&path, e))?;
        write_beside(&path, text.as_bytes())?;
        self.vocabulary.as_ref().map_or(Ok(()), |v| v.save(folder))
    }

    /// BLAKE3 of what decides which numbers a text becomes: pieces, merges, added tokens and how text is prepared for them, and the small
    /// vocabulary if there is one. How it is written in files does not count, nor what it says of other things.
    pub fn fingerprint(&self) -> Result<String> {
        let value = as_json(&self.inner)?;
        let mut hasher = blake3::Hasher::new();
        for key in ["added_tokens", "normalizer", "pre_tokenizer", "model"] {
            add_value(&mut hasher, key, &value[key]);
        }
        if let Some(small) = &self.vocabulary {
            add_value(&mut hasher, "tokens", &small.tokens().into());
            add_value(&mut hasher, "hashed", &(small.size() - small.kept().len()).into());
            add_value(&mut hasher, "kept", &small.kept().into());
        }
        Ok(hasher.finalize().to_string())
    }

    /// One more than the largest token.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary.as_ref().map_or_else(|| self.all(), Vocabulary::size)
    }

    /// Whether tokens are numbered by a small vocabulary.
    pub fn is_small(&self) -> bool {
        self.vocabulary.is_some()
    }

    /// Tokens of the tokenizer, before any are left out.
    fn all(&self) -> usize {
        tokens_of(&self.inner)
    }

    /// The token that ends a text in GPT-2's vocabulary, `<|endoftext|>`; `None` if the tokenizer has none, or shares its number with
    /// others.
    pub fn end_of_text(&self) -> Option<i32> {
        let id = self.inner.token_to_id(END_OF_TEXT)?;
        match &self.vocabulary {
            None => i32::try_from(id).ok(),
            Some(small) => small.number(id).ok().filter(|n| (*n as usize) < small.kept().len()),
        }
    }

    /// The token that texts begin with, where the file puts one before them, as Llama's does; `None` if it puts none, or several.
    pub fn begin_of_text(&self) -> Option<i32> {
        let with = broken_or(|| self.inner.encode_fast("a", true)).ok()?;
        let without = broken_or(|| self.inner.encode_fast("a", false)).ok()?;
        let before = with.get_ids().windows(without.len().max(1)).position(|ids| ids == without.get_ids())?;
        let id = if before == 1 { with.get_ids()[0] } else { return None };
        match &self.vocabulary {
            None => i32::try_from(id).ok(),
            Some(small) => small.number(id).ok(),
        }
    }

    /// The tokens of a text. An error of the tokenizer, as for a character that it has no token for, is passed on.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        match self.borders.words(text) {
            Some(words) => self.known.encode(words, |word| self.encode_whole(word)),
            None => self.encode_whole(text),
        }
    }

    /// The tokens of a text, all by the tokenizer of the file.
    fn encode_whole(&self, text: &str) -> Result<Vec<i32>> {
        let encoding = broken_or(|| self.inner.encode_fast(text, false))?;
        let ids = encoding.get_ids().iter();
        match &self.vocabulary {
            None => Ok(ids.map(|id| *id as i32).collect()),
            Some(small) => ids.map(|id| small.number(*id)).collect(),
        }
    }

    /// The tokens of a part of a text between two of its borders; `cut` says whether other text is before it. A text begins with the
    /// token that texts begin with.
    pub(super) fn encode_part(&self, part: &str, cut: bool) -> Result<Vec<i32>> {
        match self.joint {
            Joint::Drop if cut => self.encode(part.strip_prefix(' ').unwrap_or(part)),
            _ if cut => self.encode(part),
            _ => Ok(self.begin_of_text().into_iter().chain(self.encode(part)?).collect()),
        }
    }

    /// The tokens of the end of a text, if nothing comes after it. Bytes that are no UTF-8 are read as U+FFFD.
    pub fn encode_open(&self, open: &OpenText) -> Result<Vec<i32>> {
        if open.bytes.is_empty() { Ok(Vec::new()) } else { self.encode_part(&String::from_utf8_lossy(&open.bytes), open.cut) }
    }

    /// The text of tokens, special ones left out. Bytes that are no UTF-8 become U+FFFD, and so does a token of a small vocabulary that
    /// stands for many; a negative token is an error.
    pub fn decode(&self, tokens: &[i32]) -> Result<String> {
        let ids = tokens.iter().map(|t| self.id(*t)).collect::<Result<Vec<_>>>()?;
        let mut text = String::new();
        for (i, known) in ids.split(Option::is_none).enumerate() {
            if i > 0 {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            let known: Vec<u32> = known.iter().flatten().copied().collect();
            text += &broken_or(|| self.inner.decode(&known, true))?;
        }
        Ok(text)
    }

    /// A token as the tokenizer's file has it, a special one too; `None` for one that stands for many, or for none.
    pub fn name(&self, token: i32) -> Option<String> {
        self.id(token).ok().flatten().and_then(|id| self.inner.id_to_token(id))
    }

    /// Tokens to text, one by one.
    pub fn speech(&self) -> Speech<'_> {
        Speech { tokenizer: self, stream: self.inner.decode_stream(true) }
    }

    /// A token as the file numbers it; `None` where it stands for many.
    fn id(&self, token: i32) -> Result<Option<u32>> {
        match &self.vocabulary {
            Some(small) => small.token(token),
            None => u32::try_from(token).map(Some).map_err(|_| Error::Tokenizer(format!("expected tokens from 0 up, got {token}"))),
        }
    }
}

fn as_json(tokenizer: &tokenizers::Tokenizer) -> Result<Value> {
    serde_json::to_value(tokenizer).map_err(|e| Error::Tokenizer(format!("tokenizer: {e}")))
}

/// One more than the largest token.
fn tokens_of(inner: &tokenizers::Tokenizer) -> usize {
    inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1)
}

/// What a tokenizer gives, or that it refused: by an error or, where its file is not as it should be, by a panic.
fn broken_or<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let done = quietly(work).ok_or_else(|| Error::Tokenizer("the tokenizer failed: its file is not as it should be".into()))?;
    done.map_err(|e| Error::Tokenizer(format!("tokenizer: {e}")))
}

/// Adds a key and its value to a hash, keys in their order. What is null or false is left out: a later version that writes more such
/// settings is to give the same.
fn add_value(hasher: &mut blake3::Hasher, key: &str, value: &Value) {
    let mut text = |kind: u8, text: &str| {
        hasher.update(&[kind]);
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    if matches!(value, Value::Null | Value::Bool(false)) {
        return;
    }
    text(b'k', key);
    match value {
        Value::Array(list) => {
            text(b'a', "");
            list.iter().for_each(|item| add_value(hasher, "", item));
            hasher.update(b".");
        }
        Value::Object(map) => {
            text(b'o', "");
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort_unstable();
            keys.into_iter().for_each(|key| add_value(hasher, key, &map[key]));
            hasher.update(b".");
        }
        Value::String(string) => text(b's', string),
        number => text(b'n', &number.to_string()),
    }
}

/// Text that comes token by token; a character whose bytes are in several tokens is said with the last of them.
pub struct Speech<'t> {
    tokenizer: &'t Tokenizer,
    stream: DecodeStream<
        't,
        tokenizers::ModelWrapper,
        tokenizers::NormalizerWrapper,
        tokenizers::PreTokenizerWrapper,
        tokenizers::PostProcessorWrapper,
        tokenizers::DecoderWrapper,
    >,
}

impl Speech<'_> {
    /// The text that one more token adds; empty while a character is not whole, U+FFFD for a token that stands for many. A negative
    /// token is an error.
    pub fn say(&mut self, token: i32) -> Result<String> {
        let Some(id) = self.tokenizer.id(token)? else {
            // What was left open cannot become whole after this.
            *self = self.tokenizer.speech();
            return Ok(char::REPLACEMENT_CHARACTER.into());
        };
        let text = broken_or(|| self.stream.step(id))?;
        Ok(text.unwrap_or_default())
    }
}

/// The tokens that end a text, as a Hugging Face configuration names them: `eos_token_id`, a number or a list.
pub fn end_tokens(backbone: &Value) -> Vec<i32> {
    let id = |v: &Value| v.as_i64().and_then(|n| i32::try_from(n).ok());
    match backbone.get("eos_token_id") {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpt2() -> Tokenizer {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/gpt2");
        Tokenizer::find(&data).unwrap().unwrap()
    }

    #[test]
    fn words_that_are_known_have_the_tokens_of_the_whole() {
        let (tokenizer, text) = (gpt2(), std::cell::RefCell::new(String::new()));
        let word = prop_oneof![
            "[a-z]{1,8}",
            " [A-Za-z]{1,8}",
            "[ \n\t\u{a0}\u{3000}]{1,3}",
            "[0-9.,;!?\"'-]{1,4}",
            Just("'re".to_string()),
            Just("<|endoftext|>".to_string()),
            Just("<|end".to_string()),
            any::<char>().prop_map(String::from),
        ];
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let texts = proptest::collection::vec(word, 0..60).prop_map(|words| words.concat());
        runner
            .run(&texts, |piece| {
                // Twice, so that its words are known the second time.
                for _ in 0..2 {
                    prop_assert_eq!(tokenizer.encode(&piece).unwrap(), tokenizer.encode_whole(&piece).unwrap(), "{:?}", piece);
                }
                *text.borrow_mut() += &piece;
                Ok(())
            })
            .unwrap();
        let text = text.into_inner();
        assert_eq!(tokenizer.encode(&text).unwrap(), tokenizer.encode_whole(&text).unwrap());
    }

    #[test]
    fn another_vocabulary_forgets_the_words_of_the_first() {
        let tokenizer = gpt2();
        let before = tokenizer.encode(" the garden").unwrap();
        let tokens = tokenizer.all();
        let small = tokenizer.with_vocabulary(Vocabulary::new(tokens, before.clone(), 3).unwrap()).unwrap();
        assert_eq!(small.encode(" the garden").unwrap(), [0, 1]);
    }
}
