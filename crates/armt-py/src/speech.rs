//! Answers: whole, or as they come.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use armt::Session;
use armt::answer::Answer as Said;
use armt::generate::{Options, Sampling};
use pyo3::prelude::*;

use crate::error::{Result, refuse};
use crate::threads::join_own;

/// Pieces of text that may wait for whoever listens.
const AHEAD: usize = 64;
/// How often whoever listens looks for Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(50);

/// What a model is to say, and how.
#[derive(Clone)]
pub struct Speaking {
    /// What it goes on from.
    pub prompt: String,
    /// Whether that is a question, which the model's `after_question` comes behind.
    pub question: bool,
    /// How tokens are picked.
    pub options: Options,
    /// Texts before which it ends.
    pub stop: Vec<String>,
}

/// How tokens are picked, as Python says it.
#[derive(Clone, Copy, Default)]
pub struct Picking {
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub seed: u64,
}

impl Picking {
    /// The most probable token where nothing is said, as `armt ask` does.
    pub fn sampling(self) -> Sampling {
        let Picking { temperature, top_k, top_p, seed } = self;
        let chosen = temperature.is_some() || top_k.is_some() || top_p.is_some();
        match temperature.unwrap_or(1.0) {
            temperature if chosen && temperature != 0.0 => Sampling::Random { temperature, top_k, top_p, seed },
            _ => Sampling::Greedy,
        }
    }
}

impl Speaking {
    /// Has a session say it; `each` hears it as it comes.
    pub fn say(&self, session: &Session, each: &mut dyn FnMut(&str) -> ControlFlow<()>) -> armt::Result<Said> {
        let Speaking { prompt, options, stop, .. } = self;
        match self.question {
            true => session.ask_with(prompt, options, stop, each),
            false => session.continue_with(prompt, options, stop, each),
        }
    }
}

/// What was said as Python has it: `armt.Answer`, a str that knows its tokens.
pub fn answer<'py>(py: Python<'py>, said: &Said) -> PyResult<Bound<'py, PyAny>> {
    let tokens: Vec<i32> = said.tokens.iter().map(|t| t.token).collect();
    let pieces: Vec<&str> = said.tokens.iter().map(|t| t.text.as_str()).collect();
    let probabilities: Vec<f32> = said.tokens.iter().map(|t| t.probability).collect();
    py.import("armt._answer")?.getattr("Answer")?.call1((&said.text, tokens, pieces, probabilities))
}

/// What a speaking thread tells.
enum Told {
    Piece(String),
    End(Result<Said>),
}

/// An answer as it comes: an iterator of pieces of text. It is computed ahead, on threads of its own; what nobody holds any more ends.
#[pyclass(frozen, module = "armt")]
pub struct Stream {
    told: Mutex<Option<Receiver<Told>>>,
    said: Mutex<Option<Said>>,
    /// Ends the speaking.
    left: Arc<AtomicBool>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.left.store(true, Ordering::Relaxed);
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Threads that have spoken, and wait for more to say.
fn idle() -> MutexGuard<'static, Vec<Sender<Work>>> {
    static IDLE: Mutex<Vec<Sender<Work>>> = Mutex::new(Vec::new());
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take_idle() -> Option<Sender<Work>> {
    idle().pop()
}

/// Has a thread do something. Those that have done theirs do the next: a thread's own threads for the CPU's kernels are never given back.
fn on_a_thread(mut work: Work) -> Result<()> {
    while let Some(thread) = take_idle() {
        match thread.send(work) {
            Ok(()) => return Ok(()),
            Err(back) => work = back.0,
        }
    }
    let speak = move || {
        let mut work = work;
        loop {
            work();
            let (sender, next) = channel();
            idle().push(sender);
            match next.recv() {
                Ok(next) => work = next,
                Err(_) => return,
            }
        }
    };
    let thread = std::thread::Builder::new().name("armt-speech".into()).spawn(speak);
    thread.map_err(|source| armt::Error::System { what: "a thread to answer on", source })?;
    Ok(())
}

impl Stream {
    /// Has a session speak on a thread of its own.
    pub fn start(session: Session, speaking: Speaking) -> Result<Self> {
        let (sender, told) = sync_channel(AHEAD);
        let left = Arc::new(AtomicBool::new(false));
        let mut speaking = speaking;
        speaking.options.interrupt = Some(left.clone());
        on_a_thread(Box::new(move || {
            let end = join_own().and_then(|()| Ok(speaking.say(&session, &mut |piece| tell(&sender, piece))?));
            let _ = sender.send(Told::End(end));
        }))?;
        Ok(Stream { told: Mutex::new(Some(told)), said: Mutex::default(), left })
    }
}

fn tell(sender: &SyncSender<Told>, piece: &str) -> ControlFlow<()> {
    // Nobody listens any more.
    if sender.send(Told::Piece(piece.into())).is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

#[pymethods]
impl Stream {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<String>> {
        // Ctrl-C is heard while nothing comes, as of a long question.
        let next = loop {
            py.check_signals()?;
            let heard = py.detach(|| {
                let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
                let next = match told.as_ref().map(|told| told.recv_timeout(PATIENCE)) {
                    Some(Err(RecvTimeoutError::Timeout)) => return None,
                    next => next.and_then(|next| next.ok()),
                };
                if !matches!(next, Some(Told::Piece(_))) {
                    *told = None;
                }
                Some(next)
            });
            if let Some(next) = heard {
                break next;
            }
        };
        match next {
            Some(Told::Piece(piece)) => Ok(Some(piece)),
            Some(Told::End(end)) => {
                *self.said.lock().unwrap_or_else(PoisonError::into_inner) = Some(end?);
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// The whole answer, once all of it has come; before that an error.
    #[getter]
    fn answer<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        // Not held while Python makes the answer: another thread may wait for it with Python's lock.
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match said {
            Some(said) => Ok(answer(py, &said)?),
            None => Err(refuse("a stream that was heard to its end", "one before it")),
        }
    }
}
