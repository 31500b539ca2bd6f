//! Texts as Python has them: a str, a path, or an iterable of pieces, which is never kept whole.

use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use armt::text::Source;
use pyo3::exceptions::{PyStopIteration, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::error::Result;

/// What a str, an `os.PathLike` or an iterable of str gives to read. Anything else is a TypeError.
pub fn source(text: &Bound<'_, PyAny>) -> Result<Source> {
    let name = Path::new("the text");
    if let Ok(text) = text.cast::<PyString>() {
        return Ok(Source::reader(name, Cursor::new(text.to_str()?.to_owned())));
    }
    if text.hasattr("__fspath__")? {
        return Ok(Source::file(&text.extract::<PathBuf>()?)?);
    }
    let expected = "expected a str, an os.PathLike or an iterable of str";
    if text.is_instance_of::<PyBytes>() {
        return Err(PyTypeError::new_err(format!("{expected}, got bytes")).into());
    }
    let pieces = text.try_iter().map_err(|_| PyTypeError::new_err(format!("{expected}, got {}", text.get_type())))?;
    Ok(Source::reader(name, Pieces { pieces: pieces.into_any().unbind(), piece: Cursor::default() }))
}

/// An iterator of Python as bytes to read. Python's lock is taken only while the next piece is asked for.
struct Pieces {
    pieces: Py<PyAny>,
    piece: Cursor<String>,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while self.piece.position() == self.piece.get_ref().len() as u64 {
            let next = Python::attach(|py| match self.pieces.call_method0(py, "__next__") {
                Ok(piece) => piece.extract::<String>(py).map(Some),
                Err(error) if error.is_instance_of::<PyStopIteration>(py) => Ok(None),
                Err(error) => Err(error),
            });
            match next.map_err(std::io::Error::other)? {
                Some(piece) => self.piece = Cursor::new(piece),
                None => return Ok(0),
            }
        }
        self.piece.read(buffer)
    }
}
