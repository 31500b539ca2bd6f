//! Memory files: a state as safetensors, with the model's fingerprint, what was read, and a checksum in its metadata.

use std::collections::HashMap;
use std::path::Path;

use armt_engine::{DType, Tensor};
use half::bf16;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::state::{Content, MemoryState};
use crate::error::{Error, Result};
use crate::files::write_beside;
use crate::model::Model;

const FORMAT: &str = "armt-memory-1";

/// A tensor as bytes.
struct Stored {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn stored(name: &'static str, t: &Tensor) -> Result<Stored> {
    let (dtype, bytes) = match t.dtype() {
        DType::F32 => (Dtype::F32, t.to_vec::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
        DType::BF16 => (Dtype::BF16, t.to_vec::<bf16>()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
        DType::I32 => (Dtype::I32, t.to_vec::<i32>()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
    };
    Ok(Stored { name, dtype, shape: t.dims().to_vec(), bytes })
}

/// Of names, shapes and bytes, so that a flipped bit is seen.
fn checksum<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize], &'a [u8])>) -> String {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |byte: u8| h = (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    for (name, shape, bytes) in tensors {
        name.bytes().for_each(&mut add);
        shape.iter().for_each(|s| s.to_le_bytes().into_iter().for_each(&mut add));
        bytes.iter().copied().for_each(&mut add);
    }
    format!("{h:016x}")
}

impl MemoryState {
    /// The memory's size in bytes, as its tensors are.
    pub fn bytes(&self) -> usize {
        self.tensors().iter().map(|(_, t)| t.elements() * t.dtype().size()).sum()
    }

    fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        match &self.content {
            Content::Associative { a, z } => vec![("A", a), ("z", z)],
            Content::Rmt(Some(m)) | Content::Prmt(Some(m)) => vec![("memory", m)],
            Content::Window(Some((keys, mask))) => vec![("window", keys), ("window_mask", mask)],
            Content::Rmt(None) | Content::Prmt(None) | Content::Window(None) | Content::None => vec![],
        }
    }

    /// Writes the memory of `model` to a file, beside it first and then renamed. A memory that holds NaN or infinity is refused: no one
    /// could read it back.
    pub fn save(&self, path: &Path, model: &Model) -> Result<()> {
        for (name, t) in self.tensors().into_iter().filter(|(_, t)| t.dtype().is_float()) {
            if let Some(bad) = t.to_f32_vec()?.iter().find(|x| !x.is_finite()) {
                return Err(Error::file(path, format!("not written: {name} of the memory holds {bad}")));
            }
        }
        let mut data = self.tensors().into_iter().map(|(name, t)| stored(name, t)).collect::<Result<Vec<_>>>()?;
        data.sort_by_key(|s| s.name);
        let sum = checksum(data.iter().map(|s| (s.name, s.shape.as_slice(), s.bytes.as_slice())));
        let metadata = HashMap::from([
            ("format".to_string(), FORMAT.to_string()),
            ("fingerprint".into(), model.fingerprint()?),
            ("kind".into(), model.config().memory.kind().into()),
            ("batch".into(), self.batch.to_string()),
            ("tokens_read".into(), self.tokens_read.to_string()),
            ("segments_read".into(), self.segments_read.to_string()),
            ("checksum".into(), sum),
        ]);
        let views = data
            .iter()
            .map(|s| {
                let view = TensorView::new(s.dtype, s.shape.clone(), &s.bytes).map_err(|e| Error::file(path, e))?;
                Ok((s.name, view))
            })
            .collect::<Result<Vec<_>>>()?;
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| Error::file(path, e))?;
        write_beside(path, &bytes)
    }

    /// Reads a memory of `model`, to the bit. Refused with the reason: a file that is no memory, of another model, truncated, altered, or
    /// with a number that is not finite.
    pub fn load(path: &Path, model: &Model) -> Result<Self> {
        let refuse = |message: String| Error::file(path, message);
        let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| refuse(format!("not a whole memory file: {e}")))?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| refuse(e.to_string()))?;
        let empty = HashMap::new();
        let metadata = header.metadata().as_ref().unwrap_or(&empty);
        let get = |key: &str| metadata.get(key).map(String::as_str).unwrap_or_default();
        if get("format") != FORMAT {
            return Err(refuse(format!("expected a memory file ({FORMAT}), but its format is '{}'", get("format"))));
        }
        let own = model.fingerprint()?;
        if get("fingerprint") != own {
            let message = format!("it is the memory of another model (fingerprint {}, this model's is {own})", get("fingerprint"));
            return Err(refuse(message));
        }
        let mut names: Vec<String> = file.names().into_iter().map(str::to_string).collect();
        names.sort();
        let views = names
            .iter()
            .map(|name| file.tensor(name).map(|v| (name.as_str(), v)).map_err(|e| refuse(e.to_string())))
            .collect::<Result<Vec<_>>>()?;
        if get("checksum") != checksum(views.iter().map(|(name, v)| (*name, v.shape(), v.data()))) {
            return Err(refuse("it is damaged: its checksum does not fit its content".into()));
        }
        let tensor = |name: &str| -> Result<Tensor> {
            let view = file.tensor(name).map_err(|_| refuse(format!("it holds no {name}")))?;
            let (shape, data) = (view.shape(), view.data());
            let device = model.device();
            match view.dtype() {
                Dtype::F32 => {
                    let values: Vec<f32> = data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                    if let Some(bad) = values.iter().find(|x| !x.is_finite()) {
                        return Err(refuse(format!("{name} holds {bad}")));
                    }
                    Ok(Tensor::from_slice(&values, shape, device)?)
                }
                Dtype::BF16 => {
                    let values: Vec<bf16> = data.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
                    if let Some(bad) = values.iter().find(|x| !x.is_finite()) {
                        return Err(refuse(format!("{name} holds {bad}")));
                    }
                    Ok(Tensor::from_slice(&values, shape, device)?)
                }
                Dtype::I32 => {
                    let values: Vec<i32> = data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
                    Ok(Tensor::from_slice(&values, shape, device)?)
                }
                other => Err(refuse(format!("{name} is of type {other:?}"))),
            }
        };
        let number = |key: &str| get(key).parse::<u64>().map_err(|_| refuse(format!("{key} is '{}', not a number", get(key))));
        let (batch, segments_read) = (number("batch")? as usize, number("segments_read")?);
        let started = !names.is_empty();
        let content = match MemoryState::empty(model, batch)?.content {
            Content::Associative { .. } => Content::Associative { a: tensor("A")?, z: tensor("z")? },
            Content::Rmt(_) => Content::Rmt(started.then(|| tensor("memory")).transpose()?),
            Content::Prmt(_) => Content::Prmt(started.then(|| tensor("memory")).transpose()?),
            Content::Window(_) => Content::Window(if started { Some((tensor("window")?, tensor("window_mask")?)) } else { None }),
            Content::None => Content::None,
        };
        let state = MemoryState { content, batch, tokens_read: number("tokens_read")?, segments_read };
        state.expect_fits(model, batch).map_err(|e| refuse(e.to_string()))?;
        Ok(state)
    }
}
