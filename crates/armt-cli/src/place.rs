//! Files that commands write and go on from: whether there is a place for one, whether what lies there may be replaced, and whether a memory is
//! there.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Bytes by which a file is known.
const HEAD: u64 = 4096;

/// What a command writes. A file of the same kind is replaced by it; any other is somebody's work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// What `armt eval --out` and `armt bench --json` write.
    Report,
    /// What `armt report --out` draws.
    Plot,
    /// What `armt data babilong` writes.
    Samples,
    /// What `armt eval --task qa --answers` writes.
    Answers,
}

impl Written {
    fn name(self) -> &'static str {
        match self {
            Written::Report => "report",
            Written::Plot => "SVG plot",
            Written::Samples => "file of samples",
            Written::Answers => "file of answers",
        }
    }

    /// Whether a file of this kind begins so.
    fn begins(self, head: &str) -> bool {
        match self {
            Written::Report => head.starts_with("{\n") && ["\"task\":", "\"machine\":"].iter().any(|key| head.contains(key)),
            Written::Plot => head.starts_with("<svg") || head.starts_with("<?xml"),
            Written::Samples => head.starts_with("{\"task\":"),
            Written::Answers => head.starts_with("{\"exact\":"),
        }
    }
}

/// Refuses a memory file that is not there.
pub fn expect_memory(file: &Path) -> Result<()> {
    match file {
        file if file.is_file() => Ok(()),
        file if file.is_dir() => bail!("{}: expected a memory file, got a folder", file.display()),
        file => bail!("{}: there is no such memory file; `armt read` makes one", file.display()),
    }
}

/// Refuses a file that could not be written before anything slow is done.
pub fn expect_place(out: &Path) -> Result<()> {
    match out.parent().filter(|p| !p.as_os_str().is_empty() && !p.is_dir()) {
        Some(folder) => bail!("{}: the folder {} does not exist", out.display(), folder.display()),
        None => Ok(armt::files::expect_writable(out)?),
    }
}

/// Refuses a place that could not be written, and one where a file of another kind lies. An empty file is nobody's work.
pub fn expect_place_for(written: Written, out: &Path) -> Result<()> {
    expect_place(out)?;
    if out.is_file() && !is(written, out)? {
        bail!(
            "{}: it exists already and is no {}, and would be lost; name another file, or remove it",
            out.display(),
            written.name()
        );
    }
    Ok(())
}

/// Whether a file is of a kind, or empty.
fn is(written: Written, path: &Path) -> Result<bool> {
    let mut head = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head));
    read.with_context(|| path.display().to_string())?;
    Ok(head.is_empty() || written.begins(&String::from_utf8_lossy(&head)))
}
