//! Texts on their way into memories: those that have something to read are read side by side, a share of each at a time.
//!
//! On the CPU a share is some text of each, which is tokenized and read by the same cores. A GPU must not wait for that: threads tokenize ahead
//! of it, those texts first that have the least to read, and a share is some whole groups of each (`turn`).

mod text;
mod turn;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use armt::text::{Tokenized, TokenizerThreads};
use armt::{Session, SideBySide};
use axum::body::Bytes;
use tokio::sync::{Notify, watch};

pub use self::text::TextProgress;
use self::text::{Inbox, Part, Text};
use self::turn::{Turn, Waits};
use crate::keep::Keeper;
use crate::limits::Limits;
use crate::memory::{Change, Memory, Moved, lock};
use crate::metrics::Metrics;
use crate::refusal::{Refusal, Reply};

/// How long a reading of shares should take: shares grow below it and shrink above. Between shares a GPU has less to do.
const AT_ONCE: [Duration; 2] = [Duration::from_millis(60), Duration::from_millis(200)];
const AT_ONCE_ON_GPU: [Duration; 2] = [Duration::from_millis(400), Duration::from_millis(1200)];
/// Bytes of a share on the CPU.
const SHARE: [usize; 2] = [4 << 10, text::WAITING];
/// Groups of a share on a GPU. Twice as many are tokenized ahead.
const MOST_GROUPS: usize = 8;
/// Segments of a group on a GPU. Texts side by side fill it with few, and what does not fill a group stays out of the memory.
const GROUP_ON_GPU: u64 = 16;
/// Bytes that are tokenized at a time, ahead of a GPU: few, so that all texts soon have something.
const PIECE: usize = 16 << 10;
/// How long a GPU waits for texts that are on their way.
const PATIENCE: Duration = Duration::from_millis(25);
/// Unused bytes that the buffers on the CPU may have, beside half as many as were in use at a time.
const SPARE: usize = 64 << 20;

/// The sender's end of a text. What was sent when it is dropped is read.
pub struct Sending {
    text: Arc<Text>,
    readings: Arc<Readings>,
}

impl Sending {
    /// Sends a piece, as soon as those before it are nearly read. Where reading has failed, it says why.
    pub async fn send(&self, mut piece: Bytes) -> Reply<()> {
        loop {
            if self.readings.ending.load(Ordering::SeqCst) {
                return Err(Refusal::unavailable("the server is about to end: what came is read"));
            }
            let taken = self.text.taken.notified();
            if let Some(why) = &self.text.progress.borrow().failed {
                return Err(why.clone());
            }
            match lock(&self.text.inbox).push(piece) {
                Ok(()) => break,
                Err(back) => piece = back,
            }
            taken.await;
        }
        self.readings.wake();
        Ok(())
    }

    /// Nothing more comes.
    pub fn end(&self) {
        lock(&self.text.inbox).end();
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

/// Reads what was tokenized of some texts into their sessions.
trait Device {
    fn read(&mut self, sessions: &mut [Session], texts: Vec<Tokenized>) -> armt::Result<()>;
}

/// The model's own, which is made ready by the first reading.
#[derive(Default)]
struct Own(Option<SideBySide>);

impl Device for Own {
    fn read(&mut self, sessions: &mut [Session], texts: Vec<Tokenized>) -> armt::Result<()> {
        let Some(session) = sessions.first() else { return Ok(()) };
        let reader = match &mut self.0 {
            Some(reader) => reader,
            none => {
                let new = SideBySide::new(session)?;
                none.insert(if session.model().device().is_cuda() { new.in_groups_of(GROUP_ON_GPU) } else { new })
            }
        };
        reader.read_tokenized(sessions, texts, &mut |_| ControlFlow::Continue(())).map(|_| ())
    }
}

/// All texts on their way.
pub struct Readings {
    texts: Mutex<VecDeque<Arc<Text>>>,
    /// There is something to read.
    changed: Condvar,
    /// There is something to tokenize ahead, and room for it.
    came: Condvar,
    ending: AtomicBool,
    /// A session that has read nothing.
    empty: Session,
    /// Tokens of a group, where texts are tokenized ahead of a device that reads whole groups.
    ahead: Option<usize>,
    /// Texts read side by side.
    side_by_side: usize,
    /// Texts on their way at a time.
    most: usize,
    keeper: Option<Arc<Keeper>>,
    metrics: Arc<Metrics>,
}

/// What is read at once: a part of each text, and whether it is the last.
type Share = Vec<(Arc<Text>, Part, bool)>;

/// Whose turn it is, and the tokens of each with those that are open in its memory, where texts are tokenized ahead.
struct Chosen {
    texts: Vec<Arc<Text>>,
    tokens: usize,
}

/// How reading went so far.
struct Pace {
    /// Bytes of a share; groups, where texts are tokenized ahead.
    share: usize,
    /// Whether texts had more than their share.
    full: bool,
    /// Texts that were ready for the last shares of whole groups: fewer count little by little.
    ready: usize,
    /// Since when some text has been ready for the next.
    waiting: Option<Instant>,
    /// When the last reading ended.
    ended: Instant,
    /// Since when the device has waited though text had come.
    idle: Option<Instant>,
}

impl Readings {
    /// None yet.
    pub fn new(empty: &Session, limits: &Limits, keeper: Option<Arc<Keeper>>, metrics: Arc<Metrics>) -> Arc<Self> {
        let group = GROUP_ON_GPU as usize * empty.model().config().segment_size;
        let ahead = empty.model().device().is_cuda().then_some(group);
        Arc::new(Self::with(empty, limits, keeper, metrics, ahead))
    }

    fn with(empty: &Session, limits: &Limits, keeper: Option<Arc<Keeper>>, metrics: Arc<Metrics>, ahead: Option<usize>) -> Self {
        Readings {
            texts: Mutex::default(),
            changed: Condvar::new(),
            came: Condvar::new(),
            ending: AtomicBool::new(false),
            empty: empty.fork(),
            ahead,
            side_by_side: limits.texts.max(1),
            most: limits.readings,
            keeper,
            metrics,
        }
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
        let now = memory.now();
        let inbox = Inbox::after(&now.session.state().tails()[0]);
        let text = Arc::new(Text {
            memory: memory.clone(),
            reserved: Mutex::new(Some(reserved)),
            inbox: Mutex::new(inbox),
            taken: Notify::new(),
            progress: watch::Sender::new(TextProgress { now, change: None, done: false, failed: None }),
        });
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
        self.came.notify_one();
    }

    /// Has [`Readings::run`] end when all that was sent is read.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.wake();
        self.came.notify_all();
    }

    /// Threads that tokenize ahead, beside the one that reads.
    pub fn tokenizers(&self) -> usize {
        self.ahead.map_or(0, |_| std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1))
    }

    /// Tokenizes ahead until [`Readings::end`]: the work of [`Readings::tokenizers`] threads.
    pub fn run_tokenizer(&self) {
        let Some(group) = self.ahead else { return };
        while let Some((text, open, bytes)) = self.next_to_tokenize(group) {
            text.taken.notify_waiters();
            let n = bytes.len();
            let tokenized = Tokenized::more(self.empty.tokenizer(), &open, bytes);
            lock(&text.inbox).tokenized(tokenized, n);
            self.wake();
        }
    }

    /// The text that has the fewest tokens, with the next of its bytes; waits for one. `None` at the very end.
    fn next_to_tokenize(&self, group: usize) -> Option<(Arc<Text>, armt::text::OpenText, Vec<u8>)> {
        let mut texts = lock(&self.texts);
        loop {
            let waits = texts.iter().filter_map(|text| {
                let inbox = lock(&text.inbox);
                let has_room = inbox.tokens() < 2 * MOST_GROUPS * group || !inbox.has_parts();
                (inbox.to_tokenize() > 0 && has_room).then(|| (inbox.tokens(), text))
            });
            if let Some((_, text)) = waits.min_by_key(|(tokens, _)| *tokens) {
                // A byte is at most a token, so that no piece has more than a group.
                let (open, bytes) = lock(&text.inbox).begin_tokenizing(PIECE.min(group));
                return Some((text.clone(), open, bytes));
            }
            if self.ending.load(Ordering::SeqCst) && !texts.iter().any(|text| lock(&text.inbox).has_some()) {
                return None;
            }
            texts = self.came.wait(texts).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads until [`Readings::end`]: the work of a thread.
    pub fn run(&self) {
        self.run_on(&mut Own::default());
    }

    fn run_on(&self, device: &mut dyn Device) {
        let share = if self.ahead.is_some() { 1 } else { SHARE[0] };
        let mut pace = Pace { share, full: false, ready: 1, waiting: None, ended: Instant::now(), idle: None };
        while let Some(chosen) = self.next(&mut pace) {
            let start = Instant::now();
            let share = self.share(chosen, &mut pace);
            self.read(device, share, &mut pace);
            self.adapt(&mut pace, start.elapsed());
            self.give_back();
        }
        // Those that tokenize see that nothing is left.
        self.came.notify_all();
    }

    /// Shares that take about as long as they should.
    fn adapt(&self, pace: &mut Pace, time: Duration) {
        let ([short, long], [least, most]) = match self.ahead {
            None => (AT_ONCE, SHARE),
            Some(_) => (AT_ONCE_ON_GPU, [1, MOST_GROUPS]),
        };
        if time > long {
            pace.share = (pace.share / 2).max(least);
        } else if time < short && pace.full {
            pace.share = (pace.share * 2).min(most);
        }
    }

    /// Gives buffers back that no reading comes back to. Each number of texts and segments has its own, and on the CPU all numbers come.
    fn give_back(&self) {
        let device = self.empty.model().device();
        let stats = device.pool_stats();
        if !device.is_cuda() && stats.held_bytes > stats.peak_bytes / 2 * 3 + SPARE {
            device.trim();
            device.reset_peak();
        }
    }

    /// Whose turn it is; waits for some. `None` at the very end.
    fn next(&self, pace: &mut Pace) -> Option<Chosen> {
        let mut texts = lock(&self.texts);
        let mut since = pace.ended;
        pace.full = false;
        loop {
            let is_left = texts.iter().any(|text| lock(&text.inbox).has_some());
            if is_left {
                pace.idle.get_or_insert(since);
            }
            let (chosen, wait) = match self.ahead {
                None => (self.next_in_turn(&texts), None),
                Some(group) => self.next_ahead(&texts, pace, group),
            };
            if let Some(chosen) = chosen {
                // Those that are read come last next time.
                texts.retain(|text| !chosen.texts.iter().any(|other| Arc::ptr_eq(text, other)));
                texts.extend(chosen.texts.iter().cloned());
                return Some(chosen);
            }
            if self.ending.load(Ordering::SeqCst) && !is_left {
                return None;
            }
            texts = match wait {
                Some(time) => self.changed.wait_timeout(texts, time).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(texts).unwrap_or_else(PoisonError::into_inner),
            };
            since = Instant::now();
        }
    }

    /// Those that have something, or have ended.
    fn next_in_turn(&self, texts: &VecDeque<Arc<Text>>) -> Option<Chosen> {
        let is_ready = |inbox: &Inbox| inbox.to_tokenize() > 0 || inbox.is_tokenized();
        let ready = texts.iter().filter(|text| is_ready(&lock(&text.inbox)));
        let texts: Vec<Arc<Text>> = ready.take(self.side_by_side).cloned().collect();
        (!texts.is_empty()).then_some(Chosen { texts, tokens: usize::MAX })
    }

    /// Those whose turn it is, or how long others are waited for.
    fn next_ahead(&self, texts: &VecDeque<Arc<Text>>, pace: &mut Pace, group: usize) -> (Option<Chosen>, Option<Duration>) {
        let waits = |text: &Arc<Text>| {
            let inbox = lock(&text.inbox);
            // What is open of a memory from elsewhere may be more than a group.
            let groups = if inbox.has_parts() { inbox.tokens() / group } else { 0 };
            let over = inbox.failed().is_some() || (groups == 0 && inbox.is_tokenized());
            Waits { groups, some: inbox.has_parts(), over }
        };
        let waits: Vec<Waits> = texts.iter().map(waits).collect();
        if waits.iter().any(|w| w.groups > 0 || w.some) {
            pace.waiting.get_or_insert_with(Instant::now);
        }
        let since = pace.waiting.filter(|_| !self.ending.load(Ordering::SeqCst));
        let left = since.and_then(|since| PATIENCE.checked_sub(since.elapsed()));
        let turn = turn::next(&waits, self.side_by_side, pace.share, left.map(|_| pace.ready));
        let Some(Turn { texts: places, groups, ready }) = turn else { return (None, left) };
        if groups > 0 {
            let more = places.iter().filter(|place| waits[**place].groups > groups).count();
            pace.ready = ready.max(pace.ready - pace.ready.div_ceil(4));
            pace.full = groups == pace.share && 2 * more >= places.len();
        }
        if ready > 0 || !places.iter().any(|place| waits[*place].over) {
            pace.waiting = None;
        }
        let texts = places.into_iter().map(|place| texts[place].clone()).collect();
        (Some(Chosen { texts, tokens: if groups > 0 { groups * group } else { usize::MAX } }), None)
    }

    /// What those whose turn it is read.
    fn share(&self, chosen: Chosen, pace: &mut Pace) -> Share {
        let Chosen { texts, tokens } = chosen;
        if self.ahead.is_none() {
            self.tokenize(&texts, pace.share);
        }
        let part = |text: Arc<Text>| {
            let mut inbox = lock(&text.inbox);
            let part = inbox.take(tokens);
            pace.full |= self.ahead.is_none() && inbox.to_tokenize() > 0;
            let is_last = inbox.is_tokenized() && !inbox.has_parts();
            drop(inbox);
            (text, part, is_last)
        };
        let share = texts.into_iter().map(part).collect();
        // There is room to tokenize more. Under the lock, as in `wake`.
        drop(lock(&self.texts));
        self.came.notify_all();
        share
    }

    /// Tokenizes at most so many bytes of each text, side by side.
    fn tokenize(&self, texts: &[Arc<Text>], most: usize) {
        let begin = |text: &Arc<Text>| {
            let begun = lock(&text.inbox).begin_tokenizing(most);
            text.taken.notify_waiters();
            begun
        };
        let begun: Vec<_> = texts.iter().map(begin).collect();
        let counts: Vec<usize> = begun.iter().map(|(_, bytes)| bytes.len()).collect();
        let tokenizer = self.empty.tokenizer();
        let tokenized = match TokenizerThreads::shared() {
            Ok(threads) => threads.more_of_each(tokenizer, begun),
            Err(_) => begun.into_iter().map(|(open, bytes)| Tokenized::more(tokenizer, &open, bytes)).collect(),
        };
        for ((text, tokenized), bytes) in texts.iter().zip(tokenized).zip(counts) {
            lock(&text.inbox).tokenized(tokenized, bytes);
        }
    }

    /// Reads a share of each text, and ends those that are at their end.
    fn read(&self, device: &mut dyn Device, share: Share, pace: &mut Pace) {
        let (some, none): (Vec<_>, Vec<_>) = share.into_iter().partition(|(text, part, _)| part.bytes > 0 && !is_given_up(text));
        let before: Vec<Arc<Session>> = some.iter().map(|(text, ..)| text.memory.now().session).collect();
        let texts: Vec<Tokenized> = some.iter().map(|(_, part, _)| part.text.clone()).collect();
        let start = Instant::now();
        if let Some(idle) = pace.idle.take() {
            Metrics::add_time(&self.metrics.waiting, start - idle);
        }
        let after = if some.is_empty() { Vec::new() } else { read_each(device, &before, texts) };
        pace.ended = Instant::now();
        Metrics::add_time(&self.metrics.reading, pace.ended - start);
        // All are begun before the first is waited for, so that a GPU does them in one go.
        let moved = before.iter().zip(after).map(|(before, after)| {
            let after = after?;
            Ok((Moved::begin(before, &after)?, after))
        });
        let moved: Vec<Reply<(Moved, Session)>> = moved.collect();
        for ((text, part, is_last), moved) in some.into_iter().zip(moved) {
            match moved.and_then(|(moved, session)| self.put(&text, session, part.bytes, moved.finish()?)) {
                Ok(()) if is_last => self.finish(&text, None),
                Ok(()) => {}
                Err(why) => self.finish(&text, Some(why)),
            }
        }
        for (text, _, is_last) in none {
            let failed = lock(&text.inbox).failed().cloned();
            if is_last || failed.is_some() {
                self.finish(&text, failed);
            }
        }
    }

    fn put(&self, text: &Text, session: Session, bytes: u64, change: Option<Change>) -> Reply<()> {
        let memory = &text.memory;
        let before = memory.now();
        if change.as_ref().is_some_and(|change| !change.layers.iter().all(|norm| norm.is_finite())) {
            // A file of it could not be written, and what it answers is nothing. It stays what it was.
            session.to_bytes()?;
        }
        Metrics::add(&self.metrics.tokens, session.certain_tokens() - before.certain_tokens());
        Metrics::add(&self.metrics.bytes, bytes);
        let text_bytes = before.text_bytes + bytes;
        lock(&text.inbox).set_tail(session.state().tails()[0].tokens.len());
        memory.put(session, text_bytes, change.clone());
        let now = memory.now();
        if let Some(keeper) = &self.keeper {
            keeper.keep(memory);
        }
        text.progress.send_modify(|progress| {
            // Why it goes no further stays said.
            let (change, failed) = (change.or(progress.change.take()), progress.failed.take());
            *progress = TextProgress { now, change, done: false, failed };
        });
        Ok(())
    }

    fn finish(&self, text: &Arc<Text>, failed: Option<Refusal>) {
        lock(&self.texts).retain(|other| !Arc::ptr_eq(text, other));
        // Before its sender hears of it, who may have more at once.
        drop(lock(&text.reserved).take());
        text.progress.send_modify(|progress| {
            progress.failed = progress.failed.take().or(failed);
            progress.done = progress.failed.is_none();
        });
        text.taken.notify_waiters();
    }

    /// Ends the text that is on its way into a memory that was deleted.
    pub fn give_up(&self, memory: &Arc<Memory>) {
        let texts: Vec<Arc<Text>> = lock(&self.texts).iter().filter(|text| Arc::ptr_eq(&text.memory, memory)).cloned().collect();
        texts.iter().for_each(|text| self.finish(text, Some(Refusal::missing("memory"))));
    }
}

/// Whether nobody wants the text to be read any more, or it cannot be.
fn is_given_up(text: &Text) -> bool {
    text.memory.is_deleted() || lock(&text.inbox).failed().is_some()
}

/// Texts whose reading fails together are read alone: what is wrong with one is not the others' fault.
fn read_each(device: &mut dyn Device, before: &[Arc<Session>], texts: Vec<Tokenized>) -> Vec<armt::Result<Session>> {
    let mut after: Vec<Session> = before.iter().map(|session| session.fork()).collect();
    match device.read(&mut after, texts.clone()) {
        Ok(()) => after.into_iter().map(Ok).collect(),
        Err(error) if before.len() == 1 => vec![Err(error)],
        Err(_) => {
            before.iter().zip(texts).flat_map(|(one, text)| read_each(device, std::slice::from_ref(one), vec![text])).collect()
        }
    }
}

#[cfg(test)]
mod tests;
