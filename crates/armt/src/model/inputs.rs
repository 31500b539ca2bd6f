//! A batch on the device: the ids of its segments, what hides their padding, and for training what is asked.
//!
//! Everything that a step reads and that changes from step to step is here and is copied before the step begins, so that the step itself
//! moves nothing between host and device: it can be recorded once and replayed with other texts of the same shape.

use std::ops::Range;

use armt_engine::{Tape, Tensor, ops};

use super::{Model, Padding, Targets};
use crate::error::{Error, Result};
use crate::segment::{Batch, Segment};

/// Segments of equal width of a batch of texts.
pub struct Inputs {
    ids: Tensor, // [S, B, width]
    pub(crate) places: Vec<Place>,
    pub(crate) batch: usize,
    pub(crate) width: usize,
}

/// What is known of a segment beside its ids.
pub(crate) struct Place {
    /// Its tokens in the text.
    pub(crate) range: Range<usize>,
    /// Columns of padding before them.
    pub(crate) pad: usize,
    pub(crate) padding: Option<Padding>,
    /// Whether anyone wants the last layer's outputs of it.
    pub(crate) wanted: bool,
}

impl Inputs {
    /// Copies segments of `batch` texts to the device. Segments of different width are an error.
    pub fn new(model: &Model, segments: &[Segment], batch: usize) -> Result<Self> {
        let width = segments.first().map_or(0, Segment::width);
        if let Some(odd) = segments.iter().find(|s| s.width() != width) {
            return Err(Error::Argument(format!("all segments must have one width: {width} came first, then {}", odd.width())));
        }
        let places = segments.iter().map(|s| {
            let padding = s.mask.as_ref().map(|mask| model.padding(mask, s.pad, width, batch)).transpose()?;
            Ok(Place { range: s.range.clone(), pad: s.pad, padding, wanted: true })
        });
        Ok(Inputs {
            ids: Tensor::from_slice(&all_ids(segments), [segments.len(), batch, width], model.device())?,
            places: places.collect::<Result<_>>()?,
            batch,
            width,
        })
    }

    /// The same where only the outputs of some segments are wanted.
    pub fn asking(mut self, wanted: impl Fn(usize) -> bool) -> Self {
        self.places.iter_mut().enumerate().for_each(|(s, place)| place.wanted = wanted(s));
        self
    }

    /// Replaces the texts by others of the same shape.
    pub(crate) fn fill(&self, model: &Model, segments: &[Segment]) -> Result<()> {
        self.ids.overwrite(&all_ids(segments))?;
        for (place, segment) in self.places.iter().zip(segments) {
            if let (Some(padding), Some(mask)) = (&place.padding, &segment.mask) {
                padding.mask.overwrite(&model.whole_mask(mask, self.width))?;
            }
        }
        Ok(())
    }

    /// Tokens of each text.
    pub(crate) fn tokens(&self) -> u64 {
        self.places.iter().map(|p| p.range.len() as u64).sum()
    }
}

fn all_ids(segments: &[Segment]) -> Vec<i32> {
    segments.iter().flat_map(|s| s.ids.iter().copied()).collect()
}

/// Inputs of the first layer, made for many segments at once: for all of them on a tape, and otherwise for a few ahead of their turn.
pub(crate) struct Embedded {
    /// `[n, B, T, d]` of n segments that are padded alike, and the first of them.
    run: Option<(usize, Tensor)>,
}

/// Texts of as many segments are embedded at once where no tape keeps them.
const AHEAD: usize = 16;

impl Embedded {
    pub(crate) fn new() -> Self {
        Embedded { run: None }
    }

    /// The input of segment s, `[1, B, T, d]`: the learned memory tokens around its embedded tokens. Segments are asked for in order.
    pub(crate) fn segment(&mut self, model: &Model, tape: &Tape, inputs: &Inputs, s: usize) -> Result<Tensor> {
        let run = match self.run.take().filter(|(first, x)| s - first < x.dims()[0]) {
            Some(run) => run,
            None => {
                let most = if tape.is_recording() { usize::MAX } else { (AHEAD / inputs.batch).max(1) };
                let alike = inputs.places[s..].iter().take(most).take_while(|place| place.pad == inputs.places[s].pad).count();
                let memory = model.memory_tokens(tape, alike * inputs.batch)?;
                let memory = memory.map(|m| ops::reshape(&m, [alike, inputs.batch, m.dims()[1], m.dims()[2]])).transpose()?;
                (s, model.surround(tape, inputs, s..s + alike, memory.as_ref())?)
            }
        };
        let (first, x) = self.run.insert(run);
        Ok(ops::rows(x, s - *first..s - *first + 1)?)
    }
}

impl Model {
    /// Embeds segment s with memory tokens `[B, m, d]` that came from the segment before it: RMT. Gives `[1, B, T, d]`.
    pub(crate) fn embed_carrying(&self, tape: &Tape, inputs: &Inputs, s: usize, memory: Option<&Tensor>) -> Result<Tensor> {
        let memory = memory.map(|m| ops::reshape(m, [1, m.dims()[0], m.dims()[1], m.dims()[2]])).transpose()?;
        self.surround(tape, inputs, s..s + 1, memory.as_ref())
    }

    /// Memory tokens around the text's, positions added: `[n, B, before + width + after, d]` of n segments that are padded alike.
    fn surround(&self, tape: &Tape, inputs: &Inputs, segments: Range<usize>, memory: Option<&Tensor>) -> Result<Tensor> {
        let ids = ops::rows(&inputs.ids, segments.clone())?;
        let text = ops::embedding(&tape.param(&self.weights.embed), &ids)?; // [n, B, width, d]
        let x = match memory {
            None => text,
            Some(m) if self.config.memory.tokens_before() > 0 => ops::concat(&[m, &text, m], 2)?,
            Some(m) => ops::concat(&[&text, m], 2)?,
        };
        let place = &inputs.places[segments.start];
        self.add_positions(tape, &x, &self.positions(place.range.len(), place.pad))
    }
}

/// A training example as the host has it: segments, and which rows of each predict what.
pub struct HostBatch {
    segments: Vec<Segment>,
    batch: usize,
    /// For each segment, rows of its output `[B T, d]`.
    asked: Vec<Vec<i32>>,
    /// What they should predict, one after the other.
    next: Vec<i32>,
}

/// What two examples must have in common for one recorded step to serve both.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    batch: usize,
    /// Of each segment: tokens, padding, whether a mask hides something, and rows that are asked.
    segments: Vec<(usize, usize, bool, usize)>,
}

impl HostBatch {
    /// Cuts a batch into the model's segments. A batch that asks nothing is an error.
    pub fn new(model: &Model, batch: &Batch, targets: &Targets) -> Result<Self> {
        if targets.next.len() != batch.ids.len() {
            return Err(Error::Argument(format!("{} targets for {} tokens", targets.next.len(), batch.ids.len())));
        }
        let segments = model.segments(batch)?;
        let (mut asked, mut next) = (Vec::with_capacity(segments.len()), Vec::new());
        for segment in &segments {
            let rows = model.asked_rows(segment.range.clone(), segment.pad, batch, targets);
            asked.push(rows.iter().map(|(row, _, _)| *row).collect());
            next.extend(rows.iter().map(|(_, _, target)| *target));
        }
        if next.is_empty() {
            return Err(Error::Argument("no position of the batch has a target".into()));
        }
        Ok(HostBatch { segments, batch: batch.batch, asked, next })
    }

    /// The same with rows that are asked nothing, so that the number of rows of a segment that is asked is a multiple of `rows`: texts with
    /// answers of different length then mostly have one shape.
    pub fn rounded(mut self, rows: usize) -> Self {
        let mut next = self.next.into_iter();
        let mut rounded = Vec::new();
        for asked in &mut self.asked {
            let count = asked.len();
            asked.resize(count.next_multiple_of(rows), 0);
            rounded.extend(next.by_ref().take(count));
            rounded.resize(rounded.len() + asked.len() - count, -1);
        }
        HostBatch { next: rounded, ..self }
    }

    /// What another example must have in common with this one to take its place on the device.
    pub fn shape(&self) -> BatchShape {
        let segments = self.segments.iter().zip(&self.asked);
        let segments = segments.map(|(s, asked)| (s.range.len(), s.pad, s.mask.is_some(), asked.len())).collect();
        BatchShape { batch: self.batch, segments }
    }
}

/// A training example on the device.
pub struct DeviceBatch {
    pub(crate) inputs: Inputs,
    /// Rows of each segment's output `[B T, d]` that are asked.
    pub(crate) asked: Vec<Option<Tensor>>,
    /// What they should predict.
    pub(crate) next: Tensor,
}

impl DeviceBatch {
    /// Copies an example to the device.
    pub fn new(model: &Model, host: &HostBatch) -> Result<Self> {
        let ints = |data: &[i32]| Ok(Tensor::from_slice(data, [data.len()], model.device())?);
        let asked = host.asked.iter().map(|rows| if rows.is_empty() { Ok(None) } else { ints(rows).map(Some) });
        Ok(DeviceBatch {
            inputs: Inputs::new(model, &host.segments, host.batch)?.asking(|s| !host.asked[s].is_empty()),
            asked: asked.collect::<Result<_>>()?,
            next: ints(&host.next)?,
        })
    }

    /// Texts side by side.
    pub fn texts(&self) -> usize {
        self.inputs.batch
    }

    /// Replaces the example by another of the same [`BatchShape`].
    pub fn fill(&self, model: &Model, host: &HostBatch) -> Result<()> {
        self.inputs.fill(model, &host.segments)?;
        for (rows, new) in self.asked.iter().zip(&host.asked) {
            rows.as_ref().map_or(Ok(()), |rows| rows.overwrite(new))?;
        }
        Ok(self.next.overwrite(&host.next)?)
    }
}

impl Model {
    /// The positions of a segment that are asked something: the row of its output `[B T, d]`, the text, and what it should predict.
    pub fn asked_rows(&self, range: Range<usize>, pad: usize, batch: &Batch, targets: &Targets) -> Vec<(i32, usize, i32)> {
        let (before, after) = (self.config.memory.tokens_before(), self.config.memory.tokens_after());
        let (tokens, width) = (batch.tokens(), before + pad + range.len() + after);
        let positions = (0..batch.batch).flat_map(|b| range.clone().map(move |i| (b, i)));
        let asked = positions.map(|(b, i)| ((b * width + before + pad + i - range.start) as i32, b, targets.next[b * tokens + i]));
        asked.filter(|(_, _, target)| *target >= 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_adds_rows_that_are_asked_nothing() {
        let host =
            HostBatch { segments: Vec::new(), batch: 1, asked: vec![vec![1, 2, 3], vec![], vec![4]], next: vec![7, 8, 9, 5] };
        let rounded = host.rounded(2);
        assert_eq!(rounded.asked, [vec![1, 2, 3, 0], vec![], vec![4, 0]]);
        assert_eq!(rounded.next, [7, 8, 9, -1, 5, -1]);
    }
}
