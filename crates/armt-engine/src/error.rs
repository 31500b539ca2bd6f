//! What can go wrong, always with what was expected and what came.

use std::path::PathBuf;

use crate::tensor::{DType, Shape};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the engine. None of them leaves a device in a state that cannot be reported or dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong shape for an operation.
    #[error("{op}: expected {what} of shape {expected}, got {got}")]
    Shape {
        /// The operation that refused.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// The shape, or the rule, that would have been accepted.
        expected: String,
        /// The shape that came.
        got: Shape,
    },
    /// A tensor has the wrong element type for an operation.
    #[error("{op}: expected {what} of type {expected}, got {got}")]
    DType {
        /// The operation that refused.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// The accepted type or types.
        expected: String,
        /// The type that came.
        got: DType,
    },
    /// Operands live on different devices.
    #[error("{op}: all operands must be on one device, but {what} is on {got} and the first operand on {expected}")]
    Device {
        /// The operation that refused.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// Device of the first operand.
        expected: String,
        /// Device of the offending operand.
        got: String,
    },
    /// A tensor of numbers holds one that names nothing: a token outside the vocabulary, a target outside the classes.
    #[error("{op}: {what} {value}{} is outside {range}", position.map_or(String::new(), |p| format!(" at position {p}")))]
    Index {
        /// The operation that refused.
        op: &'static str,
        /// What the number is.
        what: &'static str,
        /// The number.
        value: i64,
        /// Where it is, if that is known: a GPU does not say.
        position: Option<usize>,
        /// What it should lie in.
        range: String,
    },
    /// What was asked for is beyond what the device can do, whatever the memory left on it.
    #[error("{op}: {message}")]
    Unsupported {
        /// The operation that refused.
        op: &'static str,
        /// What is needed and what there is.
        message: String,
    },
    /// Something that cannot be part of a captured graph was done during a capture.
    #[error("{op}: {message}")]
    Capture {
        /// The call that refused.
        op: &'static str,
        /// What cannot be, and why.
        message: &'static str,
    },
    /// The engine broke a promise to itself: a bug to report.
    #[error("a bug of the engine: {0}")]
    Bug(String),
    /// An argument other than a tensor is outside what the operation takes.
    #[error("{op}: {message}")]
    Argument {
        /// The operation that refused.
        op: &'static str,
        /// What was expected and what came.
        message: String,
    },
    /// A buffer is being written while something else holds it.
    #[error("{op}: the buffer is in use by another reader or writer (a tensor was passed as input and as output)")]
    Aliased {
        /// The operation that refused.
        op: &'static str,
    },
    /// Something that only a trainable parameter has was asked of a frozen one.
    #[error("parameter {name} is frozen: it has no gradient; `Param::to_trainable` makes one that has")]
    Frozen {
        /// The parameter.
        name: String,
    },
    /// The tape was asked for something it cannot do.
    #[error("tape: {0}")]
    Tape(String),
    /// A device has no room for a buffer.
    #[error(
        "out of memory on {device}: asked for {requested} bytes, {free} of {total} bytes are free, {pooled} bytes were held by this program's pool"
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        requested: usize,
        /// Bytes free after the pool gave back what it could.
        free: usize,
        /// Bytes of the device.
        total: usize,
        /// Bytes this program's pool held when it happened.
        pooled: usize,
    },
    /// Something that no device of this machine could hold.
    #[error("{what}: it would take {asked}, but this machine has {memory}")]
    TooLarge {
        /// The size to blame.
        what: String,
        /// Bytes, where they can be counted.
        asked: String,
        /// Bytes of the machine.
        memory: usize,
    },
    /// No GPU behind this machine's NVIDIA driver.
    #[error("no CUDA device: {0}")]
    NoCuda(String),
    /// This machine has no NVIDIA driver, and so no GPU that could be used; the loader's reason.
    #[error("no CUDA device: the NVIDIA driver is not installed ({0})")]
    NoDriver(String),
    /// The driver cannot run what we need.
    #[error("the NVIDIA driver supports CUDA {got}, but at least {needed} is needed: update the driver")]
    DriverTooOld {
        /// Oldest CUDA version that works.
        needed: &'static str,
        /// What the driver says.
        got: String,
    },
    /// A CUDA library could not be loaded.
    #[error("{library} could not be loaded: {reason} (searched: {searched}; ARMT_CUDA_PATH can name a folder that holds it)")]
    Library {
        /// Name of the library, without folder.
        library: String,
        /// Why the last candidate was refused.
        reason: String,
        /// The folders that were searched.
        searched: String,
    },
    /// A call into the CUDA driver or a CUDA library failed.
    #[error("{call} failed: {name} ({code}): {text}")]
    Cuda {
        /// The function.
        call: &'static str,
        /// Its status.
        code: i32,
        /// The status' symbolic name.
        name: String,
        /// The driver's explanation.
        text: String,
    },
    /// The processes that train together are no longer all there.
    #[error("training in several processes: {0}")]
    Together(String),
    /// Work that had been issued could not be done, and with it was lost what was issued after it: the device cannot be used any more.
    #[error("the GPU cannot be used any more, since work that waited for a kernel was lost: {0}")]
    Lost(String),
    /// A kernel did not compile.
    #[error("kernel file {file} did not compile for {arch}:\n{log}")]
    Kernel {
        /// The `.cu` file.
        file: String,
        /// Target architecture.
        arch: String,
        /// The compiler's output.
        log: String,
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
        /// What was expected and what came.
        message: String,
    },
}

impl Error {
    /// An [`Error::Argument`] with a ready message.
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Error::Argument { op, message: message.into() }
    }

    /// An [`Error::Unsupported`] with a ready message.
    pub(crate) fn unsupported(op: &'static str, message: impl Into<String>) -> Self {
        Error::Unsupported { op, message: message.into() }
    }

    /// An [`Error::Shape`].
    pub fn shape(op: &'static str, what: &'static str, expected: impl std::fmt::Display, got: Shape) -> Self {
        Error::Shape { op, what, expected: expected.to_string(), got }
    }
}
