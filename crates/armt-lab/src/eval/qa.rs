//! Questions judged: what a model that has read a context answers, beside what is right.
//!
//! A context is read into an empty memory and asked as `armt read` and `armt ask` do it. Exact match and F1 are SQuAD's: of words in lower case,
//! without punctuation and without a, an and the; of several right answers the best counts. Beside that stands what the same model says to the same
//! questions with nothing read: what it knows by heart or guesses, and does not have from the context.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use armt::files::{read_json, write_json};
use armt::generate::Options;
use armt::model::Model;
use armt::random::Random;
use armt::reader::End;
use armt::{Session, SideBySide};
use serde::{Deserialize, Serialize};

use super::plot::{Mark, Plot, Series};
use crate::error::{Error, Result};
use crate::tasks::babilong::Length;
use crate::tasks::qa::{Asked, Hiding, Told};
use crate::tasks::words::Words;

/// What was judged, and how; kept as a JSON file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Always `qa`.
    pub task: Qa,
    /// The model's folder.
    pub model: String,
    /// What tables call the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The files.
    pub files: Vec<String>,
    /// By the length of the contexts.
    pub lengths: Vec<Row>,
    /// Of the same questions with nothing read. Reports of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unread: Option<Row>,
}

/// The one value that `task` has here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Qa {
    /// This task.
    #[default]
    Qa,
}

/// How well a model answers about contexts of one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Row {
    /// Tokens that contexts were brought to by other text, as 4k; 0k where they are as they are, `unread` where nothing was read.
    pub length: String,
    /// Questions that were asked.
    pub questions: usize,
    /// Share of the questions whose answer is a right one.
    pub exact_match: f64,
    /// Mean overlap of the words of an answer with those of a right one.
    pub f1: f64,
}

/// An answer of a model.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Answered {
    /// What it said.
    pub said: String,
    /// Whether that is a right answer.
    pub exact: bool,
    /// How far its words are those of a right answer.
    pub f1: f64,
}

impl Report {
    /// Writes the report; an error names the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(write_json(path, self)?)
    }

    /// Reads a report; refuses a file that holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        let report: Report = read_json(path, "a report of `armt eval --task qa`")?;
        match report
            .lengths
            .iter()
            .chain(&report.unread)
            .find(|r| ![r.exact_match, r.f1].iter().all(|share| (0.0..=1.0).contains(share)))
        {
            Some(row) => Err(Error::file(path, format!("{}: expected shares from 0 to 1, got {row:?}", row.length))),
            None => Ok(report),
        }
    }
}

/// How far a judging has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Judged {
    /// Questions that were answered.
    pub answers: usize,
    /// Tokens of contexts that were read.
    pub tokens: u64,
}

/// How contexts are read.
#[derive(Clone, Default)]
pub struct Way<'h> {
    /// Other text to hide them in, where there is some, and so many tokens of both.
    pub hidden: Option<(&'h Hiding, Length)>,
    /// Decides what is around a context.
    pub seed: u64,
    /// Ends a reading as soon as it is set, and with it the judging.
    pub stop: Option<Arc<AtomicBool>>,
}

/// What a model answers about some contexts. `each` hears of the progress, within
/// a context and after each answer, and may end it, which gives [`Error::Interrupted`].
pub fn judge(
    model: &Model,
    words: &Words,
    contexts: &[Told],
    way: &Way<'_>,
    each: &mut dyn FnMut(Judged) -> ControlFlow<()>,
) -> Result<Vec<Answered>> {
    let (mut answers, mut before) = (Vec::new(), 0);
    let empty = Session::new(model.clone(), words.tokenizer.clone())?;
    let mut reading = SideBySide::new(&empty)?;
    way.stop.iter().for_each(|stop| reading.stop_on(stop.clone()));
    for (i, told) in contexts.iter().enumerate() {
        let mut tokens: Vec<i32> = words.begin().into_iter().collect();
        let context = words.tokenizer.encode(&told.context)?;
        match way.hidden {
            Some((hiding, length)) => {
                let random = Random::of(&[way.seed, length.0 as u64, i as u64]);
                tokens.extend(hiding.hide(&context, length.0.saturating_sub(tokens.len()), random)?.around(&context));
            }
            None => tokens.extend(context),
        }
        let (mut session, size) = ([empty.fork()], tokens.len() as u64);
        let answered = answers.len();
        let mut read = |now: u64| each(Judged { answers: answered, tokens: before + now });
        // A text is read in groups of segments: what is shorter than one is heard of too.
        if read(0).is_break()
            || reading.read_tokens(&mut session, &mut [&mut tokens.into_iter().map(Ok)], &mut |p| read(p.tokens))? == End::Stopped
        {
            return Err(Error::Interrupted);
        }
        before += size;
        ask_all(&session[0], words, told, &mut answers, &mut |answers| each(Judged { answers, tokens: before }))?;
    }
    Ok(answers)
}

/// What a model answers to the questions of some contexts of which it has read nothing. `each` is that of [`judge`].
pub fn judge_unread(
    model: &Model,
    words: &Words,
    contexts: &[Told],
    each: &mut dyn FnMut(Judged) -> ControlFlow<()>,
) -> Result<Vec<Answered>> {
    let mut answers = Vec::new();
    let empty = Session::new(model.clone(), words.tokenizer.clone())?;
    for told in contexts {
        ask_all(&empty, words, told, &mut answers, &mut |answers| each(Judged { answers, tokens: 0 }))?;
    }
    Ok(answers)
}

/// Tokens of an answer, where nothing longer is right.
const LONGEST: usize = 64;

/// Asks the questions of a context. `each` hears how many were answered, of this context and of those before.
fn ask_all(
    session: &Session,
    words: &Words,
    told: &Told,
    answers: &mut Vec<Answered>,
    each: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<()> {
    for Asked { question, answers: right, .. } in &told.questions {
        // As long as what is right, where that is long.
        let mut most = LONGEST;
        for right in right {
            most = most.max(words.tokenizer.encode(right)?.len() + 1);
        }
        let options = Options { max_new_tokens: most, stop: vec![words.end], ..Options::default() };
        let said = session.ask_with(question, &options, &[], &mut |_| ControlFlow::Continue(()))?;
        let said = said.text.trim().to_string();
        let exact = right.iter().any(|right| normal(right) == normal(&said));
        let f1 = right.iter().map(|right| overlap(right, &said)).fold(0.0, f64::max);
        answers.push(Answered { said, exact, f1 });
        if each(answers.len()).is_break() {
            return Err(Error::Interrupted);
        }
    }
    Ok(())
}

/// The shares of some answers about contexts of a length.
pub fn count(length: Length, answers: &[Answered]) -> Row {
    shares(length.to_string(), answers)
}

/// The shares of some answers of a model that has read nothing.
pub fn count_unread(answers: &[Answered]) -> Row {
    shares("unread".into(), answers)
}

fn shares(length: String, answers: &[Answered]) -> Row {
    let n = answers.len().max(1) as f64;
    Row {
        length,
        questions: answers.len(),
        exact_match: answers.iter().filter(|a| a.exact).count() as f64 / n,
        f1: answers.iter().map(|a| a.f1).sum::<f64>() / n,
    }
}

/// Exact match of several models over the length of the contexts, each under its name, and beside it what each says with nothing read.
pub fn compare(models: &[(String, Report)]) -> Result<Plot> {
    let rows = || models.iter().flat_map(|(_, report)| &report.lengths);
    let mut lengths = rows().map(|row| row.length.parse::<Length>()).collect::<Result<Vec<_>>>()?;
    lengths.sort_by_key(|length| length.0);
    lengths.dedup();
    let ticks: Vec<(f64, String)> = lengths.iter().enumerate().map(|(i, length)| (i as f64, length.to_string())).collect();
    let at = |length: &str| ticks.iter().find(|(_, name)| name == length).map(|(x, _)| *x);
    let mut series = Vec::new();
    for (name, report) in models {
        let mut marks: Vec<Mark> =
            report.lengths.iter().filter_map(|row| Some(Mark { x: at(&row.length)?, y: row.exact_match, spread: None })).collect();
        marks.sort_by(|a, b| a.x.total_cmp(&b.x));
        let unread = |row: &Row| marks.iter().map(|mark| Mark { y: row.exact_match, ..*mark }).collect();
        let unread = report.unread.as_ref().map(|row| Series { name: format!("{name}, nothing read"), marks: unread(row) });
        series.push(Series { name: name.clone(), marks });
        series.extend(unread);
    }
    Ok(Plot {
        title: "Questions by the length of their contexts".into(),
        x_label: "tokens of the context; 0k: as it is".into(),
        y_label: "exact match".into(),
        x_ticks: ticks,
        y_range: Some((0.0, 1.0)),
        series,
        ..Plot::default()
    })
}

/// Whether a file is a report of this kind, damaged or not.
pub fn is_report(path: &Path) -> bool {
    read_json::<serde_json::Value>(path, "a report").is_ok_and(|value| value.get("task").is_some_and(|task| task == "qa"))
}

/// The words of an answer in lower case, without punctuation and articles.
fn normal(text: &str) -> Vec<String> {
    let kept: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    // Articles are words between whatever is none, as SQuAD's `\b` has it.
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut without, mut rest) = (String::new(), kept.as_str());
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_word(c) != is_word(first)).unwrap_or(rest.len());
        let (run, after) = rest.split_at(end);
        without += if ["a", "an", "the"].contains(&run) { " " } else { run };
        rest = after;
    }
    without.split_whitespace().map(String::from).collect()
}

/// F1 of the words of two answers; of two without words 1.
fn overlap(right: &str, said: &str) -> f64 {
    let (right, said) = (normal(right), normal(said));
    if right.is_empty() || said.is_empty() {
        return f64::from(u8::from(right == said));
    }
    let mut left: HashMap<&String, usize> = HashMap::new();
    right.iter().for_each(|word| *left.entry(word).or_default() += 1);
    let mut common = 0;
    for word in &said {
        if let Some(n) = left.get_mut(word).filter(|n| **n > 0) {
            *n -= 1;
            common += 1;
        }
    }
    2.0 * f64::from(common) / (right.len() + said.len()) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_compared_as_squad_compares_them() {
        assert_eq!(normal("The Eiffel-Tower, in  Paris!"), ["eiffeltower", "in", "paris"]);
        assert_eq!(normal("a"), Vec::<String>::new());
        for (right, said, f1) in [
            ("the kitchen", "Kitchen.", 1.0),
            ("red car", "a red bicycle", 0.5),
            ("red", "blue", 0.0),
            ("the", "a", 1.0),
            ("x", "", 0.0),
        ] {
            assert!((overlap(right, said) - f1).abs() < 1e-12, "{right} {said}: {}", overlap(right, said));
        }
        assert!((overlap("yes yes no", "yes") - 0.5).abs() < 1e-12);
    }
}
