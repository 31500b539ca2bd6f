//! A table that others published, with our rows below theirs: task by task, at their lengths.
//!
//! ```toml
//! source = "arXiv 2407.04841, table 1"
//! lengths = ["64k", "1M"]
//! rows = [{ model = "RMT (137M)", task = "qa1", rates = ["99.6", "94.2"] }]
//! ```
//!
//! Rates are in per cent and stand as they were published; `-` where there is none.

use std::path::Path;

use armt::files::read_text;
use serde::Deserialize;

use super::compare::{Judged, NOTHING};
use crate::error::{Error, Result};
use crate::tasks::babi::Task;
use crate::tasks::babilong::Length;

/// A published table.
#[derive(Clone, Debug, PartialEq)]
pub struct Cited {
    source: String,
    lengths: Vec<Length>,
    rows: Vec<(Task, Row)>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    model: String,
    task: String,
    rates: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    source: String,
    lengths: Vec<String>,
    rows: Vec<Row>,
}

impl Cited {
    /// Reads a file as above; `None` where there is none. What is no such table, a row with more or fewer rates than lengths, and one of a
    /// task that there is not, is an error with the file's name.
    pub fn find(path: &Path) -> Result<Option<Self>> {
        if !path.is_file() {
            return Ok(None);
        }
        Self::parse(&read_text(path)?).map(Some).map_err(|e| Error::file(path, e))
    }

    fn parse(text: &str) -> Result<Self> {
        let stored: Stored = toml::from_str(text).map_err(|e| Error::input("table", "source, lengths and rows", e))?;
        let lengths = stored.lengths.iter().map(|l| l.parse()).collect::<Result<Vec<Length>>>()?;
        let row = |row: Row| {
            if row.rates.len() != lengths.len() {
                let of = format!("rates of {}, {}", row.model, row.task);
                return Err(Error::input(of, format!("{}, one for each length", lengths.len()), row.rates.len()));
            }
            Ok((row.task.parse()?, row))
        };
        let rows = stored.rows.into_iter().map(row).collect::<Result<_>>()?;
        Ok(Cited { source: stored.source, lengths, rows })
    }

    /// A table in Markdown: for each task their rows, then those of ours that were judged on it at one of their lengths.
    pub fn table(&self, ours: &[Judged]) -> String {
        let mut tasks: Vec<Task> = self.rows.iter().map(|(task, _)| *task).collect();
        tasks.sort();
        tasks.dedup();
        let head = ["task".into(), "exact match in %, tokens".into()];
        let mut lines = vec![head.into_iter().chain(self.lengths.iter().map(Length::to_string)).collect::<Vec<String>>()];
        lines.push(vec!["---".into(); lines[0].len()]);
        for task in tasks {
            let theirs = self.rows.iter().filter(|(of, _)| *of == task);
            let theirs = theirs.map(|(_, row)| (format!("{}, {}", row.model, self.source), row.rates.clone()));
            let ours = ours.iter().filter_map(|model| {
                let rates: Vec<String> = self.lengths.iter().map(|l| model.rate(task, *l)).collect();
                rates.iter().any(|rate| rate != NOTHING).then(|| (model.name.clone(), rates))
            });
            for (name, rates) in theirs.chain(ours) {
                lines.push([task.to_string(), name.replace('|', "\\|")].into_iter().chain(rates).collect());
            }
        }
        lines.iter().map(|cells| format!("| {} |\n", cells.join(" | "))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_published_table_is_read_whole_or_refused() {
        let table = |rates: &str| {
            format!("source = 'a paper'\nlengths = ['64k', '1M']\nrows = [{{ model = 'RMT', task = 'qa2', rates = {rates} }}]")
        };
        let cited = Cited::parse(&table("['72.7', '-']")).unwrap();
        assert_eq!(
            cited.table(&[]),
            "| task | exact match in %, tokens | 64k | 1M |\n| --- | --- | --- | --- |\n| qa2 | RMT, a paper | 72.7 | - |\n"
        );
        let refused = |text: &str| Cited::parse(text).unwrap_err().to_string();
        assert!(refused(&table("['72.7']")).contains("RMT, qa2"));
        assert!(refused(&table("['1', '2']").replace("qa2", "qa99")).contains("qa99"));
        assert!(refused(&table("['1', '2']").replace("64k", "long")).contains("long"));
        assert!(refused("rows = []").contains("source"));
    }
}
