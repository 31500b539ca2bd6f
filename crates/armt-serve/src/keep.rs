//! Memories in a folder, so that a server that ends, however it ends, has them again.
//!
//! One file a memory, `ID.memory`: 8 bytes with the length of a JSON text, that text (whose the memory is, its name, how much text it has
//! taken), the memory file, and the BLAKE3 of all before. It is written beside its place and renamed, so that a reader meets a whole one.

use std::collections::VecDeque;
use std::fs::{File, TryLockError};
use std::io::{Error, Result, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use armt::Session;
use serde::{Deserialize, Serialize};

use crate::keys::Client;
use crate::memory::{Memory, Now, lock};
use crate::refusal::{Refusal, Reply};

const ENDING: &str = "memory";

#[derive(Serialize, Deserialize)]
struct Header {
    client: String,
    name: Option<String>,
    created: u64,
    stays: Option<u64>,
    text_bytes: u64,
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
    ending: bool,
}

impl Keeper {
    /// A folder, which is made if there is none, for at most so many bytes. One that another server has is refused.
    pub fn open(folder: &Path, most: u64) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        // Held as long as the server runs. It also shows that the folder can be written.
        let alone = File::create(folder.join(".lock"))?;
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
        keeper.used.store(keeper.bytes()?, Ordering::SeqCst);
        Ok(keeper)
    }

    fn bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for entry in std::fs::read_dir(&self.folder)? {
            bytes += entry?.metadata()?.len();
        }
        Ok(bytes)
    }

    /// The memories in the folder, for a model's sessions. Files that are none, damaged, or of another model are named to `refused` and stay
    /// as they are.
    pub fn load(&self, empty: &Session, refused: &mut dyn FnMut(&Path, String)) -> Result<Vec<Arc<Memory>>> {
        let mut memories = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let id = path.file_stem().and_then(|id| id.to_str()).map(String::from);
            let Some(id) = id.filter(|_| path.extension().is_some_and(|ending| ending == ENDING)) else { continue };
            match std::fs::read(&path).map_err(|e| e.to_string()).and_then(|bytes| parse(id, &bytes, empty)) {
                Ok(memory) => memories.push(memory),
                Err(why) => refused(&path, why),
            }
        }
        Ok(memories)
    }

    /// Has a memory written as it is when its turn comes.
    pub fn keep(&self, memory: &Arc<Memory>) {
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
        self.folder.join(&memory.id).with_extension(ENDING)
    }

    /// Writes what is to be kept until [`Keeper::end`]: the work of a thread.
    pub fn run(&self) {
        loop {
            let memory = {
                let mut waiting = lock(&self.waiting);
                loop {
                    if let Some(memory) = waiting.memories.pop_front() {
                        break memory;
                    }
                    if waiting.ending {
                        return;
                    }
                    waiting = self.changed.wait(waiting).unwrap_or_else(std::sync::PoisonError::into_inner);
                }
            };
            if let Err(error) = self.write(&memory) {
                tracing::error!("{}: {error}", self.path(&memory).display());
                // A disk that is full now may have room later; nothing is lost meanwhile but what a crash would take.
                std::thread::sleep(Duration::from_millis(200));
                if !lock(&self.waiting).ending {
                    self.keep(&memory);
                }
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
            return Ok(());
        }
        let Now { session, text_bytes, version, .. } = memory.now();
        let header = Header {
            client: memory.client.to_text(),
            name: memory.name.clone(),
            created: memory.created,
            stays: memory.stays.map(|stays| stays.as_secs()),
            text_bytes,
        };
        let header = serde_json::to_vec(&header)?;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(session.to_bytes().map_err(Error::other)?);
        let sum = blake3::hash(&bytes);
        bytes.extend(sum.as_bytes());
        let path = self.path(memory);
        let before = std::fs::metadata(&path).map_or(0, |m| m.len());
        let beside = path.with_extension("new");
        let mut file = std::fs::File::create(&beside)?;
        file.write_all(&bytes)?;
        file.sync_data()?;
        std::fs::rename(&beside, &path)?;
        self.used.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        self.used.fetch_sub(before.min(self.used.load(Ordering::SeqCst)), Ordering::SeqCst);
        if memory.is_deleted() {
            self.forget(memory);
        }
        memory.kept.send_replace(version);
        Ok(())
    }
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
    let memory = Memory::known(id, client, header.name, header.created, stays, Arc::new(session), header.text_bytes);
    memory.kept.send_replace(1);
    Ok(memory)
}
