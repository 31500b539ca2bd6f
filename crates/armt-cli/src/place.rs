//! Files that commands write and go on from: whether there is a place for one, whether what lies there may be replaced, and whether a memory is
//! there.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};
use armt_lab::bench::growth::Figures;
use armt_lab::eval::{is_plot, qa, retrieval, text};

/// Bytes by which a file is known.
const HEAD: u64 = 4096;

/// What a command writes. A file of the same kind is replaced by it; any other is somebody's work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// What `armt eval --out` and `armt bench --json` write.
    Report(Report),
    /// What `armt report --out` draws.
    Plot,
    /// What `armt data babilong` writes.
    Samples,
    /// What `armt eval --task qa --answers` writes.
    Answers,
}

/// What a report is of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Report {
    Retrieval,
    Text,
    Qa,
    Speed,
}

impl Report {
    fn name(self) -> &'static str {
        match self {
            Report::Retrieval => "report of remember or rewrite",
            Report::Text => "report of text",
            Report::Qa => "report of qa",
            Report::Speed => "report of `armt bench`",
        }
    }

    fn is(self, path: &Path) -> bool {
        match self {
            Report::Retrieval => retrieval::Report::load(path).is_ok(),
            Report::Text => text::Report::load(path).is_ok(),
            Report::Qa => qa::Report::load(path).is_ok(),
            Report::Speed => Figures::load(path).is_ok(),
        }
    }
}

impl Written {
    fn name(self) -> &'static str {
        match self {
            Written::Report(kind) => kind.name(),
            Written::Plot => "SVG plot",
            Written::Samples => "file of samples",
            Written::Answers => "file of answers",
        }
    }

    /// Whether a file that begins so is of this kind, by how commands write it.
    fn is(self, path: &Path, head: &str) -> bool {
        match self {
            Written::Report(kind) => kind.is(path),
            Written::Plot => is_plot(head),
            Written::Samples => head.starts_with("{\"task\":\"qa") && head.contains(",\"length\":\""),
            Written::Answers => head.starts_with("{\"exact\":") && head.contains(",\"f1\":"),
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
    Ok(head.is_empty() || written.is(path, &String::from_utf8_lossy(&head)))
}
