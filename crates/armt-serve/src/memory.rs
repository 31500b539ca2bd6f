//! Memories as a server has them: who made them, what they have read, and how they changed on the way.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use armt::Session;
use armt::engine::{Tensor, ops};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::keys::Client;
use crate::refusal::{Refusal, Reply};

/// Points of a memory's change that are kept for the page.
const POINTS: usize = 512;
/// `Idempotency-Key`s that a memory knows.
const KEYS: usize = 32;

/// A lock whose holder never leaves anything half done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One memory.
pub struct Memory {
    /// What clients name it by. Cannot be guessed.
    pub id: String,
    /// Whose it is.
    pub client: Client,
    /// What its maker calls it.
    pub name: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// How long it stays when nobody uses it.
    pub stays: Option<Duration>,
    used: Mutex<Instant>,
    /// Requests that are about it.
    users: AtomicUsize,
    now: Mutex<Now>,
    /// A text is on its way into it.
    reading: AtomicBool,
    deleted: AtomicBool,
    version: AtomicU64,
    /// What is in its file, where memories are kept.
    pub kept: watch::Sender<Kept>,
    texts: Mutex<VecDeque<KeyedText>>,
}

/// What is in the file of a memory.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// The memory's version there.
    pub version: u64,
    /// Why the last try to write it failed, if it did.
    pub failed: Option<String>,
}

/// A text that came with an `Idempotency-Key`.
#[derive(Clone, Serialize, Deserialize)]
pub struct KeyedText {
    key: String,
    /// Bytes of text that the memory had before it.
    from: u64,
    /// What its sender was told when all of it was read.
    answer: Option<Value>,
    /// Other text came after it had broken off.
    left: bool,
}

/// What a memory knows of a text's `Idempotency-Key`.
pub enum Known {
    /// All of it was read, and this was the answer.
    Answered(Value),
    /// It began after so many bytes of text.
    From(u64),
}

/// What a memory is at a moment: all of it belongs together.
#[derive(Clone)]
pub struct Now {
    /// What was read.
    pub session: Arc<Session>,
    /// Bytes of text that were taken.
    pub text_bytes: u64,
    /// Which of the memory's moments this is.
    pub version: u64,
    /// How far each layer moved by each of the last readings.
    pub changes: Arc<VecDeque<Change>>,
    tokens_read: Arc<OnceLock<u64>>,
}

impl Now {
    /// Tokens that were read. They are counted when somebody asks: what is open of a text may be long, and reading must not wait for that
    /// after each of its shares.
    pub fn tokens_read(&self) -> Reply<u64> {
        if let Some(tokens) = self.tokens_read.get() {
            return Ok(*tokens);
        }
        let tokens = self.session.tokens_read()?;
        Ok(*self.tokens_read.get_or_init(|| tokens))
    }

    /// Tokens that were read whatever comes next: without those of the word that is open at the end.
    pub fn certain_tokens(&self) -> u64 {
        self.session.certain_tokens()
    }
}

/// How far a reading moved a memory.
#[derive(Clone, Debug)]
pub struct Change {
    /// Tokens that had been read after it.
    pub tokens: u64,
    /// Of each layer, the norm of the difference.
    pub layers: Vec<f32>,
}

/// Whose a memory is, and what its maker said of it.
pub struct Made {
    /// What clients name it by.
    pub id: String,
    /// Whose it is.
    pub client: Client,
    /// What its maker calls it.
    pub name: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// How long it stays when nobody uses it.
    pub stays: Option<Duration>,
}

impl Made {
    /// Now, with a name of its own.
    pub fn now(client: Client, name: Option<String>, stays: Option<Duration>) -> Reply<Self> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|_| Refusal::failure("the system gives no random numbers"))?;
        let id = format!("mem_{:032x}", u128::from_le_bytes(random));
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Made { id, client, name, created, stays })
    }
}

impl Memory {
    /// A memory of what a session has read, of so many bytes of text, with the texts that it knows by a key.
    pub fn new(made: Made, session: Arc<Session>, text_bytes: u64, texts: Vec<KeyedText>) -> Arc<Self> {
        let Made { id, client, name, created, stays } = made;
        let now = Now { session, text_bytes, version: 1, changes: Arc::default(), tokens_read: Arc::default() };
        Arc::new(Memory {
            id,
            client,
            name,
            created,
            stays,
            used: Mutex::new(Instant::now()),
            users: AtomicUsize::new(0),
            now: Mutex::new(now),
            reading: AtomicBool::new(false),
            deleted: AtomicBool::new(false),
            version: AtomicU64::new(1),
            kept: watch::Sender::default(),
            texts: Mutex::new(texts.into()),
        })
    }

    /// A memory that goes on from what another is, with how that got there.
    pub fn fork(made: Made, from: &Now) -> Arc<Self> {
        let memory = Self::new(made, from.session.clone(), from.text_bytes, Vec::new());
        lock(&memory.now).changes = from.changes.clone();
        memory
    }

    /// What it is now.
    pub fn now(&self) -> Now {
        lock(&self.now).clone()
    }

    /// Takes a session for what it is now, in place of all that it was.
    pub fn replace(&self, session: Session) {
        lock(&self.texts).clear();
        lock(&self.now).changes = Arc::default();
        self.put(session, 0, None);
    }

    /// Takes a session for what it is now, and how it got there.
    pub fn put(&self, session: Session, text_bytes: u64, change: Option<Change>) {
        let mut now = lock(&self.now);
        if let Some(change) = change {
            let changes = Arc::make_mut(&mut now.changes);
            changes.push_back(change);
            if changes.len() > POINTS {
                changes.pop_front();
            }
        }
        now.session = Arc::new(session);
        now.tokens_read = Arc::default();
        now.text_bytes = text_bytes;
        now.version = self.version.fetch_add(1, Ordering::SeqCst) + 1;
        *lock(&self.used) = Instant::now();
    }

    /// Whether nobody has used it for as long as it stays.
    pub fn is_over(&self) -> bool {
        let is_used = self.is_read_into() || self.users.load(Ordering::SeqCst) > 0;
        self.stays.is_some_and(|stays| !is_used && lock(&self.used).elapsed() > stays)
    }

    /// Whether a text is on its way into it.
    pub fn is_read_into(&self) -> bool {
        self.reading.load(Ordering::SeqCst)
    }

    /// Reserves it for a text or a file: one at a time.
    pub fn reserve(self: &Arc<Self>) -> Reply<Reserved> {
        if self.reading.swap(true, Ordering::SeqCst) {
            return Err(Refusal::conflict("another text is on its way into this memory"));
        }
        Ok(Reserved(self.clone()))
    }

    /// Whether it was deleted.
    pub fn is_deleted(&self) -> bool {
        self.deleted.load(Ordering::SeqCst)
    }

    /// What was answered to the text of a key, where all of it was read.
    pub fn answered(&self, key: &str) -> Option<Value> {
        lock(&self.texts).iter().find(|text| text.key == key).and_then(|text| text.answer.clone())
    }

    /// Begins a text, with its key where it has one, for whoever has reserved the memory. One whose key is known goes on where it broke off,
    /// unless other text has come since.
    pub fn begin_text(&self, key: Option<&str>, taken: u64) -> Reply<Known> {
        let mut texts = lock(&self.texts);
        match texts.iter().find(|text| Some(text.key.as_str()) == key) {
            Some(KeyedText { answer: Some(answer), .. }) => return Ok(Known::Answered(answer.clone())),
            Some(KeyedText { left: true, .. }) => {
                return Err(Refusal::conflict("the text of this Idempotency-Key broke off, and other text has come since"));
            }
            Some(KeyedText { from, .. }) => return Ok(Known::From(*from)),
            None => {}
        }
        texts.iter_mut().for_each(|text| text.left = text.answer.is_none());
        if let Some(key) = key {
            texts.push_back(KeyedText { key: key.into(), from: taken, answer: None, left: false });
            if texts.len() > KEYS {
                texts.pop_front();
            }
        }
        Ok(Known::From(taken))
    }

    /// Keeps what was answered to the text of a key, as part of what the memory is from now on. `None`: nothing after all.
    pub fn answer(&self, key: &str, answer: Option<Value>) {
        if let Some(text) = lock(&self.texts).iter_mut().find(|text| text.key == key) {
            text.answer = answer;
        }
        lock(&self.now).version = self.version.fetch_add(1, Ordering::SeqCst) + 1;
    }

    /// The texts that it knows by a key.
    pub fn keyed_texts(&self) -> Vec<KeyedText> {
        lock(&self.texts).iter().cloned().collect()
    }

    /// What clients are told of it.
    pub fn described(&self, model: &str) -> Reply<Value> {
        let now = self.now();
        let tokens_read = now.tokens_read()?;
        let Now { session, text_bytes, changes, .. } = now;
        let state = session.state();
        let norms = state.tensors().map(|(_, part)| norms(&squares(part)?)).collect::<Reply<Vec<Vec<f32>>>>()?;
        let changes: Vec<Value> = changes.iter().map(|c| json!({ "tokens": c.tokens, "layers": c.layers })).collect();
        Ok(json!({
            "id": self.id,
            "object": "memory",
            "name": self.name,
            "model": model,
            "fingerprint": session.owner().model,
            "created": self.created,
            "ttl": self.stays.map(|stays| stays.as_secs()),
            "tokens_read": tokens_read,
            "segments_read": state.segments_read(),
            "text_bytes": text_bytes,
            "bytes": state.bytes(),
            "reading": self.is_read_into(),
            "norms": norms,
            "changes": changes,
        }))
    }
}

/// A memory that a text or a file is on its way into.
pub struct Reserved(pub Arc<Memory>);

impl Drop for Reserved {
    fn drop(&mut self) {
        *lock(&self.0.used) = Instant::now();
        self.0.reading.store(false, Ordering::SeqCst);
    }
}

/// A memory that a request is about: until it is answered the memory stays.
pub struct InUse(Arc<Memory>);

impl Deref for InUse {
    type Target = Arc<Memory>;

    fn deref(&self) -> &Arc<Memory> {
        &self.0
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        *lock(&self.0.used) = Instant::now();
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The squares of a part of a state, summed for each place of its first axis: of the layers, where it has them. Only these leave the device.
fn squares(part: &Tensor) -> Reply<Tensor> {
    let rows = if part.dims().len() > 2 { part.dims()[0].max(1) } else { 1 };
    let of = || {
        let flat = ops::reshape(part, [rows, part.elements() / rows])?;
        ops::sum_axis(&ops::mul(&flat, &flat)?, 1)
    };
    Ok(of().map_err(armt::Error::from)?)
}

fn norms(squares: &Tensor) -> Reply<Vec<f32>> {
    let squares = squares.to_f32_vec().map_err(armt::Error::from)?;
    Ok(squares.into_iter().map(f32::sqrt).collect())
}

/// How far a reading moved a memory, while the device is still at it.
pub struct Moved {
    tokens: u64,
    /// Of the first part's layers, the memory's matrices.
    squares: Option<Tensor>,
}

impl Moved {
    /// Has the device look how far each layer is from what it was. A reading that left all it read open did not move it.
    pub fn begin(before: &Session, after: &Session) -> Reply<Self> {
        let part = |session: &Session| session.state().tensors().next().map(|(_, part)| part.clone());
        let tokens = after.state().tokens_read();
        let squares = match (part(before), part(after)) {
            _ if tokens == before.state().tokens_read() => None,
            (_, None) => None,
            (Some(old), Some(new)) if old.dims() == new.dims() => Some(squares(&ops::sub(&new, &old).map_err(armt::Error::from)?)?),
            (_, Some(new)) => Some(squares(&new)?),
        };
        Ok(Moved { tokens, squares })
    }

    /// Waits for what the device has found. `None`: nothing moved.
    pub fn finish(self) -> Reply<Option<Change>> {
        let change = |squares| Ok(Change { tokens: self.tokens, layers: norms(&squares)? });
        self.squares.map(change).transpose()
    }
}

/// All memories of a server.
#[derive(Default)]
pub struct Memories(Mutex<HashMap<String, Arc<Memory>>>);

impl Memories {
    /// Takes one in, if there are fewer than `most`.
    pub fn add(&self, memory: Arc<Memory>, most: usize) -> Reply<InUse> {
        let mut all = lock(&self.0);
        if all.len() >= most {
            return Err(Refusal::too_many("memories", most));
        }
        memory.users.fetch_add(1, Ordering::SeqCst);
        all.insert(memory.id.clone(), memory.clone());
        Ok(InUse(memory))
    }

    /// Takes those out that nobody has used for as long as they stay.
    pub fn remove_unused(&self) -> Vec<Arc<Memory>> {
        let mut all = lock(&self.0);
        let over: Vec<Arc<Memory>> = all.values().filter(|memory| memory.is_over()).cloned().collect();
        for memory in &over {
            all.remove(&memory.id);
            memory.deleted.store(true, Ordering::SeqCst);
        }
        over
    }

    /// A client's memory.
    pub fn get(&self, id: &str, client: Client) -> Reply<InUse> {
        let all = lock(&self.0);
        let memory = all.get(id).filter(|memory| memory.client == client).ok_or_else(|| Refusal::missing("memory"))?;
        memory.users.fetch_add(1, Ordering::SeqCst);
        Ok(InUse(memory.clone()))
    }

    /// A client's memories, the oldest first.
    pub fn of(&self, client: Client) -> Vec<Arc<Memory>> {
        let mut own: Vec<_> = lock(&self.0).values().filter(|memory| memory.client == client).cloned().collect();
        own.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        own
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Memory>> {
        lock(&self.0).values().cloned().collect()
    }

    /// Takes a client's memory out.
    pub fn remove(&self, id: &str, client: Client) -> Reply<Arc<Memory>> {
        let memory = self.get(id, client)?.clone();
        lock(&self.0).remove(id);
        memory.deleted.store(true, Ordering::SeqCst);
        Ok(memory)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        lock(&self.0).len()
    }
}
