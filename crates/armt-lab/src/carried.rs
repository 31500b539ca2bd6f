//! What a program carries, so that it works far from the project: data, recipes and models by their names.
//!
//! The library knows no such things itself: whoever builds a program of it says once, by [`carry`], where they come from.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, Result};

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
    pub(crate) const ALL: [Data; 6] = [Data::Babi, Data::TestBooks, Data::TrainBooks, Data::Bpe, Data::BooksBpe, Data::Questions];

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

/// Where carried things lie. A function gives `None` for a name that it does not know.
#[derive(Clone, Copy, Debug)]
pub struct Carried {
    /// A folder of the project's data.
    pub data: fn(Data) -> std::io::Result<PathBuf>,
    /// The file of a recipe: `rewrite-armt`, with or without `.toml`.
    pub recipe: fn(&Path) -> std::io::Result<Option<PathBuf>>,
    /// The folder of a model: `babilong-qa1`.
    pub model: fn(&Path) -> std::io::Result<Option<PathBuf>>,
}

static CARRIED: OnceLock<Carried> = OnceLock::new();

/// From now on what is nowhere else is asked for here. What was said first holds.
pub fn carry(carried: Carried) {
    CARRIED.get_or_init(|| carried);
}

/// A carried folder of data; `None` if nothing is carried.
pub(crate) fn data(data: Data) -> Option<Result<PathBuf>> {
    let place = (CARRIED.get()?.data)(data);
    Some(place.map_err(|source| Error::Io { path: data.folder().into(), source }))
}

/// The recipe of a path: that itself, or a carried one of its name if there is nothing.
pub(crate) fn recipe(path: PathBuf, name: &Path) -> Result<PathBuf> {
    found(path, name, |carried| carried.recipe)
}

/// The folder of a model: that itself, or a carried one of its name if there is nothing.
pub(crate) fn model(named: &Path) -> Result<PathBuf> {
    found(named.into(), named, |carried| carried.model)
}

/// Finds a carried thing.
type Find = fn(&Path) -> std::io::Result<Option<PathBuf>>;

fn found(path: PathBuf, name: &Path, of: impl Fn(&Carried) -> Find) -> Result<PathBuf> {
    match CARRIED.get().filter(|_| !path.exists()) {
        Some(carried) => match of(carried)(name) {
            Ok(found) => Ok(found.unwrap_or(path)),
            Err(source) => Err(Error::Io { path, source }),
        },
        None => Ok(path),
    }
}
