//! What can go wrong, always with what was expected and what came.

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
    #[error("{0}")]
    Argument(String),
    /// A text was cut short because a stop was asked for.
    #[error("stopped before the text's end")]
    Interrupted,
}

impl Error {
    /// An [`Error::Config`].
    pub fn config(key: &str, expected: &str, got: impl std::fmt::Display) -> Self {
        Error::Config { key: key.into(), expected: expected.into(), got: got.to_string() }
    }

    /// As the engine's error, for code that the engine calls, as the body of a recorded step.
    pub fn into_engine(self) -> armt_engine::Error {
        match self {
            Error::Engine(error) => error,
            other => armt_engine::Error::argument("a block", other.to_string()),
        }
    }

    /// An [`Error::File`].
    pub fn file(path: &Path, message: impl std::fmt::Display) -> Self {
        Error::File { path: path.into(), message: message.to_string() }
    }
}
