//! BABILong reports as pictures and as a table: tasks by lengths, and accuracy over the length.
//!
//! Reports of one name are seeds of one model: a cell is their mean, in curves and in the table with the least and the most. Of a single seed the table has
//! the 95 % interval. The mean of the tasks is the benchmark's headline; it stands only where each of a model's tasks was judged.

use super::{Cell, Report, Settings};
use crate::error::{Error, Result};
use crate::eval::alike::expect_alike;
use crate::eval::heat::HeatMap;
use crate::eval::interval::wilson;
use crate::eval::panels::Panels;
use crate::eval::plot::{Mark, Plot, Scale, Series};
use crate::tasks::babi::Task;
use crate::tasks::babilong::{Facts, Form, Length};

/// What the row of all tasks is called.
const MEAN: &str = "mean";

/// What seeds of one model have in common beside their weights: the texts, and how they were told. What a file held not all reports say.
const SAME: [&str; 8] = ["facts", "retrieve", "form", "simulated", "file", "books", "babi", "file_hash"];

/// Stands in a table where nothing is known.
pub(in crate::eval) const NOTHING: &str = "-";

/// What is told of each cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// Share of answers that are right to the letter.
    #[default]
    ExactMatch,
    /// Share of answers that are right by the benchmark's labels.
    LabelMatch,
}

impl Measure {
    fn of(self, cell: &Cell) -> Option<f64> {
        match self {
            Measure::ExactMatch => Some(cell.exact_match),
            Measure::LabelMatch => cell.label_match,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Measure::ExactMatch => "exact match",
            Measure::LabelMatch => "label match",
        }
    }
}

/// A model's reports, one of each seed, and what is told of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// What the model is called.
    pub name: String,
    /// At least one.
    reports: Vec<Report>,
    measure: Measure,
}

impl Judged {
    /// Reports by their names, in the order in which these first come. Refuses one without a cell, one without right labels if these are to be told,
    /// and some of one name that are of different texts.
    pub fn all(measure: Measure, reports: impl IntoIterator<Item = (String, Report)>) -> Result<Vec<Self>> {
        let mut models: Vec<Judged> = Vec::new();
        for (name, report) in reports {
            if report.cells.is_empty() {
                return Err(Error::input(name, "a report with at least one cell", "none"));
            }
            if report.cells.iter().any(|c| measure.of(c).is_none()) {
                let expected = "right labels, which `armt eval --label-match` counts";
                return Err(Error::input(name, expected, "exact matches only"));
            }
            match models.iter_mut().find(|m| m.name == name) {
                Some(model) => {
                    let both = [&model.reports[0].settings, &report.settings];
                    let known = SAME.len() - usize::from(both.iter().any(|settings| settings.file_hash.is_none()));
                    expect_alike(&name, &SAME[..known], both)?;
                    model.reports.push(report);
                }
                None => models.push(Judged { name, reports: vec![report], measure }),
            }
        }
        Ok(models)
    }

    fn cells(&self) -> impl Iterator<Item = &Cell> {
        self.reports.iter().flat_map(|r| &r.cells)
    }

    /// The model's folder below `models`, where it is one that comes with the project, read whole contexts and was judged in the benchmark's form
    /// of now, on the published stories as they are and the project's books.
    fn shipped(&self) -> Option<&str> {
        let own = |r: &Report| {
            let Settings { form, file, retrieve, facts, simulated, books, babi, .. } = &r.settings;
            let texts = [file, books, babi].iter().all(|named| named.is_none());
            *form == Form::Now && *facts == Facts::Told && !simulated && retrieve.is_none() && texts
        };
        let [report] = &self.reports[..] else { return None };
        report.settings.model.strip_prefix("models/").filter(|_| own(report))
    }

    /// The tasks that were judged, in order.
    fn tasks(&self) -> Vec<Task> {
        sorted(self.cells().map(|c| c.task))
    }

    /// The shares of a task and length, one for each seed, ascending.
    fn shares(&self, task: Task, length: Length) -> Vec<f64> {
        let cells = self.cells().filter(|c| (c.task, c.length) == (task, length));
        let mut shares: Vec<f64> = cells.filter_map(|c| self.measure.of(c)).collect();
        shares.sort_by(f64::total_cmp);
        shares
    }

    /// Samples of the one cell of a task and length, where there is one only.
    fn samples(&self, task: Task, length: Length) -> Option<usize> {
        let mut cells = self.cells().filter(|c| (c.task, c.length) == (task, length));
        let first = cells.next()?;
        cells.next().is_none().then_some(first.samples)
    }

    /// A cell of a table.
    pub(super) fn rate(&self, task: Task, length: Length) -> String {
        rate(&self.shares(task, length), self.samples(task, length))
    }

    /// The mean of the shares of a task and length; `None` where there is none.
    fn share(&self, task: Task, length: Length) -> Option<f64> {
        mean(&self.shares(task, length))
    }

    /// The mean of all tasks at a length, of each seed that has them all, ascending.
    fn means(&self, length: Length) -> Vec<f64> {
        let tasks = self.tasks();
        let of = |report: &Report| {
            let shares = tasks.iter().map(|t| report.cell(*t, length).and_then(|c| self.measure.of(c)));
            mean(&shares.collect::<Option<Vec<_>>>()?)
        };
        let mut means: Vec<f64> = self.reports.iter().filter_map(of).collect();
        means.sort_by(f64::total_cmp);
        means
    }

    /// The seeds' means over the tasks at each length, where there are several tasks and a seed was judged on all of them.
    fn mean_row(&self, lengths: &[Length]) -> Option<Vec<Vec<f64>>> {
        let means: Vec<_> = lengths.iter().map(|l| self.means(*l)).collect();
        (self.tasks().len() > 1 && means.iter().any(|seeds| !seeds.is_empty())).then_some(means)
    }

    /// Tasks by lengths, and their mean where there are several.
    pub fn heat_map(&self) -> HeatMap {
        let lengths = sorted(self.cells().map(|c| c.length));
        let mut rows: Vec<(String, Vec<Option<f64>>)> = Vec::new();
        for task in self.tasks() {
            rows.push((task.to_string(), lengths.iter().map(|l| self.share(task, *l)).collect()));
        }
        rows.extend(self.mean_row(&lengths).map(|means| (MEAN.into(), means.iter().map(|seeds| mean(seeds)).collect())));
        HeatMap {
            title: format!("BABILong, {} in %: {}", self.measure.label(), self.name),
            x_label: "tokens of the context".into(),
            columns: lengths.iter().map(Length::to_string).collect(),
            rows,
        }
    }

    /// A curve of shares over lengths.
    fn series(&self, name: String, lengths: &[Length], shares: impl Fn(Length) -> Vec<f64>) -> Series {
        let mark = |length: &Length| {
            let shares = shares(*length);
            let spread = if let [least, .., most] = shares[..] { Some((least, most)) } else { None };
            Some(Mark { x: place(*length, lengths), y: mean(&shares)?, spread })
        };
        Series { name, marks: lengths.iter().filter_map(mark).collect() }
    }
}

/// Accuracy over the length of the context: of one model a curve for each task, of several with the same tasks the mean of these, and of
/// several with different ones a curve for each task of each.
pub fn curves(models: &[Judged]) -> Plot {
    let lengths = sorted(models.iter().flat_map(Judged::cells).map(|c| c.length));
    let tasks = models.first().map(Judged::tasks).unwrap_or_default();
    let names = tasks.iter().map(Task::to_string).collect::<Vec<_>>().join(", ");
    let (title, series) = match models {
        [one] => {
            let of = |task: Task| one.series(task.to_string(), &lengths, |l| one.shares(task, l));
            (format!("BABILong: {}", one.name), tasks.into_iter().map(of).collect())
        }
        _ if models.iter().all(|m| m.tasks() == tasks) => {
            let of = |m: &Judged| m.series(m.name.clone(), &lengths, |l| m.means(l));
            let what = if tasks.len() == 1 { names } else { format!("mean of {names}") };
            (format!("BABILong: {what}"), models.iter().map(of).collect::<Vec<Series>>())
        }
        _ => {
            let of = |m: &Judged, task: Task| m.series(format!("{}, {task}", m.name), &lengths, |l| m.shares(task, l));
            ("BABILong".into(), models.iter().flat_map(|m| m.tasks().into_iter().map(move |t| of(m, t))).collect())
        }
    };
    let label = models.first().map_or("", |m| m.measure.label());
    Plot {
        title,
        x_label: "tokens of the context".into(),
        y_label: label.into(),
        x_scale: Scale::Log,
        x_ticks: lengths.iter().map(|l| (place(*l, &lengths), l.to_string())).collect(),
        y_range: Some((0.0, 1.0)),
        series: series.into_iter().filter(|s| !s.marks.is_empty()).collect(),
        ..Plot::default()
    }
}

/// Accuracy over the length of the context, a panel for each task with a curve for each model.
pub fn curves_by_task(models: &[Judged]) -> Panels {
    let all = curves(models);
    let lengths = sorted(models.iter().flat_map(Judged::cells).map(|c| c.length));
    let of = |task: Task| models.iter().map(|m| m.series(m.name.clone(), &lengths, |l| m.shares(task, l))).collect();
    let tasks = sorted(models.iter().flat_map(Judged::tasks));
    Panels { plots: tasks.into_iter().map(|task| Plot { title: task.to_string(), series: of(task), ..all.clone() }).collect() }
}

/// A table in Markdown, in per cent: a row for each task of each model and for their mean, a column for each length, and the form of the
/// contexts. Of several seeds the mean, with the least and the most; of one its 95 % interval, in brackets.
pub fn table(models: &[Judged]) -> String {
    let lengths = sorted(models.iter().flat_map(Judged::cells).map(|c| c.length));
    let label = models.first().map_or("", |m| m.measure.label());
    let mut lines = vec![vec![format!("{label} in %, tokens"), "task".into(), "form".into()]];
    lines[0].extend(lengths.iter().map(Length::to_string));
    lines[0].extend(["samples".into(), "seeds".into()]);
    lines.push(vec!["---".into(); lines[0].len()]);
    for model in models {
        let mut row = |task: String, of: &[&Report], rates: Vec<String>| {
            // Whoever made a file of samples knows its form.
            let form = |r: &&Report| r.settings.file.as_ref().map_or(r.settings.form.to_string(), |_| "of a file".into());
            let mut forms: Vec<String> = of.iter().map(form).collect();
            forms.dedup();
            let samples = sorted(of.iter().flat_map(|r| &r.cells).map(|c| c.samples));
            let ends = [samples.iter().map(usize::to_string).collect::<Vec<_>>().join(", "), of.len().to_string()];
            lines.push([model.name.replace('|', "\\|"), task, forms.join(", ")].into_iter().chain(rates).chain(ends).collect());
        };
        for task in model.tasks() {
            let of: Vec<&Report> = model.reports.iter().filter(|r| r.cells.iter().any(|c| c.task == task)).collect();
            row(task.to_string(), &of, lengths.iter().map(|l| model.rate(task, *l)).collect());
        }
        if let Some(means) = model.mean_row(&lengths) {
            // Tasks differ: their mean has no interval of this kind.
            row(MEAN.into(), &model.reports.iter().collect::<Vec<_>>(), means.iter().map(|m| rate(m, None)).collect());
        }
    }
    lines.iter().map(|cells| format!("| {} |\n", cells.join(" | "))).collect()
}

/// Tokens of the contexts of a front page's table, in thousands.
const FRONT: [usize; 6] = [0, 4, 64, 1_000, 10_000, 50_000];

/// A table in Markdown, in per cent, of the models that come with the project, at some of the lengths.
pub fn shipped_table(models: &[Judged]) -> String {
    let judged: Vec<Length> = models.iter().filter(|m| m.shipped().is_some()).flat_map(Judged::cells).map(|c| c.length).collect();
    let lengths: Vec<Length> = FRONT.map(|k| Length(1_000 * k)).into_iter().filter(|l| judged.contains(l)).collect();
    let head = ["model", "task"].map(String::from).into_iter().chain(lengths.iter().map(Length::to_string));
    let mut lines = vec![head.collect::<Vec<String>>()];
    lines.push(vec!["---".to_string(); lines[0].len()]);
    for (model, name) in models.iter().filter_map(|m| Some((m, m.shipped()?))) {
        for task in model.tasks() {
            let rates = lengths.iter().map(|l| model.rate(task, *l));
            lines.push([format!("`{name}`"), task.to_string()].into_iter().chain(rates).collect());
        }
    }
    lines.iter().map(|cells| format!("| {} |\n", cells.join(" | "))).collect()
}

/// Shares of seeds, ascending, in per cent: their mean, with the least and the most where they differ, or of a single one with its 95 % interval where
/// its samples are known.
fn rate(shares: &[f64], samples: Option<usize>) -> String {
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    match (mean(shares), shares, samples) {
        (None, ..) => NOTHING.into(),
        (Some(mean), [least, .., most], _) if least < most => {
            format!("{} ({} to {})", percent(mean), percent(*least), percent(*most))
        }
        (Some(share), [_], Some(samples)) => {
            let (low, high) = wilson(share, samples);
            format!("{} [{}, {}]", percent(share), percent(low), percent(high))
        }
        (Some(mean), ..) => percent(mean),
    }
}

/// Where a length lies on a logarithmic axis: 0k, the facts alone, half as far as the shortest other one.
fn place(length: Length, all: &[Length]) -> f64 {
    let shortest = all.iter().map(|l| l.0).find(|n| *n > 0).unwrap_or(2);
    if length.0 == 0 { shortest as f64 / 2.0 } else { length.0 as f64 }
}

fn mean(shares: &[f64]) -> Option<f64> {
    (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
}

fn sorted<T: Ord>(things: impl Iterator<Item = T>) -> Vec<T> {
    let mut things: Vec<T> = things.collect();
    things.sort();
    things.dedup();
    things
}
