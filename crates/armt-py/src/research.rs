//! What a model does inside, as numpy arrays: for a loss or a probe of one's own.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use armt::engine::DType;
use armt::probe;
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt::state::file;
use armt_shipped::find_model;
use numpy::{AllowTypeChange, IntoPyArray, PyArray1, PyArrayLikeDyn, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::error::{Result, refuse};
use crate::memory::Memory;
use crate::model::{Model, device_of};
use crate::threads::compute;

/// An array of some axes.
fn shaped<'py>(py: Python<'py>, values: Vec<f32>, axes: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    values.into_pyarray(py).call_method1("reshape", (PyTuple::new(py, axes)?,))
}

/// Whole numbers of so many axes, as tokens, and the axes. What numpy would round or cut to such numbers is refused.
fn tokens_of(given: &Bound<'_, PyAny>, axes: usize) -> Result<(Vec<i32>, Vec<usize>)> {
    let array = given.py().import("numpy")?.call_method1("asarray", (given,))?;
    let (dtype, shape) = (array.getattr("dtype")?, array.getattr("shape")?.extract::<Vec<usize>>()?);
    let kind: String = dtype.getattr("kind")?.extract()?;
    if !["i", "u"].contains(&kind.as_str()) && shape.iter().product::<usize>() > 0 {
        return Err(refuse("tokens as whole numbers", dtype.str()?.to_string()));
    }
    if shape.len() != axes {
        return Err(refuse(format!("tokens in an array of {axes} axes"), format!("one of shape {shape:?}")));
    }
    let wide = array.call_method1("astype", ("int64",))?.extract::<PyReadonlyArrayDyn<'_, i64>>()?;
    let of = |token: &i64| i32::try_from(*token).map_err(|_| refuse("tokens of 32 bits", token));
    let tokens = wide.as_array().iter().map(of).collect::<Result<_>>()?;
    Ok((tokens, shape))
}

/// Texts of equal length, `[texts, tokens]`.
fn batch_of(ids: &Bound<'_, PyAny>) -> Result<Batch> {
    let (ids, shape) = tokens_of(ids, 2)?;
    Ok(Batch { ids, texts: shape[0], mask: None })
}

impl Model {
    /// The tokens of a text or of an array of them.
    fn tokens(&self, text: &Bound<'_, PyAny>) -> Result<Vec<i32>> {
        match text.cast::<PyString>() {
            Ok(text) => self.encode(text.py(), text.to_str()?),
            Err(_) => Ok(tokens_of(text, 1)?.0),
        }
    }
}

#[pymethods]
impl Model {
    /// The logarithm of the probability of each token but the first, given those before it and what the memory has read: float32 [tokens - 1].
    /// `text` is a str or an array of tokens.
    #[pyo3(signature = (text, memory = None))]
    fn logprobs<'py>(
        &self,
        py: Python<'py>,
        text: Bound<'py, PyAny>,
        memory: Option<&Memory>,
    ) -> Result<Bound<'py, PyArray1<f32>>> {
        let ids = self.tokens(&text)?;
        let found = compute(py, || {
            let session = self.session_of(memory)?;
            Ok(probe::log_probabilities(session.model(), &ids, session.closed()?)?)
        })?;
        Ok(found.into_pyarray(py))
    }

    /// Runs a text, a str or an array of tokens, from a memory or from nothing: its logits, float32 [tokens, vocabulary], and the memory after
    /// it. All logits are kept, so this is for short texts.
    #[pyo3(signature = (text, memory = None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        text: Bound<'py, PyAny>,
        memory: Option<&Memory>,
    ) -> Result<(Bound<'py, PyAny>, Memory)> {
        let ids = self.tokens(&text)?;
        let axes = [ids.len(), self.session().model().sizes().vocab];
        let (logits, bytes) = compute(py, || {
            let session = self.session_of(memory)?;
            let batch = Batch { ids, texts: 1, mask: None };
            let (logits, state) = session.model().forward(&batch, session.closed()?, ScheduleKind::Auto)?;
            Ok((logits, file::to_bytes(&state, session.owner())?))
        })?;
        Ok((shaped(py, logits, &axes)?, Memory::new(py, &bytes)?))
    }

    /// Runs a text and keeps all of it: `logits` [tokens, vocabulary], `hidden` [layers + 1, tokens, width] (the embedding's outputs, then each
    /// layer's, before the last norm), and `memories`, the memory after each segment, with its A and z.
    #[pyo3(signature = (text, memory = None))]
    fn probe<'py>(&self, py: Python<'py>, text: Bound<'py, PyAny>, memory: Option<&Memory>) -> Result<Bound<'py, PyAny>> {
        let ids = self.tokens(&text)?;
        let (tokens, sizes) = (ids.len(), self.session().model().sizes());
        let (logits, hidden, memories) = compute(py, || {
            let session = self.session_of(memory)?;
            let found = probe::probe(session.model(), &Batch { ids, texts: 1, mask: None }, session.closed()?)?;
            let bytes = found.states.iter().map(|state| file::to_bytes(state, session.owner()));
            let bytes = bytes.collect::<armt::Result<Vec<_>>>()?;
            Ok((found.logits, found.hidden, bytes))
        })?;
        let logits = shaped(py, logits, &[tokens, sizes.vocab])?;
        let hidden = shaped(py, hidden, &[sizes.layers + 1, tokens, sizes.width])?;
        let memories = memories.iter().map(|bytes| Memory::new(py, bytes)).collect::<Result<Vec<_>>>()?;
        Ok(py.import("armt._probe")?.getattr("Probe")?.call1((logits, hidden, memories))?)
    }
}

/// A model whose parameters can be changed, and their gradients asked for. It has no tokenizer: texts are tokens, several of equal length side
/// by side, and begin with an empty memory. Threads take turns at it, so that each has gradients of its own.
#[pyclass(frozen, module = "armt")]
pub struct TrainableModel {
    model: armt::Model,
    turn: Mutex<()>,
}

impl From<armt::Model> for TrainableModel {
    fn from(model: armt::Model) -> Self {
        TrainableModel { model, turn: Mutex::new(()) }
    }
}

impl TrainableModel {
    /// Waits for the others. Not with Python's lock, which one of them may need to end.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes when it is the calling thread's turn.
    fn alone<R: Send>(&self, py: Python<'_>, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        compute(py, || {
            let _turn = self.turn();
            work()
        })
    }
}

#[pymethods]
impl TrainableModel {
    /// Loads a model's folder, a run's, or a model that comes with the package, to be trained.
    #[staticmethod]
    #[pyo3(signature = (name, *, device = "auto", dtype = None))]
    fn from_pretrained(py: Python<'_>, name: PathBuf, device: &str, dtype: Option<&str>) -> Result<Self> {
        let model = compute(py, || {
            let (device, dtype) = device_of(device, dtype)?;
            Ok(armt::Model::load_trainable(&find_model(&name)?, dtype, &device)?)
        })?;
        Ok(model.into())
    }

    /// Every parameter by its name in the model's file, float32, copied.
    fn parameters<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let found = self.alone(py, || Ok(self.model.export(|param| Ok(param.value()))?))?;
        by_name(py, found)
    }

    /// Sets every parameter that is given by its name in the model's file; the others stay. A name that the model does not have, and an array of
    /// another shape, is an error.
    fn set_parameters(&self, py: Python<'_>, parameters: Bound<'_, PyDict>) -> Result<()> {
        let mut given = Vec::new();
        for (name, array) in parameters.iter() {
            let array = array.extract::<PyArrayLikeDyn<'_, f32, AllowTypeChange>>()?;
            given.push((name.extract::<String>()?, array.shape().to_vec(), array.as_array().iter().copied().collect::<Vec<f32>>()));
        }
        self.alone(py, || Ok(self.model.import(&given)?))
    }

    /// Logits of texts of tokens [texts, tokens]: float32 [texts, tokens, vocabulary].
    fn forward<'py>(&self, py: Python<'py>, ids: Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let batch = batch_of(&ids)?;
        let axes = [batch.texts, batch.tokens(), self.model.sizes().vocab];
        let logits = self.alone(py, || {
            let empty = self.model.empty(batch.texts)?;
            Ok(self.model.forward(&batch, &empty, ScheduleKind::Auto)?.0)
        })?;
        Ok(shaped(py, logits, &axes)?)
    }

    /// The gradients of a loss of the logits, with respect to every parameter, by name. `loss` is called with the logits, float32 [texts,
    /// tokens, vocabulary], and gives its derivative with respect to each of them, in an array of that shape. Whoever has the loss in another
    /// library computes it there: `torch.from_numpy(logits).requires_grad_()`. While it is computed other threads may have their turn; that
    /// none of them sets parameters meanwhile is its caller's matter.
    fn gradients<'py>(&self, py: Python<'py>, ids: Bound<'py, PyAny>, loss: Bound<'py, PyAny>) -> Result<Bound<'py, PyDict>> {
        let (batch, loss) = (batch_of(&ids)?, loss.unbind());
        let axes = [batch.texts, batch.tokens(), self.model.sizes().vocab];
        let found = compute(py, || {
            let (empty, mut raised) = (self.model.empty(batch.texts)?, None);
            let mut turn = Some(self.turn());
            let done = probe::backward(&self.model, &batch, &empty, &mut |logits| {
                turn = None;
                let slopes = Python::attach(|py| -> PyResult<Vec<f32>> {
                    let slopes = loss.call1(py, (shaped(py, logits.to_vec(), &axes)?,))?;
                    let slopes = slopes.bind(py).extract::<PyArrayLikeDyn<'_, f32, AllowTypeChange>>()?;
                    if slopes.shape() != axes {
                        let expected = format!("a derivative with the logits' shape {axes:?}");
                        return Err(refuse(expected, format!("{:?}", slopes.shape())).into());
                    }
                    let slopes: Vec<f32> = slopes.as_array().iter().copied().collect();
                    match slopes.iter().find(|slope| !slope.is_finite()) {
                        Some(slope) => Err(refuse("a derivative of finite numbers", slope).into()),
                        None => Ok(slopes),
                    }
                });
                turn = Some(self.turn());
                slopes.map_err(|error| {
                    raised = Some(error);
                    armt::Error::Interrupted
                })
            });
            if let Some(error) = raised {
                return Err(error.into());
            }
            done?;
            let found = self.model.export(|param| param.grad())?;
            drop(turn);
            Ok(found)
        })?;
        by_name(py, found)
    }

    /// Writes the model's folder: config.json and model.safetensors, in f32. A tokenizer is not its own.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> Result<()> {
        self.alone(py, || Ok(self.model.save(&folder, DType::F32)?))
    }

    /// Tokens that the model knows.
    #[getter]
    fn vocabulary(&self) -> usize {
        self.model.sizes().vocab
    }

    /// Tokens of a segment.
    #[getter]
    fn segment_size(&self) -> usize {
        self.model.config().segment_size
    }

    /// Number of parameters.
    #[getter]
    fn num_parameters(&self) -> usize {
        self.model.parameters()
    }
}

fn by_name<'py>(py: Python<'py>, found: Vec<(String, Vec<usize>, Vec<f32>)>) -> Result<Bound<'py, PyDict>> {
    let arrays = PyDict::new(py);
    for (name, shape, values) in found {
        arrays.set_item(name, shaped(py, values, &shape)?)?;
    }
    Ok(arrays)
}
