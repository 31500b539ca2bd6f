//! Texts of a user: files by their names or patterns, and the documents in them, one after the other.
//!
//! A `.txt` or `.md` file is a document, or each of its lines is; of `.jsonl` each row is, with its text in a field, and of `.parquet`, where
//! the program was built with it. `.gz` and `.zst` after these are unpacked on the way. Nothing is kept but what is being read, so that a file
//! may have any size.

mod files;
mod rows;
#[cfg(feature = "parquet")]
mod table;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::text::{Piece, Source, TokenStream, Tokenizer};
use serde::{Deserialize, Serialize};

pub use self::files::{find, is_table, open};
pub use self::rows::{Row, Rows, field};

use crate::error::{Error, Result};

/// What is one document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Document {
    /// A file.
    File,
    /// A row of a `.jsonl` or `.parquet` file.
    Row,
    /// A line of a text that is not empty.
    Line,
}

/// Bytes that a tokenizer is given of a long document at once.
const BLOCK: usize = 64 << 10;

/// Some files, and how documents are found in them.
#[derive(Clone, Debug)]
pub struct Documents {
    files: Arc<[PathBuf]>,
    field: String,
    document: Option<Document>,
}

impl Documents {
    /// The files of some names, patterns (`books/**/*.txt`) and folders. None at all, a file of a kind that is not known, and rows of a text
    /// that has none, are errors.
    pub fn open(patterns: &[String], field: &str, document: Option<Document>) -> Result<Self> {
        let files = find(patterns)?;
        for file in files.iter().filter(|_| document == Some(Document::Row)) {
            if !is_table(file)? {
                let expected = "file or line: only .jsonl and .parquet have rows";
                return Err(Error::config("document", expected, format!("row, for {}", file.display())));
            }
        }
        files.iter().try_for_each(|file| is_table(file).map(|_| ()))?;
        Ok(Documents { files: files.into(), field: field.into(), document })
    }

    /// The files.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The documents of one of the files, from its start. An empty one is passed over. What cannot be read is an error with its file and
    /// line.
    pub fn of_file(&self, file: usize) -> Result<Box<dyn Iterator<Item = Result<Found>> + Send>> {
        let path = self.files.get(file).ok_or_else(|| Error::input("file", format!("one of {}", self.files.len()), file))?;
        let (table, whole) = (is_table(path)?, self.document == Some(Document::File));
        if !table && self.document != Some(Document::Line) {
            let mut text = BufReader::new(open(path)?);
            let is_empty = text.fill_buf().map_err(|source| Error::Io { path: path.clone(), source })?.is_empty();
            return Ok(Box::new((!is_empty).then(|| Ok(Found::whole(path, Box::new(text)))).into_iter()));
        }
        let rows = Rows::open(path)?;
        let (path, name) = (path.clone(), self.field.clone());
        let texts = rows.map(move |row| {
            let row = row?;
            if table { row.text(&name) } else { Ok(row.into_line()) }
        });
        if whole {
            let text = texts.collect::<Result<Vec<_>>>()?.join("\n");
            return Ok(Box::new((!text.is_empty()).then(|| Ok(Found::text(&path, text))).into_iter()));
        }
        let some = texts.filter(|text| text.as_ref().map_or(true, |text| !text.trim().is_empty()));
        Ok(Box::new(some.map(move |text| Ok(Found::text(&path, text?)))))
    }
}

/// A document that was found, to be read once.
#[non_exhaustive]
pub struct Found {
    source: Source,
    block: usize,
}

impl Found {
    fn whole(path: &Path, reader: Box<dyn std::io::Read + Send>) -> Self {
        Found { source: Source::reader(path, reader), block: BLOCK }
    }

    fn text(path: &Path, text: String) -> Self {
        // Whole, so that no border of a block is looked at.
        let block = text.len().clamp(16, BLOCK);
        Found { source: Source::reader(path, std::io::Cursor::new(text)), block }
    }

    /// Its tokens.
    pub fn tokens(self, tokenizer: &Arc<Tokenizer>) -> Result<Tokens> {
        let stream = TokenStream::with_block(tokenizer.clone(), vec![self.source], self.block)?;
        Ok(Tokens { stream, tokenizer: tokenizer.clone(), piece: Vec::new().into_iter(), bytes: 0, ended: false })
    }
}

/// The tokens of a document, one by one.
pub struct Tokens {
    stream: TokenStream,
    tokenizer: Arc<Tokenizer>,
    piece: std::vec::IntoIter<i32>,
    bytes: u64,
    ended: bool,
}

impl Tokens {
    /// Bytes of the document that were read so far; all of them after its last token.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Iterator for Tokens {
    type Item = Result<i32>;

    fn next(&mut self) -> Option<Result<i32>> {
        loop {
            if let Some(token) = self.piece.next() {
                return Some(Ok(token));
            }
            if self.ended {
                return None;
            }
            let piece = match self.stream.next_piece() {
                Ok(Some(piece)) => Ok(piece),
                // Nothing comes after a document: its end is certain.
                Ok(None) => {
                    self.ended = true;
                    self.tokenizer.encode_open(&self.stream.rest()).map(|tokens| Piece { tokens, ..self.stream.so_far() })
                }
                Err(error) => Err(error),
            };
            match piece {
                Ok(piece) => (self.piece, self.bytes) = (piece.tokens.into_iter(), piece.bytes),
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error.into()));
                }
            }
        }
    }
}
