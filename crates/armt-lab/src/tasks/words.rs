//! The tokens that a user's texts are written in: a tokenizer, and the token that ends a text.

use std::path::Path;
use std::sync::Arc;

use armt::config::Config;
use armt::text::{END_OF_TEXT, Tokenizer, end_tokens};

use super::babilong;
use super::training::Begun;
use crate::error::{Error, Result};

/// A tokenizer and its end token.
#[derive(Clone)]
pub struct Words {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The token after a text or an answer.
    pub end: i32,
}

impl Words {
    /// The tokenizer that a recipe names, or else that of the model to begin from, or else GPT-2's. One whose tokens the model does not have
    /// is refused, and one without an end token where the model names none.
    pub fn open(named: Option<&Path>, begun: Option<&Begun<'_>>) -> Result<Self> {
        let (folder, tokenizer) = babilong::tokenizer(named, begun.map(|b| b.folder))?;
        if let Some(begun) = begun {
            tokenizer.expect_fits(begun.vocab, &folder)?;
        }
        Self::new(Arc::new(tokenizer), begun.map(|b| b.config))
    }

    /// The token that comes before a text which is read from its start, where the tokenizer puts one there.
    pub fn begin(&self) -> Option<i32> {
        self.tokenizer.begin_of_text()
    }

    /// A tokenizer with the end token of a model, or else its own. Where there is neither, that is an error.
    pub fn new(tokenizer: Arc<Tokenizer>, model: Option<&Config>) -> Result<Self> {
        let known = |token: &i32| (*token as usize) < tokenizer.vocabulary();
        let named = model.and_then(|config| end_tokens(&config.backbone).into_iter().find(known));
        let end = tokenizer.end_of_text().or(named).ok_or_else(|| {
            Error::unfit(format!("a tokenizer with {END_OF_TEXT}, or a model with eos_token_id in its config.json"), "neither")
        })?;
        Ok(Words { tokenizer, end })
    }
}
