//! The folder of a run.
//!
//! ```text
//! log.jsonl                 one JSON object a line
//! events.out.tfevents.*     the same for TensorBoard
//! last/                     config.json, model.safetensors, optimizer.safetensors, state.json, recipe.json; memory.safetensors where texts go on
//!                           from one
//! best/                     config.json, model.safetensors
//! adapter/                  of the best model, where only an adapter is trained: adapter_config.json, adapter_model.safetensors
//! ```
//!
//! Of an adapter that is trained `last/` has these files too, and base.safetensors: the base's values of the matrices that it changes.
//!
//! A checkpoint is replaced as a whole: written to `last.new`, brought to the disk, then `last` is renamed to `last.old`, `last.new` to
//! `last`, and `last.old` is removed. `last.old` without `last` can only be a stop between the two renames, when `last.new` is
//! complete; in any other case `last.new` may be half of one, and is dropped. [`RunFolder::open`] puts it right.
//!
//! While a [`RunFolder`] lives it holds a lock on `log.jsonl`, so that two processes do not write to one run.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::State;
use armt::adapter::{self, AdapterTraining};
use armt::engine::DType;
use armt::engine::optim::AdamW;
use armt::files::{read_json, write_beside, write_json};
use armt::model::Model;
use armt::text::Tokenizer;
use safetensors::SafeTensors;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, Result};

const LOG: &str = "log.jsonl";
const LAST: &str = "last";
const BEST: &str = "best";
const ADAPTER: &str = "adapter";
const MEMORY: &str = "memory.safetensors";
const RECIPE: &str = "recipe.json";
const WEIGHTS: &str = "model.safetensors";
const BASE: &str = "base.safetensors";
/// What a checkpoint may hold.
const FILES: [&str; 11] = [
    "config.json",
    WEIGHTS,
    adapter::CONFIG,
    adapter::TENSORS,
    BASE,
    "optimizer.safetensors",
    "state.json",
    MEMORY,
    RECIPE,
    "tokenizer.json",
    "vocabulary.json",
];

/// A run's folder, open for writing.
pub struct RunFolder {
    path: PathBuf,
    /// None where the folder is only read.
    log: Option<File>,
    tokenizer: Option<Arc<Tokenizer>>,
    recipe: Option<BTreeMap<String, String>>,
    adapter: Option<Arc<AdapterTraining>>,
}

impl std::fmt::Debug for RunFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunFolder").field("path", &self.path).finish_non_exhaustive()
    }
}

impl RunFolder {
    /// The folder of a new run, made where it is missing. A folder that already holds a run is refused, and stays as it is; one of a run
    /// that ended before its first checkpoint, killed or because something that it needs was missing, is none.
    pub fn create(path: &Path) -> Result<Self> {
        let held = |name: &str| {
            Error::file(
                path,
                format!("expected a folder without a run, but it holds {name}; resume that run or name another folder"),
            )
        };
        // `last.new` alone is half of the first checkpoint: nothing was learned before it.
        let later = [BEST, ADAPTER].into_iter().flat_map(|name| [name.to_string(), new(name), old(name)]);
        if let Some(found) = [LAST.to_string(), old(LAST)].into_iter().chain(later).find(|n| path.join(n).exists()) {
            return Err(held(&found));
        }
        armt::files::make_folder(path)?;
        let file = path.join(LOG);
        let log = OpenOptions::new().append(true).create(true).open(&file).map_err(io(&file))?;
        lock(&log, path)?;
        if log.metadata().map_err(io(&file))?.len() > 0 {
            return Err(held(LOG));
        }
        remove(&path.join(new(LAST)))?;
        Ok(RunFolder { path: path.into(), log: Some(log), tokenizer: None, recipe: None, adapter: None })
    }

    /// The folder of a run to go on with, its checkpoints whole after whatever ended it. An error if there is no run, if it has no
    /// checkpoint yet, or if another process is at it.
    pub fn open(path: &Path) -> Result<Self> {
        let kept = [LOG.to_string(), LAST.into(), old(LAST)];
        if !kept.iter().any(|n| path.join(n).exists()) {
            return Err(Error::file(path, "expected the folder of a run, but it holds none"));
        }
        let log = open_log(path)?;
        settle(path, LAST)?;
        settle(path, BEST)?;
        settle(path, ADAPTER)?;
        if !path.join(LAST).is_dir() {
            return Err(Error::file(
                path,
                "expected a checkpoint to go on from, but the run ended before its first: begin it anew",
            ));
        }
        Ok(RunFolder { path: path.into(), log: Some(log), tokenizer: None, recipe: None, adapter: None })
    }

    /// The folder of a run that another process writes: whatever would be written here is not.
    pub fn watch(path: &Path) -> Self {
        RunFolder { path: path.into(), log: None, tokenizer: None, recipe: None, adapter: None }
    }

    /// Whether what is to be written is written.
    pub fn writes(&self) -> bool {
        self.log.is_some()
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the latest checkpoint is, or will be.
    pub fn last_folder(&self) -> PathBuf {
        self.path.join(LAST)
    }

    /// Where the best model is, or will be.
    pub fn best_folder(&self) -> PathBuf {
        self.path.join(BEST)
    }

    /// Where the best model's adapter is, or will be, where only an adapter is trained.
    pub fn adapter_folder(&self) -> PathBuf {
        self.path.join(ADAPTER)
    }

    /// Appends a line to the log. It is in the file when this returns.
    pub fn log(&mut self, record: &Value) -> Result<()> {
        // One write, so that a crash leaves a whole line or a tail that `open` cuts off.
        let Some(log) = &mut self.log else { return Ok(()) };
        log.write_all(format!("{record}\n").as_bytes()).map_err(io(&self.path.join(LOG)))
    }

    /// Drops the lines whose `step` is greater than `step`: those that a run resumed there will write again. A line that is not JSON is
    /// an error by its number, and the log stays as it is.
    pub fn truncate_log(&mut self, step: u64) -> Result<()> {
        self.drop_from_log(|line| line.get("step").and_then(Value::as_u64).is_some_and(|s| s > step))
    }

    /// Drops lines of the log. A line that is not JSON is an error by its number, and the log stays as it is.
    pub fn drop_from_log(&mut self, drop: impl Fn(&Value) -> bool) -> Result<()> {
        if !self.writes() {
            return Ok(());
        }
        let path = self.path.join(LOG);
        let text = std::fs::read_to_string(&path).map_err(io(&path))?;
        let mut kept = String::with_capacity(text.len());
        for (i, line) in text.lines().enumerate() {
            let record: Value = serde_json::from_str(line)
                .map_err(|e| Error::file(&path, format!("line {}: expected a JSON object, got {line:.60}: {e}", i + 1)))?;
            if !drop(&record) {
                kept.push_str(line);
                kept.push('\n');
            }
        }
        if kept != text {
            write_beside(&path, kept.as_bytes())?;
            self.log = Some(open_log(&self.path)?);
        }
        Ok(())
    }

    /// Replaces the latest checkpoint: model in f32, optimizer, the memory that texts go on from, and whatever else the run needs to go
    /// on. If it fails, or the process dies in it, the one before stays. Numbers that are not finite are refused, as loading would refuse
    /// them.
    pub fn save_last(&self, model: &Model, optimizer: &AdamW, memory: Option<&State>, state: &impl Serialize) -> Result<()> {
        self.replace(LAST, WEIGHTS, |folder| {
            self.save_model(model, folder)?;
            if let Some(adapter) = &self.adapter {
                adapter.save(model, folder)?;
                adapter.save_base(model, &folder.join(BASE))?;
            }
            let path = folder.join("optimizer.safetensors");
            optimizer.save(&path)?;
            expect_finite(&path)?;
            memory.map_or(Ok(()), |memory| model.save_state(memory, &folder.join(MEMORY)))?;
            self.recipe.as_ref().map_or(Ok(()), |recipe| write_json(&folder.join(RECIPE), recipe))?;
            let path = folder.join("state.json");
            let text = serde_json::to_string_pretty(state).map_err(|e| Error::file(&path, e))?;
            Ok(write_beside(&path, text.as_bytes())?)
        })
    }

    /// Replaces the best model, in f32, and its adapter where one is trained, as [`RunFolder::save_last`] does.
    pub fn save_best(&self, model: &Model) -> Result<()> {
        self.replace(BEST, WEIGHTS, |folder| self.save_model(model, folder))?;
        let Some(adapter) = &self.adapter else { return Ok(()) };
        self.replace(ADAPTER, adapter::TENSORS, |folder| Ok(adapter.save(model, folder)?))
    }

    /// From now on checkpoints have the adapter that is trained with them, or none.
    pub fn keep_adapter(&mut self, adapter: Option<&Arc<AdapterTraining>>) {
        self.adapter = adapter.cloned();
    }

    /// The adapter that the latest checkpoint was saved with, of `model`, with the checkpoint's weights; `None` if it has none.
    pub fn load_adapter(&self, model: &Model) -> Result<Option<AdapterTraining>> {
        let last = self.last_folder();
        let kept = last.join(adapter::CONFIG).exists();
        Ok(kept.then(|| AdapterTraining::load(&last, &last.join(BASE), model)).transpose()?)
    }

    /// From now on checkpoints have a tokenizer with them, or none.
    pub fn keep_tokenizer(&mut self, tokenizer: Option<&Arc<Tokenizer>>) {
        self.tokenizer = tokenizer.cloned();
    }

    /// From now on the latest checkpoint says what it was made by: the keys of a recipe and their values.
    pub fn keep_recipe(&mut self, recipe: BTreeMap<String, String>) {
        self.recipe = Some(recipe);
    }

    /// What the latest checkpoint was made by; `None` if it does not say.
    pub fn load_recipe(&self) -> Result<Option<BTreeMap<String, String>>> {
        let path = self.last_folder().join(RECIPE);
        Ok(path.exists().then(|| read_json(&path, "the keys of a recipe and their values")).transpose()?)
    }

    fn save_model(&self, model: &Model, folder: &Path) -> Result<()> {
        model.save(folder, DType::F32)?;
        Ok(self.tokenizer.as_ref().map_or(Ok(()), |tokenizer| tokenizer.save(folder))?)
    }

    /// The state that the latest checkpoint was saved with. A file that is cut short or holds something else is an error by name.
    pub fn load_state<T: DeserializeOwned>(&self) -> Result<T> {
        let path = self.last_folder().join("state.json");
        let bytes = std::fs::read(&path).map_err(io(&path))?;
        serde_json::from_slice(&bytes).map_err(|e| Error::file(&path, format!("expected the state of a run, got {e}")))
    }

    /// The memory that the latest checkpoint was saved with, if it has one: of `model`, with the checkpoint's weights.
    pub fn load_memory(&self, model: &Model) -> Result<Option<State>> {
        let path = self.last_folder().join(MEMORY);
        Ok(path.exists().then(|| model.load_state(&path)).transpose()?)
    }

    /// Replaces a folder as a whole, by one whose tensors in `weights` are finite.
    fn replace(&self, name: &str, weights: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        if !self.writes() {
            return Ok(());
        }
        settle(&self.path, name)?;
        let [place, new, old] = [name.into(), new(name), old(name)].map(|n: String| self.path.join(n));
        std::fs::create_dir(&new).map_err(io(&new))?;
        let written = write(&new).and_then(|()| expect_finite(&new.join(weights))).and_then(|()| sync(&new));
        if let Err(error) = written {
            let _ = std::fs::remove_dir_all(&new);
            return Err(error);
        }
        if place.exists() {
            rename(&place, &old)?;
        }
        rename(&new, &place)?;
        sync_folder(&self.path)?;
        remove(&old)
    }
}

fn new(name: &str) -> String {
    format!("{name}.new")
}

fn old(name: &str) -> String {
    format!("{name}.old")
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path, source }
}

/// Finishes or undoes a replacement that was cut short.
fn settle(path: &Path, name: &str) -> Result<()> {
    let [place, new, old] = [name.into(), new(name), old(name)].map(|n: String| path.join(n));
    if !place.exists() && old.exists() {
        rename(if new.exists() { &new } else { &old }, &place)?;
        sync_folder(path)?;
    }
    remove(&new)?;
    remove(&old)
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to).map_err(io(from))
}

/// Removes a folder that may not be there.
fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(io(folder)(e)),
        _ => Ok(()),
    }
}

/// Removes a run and its folder. A folder that holds anything that no run writes is refused, and stays as it is; so does a run that another
/// process is at.
pub fn remove_run(path: &Path) -> Result<()> {
    let foreign = |found: &Path| Error::file(found, "not removed: no run of training writes this");
    let checkpoints: Vec<String> = [LAST, BEST, ADAPTER].iter().flat_map(|name| [name.to_string(), new(name), old(name)]).collect();
    for entry in std::fs::read_dir(path).map_err(io(path))? {
        let entry = entry.map_err(io(path))?;
        let (found, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let folder = entry.file_type().map_err(io(&found))?.is_dir();
        if folder && checkpoints.contains(&name) {
            for inner in std::fs::read_dir(&found).map_err(io(&found))? {
                let inner = inner.map_err(io(&found))?;
                let own = inner.file_name().to_str().is_some_and(|n| FILES.contains(&n) || is_partial(n));
                if !own || inner.file_type().map_err(io(&found))?.is_dir() {
                    return Err(foreign(&inner.path()));
                }
            }
        } else if folder || !(name == LOG || name.starts_with("events.out.tfevents.") || is_partial(&name)) {
            return Err(foreign(&found));
        }
    }
    if path.join(LOG).exists() {
        lock(&File::open(path.join(LOG)).map_err(io(path))?, path)?;
    }
    remove(path)
}

/// Whether a file is one that a stop left half written.
fn is_partial(name: &str) -> bool {
    name.ends_with(".partial") || name.contains(".partial-")
}

/// How the model in a run's `best` or `last` folder was trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trained {
    /// Most pairs of a text, where the task has pairs.
    pub pairs: Option<usize>,
    /// Steps that the run made.
    pub steps: Option<usize>,
}

impl Trained {
    /// By the run's log; nothing for any other folder.
    pub fn of(model: &Path) -> Self {
        let log =
            model.canonicalize().ok().and_then(|path| std::fs::read_to_string(path.parent()?.join(LOG)).ok()).unwrap_or_default();
        let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let most = |key: &str| lines.iter().filter_map(|line| line.get(key)?.as_u64()).max().map(|n| n as usize);
        Trained { pairs: most("pairs"), steps: most("step") }
    }
}

/// Opens the log to append to, locked, without a last line that a crash left unfinished.
fn open_log(path: &Path) -> Result<File> {
    let file = path.join(LOG);
    let log = OpenOptions::new().append(true).create(true).open(&file).map_err(io(&file))?;
    lock(&log, path)?;
    let bytes = std::fs::read(&file).map_err(io(&file))?;
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    if whole < bytes.len() {
        log.set_len(whole as u64).map_err(io(&file))?;
    }
    Ok(log)
}

fn lock(log: &File, path: &Path) -> Result<()> {
    match log.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::file(path, "expected a run that has ended, but another process is at it")),
        // Some network file systems have no locks; a run there goes without.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Brings a folder's files to the disk, so that a rename does not get there before them.
fn sync(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(io(folder))? {
        let path = entry.map_err(io(folder))?.path();
        OpenOptions::new().write(true).open(&path).and_then(|f| f.sync_all()).map_err(io(&path))?;
    }
    sync_folder(folder)
}

/// Brings a folder's names to the disk, where the system can.
fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(unix) { File::open(folder).and_then(|f| f.sync_all()).map_err(io(folder)) } else { Ok(()) }
}

/// Refuses a file of tensors that holds a number that is not finite: loading would, and by then the checkpoint before is gone.
fn expect_finite(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path).map_err(io(path))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| Error::file(path, e))?;
    for (name, view) in file.iter() {
        let (words, _) = view.data().as_chunks::<4>();
        if let Some(bad) = words.iter().map(|b| f32::from_le_bytes(*b)).find(|x| !x.is_finite()) {
            return Err(Error::file(path, format!("not saved: expected finite numbers, but {name} holds {bad}")));
        }
    }
    Ok(())
}
