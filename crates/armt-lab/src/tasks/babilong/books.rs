//! Background text: the sentences of books as tokens, in order from a random place on.
//!
//! A reading draws a book and a sentence of it, goes on to the book's end, and draws again, as the benchmark does. Each sentence is
//! tokenised by itself, with what its [`Form`] puts before it; those under 10 tokens are skipped. A book is tokenised when it is first read from and
//! then kept as tokens, the text is not; beyond a limit the book that was taken up longest ago is given up, so that a folder of any
//! size can be read in constant memory.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

// Tokens are read by a reader, whose errors they have.
use armt::random::Random;
use armt::text::{BehindMark, Tokenizer, sentences};
use armt::{Error, Result};

use super::Form;

/// Shorter sentences are skipped, as in the benchmark: headings, exclamations and what was cut wrongly.
const SHORTEST: usize = 10;
/// Tokens that are kept in memory, of all books together: 256 MiB.
const KEPT: usize = 64 << 20;

/// A folder of books.
pub struct Books {
    tokenizer: Arc<Tokenizer>,
    form: Form,
    files: Vec<PathBuf>,
    /// Each book once it is tokenised; locked while it is.
    slots: Vec<Mutex<Option<Arc<Book>>>>,
    /// Books in memory in the order in which they came, with their tokens.
    kept: Mutex<VecDeque<(usize, usize)>>,
    limit: usize,
}

/// The sentences of a book, one after the other.
struct Book {
    tokens: Vec<i32>,
    /// Where each sentence ends in `tokens`.
    ends: Vec<usize>,
}

impl Books {
    /// The `.txt` files of a folder, in the order of their names. A folder without any is an error with its name; what is wrong with
    /// a book is one when it is read.
    pub fn open(folder: &Path, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        Self::open_in(Form::default(), folder, tokenizer)
    }

    /// As [`Books::open`], with sentences written in a form.
    pub fn open_in(form: Form, folder: &Path, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        let fail = |source| Error::Io { path: folder.into(), source };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            if path.extension().is_some_and(|e| e == "txt") && path.is_file() {
                files.push(path);
            }
        }
        if files.is_empty() {
            return Err(Error::file(folder, "expected books as .txt files in this folder, found none"));
        }
        // A folder lists its files in no certain order, and the same seed must mean the same book everywhere.
        files.sort();
        let slots = files.iter().map(|_| Mutex::default()).collect();
        Ok(Books { tokenizer, form, files, slots, kept: Mutex::default(), limit: KEPT })
    }

    /// No books: whatever needs background is refused.
    pub fn none(tokenizer: Arc<Tokenizer>) -> Self {
        Books { tokenizer, form: Form::default(), files: Vec::new(), slots: Vec::new(), kept: Mutex::default(), limit: KEPT }
    }

    /// The books, in their order.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// How their sentences are written.
    pub fn form(&self) -> Form {
        self.form
    }

    /// The tokenizer of the sentences.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// How often each token comes in all books together, in sentences that are read.
    pub fn counts(&self) -> Result<Vec<u64>> {
        let mut counts = vec![0; self.tokenizer.vocabulary()];
        for i in 0..self.files.len() {
            // The tokenizer's own tokens, which are below their number.
            self.book(i)?.tokens.iter().for_each(|t| counts[*t as usize] += 1);
        }
        Ok(counts)
    }

    fn book(&self, i: usize) -> Result<Arc<Book>> {
        let book = {
            let mut slot = lock(&self.slots[i]);
            if let Some(book) = slot.as_ref() {
                return Ok(book.clone());
            }
            slot.insert(Arc::new(Book::read(&self.files[i], &self.tokenizer, self.form)?)).clone()
        };
        // The slot is free again here: two threads that each hold one and wait for the other's could never go on.
        let mut kept = lock(&self.kept);
        kept.push_back((i, book.tokens.len()));
        while kept.len() > 1 && kept.iter().map(|(_, tokens)| tokens).sum::<usize>() > self.limit {
            let Some((oldest, _)) = kept.pop_front() else { break };
            lock(&self.slots[oldest]).take();
        }
        Ok(book)
    }
}

/// What a thread that failed has left is whole: slots and the list change in one step each.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Book {
    fn read(path: &Path, tokenizer: &Tokenizer, form: Form) -> Result<Self> {
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| BehindMark::new(file).read_to_end(&mut bytes));
        read.map_err(|source| Error::Io { path: path.into(), source })?;
        let text = String::from_utf8(bytes)
            .map_err(|e| Error::file(path, format!("expected UTF-8 text, got other bytes at {}", e.utf8_error().valid_up_to())))?;
        let mut book = Book { tokens: Vec::new(), ends: Vec::new() };
        let mut spaced = String::new();
        for sentence in sentences(&text, form.lines()) {
            spaced.clear();
            spaced.push_str(form.before_background());
            spaced.push_str(&sentence);
            let tokens = tokenizer.encode(&spaced)?;
            if tokens.len() >= SHORTEST {
                book.tokens.extend(tokens);
                book.ends.push(book.tokens.len());
            }
        }
        if book.ends.is_empty() {
            return Err(Error::file(path, format!("expected a book, found no sentence of at least {SHORTEST} tokens")));
        }
        Ok(book)
    }

    /// Where a sentence lies in `tokens`.
    fn range(&self, sentence: usize) -> std::ops::Range<usize> {
        let start = if sentence == 0 { 0 } else { self.ends[sentence - 1] };
        start..self.ends[sentence]
    }
}

/// A reading of books, sentence by sentence without end. Its clone reads the same.
#[derive(Clone)]
pub(in crate::tasks) struct Reading {
    books: Arc<Books>,
    random: Random,
    book: Arc<Book>,
    /// The sentence that is next.
    next: usize,
    /// The tokens of the sentence that was taken last.
    taken: std::ops::Range<usize>,
}

impl Reading {
    /// A reading that depends on the generator and the books alone.
    pub fn new(books: Arc<Books>, mut random: Random) -> Result<Self> {
        let (book, next) = start(&books, &mut random)?;
        Ok(Reading { books, random, book, next, taken: 0..0 })
    }

    /// Goes on by a sentence and gives its number of tokens.
    pub fn advance(&mut self) -> Result<usize> {
        if self.next == self.book.ends.len() {
            (self.book, self.next) = start(&self.books, &mut self.random)?;
        }
        self.taken = self.book.range(self.next);
        self.next += 1;
        Ok(self.taken.len())
    }

    /// The sentence that was taken last.
    pub fn sentence(&self) -> &[i32] {
        &self.book.tokens[self.taken.clone()]
    }
}

/// A book and a sentence of it, each like any other.
fn start(books: &Books, random: &mut Random) -> Result<(Arc<Book>, usize)> {
    if books.files.is_empty() {
        return Err(Error::input("books to take background from", "none"));
    }
    let book = books.book(random.below(books.files.len()))?;
    let sentence = random.below(book.ends.len());
    Ok((book, sentence))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/gpt2");
        Arc::new(Tokenizer::find(&folder).unwrap().unwrap())
    }

    /// Three books whose sentences say which they are, and short ones between them.
    fn books(folder: &Path, limit: usize) -> Arc<Books> {
        for book in ["a", "b", "c"] {
            let sentence = |i| format!("In book {book} this is the sentence of the number {i}, no more. Short one. ");
            std::fs::write(folder.join(format!("{book}.txt")), (0..40).map(sentence).collect::<String>()).unwrap();
        }
        Arc::new(Books { limit, ..Books::open(folder, tokenizer()).unwrap() })
    }

    fn read(books: &Arc<Books>, seed: u64, n: usize) -> Vec<String> {
        let mut reading = Reading::new(books.clone(), Random::new(seed)).unwrap();
        let mut next = || {
            reading.advance().unwrap();
            books.tokenizer.decode(reading.sentence()).unwrap()
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn sentences_come_in_order_and_another_book_follows_at_a_books_end() {
        let folder = tempfile::tempdir().unwrap();
        let read = read(&books(folder.path(), KEPT), 3, 300);
        let parts: Vec<(char, usize)> = read
            .iter()
            .map(|s| {
                let (book, rest) = s.strip_prefix(" In book ").unwrap().split_once(" this is the sentence of the number ").unwrap();
                (book.chars().next().unwrap(), rest.strip_suffix(", no more.").unwrap().parse().unwrap())
            })
            .collect();
        let mut starts = 0;
        for (one, next) in parts.iter().zip(&parts[1..]) {
            if one.1 == 39 {
                starts += usize::from(next.1 > 0);
            } else {
                assert_eq!(*next, (one.0, one.1 + 1));
            }
        }
        assert!(starts > 3, "a book is taken up anywhere: {parts:?}");
        assert!(['a', 'b', 'c'].iter().all(|b| parts.iter().any(|(book, _)| book == b)));
    }

    #[test]
    fn books_that_are_given_up_read_the_same() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (all, few) = (books(one.path(), KEPT), books(two.path(), 1));
        for seed in 0..5 {
            assert_eq!(read(&all, seed, 200), read(&few, seed, 200));
        }
        let in_memory = |books: &Books| books.slots.iter().filter(|s| lock(s).is_some()).count();
        assert_eq!((in_memory(&all), in_memory(&few)), (3, 1));
    }

    #[test]
    fn what_is_no_book_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Books::open(folder.path(), tokenizer());
        assert!(open().err().unwrap().to_string().contains("found none"));
        let start = || Reading::new(Arc::new(open().unwrap()), Random::new(0)).err().unwrap().to_string();
        let book = folder.path().join("short.txt");
        std::fs::write(&book, "Too short. So is this.").unwrap();
        assert!(start().contains("short.txt: expected a book"), "{}", start());
        std::fs::write(&book, b"Some text \xff and more").unwrap();
        assert!(start().contains("short.txt: expected UTF-8 text, got other bytes at 10"), "{}", start());
    }
}
