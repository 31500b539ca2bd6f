//! A model with its tokenizer: texts in, memories out, questions against memories.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use armt::Session;
use armt::adapter::Adapter;
use armt::engine::{DType, Device};
use armt::generate::Options;
use armt::reader::{End, Progress};
use armt_shipped::{find_adapter, find_model};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBool;

use crate::error::{Failure, Result, refuse};
use crate::memory::Memory;
use crate::source::source;
use crate::speech::{Picking, Speaking, Stream, answer};
use crate::threads::compute;

/// A model and its tokenizer. It never changes, and any number of threads can use it.
///
/// Made by `Model.from_pretrained`. A model that is pickled is loaded again from its folder where it arrives.
#[pyclass(frozen, module = "armt")]
pub struct Model {
    /// A session that has read nothing.
    session: Session,
    /// The last memory that was used, as a session: whoever asks one memory several things has it opened once.
    last: Mutex<Option<(Arc<PyBackedBytes>, Session)>>,
    /// What it was loaded with, for pickle.
    loaded: (PathBuf, Option<PathBuf>, String, Option<String>),
}

/// The device and the type of the computation that are named, as the command line's `--device` and `--dtype` do.
pub fn device_of(device: &str, dtype: Option<&str>) -> Result<(Device, DType)> {
    let device = match device {
        "auto" => Device::auto().0,
        "cpu" => Device::cpu(),
        "cuda" => Device::cuda(0)?,
        other => match other.strip_prefix("cuda:").and_then(|number| number.parse().ok()) {
            Some(number) => Device::cuda(number)?,
            None => return Err(refuse("device auto, cpu, cuda or cuda:N", other)),
        },
    };
    match (dtype, device.is_cuda()) {
        (None, true) | (Some("bf16"), true) => Ok((device, DType::BF16)),
        (None, false) | (Some("f32"), _) => Ok((device, DType::F32)),
        (Some("int8"), false) => Ok((device, DType::I8)),
        (Some("bf16"), false) => Err(refuse("dtype f32 or int8 on the CPU; bf16 needs a GPU", "bf16")),
        (Some("int8"), true) => Err(refuse("dtype bf16 or f32 on a GPU; int8 is for the CPU", "int8")),
        (Some(other), _) => Err(refuse("dtype f32, bf16 or int8", other)),
    }
}

impl Model {
    /// A session that has read nothing.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The session of a memory, or of nothing.
    pub fn session_of(&self, memory: Option<&Memory>) -> Result<Session> {
        let Some(memory) = memory else { return Ok(self.session.clone()) };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, session)) = last.as_ref().filter(|(bytes, _)| Arc::ptr_eq(bytes, memory.bytes())) {
            return Ok(session.clone());
        }
        let mut session = self.session.clone();
        session.from_bytes(memory.bytes())?;
        *last = Some((memory.bytes().clone(), session.clone()));
        Ok(session)
    }

    /// The session of a memory whose text has ended: what is asked of it next need not end it again.
    fn asked(&self, memory: Option<&Memory>) -> Result<Session> {
        let session = self.session_of(memory)?;
        session.closed()?;
        if let Some(memory) = memory {
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((memory.bytes().clone(), session.clone()));
        }
        Ok(session)
    }

    fn say<'py>(&self, py: Python<'py>, memory: Option<&Memory>, speaking: &Speaking) -> Result<Bound<'py, PyAny>> {
        let said = compute(py, || {
            let mut raised = None;
            let said = speaking.say(&self.asked(memory)?, &mut |_| signals(&mut raised));
            raised.map_or_else(|| Ok(said?), |error| Err(Failure::Python(error)))
        })?;
        Ok(answer(py, &said)?)
    }
}

/// Looks for Ctrl-C, and keeps what it finds.
fn signals(raised: &mut Option<PyErr>) -> ControlFlow<()> {
    heard(Python::attach(|py| py.check_signals()), raised)
}

fn heard(result: PyResult<()>, raised: &mut Option<PyErr>) -> ControlFlow<()> {
    match result {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            *raised = Some(error);
            ControlFlow::Break(())
        }
    }
}

/// Whoever hears of a reading's progress: a callable, or the package's own where it is True.
fn listener(progress: Option<Bound<'_, PyAny>>) -> PyResult<Option<Py<PyAny>>> {
    let Some(progress) = progress.filter(|p| !p.is_none()) else { return Ok(None) };
    match progress.cast::<PyBool>() {
        Ok(flag) if flag.is_true() => Ok(Some(progress.py().import("armt._progress")?.call_method0("bar")?.unbind())),
        Ok(_) => Ok(None),
        Err(_) => Ok(Some(progress.unbind())),
    }
}

/// Tells of the progress, in tokens of this reading, and looks for Ctrl-C.
fn tell(progress: Progress, before: u64, listener: Option<&Py<PyAny>>, raised: &mut Option<PyErr>) -> ControlFlow<()> {
    let told = Python::attach(|py| {
        listener.map_or(Ok(()), |listener| listener.call1(py, (progress.tokens.saturating_sub(before),)).map(drop))?;
        py.check_signals()
    });
    heard(told, raised)
}

#[pymethods]
impl Model {
    /// Loads a model: a folder with config.json, model.safetensors and tokenizer.json, a run's folder (of which its best model is taken), a
    /// GGUF file (which has no memory), or the name of a model that comes with the package: "babilong-qa1", "books".
    ///
    /// `adapter` is a folder of an adapter of the model, or its run's. `device` is "auto" (the GPU if there is one that works), "cpu", "cuda"
    /// or "cuda:N"; `dtype` "f32", "bf16" (GPUs) or "int8" (the CPU: f32 with matrices in
    /// eight bits), by default bf16 on a GPU and f32 on the CPU.
    #[staticmethod]
    #[pyo3(signature = (name, *, adapter = None, device = "auto", dtype = None))]
    fn from_pretrained(py: Python<'_>, name: PathBuf, adapter: Option<PathBuf>, device: &str, dtype: Option<&str>) -> Result<Self> {
        let session = compute(py, || {
            let (folder, adapter) = (find_model(&name)?, adapter.as_deref().map(find_adapter));
            let (device, dtype) = device_of(device, dtype)?;
            Ok(match adapter {
                Some(adapter) => Session::open_adapted(folder, &Adapter::open(&adapter)?, dtype, &device)?,
                None => Session::open_on(folder, dtype, &device)?,
            })
        })?;
        // A path that means something only here, and now, would not be found elsewhere.
        let absolute = |path: PathBuf| if path.exists() { std::path::absolute(&path).unwrap_or(path) } else { path };
        let loaded = (absolute(name), adapter.map(absolute), device.to_string(), dtype.map(String::from));
        Ok(Model { session, last: Mutex::default(), loaded })
    }

    /// Reads a text: a str, an os.PathLike of a file in UTF-8, or an iterable of str, whose pieces are read as one text and never kept.
    ///
    /// With a memory it goes on where that memory's text ended, within a word too: texts read one after the other leave, to the bit, the
    /// memory that all of them read at once would leave. `new_document` sets the text apart instead: it begins a segment of its own.
    /// `progress` is called with the number of tokens read after every group of segments, or True for a bar. Ctrl-C raises
    /// KeyboardInterrupt between groups.
    #[pyo3(signature = (text, memory = None, *, new_document = false, progress = None))]
    fn read(
        &self,
        py: Python<'_>,
        text: Bound<'_, PyAny>,
        memory: Option<&Memory>,
        new_document: bool,
        progress: Option<Bound<'_, PyAny>>,
    ) -> Result<Memory> {
        let (source, listener) = (source(&text)?, listener(progress)?);
        let bytes = compute(py, || {
            let mut session = self.session_of(memory)?;
            if new_document && memory.is_some() {
                session.end_document()?;
            }
            let (before, mut raised) = (session.state().tokens_read(), None);
            let mut reading = session.reading(vec![source], Arc::default())?;
            let end = reading.run(&mut |progress| tell(progress, before, listener.as_ref(), &mut raised));
            if let Some(error) = raised {
                return Err(error.into());
            }
            end?;
            session.set_state(reading.into_state()?)?;
            Ok(session.to_bytes()?)
        })?;
        Memory::new(py, &bytes)
    }

    /// Reads texts of any lengths side by side, `batch_size` at a time, each into a memory of its own: on the CPU to the bit those that `read`
    /// gives. `memories` has for each text the memory that it goes on from, or None.
    #[pyo3(signature = (texts, memories = None, *, batch_size = 16, progress = None))]
    fn read_batch(
        &self,
        py: Python<'_>,
        texts: Vec<Bound<'_, PyAny>>,
        memories: Option<Vec<Option<PyRef<'_, Memory>>>>,
        batch_size: usize,
        progress: Option<Bound<'_, PyAny>>,
    ) -> Result<Vec<Memory>> {
        if batch_size == 0 {
            return Err(refuse("a batch_size of at least 1", 0));
        }
        if let Some(memories) = memories.as_ref().filter(|memories| memories.len() != texts.len()) {
            return Err(refuse(format!("{} memories, one for each text", texts.len()), memories.len()));
        }
        let listener = listener(progress)?;
        let mut sources = texts.iter().map(source).collect::<Result<Vec<_>>>()?;
        let bytes: Vec<Option<Arc<PyBackedBytes>>> = match &memories {
            Some(memories) => memories.iter().map(|memory| memory.as_ref().map(|memory| memory.bytes().clone())).collect(),
            None => vec![None; texts.len()],
        };
        let read = compute(py, || {
            let (mut read, mut done, mut raised) = (Vec::with_capacity(sources.len()), 0, None);
            for batch in bytes.chunks(batch_size) {
                let open = |bytes: &Option<Arc<PyBackedBytes>>| -> Result<Session> {
                    let mut session = self.session.clone();
                    bytes.as_ref().map_or(Ok(()), |bytes| session.from_bytes(bytes))?;
                    Ok(session)
                };
                let mut sessions = batch.iter().map(open).collect::<Result<Vec<_>>>()?;
                let tokens = |sessions: &[Session]| sessions.iter().map(|s| s.state().tokens_read()).sum::<u64>();
                let before = tokens(&sessions);
                let texts = sources.drain(..batch.len()).collect();
                let end = Session::read_all_until(&mut sessions, texts, &mut |progress| {
                    let so_far = Progress { tokens: progress.tokens + done, ..progress };
                    tell(so_far, before, listener.as_ref(), &mut raised)
                });
                if let Some(error) = raised.take() {
                    return Err(error.into());
                }
                if end? == End::Stopped {
                    return Err(armt_lab::Error::Interrupted.into());
                }
                done += tokens(&sessions) - before;
                for session in &sessions {
                    read.push(session.to_bytes()?);
                }
            }
            Ok(read)
        })?;
        read.iter().map(|bytes| Memory::new(py, bytes)).collect()
    }

    /// The answer to a question against a memory, which is only read: what the model goes on with after the question, and after what it was
    /// trained to answer behind. `stop` are texts before which the answer ends. Without temperature, top_k or top_p the most probable
    /// token is taken each time. The answer is a str that knows its tokens and their probabilities.
    #[pyo3(signature = (memory, question, *, max_tokens = 64, temperature = None, top_k = None, top_p = None, seed = 0, stop = Vec::new()))]
    fn ask<'py>(
        &self,
        py: Python<'py>,
        memory: Option<&Memory>,
        question: String,
        max_tokens: usize,
        temperature: Option<f32>,
        top_k: Option<usize>,
        top_p: Option<f32>,
        seed: u64,
        stop: Vec<String>,
    ) -> Result<Bound<'py, PyAny>> {
        let picking = Picking { temperature, top_k, top_p, seed };
        self.say(py, memory, &speaking(question, true, max_tokens, picking, stop))
    }

    /// What the model goes on with after a prompt as it stands, from a memory or from nothing.
    #[pyo3(signature = (prompt, memory = None, *, max_tokens = 64, temperature = None, top_k = None, top_p = None, seed = 0, stop = Vec::new()))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: String,
        memory: Option<&Memory>,
        max_tokens: usize,
        temperature: Option<f32>,
        top_k: Option<usize>,
        top_p: Option<f32>,
        seed: u64,
        stop: Vec<String>,
    ) -> Result<Bound<'py, PyAny>> {
        let picking = Picking { temperature, top_k, top_p, seed };
        self.say(py, memory, &speaking(prompt, false, max_tokens, picking, stop))
    }

    /// An answer to a question as it comes: an iterator of pieces of text.
    #[pyo3(signature = (memory, question, *, max_tokens = 64, temperature = None, top_k = None, top_p = None, seed = 0, stop = Vec::new()))]
    fn ask_stream(
        &self,
        py: Python<'_>,
        memory: Option<&Memory>,
        question: String,
        max_tokens: usize,
        temperature: Option<f32>,
        top_k: Option<usize>,
        top_p: Option<f32>,
        seed: u64,
        stop: Vec<String>,
    ) -> Result<Stream> {
        let picking = Picking { temperature, top_k, top_p, seed };
        let session = compute(py, || self.asked(memory))?;
        Stream::start(session, speaking(question, true, max_tokens, picking, stop))
    }

    /// What the model goes on with after a prompt as it comes: an iterator of pieces of text.
    #[pyo3(signature = (prompt, memory = None, *, max_tokens = 64, temperature = None, top_k = None, top_p = None, seed = 0, stop = Vec::new()))]
    fn generate_stream(
        &self,
        py: Python<'_>,
        prompt: String,
        memory: Option<&Memory>,
        max_tokens: usize,
        temperature: Option<f32>,
        top_k: Option<usize>,
        top_p: Option<f32>,
        seed: u64,
        stop: Vec<String>,
    ) -> Result<Stream> {
        let picking = Picking { temperature, top_k, top_p, seed };
        let session = compute(py, || self.asked(memory))?;
        Stream::start(session, speaking(prompt, false, max_tokens, picking, stop))
    }

    /// The tokens of a text.
    pub fn encode(&self, py: Python<'_>, text: &str) -> Result<Vec<i32>> {
        py.detach(|| Ok(self.session.tokenizer().encode(text)?))
    }

    /// The text of some tokens.
    fn decode(&self, tokens: Vec<i32>) -> Result<String> {
        Ok(self.session.tokenizer().decode(&tokens)?)
    }

    /// The model's name.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.session.owner().name.as_deref()
    }

    /// A number that tells this model from any other: memories have that of theirs.
    #[getter]
    fn fingerprint(&self) -> &str {
        &self.session.owner().model
    }

    /// Where it computes: "cpu" or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.session.model().device().to_string()
    }

    /// The type of the computation: "f32", "bf16", or "int8" for f32 with the backbone's matrices in eight bits.
    #[getter]
    fn dtype(&self) -> String {
        self.session.model().weights_dtype().to_string()
    }

    /// Layers.
    #[getter]
    fn layers(&self) -> usize {
        self.session.model().sizes().layers
    }

    /// Numbers that go from layer to layer for each position.
    #[getter]
    fn width(&self) -> usize {
        self.session.model().sizes().width
    }

    /// Tokens that the model knows.
    #[getter]
    fn vocabulary(&self) -> usize {
        self.session.model().sizes().vocab
    }

    /// Tokens of a segment.
    #[getter]
    fn segment_size(&self) -> usize {
        self.session.model().config().segment_size
    }

    /// Number of parameters.
    #[getter]
    fn num_parameters(&self) -> usize {
        self.session.model().parameters()
    }

    fn __reduce__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, (PathBuf, Option<PathBuf>, String, Option<String>))> {
        Ok((py.import("armt._pickle")?.getattr("load_model")?, self.loaded.clone()))
    }

    fn __repr__(&self) -> String {
        let parameters = self.session.model().parameters();
        format!(
            "Model({:?}, parameters={parameters}, device={:?}, dtype={:?})",
            self.name().unwrap_or("?"),
            self.device(),
            self.dtype()
        )
    }
}

fn speaking(prompt: String, question: bool, max_tokens: usize, picking: Picking, stop: Vec<String>) -> Speaking {
    let options = Options { max_new_tokens: max_tokens, sampling: picking.sampling(), ..Options::default() };
    Speaking { prompt, question, options, stop }
}
