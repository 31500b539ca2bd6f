//! Rows of a parquet table, as JSON: the table is read page by page and never kept.

use std::fs::File;
use std::path::{Path, PathBuf};

use armt::files::quietly;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::reader::RowIter;

use crate::error::{Error, Result};

/// The rows of a parquet file.
pub struct Table {
    path: PathBuf,
    /// `None` once they failed: what is left of them is not to be used.
    rows: Option<RowIter<'static>>,
}

impl Table {
    /// Opens a file. One that is no parquet is an error.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let rows = quietly(|| SerializedFileReader::new(file).map(|reader| reader.into_iter()))
            .ok_or_else(|| Error::file(path, "expected a parquet table: it is damaged"))?
            .map_err(|e| Error::file(path, format!("expected a parquet table: {e}")))?;
        Ok(Table { path: path.into(), rows: Some(rows) })
    }
}

impl Iterator for Table {
    type Item = Result<Vec<u8>>;

    /// The next row as a JSON object. One that cannot be read or unpacked is an error, after which there are no more.
    fn next(&mut self) -> Option<Result<Vec<u8>>> {
        let mut rows = self.rows.take()?;
        // The reader panics at some of what a damaged table can hold.
        let next = quietly(|| rows.next().map(|row| row.map(|row| row.to_json_value().to_string().into_bytes())));
        match next {
            None => Some(Err(Error::file(&self.path, "its rows: the table is damaged"))),
            Some(None) => None,
            Some(Some(Err(e))) => Some(Err(Error::file(&self.path, format!("its rows: {e}")))),
            Some(Some(Ok(row))) => {
                self.rows = Some(rows);
                Some(Ok(row))
            }
        }
    }
}
