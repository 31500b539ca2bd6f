//! Reports of several models side by side: as a plot, and as a table of a document.
//!
//! ```text
//! results/<experiment>/<model>.json            what `armt eval --out` wrote; experiments are remember, rewrite and babilong
//! results/<experiment>/<model>.seed<k>.json    the same model trained from other seeds
//! results/babilong/<model>.qa<n>.json          the same model trained for another task
//! results/babilong/paper.toml                  rates that the paper has
//! ```
//!
//! Seeds of a model become one line: their mean, with the least and the most. A table goes between two lines of a document,
//! `<!-- results: rewrite -->` and `<!-- end -->`; whatever stood there before is replaced.

use std::path::{Path, PathBuf};

use armt::files::{read_text, write_beside};

use super::alike::expect_alike;
use super::babilong;
use super::babilong::cited::Cited;
use super::babilong::compare::{Judged, NOTHING, curves_by_task, shipped_table, table};
use super::numbers::thousands;
use super::plot::{Guide, Mark, Plot, Reference, Scale, Series};
use super::retrieval::{Point, Report};
use crate::error::{Error, Result};
use crate::tasks::retrieval::Setting;

/// The line that ends a table.
const END: &str = "<!-- end -->";

/// What is told of each point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Share of the texts whose whole answer was right.
    ExactMatch,
    /// Pairs that the memory holds.
    Stored,
}

impl Measure {
    fn of(self, point: &Point) -> f64 {
        match self {
            Measure::ExactMatch => point.exact_match,
            Measure::Stored => point.stored,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Measure::ExactMatch => "exact match",
            Measure::Stored => "stored pairs",
        }
    }

    fn text(self, value: f64) -> String {
        match self {
            Measure::ExactMatch => format!("{value:.3}"),
            Measure::Stored => format!("{value:.1}"),
        }
    }
}

/// A model's reports, one of each seed.
#[derive(Clone, Debug, PartialEq)]
pub struct Seeds {
    /// What the model is called.
    pub name: String,
    /// At least one.
    pub reports: Vec<Report>,
}

impl Seeds {
    /// At each number of pairs the mean, with the least and the most where there are several reports of it.
    pub fn marks(&self, measure: Measure) -> Vec<Mark> {
        let mut points: Vec<(usize, f64)> = self.reports.iter().flat_map(|r| &r.points).map(|p| (p.pairs, measure.of(p))).collect();
        points.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mark = |run: &[(usize, f64)]| {
            let mean = run.iter().map(|(_, y)| y).sum::<f64>() / run.len() as f64;
            Mark { x: run[0].0 as f64, y: mean, spread: (run.len() > 1).then(|| (run[0].1, run[run.len() - 1].1)) }
        };
        points.chunk_by(|a, b| a.0 == b.0).map(mark).collect()
    }

    /// Most pairs that any of its seeds was trained on, where a report says so.
    pub fn trained_pairs(&self) -> Option<usize> {
        self.reports.iter().filter_map(|r| r.trained_pairs).max()
    }

    /// Steps that training made on average, of the seeds whose reports say so.
    fn steps(&self) -> Option<String> {
        self.mean(|r| r.steps.map(|n| n as f64)).map(|n| thousands(n.round() as u64))
    }

    /// Minutes that training took on average, of the seeds whose reports say so, and of what machine.
    fn minutes(&self) -> Option<String> {
        let machine =
            self.reports.iter().find_map(|r| r.trained_on.as_deref()).map_or(String::new(), |machine| format!(" of {machine}"));
        self.mean(|r| r.minutes).map(|minutes| format!("{minutes:.1}{machine}"))
    }

    /// The numbers of its state.
    fn state(&self) -> Option<String> {
        let state = self.reports.iter().find_map(|r| r.state)?;
        let numbers = thousands(state.numbers as u64);
        Some(if state.growth > 0 { format!("{numbers}, and {} a segment", thousands(state.growth as u64)) } else { numbers })
    }

    fn mean(&self, of: impl Fn(&Report) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.reports.iter().filter_map(of).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
}

/// Models to compare.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// What is told of them.
    pub measure: Measure,
    /// The models, in the order of table and legend.
    pub models: Vec<Seeds>,
}

impl Comparison {
    /// Models of one name are seeds of one model; the order is that in which names first come. Refuses reports of one name that are of different texts.
    pub fn of(measure: Measure, reports: impl IntoIterator<Item = (String, Report)>) -> Result<Self> {
        let mut models: Vec<Seeds> = Vec::new();
        for (name, report) in reports {
            match models.iter_mut().find(|m| m.name == name) {
                Some(model) => {
                    expect_alike(&name, &["task", "key_size", "value_size", "symbols"], [&model.reports[0], &report])?;
                    model.reports.push(report);
                }
                None => models.push(Seeds { name, reports: vec![report] }),
            }
        }
        Ok(Comparison { measure, models })
    }

    /// Curves over the number of pairs, with the trained lengths marked. Stored pairs are drawn beside the line of those that store all.
    /// `None` for the scale: logarithmic if the numbers of pairs spread far, except beside that line, which is straight only without.
    pub fn plot(&self, x_scale: Option<Scale>) -> Plot {
        let series = self.models.iter().map(|m| Series { name: m.name.clone(), marks: m.marks(self.measure) });
        let series: Vec<Series> = series.collect();
        let pairs = || series.iter().flat_map(|s| &s.marks).map(|m| m.x);
        let (least, most) = (pairs().fold(f64::INFINITY, f64::min), pairs().fold(0.0, f64::max));
        let far = self.measure == Measure::ExactMatch && most >= 20.0 * least;
        let settings = [(Setting::Remember, "Remember"), (Setting::Rewrite, "Rewrite")];
        let reports = || self.models.iter().flat_map(|m| &m.reports);
        let tasks = settings.iter().filter(|(s, _)| reports().any(|r| r.task == *s)).map(|(_, name)| *name);
        let all = |n: f64| (n, n);
        // Points along the way too: over a logarithmic axis the line bends.
        let reference = (self.measure == Measure::Stored && most > 0.0).then(|| Reference {
            name: "all of them".into(),
            points: (0..=100).map(|i| all(least * (most / least).powf(f64::from(i) / 100.0))).collect(),
        });
        Plot {
            title: format!("Associative retrieval: {}", tasks.collect::<Vec<_>>().join(" and ")),
            x_label: "pairs in the text".into(),
            y_label: self.measure.label().into(),
            x_scale: x_scale.unwrap_or(if far { Scale::Log } else { Scale::Linear }),
            x_ticks: Vec::new(),
            y_range: (self.measure == Measure::ExactMatch).then_some((0.0, 1.0)),
            series,
            reference,
            guides: self.guides(),
        }
    }

    /// The trained lengths, each once: in the colour of its model, or grey where several have it.
    fn guides(&self) -> Vec<Guide> {
        let mut guides: Vec<Guide> = Vec::new();
        for (i, model) in self.models.iter().enumerate() {
            let Some(n) = model.trained_pairs() else { continue };
            match guides.iter_mut().find(|g| g.x == n as f64) {
                Some(shared) => shared.series = None,
                None => guides.push(Guide { x: n as f64, label: format!("trained on up to {n}"), series: Some(i) }),
            }
        }
        guides
    }

    /// A table in Markdown: a row for each model, a column for each number of pairs, then on how much and how long it was trained, and how much it keeps.
    pub fn table(&self) -> String {
        let rows: Vec<(&Seeds, Vec<Mark>)> = self.models.iter().map(|m| (m, m.marks(self.measure))).collect();
        let mut pairs: Vec<f64> = rows.iter().flat_map(|(_, marks)| marks).map(|m| m.x).collect();
        pairs.sort_by(f64::total_cmp);
        pairs.dedup();
        let mut lines = vec![
            [format!("{} at pairs", self.measure.label())]
                .into_iter()
                .chain(pairs.iter().map(f64::to_string))
                .chain(["trained on up to", "steps", "minutes", "state in numbers", "seeds"].map(String::from))
                .collect::<Vec<String>>(),
        ];
        lines.push(vec!["---".into(); lines[0].len()]);
        for (model, marks) in rows {
            let cell = |n: &f64| match marks.iter().find(|m| m.x == *n) {
                None => NOTHING.into(),
                Some(Mark { y, spread, .. }) => match spread.map(|(a, b)| (self.measure.text(a), self.measure.text(b))) {
                    Some((low, high)) if low != high => format!("{} ({low} to {high})", self.measure.text(*y)),
                    _ => self.measure.text(*y),
                },
            };
            let known = |text: Option<String>| text.unwrap_or_else(|| NOTHING.into());
            let mut line = vec![model.name.replace('|', "\\|")];
            line.extend(pairs.iter().map(cell));
            line.push(known(model.trained_pairs().map(|n| n.to_string())));
            line.push(known(model.steps()));
            line.push(known(model.minutes()));
            line.push(known(model.state()));
            line.push(model.reports.len().to_string());
            lines.push(line);
        }
        lines.iter().map(|cells| format!("| {} |\n", cells.join(" | "))).collect()
    }
}

/// An experiment of a folder of results.
#[derive(Clone, Debug, PartialEq)]
pub struct Experiment {
    /// Its plots as SVG, and where they go.
    pub plots: Vec<(PathBuf, String)>,
    /// Its tables: the first is of all its models.
    pub tables: Vec<Table>,
}

/// A table of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Its name, as its markers have it.
    pub name: &'static str,
    /// In Markdown.
    pub text: String,
}

impl Table {
    /// The line before it in a document.
    fn marker(&self) -> String {
        format!("<!-- results: {} -->", self.name)
    }

    /// That a line around it is missing.
    fn without(&self, line: &str) -> Error {
        Error::input(format!("table of {}", self.name), format!("the line {line}"), "none")
    }
}

impl Experiment {
    /// The experiments of a folder of results. Refuses a folder without any, and by its name a file that is no report or one of
    /// another task.
    pub fn all(results: &Path) -> Result<Vec<Self>> {
        let kinds = [
            (Setting::Remember, "remember", Measure::Stored, "stored-pairs.svg"),
            (Setting::Rewrite, "rewrite", Measure::ExactMatch, "exact-match.svg"),
        ];
        let mut found = Vec::new();
        for (setting, name, measure, plot) in kinds {
            found.extend(Self::retrieval(results, setting, name, measure, plot)?);
        }
        found.extend(Self::babilong(results)?);
        if found.is_empty() {
            let message = "expected reports of `armt eval` (*.json) in remember/, rewrite/ or babilong/, found none";
            return Err(Error::file(results, message));
        }
        Ok(found)
    }

    fn retrieval(results: &Path, setting: Setting, name: &'static str, measure: Measure, plot: &str) -> Result<Option<Self>> {
        let folder = results.join(name);
        let mut reports = Vec::new();
        for file in reports_in(&folder)? {
            let report = Report::load(&file)?;
            if report.task != setting {
                return Err(Error::file(&file, format!("expected a report of {name}, got one of the other task")));
            }
            if report.points.is_empty() {
                return Err(Error::file(&file, "expected a report with at least one point, got none"));
            }
            reports.push((model_of(&file), report));
        }
        if reports.is_empty() {
            return Ok(None);
        }
        let mut models = Comparison::of(measure, reports).map_err(|e| Error::file(&folder, e))?;
        for model in &mut models.models {
            if let Some(name) = model.reports.iter().find_map(|r| r.name.clone()) {
                model.name = name;
            }
        }
        let plot = folder.join(plot);
        let svg = models.plot(None).svg().map_err(|e| Error::file(&plot, e))?;
        Ok(Some(Experiment { plots: vec![(plot, svg)], tables: vec![Table { name, text: models.table() }] }))
    }

    /// A heat map of each model, `<model>.svg`, and all of them over the length, a panel for each task, `accuracy.svg`. Tables of all models, of those that come with the
    /// project, and of the paper's with ours, where `paper.toml` has them.
    fn babilong(results: &Path) -> Result<Option<Self>> {
        let folder = results.join("babilong");
        let mut reports = Vec::new();
        for file in reports_in(&folder)? {
            let name = model_of(&file);
            let of_task = name.rsplit_once(".qa").filter(|(_, n)| n.parse::<usize>().is_ok());
            reports.push((of_task.map_or(name.clone(), |(model, _)| model.into()), babilong::Report::load(&file)?));
        }
        if reports.is_empty() {
            return Ok(None);
        }
        let mut models =
            Judged::all(babilong::compare::Measure::default(), reports.clone()).map_err(|e| Error::file(&folder, e))?;
        let mut plots = Vec::new();
        for model in &mut models {
            let plot = folder.join(format!("{}.svg", model.name));
            if let Some(name) = reports.iter().filter(|(file, _)| *file == model.name).find_map(|(_, r)| r.name.clone()) {
                model.name = name;
            }
            let svg = model.heat_map().svg().map_err(|e| Error::file(&plot, e))?;
            plots.push((plot, svg));
        }
        let plot = folder.join("accuracy.svg");
        let svg = curves_by_task(&models).svg().map_err(|e| Error::file(&plot, e))?;
        plots.push((plot, svg));
        let mut tables = vec![
            Table { name: "babilong", text: table(&models) },
            Table { name: "babilong-shipped", text: shipped_table(&models) },
        ];
        if let Some(cited) = Cited::find(&folder.join("paper.toml"))? {
            tables.push(Table { name: "babilong-paper", text: cited.table(&models) });
        }
        Ok(Some(Experiment { plots, tables }))
    }
}

/// Draws the plots of each experiment of a folder of results again, and writes their tables into the documents that have their markers. Gives
/// the files that were written. Whatever [`Experiment::all`] or [`fill`] refuse is refused before anything is written, and so is an
/// experiment that has its markers in none of the documents, where any are named.
pub fn regenerate(results: &Path, documents: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let experiments = Experiment::all(results)?;
    let mut files: Vec<(PathBuf, String)> = experiments.iter().flat_map(|e| e.plots.clone()).collect();
    let mut missing: Vec<&Experiment> = experiments.iter().collect();
    for path in documents {
        let text = read_text(path)?;
        missing.retain(|experiment| !experiment.tables.iter().any(|table| text.contains(&table.marker())));
        files.push((path.clone(), fill(&text, &experiments).map_err(|e| Error::file(path, e))?));
    }
    if let (Some(table), Some(path)) = (missing.first().and_then(|experiment| experiment.tables.first()), documents.last()) {
        return Err(Error::file(path, table.without(&table.marker())));
    }
    for (path, text) in &files {
        write_beside(path, text.as_bytes())?;
    }
    Ok(files.into_iter().map(|(path, _)| path).collect())
}

/// A document with the tables of those experiments whose markers it has. Refuses a table that does not end, by its experiment's name.
pub fn fill(document: &str, experiments: &[Experiment]) -> Result<String> {
    let mut text = document.to_string();
    for table in experiments.iter().flat_map(|experiment| &experiment.tables) {
        let begin = table.marker();
        let Some(at) = text.find(&begin) else { continue };
        let from = at + begin.len();
        let to = from + text[from..].find(END).ok_or_else(|| table.without(END))?;
        if text[from..to].contains("<!-- results:") {
            return Err(table.without(END));
        }
        text.replace_range(from..to, &format!("\n\n{}\n", table.text));
    }
    Ok(text)
}

/// A folder's JSON files, in the order of their models; none where there is no such folder.
fn reports_in(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let io = |source| Error::Io { path: folder.into(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.is_file() && path.extension().is_some_and(|e| e == "json") {
            files.push(path);
        }
    }
    // By model first: as plain text armt-x.json would come before armt.json.
    files.sort_by_key(|f| (model_of(f), f.clone()));
    Ok(files)
}

/// The model of a report's file: its name without `.json` and `.seed<k>`.
fn model_of(file: &Path) -> String {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    match stem.rsplit_once(".seed") {
        Some((model, seed)) if seed.parse::<u64>().is_ok() => model.into(),
        _ => stem,
    }
}
