//! A batch on the device: the ids of its segments, what hides their padding, and for training what is asked.
//!
//! Everything that a step reads and that changes from step to step is here and is copied before the step begins, so that the step itself
//! moves nothing between host and device: it can be recorded once and replayed with other texts of the same shape.

use std::ops::{Range, RangeInclusive};

use armt_engine::{Tape, Tensor, ops};

use super::Recurrent;
use crate::backbone::{Around, Padding};
use crate::error::{Error, Result};
use crate::segment::{Batch, Segment};

/// Segments of equal width of some texts, on the device.
pub struct Inputs {
    ids: Tensor, // [S, B, width]
    places: Vec<Place>,
    texts: usize,
    width: usize,
    around: Around,
    /// 1 where a segment of a text is background, f32 `[S, B, 1]`, the last segment first, as the layers of a diagonal have them.
    background: Option<Tensor>,
}

/// What is known of a segment beside its ids.
#[non_exhaustive]
pub struct Place {
    /// Its tokens in the text.
    pub range: Range<usize>,
    /// Columns of padding before them.
    pub pad: usize,
    /// What hides its padding.
    pub padding: Option<Padding>,
    /// Whether anyone wants the last layer's outputs of it.
    pub wanted: bool,
}

impl Inputs {
    /// Copies segments of `texts` texts to the device. Segments of different width are an error.
    pub fn new(recurrence: &dyn Recurrent, segments: &[Segment], texts: usize) -> Result<Self> {
        let width = segments.first().map_or(0, Segment::width);
        if let Some(odd) = segments.iter().find(|s| s.width() != width) {
            return Err(Error::input(format!("segments of one width, {width}"), odd.width()));
        }
        let (compute, around) = (recurrence.compute(), recurrence.around());
        let t = around.before + width + around.after;
        let padding = |mask: &Vec<i32>, pad: usize| -> Result<Padding> {
            let before = around.before;
            // Rotary positions go on as if the padding were not there.
            let rows: Vec<i32> = (0..t).map(|i| if i < before { i } else { before.max(i.saturating_sub(pad)) } as i32).collect();
            let mask = Tensor::from_slice(&whole_mask(around, mask, width), [1, texts, t], compute.device())?;
            Ok(Padding { mask, rows: compute.constant(&rows, &[1, t])? })
        };
        let place = |s: &Segment| {
            let padding = s.mask.as_ref().map(|mask| padding(mask, s.pad)).transpose()?;
            Ok(Place { range: s.range.clone(), pad: s.pad, padding, wanted: true })
        };
        Ok(Inputs {
            ids: Tensor::from_slice(&all_ids(segments), [segments.len(), texts, width], compute.device())?,
            places: segments.iter().map(place).collect::<Result<_>>()?,
            texts,
            width,
            around,
            background: None,
        })
    }

    /// The inputs with what is background among them, segment by segment and in each text by text.
    fn with_background(mut self, recurrence: &dyn Recurrent, background: &[bool]) -> Result<Self> {
        let shape = [self.places.len(), self.texts, 1];
        self.background = Some(Tensor::from_slice(&from_last(background, self.texts), shape, recurrence.compute().device())?);
        Ok(self)
    }

    /// Which of some segments are background, from the last of them to the first, f32 `[n, B, 1]`; `None` where that is not known.
    pub(crate) fn background(&self, segments: RangeInclusive<usize>) -> Result<Option<Tensor>> {
        let last = self.places.len() - 1;
        let rows = last - segments.end()..last - segments.start() + 1;
        Ok(self.background.as_ref().map(|all| ops::rows(all, rows)).transpose()?)
    }

    /// The inputs where only the outputs of some segments are wanted.
    pub fn wanting(mut self, wanted: impl Fn(usize) -> bool) -> Self {
        self.places.iter_mut().enumerate().for_each(|(s, place)| place.wanted = wanted(s));
        self
    }

    /// Replaces the texts by others of the same shape.
    pub fn fill(&self, segments: &[Segment]) -> Result<()> {
        self.ids.overwrite(&all_ids(segments))?;
        for (place, segment) in self.places.iter().zip(segments) {
            if let (Some(padding), Some(mask)) = (&place.padding, &segment.mask) {
                padding.mask.overwrite(&whole_mask(self.around, mask, self.width))?;
            }
        }
        Ok(())
    }

    /// Texts side by side.
    pub fn texts(&self) -> usize {
        self.texts
    }

    /// Columns of a segment: padding and tokens.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The segments.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Tokens of each text.
    pub fn tokens(&self) -> u64 {
        self.places.iter().map(|p| p.range.len() as u64).sum()
    }

    /// Ids of some segments, `[n, B, width]`.
    pub fn ids(&self, segments: Range<usize>) -> Result<Tensor> {
        Ok(ops::rows(&self.ids, segments)?)
    }
}

fn all_ids(segments: &[Segment]) -> Vec<i32> {
    segments.iter().map(|s| s.ids.as_slice()).collect::<Vec<_>>().concat()
}

/// 1 where a segment of a text is background, the last segment first.
fn from_last(background: &[bool], texts: usize) -> Vec<f32> {
    background.chunks(texts).rev().flatten().map(|is| f32::from(u8::from(*is))).collect()
}

/// A mask of `width` columns with the positions around them, which are never hidden.
fn whole_mask(around: Around, mask: &[i32], width: usize) -> Vec<i32> {
    let ones = |n| std::iter::repeat_n(1, n);
    mask.chunks(width).flat_map(|row| ones(around.before).chain(row.iter().copied()).chain(ones(around.after))).collect()
}

/// Inputs of the first layer, made for many segments at once: for all of them on a tape, and otherwise for a few ahead of their turn.
#[derive(Default)]
pub(crate) struct Embedded {
    /// `[n, B, T, d]` of n segments that are padded alike, and the first of them.
    run: Option<(usize, Tensor)>,
}

/// Texts of as many segments are embedded at once where no tape keeps them.
const AHEAD: usize = 16;

impl Embedded {
    /// The input of segment s, `[1, B, T, d]`. Segments are asked for in order.
    pub(crate) fn segment(&mut self, recurrence: &dyn Recurrent, tape: &Tape, inputs: &Inputs, s: usize) -> Result<Tensor> {
        let run = match self.run.take().filter(|(first, x)| s - first < x.dims()[0]) {
            Some(run) => run,
            None => {
                let most = if tape.is_recording() { usize::MAX } else { (AHEAD / inputs.texts).max(1) };
                let alike = inputs.places[s..].iter().take(most).take_while(|place| place.pad == inputs.places[s].pad).count();
                (s, recurrence.embed(tape, inputs, s..s + alike, &[])?)
            }
        };
        let (first, x) = self.run.insert(run);
        Ok(ops::rows(x, s - *first..s - *first + 1)?)
    }
}

/// What a training example asks for: which positions predict, and what.
#[derive(Clone, Debug)]
pub struct Targets {
    /// For each position, row by row, the token it should predict; negative where it is not asked, and of these
    /// [`Targets::BACKGROUND`] where it is also known that its token need not be kept.
    pub next: Vec<i32>,
}

impl Targets {
    /// A position that is asked nothing, of a token that nothing will be asked about.
    pub const BACKGROUND: i32 = -2;

    /// Of each text whether all of its positions in `range` are background.
    fn background(&self, range: &Range<usize>, batch: &Batch) -> impl Iterator<Item = bool> {
        let texts = self.next.chunks(batch.tokens());
        texts.map(|next| next[range.clone()].iter().all(|next| *next == Targets::BACKGROUND))
    }

    /// From labels and a mask as the authors have them: position i predicts label i + 1 where the mask at i is set; a label of -100
    /// is not asked for; the last position predicts nothing.
    pub fn shifted(labels: &[i32], mask: Option<&[bool]>, texts: usize) -> Self {
        let tokens = labels.len() / texts.max(1);
        let next = (0..labels.len())
            .map(|i| {
                let asked = (i + 1) % tokens != 0 && mask.is_none_or(|m| m[i]);
                if asked { labels[i + 1].max(-1) } else { -1 }
            })
            .collect();
        Targets { next }
    }

    /// The positions of a segment that are asked something: the row of its output `[B T, d]`, the text, and what it should predict.
    pub fn asked_rows(&self, around: Around, range: Range<usize>, pad: usize, batch: &Batch) -> Vec<(i32, usize, i32)> {
        let (tokens, width) = (batch.tokens(), around.before + pad + range.len() + around.after);
        let positions = (0..batch.texts).flat_map(|b| range.clone().map(move |i| (b, i)));
        let row = |b: usize, i: usize| (b * width + around.before + pad + i - range.start) as i32;
        let asked = positions.map(|(b, i)| (row(b, i), b, self.next[b * tokens + i]));
        asked.filter(|(_, _, target)| *target >= 0).collect()
    }
}

/// A training example as the host has it: segments, and which rows of each predict what.
pub struct HostBatch {
    segments: Vec<Segment>,
    texts: usize,
    /// For each segment, rows of its output `[B T, d]`.
    asked: Vec<Vec<i32>>,
    /// What they should predict, one after the other.
    next: Vec<i32>,
    /// For each segment, whether it is background in each text; empty where none is.
    background: Vec<bool>,
}

/// What two examples must have in common for one recorded step to serve both.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    texts: usize,
    /// Of each segment: tokens, padding, whether a mask hides something, and rows that are asked.
    segments: Vec<(usize, usize, bool, usize)>,
    /// Whether some are background.
    background: bool,
}

impl HostBatch {
    /// The segments of a batch that a model has cut. A batch that asks nothing is an error.
    pub fn new(around: Around, segments: Vec<Segment>, batch: &Batch, targets: &Targets) -> Result<Self> {
        if targets.next.len() != batch.ids.len() {
            return Err(Error::input(format!("{} targets, one for each token", batch.ids.len()), targets.next.len()));
        }
        let (mut asked, mut next) = (Vec::with_capacity(segments.len()), Vec::new());
        for segment in &segments {
            let rows = targets.asked_rows(around, segment.range.clone(), segment.pad, batch);
            asked.push(rows.iter().map(|(row, _, _)| *row).collect());
            next.extend(rows.iter().map(|(_, _, target)| *target));
        }
        if next.is_empty() {
            return Err(Error::input("at least one position with a target", "none"));
        }
        let background: Vec<bool> = segments.iter().flat_map(|s| targets.background(&s.range, batch)).collect();
        let background = if background.contains(&true) { background } else { Vec::new() };
        Ok(HostBatch { segments, texts: batch.texts, asked, next, background })
    }

    /// The batch with rows that are asked nothing, so that the number of rows of a segment that is asked is a multiple of `rows`: texts with
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

    /// What steps are recorded by.
    pub fn shape(&self) -> BatchShape {
        let segments = self.segments.iter().zip(&self.asked);
        let segments = segments.map(|(s, asked)| (s.range.len(), s.pad, s.mask.is_some(), asked.len())).collect();
        BatchShape { texts: self.texts, segments, background: !self.background.is_empty() }
    }
}

/// A training example on the device.
pub struct DeviceBatch {
    /// The texts.
    pub inputs: Inputs,
    /// Rows of each segment's output `[B T, d]` that are asked.
    pub asked: Vec<Option<Tensor>>,
    /// What they should predict.
    pub next: Tensor,
}

impl DeviceBatch {
    /// Copies a batch to the device.
    pub fn new(recurrence: &dyn Recurrent, host: &HostBatch) -> Result<Self> {
        let device = recurrence.compute().device();
        let ints = |data: &[i32]| Ok(Tensor::from_slice(data, [data.len()], device)?);
        let asked = host.asked.iter().map(|rows| if rows.is_empty() { Ok(None) } else { ints(rows).map(Some) });
        let inputs = Inputs::new(recurrence, &host.segments, host.texts)?.wanting(|s| !host.asked[s].is_empty());
        Ok(DeviceBatch {
            inputs: if host.background.is_empty() { inputs } else { inputs.with_background(recurrence, &host.background)? },
            asked: asked.collect::<Result<_>>()?,
            next: ints(&host.next)?,
        })
    }

    /// Replaces the example by another of the same [`BatchShape`].
    pub fn fill(&self, host: &HostBatch) -> Result<()> {
        self.inputs.fill(&host.segments)?;
        for (rows, new) in self.asked.iter().zip(&host.asked) {
            rows.as_ref().map_or(Ok(()), |rows| rows.overwrite(new))?;
        }
        if let Some(background) = &self.inputs.background {
            background.overwrite(&from_last(&host.background, host.texts))?;
        }
        Ok(self.next.overwrite(&host.next)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_adds_rows_that_are_asked_nothing() {
        let (asked, next) = (vec![vec![1, 2, 3], vec![], vec![4]], vec![7, 8, 9, 5]);
        let host = HostBatch { segments: Vec::new(), texts: 1, asked, next, background: Vec::new() };
        let rounded = host.rounded(2);
        assert_eq!(rounded.asked, [vec![1, 2, 3, 0], vec![], vec![4, 0]]);
        assert_eq!(rounded.next, [7, 8, 9, -1, 5, -1]);
    }
}
