//! Reading and writing safetensors: one file, or shards with an index; and reading GGUF, under Hugging Face's names. Headers are read when a file is opened, tensors when they are asked
//! for.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use armt_engine::DType;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::Value;

use super::entry::FileTensor;
use super::gguf::{Gguf, Quantised};
use super::llama_cpp::{self, Renamed};
use crate::error::{Error, Result};
use crate::files::{Beside, read_json};

/// A tensor of a file: name, shape, values as f32.
pub type Found = (String, Vec<usize>, Vec<f32>);

/// Where a tensor lies.
#[derive(Clone)]
struct Place {
    file: usize,
    stored: Stored,
    shape: Vec<usize>,
    bytes: Range<u64>,
    /// Heads whose rows are kept in pairs, as llama.cpp rotates them.
    paired: Option<usize>,
}

/// How a tensor's numbers are kept.
#[derive(Clone, Copy)]
enum Stored {
    /// In a safetensors file.
    Plain(Dtype),
    /// In a GGUF file.
    Blocks(Quantised),
}

/// The tensors of a model folder or of one file, looked up by name.
pub struct Tensors {
    path: PathBuf,
    files: Arc<Vec<(PathBuf, Mutex<File>)>>,
    index: HashMap<String, Place>,
}

impl Tensors {
    /// Opens `model.safetensors` of a folder, or the shards that `model.safetensors.index.json` lists, or a file by its path. A file that is
    /// no safetensors, or shorter or longer than its header says, and an index that names files outside the folder, are errors.
    pub fn open(path: &Path) -> Result<Self> {
        let mut index = HashMap::new();
        let mut files = Vec::new();
        if path.is_file() && Gguf::is(path) {
            let gguf = Gguf::open(path)?;
            for Renamed { name, tensor, paired } in llama_cpp::names(&gguf)? {
                let (stored, bytes) = (Stored::Blocks(tensor.kind), tensor.at..tensor.at + tensor.bytes);
                index.insert(name, Place { file: 0, stored, shape: tensor.shape.clone(), bytes, paired });
            }
            files.push((path.to_path_buf(), Mutex::new(File::open(path).map_err(|e| Error::io(path, e))?)));
            return Ok(Tensors { path: path.into(), files: Arc::new(files), index });
        }
        for (i, name) in files_of(path)?.into_iter().enumerate() {
            files.push((name.clone(), Mutex::new(open(&name, i, &mut index)?)));
        }
        Ok(Tensors { path: path.into(), files: Arc::new(files), index })
    }

    /// The tensors whose names begin with `prefix`, under the rest of their names.
    pub fn under(&self, prefix: &str) -> Self {
        let own = self.index.iter().filter_map(|(name, place)| Some((name.strip_prefix(prefix)?.to_string(), place.clone())));
        Tensors { path: self.path.clone(), files: self.files.clone(), index: own.collect() }
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
    pub fn weight(&self, names: &[&str]) -> Result<Found> {
        let found = self.find(names)?;
        match found.2.iter().find(|x| !x.is_finite()) {
            Some(bad) => Err(Error::file(&self.path, format!("{} holds {bad}", found.0))),
            None => Ok(found),
        }
    }

    /// The first of several names that is there, and its shape, by the index alone.
    pub fn shape(&self, names: &[&str]) -> Result<(&str, &[usize])> {
        self.place(names).map(|(name, place)| (name.as_str(), place.shape.as_slice()))
    }

    fn place(&self, names: &[&str]) -> Result<(&String, &Place)> {
        let found = names.iter().find_map(|name| self.index.get_key_value(*name));
        found.ok_or_else(|| Error::file(&self.path, format!("it holds no tensor {}", names.join(" or "))))
    }

    /// The first of several names that is there: its name, shape and values as f32.
    pub fn find(&self, names: &[&str]) -> Result<Found> {
        let (name, place) = self.place(names)?;
        let (path, file) = &self.files[place.file];
        let mut data = vec![0; (place.bytes.end - place.bytes.start) as usize];
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file.seek(SeekFrom::Start(place.bytes.start)).and_then(|_| file.read_exact(&mut data));
        read.map_err(|source| Error::io(path, source))?;
        let values = match place.stored {
            Stored::Blocks(kind) => kind.values(&data),
            Stored::Plain(Dtype::F32) => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Stored::Plain(Dtype::BF16) => data.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            Stored::Plain(Dtype::F16) => data.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Stored::Plain(other) => return Err(Error::file(path, format!("{name} should be f32, bf16 or f16, but is {other:?}"))),
        };
        let values = match place.paired {
            Some(heads) => llama_cpp::unpaired(&values, place.shape[0], heads),
            None => values,
        };
        Ok((name.clone(), place.shape.clone(), values))
    }
}

/// The files that a path stands for.
fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    let index = path.join("model.safetensors.index.json");
    let single = path.join("model.safetensors");
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    if single.exists() || !path.is_dir() {
        return Ok(vec![single]);
    }
    if !index.exists() {
        return Err(Error::file(path, "expected model.safetensors, or shards with model.safetensors.index.json, found neither"));
    }
    let value: Value = read_json(&index, "an index of shards")?;
    let map = value.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| Error::file(&index, "expected a weight_map of tensor names to files"))?;
    let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let shard = |name: &str| {
        let plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        let shard = path.join(name);
        match plain && (!shard.exists() || shard.is_file()) {
            true => Ok(shard),
            false => Err(Error::file(&index, format!("expected shards that are files beside it, got '{name}'"))),
        }
    };
    names.into_iter().map(shard).collect()
}

/// Opens a file and adds what its header lists.
fn open(path: &Path, number: usize, index: &mut HashMap<String, Place>) -> Result<File> {
    let io = |source| Error::io(path, source);
    let refuse = |message: String| Error::file(path, message);
    let mut file = File::open(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    let mut header = [0; 8];
    file.read_exact(&mut header).map_err(|_| refuse("expected a safetensors file, got one of fewer than 8 bytes".into()))?;
    let length = u64::from_le_bytes(header);
    if length > size - 8 {
        return Err(refuse(format!("expected a safetensors file, but its header of {length} bytes does not fit into its {size}")));
    }
    let mut text = Vec::new();
    (&file).take(length).read_to_end(&mut text).map_err(io)?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|e| refuse(format!("expected a safetensors header: {e}")))?;
    let begin = 8 + length;
    let mut spans = Vec::new();
    for (name, info) in metadata.tensors() {
        let (from, to) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let elements = info.shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size as u64));
        let bits = elements.and_then(|n| n.checked_mul(info.dtype.bitsize() as u64));
        if from > to || bits != (to - from).checked_mul(8) {
            return Err(refuse(format!("{name} of shape {:?} does not have its {from} to {to} bytes", info.shape)));
        }
        spans.push((from, to));
        let (stored, bytes) = (Stored::Plain(info.dtype), begin + from..begin + to);
        index.insert(name, Place { file: number, stored, shape: info.shape.clone(), bytes, paired: None });
    }
    spans.sort_unstable();
    let end = spans.into_iter().try_fold(0, |end, (from, to)| (from == end).then_some(to));
    if end != Some(size - begin) {
        return Err(refuse(format!("its tensors do not lie one after the other in its {} bytes", size - begin)));
    }
    Ok(file)
}

/// A safetensors file that is written tensor by tensor, in any order, without keeping any.
pub struct Writing {
    beside: Beside,
    path: PathBuf,
    places: HashMap<String, (u64, usize)>,
    dtype: DType,
}

impl Writing {
    /// Begins a file of tensors of these names and shapes, in f32 or bf16.
    pub fn create(path: &Path, tensors: &[(String, Vec<usize>)], dtype: DType) -> Result<Self> {
        let (stored, size) = if dtype == DType::BF16 { (Dtype::BF16, 2) } else { (Dtype::F32, 4) };
        let (mut infos, mut places, mut at) = (Vec::new(), HashMap::new(), 0);
        // As the safetensors crate orders them.
        let mut tensors: Vec<&(String, Vec<usize>)> = tensors.iter().collect();
        tensors.sort();
        for (tensor, shape) in tensors {
            let elements: usize = shape.iter().product();
            let end = at + elements * size;
            infos.push((tensor.clone(), TensorInfo { dtype: stored, shape: shape.clone(), data_offsets: (at, end) }));
            places.insert(tensor.clone(), (at as u64, elements));
            at = end;
        }
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let header = Metadata::new(Some(metadata), infos).map_err(|e| Error::file(path, e))?;
        let mut text = serde_json::to_vec(&header).map_err(|e| Error::file(path, e))?;
        // Tensors begin at a multiple of 8.
        text.resize(text.len().next_multiple_of(8), b' ');
        let begin = 8 + text.len() as u64;
        places.values_mut().for_each(|(at, _)| *at += begin);
        let mut beside = Beside::create(path)?;
        let head = [(text.len() as u64).to_le_bytes().to_vec(), text].concat();
        beside.file().write_all(&head).and_then(|()| beside.file().set_len(begin + at as u64)).map_err(|e| Error::io(path, e))?;
        Ok(Writing { beside, path: path.into(), places, dtype })
    }

    /// A file of tensors that has them all, to be finished. A parameter is many of them, one or more a layer: they are written one parameter
    /// after the other, so that a single one is on the host.
    pub fn of(path: &Path, tensors: &[FileTensor<'_>], dtype: DType) -> Result<Self> {
        let shapes: Vec<(String, Vec<usize>)> = tensors.iter().map(|tensor| (tensor.name.clone(), tensor.shape())).collect();
        let mut file = Writing::create(path, &shapes, dtype)?;
        let mut tensors: Vec<&FileTensor<'_>> = tensors.iter().collect();
        tensors.sort_by_key(|tensor| tensor.entry.param.name());
        for tensors in tensors.chunk_by(|a, b| a.entry.param.name() == b.entry.param.name()) {
            let values = tensors[0].entry.param.value().to_f32_vec()?;
            tensors.iter().try_for_each(|tensor| file.put(&tensor.name, &tensor.values(&values)))?;
        }
        Ok(file)
    }

    /// Writes one of the tensors. A name that was not said, or another number of values, is an error.
    pub fn put(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let known = self.places.remove(name).filter(|(_, elements)| *elements == values.len());
        let (at, _) =
            known.ok_or_else(|| Error::file(&self.path, format!("{name} of {} values is none of its tensors", values.len())))?;
        let io = |e| Error::io(&self.path, e);
        let file = self.beside.file();
        file.seek(SeekFrom::Start(at)).map_err(io)?;
        for part in values.chunks(1 << 16) {
            let bytes: Vec<u8> = match self.dtype {
                DType::BF16 => part.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
                _ => part.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            file.write_all(&bytes).map_err(io)?;
        }
        Ok(())
    }

    /// Puts the file into its place. One that lacks a tensor is not written.
    pub fn finish(self) -> Result<()> {
        match self.places.keys().next() {
            Some(name) => Err(Error::file(&self.path, format!("not written: it lacks {name}"))),
            None => self.beside.finish(),
        }
    }
}
