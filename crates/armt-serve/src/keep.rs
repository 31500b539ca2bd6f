//! Memories in a folder, so that a server that ends, however it ends, has them again.
//!
//! One file a memory, `ID.memory`: 8 bytes with the length of a JSON text, that text (whose the memory is, its name, how much text it has
//! taken), the memory file, and the BLAKE3 of all before. It is written beside its place and renamed, so that a reader meets a whole one. Nobody
//! but the server's user can read it: what is open of a text stands in it.

use std::collections::VecDeque;
use std::fs::{File, TryLockError};
use std::io::{Error, Result, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use armt::Session;
use serde::{Deserialize, Serialize};

use crate::keys::Client;
use crate::memory::{Kept, KeyedText, Made, Memory, Now, lock};
use crate::refusal::{Refusal, Reply};

const ENDING: &str = "memory";
/// What a file is called while it is written.
const BESIDE: &str = "new";
/// How long after a failure a memory is tried again: longer each time. A disk that is full now may have room later; nothing is lost
/// meanwhile but what a crash would take.
const AGAIN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

#[derive(Serialize, Deserialize)]
struct Header {
    client: String,
    name: Option<String>,
    created: u64,
    stays: Option<u64>,
    text_bytes: u64,
    #[serde(default)]
    texts: Vec<KeyedText>,
}

/// A folder of memories, and those that are to be written to it.
pub struct Keeper {
    folder: PathBuf,
    most: u64,
    used: AtomicU64,
    waiting: Mutex<Waiting>,
    changed: Condvar,
    /// Two servers would each write over what the other has kept.
    _alone: File,
}

#[derive(Default)]
struct Waiting {
    memories: VecDeque<Arc<Memory>>,
    late: Vec<Late>,
    ending: bool,
}

/// A memory that could not be written, and when it is tried again.
struct Late {
    memory: Arc<Memory>,
    at: Instant,
    after: Duration,
}

impl Waiting {
    /// The next to write now, or else how long the first of those that are late waits.
    fn next(&mut self) -> (Option<Arc<Memory>>, Option<Duration>) {
        let now = Instant::now();
        for late in self.late.iter().filter(|late| late.at <= now) {
            if !self.memories.iter().any(|other| Arc::ptr_eq(other, &late.memory)) {
                self.memories.push_back(late.memory.clone());
            }
        }
        // Until it is written, or fails again, it stays with its time.
        self.late.iter_mut().filter(|late| late.at <= now).for_each(|late| late.at = now + AGAIN[1]);
        let wait = self.late.iter().map(|late| late.at - now).min();
        (self.memories.pop_front(), wait)
    }
}

impl Keeper {
    /// A folder, which is made if there is none, for at most so many bytes. One that another server has is refused.
    pub fn open(folder: &Path, most: u64) -> Result<Self> {
        if folder.is_file() {
            return Err(Error::other("expected a folder, got a file"));
        }
        if !folder.is_dir() {
            private_folder(folder)?;
        }
        // Held as long as the server runs. It also shows that the folder can be written.
        let alone = private_file(&folder.join(".lock"))?;
        match alone.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(Error::other("another server keeps its memories here; end it, or name another folder"));
            }
            // Some network file systems have no locks; a server there goes without.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let keeper = Keeper {
            folder: folder.into(),
            most,
            used: AtomicU64::new(0),
            waiting: Mutex::default(),
            changed: Condvar::new(),
            _alone: alone,
        };
        keeper.tidy()?;
        Ok(keeper)
    }

    /// Counts the bytes of memories, and removes what a server that was killed had not written to its end.
    fn tidy(&self) -> Result<()> {
        let mut bytes = 0;
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let (path, metadata) = (entry.path(), entry.metadata()?);
            let ends_in = |ending: &str| metadata.is_file() && path.extension().is_some_and(|own| own == ending);
            if ends_in(BESIDE) {
                std::fs::remove_file(&path)?;
            } else if ends_in(ENDING) {
                bytes += metadata.len();
            }
        }
        self.used.store(bytes, Ordering::SeqCst);
        Ok(())
    }

    /// The memories in the folder, for a model's sessions. Files that are none, damaged, or of another model are named to `refused` and stay
    /// as they are.
    pub fn load(&self, empty: &Session, refused: &mut dyn FnMut(&Path, String)) -> Result<Vec<Arc<Memory>>> {
        let mut memories = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            // A pipe of that name would be waited for.
            if !path.is_file() {
                continue;
            }
            let id = path.file_stem().and_then(|id| id.to_str()).map(String::from);
            let Some(id) = id.filter(|_| path.extension().is_some_and(|ending| ending == ENDING)) else { continue };
            match std::fs::read(&path).map_err(|e| e.to_string()).and_then(|bytes| parse(id, &bytes, empty)) {
                Ok(memory) => memories.push(memory),
                Err(why) => refused(&path, why),
            }
        }
        Ok(memories)
    }

    /// Whether a memory's file is of what it is now.
    pub fn has(&self, memory: &Memory) -> bool {
        let kept = memory.kept.borrow();
        kept.version >= memory.now().version && kept.failed.is_none()
    }

    /// Has a memory written as it is when its turn comes. That it could not be written before is forgotten.
    pub fn keep(&self, memory: &Arc<Memory>) {
        memory.kept.send_if_modified(|kept| kept.failed.take().is_some());
        let mut waiting = lock(&self.waiting);
        if !waiting.memories.iter().any(|other| Arc::ptr_eq(other, memory)) {
            waiting.memories.push_back(memory.clone());
            self.changed.notify_one();
        }
    }

    /// Refuses more where the folder is full.
    pub fn expect_room(&self) -> Reply<()> {
        if self.used.load(Ordering::SeqCst) >= self.most {
            return Err(Refusal::unavailable(format!("the {} bytes for memories that are kept are full: delete some", self.most)));
        }
        Ok(())
    }

    /// Removes a memory's file.
    pub fn forget(&self, memory: &Memory) {
        let path = self.path(memory);
        let bytes = std::fs::metadata(&path).map_or(0, |m| m.len());
        if std::fs::remove_file(&path).is_ok() {
            self.used.fetch_sub(bytes.min(self.used.load(Ordering::SeqCst)), Ordering::SeqCst);
        }
    }

    fn path(&self, memory: &Memory) -> PathBuf {
        self.folder.join(format!("{}.{ENDING}", memory.id))
    }

    /// Writes what is to be kept until [`Keeper::end`]: the work of a thread.
    pub fn run(&self) {
        loop {
            let memory = {
                let mut waiting = lock(&self.waiting);
                loop {
                    let (next, wait) = waiting.next();
                    if let Some(memory) = next {
                        break memory;
                    }
                    if waiting.ending {
                        return;
                    }
                    waiting = match wait {
                        Some(time) => self.changed.wait_timeout(waiting, time).unwrap_or_else(PoisonError::into_inner).0,
                        None => self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner),
                    };
                }
            };
            let written = self.write(&memory);
            let mut waiting = lock(&self.waiting);
            let before =
                waiting.late.iter().position(|late| Arc::ptr_eq(&late.memory, &memory)).map(|at| waiting.late.swap_remove(at));
            if let Err(error) = written {
                tracing::error!("{}: {error}", self.path(&memory).display());
                let after = before.map_or(AGAIN[0], |late| (2 * late.after).min(AGAIN[1]));
                waiting.late.push(Late { memory: memory.clone(), at: Instant::now() + after, after });
                memory.kept.send_modify(|kept| kept.failed = Some(error.to_string()));
            }
        }
    }

    /// Has [`Keeper::run`] end when all is written.
    pub fn end(&self) {
        lock(&self.waiting).ending = true;
        self.changed.notify_all();
    }

    fn write(&self, memory: &Memory) -> Result<()> {
        if memory.is_deleted() {
            // Who waits for it hears that.
            memory.kept.send_replace(Kept { version: u64::MAX, failed: None });
            return Ok(());
        }
        let Now { session, text_bytes, version, .. } = memory.now();
        let header = Header {
            client: memory.client.to_text(),
            name: memory.name.clone(),
            created: memory.created,
            stays: memory.stays.map(|stays| stays.as_secs()),
            text_bytes,
            texts: memory.keyed_texts(),
        };
        let header = serde_json::to_vec(&header)?;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(session.to_bytes().map_err(Error::other)?);
        let sum = blake3::hash(&bytes);
        bytes.extend(sum.as_bytes());
        let path = self.path(memory);
        let before = std::fs::metadata(&path).map_or(0, |m| m.len());
        let beside = path.with_extension(BESIDE);
        let written = || {
            let mut file = private_file(&beside)?;
            file.write_all(&bytes)?;
            file.sync_data()?;
            std::fs::rename(&beside, &path)
        };
        if let Err(error) = written() {
            // What there is of it takes room that others may need.
            let _ = std::fs::remove_file(&beside);
            return Err(error);
        }
        self.used.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        self.used.fetch_sub(before.min(self.used.load(Ordering::SeqCst)), Ordering::SeqCst);
        if memory.is_deleted() {
            self.forget(memory);
        }
        memory.kept.send_replace(Kept { version, failed: None });
        Ok(())
    }
}

fn private_folder(path: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

fn private_file(path: &Path) -> Result<File> {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.write(true).create(true).truncate(true).open(path)
}

fn parse(id: String, bytes: &[u8], empty: &Session) -> std::result::Result<Arc<Memory>, String> {
    let damaged = || "it is cut short or damaged".to_string();
    let (content, sum) = bytes.split_last_chunk::<32>().ok_or_else(damaged)?;
    if blake3::hash(content).as_bytes() != sum {
        return Err(damaged());
    }
    let (length, rest) = content.split_first_chunk::<8>().ok_or_else(damaged)?;
    let (header, state) = rest.split_at_checked(u64::from_le_bytes(*length) as usize).ok_or_else(damaged)?;
    let header: Header = serde_json::from_slice(header).map_err(|e| e.to_string())?;
    let client = Client::from_text(&header.client).ok_or_else(damaged)?;
    let mut session = empty.fork();
    session.from_bytes(state).map_err(|e| e.to_string())?;
    let stays = header.stays.map(Duration::from_secs);
    let made = Made { id, client, name: header.name, created: header.created, stays };
    let memory = Memory::new(made, Arc::new(session), header.text_bytes, header.texts);
    memory.kept.send_replace(Kept { version: 1, failed: None });
    Ok(memory)
}
