//! Associative retrieval judged: the share of texts whose whole answer is right, over the number of pairs.

use std::ops::ControlFlow;
use std::path::Path;

use armt::engine::{DType, Tape, Tensor, ops};
use armt::files::{read_json, write_json};
use armt::model::Model;
use armt::random::Random;
use armt::schedule::{Pass, ScheduleKind};
use armt::segment::Segment;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::capacity::stored_pairs;
use crate::tasks::retrieval::{Retrieval, SYMBOLS, Setting};

/// How well a model answers about one number of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Pairs of each text.
    pub pairs: usize,
    /// Texts that were asked.
    pub samples: usize,
    /// Share of the texts whose whole answer was right.
    pub exact_match: f64,
    /// Pairs that the memory holds by [`stored_pairs`]; where keys come again, those of different keys.
    pub stored: f64,
}

/// How many numbers a model keeps of the text before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateSize {
    /// At the beginning.
    pub numbers: usize,
    /// More with every segment; 0 for all but RMT-R.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub growth: usize,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl StateSize {
    /// That of a model.
    pub fn of(model: &Model) -> Self {
        let layout = model.recurrence().layout();
        let numbers = |bytes: usize| bytes / size_of::<f32>();
        StateSize { numbers: numbers(layout.bytes(DType::F32)), growth: numbers(layout.growth(DType::F32)) }
    }
}

/// What was judged, and how; kept as a JSON file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// The model's folder.
    pub model: String,
    /// What tables and plots call the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Most pairs that it was trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_pairs: Option<usize>,
    /// Steps that its training made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// Minutes that its training took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minutes: Option<f64>,
    /// What the minutes are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_on: Option<String>,
    /// The state that it goes on with from segment to segment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StateSize>,
    /// The task's setting.
    pub task: Setting,
    /// Symbols of a key.
    pub key_size: usize,
    /// Symbols of a value.
    pub value_size: usize,
    /// Different symbols that there were.
    #[serde(default = "the_authors_symbols")]
    pub symbols: usize,
    /// Texts of each point.
    pub samples: usize,
    /// Texts at a time.
    pub batch: usize,
    /// Seed of the texts.
    pub seed: u64,
    /// Numbers that were computed with.
    pub dtype: String,
    /// The curve.
    pub points: Vec<Point>,
}

fn the_authors_symbols() -> usize {
    SYMBOLS
}

impl Report {
    /// Writes the report; an error names the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(write_json(path, self)?)
    }

    /// Reads a report; refuses a file that holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        let report: Report = read_json(path, "a report of `armt eval`")?;
        let possible = |p: &Point| {
            let stored = p.stored.is_finite() && p.stored <= p.pairs as f64 * (1.0 + 1e-9);
            (0.0..=1.0).contains(&p.exact_match) && p.samples > 0 && p.pairs > 0 && stored
        };
        if let Some(p) = report.points.iter().find(|p| !possible(p)) {
            let expected = "expected a share from 0 to 1 of some texts, and no more stored pairs than there are";
            return Err(Error::file(path, format!("{} pairs: {expected}, got {p:?}", p.pairs)));
        }
        match report.minutes.filter(|m| !(m.is_finite() && *m >= 0.0)) {
            Some(minutes) => Err(Error::file(path, format!("minutes: expected a number of at least 0, got {minutes}"))),
            None => Ok(report),
        }
    }
}

/// Refuses a model whose segments do not hold a number of the task's pairs, or whose vocabulary lacks the task's tokens.
pub fn expect_fits(model: &Model, task: &Retrieval) -> Result<()> {
    let (pair, segment) = (task.segment_size(), model.config().segment_size);
    if segment % pair != 0 {
        let expected = format!(
            "a model of segments of {pair} tokens or of several times as many, which a key of {} and a value of {} take with their marks",
            task.key_size, task.value_size
        );
        return Err(Error::unfit(expected, format!("one of {segment}")));
    }
    let (vocab, last) = (model.sizes().vocab, crate::tasks::retrieval::EOS);
    if vocab <= last as usize {
        return Err(Error::unfit(format!("a model with the task's tokens, up to {last}"), format!("one of {vocab} tokens")));
    }
    Ok(())
}

/// How many texts of the batch have every position that is asked for right, taking the most probable token while the text itself is
/// read (teacher forcing).
///
/// That is the exact match of greedy generation: as long as generated tokens are the answer's, both read the same text and predict the
/// same next token; at the first that is not, both have failed, whatever comes after. A text that is asked nothing does not count.
pub fn count_exact(model: &Model, asked: &TaskBatch, schedule: ScheduleKind) -> Result<usize> {
    let TaskBatch { batch, targets } = asked;
    if targets.next.len() != batch.ids.len() {
        return Err(Error::input("targets", format!("{}, one for each token", batch.ids.len()), targets.next.len()));
    }
    let texts = batch.texts;
    let segments = model.segments(batch)?;
    let around = model.recurrence().around();
    let answers = |s: &Segment| targets.asked_rows(around, s.range.clone(), s.pad, batch);
    let inputs = model.inputs(&segments, texts)?.wanting(|s| !answers(&segments[s]).is_empty());
    let tape = Tape::off();
    let (mut asked, mut wrong) = (vec![false; texts], vec![false; texts]);
    let empty = model.empty(texts)?;
    let pass = Pass::forward(&tape, &inputs);
    schedule.schedule(model.recurrence())?.run(model.recurrence(), pass, &empty, &mut |s, h| {
        let answers = answers(&segments[s]);
        let rows: Vec<i32> = answers.iter().map(|(row, _, _)| *row).collect();
        let ids = Tensor::from_slice(&rows, [rows.len()], model.device())?;
        let flat = ops::reshape(h, [texts * h.dims()[1], h.dims()[2]])?;
        let picked = ops::embedding(&flat, &ids)?; // [asked, d]
        let said = ops::argmax(&model.logits(&tape, &picked)?)?.to_vec::<i32>()?;
        for ((_, b, target), said) in answers.into_iter().zip(said) {
            asked[b] = true;
            wrong[b] |= said != target;
        }
        Ok(())
    })?;
    Ok(asked.iter().zip(&wrong).filter(|(asked, wrong)| **asked && !**wrong).count())
}

/// Judges a model on texts of each number of pairs, `samples` of them in batches of `batch`. The texts of a point depend on the seed and
/// its number of pairs alone.
///
/// `each` sees the point at hand after every batch, with the samples so far, and may end the judging; given back are the points that
/// were finished. Refuses what [`expect_fits`] and [`Retrieval::check`] refuse before any text is read.
pub fn curve(
    model: &Model,
    task: Retrieval,
    pairs: &[usize],
    samples: usize,
    batch: usize,
    seed: u64,
    each: &mut dyn FnMut(&Point) -> ControlFlow<()>,
) -> Result<Vec<Point>> {
    expect_fits(model, &task)?;
    pairs.iter().try_for_each(|n| task.check(*n).and_then(|()| task.expect_room(*n, 1, batch.min(samples))))?;
    if samples == 0 || batch == 0 {
        return Err(Error::input("samples", "at least 1 in batches of at least 1", format!("{samples} and {batch}")));
    }
    let values = task.values();
    let mut points = Vec::with_capacity(pairs.len());
    for &n in pairs {
        // Hashed, since generators of nearby seeds may be shifts of one another.
        let mut random = Random::new(Random::new(seed ^ ((n as u64) << 32)).bits());
        let share = task.different_keys(n) / n as f64;
        let (mut done, mut right) = (0, 0);
        while done < samples {
            let texts = batch.min(samples - done);
            right += count_exact(model, &task.batch(n, texts, &mut random)?, ScheduleKind::Auto)?;
            done += texts;
            let exact_match = right as f64 / done as f64;
            let point = Point { pairs: n, samples: done, exact_match, stored: share * stored_pairs(exact_match, n, values) };
            if done == samples {
                points.push(point);
            }
            if each(&point).is_break() {
                return Ok(points);
            }
        }
    }
    Ok(points)
}
