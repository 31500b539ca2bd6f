//! What the program and the Python package carry: models, recipes and data, so that they work anywhere by their names.
//!
//! A folder is unpacked when it is first asked for, beside its place and then renamed, into `armt` in the user's folder for data
//! (`XDG_DATA_HOME`, or `.local/share` at home). Its name has what it was packed from, so that another version has others.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use armt::weights::gguf::Gguf;
use armt_lab::carried::{Carried, Data};
use flate2::read::DeflateDecoder;

/// The recipe of `armt quickstart`.
pub const QUICKSTART: &str = include_str!("../shipped/recipes/quickstart.toml");

static PACKED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shipped"));

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Something that was named and is not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What is carried could not be written where it is to lie.
    #[error(
        "{}: what the program carries could not be unpacked here; XDG_DATA_HOME can name another place, and ARMT_DATA a copy of the project's data: {source}",
        place.display()
    )]
    Unpack {
        /// Where it was to lie.
        place: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// There is no place for data.
    #[error("expected XDG_DATA_HOME or HOME to say where the program's data can lie, got neither")]
    NoHome,
    /// A run that has no best model yet.
    #[error("{}: this run was never judged and has no best model yet; its latest is {}", run.display(), last.display())]
    Unjudged {
        /// Its folder.
        run: PathBuf,
        /// Its latest model.
        last: PathBuf,
    },
    /// No model of this name.
    #[error(
        "{}: {what}; expected a model folder with config.json, model.safetensors and tokenizer.json, a run's folder, or a model that comes with the program: {shipped}",
        named.display()
    )]
    NoModel {
        /// What was named.
        named: PathBuf,
        /// What is there.
        what: &'static str,
        /// The models that are carried.
        shipped: String,
    },
    /// No recipe of this name.
    #[error("{}: there is no such recipe; expected a file, or one that comes with the program: {shipped}", named.display())]
    NoRecipe {
        /// What was named.
        named: PathBuf,
        /// The recipes that are carried.
        shipped: String,
    },
    /// No file of this name, but a recipe that is carried has it.
    #[error("{}: there is no such recipe; `armt train {name}` takes the one that comes with the program", named.display())]
    RecipeElsewhere {
        /// What was named.
        named: PathBuf,
        /// The recipe's name.
        name: String,
    },
}

/// A file that is carried.
struct Packed {
    name: &'static str,
    bytes: usize,
    deflated: &'static [u8],
}

/// The files that are carried, in the order of their names.
fn files() -> impl Iterator<Item = Packed> {
    let mut rest = PACKED;
    std::iter::from_fn(move || {
        let name = std::str::from_utf8(take_sized(&mut rest)?).ok()?;
        let bytes = take_number(&mut rest)?;
        Some(Packed { name, bytes, deflated: take_sized(&mut rest)? })
    })
}

fn take_number(rest: &mut &'static [u8]) -> Option<usize> {
    let (number, more) = rest.split_first_chunk::<8>()?;
    *rest = more;
    usize::try_from(u64::from_le_bytes(*number)).ok()
}

fn take_sized(rest: &mut &'static [u8]) -> Option<&'static [u8]> {
    let size = take_number(rest)?;
    let (bytes, more) = rest.split_at_checked(size)?;
    *rest = more;
    Some(bytes)
}

/// The names of what lies in a carried folder.
fn names(folder: &str) -> Vec<&'static str> {
    let mut names: Vec<&str> = files().filter_map(|f| f.name.strip_prefix(folder)?.strip_prefix('/')?.split('/').next()).collect();
    names.dedup();
    names
}

/// A carried folder, unpacked.
fn unpacked(folder: &str) -> Result<PathBuf> {
    // Threads of one process would write beside each other under one name.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let root = home()?.join("armt").join(&armt::files::fingerprint(PACKED)[..16]);
    let place = root.join(folder);
    if place.is_dir() {
        return Ok(place);
    }
    match unpack(folder, &place) {
        Ok(()) => Ok(place),
        Err(source) => Err(Error::Unpack { place, source }),
    }
}

fn unpack(folder: &str, place: &Path) -> std::io::Result<()> {
    let above = place.parent().unwrap_or(place);
    std::fs::create_dir_all(above)?;
    let beside = above.join(format!(".{}.partial", std::process::id()));
    let written = files().filter(|f| f.name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))).try_for_each(|file| {
        let path = beside.join(&file.name[folder.len() + 1..]);
        std::fs::create_dir_all(path.parent().unwrap_or(&beside))?;
        let mut bytes = Vec::with_capacity(file.bytes);
        DeflateDecoder::new(file.deflated).read_to_end(&mut bytes)?;
        std::fs::write(path, bytes)
    });
    let put = written.and_then(|()| std::fs::rename(&beside, place));
    if let Err(error) = put {
        let _ = std::fs::remove_dir_all(&beside);
        // Another process may have been faster.
        if !place.is_dir() {
            return Err(error);
        }
    }
    Ok(())
}

/// The user's folder for data.
fn home() -> Result<PathBuf> {
    let named = |variable: &str| std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
    named("XDG_DATA_HOME").or_else(|| named("HOME").map(|home| home.join(".local/share"))).ok_or(Error::NoHome)
}

/// Whether a path is a name and nothing else.
fn bare(path: &Path) -> Option<&str> {
    let name = path.to_str()?;
    (path.components().count() == 1 && !name.starts_with('.')).then_some(name)
}

/// The folder of a model that is named: that itself, the best model of a run's folder, or one that the program carries; or a GGUF file. Anything
/// else is refused before something slow is done.
pub fn find_model(named: &Path) -> Result<PathBuf> {
    if named.is_file() && Gguf::is(named) {
        return Ok(named.into());
    }
    let best = named.join("best");
    for folder in [named, &best] {
        if folder.join("config.json").is_file() {
            return Ok(folder.into());
        }
    }
    let shipped = names("models");
    if let Some(name) = bare(named).filter(|name| shipped.contains(name) && !named.exists()) {
        return unpacked(&format!("models/{name}"));
    }
    let last = named.join("last");
    if last.join("config.json").is_file() {
        return Err(Error::Unjudged { run: named.into(), last });
    }
    let what = if named.is_dir() { "this folder has no config.json" } else { "there is no such folder" };
    Err(Error::NoModel { named: named.into(), what, shipped: shipped.join(", ") })
}

/// The folder of an adapter that is named: that itself, or the one in a run's folder.
pub fn find_adapter(named: &Path) -> PathBuf {
    let of_run = named.join("adapter");
    if of_run.is_dir() { of_run } else { named.into() }
}

/// The file of a recipe that is named: that itself, or one that the program carries.
pub fn find_recipe(named: &Path) -> Result<PathBuf> {
    if named.exists() {
        return Ok(named.into());
    }
    let shipped: Vec<&str> = names("recipes").into_iter().filter_map(|name| name.strip_suffix(".toml")).collect();
    let name = bare(named).map(|name| name.strip_suffix(".toml").unwrap_or(name));
    if let Some(name) = name.filter(|name| shipped.contains(name)) {
        // All of them: one may extend another.
        return Ok(unpacked("recipes")?.join(format!("{name}.toml")));
    }
    let stem = named.file_stem().and_then(|stem| stem.to_str());
    Err(match stem.filter(|stem| shipped.contains(stem)) {
        Some(stem) => Error::RecipeElsewhere { named: named.into(), name: stem.into() },
        None => Error::NoRecipe { named: named.into(), shipped: shipped.join(", ") },
    })
}

/// All of it, as the library asks for it.
pub const CARRIED: Carried = Carried { data, recipe, model };

fn data(data: Data) -> std::io::Result<PathBuf> {
    unpacked(&format!("data/{}", data.folder())).map_err(std::io::Error::other)
}

fn recipe(named: &Path) -> std::io::Result<Option<PathBuf>> {
    known(find_recipe(named))
}

fn model(named: &Path) -> std::io::Result<Option<PathBuf>> {
    known(find_model(named))
}

/// What was found, or nothing if there is no such thing.
fn known(found: Result<PathBuf>) -> std::io::Result<Option<PathBuf>> {
    match found {
        Ok(path) => Ok(Some(path)),
        Err(error @ (Error::Unpack { .. } | Error::NoHome)) => Err(std::io::Error::other(error)),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_is_carried_comes_out_as_it_went_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("shipped");
        let mut count = 0;
        for file in files() {
            let mut bytes = Vec::new();
            DeflateDecoder::new(file.deflated).read_to_end(&mut bytes).unwrap();
            assert!(bytes == std::fs::read(root.join(file.name)).unwrap() && bytes.len() == file.bytes, "{}", file.name);
            count += 1;
        }
        assert!(count > 50, "{count}");
        assert!(names("models").contains(&"babilong-qa1"));
        assert!(names("recipes").contains(&"remember-armt.toml") && names("data").contains(&"books"));
    }
}
