//! The front door: a model, its tokenizer and the state of what was read, in one value that owns what it needs.
//!
//! ```no_run
//! # fn main() -> armt::Result<()> {
//! let mut session = armt::Session::open("models/babilong-qa1")?;
//! session.read("book.txt")?;
//! println!("{}", session.ask("Where is Mary?")?);
//! session.save("book.memory")?;
//! # Ok(())
//! # }
//! ```
//!
//! A session is of one text. Several side by side are several sessions, whose states can be [stacked](Session::stack) and read together.

use std::collections::VecDeque;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use armt_engine::{DType, Device};

use crate::answer::answer;
use crate::error::{Error, Result};
use crate::generate::{Generated, Options, generate};
use crate::model::Model;
use crate::reader::{End, Progress, Reader};
use crate::segment::Batch;
use crate::state::State;
use crate::state::file::{self, Owner};
use crate::text::{Counts, Source, TokenPrefetch, TokenStream, Tokenizer};

/// A model, its tokenizer, and what it has read.
#[derive(Clone)]
pub struct Session {
    model: Model,
    tokenizer: Arc<Tokenizer>,
    state: State,
    owner: Arc<Owner>,
}

impl Session {
    /// Opens a model folder on the GPU, if there is one that works, or the CPU: in bf16 there, in f32 here.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let (device, _) = Device::auto();
        let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
        Self::open_on(folder, dtype, &device)
    }

    /// Opens a model folder on a device, in a type of computation.
    pub fn open_on(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let folder = folder.as_ref();
        let model = Model::load(folder, dtype, device)?;
        let tokenizer = Tokenizer::load_for(folder, model.sizes().vocab)?;
        Self::new(model, Arc::new(tokenizer))
    }

    /// A session of a model and a tokenizer that fits it.
    pub fn new(model: Model, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        let owner = Owner { tokenizer: Some(tokenizer.fingerprint()?), ..model.owner()? };
        Ok(Session { state: model.empty(1)?, model, tokenizer, owner: Arc::new(owner) })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// What was read.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Takes a state in place of what was read. One of another model, or of several texts, is an error.
    pub fn set_state(&mut self, state: State) -> Result<()> {
        self.model.expect_state(&state, 1)?;
        self.state = state;
        Ok(())
    }

    /// Reads a text file to its end.
    pub fn read(&mut self, path: impl Into<PathBuf>) -> Result<()> {
        let source = Source::file(&path.into())?;
        self.read_sources(vec![source])
    }

    /// Reads what a reader gives, to its end.
    pub fn read_from(&mut self, name: &str, reader: impl Read + Send + 'static) -> Result<()> {
        self.read_sources(vec![Source::reader(Path::new(name), reader)])
    }

    /// Reads pieces of text as one text. They are taken as they are needed, and never all kept.
    pub fn read_text<T, I>(&mut self, pieces: I) -> Result<()>
    where
        T: AsRef<str>,
        I: IntoIterator<Item = T>,
        I::IntoIter: Send + 'static,
    {
        self.read_from("the text", Pieces { pieces: pieces.into_iter(), left: Vec::new().into() })
    }

    fn read_sources(&mut self, sources: Vec<Source>) -> Result<()> {
        let mut reading = self.reading(sources, Arc::default())?;
        reading.run(&mut |_| ControlFlow::Continue(()))?;
        self.state = reading.into_state();
        Ok(())
    }

    /// A reading of texts, one after the other, that goes on from this session's state, for those who want to watch it or to stop it by
    /// setting `stop`. The session itself stays as it is.
    /// A model that keeps nothing between segments cannot read and is refused.
    pub fn reading(&self, sources: Vec<Source>, stop: Arc<AtomicBool>) -> Result<Reading> {
        if self.model.recurrence().layout().parts.is_empty() {
            let what = "the model has no memory: it keeps nothing of what it reads (`armt convert` gives a model a memory)";
            return Err(Error::Unsupported(what.into()));
        }
        let stream = TokenStream::new(self.tokenizer.clone(), sources)?;
        let mut reader = Reader::new(&self.model, self.state.clone())?;
        reader.stop_on(stop.clone());
        Ok(Reading { reader, tokens: TokenPrefetch::start(stream, stop)? })
    }

    /// The most probable answer to a question: what the model goes on with after it, and after what it was trained to answer behind
    /// (`after_question` of its configuration). The state stays as it is. A question without a token is an error.
    pub fn ask(&self, question: &str) -> Result<String> {
        self.ask_with(question, &Options { max_new_tokens: 64, ..Options::default() }, &[], &mut |_| ControlFlow::Continue(()))
    }

    /// An answer by `options` that also ends before any of the texts in `stop`; `each` hears it as it comes and may end it.
    pub fn ask_with(
        &self,
        question: &str,
        options: &Options,
        stop: &[String],
        each: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<String> {
        if question.is_empty() {
            return Err(Error::input("a question", "nothing"));
        }
        let question = format!("{question}{}", self.model.config().after_question.as_deref().unwrap_or_default());
        answer(&self.model, &self.tokenizer, &self.state, &question, options, stop, each)
    }

    /// Goes on from a prompt's tokens. The state stays as it is; that after the prompt is in what is generated.
    pub fn generate(&self, prompt: &str, options: &Options) -> Result<Generated> {
        let ids = self.tokenizer.encode(prompt)?;
        generate(&self.model, &Batch { ids, texts: 1, mask: None }, &self.state, options, &mut |_| {})
    }

    /// Writes the state to a file, beside it first and then renamed.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        file::save(&self.state, path.as_ref(), &self.owner)
    }

    /// Takes the state of a file in place of what was read. A file that is damaged, of another model, tokenizer or
    /// vocabulary, or of several texts, is refused.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let layout = self.model.recurrence().layout();
        let state = file::load(path.as_ref(), &layout, &self.owner, self.model.device())?;
        self.model.expect_state(&state, 1).map_err(|e| Error::file(path.as_ref(), e))?;
        self.state = state;
        Ok(())
    }

    /// A second session that goes on from the same state. The model is shared.
    pub fn fork(&self) -> Self {
        self.clone()
    }

    /// The states of several sessions of one model as one, to be read side by side. Sessions of different models are an error.
    pub fn stack(sessions: &[Self]) -> Result<State> {
        let first = sessions.first().ok_or_else(|| Error::input("at least one session", "none"))?;
        if sessions.iter().any(|s| s.owner != first.owner) {
            return Err(Error::input("sessions of one model", "sessions of several"));
        }
        State::stack(&sessions.iter().map(|s| s.state.clone()).collect::<Vec<_>>())
    }
}

/// A reading under way. Whatever ends it, its state is that after the last whole group of segments.
pub struct Reading {
    reader: Reader,
    tokens: TokenPrefetch,
}

impl Reading {
    /// What was tokenized so far.
    pub fn counts(&self) -> Counts {
        self.tokens.counts()
    }

    /// The state so far.
    pub fn state(&self) -> &State {
        self.reader.state()
    }

    /// The state, when reading is over.
    pub fn into_state(self) -> State {
        self.reader.into_state()
    }

    /// Passes over the tokens that the state already holds; `each` hears how many after every 65,536. A text with fewer, or with others, is
    /// an error.
    pub fn skip(&mut self, each: &mut dyn FnMut(u64)) -> Result<()> {
        let mut passed = 0u64;
        let mut watched = self.tokens.by_ref().inspect(|_| {
            passed += 1;
            if passed.is_multiple_of(1 << 16) {
                each(passed);
            }
        });
        self.reader.skip(&mut watched)
    }

    /// Reads to the texts' end, or until `each`, which hears of the progress after every group, or `stop` ends it.
    pub fn run(&mut self, each: &mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<End> {
        self.reader.read(&mut self.tokens, each)
    }
}

/// Pieces of text as bytes to read.
struct Pieces<I> {
    pieces: I,
    /// What of the last piece was not read yet.
    left: VecDeque<u8>,
}

impl<T: AsRef<str>, I: Iterator<Item = T>> Read for Pieces<I> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while self.left.is_empty() {
            let Some(piece) = self.pieces.next() else { return Ok(0) };
            self.left.extend(piece.as_ref().as_bytes());
        }
        self.left.read(buffer)
    }
}
