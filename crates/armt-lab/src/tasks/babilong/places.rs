//! Where the data lie: a folder that the user names, or the project's own `data`.
//!
//! That is the folder that `ARMT_DATA` names, or else `data` in the working folder or one above it, or in one above the program, or else what
//! the program [carries](crate::carried).

use std::path::{Path, PathBuf};

use crate::carried::{self, Data};
use crate::error::{Error, Result};

/// Folders above that are looked into: the program lies in `target/release` of the project, examples and tests one deeper.
const ABOVE: usize = 4;

/// Names the project's `data` where it lies elsewhere.
const VARIABLE: &str = "ARMT_DATA";

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
    carried::data(data).unwrap_or(Err(Error::NoData { folder: data.folder(), looked }))
}

/// Where a path or pattern like `data/questions/people.jsonl`, which begins with a folder of the project's data, lies when it is not below the
/// working folder: recipes that come with the program name their data so. None of any other path.
pub(in crate::tasks) fn elsewhere(path: &Path) -> Option<PathBuf> {
    let within = path.strip_prefix("data").ok()?;
    let (data, rest) = Data::ALL.into_iter().find_map(|data| Some((data, within.strip_prefix(data.folder()).ok()?)))?;
    let folder = find_data(data, None).ok()?;
    Some(if rest.as_os_str().is_empty() { folder } else { folder.join(rest) })
}
