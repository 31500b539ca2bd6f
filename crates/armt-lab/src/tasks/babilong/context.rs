//! The tokens of a context, piece by piece: facts in their gaps between sentences of background.

use std::sync::Arc;

// Tokens are read by a reader, whose errors they have.
use armt::Result;

use super::books::Reading;

/// A context as it is read. No more of it than a sentence is in memory at a time; the facts are.
pub struct Context {
    /// Each fact and its gap, ascending.
    facts: Vec<(usize, Arc<[i32]>)>,
    /// Nothing where there is no background.
    reading: Option<Reading>,
    /// Facts that were given.
    told: usize,
    /// Sentences of background that were given.
    sentences: usize,
    /// Tokens of background that are still to come.
    left: usize,
    current: Current,
    /// Tokens of the current piece, and how many of them were given one by one.
    size: usize,
    given: usize,
    failed: bool,
}

#[derive(Clone, Copy)]
enum Current {
    Fact(usize),
    Background,
}

/// A sentence of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'c> {
    /// A fact of the story.
    Fact(&'c [i32]),
    /// A sentence of a book; the last one may be cut.
    Background(&'c [i32]),
}

impl<'c> Piece<'c> {
    /// Its tokens.
    pub fn tokens(self) -> &'c [i32] {
        match self {
            Piece::Fact(tokens) | Piece::Background(tokens) => tokens,
        }
    }
}

impl Context {
    pub(super) fn new(facts: Vec<(usize, Arc<[i32]>)>, background: usize, reading: Option<Reading>) -> Self {
        let current = Current::Background;
        Context { facts, reading, told: 0, sentences: 0, left: background, current, size: 0, given: 0, failed: false }
    }

    /// The next sentence, or what single tokens have left of the current one; `None` at the end. A book that cannot be read is an
    /// error with its name.
    pub fn next_piece(&mut self) -> Result<Option<Piece<'_>>> {
        if self.given == self.size && !self.turn()? {
            return Ok(None);
        }
        let from = std::mem::replace(&mut self.given, self.size);
        Ok(Some(match self.current {
            Current::Fact(i) => Piece::Fact(&self.facts[i].1[from..]),
            Current::Background => Piece::Background(&self.sentence()[from..self.size]),
        }))
    }

    /// The sentence of background that was taken last.
    fn sentence(&self) -> &[i32] {
        self.reading.as_ref().map(Reading::sentence).unwrap_or_default()
    }

    /// Goes on to the next piece; `false` at the end.
    fn turn(&mut self) -> Result<bool> {
        let here = self.facts.get(self.told).filter(|(gap, _)| *gap == self.sentences || self.left == 0);
        if let Some((_, fact)) = here {
            (self.current, self.size) = (Current::Fact(self.told), fact.len());
            self.told += 1;
        } else if let Some(reading) = self.reading.as_mut().filter(|_| self.left > 0) {
            self.size = reading.advance()?.min(self.left);
            self.current = Current::Background;
            self.left -= self.size;
            self.sentences += 1;
        } else {
            return Ok(false);
        }
        self.given = 0;
        Ok(true)
    }
}

impl Iterator for Context {
    type Item = Result<i32>;

    fn next(&mut self) -> Option<Result<i32>> {
        while self.given == self.size {
            if self.failed {
                return None;
            }
            match self.turn() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.failed = true;
                    return Some(Err(error));
                }
            }
        }
        let token = match self.current {
            Current::Fact(i) => self.facts[i].1[self.given],
            Current::Background => self.sentence()[self.given],
        };
        self.given += 1;
        Some(Ok(token))
    }
}
