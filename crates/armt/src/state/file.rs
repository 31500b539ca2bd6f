//! State files: a state as safetensors, with whose it is, what was read, and a checksum in its metadata.
//!
//! ```text
//! format         armt-memory-2
//! model          BLAKE3 of configuration and weights
//! tokenizer      BLAKE3 of tokenizer and vocabulary, where a text was read
//! kind           the kind of state: associative, say
//! texts          texts side by side
//! tokens_read    of each text, with commas between
//! segments_read  of each text
//! text_hash      of each text, a running hash of its tokens; - where it is not known
//! name           the model's name, where it has one
//! tail           of each text that is open at its end: tokens, bytes after them, and + where other text came before these, - where not
//! checksum       BLAKE3 of all of this and of every tensor's name, type, shape and bytes
//! ```
//!
//! What is open of the texts are the tensors `tail.tokens` and `tail.text`, one text after the other; without an open text there is nothing of
//! these. Equal states of one model give equal bytes: keys and tensors have a fixed order. Files of the first format, `armt-memory-1`, are still
//! read; their checksum is of the tensors alone, and they do not say which text was read.

use std::collections::BTreeMap;
use std::path::Path;

use armt_engine::{DType, Device, Tensor};
use half::bf16;
use safetensors::tensor::{Dtype, SafeTensors, TensorInfo, TensorView};

use super::{Begins, Count, PartLayout, State, StateLayout, Tail, TextHash};
use crate::error::{Error, Result};
use crate::files::write_beside;
use crate::text::OpenText;

const FIRST: &str = "armt-memory-1";
const SECOND: &str = "armt-memory-2";
/// Texts that a file of the first format may be of where it has no tensor that says how many there are.
const MOST_TEXTS: u64 = 1 << 16;

/// Tokens that no text has, few enough to be added to.
const MOST_READ: u64 = 1 << 60;

const TAIL_TOKENS: &str = "tail.tokens";
const TAIL_TEXT: &str = "tail.text";
/// Tensors that are of the texts and not of the memory.
pub(super) const TAILS: [&str; 2] = [TAIL_TOKENS, TAIL_TEXT];

/// What a state belongs to: a file of another owner is refused.
#[derive(Clone, Debug)]
pub struct Owner {
    /// What people call the model, for messages.
    pub name: Option<String>,
    /// BLAKE3 of configuration and weights.
    pub model: String,
    /// What files of the first format have in its place.
    pub first: String,
    /// BLAKE3 of tokenizer and vocabulary. `None` where tokens come from elsewhere, as in training: the file's is not looked at.
    pub tokenizer: Option<String>,
}

impl Owner {
    /// Whether states of one are states of the other.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.model, &self.tokenizer) == (&other.model, &other.tokenizer)
    }
}

/// A tensor as bytes.
struct Stored<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn stored<'a>(name: &'a str, t: &'a Tensor) -> Result<Stored<'a>> {
    let (dtype, bytes) = match t.dtype() {
        DType::F32 => (Dtype::F32, t.to_vec::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
        DType::BF16 => (Dtype::BF16, t.to_vec::<bf16>()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
        DType::I8 => return Err(Error::StateFile(format!("{name} is a packed matrix"))),
        DType::I32 => (Dtype::I32, t.to_vec::<i32>()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
    };
    Ok(Stored { name, dtype, shape: t.dims().to_vec(), bytes })
}

/// What is open of the texts, one after the other.
fn stored_tails(tails: &[Tail]) -> Vec<Stored<'static>> {
    let tokens: Vec<u8> = tails.iter().flat_map(|t| &t.tokens).flat_map(|token| token.to_le_bytes()).collect();
    let text: Vec<u8> = tails.iter().flat_map(|t| &t.text.bytes).copied().collect();
    let tokens = Stored { name: TAIL_TOKENS, dtype: Dtype::I32, shape: vec![tokens.len() / 4], bytes: tokens };
    let text = Stored { name: TAIL_TEXT, dtype: Dtype::U8, shape: vec![text.len()], bytes: text };
    [tokens, text].into_iter().filter(|s| !s.bytes.is_empty()).collect()
}

/// Writes a state to a file, beside it first and then renamed. A state that holds NaN or infinity is refused: no one could read it back.
pub fn save(state: &State, path: &Path, owner: &Owner) -> Result<()> {
    write_beside(path, &to_bytes(state, owner).map_err(|e| Error::file(path, format!("not written: {e}")))?)
}

/// A state as the bytes of its file. A state that holds NaN or infinity is refused.
pub fn to_bytes(state: &State, owner: &Owner) -> Result<Vec<u8>> {
    for (name, t) in state.tensors().filter(|(_, t)| t.dtype().is_float()) {
        if let Some(value) = t.to_f32_vec()?.into_iter().find(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: format!("{name} of the memory"), value });
        }
    }
    let mut data = state.tensors().map(|(name, t)| stored(name, t)).collect::<Result<Vec<_>>>()?;
    data.extend(stored_tails(state.tails()));
    data.sort_by_key(|s| s.name);
    let each = |of: &dyn Fn(&Count) -> String| state.counts().iter().map(of).collect::<Vec<_>>().join(",");
    let mut metadata = BTreeMap::from([
        ("format".to_string(), SECOND.to_string()),
        ("kind".into(), state.kind().into()),
        ("model".into(), owner.model.clone()),
        ("texts".into(), state.texts().to_string()),
        ("tokens_read".into(), each(&|c| c.tokens.to_string())),
        ("segments_read".into(), each(&|c| c.segments.to_string())),
        ("text_hash".into(), each(&|c| c.text.map_or("-".into(), |hash| hash.to_string()))),
    ]);
    metadata.extend(owner.tokenizer.iter().map(|print| ("tokenizer".into(), print.clone())));
    metadata.extend(owner.name.iter().map(|name| ("name".into(), name.clone())));
    if state.expect_closed().is_err() {
        let tail = |t: &Tail| format!("{} {}{}", t.tokens.len(), t.text.bytes.len(), if t.text.cut { "+" } else { "-" });
        metadata.insert("tail".into(), state.tails().iter().map(tail).collect::<Vec<_>>().join(","));
    }
    let sum = checksum(&metadata, data.iter().map(|s| (s.name, s.dtype, s.shape.as_slice(), s.bytes.as_slice())));
    metadata.insert("checksum".into(), sum);
    let json = |e: serde_json::Error| Error::Unsupported(format!("the header cannot be written: {e}"));
    // By hand: the crate's writer gives the metadata in any order.
    let mut header = format!("{{\"__metadata__\":{}", serde_json::to_string(&metadata).map_err(json)?);
    let mut end = 0;
    for s in &data {
        let begin = end;
        end += s.bytes.len();
        let info = TensorInfo { dtype: s.dtype, shape: s.shape.clone(), data_offsets: (begin, end) };
        let (name, info) = (serde_json::to_string(s.name).map_err(json)?, serde_json::to_string(&info).map_err(json)?);
        header += &format!(",{name}:{info}");
    }
    header.push('}');
    // Tensors begin at a multiple of 8 bytes, as the format asks.
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut bytes = Vec::with_capacity(8 + header.len() + end);
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend(header.as_bytes());
    data.iter().for_each(|s| bytes.extend(&s.bytes));
    Ok(bytes)
}

/// Of everything that a file says but the checksum itself. Each part has its length before it, so that none can be moved into the next.
fn checksum<'a>(
    metadata: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize], &'a [u8])>,
) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    };
    for (key, value) in metadata.iter().filter(|(key, _)| *key != "checksum") {
        add(key.as_bytes());
        add(value.as_bytes());
    }
    for (name, dtype, shape, bytes) in tensors {
        add(name.as_bytes());
        add(dtype.to_string().as_bytes());
        add(&shape.iter().flat_map(|size| (*size as u64).to_le_bytes()).collect::<Vec<u8>>());
        add(bytes);
    }
    hasher.finalize().to_string()
}

/// That of the first format: of the tensors' names, shapes and bytes.
fn first_checksum(tensors: &[(String, TensorView<'_>)]) -> String {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |byte: u8| h = (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    for (name, view) in tensors {
        name.bytes().for_each(&mut add);
        view.shape().iter().for_each(|s| s.to_le_bytes().into_iter().for_each(&mut add));
        view.data().iter().copied().for_each(&mut add);
    }
    format!("{h:016x}")
}

/// Reads a state of a model with this layout, to the bit. Refused with the reason: a file that is no state, of another owner, truncated,
/// altered, or with a number that is not finite.
pub fn load(path: &Path, layout: &StateLayout, owner: &Owner, device: &Device) -> Result<State> {
    from_bytes(&read(path)?, layout, owner, device).map_err(|e| Error::file(path, e))
}

/// The bytes of a file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    let io = |source| Error::io(path, source);
    // A device has no end.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(Error::file(path, "expected a memory file, got no file"));
    }
    std::fs::read(path).map_err(io)
}

/// Reads a state from the bytes of its file, as [`load`] does.
pub fn from_bytes(bytes: &[u8], layout: &StateLayout, owner: &Owner, device: &Device) -> Result<State> {
    let opened = Opened::new(bytes)?;
    opened.expect_owner(layout, owner)?;
    let counts = opened.counts(Some(layout))?;
    let tails = opened.tails(counts.len())?;
    let mut kept = opened.tensors.iter().filter(|(name, _)| !TAILS.contains(&name.as_str())).peekable();
    let tensors = match layout.begins {
        // Only what has read nothing keeps nothing.
        Begins::Absent if kept.peek().is_none() && counts.iter().all(|c| c.segments == 0) => Vec::new(),
        _ => layout.parts.iter().map(|part| opened.tensor(part, counts.len(), device)).collect::<Result<_>>()?,
    };
    if let Some((name, _)) = kept.find(|(name, _)| layout.parts.iter().all(|part| part.name != name)) {
        return Err(refused(format!("it holds {name}, which this model's memory has not")));
    }
    layout.state(tensors, counts)?.with_tails(tails)
}

fn refused(why: String) -> Error {
    Error::StateFile(why)
}

/// A file that is whole and as it was written.
pub(super) struct Opened<'a> {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: Vec<(String, TensorView<'a>)>,
}

impl<'a> Opened<'a> {
    /// Refuses bytes that are no state file, or damaged.
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self> {
        let broken = |e: safetensors::SafeTensorError| refused(format!("not a whole memory file: {e}"));
        let file = SafeTensors::deserialize(bytes).map_err(broken)?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
        let metadata: BTreeMap<String, String> = header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let mut tensors: Vec<(String, TensorView<'a>)> = file.tensors();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        let opened = Opened { metadata, tensors };
        let sum = match opened.get("format") {
            SECOND => {
                let parts = opened.tensors.iter().map(|(name, v)| (name.as_str(), v.dtype(), v.shape(), v.data()));
                checksum(&opened.metadata, parts)
            }
            FIRST => first_checksum(&opened.tensors),
            other => return Err(refused(format!("expected a memory file ({SECOND} or {FIRST}), but its format is '{other}'"))),
        };
        if opened.get("checksum") != sum {
            return Err(refused("it is damaged: its checksum does not fit its content".into()));
        }
        Ok(opened)
    }

    pub(super) fn is_first(&self) -> bool {
        self.get("format") == FIRST
    }

    pub(super) fn get(&self, key: &str) -> &str {
        self.metadata.get(key).map(String::as_str).unwrap_or_default()
    }

    /// Refuses the state of another model, or one that was read with another tokenizer.
    fn expect_owner(&self, layout: &StateLayout, owner: &Owner) -> Result<()> {
        let (key, own) = if self.is_first() { ("fingerprint", &owner.first) } else { ("model", &owner.model) };
        if self.get(key) != own {
            let other = self.metadata.get("name").map_or(String::new(), |name| format!(", {name}"));
            let why = format!("it is the memory of another model{other} (fingerprint {}, this model's is {own})", self.get(key));
            return Err(refused(why));
        }
        if self.get("kind") != layout.kind {
            return Err(refused(format!("its kind is '{}', but this model's memory is {}", self.get("kind"), layout.kind)));
        }
        match (&owner.tokenizer, self.metadata.get("tokenizer")) {
            (Some(own), Some(read)) if own != read => {
                let why = "it was read with another tokenizer or vocabulary than the model has now";
                Err(refused(format!("{why} (fingerprint {read}, now {own})")))
            }
            _ => Ok(()),
        }
    }

    /// What is in the memory of each text. The layout tells files of the first format that say something impossible.
    pub(super) fn counts(&self, layout: Option<&StateLayout>) -> Result<Vec<Count>> {
        let number = |key: &str, text: &str| {
            let number = text.parse().ok().filter(|number| *number <= MOST_READ);
            number.ok_or_else(|| refused(format!("its {key} should be a number for each text, but has '{text}'")))
        };
        let key = if self.is_first() { "batch" } else { "texts" };
        let texts = number(key, self.get(key))?;
        if self.is_first() {
            // One number for all texts: how many there are must follow from something that takes room in the file.
            let axis = layout.iter().flat_map(|layout| &layout.parts).find_map(|part| {
                let (_, view) = self.tensors.iter().find(|(name, _)| name == part.name)?;
                view.shape().get(part.text_axis()).copied()
            });
            if axis.map_or(texts > MOST_TEXTS, |axis| axis as u64 != texts) {
                return Err(refused(format!("it says that it is of {texts} texts, but is not")));
            }
            let [tokens, segments] = ["tokens_read", "segments_read"].map(|key| number(key, self.get(key)));
            return Ok(vec![Count { tokens: tokens?, segments: segments?, text: None }; texts as usize]);
        }
        let list = |key: &'static str| -> Vec<&str> { self.get(key).split(',').filter(|_| texts > 0).collect() };
        let [tokens, segments, hashes] = ["tokens_read", "segments_read", "text_hash"].map(list);
        if [&tokens, &segments, &hashes].iter().any(|list| list.len() as u64 != texts) {
            return Err(refused(format!("it says that it is of {texts} texts, but does not say what was read of each")));
        }
        let hash = |text: &str| -> Result<Option<TextHash>> {
            if text == "-" {
                return Ok(None);
            }
            text.parse().map(Some).map_err(|()| refused(format!("its text_hash has '{text}'")))
        };
        let count = |((t, s), h): ((&&str, &&str), &&str)| {
            Ok(Count { tokens: number("tokens_read", t)?, segments: number("segments_read", s)?, text: hash(h)? })
        };
        tokens.iter().zip(&segments).zip(&hashes).map(count).collect()
    }

    /// What is open of each text.
    pub(super) fn tails(&self, texts: usize) -> Result<Vec<Tail>> {
        let data = |name: &str, dtype: Dtype| match self.tensors.iter().find(|(own, _)| own == name) {
            Some((_, view)) if view.dtype() == dtype && view.shape().len() == 1 => Ok(view.data()),
            Some(_) => Err(refused(format!("its {name} is not what it should be"))),
            None => Ok(&[][..]),
        };
        let (mut tokens, mut text) = (data(TAIL_TOKENS, Dtype::I32)?.as_chunks::<4>().0, data(TAIL_TEXT, Dtype::U8)?);
        let unfit = || refused("its open ends are not those of its texts".into());
        let Some(all) = self.metadata.get("tail") else {
            return if tokens.is_empty() && text.is_empty() { Ok(vec![Tail::default(); texts]) } else { Err(unfit()) };
        };
        let mut tails = Vec::new();
        for tail in all.split(',') {
            let cut = tail.ends_with('+');
            let sizes = tail.strip_suffix(['+', '-']).and_then(|sizes| sizes.split_once(' '));
            let sizes = sizes.and_then(|(tokens, bytes)| Some((tokens.parse().ok()?, bytes.parse().ok()?)));
            let taken = sizes.and_then(|(n, bytes)| Some((tokens.split_at_checked(n)?, text.split_at_checked(bytes)?)));
            let ((own, more), (bytes, rest)) = taken.ok_or_else(unfit)?;
            (tokens, text) = (more, rest);
            let own = own.iter().map(|b| i32::from_le_bytes(*b)).collect();
            tails.push(Tail { tokens: own, text: OpenText { bytes: bytes.to_vec(), cut } });
        }
        if tails.len() == texts && tokens.is_empty() && text.is_empty() { Ok(tails) } else { Err(unfit()) }
    }

    /// A tensor of the state. Its axes are looked at before anything is made of them.
    fn tensor(&self, part: &PartLayout, texts: usize, device: &Device) -> Result<Tensor> {
        let name = part.name;
        let found = self.tensors.iter().find(|(own, _)| own == name);
        let (_, view) = found.ok_or_else(|| refused(format!("it holds no {name}")))?;
        let (shape, data) = (view.shape(), view.data());
        part.expect_sizes(shape, texts)?;
        let finite = |mut values: Box<dyn Iterator<Item = f32> + '_>| match values.find(|x| !x.is_finite()) {
            Some(bad) => Err(refused(format!("{name} holds {bad}"))),
            None => Ok(()),
        };
        match view.dtype() {
            Dtype::F32 => {
                let values: Vec<f32> = data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                finite(Box::new(values.iter().copied()))?;
                Ok(Tensor::from_slice(&values, shape, device)?)
            }
            Dtype::BF16 => {
                let values: Vec<bf16> = data.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
                finite(Box::new(values.iter().map(|x| x.to_f32())))?;
                Ok(Tensor::from_slice(&values, shape, device)?)
            }
            Dtype::I32 => {
                let values: Vec<i32> = data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
                Ok(Tensor::from_slice(&values, shape, device)?)
            }
            other => Err(refused(format!("{name} is of type {other:?}"))),
        }
    }
}
