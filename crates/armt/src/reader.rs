//! Tokens in, memory out; and questions against a memory.
//!
//! A text is read from its start in whole segments, a group of [`GROUP`] at a time, and never kept. Groups begin at multiples of
//! [`GROUP`] segments of everything that the memory has read, so that a reading that was interrupted goes on with the same groups and
//! ends with the same bits. The last segment of a text may be short: it is padded to the common width and the padding hidden.

use std::ops::ControlFlow;

use armt_engine::Tape;

use crate::error::{Error, Result};
use crate::generate::Options;
use crate::memory::MemoryState;
use crate::model::{Inputs, Model};
use crate::schedule::{Backprop, Choice, Schedule};
use crate::segment::{Batch, segment};
use crate::text::Tokenizer;

/// Segments that go through the model together: several times the layers of usual models, so that diagonals are mostly full.
pub const GROUP: u64 = 32;

/// How far a reading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens in the memory, earlier readings included.
    pub tokens: u64,
    /// Segments in the memory, earlier readings included.
    pub segments: u64,
}

/// How a reading ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything was read.
    Finished,
    /// It was asked to stop: the memory is that after the last whole group, and the text has more.
    Stopped,
}

/// A memory that is being filled. Whatever happens during a reading, [`Reader::state`] is the memory after the last whole group.
pub struct Reader<'m> {
    model: &'m Model,
    schedule: &'static dyn Schedule,
    state: MemoryState,
    /// Tokens that came and are not yet in the memory.
    open: Vec<i32>,
}

impl<'m> Reader<'m> {
    /// A reader that goes on from `state`. A state of another model, or of several texts side by side, is an error.
    pub fn new(model: &'m Model, state: MemoryState) -> Result<Self> {
        state.expect_fits(model, 1)?;
        Ok(Reader { model, schedule: Choice::Auto.schedule(model)?, state, open: Vec::new() })
    }

    /// The memory of everything read so far.
    pub fn state(&self) -> &MemoryState {
        &self.state
    }

    /// The memory, when reading is over.
    pub fn into_state(self) -> MemoryState {
        self.state
    }

    /// Tokens that were taken from a source and are not in the memory: those of a group that was not whole when the reading stopped. A
    /// further [`Reader::read`] begins with them.
    pub fn left_out(&self) -> &[i32] {
        &self.open
    }

    /// Passes over the tokens that the memory already holds. A text with fewer is an error: it cannot be the one that was read.
    pub fn skip(&self, tokens: &mut dyn Iterator<Item = Result<i32>>) -> Result<()> {
        for passed in 0..self.state.tokens_read {
            match tokens.next() {
                Some(token) => token?,
                None => {
                    let read = self.state.tokens_read;
                    return Err(Error::Argument(format!(
                        "the memory has read {read} tokens, but the text has only {passed}: it is not the text to go on with"
                    )));
                }
            };
        }
        Ok(())
    }

    /// Reads tokens to their end. `each` hears of the progress after every group and may stop the reading there; a source that gives
    /// [`Error::Interrupted`] stops it too. A source without a token, or a token outside the vocabulary, is an error.
    pub fn read(
        &mut self,
        tokens: &mut dyn Iterator<Item = Result<i32>>,
        each: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<End> {
        let size = self.model.config().segment_size;
        let vocab = self.model.backbone().vocab;
        let before = self.state.tokens_read;
        loop {
            let group = (GROUP - self.state.segments_read % GROUP) as usize * size;
            let mut ended = false;
            while self.open.len() < group && !ended {
                match tokens.next() {
                    Some(Ok(token)) if token >= 0 && (token as usize) < vocab => self.open.push(token),
                    Some(Ok(bad)) => return Err(Error::Argument(format!("token {bad} is outside the vocabulary of {vocab}"))),
                    Some(Err(Error::Interrupted)) => return Ok(End::Stopped),
                    Some(Err(error)) => return Err(error),
                    None => ended = true,
                }
            }
            if !self.open.is_empty() {
                self.read_group(size)?;
            } else if self.state.tokens_read == 0 {
                return Err(Error::Argument("expected a text of at least one token, got none".into()));
            }
            let progress = Progress { tokens: self.state.tokens_read, segments: self.state.segments_read };
            let stop = if progress.tokens > before { each(progress) } else { ControlFlow::Continue(()) };
            if ended {
                return Ok(End::Finished);
            }
            if stop.is_break() {
                return Ok(End::Stopped);
            }
        }
    }

    /// Puts the open tokens into the memory.
    fn read_group(&mut self, size: usize) -> Result<()> {
        let count = self.open.len();
        let batch = Batch { ids: std::mem::take(&mut self.open), batch: 1, mask: None };
        let segments: Vec<_> = (0..count).step_by(size).map(|from| segment(&batch, from..count.min(from + size), size)).collect();
        let next = Inputs::new(self.model, &segments, 1).and_then(|inputs| {
            self.schedule.run(self.model, &Tape::off(), &inputs, &self.state, Backprop::default(), &mut |_, _| Ok(()))
        });
        // Waiting here lets a failure of the device show before the old memory is given up.
        match next.and_then(|state| self.model.device().synchronize().map(|()| state).map_err(Error::from)) {
            Ok(state) => self.state = state,
            Err(error) => {
                self.open = batch.ids;
                return Err(error);
            }
        }
        self.open = batch.ids;
        self.open.clear();
        Ok(())
    }
}

/// Answers a question from a memory: the question is the text that the model goes on with, and the memory is only read. `each` hears the
/// answer as it comes and may end it. It also ends at the model's end token and before any of the texts in `stop`.
///
/// Gives the answer. A question without a token is an error.
pub fn answer(
    model: &Model,
    tokenizer: &Tokenizer,
    state: &MemoryState,
    question: &str,
    options: &Options,
    stop: &[String],
    each: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<String> {
    let prompt = tokenizer.encode(question)?;
    if prompt.is_empty() {
        return Err(Error::Argument("expected a question, got nothing".into()));
    }
    let mut options = options.clone();
    options.stop.extend(crate::text::end_tokens(&model.config().backbone));
    let mut speech = tokenizer.speech();
    let mut answer = Answer { text: String::new(), said: 0, stop };
    let mut failure = None;
    model.generate_until(&Batch { ids: prompt, batch: 1, mask: None }, state, &options, &mut |next| {
        if options.stop.contains(&next[0]) {
            return ControlFlow::Break(());
        }
        match speech.say(next[0]) {
            Ok(text) => answer.add(&text, each),
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = failure {
        return Err(error);
    }
    // What was held back as the possible start of a stop text is none.
    let _ = answer.say(answer.text.len(), each);
    Ok(answer.text)
}

/// An answer under way. The end of the text that could be the start of a stop text is held back.
struct Answer<'s> {
    text: String,
    said: usize,
    stop: &'s [String],
}

impl Answer<'_> {
    fn add(&mut self, text: &str, each: &mut dyn FnMut(&str) -> ControlFlow<()>) -> ControlFlow<()> {
        self.text.push_str(text);
        let stops = self.stop.iter().filter(|s| !s.is_empty());
        if let Some(at) = stops.clone().filter_map(|s| self.text[self.said..].find(s.as_str())).min() {
            self.text.truncate(self.said + at);
            let _ = self.say(self.text.len(), each);
            return ControlFlow::Break(());
        }
        let open = &self.text[self.said..];
        let held = |s: &String| (1..s.len()).rev().find(|n| s.is_char_boundary(*n) && open.ends_with(&s[..*n]));
        let held = stops.filter_map(held).max().unwrap_or(0);
        self.say(self.text.len() - held, each)
    }

    fn say(&mut self, to: usize, each: &mut dyn FnMut(&str) -> ControlFlow<()>) -> ControlFlow<()> {
        if to == self.said {
            return ControlFlow::Continue(());
        }
        let from = std::mem::replace(&mut self.said, to);
        each(&self.text[from..to])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_text_is_found_across_tokens_and_never_said() {
        let stop = ["\n\n".to_string(), "END".to_string()];
        let mut said = String::new();
        let mut answer = Answer { text: String::new(), said: 0, stop: &stop };
        let mut each = |s: &str| {
            said.push_str(s);
            ControlFlow::Continue(())
        };
        for piece in ["one\n", "two E", "N", "x EN"] {
            assert!(answer.add(piece, &mut each).is_continue());
        }
        assert!(answer.add("D three", &mut each).is_break());
        assert_eq!(said, "one\ntwo ENx ");
        assert_eq!(answer.text, said);
    }
}
