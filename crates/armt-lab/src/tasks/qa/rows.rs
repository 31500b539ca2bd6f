//! Contexts and their questions from lines of JSON.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::tasks::documents::{Row, Rows, field, find, is_table};

/// The names of the fields of a row, as paths (`answers.text`). Those that are not given are the first of the usual names that a row has:
/// `context` or `input`, `question`, `answer` or `target`, which `armt data babilong` writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fields {
    /// The text that is asked about.
    #[serde(default)]
    pub context: Option<String>,
    /// The question.
    #[serde(default)]
    pub question: Option<String>,
    /// The answer, or a list of answers that are all right.
    #[serde(default)]
    pub answer: Option<String>,
}

/// Questions of one context in a row: a list of objects with `question` and `answer`.
const SEVERAL: &str = "questions";

/// A question and what is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The question.
    pub question: String,
    /// The answers that are right, at least one; the first is learned.
    pub answers: Vec<String>,
}

/// A context and what is asked about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// The file.
    pub path: PathBuf,
    /// The line of its first question, from 1.
    pub line: usize,
    /// The text.
    pub context: String,
    /// The questions, at least one.
    pub questions: Vec<Asked>,
}

/// What some files have.
#[derive(Debug, Default)]
pub struct Read {
    /// The contexts, in their order.
    pub told: Vec<Told>,
    /// What is wrong with rows, each with its file and line.
    pub wrong: Vec<Error>,
}

/// All that a path leads to, through every list on its way.
fn every<'v>(row: &'v Value, path: &str) -> Vec<&'v Value> {
    let items = |value: &'v Value| match value {
        Value::Array(list) => list.iter().collect(),
        other => vec![other],
    };
    path.split('.').fold(vec![row], |values, key| {
        values.into_iter().filter_map(|value| value.get(key)).flat_map(items).filter(|value| !value.is_null()).collect()
    })
}

impl Fields {
    fn of<'v>(&self, row: &'v Value, given: Option<&String>, usual: &[&str]) -> Result<&'v Value, String> {
        let found = match given {
            Some(name) => field(row, name),
            None => usual.iter().find_map(|name| field(row, name)),
        };
        let name = given.map_or_else(|| usual.join(" or "), Clone::clone);
        found.ok_or_else(|| format!("expected a field {name}"))
    }

    fn text(&self, row: &Value, given: Option<&String>, usual: &[&str]) -> Result<String, String> {
        let value = self.of(row, given, usual)?;
        if let Some(list) = value.as_array() {
            return Err(format!("expected a text in {}, got a list of {}", given.map_or(usual[0], String::as_str), list.len()));
        }
        let text = value.as_str().map(String::from).filter(|text| !text.trim().is_empty());
        text.ok_or_else(|| format!("expected a text in {}, got {value:.40}", given.map_or(usual[0], String::as_str)))
    }

    /// All answers: a list, or one. A path through a list of objects, as SQuAD's first form, gives those of each.
    fn answers(&self, row: &Value) -> Result<Vec<String>, String> {
        let usual = ["answer", "target"];
        let names = self.answer.as_ref().map_or_else(|| usual.to_vec(), |name| vec![name.as_str()]);
        let list = names.iter().map(|name| every(row, name)).find(|list| !list.is_empty()).unwrap_or_default();
        let text = |value: &&Value| value.as_str().map(String::from).filter(|text| !text.trim().is_empty());
        match list.as_slice() {
            [one] if text(one).is_some() => Ok(text(one).into_iter().collect()),
            // Says what is missing, or not as it should be.
            [] | [_] => Ok(vec![self.text(row, self.answer.as_ref(), &usual)?]),
            list => {
                list.iter().map(|value| text(value).ok_or_else(|| format!("expected texts as answers, got {value:.40}"))).collect()
            }
        }
    }

    fn asked(&self, row: &Value) -> Result<Vec<Asked>, String> {
        let one = |row: &Value| -> Result<Asked, String> {
            Ok(Asked { question: self.text(row, self.question.as_ref(), &["question"])?, answers: self.answers(row)? })
        };
        match row.get(SEVERAL).and_then(Value::as_array).filter(|list| !list.is_empty()) {
            Some(list) => list.iter().map(one).collect(),
            None => Ok(vec![one(row)?]),
        }
    }
}

/// The contexts of some files (names, folders and patterns). A row that lacks something is told of in what is given back; a file that cannot be
/// read is an error.
pub fn read(patterns: &[String], fields: &Fields) -> Result<Read> {
    let mut all = Read::default();
    for path in find(patterns)? {
        if !is_table(&path)? {
            return Err(Error::file(&path, "expected questions as lines of JSON in a .jsonl file, got a text"));
        }
        for row in Rows::open(&path)? {
            let row: Row = row?;
            let parts = row.object().and_then(|object| {
                let context = fields.text(&object, fields.context.as_ref(), &["context", "input"]);
                context.and_then(|context| Ok((context, fields.asked(&object)?))).map_err(|e| row.error(e))
            });
            match parts {
                Ok((context, questions)) => match all.told.last_mut().filter(|t| t.path == path && t.context == context) {
                    Some(told) => told.questions.extend(questions),
                    None => all.told.push(Told { path: path.clone(), line: row.line, context, questions }),
                },
                Err(error) => all.wrong.push(error),
            }
        }
    }
    Ok(all)
}
