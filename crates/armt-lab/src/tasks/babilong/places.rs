//! Where the data lie: a folder that the user names, or the project's own `data`.
//!
//! That is the folder that `ARMT_DATA` names, or else `data` in the working folder or one above it, or in one above the program, or else what
//! the program [carries](carry_data).

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Folders above that are looked into: the program lies in `target/release` of the project, examples and tests one deeper.
const ABOVE: usize = 4;

/// A kind of data that the project ships.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Data {
    /// bAbI's files.
    Babi,
    /// Books to judge on.
    TestBooks,
    /// Books to train on, by other authors.
    TrainBooks,
    /// GPT-2's byte-level BPE.
    Bpe,
    /// A small byte-level BPE of the training books.
    BooksBpe,
    /// Questions about people.
    Questions,
}

impl Data {
    const ALL: [Data; 6] = [Data::Babi, Data::TestBooks, Data::TrainBooks, Data::Bpe, Data::BooksBpe, Data::Questions];

    /// Where it is within `data`.
    pub fn folder(self) -> &'static str {
        match self {
            Data::Babi => "babi",
            Data::TestBooks => "books/test",
            Data::TrainBooks => "books/train",
            Data::Bpe => "gpt2",
            Data::BooksBpe => "books-bpe",
            Data::Questions => "questions",
        }
    }
}

/// Names the project's `data` where it lies elsewhere.
const VARIABLE: &str = "ARMT_DATA";

/// Gives a folder of data that a program carries.
pub type Carried = fn(Data) -> std::io::Result<PathBuf>;

static CARRIED: OnceLock<Carried> = OnceLock::new();

/// From now on data that are nowhere else are asked for here. What was said first holds.
pub fn carry_data(carried: Carried) {
    CARRIED.get_or_init(|| carried);
}

/// The folder that is given, or else the shipped one. One that is not there is an error that says where it was looked for.
pub fn find_data(data: Data, given: Option<&Path>) -> Result<PathBuf> {
    if let Some(given) = given {
        if given.is_dir() {
            return Ok(given.into());
        }
        if let Some(elsewhere) = elsewhere(given).filter(|path| path.is_dir()) {
            return Ok(elsewhere);
        }
        let found = if given.exists() { "a file" } else { "nothing" };
        return Err(Error::file(given, format!("expected a folder, found {found}")));
    }
    let within = |data_folder: &Path| data_folder.join(data.folder());
    if let Some(named) = std::env::var_os(VARIABLE) {
        let folder = within(Path::new(&named));
        let missing = || Error::file(&folder, format!("expected the project's data, as {VARIABLE} says, found nothing"));
        return if folder.is_dir() { Ok(folder) } else { Err(missing()) };
    }
    let (working, program) = (std::env::current_dir().ok(), std::env::current_exe().ok());
    let above = |path: &Option<PathBuf>, skip: usize| -> Vec<PathBuf> {
        path.iter().flat_map(|p| p.ancestors().skip(skip)).take(ABOVE).map(Path::to_path_buf).collect()
    };
    let mut looked = Vec::new();
    for root in above(&working, 0).into_iter().chain(above(&program, 1)) {
        let folder = within(&root.join("data"));
        if folder.is_dir() {
            return Ok(folder);
        }
        looked.push(folder);
    }
    match CARRIED.get() {
        Some(carried) => carried(data).map_err(|source| Error::Io { path: data.folder().into(), source }),
        None => Err(Error::NoData { folder: data.folder(), looked }),
    }
}

/// Where a path or pattern like `data/questions/people.jsonl`, which begins with a folder of the project's data, lies when it is not below the
/// working folder: recipes that come with the program name their data so. None of any other path.
pub(in crate::tasks) fn elsewhere(path: &Path) -> Option<PathBuf> {
    let within = path.strip_prefix("data").ok()?;
    let (data, rest) = Data::ALL.into_iter().find_map(|data| Some((data, within.strip_prefix(data.folder()).ok()?)))?;
    let folder = find_data(data, None).ok()?;
    Some(if rest.as_os_str().is_empty() { folder } else { folder.join(rest) })
}
