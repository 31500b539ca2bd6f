//! Files by their names, patterns and folders, and their bytes, unpacked.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use armt::text::BehindMark;
use flate2::read::MultiGzDecoder;

use crate::error::{Error, Result};
use crate::tasks::babilong::elsewhere;

/// The files that some names mean, each list in the order of its names: a file, all texts in a folder, or a pattern with `*`, `**` and `?`. A
/// name that means nothing is an error.
pub fn find(patterns: &[String]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for pattern in patterns {
        let path = Path::new(pattern);
        let before = files.len();
        named(path, &mut files)?;
        if files.len() == before
            && let Some(elsewhere) = elsewhere(path)
        {
            named(&elsewhere, &mut files)?;
        }
        if files.len() == before {
            return Err(Error::file(path, "expected a text file, a folder of some or a pattern that finds some, found nothing"));
        }
        // A folder lists its files in no certain order.
        files[before..].sort();
    }
    // Several names may lead to one file.
    let mut known = HashSet::new();
    files.retain(|file| known.insert(file.canonicalize().unwrap_or_else(|_| file.clone())));
    if files.is_empty() { Err(Error::config("files", "at least one file", "none")) } else { Ok(files) }
}

/// The files that one name means; none where there is nothing of that name.
fn named(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if path.is_file() {
        files.push(path.into());
    } else if path.is_dir() {
        within(path, &mut HashSet::new(), files)?;
    } else {
        let found = glob::glob(&path.to_string_lossy()).map_err(|e| Error::config("files", "a file, a folder or a pattern", e))?;
        for path in found {
            let path = path.map_err(|e| Error::Io { path: e.path().into(), source: e.into() })?;
            if path.is_file() {
                files.push(path);
            }
        }
    }
    Ok(())
}

/// All files of a folder, and of those in it, that are texts by their names. What begins with a point is hidden, and a folder that links lead to
/// again is looked into once.
fn within(folder: &Path, seen: &mut HashSet<PathBuf>, files: &mut Vec<PathBuf>) -> Result<()> {
    let fail = |source| Error::Io { path: folder.into(), source };
    if !seen.insert(folder.canonicalize().map_err(fail)?) {
        return Ok(());
    }
    let entries = std::fs::read_dir(folder).map_err(fail)?.map(|entry| Ok(entry.map_err(fail)?.path()));
    let mut entries = entries.collect::<Result<Vec<PathBuf>>>()?;
    // By which of several names something is known does not depend on the machine.
    entries.sort();
    for path in entries {
        if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
            continue;
        }
        if path.is_dir() {
            within(&path, seen, files)?;
        } else if is_table(&path).is_ok() {
            files.push(path);
        }
    }
    Ok(())
}

/// A file's bytes, unpacked if its name ends in `.gz` or `.zst`, behind a mark of their encoding.
pub fn open(path: &Path) -> Result<Box<dyn Read + Send>> {
    let file = File::open(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let file = BufReader::with_capacity(1 << 16, file);
    Ok(match packing(path) {
        Some("gz") => Box::new(BehindMark::new(MultiGzDecoder::new(file))),
        Some("zst") => {
            let unpacked = ruzstd::decoding::StreamingDecoder::new(file);
            Box::new(BehindMark::new(unpacked.map_err(|e| Error::file(path, format!("expected a text packed by zstd: {e}")))?))
        }
        _ => Box::new(BehindMark::new(file)),
    })
}

/// How a file is packed, by its name.
fn packing(path: &Path) -> Option<&str> {
    path.extension().and_then(|e| e.to_str()).filter(|e| ["gz", "zst"].contains(e))
}

/// Whether a file is a table of rows; otherwise it is a text. A file of another kind is an error that lists those that there are.
pub fn is_table(path: &Path) -> Result<bool> {
    match kind(path) {
        Some("txt" | "md") => Ok(false),
        Some("jsonl") => Ok(true),
        Some("parquet") if packing(path).is_some() => {
            Err(Error::file(path, "expected a parquet table that is not packed as a whole"))
        }
        Some("parquet") if cfg!(feature = "parquet") => Ok(true),
        Some("parquet") => Err(Error::file(
            path,
            "expected .txt, .md or .jsonl: this program was built without parquet (cargo build --features parquet); the table can be written as .jsonl",
        )),
        _ => Err(Error::file(path, "expected a file whose name ends in .txt, .md or .jsonl, with .gz or .zst after it or not")),
    }
}

/// What a file is when it is unpacked, by its name: `jsonl` of `notes.jsonl.zst`.
pub(super) fn kind(path: &Path) -> Option<&str> {
    let name = if packing(path).is_some() { Path::new(path.file_stem()?) } else { path };
    name.extension().and_then(|e| e.to_str())
}
