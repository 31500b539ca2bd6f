//! Texts of any length as tokens, in constant memory.
//!
//! A text is read in blocks, cut at its [borders](super::border) and given to the tokenizer in pieces, several at a time on threads of
//! their own. Only where 1 MiB has no border is it cut at the border of a character. Either way the tokens depend on the text alone: not on
//! how much of it came at once, nor on the threads.
//!
//! A text may go on later. What is behind its last border when its sources end is not tokenized: it is the [`OpenText`], with which
//! another stream begins.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::tokenizer::{Joint, OpenText, Tokenizer};
use crate::error::{Error, Result};
use crate::files::quietly;

/// Bytes read at once: enough for all threads, few enough for a progress bar to move with.
const BLOCK: usize = 1 << 20;
/// Bytes that a piece has where borders allow: some milliseconds of work.
const PIECE: usize = 16 << 10;
/// The longest piece of text, in bytes.
const LONGEST: usize = 1 << 20;
/// Bytes of a character at most.
const CHARACTER: usize = 4;

/// A text to read: a file, standard input or anything that gives bytes.
pub struct Source {
    name: PathBuf,
    bytes: Option<u64>,
    open: Option<Box<dyn Read + Send>>,
}

/// Bytes of a file in which a zero byte is looked for.
const LOOKED_AT: u64 = 8192;

/// The mark of their encoding that some editors begin a file with. It is no text.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// The bytes of a file behind a mark of its encoding, where it begins with one.
pub struct BehindMark<R> {
    file: R,
    /// What was looked at and is not read yet; nothing has been looked at before the first read.
    head: Option<Cursor<Vec<u8>>>,
}

impl<R: Read> BehindMark<R> {
    /// Reads a file from its beginning.
    pub fn new(file: R) -> Self {
        BehindMark { file, head: None }
    }
}

impl<R: Read> Read for BehindMark<R> {
    fn read(&mut self, block: &mut [u8]) -> std::io::Result<usize> {
        let head = match &mut self.head {
            Some(head) => head,
            None => {
                let mut head = Vec::new();
                self.file.by_ref().take(MARK.len() as u64).read_to_end(&mut head)?;
                if head == MARK {
                    head.clear();
                }
                self.head.insert(Cursor::new(head))
            }
        };
        match head.read(block)? {
            0 => self.file.read(block),
            some => Ok(some),
        }
    }
}

fn has_zero_byte(path: &Path) -> Result<bool> {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LOOKED_AT).read_to_end(&mut head));
    read.map_err(|source| Error::Io { path: path.into(), source })?;
    Ok(head.contains(&0))
}

impl Source {
    /// A file, opened when its turn comes. One that is missing, a folder, empty or no text is an error at once, with its name: what has a zero
    /// byte near its beginning is packed, a document of some program, or UTF-16, and would be read as nonsense.
    pub fn file(path: &Path) -> Result<Self> {
        let data = std::fs::metadata(path).map_err(|source| Error::Io { path: path.into(), source })?;
        if data.is_dir() {
            return Err(Error::file(path, "expected a text file, got a folder"));
        }
        if data.is_file() && data.len() == 0 {
            return Err(empty(path));
        }
        if data.is_file() && has_zero_byte(path)? {
            return Err(Error::file(
                path,
                "expected a text in UTF-8, got a file with zero bytes; make it one first (zcat, pdftotext, iconv -f UTF-16 -t UTF-8), or pipe the text in (-)",
            ));
        }
        Ok(Source { name: path.into(), bytes: data.is_file().then_some(data.len()), open: None })
    }

    /// Standard input.
    pub fn stdin() -> Self {
        Self::reader(Path::new("standard input"), BehindMark::new(std::io::stdin()))
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
            None => self.open.insert(Box::new(BehindMark::new(File::open(&self.name).map_err(fail)?))),
        };
        loop {
            match reader.read(block) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                other => return other.map_err(fail),
            }
        }
    }
}

/// A tokenizer that panics must not look like the end of the text.
pub(super) fn broken() -> Error {
    Error::Tokenizer("the tokenizer failed: its file is not as it should be".into())
}

fn empty(name: &Path) -> Error {
    Error::file(name, "it is empty: there is nothing to read")
}

/// Tokens of one piece of text, and how far the reading has come with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Its tokens.
    pub tokens: Vec<i32>,
    /// Bytes read from all sources so far.
    pub bytes: u64,
    /// How many of them were no UTF-8 and became U+FFFD.
    pub replaced: u64,
}

/// More of a text as tokens: those that are certain, and what is open behind them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokenized {
    /// The tokens of what was open before, and of what came.
    pub tokens: Vec<i32>,
    /// The end, whose tokens depend on what comes next.
    pub open: OpenText,
}

impl Tokenized {
    /// Tokenizes some bytes of a text behind `open`, on this thread. However a text is cut into such pieces, their tokens are those of the
    /// whole. A tokenizer that [`TokenStream::new`] refuses is an error, and so is one that fails.
    pub fn more(tokenizer: &Arc<Tokenizer>, open: &OpenText, bytes: Vec<u8>) -> Result<Self> {
        if bytes.is_empty() {
            return Ok(Tokenized { tokens: Vec::new(), open: open.clone() });
        }
        let block = bytes.len() + CHARACTER;
        let source = Source::reader(Path::new("the text"), std::io::Cursor::new(bytes));
        let mut stream = TokenStream::with_block(tokenizer.clone(), vec![source], block)?.after(open);
        let mut tokens = Vec::new();
        while let Some(piece) = quietly(|| stream.next_piece()).unwrap_or_else(|| Err(broken()))? {
            tokens.extend(piece.tokens);
        }
        Ok(Tokenized { tokens, open: stream.rest() })
    }
}

/// The tokens of a text, piece by piece. Its sources are read one after the other as one text.
pub struct TokenStream {
    tokenizer: Arc<Tokenizer>,
    sources: std::vec::IntoIter<Source>,
    current: Option<Source>,
    block: Vec<u8>,
    /// The first bytes of a character that the last block cut, at the start of `block`.
    kept: usize,
    /// Text that is not yet cut into pieces.
    text: String,
    /// The text was cut before, so that `text` starts within it.
    cut_before: bool,
    /// Where the current source started in the count of bytes.
    started_at: u64,
    bytes: u64,
    replaced: u64,
    /// None: pieces are tokenized one after the other.
    threads: Option<Arc<TokenizerThreads>>,
    /// Of the iterator.
    current_tokens: std::vec::IntoIter<i32>,
}

/// Threads that tokenize, for any number of streams.
pub struct TokenizerThreads(rayon::ThreadPool);

impl TokenizerThreads {
    /// As many threads as `RAYON_NUM_THREADS` says, or else as the machine runs at a time: the same for all who ask, however few their own
    /// computations have. A system that gives none is an error.
    pub fn shared() -> Result<Arc<Self>> {
        static SHARED: OnceLock<Arc<TokenizerThreads>> = OnceLock::new();
        if let Some(shared) = SHARED.get() {
            return Ok(shared.clone());
        }
        let threads = Self::pool(0)?;
        Ok(SHARED.get_or_init(|| threads).clone())
    }

    /// So many threads, at least one.
    pub fn with(threads: usize) -> Result<Arc<Self>> {
        Self::pool(threads.max(1))
    }

    /// So many threads; 0 is rayon's own number.
    fn pool(threads: usize) -> Result<Arc<Self>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("tokenizer-{i}")).build();
        let source = |e: rayon::ThreadPoolBuildError| std::io::Error::other(e.to_string());
        Ok(Arc::new(TokenizerThreads(pool.map_err(|e| Error::System { what: "threads for the tokenizer", source: source(e) })?)))
    }

    /// More of some texts, one on each thread: what [`Tokenized::more`] gives for what was open of each and what came.
    pub fn more_of_each(&self, tokenizer: &Arc<Tokenizer>, texts: Vec<(OpenText, Vec<u8>)>) -> Vec<Result<Tokenized>> {
        let one = |(open, bytes): (OpenText, Vec<u8>)| Tokenized::more(tokenizer, &open, bytes);
        self.0.install(|| texts.into_par_iter().map(one).collect())
    }
}

impl TokenStream {
    /// A stream over sources in their order. A tokenizer whose tokens of a text are not those of its pieces is refused.
    pub fn new(tokenizer: Arc<Tokenizer>, sources: Vec<Source>) -> Result<Self> {
        Self::with_block(tokenizer, sources, BLOCK)
    }

    /// A stream over sources with another number of bytes read at once; at least 16.
    pub fn with_block(tokenizer: Arc<Tokenizer>, sources: Vec<Source>, block: usize) -> Result<Self> {
        if tokenizer.joint() == Joint::None {
            return Err(Error::Unsupported(
                "the tokenizer gives other tokens for the pieces of a text than for the whole: it cannot read a long text piece by piece".into(),
            ));
        }
        Ok(TokenStream {
            tokenizer,
            sources: sources.into_iter(),
            current: None,
            block: vec![0; block.max(16)],
            kept: 0,
            text: String::new(),
            cut_before: false,
            started_at: 0,
            bytes: 0,
            replaced: 0,
            threads: None,
            current_tokens: Vec::new().into_iter(),
        })
    }

    /// The stream, begun with what an earlier one left open.
    pub fn after(mut self, open: &OpenText) -> Self {
        let (kept, replaced) = decode(&open.bytes, &mut self.text);
        self.block[..kept].copy_from_slice(&open.bytes[open.bytes.len() - kept..]);
        (self.kept, self.replaced, self.cut_before) = (kept, replaced, open.cut);
        self
    }

    /// The stream, with threads that tokenize its pieces side by side.
    pub fn on_threads(mut self, threads: &Arc<TokenizerThreads>) -> Self {
        self.threads = Some(threads.clone());
        self
    }

    /// The next pieces as one, `None` after the last border. An unreadable or empty source is an error with its name.
    pub fn next_piece(&mut self) -> Result<Option<Piece>> {
        loop {
            let ended = !self.read_block()?;
            let cuts = self.cuts();
            if let Some(end) = cuts.last() {
                let tokens = self.encode(&cuts)?;
                self.text.drain(..end);
                self.cut_before = true;
                return Ok(Some(Piece { tokens, ..self.so_far() }));
            }
            if ended {
                return Ok(None);
            }
        }
    }

    /// How far the reading has come; no tokens.
    pub fn so_far(&self) -> Piece {
        Piece { tokens: Vec::new(), bytes: self.bytes, replaced: self.replaced }
    }

    /// What is not tokenized when the sources have ended.
    pub fn rest(&self) -> OpenText {
        OpenText { bytes: [self.text.as_bytes(), &self.block[..self.kept]].concat(), cut: self.cut_before }
    }

    /// Reads a block and decodes it. Says whether there was one.
    fn read_block(&mut self) -> Result<bool> {
        loop {
            let Some(source) = &mut self.current else {
                let Some(next) = self.sources.next() else { return Ok(false) };
                (self.current, self.started_at) = (Some(next), self.bytes);
                continue;
            };
            let read = source.read(&mut self.block[self.kept..])?;
            self.bytes += read as u64;
            if read == 0 {
                if self.bytes == self.started_at {
                    return Err(empty(&source.name));
                }
                self.current = None;
                continue;
            }
            let filled = self.kept + read;
            let (kept, replaced) = decode(&self.block[..filled], &mut self.text);
            self.block.copy_within(filled - kept..filled, 0);
            self.kept = kept;
            self.replaced += replaced;
            return Ok(true);
        }
    }

    /// Where the text that is there is cut.
    fn cuts(&self) -> Vec<usize> {
        let borders = self.tokenizer.borders();
        let (mut cuts, mut from) = (Vec::new(), 0);
        loop {
            let text = &self.text[from..];
            let near = borders.last(text, PIECE);
            let cut = near.or_else(|| borders.first(text, PIECE, LONGEST)).or_else(|| forced(text));
            let Some(cut) = cut else { return cuts };
            from += cut;
            cuts.push(from);
        }
    }

    /// The tokens of the text up to the last of some cuts.
    fn encode(&self, cuts: &[usize]) -> Result<Vec<i32>> {
        let starts = std::iter::once(0).chain(cuts.iter().copied());
        let pieces: Vec<(usize, usize)> = starts.zip(cuts.iter().copied()).collect();
        let (tokenizer, text, cut) = (&self.tokenizer, &self.text, self.cut_before);
        let one = |(from, to): &(usize, usize)| tokenizer.encode_part(&text[*from..*to], cut || *from > 0);
        let tokens: Result<Vec<Vec<i32>>> = match &self.threads {
            Some(threads) if pieces.len() > 1 => threads.0.install(|| pieces.par_iter().map(one).collect()),
            _ => pieces.iter().map(one).collect(),
        };
        Ok(tokens?.concat())
    }
}

/// The tokens one by one. After an error there are no more.
impl Iterator for TokenStream {
    type Item = Result<i32>;

    fn next(&mut self) -> Option<Result<i32>> {
        loop {
            if let Some(token) = self.current_tokens.next() {
                return Some(Ok(token));
            }
            match self.next_piece() {
                Ok(Some(piece)) => self.current_tokens = piece.tokens.into_iter(),
                Ok(None) => return None,
                Err(error) => {
                    (self.current, self.sources, self.text) = (None, Vec::new().into_iter(), String::new());
                    return Some(Err(error));
                }
            }
        }
    }
}

/// Where a text is cut that has no border within the longest piece. It has to be known of one more character that there is none.
fn forced(text: &str) -> Option<usize> {
    (text.len() > LONGEST + 2 * CHARACTER).then(|| (0..=LONGEST).rev().find(|i| text.is_char_boundary(*i)))?
}

/// Adds the text of some bytes to `text`, with U+FFFD for what is no UTF-8. Gives the number of bytes at the end that are the start of a
/// character, and the number of those replaced.
fn decode(bytes: &[u8], text: &mut String) -> (usize, u64) {
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
        let Some(wrong) = error.error_len() else { return (bad.len(), replaced) };
        text.push(char::REPLACEMENT_CHARACTER);
        replaced += wrong as u64;
        rest = &bad[wrong..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_threads_tokenize_as_the_environment_says() {
        const SAID: (&str, &str) = ("RAYON_NUM_THREADS", "3");
        if std::env::var(SAID.0).is_ok_and(|threads| threads == SAID.1) {
            assert_eq!(TokenizerThreads::shared().unwrap().0.current_num_threads(), 3);
            return;
        }
        // In a process of its own: the environment is that of all tests.
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "text::stream::tests::as_many_threads_tokenize_as_the_environment_says";
        assert!(again.args([name, "--exact"]).env(SAID.0, SAID.1).status().unwrap().success());
    }
}
