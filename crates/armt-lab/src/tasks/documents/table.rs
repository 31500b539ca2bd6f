//! Rows of a parquet table, as JSON: the table is read page by page and never kept.

use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::reader::RowIter;

use crate::error::{Error, Result};

/// The rows of a parquet file.
pub struct Table {
    path: PathBuf,
    rows: RowIter<'static>,
}

impl Table {
    /// Opens a file. One that is no parquet is an error.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let reader = SerializedFileReader::new(file).map_err(|e| Error::file(path, format!("expected a parquet table: {e}")))?;
        Ok(Table { path: path.into(), rows: reader.into_iter() })
    }
}

impl Iterator for Table {
    type Item = Result<Vec<u8>>;

    /// The next row as a JSON object. One that cannot be read or unpacked is an error.
    fn next(&mut self) -> Option<Result<Vec<u8>>> {
        let row = self.rows.next()?;
        Some(
            row.map(|row| row.to_json_value().to_string().into_bytes())
                .map_err(|e| Error::file(&self.path, format!("its rows: {e}"))),
        )
    }
}
