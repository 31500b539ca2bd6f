//! Texts on their way into memories: those that have something to read are read side by side, a share of each at a time.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use armt::text::Source;
use armt::{Session, SideBySide};
use axum::body::Bytes;
use tokio::sync::{Notify, watch};

use crate::keep::Keeper;
use crate::memory::{Change, Memory, Now, Reserved, change, lock};
use crate::metrics::Metrics;
use crate::refusal::{Refusal, Reply};

/// Bytes of a text that wait to be read before its sender has to.
const WAITING: usize = 1 << 20;
/// How long a reading of shares should take: shares grow below it and shrink above. Between shares a GPU waits for tokens.
const AT_ONCE: [Duration; 2] = [Duration::from_millis(60), Duration::from_millis(200)];
const AT_ONCE_ON_GPU: [Duration; 2] = [Duration::from_millis(400), Duration::from_millis(1200)];
/// Segments of a group on a GPU. Texts side by side fill it with few, and what does not fill a group stays out of the memory.
const GROUP_ON_GPU: u64 = 16;

/// How far a text is.
#[derive(Clone, Debug, Default)]
pub struct TextProgress {
    /// Tokens that the memory has read.
    pub tokens: u64,
    /// Bytes of text that it has taken.
    pub text_bytes: u64,
    /// How far its layers moved by the last reading.
    pub change: Option<Change>,
    /// All that was sent is read.
    pub done: bool,
    /// Why it goes no further.
    pub failed: Option<String>,
}

/// A text on its way into a memory.
struct Text {
    memory: Arc<Memory>,
    /// Until it is read.
    reserved: Mutex<Option<Reserved>>,
    inbox: Mutex<Inbox>,
    /// Some of the inbox was taken.
    taken: Notify,
    progress: watch::Sender<TextProgress>,
}

#[derive(Default)]
struct Inbox {
    pieces: VecDeque<Bytes>,
    bytes: usize,
    ended: bool,
}

impl Inbox {
    /// Takes at most so many bytes.
    fn take(&mut self, most: usize) -> Vec<u8> {
        let mut taken = Vec::with_capacity(most.min(self.bytes));
        while let Some(piece) = self.pieces.front_mut() {
            let part = piece.split_to(piece.len().min(most - taken.len()));
            taken.extend_from_slice(&part);
            if piece.is_empty() {
                self.pieces.pop_front();
            }
            if taken.len() == most {
                break;
            }
        }
        self.bytes -= taken.len();
        taken
    }
}

/// The sender's end of a text. What was sent when it is dropped is read.
pub struct Sending {
    text: Arc<Text>,
    readings: Arc<Readings>,
}

impl Sending {
    /// Sends a piece, as soon as those before it are nearly read. Where reading has failed, it says why.
    pub async fn send(&self, piece: Bytes) -> Reply<()> {
        loop {
            let taken = self.text.taken.notified();
            if let Some(why) = &self.text.progress.borrow().failed {
                return Err(Refusal::failure(why.clone()));
            }
            {
                let mut inbox = lock(&self.text.inbox);
                if inbox.bytes < WAITING {
                    inbox.bytes += piece.len();
                    inbox.pieces.push_back(piece);
                    break;
                }
            }
            taken.await;
        }
        self.readings.wake();
        Ok(())
    }

    /// Nothing more comes.
    pub fn end(&self) {
        lock(&self.text.inbox).ended = true;
        self.readings.wake();
    }

    /// How far it is, from now on.
    pub fn progress(&self) -> watch::Receiver<TextProgress> {
        self.text.progress.subscribe()
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.end();
    }
}

/// All texts on their way.
pub struct Readings {
    texts: Mutex<VecDeque<Arc<Text>>>,
    changed: Condvar,
    ending: AtomicBool,
    /// Texts read side by side.
    side_by_side: usize,
    /// Texts on their way at a time.
    most: usize,
    keeper: Option<Arc<Keeper>>,
    metrics: Arc<Metrics>,
}

impl Readings {
    /// None yet.
    pub fn new(side_by_side: usize, most: usize, keeper: Option<Arc<Keeper>>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Readings {
            texts: Mutex::default(),
            changed: Condvar::new(),
            ending: AtomicBool::new(false),
            side_by_side: side_by_side.max(1),
            most,
            keeper,
            metrics,
        })
    }

    /// Begins a text into a memory. One at a time for each.
    pub fn begin(self: &Arc<Self>, memory: &Arc<Memory>) -> Reply<Sending> {
        let reserved = memory.reserve()?;
        let mut texts = lock(&self.texts);
        if texts.len() >= self.most {
            return Err(Refusal::too_many("texts on their way", self.most));
        }
        if self.ending.load(Ordering::SeqCst) {
            return Err(Refusal::unavailable("the server is about to end"));
        }
        let Now { session, text_bytes, .. } = memory.now();
        let progress = TextProgress { tokens: session.tokens_read()?, text_bytes, ..TextProgress::default() };
        let progress = watch::Sender::new(progress);
        let reserved = Mutex::new(Some(reserved));
        let text = Arc::new(Text { memory: memory.clone(), reserved, inbox: Mutex::default(), taken: Notify::new(), progress });
        texts.push_back(text.clone());
        Ok(Sending { text, readings: self.clone() })
    }

    /// Texts on their way.
    pub fn count(&self) -> usize {
        lock(&self.texts).len()
    }

    fn wake(&self) {
        // Under the lock, so that who is about to wait hears it.
        drop(lock(&self.texts));
        self.changed.notify_one();
    }

    /// Has [`Readings::run`] end when all that was sent is read.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Reads until [`Readings::end`]: the work of a thread.
    pub fn run(&self) {
        let (mut share, mut reader) = (16 << 10, None);
        while let Some(texts) = self.next() {
            let start = Instant::now();
            let full = self.read(&mut reader, &texts, share);
            let time = start.elapsed();
            Metrics::add_time(&self.metrics.reading, time);
            let on_gpu = texts.first().is_some_and(|text| text.memory.now().session.model().device().is_cuda());
            let at_once = if on_gpu { AT_ONCE_ON_GPU } else { AT_ONCE };
            if time > at_once[1] {
                share = (share / 2).max(4 << 10);
            } else if time < at_once[0] && full {
                share = (share * 2).min(WAITING);
            }
        }
    }

    /// The texts to read next, or to end; waits for some. `None` at the very end.
    fn next(&self) -> Option<Vec<Arc<Text>>> {
        let mut texts = lock(&self.texts);
        loop {
            let ready: Vec<Arc<Text>> = texts
                .iter()
                .filter(|text| {
                    let inbox = lock(&text.inbox);
                    inbox.bytes > 0 || inbox.ended
                })
                .take(self.side_by_side)
                .cloned()
                .collect();
            if !ready.is_empty() {
                // Those that were read come last next time.
                texts.retain(|text| !ready.iter().any(|other| Arc::ptr_eq(text, other)));
                texts.extend(ready.iter().cloned());
                return Some(ready);
            }
            if self.ending.load(Ordering::SeqCst) {
                return None;
            }
            texts = self.changed.wait(texts).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads a share of each text, and ends those that are at their end. Whether some have more.
    fn read(&self, reader: &mut Option<SideBySide>, texts: &[Arc<Text>], share: usize) -> bool {
        let mut full = false;
        let mut parts = Vec::new();
        for text in texts {
            let mut inbox = lock(&text.inbox);
            let bytes = inbox.take(share);
            full |= inbox.bytes > 0;
            let at_end = inbox.ended && inbox.bytes == 0;
            drop(inbox);
            text.taken.notify_waiters();
            parts.push((text, bytes, at_end));
        }
        let (some, none): (Vec<_>, Vec<_>) = parts.into_iter().partition(|(_, bytes, _)| !bytes.is_empty());
        none.into_iter().for_each(|(text, _, _)| self.finish(text, None));
        let shares: Vec<(&Arc<Text>, &[u8])> = some.iter().map(|(text, bytes, _)| (*text, bytes.as_slice())).collect();
        let results = read_side_by_side(reader, &shares);
        for ((text, bytes, at_end), result) in some.into_iter().zip(results) {
            let put = result.and_then(|(session, change)| self.put(text, session, bytes.len() as u64, change));
            match put {
                Ok(()) if at_end => self.finish(text, None),
                Ok(()) => {}
                Err(why) => self.finish(text, Some(why)),
            }
        }
        full
    }

    fn put(&self, text: &Text, session: Session, bytes: u64, change: Change) -> Result<(), String> {
        let memory = &text.memory;
        let before = memory.now();
        let tokens = session.tokens_read().map_err(|e| e.to_string())?;
        let read = session.state().tokens_read() - before.session.state().tokens_read();
        Metrics::add(&self.metrics.tokens, read);
        Metrics::add(&self.metrics.bytes, bytes);
        let text_bytes = before.text_bytes + bytes;
        // What did not move it is no point of its change.
        memory.put(session, text_bytes, (read > 0).then(|| change.clone()));
        if let Some(keeper) = &self.keeper {
            keeper.keep(memory);
        }
        text.progress.send_modify(|progress| {
            *progress = TextProgress { tokens, text_bytes, change: Some(change), done: false, failed: None };
        });
        Ok(())
    }

    fn finish(&self, text: &Arc<Text>, failed: Option<String>) {
        lock(&self.texts).retain(|other| !Arc::ptr_eq(text, other));
        // Before its sender hears of it, who may have more at once.
        drop(lock(&text.reserved).take());
        text.progress.send_modify(|progress| (progress.done, progress.failed) = (failed.is_none(), failed));
        text.taken.notify_waiters();
    }
}

/// Texts whose reading fails together are read alone: what is wrong with one is not the others' fault.
fn read_side_by_side(reader: &mut Option<SideBySide>, parts: &[(&Arc<Text>, &[u8])]) -> Vec<Result<(Session, Change), String>> {
    let before: Vec<Arc<Session>> = parts.iter().map(|(text, _)| text.memory.now().session).collect();
    let mut after: Vec<Session> = before.iter().map(|session| session.fork()).collect();
    let source = |(_, bytes): &(_, &[u8])| Source::reader("the text".as_ref(), std::io::Cursor::new(bytes.to_vec()));
    let of = |before: &Session, after: Session| match change(before, &after) {
        Ok(change) => Ok((after, change)),
        Err(refusal) => Err(refusal.to_string()),
    };
    match read_all(reader, &mut after, parts.iter().map(source).collect()) {
        Ok(()) => before.iter().zip(after).map(|(before, after)| of(before, after)).collect(),
        Err(error) if parts.len() == 1 => vec![Err(error.to_string())],
        Err(_) => parts.iter().flat_map(|part| read_side_by_side(reader, std::slice::from_ref(part))).collect(),
    }
}

/// Reads with the reader that there is, or the first.
fn read_all(reader: &mut Option<SideBySide>, sessions: &mut [Session], texts: Vec<Source>) -> armt::Result<()> {
    let Some(session) = sessions.first() else { return Ok(()) };
    let reader = match reader {
        Some(reader) => reader,
        none => {
            let new = SideBySide::new(session)?;
            none.insert(if session.model().device().is_cuda() { new.in_groups_of(GROUP_ON_GPU) } else { new })
        }
    };
    reader.read(sessions, texts, &mut |_| ControlFlow::Continue(())).map(|_| ())
}
