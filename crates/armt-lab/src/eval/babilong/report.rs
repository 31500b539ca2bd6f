//! What was judged on BABILong and how, as a JSON file that grows cell by cell.

use std::path::Path;

use armt::files::{lock_folder_of, read_json, write_json};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tasks::babi::Task;
use crate::tasks::babilong::{Facts, Form, Length};

/// How well a model answers the questions of one task in contexts of one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// qa1 to qa20.
    #[serde(with = "as_text")]
    pub task: Task,
    /// Tokens of a context, as 16k.
    #[serde(with = "as_text")]
    pub length: Length,
    /// Questions that were asked.
    pub samples: usize,
    /// Share that was answered to the letter.
    pub exact_match: f64,
    /// Share that was right by the benchmark's labels, where that was counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_match: Option<f64>,
    /// BLAKE3 of the CSV file that the answers were written to, where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub csv: Option<String>,
}

/// What must be the same for two cells to belong to one report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The model's folder.
    pub model: String,
    /// The model's fingerprint: another one in the same folder is another model.
    pub fingerprint: String,
    /// Seed of the samples.
    pub seed: u64,
    /// Samples side by side.
    pub batch: usize,
    /// Numbers that were computed with.
    pub dtype: String,
    /// Where they were computed.
    pub device: String,
    /// Whether right labels were counted as well.
    pub label_match: bool,
    /// Whether the stories are new ones by the rules of the published.
    pub simulated: bool,
    /// Whether the facts were told as they are.
    pub facts: Facts,
    /// Sentences that were retrieved and read in place of the context, where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retrieve: Option<usize>,
    /// How contexts were written; reports from before there were forms had the mixed one.
    #[serde(default)]
    pub form: Form,
    /// File of samples that were made elsewhere, where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// BLAKE3 of that file's bytes: what has changed since is another file. Reports of earlier versions do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_hash: Option<String>,
    /// Folders of books, stories and tokenizer, where they are not the project's or the model's.
    pub books: Option<String>,
    /// See `books`.
    pub babi: Option<String>,
    /// See `books`.
    pub bpe: Option<String>,
}

/// What was judged, and how; kept as a JSON file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Always `babilong`.
    pub task: ReportTask,
    /// What tables and plots call the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How it was judged.
    pub settings: Settings,
    /// In the order of tasks, and of lengths within them.
    pub cells: Vec<Cell>,
}

/// Tells these reports from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportTask {
    /// BABILong.
    Babilong,
}

impl Report {
    /// A report without cells.
    pub fn new(name: Option<String>, settings: Settings) -> Self {
        Report { task: ReportTask::Babilong, name, settings, cells: Vec::new() }
    }

    /// The cell of a task and length, if it was judged.
    pub fn cell(&self, task: Task, length: Length) -> Option<&Cell> {
        self.cells.iter().find(|c| (c.task, c.length) == (task, length))
    }

    /// Puts a cell into its place.
    pub fn put(&mut self, cell: Cell) {
        self.cells.retain(|c| (c.task, c.length) != (cell.task, cell.length));
        let at = self.cells.partition_point(|c| (c.task, c.length) < (cell.task, cell.length));
        self.cells.insert(at, cell);
    }

    /// Writes the report beside its place and renames it there; an error names the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(write_json(path, self)?)
    }

    /// Puts a cell into its place, here and in a file to which other processes may be adding cells too: none of theirs is lost, and of two
    /// cells of one task and length that with more samples stays.
    pub fn add(&mut self, cell: Cell, path: &Path) -> Result<()> {
        let _turn = lock_folder_of(path);
        let others = Self::resume(path, &self.settings)?.map(|found| found.cells).unwrap_or_default();
        for cell in others.into_iter().chain([cell]) {
            if self.cell(cell.task, cell.length).is_none_or(|own| own.samples <= cell.samples) {
                self.put(cell);
            }
        }
        self.save(path)
    }

    /// Reads a report; refuses a file that holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        let report: Report = read_json(path, "a report of `armt eval --task babilong`")?;
        let share = |x: f64| (0.0..=1.0).contains(&x);
        let possible = |c: &Cell| c.samples > 0 && share(c.exact_match) && c.label_match.is_none_or(share);
        match report.cells.iter().find(|c| !possible(c)) {
            Some(c) => {
                Err(Error::file(path, format!("{} {}: expected shares from 0 to 1 of some samples, got others", c.task, c.length)))
            }
            None => Ok(report),
        }
    }

    /// The report in a file to go on with, if there is one. One of other settings is refused, with the first that differs.
    pub fn resume(path: &Path, settings: &Settings) -> Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let mut report = Self::load(path)?;
        let value = |settings| serde_json::to_value(settings).map_err(|e| Error::file(path, e));
        let (old, new) = (value(&report.settings)?, value(settings)?);
        // What is none stands in neither.
        let mut keys = [&new, &old].into_iter().filter_map(|settings| settings.as_object()).flat_map(|keys| keys.keys());
        let unknown = |key: &str| key == "file_hash" && report.settings.file_hash.is_none();
        if let Some(key) = keys.find(|key| old[*key] != new[*key] && !unknown(key)) {
            return Err(Error::file(
                path,
                format!(
                    "it has results of other settings ({key} {}, now {}): name another file, or remove it to begin anew",
                    old[key], new[key]
                ),
            ));
        }
        report.settings = settings.clone();
        Ok(Some(report))
    }
}

/// Whether a file is such a report, as far as its task says.
pub fn is_report(path: &Path) -> bool {
    let value = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
    value.is_some_and(|v| v["task"] == "babilong")
}

/// Things that are written as their text.
mod as_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
