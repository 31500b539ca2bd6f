//! Windows over documents, place by place.

use std::iter::Peekable;
use std::sync::Arc;

use armt::random::Random;
use armt::text::Tokenizer;

use super::TextTraining;
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::asked::Text;
use crate::tasks::documents::{Documents, Found, Tokens};
use crate::tasks::training::{Window, some_of};

/// Windows that the first document of a place is taken up behind, at most.
const BEHIND: usize = 32;

/// Documents without end, in an order of files that is drawn for each round, or in their own once.
struct Order {
    documents: Documents,
    /// Files of this round that are still to come, the next one last.
    files: Vec<usize>,
    current: Option<Box<dyn Iterator<Item = Result<Found>> + Send>>,
    /// Draws the rounds; nothing where there is one.
    random: Option<Random>,
    /// Documents that this round has given: a round of none is the end.
    given: u64,
    /// Rounds that were begun.
    rounds: u64,
}

impl Order {
    fn once(documents: &Documents) -> Self {
        let files = (0..documents.files().len()).rev().collect();
        Order { documents: documents.clone(), files, current: None, random: None, given: 0, rounds: 0 }
    }

    fn endless(documents: &Documents, random: Random) -> Self {
        Order { documents: documents.clone(), files: Vec::new(), current: None, random: Some(random), given: 1, rounds: 0 }
    }

    fn next(&mut self) -> Result<Option<Found>> {
        loop {
            if let Some(found) = self.current.as_mut().and_then(Iterator::next) {
                self.given += 1;
                return found.map(Some);
            }
            if self.files.is_empty() {
                let Some(random) = self.random.as_mut().filter(|_| self.given > 0) else { return Ok(None) };
                self.given = 0;
                self.rounds += 1;
                self.files = (0..self.documents.files().len()).collect();
                for i in (1..self.files.len()).rev() {
                    self.files.swap(i, random.below(i + 1));
                }
            }
            let Some(file) = self.files.pop() else { return Ok(None) };
            self.current = Some(self.documents.of_file(file)?);
        }
    }
}

/// One place: the document that is being read there.
pub(super) struct Lane {
    tokenizer: Arc<Tokenizer>,
    end: i32,
    tokens: Option<Peekable<Tokens>>,
    /// The order of a lane of its own.
    order: Option<Order>,
    /// The last token of the window before, which the next one begins with.
    last: Option<i32>,
}

impl Lane {
    fn new(tokenizer: &Arc<Tokenizer>, end: i32) -> Self {
        Lane { tokenizer: tokenizer.clone(), end, tokens: None, order: None, last: None }
    }

    /// All documents once, in their order.
    pub fn once(documents: &Documents, tokenizer: &Arc<Tokenizer>, end: i32) -> Result<Self> {
        Ok(Lane { order: Some(Order::once(documents)), ..Lane::new(tokenizer, end) })
    }

    /// The next window of joined documents; one that is not full is the last, and `None` follows it.
    pub fn joined(&mut self, length: usize) -> Result<Option<Text>> {
        let mut order = self.order.take();
        let text = order.as_mut().map_or(Ok(None), |order| self.joined_from(order, length));
        self.order = order;
        text
    }

    fn joined_from(&mut self, order: &mut Order, length: usize) -> Result<Option<Text>> {
        let mut ids: Vec<i32> = self.last.take().into_iter().collect();
        while ids.len() <= length {
            match self.tokens.as_mut().map(Iterator::next) {
                Some(Some(token)) => ids.push(token?),
                Some(None) => {
                    ids.push(self.end);
                    self.tokens = None;
                }
                None => match order.next()? {
                    Some(found) => self.tokens = Some(found.tokens(&self.tokenizer)?.peekable()),
                    None => break,
                },
            }
        }
        if ids.len() > length {
            self.last = ids.last().copied();
        }
        Ok((ids.len() > 1).then(|| predicted(ids)))
    }

    /// The next window of the document, or of the next one, and whether it begins one; it may be shorter than `length`. A document of fewer
    /// than two tokens is passed over, and a whole round of such is an error.
    fn own(&mut self, order: &mut Order, length: usize) -> Result<Option<(Text, bool)>> {
        let first = order.rounds;
        loop {
            let begins = self.last.is_none();
            let mut ids: Vec<i32> = self.last.take().into_iter().collect();
            while ids.len() <= length {
                match self.tokens.as_mut().and_then(Iterator::next) {
                    Some(token) => ids.push(token?),
                    None => break,
                }
            }
            let more = match self.tokens.as_mut() {
                Some(tokens) => tokens.peek().is_some(),
                None => false,
            };
            if ids.len() > length && more {
                self.last = ids.last().copied();
            } else {
                self.tokens = None;
            }
            if ids.len() > 1 {
                return Ok(Some((predicted(ids), begins)));
            }
            if order.rounds > first + 2 {
                return Err(Error::config("task.train", "texts of at least two tokens", "none"));
            }
            match order.next()? {
                Some(found) => self.tokens = Some(found.tokens(&self.tokenizer)?.peekable()),
                None => return Ok(None),
            }
        }
    }
}

/// Each token but the last, predicting the one after it.
fn predicted(mut ids: Vec<i32>) -> Text {
    let next = ids.split_off(1);
    let mut text = Text { ids, next };
    text.ids.extend_from_slice(&text.next[..text.next.len() - 1]);
    text
}

/// The windows of all places, step by step, until no place has one.
pub struct Lanes<'t> {
    training: &'t TextTraining,
    order: Order,
    lanes: Vec<Lane>,
    random: Random,
    /// Whether the first documents are taken up somewhere in their beginning.
    amid: bool,
    vary: bool,
}

impl<'t> Lanes<'t> {
    /// What is learned from, without end.
    pub(super) fn new(training: &'t TextTraining, seed: u64) -> Result<Self> {
        let mut random = Random::of(&[seed]);
        let order = Order::endless(&training.train, Random::new(random.bits()));
        let lanes = (0..training.batch).map(|_| Lane::new(&training.tokenizer, training.end)).collect();
        Ok(Lanes { training, order, lanes, random, amid: true, vary: training.vary })
    }

    /// What is judged on: every document from its beginning to its end, `texts` side by side or as many as there are.
    pub(super) fn judged(training: &'t TextTraining, texts: usize) -> Result<Self> {
        let (mut order, mut lanes) = (Order::once(&training.valid), Vec::new());
        while lanes.len() < texts
            && let Some(found) = order.next()?
        {
            let tokens = Some(found.tokens(&training.tokenizer)?.peekable());
            lanes.push(Lane { tokens, ..Lane::new(&training.tokenizer, training.end) });
        }
        Ok(Lanes { training, order, lanes, random: Random::new(0), amid: false, vary: false })
    }

    /// Takes the first documents up somewhere in their beginning.
    fn begin(&mut self) -> Result<()> {
        let length = self.training.segment * self.training.segments;
        for lane in &mut self.lanes {
            let Some(found) = self.order.next()? else { return Ok(()) };
            let mut tokens = found.tokens(&self.training.tokenizer)?.peekable();
            for _ in 0..self.random.below(BEHIND) * length {
                tokens.next().transpose()?;
            }
            lane.tokens = Some(tokens);
        }
        Ok(())
    }

    fn step(&mut self) -> Result<Option<Window>> {
        if std::mem::take(&mut self.amid) {
            self.begin()?;
        }
        let TextTraining { segment, segments, loss, end, .. } = *self.training;
        let length = segment * if self.vary { some_of(segments, &mut self.random) } else { segments };
        let mut windows = Vec::new();
        for lane in &mut self.lanes {
            windows.push(match self.training.carried {
                true => lane.own(&mut self.order, length)?,
                false => lane.joined_from(&mut self.order, length)?.map(|text| (text, true)),
            });
        }
        if windows.iter().all(Option::is_none) {
            return Ok(None);
        }
        let (mut texts, mut begins) = (Vec::new(), Vec::new());
        for window in windows {
            // A place whose documents have ended before those of others asks nothing.
            let (text, first) = window.unwrap_or((Text::default(), true));
            let mut text = loss.of(text, segment);
            text.fill_to(length, end);
            texts.push(text);
            begins.push(first);
        }
        Ok(Some(Window { asked: TaskBatch::of(texts, end), begins }))
    }
}

impl Iterator for Lanes<'_> {
    type Item = Result<Window>;

    fn next(&mut self) -> Option<Result<Window>> {
        self.step().transpose()
    }
}
