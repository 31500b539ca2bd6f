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
//! A session is of one text, which may come in any pieces: read one after the other they leave the memory, to the bit, that the whole read
//! at once would leave. What does not fill a segment yet stays open, and questions see it all the same.
//!
//! Several texts side by side are several sessions, whose states can be [stacked](Session::stack) and read together.

mod reading;

use std::collections::VecDeque;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use armt_engine::{DType, Device};

pub use self::reading::Reading;
use crate::adapter::Adapter;
use crate::answer::{Answer, answer};
use crate::checkpoint;
use crate::error::{Error, Result};
use crate::generate::{Generated, Options, generate, generate_each};
use crate::model::Model;
use crate::reader::{End, Progress, Reader, Tokens};
use crate::segment::Batch;
use crate::state::file::{self, Owner};
use crate::state::{State, Tail};
use crate::text::{OpenText, Source, TokenPrefetch, TokenStream, Tokenized, Tokenizer, TokenizerThreads};

/// A model, its tokenizer, and what it has read.
#[derive(Clone)]
pub struct Session {
    model: Model,
    tokenizer: Arc<Tokenizer>,
    state: State,
    /// The state after the text's end, for questions; made when the first is asked.
    closed: OnceLock<State>,
    owner: Arc<Owner>,
}

impl Session {
    /// Opens a model folder, or a GGUF file, on the GPU, if there is one that works, or the CPU: in bf16 there, in f32 here.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let (device, _) = Device::auto();
        let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
        Self::open_on(folder, dtype, &device)
    }

    /// Opens a model folder, or a GGUF file, on a device, in a type of computation.
    pub fn open_on(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let folder = folder.as_ref();
        Self::of_folder(folder, Model::load(folder, dtype, device)?)
    }

    /// Opens a model folder with an adapter of it, on a device, in a type of computation. An adapter of another model is refused.
    pub fn open_adapted(folder: impl AsRef<Path>, adapter: &Adapter, dtype: DType, device: &Device) -> Result<Self> {
        let folder = folder.as_ref();
        Self::of_folder(folder, adapter.load(folder, dtype, device)?)
    }

    fn of_folder(folder: &Path, model: Model) -> Result<Self> {
        let vocab = model.sizes().vocab;
        let tokenizer = match checkpoint::tokenizer(folder)? {
            Some(tokenizer) => tokenizer.expect_fits(vocab, folder).map(|()| tokenizer),
            // Where there are no files at all, the usual one is said to be missing.
            None => Tokenizer::load(folder),
        }?;
        let mut session = Self::new(model, Arc::new(tokenizer))?;
        // A folder that is named as where we are, or by what is above it, has a name only there.
        let folder = std::path::absolute(folder).ok();
        let name = folder.as_ref().and_then(|f| f.file_name()).map(|name| name.to_string_lossy().into_owned());
        session.owner = Arc::new(Owner { name, ..session.owner.as_ref().clone() });
        Ok(session)
    }

    /// A session of a model and a tokenizer that fits it.
    pub fn new(model: Model, tokenizer: Arc<Tokenizer>) -> Result<Self> {
        let owner = Owner { tokenizer: Some(tokenizer.fingerprint()?), ..model.owner()? };
        Ok(Session { state: model.empty(1)?, closed: OnceLock::new(), model, tokenizer, owner: Arc::new(owner) })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// What states of this session belong to: fingerprints of model and tokenizer.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// What was read. The end of the text that does not fill a segment yet is its tail.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Tokens that were read: those in the memory, and what is open as it would be if the text ended here.
    pub fn tokens_read(&self) -> Result<u64> {
        let Tail { tokens, text } = &self.state.tails()[0];
        Ok(self.state.tokens_read() + (tokens.len() + self.tokenizer.encode_open(text)?.len()) as u64)
    }

    /// Tokens that were read whatever comes next: without those of what is open and no tokens yet, such as the word at the end.
    pub fn certain_tokens(&self) -> u64 {
        self.state.tokens_read() + self.state.tails()[0].tokens.len() as u64
    }

    /// Takes a state in place of what was read, in the type of the model's computation. One of another model, of several texts, or with a token
    /// outside the vocabulary, is an error.
    pub fn set_state(&mut self, state: State) -> Result<()> {
        let state = self.model.take_state(state, 1)?;
        let vocabulary = self.model.sizes().vocab;
        if let Some(token) = state.tails()[0].tokens.iter().find(|token| usize::try_from(**token).map_or(true, |t| t >= vocabulary))
        {
            return Err(Error::StateFile(format!(
                "its open text has a token {token}, which is outside the vocabulary of {vocabulary}"
            )));
        }
        self.take(state);
        Ok(())
    }

    fn take(&mut self, state: State) {
        (self.state, self.closed) = (state, OnceLock::new());
    }

    /// The state after the text's end: what is open read too. Questions are asked of it.
    pub fn closed(&self) -> Result<&State> {
        if let Some(known) = self.closed.get() {
            return Ok(known);
        }
        let Tail { tokens, text } = &self.state.tails()[0];
        let tokens = [tokens.as_slice(), &self.tokenizer.encode_open(text)?].concat();
        let state = self.state.clone().with_tails(vec![Tail { tokens, ..Tail::default() }])?;
        let closed = crate::reader::closed(&self.model, &state, None)?;
        Ok(self.closed.get_or_init(|| closed))
    }

    /// Ends the text: what is read after this is a document of its own, which begins a segment. No word spans both.
    pub fn end_document(&mut self) -> Result<()> {
        let closed = self.closed()?.clone();
        self.take(closed);
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
        self.take(reading.into_state()?);
        Ok(())
    }

    /// A reading of sources, one after the other as one text, that goes on from this session's state, for those who want to watch it or to
    /// stop it by setting `stop`. The session itself stays as it is.
    /// A model that keeps nothing between segments cannot read and is refused.
    pub fn reading(&self, sources: Vec<Source>, stop: Arc<AtomicBool>) -> Result<Reading> {
        let (state, text) = self.without_text()?;
        self.reading_from(state, TokenStream::new(self.tokenizer.clone(), sources)?.after(&text), stop)
    }

    /// A reading of a text that is the one that this session has read, or begins with it: what is in the memory is to be
    /// [passed over](Reading::skip), and what was open comes again.
    pub fn reading_again(&self, sources: Vec<Source>, stop: Arc<AtomicBool>) -> Result<Reading> {
        let state = self.state.clone().with_tails(vec![Tail::default()])?;
        let reading = self.reading_from(state, TokenStream::new(self.tokenizer.clone(), sources)?, stop)?;
        Ok(Reading { open: self.state.tails()[0].clone(), ..reading })
    }

    /// Reads a text into each of some sessions of one model, side by side, to their ends. The texts may have any lengths: each session is
    /// then as it would be if it had read alone, on the CPU to the bit. Where one fails all stay as they are.
    pub fn read_all(sessions: &mut [Self], texts: Vec<Source>) -> Result<()> {
        SideBySide::new(expect_one_model(sessions)?)?.read(sessions, texts, &mut |_| ControlFlow::Continue(())).map(|_| ())
    }

    /// Reads texts as [`Session::read_all`] does; `each` hears of the progress after every group and may stop it, and then all sessions stay as
    /// they are.
    pub fn read_all_until(
        sessions: &mut [Self],
        texts: Vec<Source>,
        each: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<End> {
        SideBySide::new(expect_one_model(sessions)?)?.read(sessions, texts, each)
    }

    /// The state, and apart from it the end of the text that is no tokens yet.
    fn without_text(&self) -> Result<(State, OpenText)> {
        let Tail { tokens, text } = self.state.tails()[0].clone();
        Ok((self.state.clone().with_tails(vec![Tail { tokens, ..Tail::default() }])?, text))
    }

    /// The state with all that is open at its text's end as tokens.
    fn without_open_text(&self) -> Result<State> {
        let (state, text) = self.without_text()?;
        let mut tokens = state.tails()[0].tokens.clone();
        tokens.extend(self.tokenizer.encode_open(&text)?);
        state.with_tails(vec![Tail { tokens, ..Tail::default() }])
    }

    fn expect_memory(&self) -> Result<()> {
        if self.model.recurrence().layout().parts.is_empty() {
            let what = "the model has no memory: it keeps nothing of what it reads (`armt convert` gives a model a memory)";
            return Err(Error::Unsupported(what.into()));
        }
        Ok(())
    }

    fn reading_from(&self, state: State, stream: TokenStream, stop: Arc<AtomicBool>) -> Result<Reading> {
        self.expect_memory()?;
        let stream = stream.on_threads(&TokenizerThreads::shared()?);
        let mut reader = Reader::new(&self.model, state)?;
        reader.stop_on(stop.clone());
        let tokens = TokenPrefetch::start(stream, stop)?;
        let open = Tail::default();
        Ok(Reading { reader, tokens, tokenizer: self.tokenizer.clone(), open, passed_end: false, finished: false })
    }

    /// The most probable answer to a question: what the model goes on with after it, and after what it was trained to answer behind
    /// (`after_question` of its configuration). The state stays as it is. A question without a token is an error.
    pub fn ask(&self, question: &str) -> Result<String> {
        let options = Options { max_new_tokens: 64, ..Options::default() };
        Ok(self.ask_with(question, &options, &[], &mut |_| ControlFlow::Continue(()))?.text)
    }

    /// An answer by `options` that also ends before any of the texts in `stop`; `each` hears it as it comes and may end it.
    pub fn ask_with(
        &self,
        question: &str,
        options: &Options,
        stop: &[String],
        each: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Answer> {
        if question.is_empty() {
            return Err(Error::input("a question", "nothing"));
        }
        let question = format!("{question}{}", self.model.config().after_question.as_deref().unwrap_or_default());
        self.continue_with(&question, options, stop, each)
    }

    /// What the model goes on with after a prompt as it stands, as [`Session::ask_with`] does after a question.
    pub fn continue_with(
        &self,
        prompt: &str,
        options: &Options,
        stop: &[String],
        each: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Answer> {
        answer(&self.model, &self.tokenizer, self.closed()?, prompt, options, stop, each)
    }

    /// Goes on from a prompt's tokens. The state stays as it is; that after the prompt is in what is generated.
    pub fn generate(&self, prompt: &str, options: &Options) -> Result<Generated> {
        let ids = self.tokenizer.encode(prompt)?;
        generate(&self.model, &Batch { ids, texts: 1, mask: None }, self.closed()?, options, &mut |_| {})
    }

    /// Goes on from tokens in each of some sessions of one model, side by side, as [`Session::generate`] does in one.
    pub fn generate_all(sessions: &[Self], prompts: &[Vec<i32>], options: &Options) -> Result<Vec<Generated>> {
        let first = expect_one_model(sessions)?;
        let states = sessions.iter().map(|session| session.closed().cloned()).collect::<Result<Vec<_>>>()?;
        generate_each(&first.model, prompts, &states, options)
    }

    /// The state as the bytes of its file. Equal states of one model are equal bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        file::to_bytes(&self.state, &self.owner)
    }

    /// Takes the state of a file's bytes in place of what was read, as [`Session::load`] does.
    pub fn from_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let layout = self.model.recurrence().layout();
        let state = file::from_bytes(bytes, &layout, &self.owner, self.model.device())?;
        self.set_state(state)
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
        self.set_state(state).map_err(|e| Error::file(path.as_ref(), e))
    }

    /// A second session that goes on from the same state. The model is shared.
    pub fn fork(&self) -> Self {
        self.clone()
    }

    /// The states of several sessions of one model as one, to be read side by side. Sessions of different models are an error.
    pub fn stack(sessions: &[Self]) -> Result<State> {
        expect_one_model(sessions)?;
        State::stack(&sessions.iter().map(|s| s.state.clone()).collect::<Vec<_>>())
    }
}

/// The first of some sessions of one model. Sessions of several, or none, are an error.
fn expect_one_model(sessions: &[Session]) -> Result<&Session> {
    let first = sessions.first().ok_or_else(|| Error::input("at least one session", "none"))?;
    match sessions.iter().all(|session| session.owner.is_same(&first.owner)) {
        true => Ok(first),
        false => Err(Error::input("sessions of one model", "sessions of several")),
    }
}

/// Reads texts into sessions of one model, side by side, again and again: what it has recorded for a GPU is kept from reading to reading.
pub struct SideBySide {
    reader: Reader,
    owner: Arc<Owner>,
    threads: Arc<TokenizerThreads>,
}

impl SideBySide {
    /// For sessions of the model of this one.
    pub fn new(session: &Session) -> Result<Self> {
        let reader = Reader::new(&session.model, session.model.empty(1)?)?;
        Ok(SideBySide { reader, owner: session.owner.clone(), threads: TokenizerThreads::shared()? })
    }

    /// With groups of so many segments: [`Reader::in_groups_of`].
    pub fn in_groups_of(self, segments: u64) -> Self {
        SideBySide { reader: self.reader.in_groups_of(segments), ..self }
    }

    /// From now on a reading ends between two steps once this is set.
    pub fn stop_on(&mut self, stop: Arc<AtomicBool>) {
        self.reader.stop_on(stop);
    }

    /// Refuses sessions of another model, and another number of texts than of sessions.
    fn expect_fits(&self, sessions: &[Session], texts: usize) -> Result<()> {
        if texts != sessions.len() {
            return Err(Error::Texts { state: sessions.len(), texts });
        }
        match expect_one_model(sessions)?.owner.is_same(&self.owner) {
            true => Ok(()),
            false => Err(Error::input("sessions of one model", "sessions of another")),
        }
    }

    /// Reads tokens into each session, behind those that are open at its text's end: for who has texts as tokens, or makes them. A text's end that is no tokens yet is read
    /// before them. Where one fails, or `each` stops it, all stay as they are.
    pub fn read_tokens(
        &mut self,
        sessions: &mut [Session],
        texts: &mut [Tokens<'_>],
        each: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<End> {
        self.expect_fits(sessions, texts.len())?;
        let states = sessions.iter().map(Session::without_open_text).collect::<Result<_>>()?;
        self.reader.begin_each(states)?;
        if self.reader.read_all(texts, each)? == End::Stopped {
            return Ok(End::Stopped);
        }
        sessions.iter_mut().zip(self.reader.states()?).for_each(|(session, state)| session.take(state));
        Ok(End::Finished)
    }

    /// Reads a text into each session, as [`Session::read_all_until`] does. A model that keeps nothing between segments is refused.
    pub fn read(
        &mut self,
        sessions: &mut [Session],
        texts: Vec<Source>,
        each: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<End> {
        self.expect_fits(sessions, texts.len())?;
        sessions.iter().try_for_each(Session::expect_memory)?;
        let (mut states, mut streams) = (Vec::new(), Vec::new());
        for (session, source) in sessions.iter().zip(texts) {
            let (state, text) = session.without_text()?;
            states.push(state);
            streams.push(TokenStream::new(session.tokenizer.clone(), vec![source])?.after(&text));
        }
        self.reader.begin_each(states)?;
        let rests = match self.reader.is_on_gpu() {
            true => self.read_ahead(streams, each)?,
            false => self.read_in_turn(streams, each)?,
        };
        let Some(rests) = rests else { return Ok(End::Stopped) };
        self.give(sessions, rests)?;
        Ok(End::Finished)
    }

    /// Reads into each session what was tokenized of its text ahead: the tokens of the end that was no tokens yet, of what came after it, and
    /// the new end. Otherwise as [`SideBySide::read`] does.
    pub fn read_tokenized(
        &mut self,
        sessions: &mut [Session],
        texts: Vec<Tokenized>,
        each: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<End> {
        self.expect_fits(sessions, texts.len())?;
        sessions.iter().try_for_each(Session::expect_memory)?;
        let states = sessions.iter().map(|session| Ok(session.without_text()?.0)).collect::<Result<_>>()?;
        self.reader.begin_each(states)?;
        let (tokens, rests): (Vec<_>, Vec<_>) = texts.into_iter().map(|text| (text.tokens.into_iter().map(Ok), text.open)).unzip();
        let mut tokens = tokens;
        let mut tokens: Vec<Tokens<'_>> = tokens.iter_mut().map(|tokens| tokens as Tokens<'_>).collect();
        if self.reader.read_all(&mut tokens, each)? == End::Stopped {
            return Ok(End::Stopped);
        }
        self.give(sessions, rests)?;
        Ok(End::Finished)
    }

    /// Gives the sessions what was read, each with the end of its text that is no tokens yet.
    fn give(&self, sessions: &mut [Session], rests: Vec<OpenText>) -> Result<()> {
        let with_rest = |(state, text): (State, OpenText)| {
            let tokens = state.tails()[0].tokens.clone();
            state.with_tails(vec![Tail { tokens, text }])
        };
        let states = self.reader.states()?.into_iter().zip(rests).map(with_rest).collect::<Result<Vec<_>>>()?;
        sessions.iter_mut().zip(states).for_each(|(session, state)| session.take(state));
        Ok(())
    }

    /// One text is tokenized at a time, on all threads. Gives what the texts' ends left open, or `None` where `each` has stopped it.
    fn read_in_turn(
        &mut self,
        streams: Vec<TokenStream>,
        each: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Option<Vec<OpenText>>> {
        let mut streams: Vec<TokenStream> = streams.into_iter().map(|stream| stream.on_threads(&self.threads)).collect();
        let mut tokens: Vec<Tokens<'_>> = streams.iter_mut().map(|stream| stream as Tokens<'_>).collect();
        let end = self.reader.read_all(&mut tokens, each)?;
        Ok((end == End::Finished).then(|| streams.iter().map(TokenStream::rest).collect()))
    }

    /// Texts are tokenized ahead, each on a thread of its own, while a GPU reads. Gives what [`SideBySide::read_in_turn`] does.
    fn read_ahead(
        &mut self,
        streams: Vec<TokenStream>,
        each: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Option<Vec<OpenText>>> {
        let start = |stream| TokenPrefetch::start(stream, Arc::default());
        let mut streams: Vec<TokenPrefetch> = streams.into_iter().map(start).collect::<Result<_>>()?;
        let mut tokens: Vec<Tokens<'_>> = streams.iter_mut().map(|stream| stream as Tokens<'_>).collect();
        let end = self.reader.read_all(&mut tokens, each)?;
        let rests = || streams.iter().map(|stream| stream.rest().cloned().unwrap_or_default()).collect();
        Ok((end == End::Finished).then(rests))
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
