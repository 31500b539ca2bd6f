//! State files: a state as safetensors, with the model's fingerprint, what was read, and a checksum in its metadata.

use std::collections::HashMap;
use std::path::Path;

use armt_engine::{DType, Device, Tensor};
use half::bf16;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::{Begins, Count, State, StateLayout};
use crate::error::{Error, Result};
use crate::files::write_beside;

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

/// Writes a state of the model with this fingerprint to a file, beside it first and then renamed. A state that holds NaN or infinity is
/// refused: no one could read it back.
pub fn save(state: &State, path: &Path, fingerprint: &str) -> Result<()> {
    for (name, t) in state.tensors().filter(|(_, t)| t.dtype().is_float()) {
        if let Some(bad) = t.to_f32_vec()?.iter().find(|x| !x.is_finite()) {
            return Err(Error::file(path, format!("not written: {name} of the memory holds {bad}")));
        }
    }
    let mut data = state.tensors().map(|(name, t)| stored(name, t)).collect::<Result<Vec<_>>>()?;
    data.sort_by_key(|s| s.name);
    let sum = checksum(data.iter().map(|s| (s.name, s.shape.as_slice(), s.bytes.as_slice())));
    let metadata = HashMap::from([
        ("format".to_string(), FORMAT.to_string()),
        ("fingerprint".into(), fingerprint.into()),
        ("kind".into(), state.kind().into()),
        ("batch".into(), state.texts().to_string()),
        ("tokens_read".into(), state.tokens_read().to_string()),
        ("segments_read".into(), state.segments_read().to_string()),
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

/// Reads a state of the model with this layout and fingerprint, to the bit. Refused with the reason: a file that is no state, of another
/// model, truncated, altered, or with a number that is not finite.
pub fn load(path: &Path, layout: &StateLayout, fingerprint: &str, device: &Device) -> Result<State> {
    let refuse = |message: String| Error::file(path, message);
    let bytes = std::fs::read(path).map_err(|source| Error::io(path, source))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| refuse(format!("not a whole memory file: {e}")))?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| refuse(e.to_string()))?;
    let empty = HashMap::new();
    let metadata = header.metadata().as_ref().unwrap_or(&empty);
    let get = |key: &str| metadata.get(key).map(String::as_str).unwrap_or_default();
    if get("format") != FORMAT {
        return Err(refuse(format!("expected a memory file ({FORMAT}), but its format is '{}'", get("format"))));
    }
    if get("fingerprint") != fingerprint {
        let message =
            format!("it is the memory of another model (fingerprint {}, this model's is {fingerprint})", get("fingerprint"));
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
    let texts = number("batch")? as usize;
    let count = Count { tokens: number("tokens_read")?, segments: number("segments_read")? };
    let tensors = match layout.begins {
        Begins::Absent if names.is_empty() => Vec::new(),
        _ => layout.parts.iter().map(|part| tensor(part.name)).collect::<Result<_>>()?,
    };
    layout.state(tensors, vec![count; texts]).map_err(|e| refuse(e.to_string()))
}
