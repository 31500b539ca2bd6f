//! Questions: those that wait are answered side by side, beside whatever is being read. What is not so simple, a stream, a random
//! answer, a long one, a long prompt, has a thread of its own for its time.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use armt::Session;
use armt::answer::{Answer, answer_each, answer_tokens};
use armt::generate::{Options, Sampling};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::memory::lock;
use crate::metrics::Metrics;
use crate::refusal::{Refusal, Reply};

/// Most tokens of an answer that is given side by side with others: they wait for the longest of them.
const SHORT: usize = 512;
/// Threads for what is not answered side by side.
pub const THREADS: usize = 4;

/// The room that a body takes from others, held by all that came from it.
pub type Room = Option<Arc<OwnedSemaphorePermit>>;

/// A question.
pub struct Question {
    /// What is asked. Only read.
    pub session: Arc<Session>,
    /// The question's tokens, with what the model was taught to answer behind.
    pub prompt: Vec<i32>,
    /// How to answer.
    pub options: Options,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Who hears the answer as it comes.
    pub listener: Option<mpsc::UnboundedSender<String>>,
    /// The room of the body that it came in.
    pub _room: Room,
}

impl Question {
    /// Whether it can be answered with others in one go.
    fn is_plain(&self) -> bool {
        let short = self.prompt.len() <= 2 * self.session.model().config().segment_size;
        short
            && self.options.max_new_tokens <= SHORT
            && self.options.sampling == Sampling::Greedy
            && self.stop.is_empty()
            && self.listener.is_none()
    }

    /// The answer, unless `gone` is set meanwhile.
    fn answer(&self, gone: &Arc<AtomicBool>) -> Reply<Answer> {
        let session = &self.session;
        let options = Options { interrupt: Some(gone.clone()), ..self.options.clone() };
        let mut each = |text: &str| match &self.listener {
            // Nobody hears it any more.
            Some(listener) if listener.send(text.to_string()).is_err() => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        let prompt = self.prompt.clone();
        Ok(answer_tokens(session.model(), session.tokenizer(), session.closed()?, prompt, &options, &self.stop, &mut each)?)
    }
}

/// A question that waits.
struct Waiting {
    question: Question,
    reply: oneshot::Sender<Reply<Answer>>,
    place: Arc<Mutex<Place>>,
}

/// Where a question is whose asker still waits.
#[derive(Default)]
struct Place {
    /// Its asker has gone away.
    left: bool,
    together: Option<Arc<Together>>,
}

/// Questions that are answered in one go: until the last asker has gone away.
struct Together {
    askers: AtomicUsize,
    over: Arc<AtomicBool>,
}

impl Together {
    fn new<'p>(places: impl Iterator<Item = &'p Arc<Mutex<Place>>>) -> Arc<Self> {
        // One more, who leaves when all are counted.
        let together = Arc::new(Together { askers: AtomicUsize::new(1), over: Arc::default() });
        for place in places {
            let mut place = lock(place);
            if !place.left {
                together.askers.fetch_add(1, Ordering::SeqCst);
                place.together = Some(together.clone());
            }
        }
        together.leave();
        together
    }

    fn leave(&self) {
        if self.askers.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.over.store(true, Ordering::SeqCst);
        }
    }
}

/// Leaves a question's place when it is dropped.
struct Asking(Arc<Mutex<Place>>);

impl Drop for Asking {
    fn drop(&mut self) {
        let mut place = lock(&self.0);
        place.left = true;
        if let Some(together) = place.together.take() {
            together.leave();
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Tells work that nobody waits for it any more, when it is dropped.
struct Asker(Arc<AtomicBool>);

impl Drop for Asker {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What waits to be answered.
pub struct Questions {
    plain: Queue<Waiting>,
    other: Queue<Work>,
    most: usize,
    /// How long one may wait and be answered.
    time: Duration,
    metrics: Arc<Metrics>,
}

struct Queue<T> {
    waiting: Mutex<VecDeque<T>>,
    changed: Condvar,
    ending: AtomicBool,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue { waiting: Mutex::default(), changed: Condvar::new(), ending: AtomicBool::new(false) }
    }
}

impl<T> Queue<T> {
    fn push(&self, item: T, most: usize) -> Reply<()> {
        let mut waiting = lock(&self.waiting);
        if self.ending.load(Ordering::SeqCst) {
            return Err(Refusal::unavailable("the server is about to end"));
        }
        if waiting.len() >= most {
            return Err(Refusal::too_many("questions waiting", most));
        }
        waiting.push_back(item);
        self.changed.notify_one();
        Ok(())
    }

    /// At most so many of those that wait, once there is one. None at the end.
    fn take(&self, most: usize) -> Vec<T> {
        let mut waiting = lock(&self.waiting);
        while waiting.is_empty() && !self.ending.load(Ordering::SeqCst) {
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        let n = waiting.len().min(most);
        waiting.drain(..n).collect()
    }

    fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        drop(lock(&self.waiting));
        self.changed.notify_all();
    }
}

impl Questions {
    /// None yet.
    pub fn new(most: usize, time: Duration, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Questions { plain: Queue::default(), other: Queue::default(), most, time, metrics })
    }

    /// Answers a question when its turn comes.
    pub async fn ask(&self, question: Question) -> Reply<Answer> {
        if !question.is_plain() {
            let answer = self.work(move |gone| question.answer(gone)).await?;
            self.tally(answer.tokens.len(), Duration::ZERO);
            return Ok(answer);
        }
        let start = Instant::now();
        let (reply, answer) = oneshot::channel();
        let asking = Asking(Arc::default());
        self.plain.push(Waiting { question, reply, place: asking.0.clone() }, self.most)?;
        let answer = self.wait(answer).await?;
        self.tally(answer.tokens.len(), start.elapsed());
        Ok(answer)
    }

    /// Answers a question and says each piece of the answer as it comes. `None`: nobody listens any more, and so it has ended, also where
    /// there was nothing to say yet.
    pub async fn tell<T>(
        &self,
        question: Question,
        say: &mpsc::UnboundedSender<T>,
        piece: impl Fn(String) -> T,
    ) -> Option<Reply<Answer>> {
        let (listener, mut heard) = mpsc::unbounded_channel();
        let answer = self.ask(Question { listener: Some(listener), ..question });
        let hear = async {
            while let Some(text) = heard.recv().await {
                let _ = say.send(piece(text));
            }
        };
        tokio::select! {
            (answer, ()) = async { tokio::join!(answer, hear) } => Some(answer),
            () = say.closed() => None,
        }
    }

    /// Counts an answer of so many tokens.
    pub fn tally(&self, tokens: usize, time: Duration) {
        Metrics::add(&self.metrics.answers, 1);
        Metrics::add(&self.metrics.answered, tokens as u64);
        Metrics::add_time(&self.metrics.asking, time);
    }

    /// Has a thread do something of its own. What is long looks from time to time whether its asker has gone.
    pub async fn work<T: Send + 'static>(&self, work: impl FnOnce(&Arc<AtomicBool>) -> Reply<T> + Send + 'static) -> Reply<T> {
        let start = Instant::now();
        let (reply, answer) = oneshot::channel();
        let gone = Arc::new(AtomicBool::new(false));
        let _asker = Asker(gone.clone());
        let work = move || {
            // Who has gone away needs no answer.
            if !reply.is_closed() {
                let _ = reply.send(work(&gone));
            }
        };
        self.other.push(Box::new(work), self.most)?;
        let done = self.wait(answer).await;
        Metrics::add_time(&self.metrics.asking, start.elapsed());
        done
    }

    async fn wait<T>(&self, answer: oneshot::Receiver<Reply<T>>) -> Reply<T> {
        match tokio::time::timeout(self.time, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(Refusal::failure("the answer was lost")),
            Err(_) => Err(Refusal::unavailable(format!("no answer within {} s", self.time.as_secs()))),
        }
    }

    /// What waits.
    pub fn count(&self) -> usize {
        lock(&self.plain.waiting).len() + lock(&self.other.waiting).len()
    }

    /// Has the threads end when all that waits is answered, or its asker has gone.
    pub fn end(&self) {
        self.plain.end();
        self.other.end();
    }

    /// Answers side by side, at most so many at once, until [`Questions::end`]: the work of one thread.
    pub fn run_plain(&self, side_by_side: usize) {
        loop {
            let waiting = self.plain.take(side_by_side.max(1));
            if waiting.is_empty() {
                return;
            }
            let mut waiting: Vec<Waiting> = waiting.into_iter().filter(|w| !w.reply.is_closed()).collect();
            while let Some(first) = waiting.first() {
                let tokens = first.question.options.max_new_tokens;
                let (alike, others) = waiting.into_iter().partition(|w| w.question.options.max_new_tokens == tokens);
                waiting = others;
                answer_together(alike);
            }
        }
    }

    /// Does what is not so simple until [`Questions::end`]: the work of [`THREADS`] threads.
    pub fn run_other(&self) {
        loop {
            let work = self.other.take(1);
            if work.is_empty() {
                return;
            }
            work.into_iter().for_each(|work| work());
        }
    }
}

/// Answers questions of equal options; where that fails each alone, so that one's fault is not the others'.
fn answer_together(waiting: Vec<Waiting>) {
    if waiting.len() > 1 {
        let over = Together::new(waiting.iter().map(|w| &w.place)).over.clone();
        let session = waiting[0].question.session.clone();
        let states = waiting.iter().map(|w| Ok(w.question.session.closed()?.clone())).collect::<armt::Result<Vec<_>>>();
        let prompts: Vec<Vec<i32>> = waiting.iter().map(|w| w.question.prompt.clone()).collect();
        let options = &Options { interrupt: Some(over), ..waiting[0].question.options.clone() };
        let answers = states.and_then(|states| answer_each(session.model(), session.tokenizer(), &states, &prompts, options));
        if let Ok(answers) = answers {
            for (waiting, answer) in waiting.into_iter().zip(answers) {
                let _ = waiting.reply.send(Ok(answer));
            }
            return;
        }
    }
    for waiting in waiting {
        let over = Together::new(std::iter::once(&waiting.place)).over.clone();
        let _ = waiting.reply.send(waiting.question.answer(&over));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_for_many_is_over_when_the_last_has_left() {
        let askers: Vec<Asking> = (0..4).map(|_| Asking(Arc::default())).collect();
        let places: Vec<_> = askers.iter().map(|asker| asker.0.clone()).collect();
        let mut askers = askers.into_iter();
        drop(askers.next());
        let together = Together::new(places.iter());
        let is_over = || together.over.load(Ordering::SeqCst);
        for _ in 0..3 {
            assert!(!is_over());
            drop(askers.next());
        }
        assert!(is_over());
        assert!(Together::new(places.iter()).over.load(Ordering::SeqCst), "nobody is there any more");
    }
}
