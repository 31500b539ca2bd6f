//! How much of everything a server takes.

use std::time::Duration;

/// Bounds, above which clients hear 413, 429 or 503.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Memories at a time, of all keys together.
    pub memories: usize,
    /// Texts that are read side by side.
    pub texts: usize,
    /// Texts that may be on their way into memories at a time.
    pub readings: usize,
    /// Questions that may wait at a time.
    pub questions: usize,
    /// Bytes of a body of JSON.
    pub body: u64,
    /// Bytes of all bodies together that are taken whole, or twice the largest there may be.
    pub bodies: u64,
    /// Connections at a time. Further ones wait until one ends.
    pub connections: usize,
    /// Tokens of an answer.
    pub answer: usize,
    /// Bytes of memories that are kept in a folder.
    pub disk: u64,
    /// How long nothing may come of a body or be taken of an answer, or a connection may be without a whole request's head.
    pub silence: Duration,
    /// How long a question may wait and be answered, and a body that is taken whole may take to come.
    pub answering: Duration,
    /// How long what runs may take to its end when the server is stopped.
    pub ending: Duration,
    /// How long a memory stays that nobody uses, unless it was made with a time of its own.
    pub idle: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memories: 1024,
            texts: 64,
            readings: 256,
            questions: 256,
            body: 64 << 20,
            bodies: 256 << 20,
            connections: 512,
            answer: 4096,
            disk: 16 << 30,
            silence: Duration::from_secs(60),
            answering: Duration::from_secs(300),
            ending: Duration::from_secs(30),
            idle: None,
        }
    }
}
