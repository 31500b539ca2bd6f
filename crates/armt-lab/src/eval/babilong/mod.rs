//! BABILong judged: the share of questions that a model answers right, by task and length of the context.
//!
//! A sample is read as the authors read it: `context ++ question ++ GEN` is cut into segments from its start, all but the last go into
//! the memory, and the answer follows from the last. Each sample has a [`Session`] of its own: what is whole of the context is read into several of them
//! side by side; the rest of it, the question and GEN are what they go on from. The answer is the most probable token each
//! time, at most 10, cut at EOS. It may reach over a segment's end as it may in training; the next segment is begun then.
//!
//! A context is a stream and never in memory, so that 50 million tokens take no more than a thousand. Instead of all of it a model can be given what
//! BM25 finds in it for the question, in one segment: a baseline without a memory.

pub mod cited;
pub mod compare;
pub mod csv;
pub mod metric;
mod report;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use self::report::{Cell, Report, ReportTask, Settings, is_report};

use self::metric::{exact_match, label_match};
use crate::error::{Error, Result};
use crate::tasks::babi::Task;
use crate::tasks::babilong::{Babilong, Facts, Length, Sample, Stories};
use armt::generate::{Generated, Options};
use armt::model::Model;
use armt::reader::{End, Tokens};
use armt::{Session, SideBySide};

/// Tokens that an answer may have, as in the paper.
const ANSWER: usize = 10;

/// A model that is judged, and how its samples are read.
pub struct Judge<'m> {
    babilong: &'m Babilong,
    /// That has read nothing.
    session: Session,
    reading: SideBySide,
    batch: usize,
    /// Sentences that are retrieved and read in place of the context.
    retrieved: Option<usize>,
}

/// What a model said to a question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answered {
    /// The right answer.
    pub target: String,
    /// What the model said, without white space around it.
    pub output: String,
    /// The question.
    pub question: String,
    /// Whether it is right to the letter.
    pub exact: bool,
    /// Whether it is right by the benchmark's labels.
    pub label: bool,
}

/// How far a cell is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CellProgress {
    /// Samples that were answered.
    pub samples: usize,
    /// Tokens of contexts that were read, or looked through for sentences.
    pub tokens: u64,
}

impl<'m> Judge<'m> {
    /// A judge of `batch` samples side by side. Refuses 0, and a model whose vocabulary is not that of the samples.
    pub fn new(model: &Model, babilong: &'m Babilong, batch: usize) -> Result<Self> {
        if batch == 0 {
            return Err(Error::config("batch", "at least 1", 0));
        }
        let (tokens, rows) = (babilong.tokenizer().vocabulary(), model.sizes().vocab);
        if tokens > rows {
            let expected = format!("a model with the samples' tokens, up to {}", tokens - 1);
            return Err(Error::unfit(expected, format!("one of {rows} tokens")));
        }
        let session = Session::new(model.clone(), babilong.tokenizer().clone())?;
        Ok(Judge { babilong, reading: SideBySide::new(&session)?, session, batch, retrieved: None })
    }

    /// From now on a reading ends as soon as this is set, and with it the cell, which gives [`Error::Interrupted`].
    pub fn stop_on(&mut self, stop: Arc<AtomicBool>) {
        self.reading.stop_on(stop);
    }

    /// From now on the model reads the best `k` sentences of a context in its place, as many of them as fit into one segment with question and
    /// answer.
    pub fn retrieve(&mut self, k: usize) {
        self.retrieved = Some(k);
    }

    /// What is read of a sample.
    fn read_of(&self, sample: Sample) -> Result<Sample> {
        let Some(k) = self.retrieved else { return Ok(sample) };
        let room = self.session.model().config().segment_size.saturating_sub(sample.prompt.question.len() + ANSWER);
        sample.retrieved(self.babilong.tokenizer(), k, room)
    }

    /// The answers to samples 0 to `samples` of some stories in contexts of a length. `each` hears of the progress and may end it, which
    /// gives [`Error::Interrupted`].
    pub fn cell(
        &mut self,
        stories: &Stories,
        length: Length,
        facts: Facts,
        samples: usize,
        each: &mut dyn FnMut(CellProgress) -> ControlFlow<()>,
    ) -> Result<Vec<Answered>> {
        let mut answers = Vec::new();
        let mut before = CellProgress::default();
        while answers.len() < samples {
            let numbers = answers.len()..samples.min(answers.len() + self.batch);
            let drawn = numbers.map(|n| self.babilong.draw_as(stories, length, n as u64, facts));
            let drawn = drawn.collect::<Result<Vec<_>>>()?;
            let tokens = tokens_of(&drawn);
            let read = drawn.into_iter().map(|sample| self.read_of(sample)).collect::<Result<Vec<_>>>()?;
            answers.extend(self.part(stories.task(), &read, tokens, &mut before, each)?);
        }
        Ok(answers)
    }

    /// The answers to samples that are there already, as [`Judge::cell`] gives them.
    pub fn given(
        &mut self,
        task: Task,
        samples: &[Sample],
        each: &mut dyn FnMut(CellProgress) -> ControlFlow<()>,
    ) -> Result<Vec<Answered>> {
        let (mut answers, mut before) = (Vec::new(), CellProgress::default());
        for part in samples.chunks(self.batch) {
            answers.extend(self.part(task, part, tokens_of(part), &mut before, each)?);
        }
        Ok(answers)
    }

    /// The answers to samples that are read side by side, of contexts of `tokens` together, after those that `before` counts.
    fn part(
        &mut self,
        task: Task,
        samples: &[Sample],
        tokens: u64,
        before: &mut CellProgress,
        each: &mut dyn FnMut(CellProgress) -> ControlFlow<()>,
    ) -> Result<Vec<Answered>> {
        let so_far = *before;
        let texts = self.answer(samples, &mut |tokens| each(CellProgress { tokens: so_far.tokens + tokens, ..so_far }))?;
        let answered = samples.iter().zip(texts).map(|(Sample { story, .. }, output)| {
            let (question, target) = (story.question.text.clone(), story.question.answer.clone());
            let (exact, label) = (exact_match(&target, &output), label_match(task, &target, &output, &question));
            Answered { target, output, question, exact, label }
        });
        before.samples += samples.len();
        before.tokens += tokens;
        if each(*before).is_break() { Err(Error::Interrupted) } else { Ok(answered.collect()) }
    }

    /// What the model answers to some samples, read and answered side by side. `each` hears how many tokens of contexts were read.
    fn answer(&mut self, samples: &[Sample], each: &mut dyn FnMut(u64) -> ControlFlow<()>) -> Result<Vec<String>> {
        let mut streams: Vec<_> = samples.iter().map(Sample::tokens).collect();
        let sessions = self.read(&mut streams, samples, each)?;
        let rests = streams.into_iter().map(Iterator::collect).collect::<armt::Result<Vec<Vec<i32>>>>()?;
        let end = self.babilong.end_token();
        let options = Options { max_new_tokens: ANSWER, stop: vec![end], ..Options::default() };
        let text = |said: &Generated| {
            let tokens = said.tokens[0].split(|t| *t == end).next().unwrap_or_default();
            Ok(self.babilong.tokenizer().decode(tokens)?.trim().to_string())
        };
        Session::generate_all(&sessions, &rests, &options)?.iter().map(text).collect()
    }

    /// Sessions that have read the whole segments of each sample's context.
    fn read<T: Iterator<Item = armt::Result<i32>>>(
        &mut self,
        streams: &mut [T],
        samples: &[Sample],
        each: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Vec<Session>> {
        let size = self.session.model().config().segment_size;
        let mut sessions = vec![self.session.fork(); samples.len()];
        let heads = streams.iter_mut().zip(samples);
        let mut heads: Vec<_> = heads.map(|(stream, sample)| stream.by_ref().take(sample.length() / size * size)).collect();
        let mut texts: Vec<Tokens<'_>> = heads.iter_mut().map(|head| head as Tokens<'_>).collect();
        match self.reading.read_tokens(&mut sessions, &mut texts, &mut |progress| each(progress.tokens))? {
            End::Finished => Ok(sessions),
            End::Stopped => Err(Error::Interrupted),
        }
    }
}

fn tokens_of(samples: &[Sample]) -> u64 {
    samples.iter().map(|s| s.length() as u64).sum()
}

/// A cell's shares.
pub fn count(task: Task, length: Length, answers: &[Answered], label_match: bool) -> Cell {
    let share = |right: fn(&Answered) -> bool| answers.iter().filter(|a| right(a)).count() as f64 / answers.len().max(1) as f64;
    Cell {
        task,
        length,
        samples: answers.len(),
        exact_match: share(|a| a.exact),
        label_match: label_match.then(|| share(|a| a.label)),
        csv: None,
    }
}
