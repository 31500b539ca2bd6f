//! `armt read --each`: many texts side by side, a memory file for each.
//!
//! Texts of like size go together, so that few wait for one. A text whose memory is there is not read again: a command that was stopped goes on
//! when it is given again.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use armt::Session;
use armt::reader::End;
use armt::text::Source;

use crate::progress::{Meter, thousands};

/// What is to be read, and where the memories go.
pub struct ReadEach<'a> {
    /// Texts, and folders of some.
    pub files: &'a [PathBuf],
    /// The folder of the memories.
    pub out: &'a Path,
    /// Texts side by side.
    pub batch: usize,
    /// Whether texts whose memory is there are read again.
    pub force: bool,
}

/// A text to be read.
struct Text {
    path: PathBuf,
    memory: PathBuf,
    bytes: u64,
}

impl ReadEach<'_> {
    /// The texts with the places of their memories: the name of each from the folder that was named, and `.mem`. Two with one name are refused.
    fn texts(&self) -> Result<Vec<Text>> {
        let mut found: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
        let out = self.out.canonicalize().ok();
        for named in self.files {
            let mut files = Vec::new();
            // The memories of an earlier call are no texts. Where they lie among the texts they are known by their names, below.
            let own = out.clone().filter(|out| named.canonicalize().is_ok_and(|named| named != *out));
            within(named, &mut own.into_iter().collect(), &mut files)?;
            for path in files {
                let name = if named.is_dir() { path.strip_prefix(named)? } else { Path::new(path.file_name().unwrap_or_default()) };
                let mut name = name.as_os_str().to_owned();
                name.push(OsString::from(".mem"));
                if let Some(other) = found.insert(self.out.join(&name), path.clone()) {
                    bail!(
                        "{} and {}: both would have the memory {}",
                        other.display(),
                        path.display(),
                        self.out.join(name).display()
                    );
                }
            }
        }
        let memories: HashSet<PathBuf> = found.keys().filter_map(|memory| memory.canonicalize().ok()).collect();
        found.retain(|_, path| !path.canonicalize().is_ok_and(|path| memories.contains(&path)));
        if found.is_empty() {
            bail!("expected at least one text, found none");
        }
        let text = |(memory, path): (PathBuf, PathBuf)| {
            let bytes = std::fs::metadata(&path).with_context(|| path.display().to_string())?.len();
            Ok(Text { path, memory, bytes })
        };
        found.into_iter().map(text).collect()
    }

    /// Reads all texts. What cannot be read is told and passed over, and fails the command at its end.
    pub fn run(&self, session: &Session, stop: &Arc<AtomicBool>) -> Result<ExitCode> {
        let mut texts = self.texts()?;
        let all = texts.len();
        if !self.force {
            texts.retain(|text| !text.memory.exists());
        }
        let before = all - texts.len();
        texts.sort_by_key(|text| text.bytes);
        let total: u64 = texts.iter().map(|text| text.bytes).sum();
        let (started, mut meter) = (Instant::now(), Meter::new(Some(total), 0));
        let (mut read, mut tokens, mut bytes, mut failed) = (0, 0, 0, Vec::new());
        let mut stopped = false;
        for batch in texts.chunks(self.batch) {
            meter.label(format!("{} of {all} texts, ", before + read));
            let mut sessions = vec![session.fork(); batch.len()];
            let sources = batch.iter().map(|text| Source::file(&text.path)).collect::<armt::Result<Vec<_>>>();
            let size: u64 = batch.iter().map(|text| text.bytes).sum();
            let end = sources.and_then(|sources| {
                Session::read_all_until(&mut sessions, sources, &mut |progress| {
                    meter.show(tokens + progress.tokens, bytes);
                    if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                })
            });
            match end {
                Ok(End::Finished) => {}
                Ok(End::Stopped) => stopped = true,
                // One of them is at fault: each by itself.
                Err(_) => {
                    for (session, text) in sessions.iter_mut().zip(batch) {
                        let alone = Source::file(&text.path)
                            .and_then(|source| Session::read_all(std::slice::from_mut(session), vec![source]));
                        failed.extend(alone.err().map(|error| (text.path.clone(), error)));
                    }
                }
            }
            if stopped || stop.load(Ordering::Relaxed) && end.is_err() {
                stopped = true;
                break;
            }
            for (session, text) in sessions.iter().zip(batch).filter(|(_, text)| failed.iter().all(|(path, _)| *path != text.path))
            {
                let folder = text.memory.parent().unwrap_or(self.out);
                armt::files::make_folder(folder)?;
                session.save(&text.memory)?;
                tokens += session.certain_tokens();
                read += 1;
            }
            bytes += size;
            meter.show(tokens, bytes);
        }
        meter.finish();
        let seconds = started.elapsed().as_secs_f64();
        let rate = thousands((tokens as f64 / seconds.max(1e-9)) as u64);
        let already = if before > 0 { format!(", {before} were read before") } else { String::new() };
        let stop = if stopped { "stopped: " } else { "" };
        crate::say(format_args!(
            "{stop}{read} of {all} texts read{already}; {} tokens in {seconds:.1} s, {rate} tokens/s; the memories are in {}",
            thousands(tokens),
            self.out.display()
        ))?;
        if stopped {
            crate::say(format_args!("the same command goes on"))?;
            return Ok(ExitCode::from(130));
        }
        match failed.as_slice() {
            [] => Ok(ExitCode::SUCCESS),
            failed => {
                failed.iter().for_each(|(_, error)| crate::note(format_args!("not read: {error}")));
                bail!("{} of {all} texts could not be read", failed.len())
            }
        }
    }
}

/// A file, or all files of a folder and of those in it. What begins with a point is hidden, and a folder that links lead to again is looked into
/// once.
fn within(path: &Path, seen: &mut HashSet<PathBuf>, found: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        found.push(path.into());
        return Ok(());
    }
    let named = || path.display().to_string();
    if !seen.insert(path.canonicalize().with_context(named)?) {
        return Ok(());
    }
    let entries = std::fs::read_dir(path).with_context(named)?.map(|entry| Ok(entry.with_context(named)?.path()));
    let mut entries = entries.collect::<Result<Vec<_>>>()?;
    // By which of several names something is known does not depend on the machine.
    entries.sort();
    for entry in entries {
        if !entry.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
            within(&entry, seen, found)?;
        }
    }
    Ok(())
}
