//! A reading that a session has begun, for those who want to watch it, to stop it, or to go on with one that was stopped.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::reader::{End, Passing, Progress, Reader};
use crate::state::{State, Tail};
use crate::text::{Counts, TokenPrefetch, Tokenizer};

/// A reading under way. Whatever ends it before the text's end, its state is that after the last whole group of segments.
pub struct Reading {
    pub(super) reader: Reader,
    pub(super) tokens: TokenPrefetch,
    pub(super) tokenizer: Arc<Tokenizer>,
    /// What was open when the text was read before: it comes again behind what is passed over.
    pub(super) open: Tail,
    /// What the state already holds goes to the very end of the text.
    pub(super) passed_end: bool,
    /// The text was read to its end.
    pub(super) finished: bool,
}

impl Reading {
    /// What was tokenized so far.
    pub fn counts(&self) -> Counts {
        self.tokens.counts()
    }

    /// The state, when reading is over: with what is open of the text, where it was read to its end.
    pub fn into_state(self) -> Result<State> {
        let state = self.reader.state()?;
        match self.tokens.rest().filter(|_| self.finished && !self.passed_end) {
            Some(rest) => {
                let tokens = state.tails()[0].tokens.clone();
                state.with_tails(vec![Tail { tokens, text: rest.clone() }])
            }
            None => Ok(state),
        }
    }

    /// What the state already holds, to be passed over.
    pub fn passing(&self) -> Result<Passing> {
        self.reader.passing()
    }

    /// Passes over tokens that the state already holds, as far as the text has them; `each` hears how many after every 65,536.
    pub fn pass(&mut self, passing: &mut Passing, each: &mut dyn FnMut(u64)) -> Result<()> {
        let mut passed = passing.passed();
        let mut watched = self.tokens.by_ref().inspect(|_| {
            passed += 1;
            if passed.is_multiple_of(1 << 16) {
                each(passed);
            }
        });
        passing.over(&mut watched)?;
        // A memory of a text that has ended holds its last tokens too, which are certain by that.
        if let Some(rest) = self.tokens.rest().filter(|_| !passing.is_over()) {
            passing.over(&mut self.tokenizer.encode_open(rest)?.into_iter().map(Ok))?;
            self.passed_end = true;
        }
        Ok(())
    }

    /// Takes what was passed over for what the state holds. A text with fewer tokens, or with others, is an error, and so is one in which
    /// something else comes then than what was open.
    pub fn passed(&mut self, passing: &Passing) -> Result<()> {
        self.reader.passed(passing)?;
        let again = self.open_again()?;
        self.reader.begin_with(again);
        Ok(())
    }

    /// Whether the state holds the text to its very end: what is open behind it is then another text's, which came after.
    pub fn passed_to_end(&self) -> bool {
        self.passed_end
    }

    /// The tokens that come first now, after all of what was open is among them, or else its end.
    fn open_again(&mut self) -> Result<Vec<i32>> {
        let Tail { tokens: open, text } = std::mem::take(&mut self.open);
        let other =
            || Error::input("the text that was read", "one that ends sooner, or goes on otherwise behind what the memory holds");
        let last = self.tokenizer.encode_open(&text)?;
        let again = self.tokens.by_ref().take(open.len() + last.len()).collect::<Result<Vec<i32>>>()?;
        if !again.starts_with(&open) {
            return Err(other());
        }
        if again.len() == open.len() {
            // Nothing was open, or what is open now begins with it.
            let rest = self.tokens.rest().filter(|_| !last.is_empty());
            let is_same = rest.map_or(last.is_empty(), |rest| rest.bytes.starts_with(&text.bytes));
            return if is_same { Ok(again) } else { Err(other()) };
        }
        // What was no tokens yet may be others now, as many of which are more or fewer letters of the same text. Up to where one of them
        // stands for many.
        let said = |tokens: &[i32]| -> Result<(String, bool)> {
            let said = self.tokenizer.decode(tokens)?;
            let known = said.find(char::REPLACEMENT_CHARACTER);
            Ok((said[..known.unwrap_or(said.len())].to_string(), known.is_none()))
        };
        let mut now = again[open.len()..].to_vec();
        let ended = now.len() < last.len();
        if let Some(rest) = self.tokens.rest().filter(|_| ended) {
            now.extend(self.tokenizer.encode_open(rest)?);
        }
        let ((before, _), (now, is_known)) = (said(&last)?, said(&now)?);
        let is_all = ended && is_known;
        if !(now.starts_with(&before) || !is_all && before.starts_with(&now)) {
            return Err(other());
        }
        Ok(again)
    }

    /// Passes over all tokens that the state already holds, as [`Reading::pass`] does, and takes them for these.
    pub fn skip(&mut self, each: &mut dyn FnMut(u64)) -> Result<()> {
        let mut passing = self.passing()?;
        self.pass(&mut passing, each)?;
        self.passed(&passing)
    }

    /// Reads to the text's end, or until `each`, which hears of the progress after every group, or `stop` ends it.
    pub fn run(&mut self, each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        let end = self.reader.read(&mut self.tokens, each)?;
        self.finished = end == End::Finished;
        Ok(end)
    }
}
