//! GGUF, llama.cpp's files: a header with metadata, and tensors, many of them quantised in blocks.
//!
//! ```text
//! GGUF  version u32  tensors u64  keys u64
//! keys:     name, type u32, value                      a string is its length u64 and its bytes
//! tensors:  name, dims u32, size u64 of each (the innermost first), type u32, offset u64
//! data:     at the next multiple of general.alignment (32)
//!
//! Q8_0  32 values:  d f16, q i8[32]                    d q
//! Q4_0  32 values:  d f16, nibbles                     d (q - 8)       low nibbles are values 0..16, high ones 16..32
//! Q4_1  32 values:  d f16, m f16, nibbles              d q + m
//! Q4_K  256 values: d f16, m f16, 12 bytes of 6-bit scales, nibbles    d s q - m t, s and t for each 32
//! Q6_K  256 values: 128 bytes low, 64 bytes high, i8 scales[16], d f16   d s (q - 32), s for each 16
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// The first bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Versions that are read: 2 and 3 differ in nothing but the order of bytes that 3 may have.
const VERSIONS: [u32; 2] = [2, 3];
/// Names, keys and lists may be no longer: a damaged file is not to ask for all memory.
const LONGEST: u64 = 1 << 28;
/// Lists that are read, by their keys. A kept item takes some thirty times its bytes in the file: other lists are passed over.
const LISTS: [&str; 4] = ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges"];
/// The type of a list.
const LIST: u32 = 9;
/// More items than a list of any tokenizer has.
const MOST_ITEMS: u64 = 1 << 24;

/// How a tensor's numbers are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantised {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// 8 bits in blocks of 32.
    Q8_0,
    /// 4 bits in blocks of 32, around 0.
    Q4_0,
    /// 4 bits in blocks of 32, from a minimum.
    Q4_1,
    /// 4 bits in blocks of 256.
    Q4K,
    /// 6 bits in blocks of 256.
    Q6K,
}

impl Quantised {
    fn of(number: u32) -> Option<Self> {
        Some(match number {
            0 => Quantised::F32,
            1 => Quantised::F16,
            2 => Quantised::Q4_0,
            3 => Quantised::Q4_1,
            8 => Quantised::Q8_0,
            12 => Quantised::Q4K,
            14 => Quantised::Q6K,
            30 => Quantised::Bf16,
            _ => return None,
        })
    }

    /// Values of a block, and its bytes.
    fn block(self) -> (usize, usize) {
        match self {
            Quantised::F32 => (1, 4),
            Quantised::F16 | Quantised::Bf16 => (1, 2),
            Quantised::Q8_0 => (32, 34),
            Quantised::Q4_0 => (32, 18),
            Quantised::Q4_1 => (32, 20),
            Quantised::Q4K => (256, 144),
            Quantised::Q6K => (256, 210),
        }
    }

    /// Bytes of so many values; `None` where these are no whole blocks, or too many to count.
    pub(super) fn bytes(self, values: u64) -> Option<u64> {
        let (size, bytes) = self.block();
        values.is_multiple_of(size as u64).then(|| (values / size as u64).checked_mul(bytes as u64))?
    }

    /// The values of whole blocks.
    pub(super) fn values(self, data: &[u8]) -> Vec<f32> {
        let (size, bytes) = self.block();
        let mut values = Vec::with_capacity(data.len() / bytes * size);
        data.chunks_exact(bytes).for_each(|block| self.unpack(block, &mut values));
        values
    }

    fn unpack(self, b: &[u8], out: &mut Vec<f32>) {
        let half = |at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f32();
        match self {
            Quantised::F32 => out.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Quantised::F16 => out.push(half(0)),
            Quantised::Bf16 => out.push(bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            Quantised::Q8_0 => {
                let d = half(0);
                out.extend(b[2..].iter().map(|q| d * f32::from(*q as i8)));
            }
            Quantised::Q4_0 => {
                let d = half(0);
                let value = |q: u8| d * f32::from(q as i8 - 8);
                out.extend(b[2..].iter().map(|q| value(q & 15)));
                out.extend(b[2..].iter().map(|q| value(q >> 4)));
            }
            Quantised::Q4_1 => {
                let (d, m) = (half(0), half(2));
                let value = |q: u8| d * f32::from(q) + m;
                out.extend(b[4..].iter().map(|q| value(q & 15)));
                out.extend(b[4..].iter().map(|q| value(q >> 4)));
            }
            Quantised::Q4K => {
                let (d, m, scales, nibbles) = (half(0), half(2), &b[4..16], &b[16..]);
                for group in 0..8 {
                    let (scale, minimum) = scale_of(scales, group);
                    let (d, m) = (d * f32::from(scale), m * f32::from(minimum));
                    let part = &nibbles[32 * (group / 2)..][..32];
                    out.extend(part.iter().map(|q| d * f32::from(if group % 2 == 0 { q & 15 } else { q >> 4 }) - m));
                }
            }
            Quantised::Q6K => {
                let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half(208));
                for i in 0..256 {
                    let (part, within) = (i / 128, i % 128);
                    let (row, column) = (within / 32, within % 32);
                    let four = low[64 * part + 32 * (row % 2) + column] >> (4 * (row / 2)) & 15;
                    let two = high[32 * part + column] >> (2 * row) & 3;
                    let q = (four | two << 4) as i8 - 32;
                    out.push(d * f32::from(scales[i / 16] as i8) * f32::from(q));
                }
            }
        }
    }
}

/// Scale and minimum, six bits each, of one of the eight groups of a Q4_K block.
fn scale_of(bytes: &[u8], group: usize) -> (u8, u8) {
    match group {
        0..4 => (bytes[group] & 63, bytes[group + 4] & 63),
        _ => {
            let (low, of_scale, of_minimum) = (bytes[group + 4], bytes[group - 4], bytes[group]);
            (low & 15 | of_scale >> 6 << 4, low >> 4 | of_minimum >> 6 << 4)
        }
    }
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name in the file.
    pub name: String,
    /// Its shape, the innermost size last.
    pub shape: Vec<usize>,
    /// How its numbers are kept.
    pub kind: Quantised,
    /// Where its bytes begin in the file.
    pub at: u64,
    /// How many they are.
    pub bytes: u64,
}

/// A file's metadata and the list of its tensors.
#[derive(Clone, Debug)]
pub struct Gguf {
    path: PathBuf,
    keys: HashMap<String, Value>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<Listed>,
}

struct Reading<'p> {
    file: BufReader<File>,
    path: &'p Path,
    size: u64,
}

impl Reading<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file
            .read_exact(&mut bytes)
            .map_err(|_| Error::file(self.path, "expected a whole GGUF file, got one that ends in its header"))?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn count(&mut self) -> Result<u64> {
        let count = self.u64()?;
        if count <= LONGEST.min(self.size) {
            Ok(count)
        } else {
            Err(Error::file(self.path, format!("it says that {count} things follow, more than it has bytes")))
        }
    }

    fn text(&mut self) -> Result<String> {
        let length = self.count()?;
        let mut bytes = Vec::new();
        (&mut self.file).take(length).read_to_end(&mut bytes).map_err(|e| Error::io(self.path, e))?;
        if bytes.len() as u64 != length {
            return Err(Error::file(self.path, "expected a whole GGUF file, got one that ends in its header"));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The value of a key. A list that nothing reads is an empty one.
    fn value_of(&mut self, key: &str, kind: u32) -> Result<Value> {
        if kind != LIST {
            return self.value(kind);
        }
        let (kind, count) = (self.u32()?, self.count()?);
        if kind == LIST {
            return Err(Error::file(self.path, "a key is a list of lists, which no model has"));
        }
        let mut items = (0..count).map(|_| self.value(kind));
        if !LISTS.contains(&key) {
            items.try_for_each(|item| item.map(drop))?;
            return Ok(json!([]));
        }
        if count > MOST_ITEMS {
            return Err(Error::file(self.path, format!("{key} has {count} items, more than {MOST_ITEMS}")));
        }
        items.collect::<Result<_>>().map(Value::Array)
    }

    fn value(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => json!(u8::from_le_bytes(self.bytes()?)),
            1 => json!(i8::from_le_bytes(self.bytes()?)),
            2 => json!(u16::from_le_bytes(self.bytes()?)),
            3 => json!(i16::from_le_bytes(self.bytes()?)),
            4 => json!(self.u32()?),
            5 => json!(i32::from_le_bytes(self.bytes()?)),
            6 => {
                // Over its text, so that 1e-5 does not become 9.99999974e-6.
                let number = f32::from_le_bytes(self.bytes()?);
                number.to_string().parse::<f64>().map_or(Value::Null, |n| json!(n))
            }
            7 => json!(self.bytes::<1>()?[0] != 0),
            8 => json!(self.text()?),
            10 => json!(self.u64()?),
            11 => json!(i64::from_le_bytes(self.bytes()?)),
            12 => json!(f64::from_le_bytes(self.bytes()?)),
            other => return Err(Error::file(self.path, format!("a key has a value of the unknown type {other}"))),
        })
    }
}

impl Gguf {
    /// Whether a file is one, by its first bytes.
    pub fn is(path: &Path) -> bool {
        let mut magic = [0; 4];
        File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == MAGIC
    }

    /// Reads metadata and list. A file that is none, cut short, or with tensors of a kind that is not known or without values, is an error.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        let size = file.metadata().map_err(|e| Error::io(path, e))?.len();
        let mut r = Reading { file: BufReader::new(file), path, size };
        if r.bytes()? != MAGIC {
            return Err(Error::file(path, "expected a GGUF file, got another"));
        }
        let version = r.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(Error::file(path, format!("expected GGUF of version 2 or 3, got {version}")));
        }
        let (tensors, count) = (r.count()?, r.count()?);
        let mut keys = HashMap::new();
        for _ in 0..count {
            let (name, kind) = (r.text()?, r.u32()?);
            let value = r.value_of(&name, kind)?;
            keys.insert(name, value);
        }
        let mut listed = Vec::new();
        for _ in 0..tensors {
            let name = r.text()?;
            let dims = r.u32()?;
            if dims > 4 {
                return Err(Error::file(path, format!("{name} has {dims} dimensions, more than 4")));
            }
            let mut shape = (0..dims).map(|_| r.u64()).collect::<Result<Vec<u64>>>()?;
            shape.reverse();
            if shape.contains(&0) {
                return Err(Error::file(path, format!("{name} of shape {shape:?} has no values")));
            }
            let (number, at) = (r.u32()?, r.u64()?);
            let kind = Quantised::of(number).ok_or_else(|| {
                Error::file(
                    path,
                    format!("{name} is of the type {number}; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K can be read"),
                )
            })?;
            let values = shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size));
            let bytes = values.and_then(|n| kind.bytes(n));
            let bytes =
                bytes.ok_or_else(|| Error::file(path, format!("{name} of shape {shape:?} is not of whole blocks of {kind:?}")))?;
            listed.push(Listed { name, shape: shape.iter().map(|n| *n as usize).collect(), kind, at, bytes });
        }
        let alignment = keys.get("general.alignment").and_then(Value::as_u64).unwrap_or(32).clamp(1, 1 << 16);
        let begin = r.file.stream_position().map_err(|e| Error::io(path, e))?.next_multiple_of(alignment);
        for tensor in &mut listed {
            tensor.at = tensor.at.saturating_add(begin);
            if tensor.at.checked_add(tensor.bytes).is_none_or(|end| end > size) {
                return Err(Error::file(path, format!("{} lies beyond the {size} bytes of the file", tensor.name)));
            }
        }
        Ok(Gguf { path: path.into(), keys, tensors: listed })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A key of the metadata.
    pub fn key(&self, name: &str) -> Option<&Value> {
        self.keys.get(name)
    }

    /// A key's text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.key(name)?.as_str()
    }
}
