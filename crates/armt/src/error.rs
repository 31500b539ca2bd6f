//! What can go wrong, always with what was expected and what came.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the models, their files or their texts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] armt_engine::Error),
    /// A configuration holds something that does not fit.
    #[error("{key}: expected {expected}, got {got}")]
    Config {
        /// The key.
        key: String,
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A file was read but does not hold what it should.
    #[error("{path}: {message}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A call's arguments do not fit.
    #[error("expected {expected}, got {got}")]
    Input {
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// A token that the model does not have.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: i32,
        /// Tokens that there are.
        vocabulary: usize,
    },
    /// A state of another number of texts than came.
    #[error("the state is of {state} text(s) side by side, but {texts} came")]
    Texts {
        /// Texts of the state.
        state: usize,
        /// Texts that came.
        texts: usize,
    },
    /// A state that belongs to another model.
    #[error("the state belongs to another model: {reason}")]
    Foreign {
        /// What does not fit.
        reason: String,
    },
    /// Bytes of a file that hold no state of this model.
    #[error("{0}")]
    StateFile(String),
    /// A tokenizer refused, or does not fit its vocabulary or model.
    #[error("{0}")]
    Tokenizer(String),
    /// Something that this model cannot do.
    #[error("{0}")]
    Unsupported(String),
    /// Numbers that are not finite where a model's are expected.
    #[error("{what} holds {value}, which is not a finite number")]
    NotFinite {
        /// What holds it.
        what: String,
        /// The number.
        value: f32,
    },
    /// The machine gave something up: a thread, say.
    #[error("{what}: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A text was cut short because a stop was asked for.
    #[error("stopped before the text's end")]
    Interrupted,
}

impl Error {
    /// An [`Error::Config`].
    pub fn config(key: &str, expected: &str, got: impl Display) -> Self {
        Error::Config { key: key.into(), expected: expected.into(), got: got.to_string() }
    }

    /// An [`Error::Input`].
    pub fn input(expected: impl Display, got: impl Display) -> Self {
        Error::Input { expected: expected.to_string(), got: got.to_string() }
    }

    /// An [`Error::File`].
    pub fn file(path: &Path, message: impl Display) -> Self {
        Error::File { path: path.into(), message: message.to_string() }
    }

    /// An [`Error::Io`].
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Error::Io { path: path.into(), source }
    }

    /// As the engine's error, for code that the engine calls.
    pub fn into_engine(self) -> armt_engine::Error {
        match self {
            Error::Engine(error) => error,
            other => armt_engine::Error::argument("a step", other.to_string()),
        }
    }
}
