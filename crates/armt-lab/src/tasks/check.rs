//! A look at a user's files before anything is trained on them: what is in them, how long it is, and what is missing where.

use std::sync::Arc;

use armt::text::Tokenizer;
use serde_json::Value;

use super::documents::{Documents, Rows, is_table};
use super::qa::{self, Fields};
use crate::error::{Error, Result};

/// Tokens of some things of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lengths {
    /// How many there are.
    pub count: u64,
    /// The shortest.
    pub least: u64,
    /// The one in the middle.
    pub median: u64,
    /// The longest.
    pub most: u64,
    /// All of them together.
    pub total: u64,
}

impl Lengths {
    fn of(mut lengths: Vec<u64>) -> Self {
        lengths.sort_unstable();
        Lengths {
            count: lengths.len() as u64,
            least: lengths.first().copied().unwrap_or_default(),
            median: lengths.get(lengths.len() / 2).copied().unwrap_or_default(),
            most: lengths.last().copied().unwrap_or_default(),
            total: lengths.iter().sum(),
        }
    }
}

/// What files hold.
#[derive(Debug)]
#[non_exhaustive]
pub struct Checked {
    /// Lengths by name: of documents, or of contexts, questions and answers.
    pub lengths: Vec<(&'static str, Lengths)>,
    /// Answers that the tokenizer does not give back as they are, so that no model could say them.
    pub unwritable: u64,
    /// What is wrong with rows, each with its file and line.
    pub wrong: Vec<Error>,
}

/// Looks at files of questions. What cannot be read at all is an error.
pub fn questions(patterns: &[String], fields: &Fields, tokenizer: &Tokenizer) -> Result<Checked> {
    let read = qa::read(patterns, fields)?;
    let count = |text: &str| Ok(tokenizer.encode(text)?.len() as u64);
    let asked = || read.told.iter().flat_map(|told| &told.questions);
    let contexts = read.told.iter().map(|told| count(&told.context)).collect::<Result<_>>()?;
    let questions = asked().map(|asked| count(&asked.question)).collect::<Result<_>>()?;
    let answers = asked().map(|asked| count(&asked.answers[0])).collect::<Result<_>>()?;
    let mut unwritable = 0;
    for asked in asked() {
        let said = tokenizer.decode(&tokenizer.encode(&asked.answers[0])?)?;
        unwritable += u64::from(said.trim() != asked.answers[0].trim());
    }
    let lengths = [("contexts", contexts), ("questions", questions), ("answers", answers)];
    Ok(Checked { lengths: lengths.map(|(name, of)| (name, Lengths::of(of))).to_vec(), unwritable, wrong: read.wrong })
}

/// Looks at texts. What cannot be read at all is an error.
pub fn texts(patterns: &[String], field: &str, tokenizer: &Arc<Tokenizer>) -> Result<Checked> {
    let documents = Documents::open(patterns, field, None)?;
    let (mut lengths, mut wrong) = (Vec::new(), Vec::new());
    for (i, path) in documents.files().iter().enumerate() {
        if is_table(path)? {
            for row in Rows::open(path)? {
                match row?.text(field) {
                    Ok(text) => lengths.push(tokenizer.encode(&text)?.len() as u64),
                    Err(error) => wrong.push(error),
                }
            }
        } else {
            for found in documents.of_file(i)? {
                let mut tokens = 0;
                for token in found?.tokens(tokenizer)? {
                    token?;
                    tokens += 1;
                }
                lengths.push(tokens);
            }
        }
    }
    Ok(Checked { lengths: vec![("documents", Lengths::of(lengths))], unwritable: 0, wrong })
}

/// Rows of a table in which a question is looked for.
const LOOKED_AT: usize = 100;

/// Whether files hold questions: one of the first rows of the first table has a field for one.
pub fn has_questions(patterns: &[String], fields: &Fields) -> Result<bool> {
    let name = fields.question.as_deref().unwrap_or("question");
    for path in super::documents::find(patterns)? {
        if is_table(&path)? {
            let mut rows = Rows::open(&path)?.take(LOOKED_AT).peekable();
            if rows.peek().is_none() {
                continue;
            }
            for row in rows {
                let asks = |row: Value| super::documents::field(&row, name).is_some() || row.get("questions").is_some();
                if row?.object().is_ok_and(asks) {
                    return Ok(true);
                }
            }
            return Ok(false);
        }
    }
    Ok(false)
}
