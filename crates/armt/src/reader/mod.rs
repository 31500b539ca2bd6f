//! Tokens in, state out.
//!
//! A text is read from its start in whole segments, a group of them at a time, and never kept. Groups begin at multiples of the group's size
//! in everything that the memory has read, so that a reading that was interrupted goes on with the same groups and ends with the same
//! bits. The last segment of a text may be short: it is padded to the common width and the padding hidden.
//!
//! On CUDA the tokens of the next group are gathered while the device works on one.

mod group;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use group::Groups;

use crate::error::{Error, Result};
use crate::model::Model;
use crate::schedule::ScheduleKind;
use crate::segment::{Batch, Segment, segment};
use crate::state::{Count, State, TextHash};

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

/// Where tokens come from.
pub type Tokens<'t> = &'t mut dyn Iterator<Item = Result<i32>>;

/// A memory that is being filled. Whatever happens during a reading, [`Reader::state`] is the memory after the last whole group.
pub struct Reader {
    model: Model,
    state: State,
    /// Of each text, the tokens that came and are not yet in a group.
    open: Vec<Vec<i32>>,
    /// The group that the device may still be working on.
    under_way: Option<UnderWay>,
    groups: Groups,
}

struct UnderWay {
    batch: Batch,
    /// The memory after it.
    state: State,
}

impl Reader {
    /// A reader that goes on from `state`, of one text or of several side by side. A state of another model, or of no text, is an error.
    pub fn new(model: &Model, state: State) -> Result<Self> {
        Self::with_schedule(model, state, ScheduleKind::Auto)
    }

    /// A reader with another schedule than the usual. One that the model does not have is an error.
    pub fn with_schedule(model: &Model, state: State, schedule: ScheduleKind) -> Result<Self> {
        let groups = Groups::new(model.clone(), schedule.schedule(model.recurrence())?);
        let mut reader = Reader { model: model.clone(), state: state.clone(), open: Vec::new(), under_way: None, groups };
        reader.begin(state)?;
        Ok(reader)
    }

    /// Begins other texts with `state`. What was left out of the last group is forgotten; what the reader has recorded is kept. A state of
    /// another model, or of no text, is an error.
    pub fn begin(&mut self, state: State) -> Result<()> {
        self.model.expect_state(&state, state.texts().max(1))?;
        self.open = vec![Vec::new(); state.texts()];
        self.state = state;
        Ok(())
    }

    /// Segments that go through the model together: several times the layers of usual models, so that diagonals are mostly full. A slow
    /// device takes fewer, because a reading stops only between groups.
    pub fn group(&self) -> u64 {
        if self.model.device().is_cuda() { 256 } else { 32 }
    }

    /// From now on a reading ends as soon as this is set, within a group too: the memory is then that before the group, whose tokens are left
    /// out.
    pub fn stop_on(&mut self, stop: Arc<AtomicBool>) {
        self.groups.stop = Some(stop);
    }

    /// The memory of everything read so far.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The memory, when reading is over.
    pub fn into_state(self) -> State {
        self.state
    }

    /// Tokens of each text that were taken from its source and are not in the memory: those of a group that was not whole when the
    /// reading stopped. A further [`Reader::read`] begins with them.
    pub fn left_out(&self) -> &[Vec<i32>] {
        &self.open
    }

    /// Passes over the tokens that the memory of one text already holds. A text with fewer, or with others, is an error: it cannot be the one
    /// that was read. Where the memory does not know what it has read, it takes these tokens for it.
    pub fn skip(&mut self, tokens: Tokens<'_>) -> Result<()> {
        let &[count] = self.state.counts() else {
            return Err(Error::Texts { state: self.state.texts(), texts: 1 });
        };
        let mut hash = TextHash::default();
        for passed in 0..count.tokens {
            let Some(token) = tokens.next() else {
                let expected = format!("the text that was read, of at least {} tokens", count.tokens);
                return Err(Error::input(expected, format!("one of {passed}")));
            };
            hash = hash.after(token?);
        }
        match count.text {
            Some(read) if read != hash => Err(Error::input("the text that was read", "one that begins otherwise")),
            Some(_) => Ok(()),
            None => {
                self.state = self.state.clone().with_counts(vec![Count { text: Some(hash), ..count }]);
                Ok(())
            }
        }
    }

    /// Reads one text to its end. `each` hears of the progress after every group and may stop the reading there; a source that gives
    /// [`Error::Interrupted`] stops it too. A source without a token, or a token outside the vocabulary, is an error.
    pub fn read(&mut self, tokens: Tokens<'_>, each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        self.read_all(&mut [tokens], each)
    }

    /// Reads as many texts side by side as the state is of, which must have the same length, as [`Reader::read`] does one.
    pub fn read_all(&mut self, texts: &mut [Tokens<'_>], each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        if texts.len() != self.state.texts() {
            return Err(Error::Texts { state: self.state.texts(), texts: texts.len() });
        }
        let end = self.read_groups(texts, each);
        // Whatever ended the reading, the group under way is whole.
        let last = self.finish_group(each);
        let end = end?;
        last.map(|_| end)
    }

    fn read_groups(&mut self, texts: &mut [Tokens<'_>], each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        let size = self.model.config().segment_size;
        loop {
            let begun = self.under_way.as_ref().map_or(self.state.segments_read(), |u| u.state.segments_read());
            let ended = match self.gather(texts, ((self.group() - begun % self.group()) as usize).saturating_mul(size)) {
                Err(Error::Interrupted) => return Ok(End::Stopped),
                other => other?,
            };
            let stop = self.finish_group(each)?;
            let rest = self.open[0].len();
            if rest > 0 {
                if stop.is_break() {
                    return Ok(End::Stopped);
                }
                match self.start_group(size) {
                    Err(Error::Interrupted) => return Ok(End::Stopped),
                    other => other?,
                }
            } else if self.state.tokens_read() == 0 {
                return Err(Error::input("a text of at least one token", "none"));
            }
            if ended {
                return Ok(End::Finished);
            }
            // There is nothing to overlap with where the work is done already.
            if !self.model.device().is_cuda() && self.finish_group(each)?.is_break() {
                return Ok(End::Stopped);
            }
        }
    }

    /// Fills the open group to `count` tokens of each text; says whether the texts ended before that.
    fn gather(&mut self, texts: &mut [Tokens<'_>], count: usize) -> Result<bool> {
        let vocabulary = self.model.sizes().vocab;
        for (open, tokens) in self.open.iter_mut().zip(texts) {
            while open.len() < count {
                match tokens.next().transpose()? {
                    Some(token) if token >= 0 && (token as usize) < vocabulary => open.push(token),
                    Some(token) => return Err(Error::Token { token, vocabulary }),
                    None => break,
                }
            }
        }
        let first = self.open[0].len();
        if let Some(other) = self.open.iter().position(|open| open.len() != first) {
            let before = self.state.tokens_read() + self.under_way.as_ref().map_or(0, |u| u.batch.tokens() as u64);
            let short = if self.open[other].len() < first { other } else { 0 };
            let tokens = before + self.open[short].len() as u64;
            let got = format!("text {} that ends after {tokens} tokens where others go on", short + 1);
            return Err(Error::input("texts of the same length side by side", got));
        }
        Ok(first < count)
    }

    /// Starts to put the open tokens into the memory.
    fn start_group(&mut self, size: usize) -> Result<()> {
        let (texts, count) = (self.open.len(), self.open[0].len());
        let batch = Batch { ids: self.open.concat(), texts, mask: None };
        let ranges = (0..count).step_by(size).map(|from| from..count.min(from + size));
        let segments: Vec<Segment> = ranges.map(|range| segment(&batch, range, size)).collect();
        let state = self.groups.run(&segments, &self.state)?;
        let texts = self.state.counts().iter().zip(&self.open);
        let hashes = texts.map(|(before, tokens)| before.text.map(|hash| hash.after_all(tokens)));
        let counts = state.counts().iter().zip(hashes).map(|(count, text)| Count { text, ..*count }).collect();
        let state = state.with_counts(counts);
        self.open.iter_mut().for_each(Vec::clear);
        self.under_way = Some(UnderWay { batch, state });
        Ok(())
    }

    /// Waits for the group under way, if there is one, and takes its memory. If it failed, its tokens are open again.
    fn finish_group(&mut self, each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<ControlFlow<()>> {
        let Some(UnderWay { batch, state }) = self.under_way.take() else { return Ok(ControlFlow::Continue(())) };
        // Waiting here lets a failure of the device show before the old memory is given up.
        if let Err(error) = self.model.device().synchronize() {
            for (open, tokens) in self.open.iter_mut().zip(batch.ids.chunks(batch.tokens())) {
                open.splice(0..0, tokens.iter().copied());
            }
            return Err(error.into());
        }
        self.state = state;
        Ok(each(Progress { tokens: self.state.tokens_read(), segments: self.state.segments_read() }))
    }
}
