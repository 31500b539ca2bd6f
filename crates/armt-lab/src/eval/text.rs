//! Texts judged: loss, perplexity and bits per byte, and the loss by the number of the segment beside that of the same model with its memory
//! emptied before each, which is what shows whether the memory helps.

use std::ops::ControlFlow;
use std::path::Path;

use armt::files::{read_json, write_json};
use armt::model::Model;
use armt::recurrence::Targets;
use armt::segment::Batch;
use armt::text::Speech;
use serde::{Deserialize, Serialize};

use super::likelihood::{Likelihood, by_segment};
use super::plot::{Mark, Plot, Scale, Series};
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::documents::{Documents, Tokens};
use crate::tasks::words::Words;

/// Segments of a document that are computed at once.
const GROUP: usize = 32;

/// What was judged, and how; kept as a JSON file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Always `text`.
    pub task: Text,
    /// The model's folder.
    pub model: String,
    /// What tables and plots call the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The files.
    pub text: Vec<String>,
    /// Documents that were read.
    pub documents: u64,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Bytes of the text of these.
    pub bytes: u64,
    /// Tokens of a segment.
    pub segment_size: usize,
    /// Numbers that were computed with.
    pub dtype: String,
    /// Mean of -ln p over the tokens.
    pub loss: f64,
    /// exp(loss).
    pub perplexity: f64,
    /// The loss in bits, by bytes of text instead of tokens: to compare models with different tokenizers.
    pub bits_per_byte: f64,
    /// Loss of the same model with its memory emptied before each segment.
    pub emptied_loss: f64,
    /// The loss by the segment's number.
    pub by_segment: Vec<Segment>,
}

/// The one value that `task` has here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Text {
    /// This task.
    #[default]
    Text,
}

/// Segments of one number, of all documents that have so many.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Segment {
    /// Its number in the document, from 1.
    pub segment: usize,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Bytes of the text of these; 0 in reports of earlier versions.
    #[serde(default)]
    pub bytes: u64,
    /// Their mean loss.
    pub loss: f64,
    /// Their mean loss with the memory emptied before the segment.
    pub emptied: f64,
}

impl Segment {
    /// A loss in bits, by bytes of text instead of tokens; `None` where these were not counted.
    fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        (self.bytes > 0).then(|| loss * self.tokens as f64 / std::f64::consts::LN_2 / self.bytes as f64)
    }
}

/// How far a judging has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Judged {
    /// Documents that were begun.
    pub documents: u64,
    /// Tokens that were predicted.
    pub tokens: u64,
}

/// What was summed over documents.
#[derive(Default)]
struct Sums {
    documents: u64,
    /// By the segment's number.
    bytes: Vec<u64>,
    read: Vec<Likelihood>,
    emptied: Vec<Likelihood>,
}

/// Judges a model on documents, each read from an empty memory to its end, or up to `segments` segments where these are given. `each` hears of
/// the progress and may end it, which gives [`Error::Interrupted`]. Texts of fewer than two tokens in all are an error.
pub fn judge(
    model: &Model,
    documents: &Documents,
    words: &Words,
    segments: Option<usize>,
    each: &mut dyn FnMut(Judged) -> ControlFlow<()>,
) -> Result<Report> {
    let mut sums = Sums::default();
    for file in 0..documents.files().len() {
        for found in documents.of_file(file)? {
            let tokens = found?.tokens(&words.tokenizer)?;
            sums.documents += 1;
            sums.document(model, tokens, words, segments, each)?;
        }
    }
    sums.report(model, documents)
}

impl Sums {
    fn document(
        &mut self,
        model: &Model,
        mut tokens: Tokens,
        words: &Words,
        most: Option<usize>,
        each: &mut dyn FnMut(Judged) -> ControlFlow<()>,
    ) -> Result<()> {
        let size = model.config().segment_size;
        let Some(first) = tokens.next().transpose()? else { return Ok(()) };
        let (mut state, mut from, mut last) = (model.empty(1)?, 0, first);
        let mut speech = words.tokenizer.speech();
        speech.say(first)?;
        loop {
            let group = most.map_or(GROUP, |most| GROUP.min(most - from));
            let mut ids = vec![last];
            for token in tokens.by_ref().take(group * size) {
                ids.push(token?);
            }
            let full = ids.len() == group * size + 1;
            if ids.len() < 2 {
                break;
            }
            last = ids[ids.len() - 1];
            let next = ids.split_off(1);
            ids.extend_from_slice(&next[..next.len() - 1]);
            self.count_bytes(from, size, &next, &mut speech)?;
            let (read, after) = by_segment(model, &batch(&ids, &next, 1), &state)?;
            self.add(from, read.iter().map(|texts| texts[0]), |sums| &mut sums.read);
            self.emptied(model, from, &ids, &next)?;
            state = after;
            from += read.len();
            let tokens = self.read.iter().map(|sum| sum.tokens).sum();
            if each(Judged { documents: self.documents, tokens }).is_break() {
                return Err(Error::Interrupted);
            }
            if !full || most.is_some_and(|most| from >= most) {
                break;
            }
        }
        Ok(())
    }

    /// Counts the bytes of segments by what each adds to what was said before it, so that a letter which a border cuts is counted once.
    fn count_bytes(&mut self, from: usize, size: usize, next: &[i32], speech: &mut Speech<'_>) -> Result<()> {
        for (segment, tokens) in next.chunks(size).enumerate() {
            if self.bytes.len() <= from + segment {
                self.bytes.resize(from + segment + 1, 0);
            }
            for token in tokens {
                self.bytes[from + segment] += speech.say(*token)?.len() as u64;
            }
        }
        Ok(())
    }

    /// The loss of segments from an empty memory each, computed side by side.
    fn emptied(&mut self, model: &Model, from: usize, ids: &[i32], next: &[i32]) -> Result<()> {
        let size = model.config().segment_size;
        let whole = ids.len() / size * size;
        let parts = [(0, whole, ids.len() / size), (whole, ids.len(), 1)];
        for (start, end, texts) in parts.into_iter().filter(|(start, end, _)| start < end) {
            let asked = batch(&ids[start..end], &next[start..end], texts);
            let (sums, _) = by_segment(model, &asked, &model.empty(texts)?)?;
            self.add(from + start / size, sums.into_iter().flatten(), |sums| &mut sums.emptied);
        }
        Ok(())
    }

    fn add(&mut self, from: usize, sums: impl Iterator<Item = Likelihood>, of: fn(&mut Self) -> &mut Vec<Likelihood>) {
        let all = of(self);
        for (i, sum) in sums.enumerate() {
            if all.len() <= from + i {
                all.resize(from + i + 1, Likelihood::default());
            }
            all[from + i] += sum;
        }
    }

    fn report(self, model: &Model, documents: &Documents) -> Result<Report> {
        let sum = |parts: &[Likelihood]| {
            let mut sum = Likelihood::default();
            parts.iter().for_each(|part| sum += *part);
            sum
        };
        let (read, emptied) = (sum(&self.read), sum(&self.emptied));
        if read.tokens == 0 {
            return Err(Error::input("texts", "at least two tokens", "fewer"));
        }
        let by_segment = self.read.iter().zip(&self.emptied).enumerate().filter(|(_, (read, _))| read.tokens > 0);
        let by_segment = by_segment.map(|(i, (read, emptied))| Segment {
            segment: i + 1,
            tokens: read.tokens,
            bytes: self.bytes.get(i).copied().unwrap_or_default(),
            loss: read.loss(),
            emptied: emptied.loss(),
        });
        Ok(Report {
            task: Text::Text,
            model: String::new(),
            name: None,
            text: documents.files().iter().map(|f| f.display().to_string()).collect(),
            documents: self.documents,
            tokens: read.tokens,
            bytes: self.bytes.iter().sum(),
            segment_size: model.config().segment_size,
            dtype: model.weights_dtype().to_string(),
            loss: read.loss(),
            perplexity: read.loss().exp(),
            bits_per_byte: read.nll / std::f64::consts::LN_2 / self.bytes.iter().sum::<u64>() as f64,
            emptied_loss: emptied.loss(),
            by_segment: by_segment.collect(),
        })
    }
}

fn batch(ids: &[i32], next: &[i32], texts: usize) -> TaskBatch {
    TaskBatch { batch: Batch { ids: ids.to_vec(), texts, mask: None }, targets: Targets { next: next.to_vec() } }
}

/// Segments of some numbers together.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Range {
    /// The first.
    pub from: usize,
    /// The last.
    pub to: usize,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Their mean loss.
    pub loss: f64,
    /// Their mean loss with the memory emptied before each segment.
    pub emptied: f64,
}

impl Report {
    /// Writes the report; an error names the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(write_json(path, self)?)
    }

    /// Reads a report; refuses a file that holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        let report: Report = read_json(path, "a report of `armt eval --task text`")?;
        let numbers = report.by_segment.iter().flat_map(|s| [s.loss, s.emptied]);
        match numbers.chain([report.loss, report.perplexity, report.bits_per_byte]).find(|n| !(n.is_finite() && *n >= 0.0)) {
            Some(number) => Err(Error::file(path, format!("expected losses of at least 0, got {number}"))),
            None => Ok(report),
        }
    }

    /// The loss over ranges of segments that double: 1, 2, 3 to 4, 5 to 8.
    pub fn ranges(&self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        let mut bound = 1;
        for s in &self.by_segment {
            while s.segment > bound {
                bound *= 2;
            }
            let from = bound / 2 + 1;
            match ranges.last_mut().filter(|range| range.from == from) {
                Some(range) => {
                    let (a, b) = (range.tokens as f64, s.tokens as f64);
                    let mean = |x: f64, y: f64| (a * x + b * y) / (a + b);
                    let (loss, emptied) = (mean(range.loss, s.loss), mean(range.emptied, s.emptied));
                    *range = Range { to: s.segment, tokens: range.tokens + s.tokens, loss, emptied, ..*range };
                }
                None => {
                    ranges.push(Range { from, to: s.segment, tokens: s.tokens, loss: s.loss, emptied: s.emptied });
                }
            }
        }
        ranges
    }

    /// The loss over the segment's number, with the memory and with it emptied.
    pub fn plot(&self) -> Plot {
        let ranges = self.ranges();
        let middle = |r: &Range| ((r.from * r.to) as f64).sqrt();
        let series = |name: &str, of: fn(&Range) -> f64| Series {
            name: name.into(),
            marks: ranges.iter().map(|r| Mark { x: middle(r), y: of(r), spread: None }).collect(),
        };
        let label = |r: &Range| if r.from == r.to { r.from.to_string() } else { format!("{}-{}", r.from, r.to) };
        let all = ranges.iter().flat_map(|r| [r.loss, r.emptied]);
        let (least, most) = all.fold((f64::MAX, f64::MIN), |(least, most), y| (least.min(y), most.max(y)));
        let margin = 0.08 * (most - least).max(0.01);
        let folder = Path::new(&self.model).display().to_string();
        Plot {
            title: format!("Loss by the number of the segment: {}", self.name.as_ref().unwrap_or(&folder)),
            x_label: format!("segment of {} tokens in its document", self.segment_size),
            y_label: "loss, nats a token".into(),
            x_scale: Scale::Log,
            x_ticks: ranges.iter().map(|r| (middle(r), label(r))).collect(),
            y_range: Some((least - margin, most + margin)),
            series: vec![series("with its memory", |r| r.loss), series("memory emptied", |r| r.emptied)],
            reference: None,
            guides: Vec::new(),
        }
    }
}

/// Bits per byte of several models over the segment's number, each under its name. Reports without the bytes of their segments are refused.
pub fn compare(models: &[(String, Report)]) -> Result<Plot> {
    let mut series = Vec::new();
    for (name, report) in models {
        let mark = |s: &Segment| Some(Mark { x: s.segment as f64, y: s.bits_per_byte(s.loss)?, spread: None });
        let marks = report.by_segment.iter().map(mark).collect::<Option<Vec<_>>>();
        let expected = "a report with the bytes of its segments, which `armt eval` writes now";
        series.push(Series { name: name.clone(), marks: marks.ok_or_else(|| Error::input(name, expected, "none"))? });
    }
    let all = || series.iter().flat_map(|s: &Series| s.marks.iter());
    let (least, most) = all().fold((f64::MAX, f64::MIN), |(least, most), m| (least.min(m.y), most.max(m.y)));
    let (margin, last) = (0.08 * (most - least).max(0.01), all().fold(1.0, |last: f64, m| last.max(m.x)));
    let sizes: Vec<usize> = models.iter().map(|(_, report)| report.segment_size).collect();
    let size = if sizes.windows(2).all(|pair| pair[0] == pair[1]) { format!(" of {} tokens", sizes[0]) } else { String::new() };
    Ok(Plot {
        title: "Bits per byte by the number of the segment".into(),
        x_label: format!("segment{size} in its document"),
        y_label: "bits per byte".into(),
        x_scale: if last > 40.0 { Scale::Log } else { Scale::Linear },
        y_range: Some((least - margin, most + margin)),
        series,
        ..Plot::default()
    })
}

/// Whether a file is a report of this kind, damaged or not.
pub fn is_report(path: &Path) -> bool {
    read_json::<serde_json::Value>(path, "a report").is_ok_and(|value| value.get("task").is_some_and(|task| task == "text"))
}
