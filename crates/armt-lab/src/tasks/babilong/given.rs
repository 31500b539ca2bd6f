//! Samples that were made elsewhere, as lines of JSON: `input`, `question` and `target`, the fields of the published BABILong sets, and
//! `task` and `length`, where `armt data` wrote them. Other fields are passed over.
//!
//! The input is the context as it stands, whatever its form; the question and GEN follow it as they do in any sample.

use std::path::Path;

use serde::Deserialize;

use super::{Babilong, Length, Sample};
use crate::error::{Error, Result};
use crate::tasks::babi::{self, Question, Task};

/// A line of the file.
#[derive(Deserialize)]
struct Line {
    input: String,
    question: String,
    target: String,
    task: Option<String>,
    length: Option<String>,
}

/// The samples of one task and length.
pub struct Given {
    /// Their task.
    pub task: Task,
    /// Their length, as the file or the user names it.
    pub length: Length,
    /// In the order of the file.
    pub samples: Vec<Sample>,
}

/// What a line says, or else the user, in agreement.
fn one<T>(line: Option<String>, user: Option<T>) -> std::result::Result<Option<T>, String>
where
    T: std::str::FromStr<Err = Error> + PartialEq + std::fmt::Display,
{
    let line = line.map(|said| said.parse::<T>()).transpose().map_err(|e| e.to_string())?;
    match (line, user) {
        (Some(line), Some(user)) if line != user => Err(format!("expected {user}, as all of the file was said to be, got {line}")),
        (line, user) => Ok(line.or(user)),
    }
}

/// BLAKE3 of a file's bytes.
pub fn hash(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
    Ok(blake3::hash(&bytes).to_string())
}

/// The samples of a file by task and length, in the order in which these first come, at most `most` of each. Where a line does not say its
/// task or length, it has those of `otherwise`. A line that is no sample, one whose task or length nobody says, and one that says another
/// than `otherwise`, is refused by its number.
pub fn read(
    babilong: &Babilong,
    path: &Path,
    otherwise: (Option<Task>, Option<Length>),
    most: Option<usize>,
) -> Result<Vec<Given>> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let mut all: Vec<Given> = Vec::new();
    // A byte order mark at the beginning is no text.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |message: String| Error::file(path, format!("line {}: {message}", i + 1));
        let Line { input, question, target, task, length } = serde_json::from_str(line)
            .map_err(|e| wrong(format!("expected a sample as JSON, with input, question and target, got another text ({e})")))?;
        let task = one(task, otherwise.0).map_err(wrong)?;
        let length = one(length, otherwise.1).map_err(wrong)?;
        let (Some(task), Some(length)) = (task, length) else {
            let missing = if task.is_none() { "task" } else { "length" };
            return Err(wrong(format!("expected a field {missing}, or one {missing} for all of the file, got none")));
        };
        let place = all.iter().position(|g| (g.task, g.length) == (task, length)).unwrap_or_else(|| {
            all.push(Given { task, length, samples: Vec::new() });
            all.len() - 1
        });
        if most.is_none_or(|most| all[place].samples.len() < most) {
            let question = Question { text: question, answer: target, supports: Vec::new() };
            let story = babi::Sample { facts: Vec::new(), question };
            all[place].samples.push(babilong.as_given(story, &input)?);
        }
    }
    if all.is_empty() {
        return Err(Error::file(path, "expected samples as lines of JSON, found none"));
    }
    Ok(all)
}
