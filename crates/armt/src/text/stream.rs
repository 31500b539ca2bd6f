//! Texts of any length as tokens, in constant memory.
//!
//! A text is read in blocks, and given to the tokenizer in pieces. It is cut only before a single space between two characters that are
//! no whitespace: there, tokenizers of GPT-2's kind always end a token, so the pieces give exactly the tokens of the whole, wherever the
//! blocks end. Only where 1 MiB has no such place is it cut at the border of a character.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::tokenizer::{Joint, Tokenizer};
use crate::error::{Error, Result};

/// Bytes read at once: large for the disk, small enough for a progress bar to move with.
const BLOCK: usize = 64 << 10;
/// The longest piece of text, in bytes.
const LONGEST: usize = 1 << 20;

/// A text to read: a file, standard input or anything that gives bytes.
pub struct Source {
    name: PathBuf,
    bytes: Option<u64>,
    open: Option<Box<dyn Read + Send>>,
}

impl Source {
    /// A file, opened when its turn comes. One that is missing, a folder or empty is an error at once, with its name.
    pub fn file(path: &Path) -> Result<Self> {
        let data = std::fs::metadata(path).map_err(|source| Error::Io { path: path.into(), source })?;
        if data.is_dir() {
            return Err(Error::file(path, "expected a text file, got a folder"));
        }
        if data.is_file() && data.len() == 0 {
            return Err(empty(path));
        }
        Ok(Source { name: path.into(), bytes: data.is_file().then_some(data.len()), open: None })
    }

    /// Standard input.
    pub fn stdin() -> Self {
        Self::reader(Path::new("standard input"), std::io::stdin())
    }

    /// Anything that gives bytes, with a name for messages.
    pub fn reader(name: &Path, reader: impl Read + Send + 'static) -> Self {
        Source { name: name.into(), bytes: None, open: Some(Box::new(reader)) }
    }

    /// Its size, where it is known beforehand.
    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    fn read(&mut self, block: &mut [u8]) -> Result<usize> {
        let fail = |source| Error::Io { path: self.name.clone(), source };
        let reader = match &mut self.open {
            Some(reader) => reader,
            None => self.open.insert(Box::new(File::open(&self.name).map_err(fail)?)),
        };
        loop {
            match reader.read(block) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                other => return other.map_err(fail),
            }
        }
    }
}

fn empty(name: &Path) -> Error {
    Error::file(name, "it is empty: there is nothing to read")
}

/// Tokens of one piece of text, and how far the reading has come with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Its tokens.
    pub tokens: Vec<i32>,
    /// Bytes read from all texts so far.
    pub bytes: u64,
    /// How many of them were no UTF-8 and became U+FFFD.
    pub replaced: u64,
}

/// The tokens of some texts, one after the other, piece by piece. A token never spans two texts.
pub struct TokenStream {
    tokenizer: Arc<Tokenizer>,
    /// The token that each text begins with, where the tokenizer has one.
    begin: Option<i32>,
    sources: std::vec::IntoIter<Source>,
    current: Option<Source>,
    block: Vec<u8>,
    /// The first bytes of a character that the last block cut, at the start of `block`.
    kept: usize,
    /// Text that is not yet cut into pieces.
    text: String,
    /// The current text was cut before, so that `text` starts within it.
    cut_before: bool,
    ended: bool,
    /// Where the current text started in the count of bytes.
    started_at: u64,
    bytes: u64,
    replaced: u64,
}

impl TokenStream {
    /// A stream over texts in their order. A tokenizer whose tokens of a text are not those of its pieces is refused.
    pub fn new(tokenizer: Arc<Tokenizer>, sources: Vec<Source>) -> Result<Self> {
        Self::with_block(tokenizer, sources, BLOCK)
    }

    /// A stream over texts with another number of bytes read at once; at least 16.
    pub fn with_block(tokenizer: Arc<Tokenizer>, sources: Vec<Source>, block: usize) -> Result<Self> {
        if tokenizer.joint() == Joint::None {
            return Err(Error::Unsupported(
                "the tokenizer gives other tokens for the pieces of a text than for the whole: it cannot read a long text piece by piece".into(),
            ));
        }
        Ok(TokenStream {
            begin: tokenizer.begin_of_text(),
            tokenizer,
            sources: sources.into_iter(),
            current: None,
            block: vec![0; block.max(16)],
            kept: 0,
            text: String::new(),
            cut_before: false,
            ended: true,
            started_at: 0,
            bytes: 0,
            replaced: 0,
        })
    }

    /// The next piece, `None` after the last text. An unreadable or empty text is an error with its name.
    pub fn next_piece(&mut self) -> Result<Option<Piece>> {
        loop {
            if self.ended && self.text.is_empty() {
                let Some(next) = self.sources.next() else { return Ok(None) };
                (self.current, self.ended, self.cut_before, self.started_at) = (Some(next), false, false, self.bytes);
            }
            if !self.ended && self.text.len() <= LONGEST + 4 {
                self.read_block()?;
            }
            let at = match place(&self.text) {
                _ if self.ended && self.text.len() <= LONGEST => self.text.len(),
                Some(at) => at,
                None if self.ended => self.text.len(),
                None => continue,
            };
            if at > 0 {
                return self.piece(at).map(Some);
            }
        }
    }

    /// Reads a block of the current text and decodes it.
    fn read_block(&mut self) -> Result<()> {
        let Some(source) = &mut self.current else { return Ok(()) };
        let read = source.read(&mut self.block[self.kept..])?;
        self.bytes += read as u64;
        self.ended = read == 0;
        if self.ended && self.bytes == self.started_at {
            return Err(empty(&source.name));
        }
        let filled = self.kept + read;
        let (kept, replaced) = decode(&self.block[..filled], self.ended, &mut self.text);
        self.block.copy_within(filled - kept..filled, 0);
        self.kept = kept;
        self.replaced += replaced;
        Ok(())
    }

    /// Takes the first `at` bytes of the text to the tokenizer.
    fn piece(&mut self, at: usize) -> Result<Piece> {
        let text = &self.text[..at];
        let text = match self.tokenizer.joint() {
            Joint::Drop if self.cut_before => text.strip_prefix(' ').unwrap_or(text),
            _ => text,
        };
        let mut tokens = self.tokenizer.encode(text)?;
        if let Some(begin) = self.begin.filter(|_| !self.cut_before) {
            tokens.insert(0, begin);
        }
        self.text.drain(..at);
        self.cut_before = true;
        Ok(Piece { tokens, bytes: self.bytes, replaced: self.replaced })
    }
}

/// Adds the text of some bytes to `text`, with U+FFFD for what is no UTF-8. Gives the number of bytes at the end that are the start of a
/// character, unless these are the `last` bytes, and the number of those replaced.
fn decode(bytes: &[u8], last: bool, text: &mut String) -> (usize, u64) {
    let (mut rest, mut replaced) = (bytes, 0);
    loop {
        let error = match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return (0, replaced);
            }
            Err(error) => error,
        };
        let (valid, bad) = rest.split_at(error.valid_up_to());
        text.push_str(&String::from_utf8_lossy(valid));
        let wrong = match error.error_len() {
            None if !last => return (bad.len(), replaced),
            length => length.unwrap_or(bad.len()),
        };
        text.push(char::REPLACEMENT_CHARACTER);
        replaced += wrong as u64;
        rest = &bad[wrong..];
    }
}

/// Where a text may be cut: the last place within [`LONGEST`] bytes that no token crosses. If there is none, the border of a character
/// once the text is longer, and `None` before. What it gives depends on the text alone and not on how much of it came at once.
fn place(text: &str) -> Option<usize> {
    let within = &text.as_bytes()[..text.len().min(LONGEST + 1)];
    let solid = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
    let mut spaces = within.iter().enumerate().rev().filter(|(_, b)| **b == b' ').map(|(i, _)| i);
    let safe = spaces.find(|i| solid(text[..*i].chars().next_back()) && solid(text[i + 1..].chars().next()));
    // A space at the very end of what may be cut is judged by the character after it, of up to four bytes.
    safe.or_else(|| (text.len() > LONGEST + 4).then(|| (0..=LONGEST).rev().find(|i| text.is_char_boundary(*i)))?)
}
