//! A state as a value: what a recurrence keeps of the texts it has read. It goes into a reading and comes out of it, and can be cloned,
//! detached, stacked, split, saved and restored.
//!
//! A state is made of named tensors, each with an axis of texts, and for each text counts and its open tail. Which tensors a recurrence has
//! is its [`StateLayout`]; nothing else knows kinds of states apart.

pub mod contents;
pub mod file;
mod layers;
mod text_hash;

use armt_engine::machine::expect_room;
use armt_engine::{DType, Device, Tensor, ops};
pub use layers::LayerState;
pub use text_hash::TextHash;

use crate::error::{Error, Result};
use crate::text::OpenText;

/// How much of a text was read, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Ordinary tokens.
    pub tokens: u64,
    /// Segments.
    pub segments: u64,
    /// Of the tokens, where they were seen: a reader sees them, training and files of the first format do not.
    pub text: Option<TextHash>,
}

impl Default for Count {
    fn default() -> Self {
        Count { tokens: 0, segments: 0, text: Some(TextHash::default()) }
    }
}

/// The end of a text that was read and is not in the memory yet, because more may come: tokens that do not fill a segment (on a GPU, a group
/// of segments), and behind them text whose tokens are not certain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Tokens.
    pub tokens: Vec<i32>,
    /// What comes after them.
    pub text: OpenText,
}

impl Tail {
    /// Whether nothing is open.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.text.bytes.is_empty()
    }
}

/// What the states of a recurrence are made of.
#[derive(Clone, Debug, PartialEq)]
pub struct StateLayout {
    /// The name of the kind: `associative`, say.
    pub kind: &'static str,
    /// The tensors, in a fixed order.
    pub parts: Vec<PartLayout>,
    /// When the tensors are there.
    pub begins: Begins,
}

/// When the tensors of a state are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begins {
    /// From the start, zero.
    Zero,
    /// After the first segment: before it the recurrence has something learned, or nothing.
    Absent,
}

/// One tensor of a state.
#[derive(Clone, Debug, PartialEq)]
pub struct PartLayout {
    /// Its name, in files too.
    pub name: &'static str,
    /// Its axes.
    pub shape: Vec<Extent>,
    /// Its type.
    pub dtype: PartType,
}

/// An axis of a state's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// As many as there are texts side by side. Exactly one axis is this.
    Texts,
    /// A size that the model fixes.
    Size(usize),
    /// So many for each segment that was read.
    Segments(usize),
    /// A size that depends on what was read, at most this.
    AtMost(usize),
}

/// The type of a state's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartType {
    /// This one.
    Exactly(DType),
    /// That of the computation: f32 or bf16.
    Computed,
}

impl PartLayout {
    /// A tensor in f32, whatever the type of the computation.
    pub fn f32(name: &'static str, shape: Vec<Extent>) -> Self {
        PartLayout { name, shape, dtype: PartType::Exactly(DType::F32) }
    }

    /// The axis of the texts.
    pub fn text_axis(&self) -> usize {
        self.shape.iter().position(|e| *e == Extent::Texts).unwrap_or(0)
    }

    fn sizes(&self, texts: usize) -> Vec<usize> {
        let size = |extent: &Extent| match extent {
            Extent::Texts => texts,
            Extent::Size(n) | Extent::AtMost(n) => *n,
            Extent::Segments(_) => 0,
        };
        self.shape.iter().map(size).collect()
    }

    /// Refuses a tensor of another shape or type.
    fn expect(&self, tensor: &Tensor, texts: usize) -> Result<()> {
        self.expect_sizes(tensor.dims(), texts)?;
        let typed = match self.dtype {
            PartType::Exactly(dtype) => tensor.dtype() == dtype,
            PartType::Computed => tensor.dtype().is_float(),
        };
        if typed { Ok(()) } else { Err(self.foreign("type", format!("{:?}", self.dtype), format!("{:?}", tensor.dtype()))) }
    }

    /// Refuses axes other than those of a tensor of so many texts.
    fn expect_sizes(&self, dims: &[usize], texts: usize) -> Result<()> {
        let fits = |(extent, got): (&Extent, &usize)| match extent {
            Extent::Texts => *got == texts,
            Extent::Size(n) => got == n,
            Extent::Segments(n) => *got > 0 && got.is_multiple_of(*n),
            Extent::AtMost(n) => (1..=*n).contains(got),
        };
        if dims.len() == self.shape.len() && self.shape.iter().zip(dims).all(fits) {
            return Ok(());
        }
        Err(self.foreign("shape", shown(&self.shape, texts), format!("{dims:?}")))
    }

    fn foreign(&self, what: &str, expected: String, got: String) -> Error {
        Error::Foreign { reason: format!("its {} should have {what} {expected}, but has {got}", self.name) }
    }
}

fn shown(shape: &[Extent], texts: usize) -> String {
    let one = |extent: &Extent| match extent {
        Extent::Texts => texts.to_string(),
        Extent::Size(n) => n.to_string(),
        Extent::Segments(n) => format!("{n} a segment"),
        Extent::AtMost(n) => format!("at most {n}"),
    };
    format!("[{}]", shape.iter().map(one).collect::<Vec<_>>().join(", "))
}

impl StateLayout {
    /// The state of a recurrence that keeps nothing.
    pub fn nothing(kind: &'static str) -> Self {
        StateLayout { kind, parts: Vec::new(), begins: Begins::Zero }
    }

    /// The state before anything was read.
    pub fn empty(&self, texts: usize, device: &Device) -> Result<State> {
        expect_room("texts side by side", &[texts, size_of::<Count>()])?;
        let zeros = |part: &PartLayout| {
            let PartType::Exactly(dtype) = part.dtype else {
                return Err(Error::Unsupported(format!("{} cannot begin as zeros of a type that is not known", part.name)));
            };
            Ok(Part {
                name: part.name,
                text_axis: part.text_axis(),
                tensor: Tensor::zeros(part.sizes(texts).as_slice(), dtype, device)?,
            })
        };
        let parts = match self.begins {
            Begins::Zero => self.parts.iter().map(zeros).collect::<Result<_>>()?,
            Begins::Absent => Vec::new(),
        };
        Ok(State { kind: self.kind, parts, counts: vec![Count::default(); texts], tails: vec![Tail::default(); texts] })
    }

    /// A state of tensors in the layout's order. Tensors that do not fit are an error.
    pub fn state(&self, tensors: Vec<Tensor>, counts: Vec<Count>) -> Result<State> {
        if !tensors.is_empty() && tensors.len() != self.parts.len() {
            return Err(Error::Foreign {
                reason: format!("it should have {} tensors, but has {}", self.parts.len(), tensors.len()),
            });
        }
        let part = |(part, tensor): (&PartLayout, Tensor)| {
            part.expect(&tensor, counts.len())?;
            Ok(Part { name: part.name, text_axis: part.text_axis(), tensor })
        };
        let parts = self.parts.iter().zip(tensors).map(part).collect::<Result<_>>()?;
        let tails = vec![Tail::default(); counts.len()];
        Ok(State { kind: self.kind, parts, counts, tails })
    }

    /// Refuses a state that is not of this layout, or of another number of texts.
    pub fn expect(&self, state: &State, texts: usize) -> Result<()> {
        if state.texts() != texts {
            return Err(Error::Texts { state: state.texts(), texts });
        }
        if state.kind != self.kind {
            return Err(Error::Foreign { reason: format!("its kind is {}, this model's is {}", state.kind, self.kind) });
        }
        let begun = state.parts.len() == self.parts.len();
        let absent = self.begins == Begins::Absent && state.parts.is_empty();
        if !(begun || absent) {
            let reason = format!("it should have {} tensors, but has {}", self.parts.len(), state.parts.len());
            return Err(Error::Foreign { reason });
        }
        self.parts.iter().zip(&state.parts).try_for_each(|(layout, part)| layout.expect(&part.tensor, texts))
    }

    /// A state of this layout as a computation in `computed` takes it. What is of the computation's type was perhaps kept by another: numbers
    /// in bf16 are the same in f32, those in f32 are rounded to bf16.
    pub fn computed_in(&self, state: State, computed: DType) -> Result<State> {
        let cast = |(layout, part): (&PartLayout, Part)| match layout.dtype {
            PartType::Computed => Ok(Part { tensor: ops::cast(&part.tensor, computed)?, ..part }),
            PartType::Exactly(_) => Ok(part),
        };
        let parts = self.parts.iter().zip(state.parts).map(cast).collect::<Result<_>>()?;
        Ok(State { parts, ..state })
    }

    /// Bytes that the state of one text takes in use at most, where it does not grow with what was read; `computed` is the type of the computation.
    pub fn bytes(&self, computed: DType) -> usize {
        let bytes = |part: &PartLayout| {
            let dtype = if let PartType::Exactly(dtype) = part.dtype { dtype } else { computed };
            part.sizes(1).iter().fold(dtype.size(), |bytes, size| bytes.saturating_mul(*size))
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Bytes by which the state of one text grows with every segment; `computed` is the type of the computation.
    pub fn growth(&self, computed: DType) -> usize {
        let bytes = |part: &PartLayout| {
            let dtype = if let PartType::Exactly(dtype) = part.dtype { dtype } else { computed };
            let grows = part.shape.iter().any(|extent| matches!(extent, Extent::Segments(_)));
            let size = |extent: &Extent| match extent {
                Extent::Size(n) | Extent::Segments(n) | Extent::AtMost(n) => *n,
                Extent::Texts => 1,
            };
            if grows { part.shape.iter().fold(dtype.size(), |bytes, extent| bytes.saturating_mul(size(extent))) } else { 0 }
        };
        self.parts.iter().map(bytes).sum()
    }
}

/// A named tensor of a state.
#[derive(Clone)]
struct Part {
    name: &'static str,
    text_axis: usize,
    tensor: Tensor,
}

/// What a model has kept of some texts, read side by side.
#[derive(Clone)]
pub struct State {
    kind: &'static str,
    parts: Vec<Part>,
    counts: Vec<Count>,
    tails: Vec<Tail>,
}

impl State {
    /// The name of its kind.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Texts side by side.
    pub fn texts(&self) -> usize {
        self.counts.len()
    }

    /// How much of each text is in the memory.
    pub fn counts(&self) -> &[Count] {
        &self.counts
    }

    /// What is open of each text.
    pub fn tails(&self) -> &[Tail] {
        &self.tails
    }

    /// Tokens in the memory, of the text that has read most.
    pub fn tokens_read(&self) -> u64 {
        self.counts.iter().map(|c| c.tokens).max().unwrap_or(0)
    }

    /// Segments in the memory, of the text that has read most.
    pub fn segments_read(&self) -> u64 {
        self.counts.iter().map(|c| c.segments).max().unwrap_or(0)
    }

    /// Whether nothing is in the memory yet, of any text.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|c| c.segments == 0)
    }

    /// A tensor by its name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.parts.iter().find(|p| p.name == name).map(|p| &p.tensor)
    }

    /// The tensors with their names, in a fixed order.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.parts.iter().map(|p| (p.name, &p.tensor))
    }

    /// The axes of its tensors. States of equal axes, of which all or none have read something, can be read on side by side.
    pub fn shapes(&self) -> Vec<Vec<usize>> {
        self.parts.iter().map(|p| p.tensor.dims().to_vec()).collect()
    }

    /// Bytes that the tensors take.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|p| p.tensor.elements() * p.tensor.dtype().size()).sum()
    }

    /// The values, with these counts.
    pub fn with_counts(self, counts: Vec<Count>) -> Self {
        State { counts, ..self }
    }

    /// The state with these tails, one for each text. Another number of them is an error.
    pub fn with_tails(self, tails: Vec<Tail>) -> Result<Self> {
        if tails.len() != self.texts() {
            return Err(Error::Texts { state: self.texts(), texts: tails.len() });
        }
        Ok(State { tails, ..self })
    }

    /// Refuses a state with an open tail, for what would lose it.
    pub fn expect_closed(&self) -> Result<()> {
        match self.tails.iter().position(|tail| !tail.is_empty()) {
            Some(text) => {
                Err(Error::input("a state whose texts have ended", format!("one with more of text {} to read", text + 1)))
            }
            None => Ok(()),
        }
    }

    /// The counts after as many further tokens and segments of each text, whichever tokens these are.
    pub fn counts_after(&self, tokens: u64, segments: u64) -> Vec<Count> {
        let after = |c: &Count| Count { tokens: c.tokens + tokens, segments: c.segments + segments, text: None };
        self.counts.iter().map(after).collect()
    }

    /// The values, cut off from the tape.
    pub fn detach(&self) -> Self {
        State { parts: self.parts.iter().map(|p| Part { tensor: p.tensor.detach(), ..p.clone() }).collect(), ..self.clone() }
    }

    /// The state on another device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.try_map(|part| part.tensor.to_device(device))
    }

    /// The values in buffers of their own.
    pub fn copied(&self) -> Result<Self> {
        self.try_map(|part| {
            let copy = Tensor::zeros(part.tensor.shape(), part.tensor.dtype(), part.tensor.device())?;
            copy.copy_from(&part.tensor)?;
            Ok(copy)
        })
    }

    /// Replaces the values, in place, by those of a state of the same shape. Counts stay as they are.
    pub fn overwrite(&self, other: &Self) -> Result<()> {
        Ok(self.parts.iter().zip(&other.parts).try_for_each(|(to, from)| to.tensor.copy_from(&from.tensor))?)
    }

    /// The state of some of the texts, in the order of `texts`. A text that there is not is an error.
    pub fn pick(&self, texts: &[usize]) -> Result<Self> {
        if let Some(text) = texts.iter().find(|text| **text >= self.texts()) {
            return Err(Error::input(format!("texts 0 to {} of the state", self.texts().saturating_sub(1)), text));
        }
        if texts.iter().copied().eq(0..self.texts()) {
            return Ok(self.clone());
        }
        let some = self.try_map(|part| {
            let one = |text: &usize| ops::narrow(&part.tensor, part.text_axis, *text, 1);
            let parts = texts.iter().map(one).collect::<armt_engine::Result<Vec<_>>>()?;
            ops::concat(&parts.iter().collect::<Vec<_>>(), part.text_axis)
        })?;
        let counts = texts.iter().map(|text| self.counts[*text]).collect();
        Ok(State { counts, tails: texts.iter().map(|text| self.tails[*text].clone()).collect(), ..some })
    }

    /// The states of the texts, one each.
    pub fn split(&self) -> Result<Vec<Self>> {
        (0..self.texts()).map(|text| self.pick(&[text])).collect()
    }

    /// States of several texts as one, in order. No state at all, or states that differ in more than their texts, are an error.
    pub fn stack(states: &[Self]) -> Result<Self> {
        let first = match states {
            [] => return Err(Error::input("at least one state", "none")),
            [one] => return Ok(one.clone()),
            [first, ..] => first,
        };
        let alike = |s: &Self| s.kind == first.kind && s.parts.len() == first.parts.len();
        if let Some(odd) = states.iter().find(|s| !alike(s)) {
            let one = |s: &Self| format!("{} tensors of kind {}", s.parts.len(), s.kind);
            return Err(Error::input(format!("states alike: {}", one(first)), one(odd)));
        }
        let mut parts = Vec::with_capacity(first.parts.len());
        for (i, part) in first.parts.iter().enumerate() {
            let tensors: Vec<&Tensor> = states.iter().map(|s| &s.parts[i].tensor).collect();
            parts.push(Part { tensor: ops::concat(&tensors, part.text_axis)?, ..part.clone() });
        }
        let counts = states.iter().flat_map(|s| s.counts.iter().copied()).collect();
        Ok(State { kind: first.kind, parts, counts, tails: states.iter().flat_map(|s| s.tails.iter().cloned()).collect() })
    }

    fn try_map(&self, f: impl Fn(&Part) -> armt_engine::Result<Tensor>) -> Result<Self> {
        let changed = |part: &Part| Ok(Part { tensor: f(part)?, ..part.clone() });
        Ok(State { parts: self.parts.iter().map(changed).collect::<Result<_>>()?, ..self.clone() })
    }
}
