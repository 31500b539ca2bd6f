//! A text on its way into a memory: the bytes that came, the tokens that they became, and how far they are read.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use armt::text::{OpenText, Tokenized};
use axum::body::Bytes;
use tokio::sync::{Notify, watch};

use crate::memory::{Change, Memory, Now, Reserved};
use crate::refusal::Refusal;

/// Bytes of a text that wait to be tokenized before its sender has to wait.
pub const WAITING: usize = 1 << 20;

/// How far a text is.
#[derive(Clone)]
pub struct TextProgress {
    /// The memory with what was read of it.
    pub now: Now,
    /// How far its layers moved by the last reading that moved them.
    pub change: Option<Change>,
    /// All that was sent is read.
    pub done: bool,
    /// Why it goes no further.
    pub failed: Option<Refusal>,
}

/// A text on its way into a memory.
pub struct Text {
    pub memory: Arc<Memory>,
    /// Until it is read.
    pub reserved: Mutex<Option<Reserved>>,
    pub inbox: Mutex<Inbox>,
    /// Some of the bytes in the inbox were taken.
    pub taken: Notify,
    pub progress: watch::Sender<TextProgress>,
}

/// What came of a text and is not read yet.
#[derive(Default)]
pub struct Inbox {
    pieces: VecDeque<Bytes>,
    bytes: usize,
    ended: bool,
    /// Some of it is being tokenized.
    tokenizing: bool,
    /// What is tokenized, in its order.
    parts: VecDeque<Part>,
    /// Tokens of all parts.
    tokens: usize,
    /// What is open behind the last part.
    open: OpenText,
    /// Tokens that are open in the memory itself.
    tail: usize,
    failed: Option<Refusal>,
}

/// A part of a text that is tokenized.
#[derive(Clone, Default)]
pub struct Part {
    pub text: Tokenized,
    /// Bytes of the text that it was.
    pub bytes: u64,
}

impl Inbox {
    /// For a memory with so much open.
    pub fn after(tail: &armt::state::Tail) -> Self {
        Inbox { open: tail.text.clone(), tail: tail.tokens.len(), ..Inbox::default() }
    }

    /// Takes in a piece, unless too much waits already.
    pub fn push(&mut self, piece: Bytes) -> Result<(), Bytes> {
        if self.bytes >= WAITING {
            return Err(piece);
        }
        self.bytes += piece.len();
        self.pieces.push_back(piece);
        Ok(())
    }

    /// Nothing more comes.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Bytes that are not tokenized yet, where nobody is at it.
    pub fn to_tokenize(&self) -> usize {
        if self.tokenizing || self.failed.is_some() { 0 } else { self.bytes }
    }

    /// Whether some of it is not read yet.
    pub fn has_some(&self) -> bool {
        self.bytes > 0 || self.tokenizing || !self.parts.is_empty()
    }

    /// Tokens that can go into the memory, with those that are open there.
    pub fn tokens(&self) -> usize {
        self.tail + self.tokens
    }

    /// Whether tokens wait beside those that are open in the memory.
    pub fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Whether nothing comes any more but what is tokenized.
    pub fn is_tokenized(&self) -> bool {
        self.ended && self.bytes == 0 && !self.tokenizing
    }

    /// Why it goes no further.
    pub fn failed(&self) -> Option<&Refusal> {
        self.failed.as_ref()
    }

    /// Takes at most so many bytes to tokenize, and what they come after. They have to come back by [`Inbox::tokenized`].
    pub fn begin_tokenizing(&mut self, most: usize) -> (OpenText, Vec<u8>) {
        let mut taken = Vec::with_capacity(most.min(self.bytes));
        while let Some(piece) = self.pieces.front_mut() {
            let part = piece.split_to(piece.len().min(most - taken.len()));
            taken.extend_from_slice(&part);
            if piece.is_empty() {
                self.pieces.pop_front();
            }
            if taken.len() == most {
                break;
            }
        }
        self.bytes -= taken.len();
        self.tokenizing = true;
        (std::mem::take(&mut self.open), taken)
    }

    /// Takes in what so many bytes have become.
    pub fn tokenized(&mut self, text: armt::Result<Tokenized>, bytes: usize) {
        self.tokenizing = false;
        match text {
            Ok(text) => {
                self.open.clone_from(&text.open);
                self.tokens += text.tokens.len();
                self.parts.push_back(Part { text, bytes: bytes as u64 });
            }
            Err(error) => self.failed = Some(error.into()),
        }
    }

    /// Takes as many parts, at least one, as give so many tokens with those that are open in the memory, or all. How many bytes a text has up
    /// to a token is known between parts alone.
    pub fn take(&mut self, tokens: usize) -> Part {
        let mut taken = Part::default();
        while (taken.bytes == 0 || self.tail + taken.text.tokens.len() < tokens)
            && let Some(part) = self.parts.pop_front()
        {
            self.tokens -= part.text.tokens.len();
            taken.text.tokens.extend(part.text.tokens);
            taken.text.open = part.text.open;
            taken.bytes += part.bytes;
        }
        taken
    }

    /// Tokens that are open in the memory from now on.
    pub fn set_tail(&mut self, tokens: usize) {
        self.tail = tokens;
    }
}
