//! Files that are whole or not there: written beside their place and renamed, and read with errors that name them.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Reads a text file; an error names it.
pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })
}

/// Writes something as JSON; an error names the file.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value).map_err(|e| Error::file(path, e))?;
    text.push('\n');
    write_beside(path, text.as_bytes())
}

/// Reads something that was written as JSON. A file that holds something else is an error that says what was `expected`.
pub fn read_json<T: DeserializeOwned>(path: &Path, expected: &str) -> Result<T> {
    serde_json::from_str(&read_text(path)?).map_err(|e| Error::file(path, format!("expected {expected}: {e}")))
}

/// Writes a file beside its place and renames it there: who reads it meanwhile finds the old one whole.
pub fn write_beside(path: &Path, bytes: &[u8]) -> Result<()> {
    let beside = path.with_extension(format!("partial-{}", std::process::id()));
    let written = std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path));
    written.map_err(|source| {
        let _ = std::fs::remove_file(&beside);
        Error::Io { path: path.into(), source }
    })
}
