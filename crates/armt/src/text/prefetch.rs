//! A token stream on a thread of its own: the tokenizer works while the model does, and a text that does not come does not block.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use super::stream::{Piece, TokenStream, broken};
use super::tokenizer::OpenText;
use crate::error::{Error, Result};
use crate::files::quietly;

/// Pieces that wait at most: enough to smooth out a slow disk, few enough to stay small in memory.
const WAITING: usize = 4;
/// How often an asked stop is looked for while no text comes.
const GLANCE: Duration = Duration::from_millis(50);

/// The tokens of a [`TokenStream`], prepared ahead. The iterator gives [`Error::Interrupted`] once `stop` is set.
pub struct TokenPrefetch {
    pieces: Receiver<Result<Step>>,
    stop: Arc<AtomicBool>,
    current: std::vec::IntoIter<i32>,
    counts: Counts,
    rest: Option<OpenText>,
    ended: bool,
}

/// What the thread gives.
enum Step {
    Piece(Piece),
    /// The end: how far the reading came, and what is left open there.
    End(Piece, OpenText),
}

/// What an [`TokenPrefetch`] has given so far; clones go on counting with it.
#[derive(Clone, Default)]
pub struct Counts(Arc<[AtomicU64; 2]>);

impl Counts {
    /// Bytes of text behind the tokens given so far, to the end of their piece.
    pub fn bytes(&self) -> u64 {
        self.0[0].load(Ordering::Relaxed)
    }

    /// How many of them were no UTF-8 and became U+FFFD.
    pub fn replaced(&self) -> u64 {
        self.0[1].load(Ordering::Relaxed)
    }
}

impl TokenPrefetch {
    /// Starts the thread. It ends with the stream, or when this is dropped. A system that gives no thread is an error.
    pub fn start(mut stream: TokenStream, stop: Arc<AtomicBool>) -> Result<Self> {
        let (sender, pieces) = sync_channel(WAITING);
        let work = move || {
            while let Some(piece) = quietly(|| stream.next_piece().transpose()).unwrap_or_else(|| Some(Err(broken()))) {
                let failed = piece.is_err();
                if sender.send(piece.map(Step::Piece)).is_err() || failed {
                    return;
                }
            }
            // Nobody may be listening any more.
            let _ = sender.send(Ok(Step::End(stream.so_far(), stream.rest())));
        };
        let thread = std::thread::Builder::new().name("tokenizer".into()).spawn(work);
        thread.map_err(|source| Error::System { what: "a thread for the tokenizer", source })?;
        Ok(TokenPrefetch { pieces, stop, current: Vec::new().into_iter(), counts: Counts::default(), rest: None, ended: false })
    }

    /// What the text's end left open, once all tokens were given.
    pub fn rest(&self) -> Option<&OpenText> {
        self.rest.as_ref()
    }

    /// What was given so far.
    pub fn counts(&self) -> Counts {
        self.counts.clone()
    }
}

impl Iterator for TokenPrefetch {
    type Item = Result<i32>;

    fn next(&mut self) -> Option<Result<i32>> {
        loop {
            if let Some(token) = self.current.next() {
                return Some(Ok(token));
            }
            if self.ended {
                return None;
            }
            if self.stop.load(Ordering::Relaxed) {
                return Some(Err(Error::Interrupted));
            }
            match self.pieces.recv_timeout(GLANCE) {
                Ok(Ok(step)) => {
                    let piece = match step {
                        Step::Piece(piece) => piece,
                        Step::End(piece, rest) => {
                            (self.rest, self.ended) = (Some(rest), true);
                            piece
                        }
                    };
                    let Counts(counts) = &self.counts;
                    counts[0].store(piece.bytes, Ordering::Relaxed);
                    counts[1].store(piece.replaced, Ordering::Relaxed);
                    self.current = piece.tokens.into_iter();
                }
                Ok(Err(error)) => {
                    self.ended = true;
                    return Some(Err(error));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.ended = true,
            }
        }
    }
}
