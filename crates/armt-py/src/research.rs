//! What a model does inside, as numpy arrays: for a loss or a probe of one's own.

use std::path::PathBuf;

use armt::engine::DType;
use armt::probe;
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt::state::file;
use armt_shipped::find_model;
use numpy::{AllowTypeChange, IntoPyArray, PyArray1, PyArrayLike1, PyArrayLike2, PyArrayLikeDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::error::Result;
use crate::memory::Memory;
use crate::model::{Model, device_of};
use crate::threads::compute;

/// Tokens of texts of equal length.
type Ids<'py> = PyArrayLike2<'py, i32, AllowTypeChange>;

/// An array of some axes.
fn shaped<'py>(py: Python<'py>, values: Vec<f32>, axes: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    values.into_pyarray(py).call_method1("reshape", (PyTuple::new(py, axes)?,))
}

fn batch_of(ids: &Ids<'_>) -> Batch {
    Batch { ids: ids.as_array().iter().copied().collect(), texts: ids.shape()[0], mask: None }
}

impl Model {
    /// The tokens of a text or of an array of them.
    fn tokens(&self, text: &Bound<'_, PyAny>) -> Result<Vec<i32>> {
        match text.cast::<PyString>() {
            Ok(text) => Ok(self.session().tokenizer().encode(text.to_str()?)?),
            Err(_) => Ok(text.extract::<PyArrayLike1<'_, i32, AllowTypeChange>>()?.as_array().to_vec()),
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
/// by side, and begin with an empty memory.
#[pyclass(frozen, module = "armt")]
pub struct TrainableModel {
    model: armt::Model,
}

impl From<armt::Model> for TrainableModel {
    fn from(model: armt::Model) -> Self {
        TrainableModel { model }
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
        Ok(TrainableModel { model })
    }

    /// Every parameter by its name in the model's file, float32, copied.
    fn parameters<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let found = compute(py, || Ok(self.model.export(|param| Ok(param.value()))?))?;
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
        compute(py, || Ok(self.model.import(&given)?))
    }

    /// Logits of texts of tokens [texts, tokens]: float32 [texts, tokens, vocabulary].
    fn forward<'py>(&self, py: Python<'py>, ids: Ids<'py>) -> Result<Bound<'py, PyAny>> {
        let batch = batch_of(&ids);
        let axes = [batch.texts, batch.tokens(), self.model.sizes().vocab];
        let logits = compute(py, || {
            let empty = self.model.empty(batch.texts)?;
            Ok(self.model.forward(&batch, &empty, ScheduleKind::Auto)?.0)
        })?;
        Ok(shaped(py, logits, &axes)?)
    }

    /// The gradients of a loss of the logits, with respect to every parameter, by name. `loss` is called with the logits, float32 [texts,
    /// tokens, vocabulary], and gives its derivative with respect to each of them. Whoever has the loss in another library computes it there:
    /// `torch.from_numpy(logits).requires_grad_()`.
    fn gradients<'py>(&self, py: Python<'py>, ids: Ids<'py>, loss: Bound<'py, PyAny>) -> Result<Bound<'py, PyDict>> {
        let (batch, loss) = (batch_of(&ids), loss.unbind());
        let axes = [batch.texts, batch.tokens(), self.model.sizes().vocab];
        let found = compute(py, || {
            let (empty, mut raised) = (self.model.empty(batch.texts)?, None);
            let done = probe::backward(&self.model, &batch, &empty, &mut |logits| {
                let slopes = Python::attach(|py| -> PyResult<Vec<f32>> {
                    let slopes = loss.call1(py, (shaped(py, logits.to_vec(), &axes)?,))?;
                    let slopes = slopes.bind(py).extract::<PyArrayLikeDyn<'_, f32, AllowTypeChange>>()?;
                    Ok(slopes.as_array().iter().copied().collect())
                });
                slopes.map_err(|error| {
                    raised = Some(error);
                    armt::Error::Interrupted
                })
            });
            if let Some(error) = raised {
                return Err(error.into());
            }
            done?;
            Ok(self.model.export(|param| param.grad())?)
        })?;
        by_name(py, found)
    }

    /// Writes the model's folder: config.json and model.safetensors, in f32. A tokenizer is not its own.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> Result<()> {
        compute(py, || Ok(self.model.save(&folder, DType::F32)?))
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
