//! Rows of tables and lines of texts, with their numbers for messages.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::files::open;
use crate::error::{Error, Result};

/// A line of a file, or a row of a parquet table as such a line.
#[derive(Clone, Debug)]
pub struct Row {
    path: PathBuf,
    /// What is counted.
    unit: &'static str,
    /// Its number, from 1.
    pub line: usize,
    text: String,
}

impl Row {
    /// The line itself.
    pub fn into_line(self) -> String {
        self.text
    }

    /// An error about this line.
    pub fn error(&self, message: impl std::fmt::Display) -> Error {
        Error::file(&self.path, format!("{} {}: {message}", self.unit, self.line))
    }

    /// The row as JSON. What is no object is an error with its line.
    pub fn object(&self) -> Result<Value> {
        let value: Value = serde_json::from_str(&self.text).map_err(|e| self.error(format!("expected a JSON object: {e}")))?;
        if value.is_object() { Ok(value) } else { Err(self.error("expected a JSON object, got another value")) }
    }

    /// The text of a field. One that is missing or no text is an error with its line.
    pub fn text(&self, name: &str) -> Result<String> {
        let object = self.object()?;
        let found = field(&object, name);
        if let Some(Value::Array(list)) = found {
            return Err(self.error(format!("expected a text in the field {name}, got a list of {}", list.len())));
        }
        let text = found.and_then(Value::as_str).map(String::from);
        text.ok_or_else(|| self.error(format!("expected a text in the field {name}")))
    }
}

/// A field by its path: `answers.text`. Of a list on the way it is the first, and at its end what a list of one thing has: which of several is
/// meant nobody knows.
pub fn field<'v>(value: &'v Value, path: &str) -> Option<&'v Value> {
    let first = |value: &'v Value| match value {
        Value::Array(list) => list.first(),
        other => Some(other),
    };
    let found = path.split('.').try_fold(value, |value, name| first(value)?.get(name))?;
    if found.as_array().is_some_and(|list| list.len() > 1) { Some(found) } else { first(found) }
}

/// The lines of a file, unpacked, or the rows of a parquet table.
pub struct Rows {
    path: PathBuf,
    /// What is counted.
    unit: &'static str,
    texts: Box<dyn Iterator<Item = Result<Vec<u8>>> + Send>,
    line: usize,
    ended: bool,
}

impl Rows {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self> {
        #[cfg(feature = "parquet")]
        if super::files::kind(path) == Some("parquet") {
            let texts = Box::new(super::table::Table::open(path)?);
            return Ok(Rows { path: path.into(), unit: "row", texts, line: 0, ended: false });
        }
        let (lines, file) = (BufReader::new(open(path)?).split(b'\n'), path.to_path_buf());
        let texts = lines.map(move |line| line.map_err(|source| Error::Io { path: file.clone(), source }));
        Ok(Rows { path: path.into(), unit: "line", texts: Box::new(texts), line: 0, ended: false })
    }
}

impl Iterator for Rows {
    type Item = Result<Row>;

    /// The next line that is not empty. One that is not UTF-8, and a file that cannot be read or unpacked to its end, is an error.
    fn next(&mut self) -> Option<Result<Row>> {
        while !self.ended {
            let next = self.texts.next();
            self.line += 1;
            self.ended = !matches!(next, Some(Ok(_)));
            let bytes = match next? {
                Ok(bytes) => bytes,
                Err(error) => return Some(Err(error)),
            };
            let Ok(text) = String::from_utf8(bytes) else {
                self.ended = true;
                return Some(Err(Error::file(&self.path, format!("{} {}: expected UTF-8 text", self.unit, self.line))));
            };
            let text = text.trim_end_matches('\r').to_string();
            if !text.trim().is_empty() {
                return Some(Ok(Row { path: self.path.clone(), unit: self.unit, line: self.line, text }));
            }
        }
        None
    }
}
