//! Words whose tokens are known: running text has few different ones, and looking one up takes a tenth of the time of tokenizing it.
//!
//! A word here is what lies between two [borders](super::border) with none between them, so that its tokens are its own whatever stands
//! around it. What the tokenizer itself gives for the words of a text, one by one, is what it gives for the text; what was looked up is
//! what it gave before.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use crate::error::Result;

/// Words that are kept: more than books have, some megabytes.
const MOST: usize = 1 << 16;
/// Bytes of the longest word that is kept. Longer ones seldom come again.
const LONGEST: usize = 32;

/// Words and their tokens, of all texts so far, for any number of threads.
#[derive(Default)]
pub(super) struct KnownWords {
    tokens: RwLock<HashMap<Box<str>, Box<[i32]>>>,
}

impl KnownWords {
    /// The tokens of some words in their order; `tokenize` is asked for those of words that are not known yet.
    pub(super) fn encode<'t>(
        &self,
        words: impl Iterator<Item = &'t str>,
        tokenize: impl Fn(&str) -> Result<Vec<i32>>,
    ) -> Result<Vec<i32>> {
        let (mut all, mut new) = (Vec::new(), HashMap::new());
        let mut known = None;
        for word in words {
            let seen = known.get_or_insert_with(|| self.tokens.read().unwrap_or_else(PoisonError::into_inner));
            if let Some(tokens) = seen.get(word).or_else(|| new.get(word)) {
                all.extend_from_slice(tokens);
                continue;
            }
            // Other threads may write down their words meanwhile.
            known = None;
            let tokens: Box<[i32]> = tokenize(word)?.into();
            all.extend_from_slice(&tokens);
            if word.len() <= LONGEST {
                new.insert(word, tokens);
            }
        }
        drop(known);
        if !new.is_empty() {
            let mut known = self.tokens.write().unwrap_or_else(PoisonError::into_inner);
            // A text of ever other words begins anew rather than keep those that came first.
            if known.len() + new.len() > MOST {
                known.clear();
            }
            known.extend(new.into_iter().take(MOST).map(|(word, tokens)| (word.into(), tokens)));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_word_is_tokenized_once_and_no_more_are_kept_than_fit() {
        let (known, asked) = (KnownWords::default(), Cell::new(0));
        let encode = |words: &[&str]| {
            let tokenize = |word: &str| {
                asked.set(asked.get() + 1);
                Ok(vec![word.len() as i32, 7])
            };
            known.encode(words.iter().copied(), tokenize).unwrap()
        };
        assert_eq!(encode(&["a", " bc", "a"]), [1, 7, 3, 7, 1, 7]);
        assert_eq!(encode(&[" bc", "a"]), [3, 7, 1, 7]);
        assert_eq!(asked.get(), 2);

        let long = "x".repeat(LONGEST + 1);
        encode(&[&long]);
        encode(&[&long]);
        assert_eq!(asked.get(), 4, "a long word is not kept");

        let many: Vec<String> = (0..2 * MOST).map(|n| n.to_string()).collect();
        encode(&many.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(known.tokens.read().unwrap().len(), MOST);
        encode(&["a"]);
        assert_eq!(known.tokens.read().unwrap().len(), 1);
    }

    #[test]
    fn an_error_of_the_tokenizer_is_passed_on() {
        let refuse = |_: &str| Err(crate::Error::Tokenizer("no such token".into()));
        assert!(KnownWords::default().encode(["a"].into_iter(), refuse).is_err());
    }
}
