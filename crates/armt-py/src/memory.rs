//! A memory as a value: the bytes of its file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::files::write_beside;
use armt::state::contents::Contents;
use numpy::PyArray1;
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use crate::error::Result;

/// What a model has read of a text: a value that can be kept, copied, pickled and asked later. It never changes: to read more gives
/// another memory.
///
/// A memory of one model cannot be used with another: that is an error when it is tried.
#[pyclass(frozen, module = "armt")]
pub struct Memory {
    bytes: Arc<PyBackedBytes>,
    contents: Contents,
}

impl Memory {
    pub fn new(py: Python<'_>, bytes: &[u8]) -> Result<Self> {
        Self::of(PyBytes::new(py, bytes))
    }

    fn of(bytes: Bound<'_, PyBytes>) -> Result<Self> {
        let contents = Contents::of(bytes.as_bytes())?;
        Ok(Memory { bytes: Arc::new(bytes.into()), contents })
    }

    /// The bytes, which any thread can read.
    pub fn bytes(&self) -> &Arc<PyBackedBytes> {
        &self.bytes
    }

    fn python_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok((&*self.bytes).into_pyobject(py)?.into_any())
    }
}

#[pymethods]
impl Memory {
    /// Reads a memory file, as `armt read` and `save` write it. One that is no memory or damaged is an error.
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf) -> Result<Self> {
        let bytes = py.detach(|| std::fs::read(&path)).map_err(|source| armt::Error::io(&path, source))?;
        Self::new(py, &bytes).map_err(|failure| at(&path, failure))
    }

    /// The memory of the bytes of its file.
    #[staticmethod]
    fn from_bytes(data: Bound<'_, PyBytes>) -> Result<Self> {
        Self::of(data)
    }

    /// Writes the memory to a file that `armt ask` takes too, beside it first and then renamed.
    fn save(&self, py: Python<'_>, path: PathBuf) -> Result<()> {
        Ok(py.detach(|| write_beside(&path, &self.bytes))?)
    }

    /// The bytes of its file. Equal memories are equal bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.python_bytes(py)
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.python_bytes(py)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyAny>,))> {
        Ok((py.get_type::<Memory>().getattr("from_bytes")?, (self.python_bytes(py)?,)))
    }

    /// The tensors by their names (`A`, `z`), as numpy arrays that cannot be written to. They are views of the memory's own bytes, but for
    /// tensors in bf16, which numpy has not: these are copied to float32.
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let arrays = PyDict::new(py);
        for tensor in &self.contents.tensors {
            arrays.set_item(&tensor.name, self.array(py, &tensor.name)?)?;
        }
        Ok(arrays)
    }

    /// The associative matrices, float32 [layers, texts, 2 nu d_mem, width]. Another kind of memory has none: an AttributeError.
    #[getter(A)]
    fn matrices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, "A")
    }

    /// The sums of keys, float32 [layers, texts, 2 nu d_mem]. Another kind of memory has none: an AttributeError.
    #[getter]
    fn z<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, "z")
    }

    /// Tokens that were read: those in the memory, and those after them that do not fill a segment yet. The last few characters of a text
    /// are no tokens until more comes or the memory is asked.
    #[getter]
    fn tokens_read(&self) -> u64 {
        self.contents.texts.iter().map(|text| text.tokens + text.open_tokens as u64).max().unwrap_or(0)
    }

    /// Segments in the memory.
    #[getter]
    fn segments_read(&self) -> u64 {
        self.contents.texts.iter().map(|text| text.segments).max().unwrap_or(0)
    }

    /// Tokens after those in the memory that do not fill a segment yet. Questions see them all the same.
    #[getter]
    fn open_tokens(&self) -> usize {
        self.contents.texts.iter().map(|text| text.open_tokens).max().unwrap_or(0)
    }

    /// Bytes after these that are no tokens yet, because more may come. Questions see them all the same.
    #[getter]
    fn open_bytes(&self) -> usize {
        self.contents.texts.iter().map(|text| text.open_bytes).max().unwrap_or(0)
    }

    /// The kind of memory: "associative", say.
    #[getter]
    fn kind(&self) -> &str {
        &self.contents.kind
    }

    /// The fingerprint of the model that it is of.
    #[getter]
    fn fingerprint(&self) -> &str {
        &self.contents.model
    }

    /// The name of the model that it is of, where it is known.
    #[getter]
    fn model_name(&self) -> Option<&str> {
        self.contents.name.as_deref()
    }

    /// Bytes of its file.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes.len()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Memory>().is_ok_and(|other| **other.get().bytes == **self.bytes)
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        self.python_bytes(py)?.hash()
    }

    fn __repr__(&self) -> String {
        let (tokens, segments, bytes) = (self.tokens_read(), self.segments_read(), self.bytes.len());
        let model = self.contents.name.as_deref().unwrap_or(&self.contents.model);
        format!("Memory(tokens_read={tokens}, segments_read={segments}, nbytes={bytes}, model={model:?})")
    }
}

impl Memory {
    fn array<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let missing = || PyAttributeError::new_err(format!("this memory, of kind {}, has no {name}", self.contents.kind));
        let (header, metadata) = SafeTensors::read_metadata(&self.bytes).map_err(|_| missing())?;
        let info = metadata.info(name).ok_or_else(missing)?;
        let flat = match info.dtype {
            Dtype::F32 | Dtype::I32 => {
                let offset = 8 + header + info.data_offsets.0;
                let dtype = if info.dtype == Dtype::F32 { "<f4" } else { "<i4" };
                let count: usize = info.shape.iter().product();
                py.import("numpy")?.call_method1("frombuffer", (self.python_bytes(py)?, dtype, count, offset))?
            }
            _ => {
                let values = self.contents.tensors.iter().find(|tensor| tensor.name == name).ok_or_else(missing)?.values.clone();
                let array = PyArray1::from_vec(py, values).into_any();
                array.call_method("setflags", (false,), None)?;
                array
            }
        };
        flat.call_method1("reshape", (info.shape.clone(),))
    }
}

/// A failure of a file's bytes, with the file's name.
fn at(path: &Path, failure: crate::error::Failure) -> crate::error::Failure {
    match failure {
        crate::error::Failure::Lab(armt_lab::Error::Model(armt::Error::StateFile(words))) => {
            armt::Error::StateFile(format!("{}: {words}", path.display())).into()
        }
        other => other,
    }
}
