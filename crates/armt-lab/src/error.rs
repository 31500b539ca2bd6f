//! What can go wrong in the lab, always with what was expected and what came.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a task, a recipe, a run or a report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model, its files or its texts refused or failed.
    #[error(transparent)]
    Model(armt::Error),
    /// A key of a recipe, or a word of a command, holds something that does not fit.
    #[error("{key}: expected {expected}, got {got}")]
    Config {
        /// The key.
        key: String,
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// A recipe holds something that does not fit.
    #[error("{}{reason}", place(file.as_deref(), part, *line))]
    Recipe {
        /// The file, where it is of one.
        file: Option<PathBuf>,
        /// The part, as `stage 2`, or the key; nothing where it is not known.
        part: String,
        /// Its line in the file, where it was not changed by the command line.
        line: Option<usize>,
        /// What does not fit.
        #[source]
        reason: Box<Error>,
    },
    /// A recipe that is not TOML, or has other keys than a recipe's.
    #[error("{0}")]
    Toml(String),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A file or folder was read but does not hold what it should.
    #[error("{path}: {message}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A call's arguments, or a task's sizes, do not fit.
    #[error("{what}: expected {expected}, got {got}")]
    Input {
        /// What was given.
        what: String,
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// A model or tokenizer that this task cannot use.
    #[error("expected {expected}, got {got}")]
    Unfit {
        /// What the task needs.
        expected: String,
        /// What came.
        got: String,
    },
    /// The project's data are nowhere to be found.
    #[error("expected the project's folder data/{folder}, looked for {}; ARMT_DATA can name the project's data elsewhere", looked.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoData {
        /// The folder within `data`.
        folder: &'static str,
        /// Where it was looked for.
        looked: Vec<PathBuf>,
    },
    /// Training broke down: its loss is no number or far too large.
    #[error(
        "the loss is {loss} at step {step} of stage {stage} (rate {rate:e}, norm of the gradient {norm:.3e}); the last good checkpoint is {}",
        checkpoint.display()
    )]
    Diverged {
        /// The loss.
        loss: f32,
        /// Step of the stage, from 1.
        step: u64,
        /// Stage, from 1.
        stage: usize,
        /// The learning rate.
        rate: f32,
        /// Norm of the gradient.
        norm: f64,
        /// The last checkpoint before it.
        checkpoint: PathBuf,
    },
    /// A stage ended below its mark in a recipe whose stages are gated.
    #[error(
        "stage {stage} ({name}) ended at an exact match of {exact_match:.3} after {steps} steps, below its mark of {mark:.3} (until), and eval.gated \
         lets no stage be left so: give it more steps, or take the task apart; its best model is in {}",
        best.display()
    )]
    BelowMark {
        /// Stage, from 1.
        stage: usize,
        /// What the stage is about.
        name: String,
        /// The best exact match that it came to.
        exact_match: f64,
        /// Steps that it had.
        steps: u64,
        /// The exact match that it should have come to.
        mark: f64,
        /// Folder of its best model.
        best: PathBuf,
    },
    /// A stop was asked for.
    #[error("stopped before the end")]
    Interrupted,
}

/// Where a mistake of a recipe is: `recipes/x.toml: stage 2 (line 13): `.
fn place(file: Option<&Path>, part: &str, line: Option<usize>) -> String {
    let file = file.map(|file| format!("{}: ", file.display())).unwrap_or_default();
    match (part, line) {
        ("", None) => file,
        ("", Some(line)) => format!("{file}line {line}: "),
        (part, None) => format!("{file}{part}: "),
        (part, Some(line)) => format!("{file}{part} (line {line}): "),
    }
}

impl From<armt::Error> for Error {
    fn from(error: armt::Error) -> Self {
        match error {
            armt::Error::Interrupted => Error::Interrupted,
            other => Error::Model(other),
        }
    }
}

impl From<armt::engine::Error> for Error {
    fn from(error: armt::engine::Error) -> Self {
        Error::Model(error.into())
    }
}

impl Error {
    /// An [`Error::Config`].
    pub fn config(key: &str, expected: &str, got: impl Display) -> Self {
        Error::Config { key: key.into(), expected: expected.into(), got: got.to_string() }
    }

    /// An [`Error::Input`].
    pub fn input(what: impl Display, expected: impl Display, got: impl Display) -> Self {
        Error::Input { what: what.to_string(), expected: expected.to_string(), got: got.to_string() }
    }

    /// An [`Error::Unfit`].
    pub fn unfit(expected: impl Display, got: impl Display) -> Self {
        Error::Unfit { expected: expected.to_string(), got: got.to_string() }
    }

    /// An [`Error::File`].
    pub fn file(path: &Path, message: impl Display) -> Self {
        Error::File { path: path.into(), message: message.to_string() }
    }
}
