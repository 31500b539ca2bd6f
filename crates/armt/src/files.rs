//! Files that are whole or not there: written beside their place and renamed; and what refuses those that are damaged.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Reads a text file; an error names it.
pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| Error::io(path, source))
}

/// Reads something that was written as JSON. A file that holds something else is an error that says what was `expected`.
pub fn read_json<T: DeserializeOwned>(path: &Path, expected: &str) -> Result<T> {
    serde_json::from_str(&read_text(path)?).map_err(|e| Error::file(path, format!("expected {expected}: {e}")))
}

thread_local! {
    /// Whether a panic of this thread is expected, and nothing to be told.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What `work` gives, or `None` if it panics, of which nothing is heard. Only for code of others that panics where it should refuse
/// what a file holds.
pub fn quietly<T>(work: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                usual(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    // What it was at is dropped with it: nothing half done is seen again.
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    QUIET.set(before);
    done.ok()
}

/// Writes something as JSON; an error names the file.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value).map_err(|e| Error::file(path, e))?;
    text.push('\n');
    write_beside(path, text.as_bytes())
}

/// Writes a file beside its place and renames it there, as [`Beside`] does.
pub fn write_beside(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut beside = Beside::create(path)?;
    std::io::Write::write_all(beside.file(), bytes).map_err(|source| Error::io(path, source))?;
    beside.finish()
}

/// Refuses a place that [`write_beside`] could not write to, before anything slow is done for it: a folder, a device, a folder that is
/// missing or in which nothing can be made.
pub fn expect_writable(path: &Path) -> Result<()> {
    // Dropped at once, which removes it.
    Beside::create(path).map(drop)
}

/// Makes a folder, and those above it, where it is not there. A file in its place is an error.
pub fn make_folder(path: &Path) -> Result<()> {
    if path.exists() && !path.is_dir() {
        return Err(Error::file(path, "expected a folder to write, got a file"));
    }
    std::fs::create_dir_all(path).map_err(|source| Error::io(path, source))
}

/// BLAKE3 of some bytes, in hexadecimal digits.
pub fn fingerprint(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_string()
}

/// A file that is being written beside its place. It is put there by [`Beside::finish`]; dropped before, it leaves nothing behind.
pub struct Beside {
    /// As it was named, for errors.
    name: PathBuf,
    place: PathBuf,
    beside: PathBuf,
    file: File,
    finished: bool,
}

impl Beside {
    /// Begins a file. Where a link is, what it leads to is replaced and not the link; a folder, a device and anything else that is no file is
    /// refused and left alone. Who may read and write the file stays as it was.
    pub fn create(path: &Path) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let io = |source| Error::io(path, source);
        let place = place(path)?;
        let (beside, file) = loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            // Of its own name only: one made of the place's could be too long where that is not.
            let beside = place.with_file_name(format!(".armt-{}-{number}.partial", std::process::id()));
            // Containers that share a folder have processes of one number: a file that is there may be another's.
            match File::create_new(&beside) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                created => break (beside, created.map_err(io)?),
            }
        };
        let begun = Beside { name: path.into(), place, beside, file, finished: false };
        if let Ok(old) = std::fs::metadata(&begun.place) {
            begun.file.set_permissions(old.permissions()).map_err(io)?;
        }
        Ok(begun)
    }

    /// What is being written.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Puts the file into its place.
    pub fn finish(mut self) -> Result<()> {
        std::fs::rename(&self.beside, &self.place).map_err(|source| Error::io(&self.name, source))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.finished {
            let _ = std::fs::remove_file(&self.beside);
        }
    }
}

/// Where a file of this name is, or will be.
fn place(path: &Path) -> Result<PathBuf> {
    let io = |source| Error::io(path, source);
    let found = match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(path.into()),
        other => other.map_err(io)?,
    };
    let place = if found.is_symlink() { std::fs::canonicalize(path).map_err(io)? } else { path.into() };
    let kind = std::fs::metadata(&place).map_err(io)?;
    match (kind.is_file(), kind.is_dir()) {
        (true, _) => Ok(place),
        (_, true) => Err(Error::file(path, "expected the name of a file to write, got a folder")),
        _ => Err(Error::file(path, "expected the name of a file to write, got a device")),
    }
}

/// Keeps other processes that do the same away from the files of the folder that `path` is in, until it is dropped. `None` where the
/// system has no such locks.
pub fn lock_folder_of(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = File::open(folder).ok()?;
    file.lock().ok().map(|()| file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_beside(&path, b"one").unwrap();
        write_beside(&path, b"two").unwrap();
        expect_writable(&path).unwrap();
        drop(Beside::create(&path).unwrap());
        assert_eq!((std::fs::read(&path).unwrap(), names(dir.path())), (b"two".to_vec(), 1));
        let long = dir.path().join("n".repeat(250));
        write_beside(&long, b"three").unwrap();
        assert_eq!(std::fs::read(&long).unwrap(), b"three");
    }

    #[test]
    fn what_another_process_is_writing_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let ours = Beside::create(&path).unwrap();
        let number: u64 = ours.beside.to_str().unwrap().split(['-', '.']).rev().nth(1).unwrap().parse().unwrap();
        drop(ours);
        // As a process of the same number in another container names them; other tests of this process take numbers too.
        let theirs: Vec<PathBuf> =
            (1..100).map(|i| dir.path().join(format!(".armt-{}-{}.partial", std::process::id(), number + i))).collect();
        theirs.iter().for_each(|name| std::fs::write(name, b"theirs").unwrap());
        expect_writable(&path).unwrap();
        write_beside(&path, b"ours").unwrap();
        assert!(theirs.iter().all(|name| std::fs::read(name).unwrap() == b"theirs"));
        assert_eq!(std::fs::read(&path).unwrap(), b"ours");
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_only_its_owner_reads_stays_so_when_it_is_replaced() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.mem");
        write_beside(&path, b"one").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        write_beside(&path, b"two").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_place_that_cannot_be_written_to_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for (path, reason) in [
            (dir.path().to_path_buf(), "a folder"),
            (dir.path().join("missing/a.json"), "missing/a.json"),
            (dir.path().join("n".repeat(300)), "nnn"),
        ] {
            for error in [expect_writable(&path).unwrap_err(), write_beside(&path, b"x").unwrap_err()] {
                assert!(error.to_string().contains(reason), "{error}");
            }
        }
        assert_eq!(names(dir.path()), 0);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_one_and_a_device_stays_a_device() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (file, link, device) = (dir.path().join("file"), dir.path().join("link"), dir.path().join("device"));
        std::fs::write(&file, "old").unwrap();
        symlink(&file, &link).unwrap();
        write_beside(&link, b"new").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
        symlink("/dev/null", &device).unwrap();
        for path in [&device, Path::new("/dev/null")] {
            assert!(write_beside(path, b"x").unwrap_err().to_string().contains("a device"));
        }
        assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        // A link to nothing leads nowhere that was meant.
        symlink(dir.path().join("nothing"), dir.path().join("dangling")).unwrap();
        assert!(write_beside(&dir.path().join("dangling"), b"x").is_err());
    }
}
