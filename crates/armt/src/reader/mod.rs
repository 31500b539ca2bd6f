//! Tokens in, state out.
//!
//! A text is read from its start in whole segments, a group of them at a time, and never kept. Groups begin at multiples of the group's size
//! in everything that the memory has read, so that a reading that was interrupted goes on with the same groups and ends with the same
//! bits. What does not fill a segment when the text's source ends stays open, for more may come: it is the state's [`Tail`], with which
//! another reading begins. [`Reader::close`] ends the text instead: its last segment may be short, is padded to the common width and the
//! padding hidden.
//!
//! Texts are read side by side whatever their lengths. Each has its own groups; of a group that is not whole at a text's end, `reader/plan.rs`
//! says which run together.
//!
//! On CUDA the tokens of the next group are gathered while the device works on one, and only whole groups go into a memory whose text may go
//! on: kernels are picked by how many layers run at a time, so that the bits of a group depend on its size. On the CPU they do not.
//! [`Reader::in_groups_of`] takes another size: many texts fill a GPU with short groups, which leave less of a text open.

mod group;
mod plan;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use armt_engine::DType;
use group::Groups;
pub(crate) use plan::alike;
use plan::plan;

use crate::error::{Error, Result};
use crate::model::Model;
use crate::schedule::ScheduleKind;
use crate::segment::{Batch, Segment, segment};
use crate::state::{Count, State, Tail, TextHash};

/// Bytes of a step's inputs and memories that a thread of the CPU has at a time: what it makes of them takes some times as much.
const CACHE: usize = 512 << 10;

/// How far a reading has come, of all texts together.
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
    /// The memory of each text.
    states: Vec<State>,
    /// Of each text, the tokens that came and are not yet in a group.
    open: Vec<Vec<i32>>,
    /// Whether the sources of the last reading have ended, so that what is open is all that there is.
    ended: bool,
    /// The group that the device may still be working on.
    under_way: Option<UnderWay>,
    groups: Groups,
    /// Segments of a group.
    group: u64,
}

struct UnderWay {
    /// Of each text.
    tokens: Vec<Vec<i32>>,
    /// The memory after it, of each text.
    states: Vec<State>,
}

impl Reader {
    /// A reader that goes on from `state`, of one text or of several side by side. A state of another model, of no text, or with text whose
    /// tokens are not certain (which a [`Session`](crate::Session) can go on from) is an error.
    pub fn new(model: &Model, state: State) -> Result<Self> {
        Self::with_schedule(model, state, ScheduleKind::Auto)
    }

    /// A reader with another schedule than the usual. One that the model does not have is an error.
    pub fn with_schedule(model: &Model, state: State, schedule: ScheduleKind) -> Result<Self> {
        let groups = Groups::new(model.clone(), schedule.schedule(model.recurrence())?);
        let (states, open) = (Vec::new(), Vec::new());
        let group = if model.device().is_cuda() { 256 } else { 32 };
        let mut reader = Reader { model: model.clone(), states, open, ended: true, under_way: None, groups, group };
        reader.begin(state)?;
        Ok(reader)
    }

    /// Begins other texts with `state`. What was left out of the last group is forgotten; what the reader has recorded is kept. A state
    /// that [`Reader::new`] would refuse is an error.
    pub fn begin(&mut self, state: State) -> Result<()> {
        self.begin_each(state.split()?)
    }

    /// Begins other texts with a state of one text each, as [`Reader::begin`] does. Some of them may have read something, and others nothing.
    pub fn begin_each(&mut self, states: Vec<State>) -> Result<()> {
        if states.is_empty() {
            return Err(Error::Texts { state: 0, texts: 1 });
        }
        let mut open = Vec::with_capacity(states.len());
        for state in &states {
            self.model.expect_state(state, 1)?;
            let Tail { tokens, text } = &state.tails()[0];
            if !text.bytes.is_empty() {
                return Err(Error::input(
                    "a state all of whose text is tokens",
                    format!("one with {} bytes to be tokenized", text.bytes.len()),
                ));
            }
            tokens.iter().try_for_each(|token| self.expect_token(*token))?;
            open.push(tokens.clone());
        }
        let closed = |state: State| state.with_tails(vec![Tail::default()]);
        (self.states, self.open) = (states.into_iter().map(closed).collect::<Result<_>>()?, open);
        (self.ended, self.under_way) = (true, None);
        Ok(())
    }

    /// Segments that go through the model together: several times the layers of usual models, so that diagonals are mostly full. A slow
    /// device takes fewer, because a reading stops only between groups.
    pub fn group(&self) -> u64 {
        self.group
    }

    /// Whether the model computes on a GPU.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.model.device().is_cuda()
    }

    /// The reader with groups of so many segments, at least one. On a GPU a memory's bits depend on it, so that all of a text should be read in
    /// groups of one size.
    pub fn in_groups_of(self, segments: u64) -> Self {
        Reader { group: segments.max(1), ..self }
    }

    /// From now on a reading ends as soon as this is set, within a group too: the memory is then that before the group, whose tokens are left
    /// out.
    pub fn stop_on(&mut self, stop: Arc<AtomicBool>) {
        self.groups.stop = Some(stop);
    }

    /// The memory of each text, with what is open of it where the sources have ended.
    pub fn states(&self) -> Result<Vec<State>> {
        let tail = |open: &Vec<i32>| Tail { tokens: if self.ended { open.clone() } else { Vec::new() }, ..Tail::default() };
        self.states.iter().zip(&self.open).map(|(state, open)| state.clone().with_tails(vec![tail(open)])).collect()
    }

    /// The memory of all texts as one state, with what is open of them where the sources have ended. Where some texts have something in a
    /// memory that begins absent, and others nothing, there is no such state: an error.
    pub fn state(&self) -> Result<State> {
        State::stack(&self.states()?)
    }

    /// Tokens of each text that were taken from its source and are not in the memory: those of a group that was not whole when the
    /// reading stopped or the source ended. A further [`Reader::read`] begins with them.
    pub fn left_out(&self) -> &[Vec<i32>] {
        &self.open
    }

    /// Passes over the tokens that the memory of one text already holds; what was open of it is forgotten. A text with fewer, or with others,
    /// is an error: it cannot be the one that was read. Where the memory does not know what it has read, it takes these tokens for it.
    pub fn skip(&mut self, tokens: Tokens<'_>) -> Result<()> {
        let mut passing = self.passing()?;
        passing.over(tokens)?;
        self.passed(&passing)
    }

    /// What is to be passed over of the one text that the memory is of.
    pub fn passing(&self) -> Result<Passing> {
        let [state] = self.states.as_slice() else {
            return Err(Error::Texts { state: self.states.len(), texts: 1 });
        };
        Ok(Passing { count: state.counts()[0], passed: 0, hash: TextHash::default() })
    }

    /// Takes what was passed over for what the memory has read, as [`Reader::skip`] says.
    pub fn passed(&mut self, passing: &Passing) -> Result<()> {
        let Passing { count, passed, hash } = *passing;
        if passed < count.tokens {
            let expected = format!("the text that was read, of at least {} tokens", count.tokens);
            return Err(Error::input(expected, format!("one of {passed}")));
        }
        if count.text.is_some_and(|read| read != hash) {
            return Err(Error::input("the text that was read", "one that begins otherwise"));
        }
        let state = self.states.remove(0);
        self.states.push(state.with_counts(vec![Count { text: Some(hash), ..count }]));
        self.open = vec![Vec::new()];
        Ok(())
    }

    /// Tokens that the one text begins with, before those of its source.
    pub(crate) fn begin_with(&mut self, tokens: Vec<i32>) {
        self.open = vec![tokens];
    }

    /// Reads one text to its end. `each` hears of the progress after every group and may stop the reading there; a source that gives
    /// [`Error::Interrupted`] stops it too. A token outside the vocabulary is an error.
    pub fn read(&mut self, tokens: Tokens<'_>, each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        self.read_all(&mut [tokens], each)
    }

    /// Reads as many texts side by side as the state is of, of any lengths, as [`Reader::read`] does one. Each has the memory that it would
    /// have alone, on the CPU to the bit.
    pub fn read_all(&mut self, texts: &mut [Tokens<'_>], each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        if texts.len() != self.states.len() {
            return Err(Error::Texts { state: self.states.len(), texts: texts.len() });
        }
        self.ended = false;
        let end = self.read_groups(texts, each);
        // Whatever ended the reading, the group under way is whole.
        let last = self.finish_group(each);
        let end = end?;
        self.ended = end == End::Finished;
        last.map(|_| end)
    }

    /// Ends the texts: what is open of them goes into the memory, with a short segment where it takes one. What is read after that begins a
    /// segment of its own. Asked to stop meanwhile, it gives [`Error::Interrupted`], and the memory is that after the last whole group.
    pub fn close(&mut self) -> Result<()> {
        let size = self.model.config().segment_size;
        self.settle()?;
        while self.open.iter().any(|open| open.len() >= size) {
            let segments: Vec<usize> = (0..self.open.len()).map(|text| self.room(text).min(self.open[text].len() / size)).collect();
            self.start_group(&plan(&segments))?;
            self.settle()?;
        }
        // Padding is the same for all texts of a batch.
        for (tokens, texts) in alike(self.open.iter().map(Vec::len)).into_iter().filter(|(tokens, _)| *tokens > 0) {
            self.start(&[(tokens, texts)])?;
            self.settle()?;
        }
        Ok(())
    }

    fn read_groups(&mut self, texts: &mut [Tokens<'_>], each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        let (size, cuda) = (self.model.config().segment_size, self.is_on_gpu());
        let mut ended = vec![false; texts.len()];
        loop {
            match self.gather(texts, &mut ended) {
                Err(Error::Interrupted) => return Ok(End::Stopped),
                other => other?,
            }
            let stop = self.finish_group(each)?;
            let segments: Vec<usize> = (0..self.open.len())
                .map(|text| match (self.open[text].len() / size, self.room(text)) {
                    (whole, room) if whole < room && cuda => 0,
                    (whole, room) => whole.min(room),
                })
                .collect();
            if segments.iter().any(|n| *n > 0) {
                if stop.is_break() {
                    return Ok(End::Stopped);
                }
                match self.start_group(&plan(&segments)) {
                    Err(Error::Interrupted) => return Ok(End::Stopped),
                    other => other?,
                }
            }
            if ended.iter().all(|ended| *ended) {
                return Ok(End::Finished);
            }
            // There is nothing to overlap with where the work is done already.
            if !cuda && self.finish_group(each)?.is_break() {
                return Ok(End::Stopped);
            }
        }
    }

    /// Segments that are missing to the next whole group of a text.
    fn room(&self, text: usize) -> usize {
        let states = self.under_way.as_ref().map_or(&self.states, |under_way| &under_way.states);
        (self.group() - states[text].segments_read() % self.group()) as usize
    }

    fn expect_token(&self, token: i32) -> Result<()> {
        let vocabulary = self.model.sizes().vocab;
        if token >= 0 && (token as usize) < vocabulary { Ok(()) } else { Err(Error::Token { token, vocabulary }) }
    }

    /// Fills the open group of each text; notes which texts ended before that.
    fn gather(&mut self, texts: &mut [Tokens<'_>], ended: &mut [bool]) -> Result<()> {
        let size = self.model.config().segment_size;
        for (text, tokens) in texts.iter_mut().enumerate() {
            let count = self.room(text).saturating_mul(size);
            while !ended[text] && self.open[text].len() < count {
                match tokens.next().transpose()? {
                    Some(token) => {
                        self.expect_token(token)?;
                        self.open[text].push(token);
                    }
                    None => ended[text] = true,
                }
            }
        }
        Ok(())
    }

    /// Starts to put open segments into the memory: runs of some segments of some texts each.
    fn start_group(&mut self, runs: &[(usize, Vec<usize>)]) -> Result<()> {
        let size = self.model.config().segment_size;
        self.start(&runs.iter().map(|(segments, texts)| (segments * size, texts.clone())).collect::<Vec<_>>())
    }

    /// Starts to put open tokens into the memory: runs of some tokens of some texts each.
    fn start(&mut self, runs: &[(usize, Vec<usize>)]) -> Result<()> {
        let (size, mut states, mut taken) = (self.model.config().segment_size, self.states.clone(), vec![0; self.states.len()]);
        for (tokens, texts) in runs {
            // A memory that has nothing yet is another shape of work, and may have no tensors to stack; one that grows may be longer.
            let parts = alike(texts.iter().map(|text| (states[*text].is_empty(), states[*text].shapes())));
            let batches: Vec<Vec<usize>> = parts.into_iter().flat_map(|(_, rows)| self.batches(rows)).collect();
            for rows in batches {
                let texts: Vec<usize> = rows.into_iter().map(|row| texts[row]).collect();
                let ids = texts.iter().map(|text| &self.open[*text][taken[*text]..][..*tokens]).collect::<Vec<_>>().concat();
                let batch = Batch { ids, texts: texts.len(), mask: None };
                let ranges = (0..*tokens).step_by(size).map(|from| from..(from + size).min(*tokens));
                let segments: Vec<Segment> = ranges.map(|range| segment(&batch, range, size)).collect();
                let before = State::stack(&texts.iter().map(|text| states[*text].clone()).collect::<Vec<_>>())?;
                let after = self.groups.run(&segments, &before)?.split()?;
                for ((text, after), own) in texts.into_iter().zip(after).zip(batch.ids.chunks(*tokens)) {
                    let hash = states[text].counts()[0].text.map(|hash| hash.after_all(own));
                    let count = Count { text: hash, ..after.counts()[0] };
                    states[text] = after.with_counts(vec![count]);
                    taken[text] += tokens;
                }
            }
        }
        let tokens = self.open.iter_mut().zip(taken).map(|(open, taken)| open.drain(..taken).collect()).collect();
        self.under_way = Some(UnderWay { tokens, states });
        Ok(())
    }

    /// The batches in which some texts run. On a GPU, where a batch of a size that was never seen costs much, some of the texts run as powers of
    /// two, so that few sizes come again and again. On the CPU they are as large as its caches.
    fn batches(&self, mut texts: Vec<usize>) -> Vec<Vec<usize>> {
        if !self.is_on_gpu() {
            return texts.chunks(self.texts_in_cache()).map(<[usize]>::to_vec).collect();
        }
        if texts.len() == self.states.len() {
            return vec![texts];
        }
        let mut batches = Vec::new();
        while !texts.is_empty() {
            let rest = texts.split_off(1 << texts.len().ilog2());
            batches.push(std::mem::replace(&mut texts, rest));
        }
        batches
    }

    /// As many texts as give each thread a step's work that stays in its cache, and all together as much as the weights that it is done with: at
    /// least one.
    fn texts_in_cache(&self) -> usize {
        let recurrence = self.model.recurrence();
        let (sizes, around) = (recurrence.sizes(), recurrence.around());
        let positions = around.before + self.model.config().segment_size + around.after;
        let step = sizes.layers * positions * sizes.width * size_of::<f32>() + recurrence.layout().bytes(DType::F32);
        // A block has some twelve matrices of its width.
        let weights = sizes.layers * 12 * sizes.width * sizes.width * size_of::<f32>();
        (weights.max(CACHE * rayon::current_num_threads()) / step).max(1)
    }

    /// Waits for the group under way, if there is one, and tells how far the reading is.
    fn finish_group(&mut self, each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<ControlFlow<()>> {
        if self.under_way.is_none() {
            return Ok(ControlFlow::Continue(()));
        }
        self.settle()?;
        let sum = |of: fn(&State) -> u64| self.states.iter().map(of).sum();
        Ok(each(Progress { tokens: sum(State::tokens_read), segments: sum(State::segments_read) }))
    }

    /// Waits for the group under way, if there is one, and takes its memory. If it failed, its tokens are open again.
    fn settle(&mut self) -> Result<()> {
        let Some(UnderWay { tokens, states }) = self.under_way.take() else { return Ok(()) };
        // Waiting here lets a failure of the device show before the old memory is given up.
        if let Err(error) = self.model.device().synchronize() {
            for (open, tokens) in self.open.iter_mut().zip(tokens) {
                open.splice(0..0, tokens);
            }
            return Err(error.into());
        }
        self.states = states;
        Ok(())
    }
}

/// The state after the ends of its texts, whatever is open of them read. One that has text to be tokenized is an error; once `stop` is set it
/// is [`Error::Interrupted`].
pub fn closed(model: &Model, state: &State, stop: Option<&Arc<AtomicBool>>) -> Result<State> {
    if state.tails().iter().all(Tail::is_empty) {
        return Ok(state.clone());
    }
    let mut reader = Reader::new(model, state.clone())?;
    reader.groups.stop = stop.cloned();
    reader.close()?;
    reader.state()
}

/// Tokens that a memory has read already, on the way of being passed over.
#[derive(Clone, Copy, Debug)]
pub struct Passing {
    count: Count,
    passed: u64,
    hash: TextHash,
}

impl Passing {
    /// Tokens that were passed so far.
    pub fn passed(&self) -> u64 {
        self.passed
    }

    /// Whether there is nothing more to pass over.
    pub fn is_over(&self) -> bool {
        self.passed >= self.count.tokens
    }

    /// Passes over tokens until all that the memory has read were passed, or the source ends.
    pub fn over(&mut self, tokens: Tokens<'_>) -> Result<()> {
        while !self.is_over() {
            let Some(token) = tokens.next() else { return Ok(()) };
            self.hash = self.hash.after(token?);
            self.passed += 1;
        }
        Ok(())
    }
}
