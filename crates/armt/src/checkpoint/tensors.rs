//! Reading and writing safetensors: one file, or shards with an index.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt_engine::DType;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::files::write_beside;

/// A tensor of a file: name, shape, values as f32.
type Found = (String, Vec<usize>, Vec<f32>);

/// The tensors of a model folder or of one file, looked up by name.
pub struct Tensors {
    path: PathBuf,
    files: Arc<Vec<(PathBuf, Vec<u8>)>>,
    /// Name to file.
    index: HashMap<String, usize>,
    /// What the files' names begin with and ours do not.
    prefix: String,
}

impl Tensors {
    /// Opens `model.safetensors` of a folder, or the shards that `model.safetensors.index.json` lists, or a file by its path.
    pub fn open(path: &Path) -> Result<Self> {
        let index = path.join("model.safetensors.index.json");
        let single = path.join("model.safetensors");
        let files = if path.is_file() {
            vec![path.to_path_buf()]
        } else if single.exists() || !index.exists() {
            vec![single]
        } else {
            let text = std::fs::read_to_string(&index).map_err(|source| Error::Io { path: index.clone(), source })?;
            let value: Value = serde_json::from_str(&text).map_err(|e| Error::file(&index, e))?;
            let map = value.get("weight_map").and_then(Value::as_object);
            let map = map.ok_or_else(|| Error::file(&index, "expected a weight_map of tensor names to files"))?;
            let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
            names.sort_unstable();
            names.dedup();
            names.into_iter().map(|name| path.join(name)).collect()
        };
        let mut loaded = Vec::new();
        let mut by_name = HashMap::new();
        for (i, file) in files.into_iter().enumerate() {
            let bytes = std::fs::read(&file).map_err(|source| Error::Io { path: file.clone(), source })?;
            let tensors = SafeTensors::deserialize(&bytes).map_err(|e| Error::file(&file, e))?;
            by_name.extend(tensors.names().into_iter().map(|name| (name.to_string(), i)));
            loaded.push((file, bytes));
        }
        Ok(Tensors { path: path.into(), files: Arc::new(loaded), index: by_name, prefix: String::new() })
    }

    /// The tensors whose names begin with `prefix`, under the rest of their names.
    pub fn under(&self, prefix: &str) -> Self {
        let index = self.index.iter().filter_map(|(name, i)| Some((name.strip_prefix(prefix)?.to_string(), *i))).collect();
        Tensors { path: self.path.clone(), files: self.files.clone(), index, prefix: format!("{}{prefix}", self.prefix) }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// A weight: as [`Tensors::find`], and refused if it holds a number that is not finite.
    pub fn weight(&self, names: &[String]) -> Result<Found> {
        let found = self.find(names)?;
        match found.2.iter().find(|x| !x.is_finite()) {
            Some(bad) => Err(Error::file(&self.path, format!("{} holds {bad}", found.0))),
            None => Ok(found),
        }
    }

    /// The first of several names that is there: its name, shape and values as f32.
    pub fn find(&self, names: &[String]) -> Result<Found> {
        let found = names.iter().find_map(|name| self.index.get(name).map(|i| (name, *i)));
        let Some((name, i)) = found else {
            return Err(Error::file(&self.path, format!("it holds no tensor {}", names.join(" or "))));
        };
        let (file, bytes) = &self.files[i];
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| Error::file(file, e))?;
        let view = tensors.tensor(&format!("{}{name}", self.prefix)).map_err(|e| Error::file(file, e))?;
        let data = view.data();
        let values = match view.dtype() {
            Dtype::F32 => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => data.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::F16 => data.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            other => return Err(Error::file(file, format!("{name} should be f32, bf16 or f16, but is {other:?}"))),
        };
        Ok((name.clone(), view.shape().to_vec(), values))
    }
}

/// Writes named f32 values in f32 or bf16.
pub(crate) fn write(path: &Path, tensors: &[Found], dtype: DType, metadata: HashMap<String, String>) -> Result<()> {
    let stored = if dtype == DType::BF16 { Dtype::BF16 } else { Dtype::F32 };
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, _, values)| match stored {
            Dtype::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), bytes)| {
            let view = TensorView::new(stored, shape.clone(), bytes).map_err(|e| Error::file(path, e))?;
            Ok((name.as_str(), view))
        })
        .collect::<Result<Vec<_>>>()?;
    let file = safetensors::serialize(views, Some(metadata)).map_err(|e| Error::file(path, e))?;
    write_beside(path, &file)
}
