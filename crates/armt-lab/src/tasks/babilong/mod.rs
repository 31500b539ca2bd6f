//! BABILong: the facts of a bAbI story in order, hidden among the sentences of books.
//!
//! A sample is `context ++ question ++ GEN ++ answer ++ EOS`. The context has a given number of tokens, exactly: the facts, and
//! background for the rest, whose last sentence is cut. For n sentences of background each fact is put into one of the n + 1 gaps, all
//! alike and several facts into one if it comes so; the gaps are sorted, so that facts keep their order. Facts, question and answer are
//! tokenised one by one; what stands before a fact or a sentence, and how many tokens a length has, is the [`Form`]'s. GEN is the first
//! token of the string "GEN". Question and answer are not counted in the length.
//!
//! A context is a stream: whatever its length, no more of it is in memory than a sentence. How many sentences it will have, which the
//! gaps depend on, is counted beforehand on the tokenised books. The same seed, books and tokenizer give the same tokens everywhere.

mod bm25;
mod books;
mod context;
mod form;
pub mod given;
pub mod json;
mod lessons;
mod places;
mod stories;
mod training;
mod vocabulary;

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};

pub use self::books::Books;
pub use self::context::{Context, Piece};
pub use self::form::Form;
pub(super) use self::lessons::tokenizer;
pub use self::lessons::{BabilongLessons, SETTING};
pub(in crate::tasks) use self::places::elsewhere;
pub use self::places::find_data;
pub use self::stories::Stories;
pub use self::training::{BabilongTraining, Prefer};
pub use self::vocabulary::vocabulary;
pub use crate::carried::Data;

pub(super) use self::books::Reading;
use crate::error::{Error, Result};
use crate::tasks::asked::Prompt;
use crate::tasks::babi;
use armt::random::Random;
use armt::text::{END_OF_TEXT, Tokenizer};

/// GEN is the first token of this.
pub const GEN: &str = "GEN";
/// Tells the generator of an order from others of the same sample.
const SHUFFLED: u64 = 0x006f_7264_6572;
/// How often another story is tried where one has too many facts for a length.
const ATTEMPTS: u64 = 1000;
/// Different sentences of stories that are remembered as tokens; qa1 to qa5 have fewer than 2,000.
const REMEMBERED: usize = 1 << 16;

/// Tokens of a context: written 0k, 1k, 128k, 1M or as a plain number. k is 1,000 and M 1,000,000, as in the benchmark's lengths; 0
/// stands for the facts alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Length(pub usize);

impl FromStr for Length {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let (digits, unit) = match s.strip_suffix(['k', 'K']) {
            Some(rest) => (rest, 1_000),
            None => s.strip_suffix(['m', 'M']).map_or((s, 1), |rest| (rest, 1_000_000)),
        };
        let number = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse::<usize>().ok()).flatten();
        let tokens = number.and_then(|n| n.checked_mul(unit)).map(Length);
        tokens.ok_or_else(|| Error::config("length", "tokens as 0k, 16k, 1M or a whole number", s))
    }
}

impl Length {
    /// Whether facts of so many tokens fit.
    fn holds(self, facts: usize) -> bool {
        self.0 == 0 || facts <= self.0
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n > 0 && n % 1_000_000 == 0 => write!(f, "{}M", n / 1_000_000),
            n if n % 1_000 == 0 => write!(f, "{}k", n / 1_000),
            n => write!(f, "{n}"),
        }
    }
}

/// How the facts of a story are told; other than as they are only to see what a model's answers rest on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Facts {
    /// All of them, in their order.
    #[default]
    Told,
    /// All of them, in an order that is drawn.
    Shuffled,
    /// None: background stands in their place.
    LeftOut,
}

/// Which gaps between the sentences of background facts are put into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gaps {
    /// Any, all alike: the benchmark's way.
    #[default]
    Any,
    /// One of so many that are drawn first: facts stand side by side.
    Few(usize),
    /// That before the first sentence.
    Start,
    /// That after the last.
    End,
}

/// Makes samples of stories and books.
pub struct Babilong {
    books: Arc<Books>,
    /// Sentences of stories as tokens. There are few different ones, and tokenising them would take most of the time of a short sample.
    known: RwLock<HashMap<String, Arc<[i32]>>>,
    ask: i32,
    end: i32,
    stop: Option<Arc<AtomicBool>>,
}

/// A story among books: where the context starts and where its facts go, not the context itself.
#[derive(Clone)]
pub struct Sample {
    /// The story.
    pub story: babi::Sample,
    /// Its question as tokens.
    pub prompt: Prompt,
    facts: Vec<Arc<[i32]>>,
    /// The gap of each fact, ascending.
    gaps: Vec<usize>,
    /// Tokens of background.
    background: usize,
    /// Before the first sentence of background; nothing where there is none.
    reading: Option<Reading>,
}

impl Babilong {
    /// Samples with the sentences and the tokenizer of some books. A tokenizer without `<|endoftext|>` is refused.
    pub fn new(books: Arc<Books>) -> Result<Self> {
        let tokenizer = books.tokenizer();
        let end = tokenizer.end_of_text();
        let end =
            end.ok_or_else(|| Error::unfit(format!("a tokenizer with the token {END_OF_TEXT}, as GPT-2's has"), "one without"))?;
        let first = tokenizer.encode(GEN)?.first().copied();
        let ask = first.ok_or_else(|| Error::unfit(format!("a tokenizer with tokens for \"{GEN}\""), "none"))?;
        Ok(Babilong { books, known: RwLock::default(), ask, end, stop: None })
    }

    /// From now on drawing ends once this is set, which gives [`Error::Interrupted`]: a very long context takes its time before any of it is read.
    pub fn stop_on(&mut self, stop: Arc<AtomicBool>) {
        self.stop = Some(stop);
    }

    /// The tokenizer of the samples.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.books.tokenizer()
    }

    /// GEN, the token between a question and its answer.
    pub fn ask_token(&self) -> i32 {
        self.ask
    }

    /// How its contexts are written.
    pub fn form(&self) -> Form {
        self.books.form()
    }

    /// EOS, the token after an answer.
    pub fn end_token(&self) -> i32 {
        self.end
    }

    /// A question and its answer as tokens: the story's own, or another about the same facts.
    pub fn prompt(&self, question: &babi::Question) -> Result<Prompt> {
        let with = |text: &str, token: i32| -> Result<Vec<i32>> { Ok(self.encode(text)?.iter().copied().chain([token]).collect()) };
        Ok(Prompt { question: with(&question.text, self.ask)?, answer: with(&question.answer, self.end)? })
    }

    /// A story in a context of `length` tokens. Facts that alone take more are refused.
    pub fn sample(&self, story: babi::Sample, length: Length, random: Random) -> Result<Sample> {
        self.sample_in(Gaps::Any, story, length, random)
    }

    /// As [`Babilong::sample`], with the facts in some of the gaps only.
    pub fn sample_in(&self, gaps: Gaps, story: babi::Sample, length: Length, random: Random) -> Result<Sample> {
        let facts = self.facts(&story)?;
        let told = told(&facts);
        if !length.holds(told) {
            return Err(Error::input("length", format!("at least {told} tokens, which its facts take"), length.0));
        }
        self.hide(story, facts, gaps, length, random)
    }

    /// Sample `number` of a seed and length: the story of that number, or another where its facts take more than the length. Where no
    /// story fits in 1,000 attempts, that is an error.
    pub fn draw(&self, stories: &Stories, length: Length, number: u64) -> Result<Sample> {
        self.draw_as(stories, length, number, Facts::Told)
    }

    /// Sample `number` as [`Babilong::draw`] gives it, from the same place of the same book, with its facts told in another way.
    pub fn draw_as(&self, stories: &Stories, length: Length, number: u64, how: Facts) -> Result<Sample> {
        let random = Random::of(&[stories.seed(), stories.task().number() as u64, length.0 as u64, number]);
        let room = self.form().tokens(length)?;
        for attempt in 0..ATTEMPTS {
            let story = stories.get(number, attempt)?;
            // A fact has more than one token: what is far too long need not be tokenised to be known.
            if room.holds(story.facts.len()) {
                let mut facts = self.facts(&story)?;
                if room.holds(told(&facts)) {
                    match how {
                        Facts::Told => {}
                        Facts::LeftOut => facts.clear(),
                        Facts::Shuffled => shuffle(&mut facts, Random::of(&[stories.seed(), number, SHUFFLED])),
                    }
                    return self.hide(story, facts, Gaps::Any, room, random);
                }
            }
        }
        let expected = format!("room for the facts of {}", stories.task());
        Err(Error::input(format!("length {length}"), expected, format!("too little for any of {ATTEMPTS} stories")))
    }

    /// A question about a text that is given whole.
    fn as_given(&self, story: babi::Sample, text: &str) -> Result<Sample> {
        let prompt = self.prompt(&story.question)?;
        let facts = vec![self.tokenizer().encode(text)?.into()];
        Ok(Sample { story, prompt, facts, gaps: vec![0], background: 0, reading: None })
    }

    fn facts(&self, story: &babi::Sample) -> Result<Vec<Arc<[i32]>>> {
        let before = self.books.form().before_fact();
        story.facts.iter().map(|f| self.encode(&format!("{before}{f}"))).collect()
    }

    /// The tokens of a sentence of a story, remembered.
    fn encode(&self, text: &str) -> Result<Arc<[i32]>> {
        // A thread that failed leaves the map whole: an entry is put in at once.
        if let Some(tokens) = self.known.read().unwrap_or_else(PoisonError::into_inner).get(text) {
            return Ok(tokens.clone());
        }
        let tokens: Arc<[i32]> = self.tokenizer().encode(text)?.into();
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() < REMEMBERED {
            known.insert(text.into(), tokens.clone());
        }
        Ok(tokens)
    }

    /// Draws the background, and where in it the facts go.
    fn hide(&self, story: babi::Sample, facts: Vec<Arc<[i32]>>, gaps: Gaps, length: Length, mut random: Random) -> Result<Sample> {
        let background = length.0.saturating_sub(told(&facts));
        let prompt = self.prompt(&story.question)?;
        let reading = Reading::new(self.books.clone(), Random::new(random.bits()))?;
        let sentences = self.count(reading.clone(), background)?;
        let few: Vec<usize> = match gaps {
            Gaps::Any => Vec::new(),
            Gaps::Few(n) => (0..n.max(1)).map(|_| random.below(sentences + 1)).collect(),
            Gaps::Start => vec![0],
            Gaps::End => vec![sentences],
        };
        let mut draw = || if few.is_empty() { random.below(sentences + 1) } else { few[random.below(few.len())] };
        let mut gaps: Vec<usize> = facts.iter().map(|_| draw()).collect();
        gaps.sort_unstable();
        Ok(Sample { story, prompt, facts, gaps, background, reading: Some(reading) })
    }

    /// Sentences that a number of tokens takes, the last of them cut.
    fn count(&self, mut reading: Reading, tokens: usize) -> Result<usize> {
        let (mut sentences, mut left) = (0, tokens);
        while left > 0 {
            if self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(Error::Interrupted);
            }
            left = left.saturating_sub(reading.advance()?);
            sentences += 1;
        }
        Ok(sentences)
    }
}

/// Puts things into another order, any like any other.
pub(super) fn shuffle<T>(things: &mut [T], mut random: Random) {
    for i in (1..things.len()).rev() {
        things.swap(i, random.below(i + 1));
    }
}

/// Tokens of facts.
fn told(facts: &[Arc<[i32]>]) -> usize {
    facts.iter().map(|f| f.len()).sum()
}

impl Sample {
    /// Tokens of the context.
    pub fn length(&self) -> usize {
        self.background + told(&self.facts)
    }

    /// The context from its start, each time anew.
    pub fn context(&self) -> Context {
        let facts = self.gaps.iter().copied().zip(self.facts.iter().cloned()).collect();
        Context::new(facts, self.background, self.reading.clone())
    }

    /// What a model reads before it answers: the context, the question and GEN.
    pub fn tokens(&self) -> impl Iterator<Item = armt::Result<i32>> + Send + 'static {
        self.context().chain(self.prompt.question.clone().into_iter().map(Ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_written_in_thousands_and_millions() {
        for (text, tokens) in
            [("0k", 0), ("0", 0), ("1k", 1000), ("128k", 128_000), ("1M", 1_000_000), ("50m", 50_000_000), ("700", 700)]
        {
            assert_eq!(text.parse::<Length>().unwrap(), Length(tokens), "{text}");
        }
        for wrong in ["", "k", "1.5k", "-1", "+1k", "1G", "one", "99999999999999999999", "99999999999999999M"] {
            let error = wrong.parse::<Length>().unwrap_err().to_string();
            assert!(error.contains("0k, 16k, 1M"), "{wrong}: {error}");
        }
        assert_eq!([0, 700, 16_000, 2_000_000].map(|n| Length(n).to_string()), ["0k", "700", "16k", "2M"]);
    }
}
