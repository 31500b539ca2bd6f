//! Where the data lie: a folder that the user names, or the project's own `data`.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Folders above the program that are looked into: it lies in `target/release` of the project, examples and tests one deeper.
const ABOVE: usize = 4;

/// A kind of data that the project ships.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// bAbI's files.
    Babi,
    /// Books to judge on.
    TestBooks,
    /// Books to train on, by other authors.
    TrainBooks,
    /// GPT-2's byte-level BPE.
    Bpe,
}

impl Data {
    /// Where it is within the project.
    pub fn folder(self) -> &'static str {
        match self {
            Data::Babi => "data/babi",
            Data::TestBooks => "data/books/test",
            Data::TrainBooks => "data/books/train",
            Data::Bpe => "data/gpt2",
        }
    }
}

/// The folder that is given, or else the shipped one: under the working folder, or under a folder above the program. One that is not
/// there is an error that says where it was looked for.
pub fn find_data(data: Data, given: Option<&Path>) -> Result<PathBuf> {
    if let Some(given) = given {
        if given.is_dir() {
            return Ok(given.into());
        }
        let found = if given.exists() { "a file" } else { "nothing" };
        return Err(Error::file(given, format!("expected a folder, found {found}")));
    }
    let program = std::env::current_exe().ok();
    let above = program.iter().flat_map(|p| p.ancestors().skip(1).take(ABOVE)).map(Path::to_path_buf);
    let mut looked = Vec::new();
    for root in std::iter::once(PathBuf::new()).chain(above) {
        let folder = root.join(data.folder());
        if folder.is_dir() {
            return Ok(folder);
        }
        looked.push(folder.display().to_string());
    }
    Err(Error::Argument(format!("expected the project's folder {}, looked for {}", data.folder(), looked.join(", "))))
}
