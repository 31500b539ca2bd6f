//! `vocabulary.json`: a small vocabulary for a model that is trained from scratch, beside the tokenizer of a large one.
//!
//! ```text
//! {"tokens": 50257, "kept": [13, 262, 11, ...], "hashed": 256}
//! ```
//!
//! `kept` are tokens of the tokenizer, the most frequent first: token `kept[i]` is read as i. Every other one is read as one of the
//! `hashed` numbers after these, always the same: the model still sees that something stands there, and mostly something else than
//! elsewhere. `tokens` says how many the tokenizer has, so that another one's file is noticed. The model's `vocab_size` is the number of
//! kept and hashed tokens together.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files::write_beside;
use crate::random::Random;

/// The file's name in a model folder.
pub(super) const FILE: &str = "vocabulary.json";

/// Far more than any tokenizer has, few enough to number.
const MOST_TOKENS: usize = 1 << 24;

/// Some tokens of a tokenizer, numbered anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    kept: Vec<i32>,
    hashed: usize,
    /// The number of each of the tokenizer's tokens.
    numbers: Vec<i32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    tokens: usize,
    kept: Vec<i32>,
    hashed: usize,
}

impl Vocabulary {
    /// `kept` of a tokenizer's `tokens` tokens, in their order, and `hashed` numbers for all others. Refuses a token that the tokenizer
    /// does not have or that comes twice, and nothing kept or hashed.
    pub fn new(tokens: usize, kept: Vec<i32>, hashed: usize) -> Result<Self> {
        if kept.is_empty() || hashed == 0 {
            let message =
                format!("expected at least one token to keep and one number for all others, got {} and {hashed}", kept.len());
            return Err(Error::Tokenizer(message));
        }
        // A hash is below any number that a token can have, so that sums of these cannot overflow.
        if tokens > MOST_TOKENS {
            return Err(Error::Tokenizer(format!("expected a tokenizer of at most {MOST_TOKENS} tokens, got {tokens}")));
        }
        if kept.len() > tokens || hashed > tokens {
            let message =
                format!("expected at most the tokenizer's {tokens} tokens to keep and to hash, got {} and {hashed}", kept.len());
            return Err(Error::Tokenizer(message));
        }
        let hash = |token: usize| (kept.len() + Random::of(&[token as u64]).below(hashed)) as i32;
        let mut numbers: Vec<i32> = (0..tokens).map(hash).collect();
        let mut seen = vec![false; tokens];
        for (i, token) in kept.iter().enumerate() {
            let place = usize::try_from(*token).ok().filter(|t| *t < tokens);
            let place =
                place.ok_or_else(|| Error::Tokenizer(format!("expected tokens from 0 to {} to keep, got {token}", tokens - 1)))?;
            if std::mem::replace(&mut seen[place], true) {
                return Err(Error::Tokenizer(format!("expected different tokens to keep, but {token} comes twice")));
            }
            numbers[place] = i as i32;
        }
        Ok(Vocabulary { kept, hashed, numbers })
    }

    /// Reads `vocabulary.json` of a folder; `None` if there is none. A damaged one is an error with its name.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let Stored { tokens, kept, hashed } =
            serde_json::from_str(&text).map_err(|e| Error::file(&path, format!("expected kept tokens and their number: {e}")))?;
        Self::new(tokens, kept, hashed).map(Some).map_err(|e| Error::file(&path, e))
    }

    /// Writes `vocabulary.json` into a folder, beside it first and then renamed.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        let stored = Stored { tokens: self.numbers.len(), kept: self.kept.clone(), hashed: self.hashed };
        let text = serde_json::to_string(&stored).map_err(|e| Error::file(&path, e))?;
        write_beside(&path, format!("{text}\n").as_bytes())
    }

    /// Numbers in all: the model's `vocab_size`.
    pub fn size(&self) -> usize {
        self.kept.len() + self.hashed
    }

    /// The tokenizer's tokens that are kept, in their order here.
    pub fn kept(&self) -> &[i32] {
        &self.kept
    }

    /// Tokens of the tokenizer that it is for.
    pub(super) fn tokens(&self) -> usize {
        self.numbers.len()
    }

    /// The number of a token of the tokenizer.
    pub(super) fn number(&self, token: u32) -> Result<i32> {
        let number = self.numbers.get(token as usize).copied();
        number.ok_or_else(|| Error::Tokenizer(format!("expected a token below {}, got {token}", self.numbers.len())))
    }

    /// The tokenizer's token of a number; `None` where it is one of those that others share. A number that there is not is an error.
    pub(super) fn token(&self, number: i32) -> Result<Option<u32>> {
        match usize::try_from(number) {
            Ok(n) if n < self.kept.len() => Ok(Some(self.kept[n] as u32)),
            Ok(n) if n < self.size() => Ok(None),
            _ => Err(Error::Tokenizer(format!("expected tokens from 0 to {}, got {number}", self.size() - 1))),
        }
    }
}
