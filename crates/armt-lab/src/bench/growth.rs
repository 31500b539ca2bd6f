//! How cost grows with one of a workload's sizes: figures of `armt bench --json` as plots and tables.

use std::path::Path;

use armt::files::{read_json, write_json};
use serde::{Deserialize, Serialize};

use super::{Timing, Work};
use crate::error::{Error, Result};
use crate::eval::plot::{Mark, Plot, Scale, Series};

/// What `armt bench --json` writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// What was measured on.
    pub machine: String,
    /// A timing of each workload.
    pub timings: Vec<Timing>,
}

impl Figures {
    /// Writes the figures; an error names the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(write_json(path, self)?)
    }

    /// Reads figures; refuses a file that holds something else.
    pub fn load(path: &Path) -> Result<Self> {
        Ok(read_json(path, "figures of `armt bench --json`")?)
    }
}

/// What is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cost {
    /// Text tokens in a second.
    Rate,
    /// Most bytes that tensors took, in GiB.
    Memory,
}

/// The size that differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Tokens,
    Layers,
    Batch,
}

impl Size {
    fn of(self, t: &Timing) -> usize {
        match self {
            Size::Tokens => t.workload.segments * t.workload.segment,
            Size::Layers => t.workload.layers,
            Size::Batch => t.workload.batch,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Size::Tokens => "tokens of a text",
            Size::Layers => "layers",
            Size::Batch => "texts side by side",
        }
    }
}

/// Timings of one kind of work that differ in one size, and maybe in the schedule.
pub struct Growth<'f> {
    timings: Vec<&'f Timing>,
    size: Size,
}

impl<'f> Growth<'f> {
    /// Sorts timings by the size that differs. Refuses timings that differ in none, or in several.
    pub fn of(figures: &'f [Figures]) -> Result<Self> {
        let mut timings: Vec<&Timing> = figures.iter().flat_map(|f| &f.timings).collect();
        let differs = |size: &Size| timings.iter().any(|t| size.of(t) != size.of(timings[0]));
        let sizes: Vec<Size> = [Size::Tokens, Size::Layers, Size::Batch].into_iter().filter(differs).collect();
        let &[size] = sizes.as_slice() else {
            let found: Vec<&str> = sizes.iter().map(|s| s.label()).collect();
            let found = if found.is_empty() { "none".into() } else { found.join(" and ") };
            return Err(Error::input("timings", "some that differ in one size", found));
        };
        timings.sort_by_key(|t| size.of(t));
        Ok(Growth { timings, size })
    }

    /// Schedules that were timed, in the order in which they come.
    fn schedules(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for t in &self.timings {
            if !names.contains(&t.schedule.as_str()) {
                names.push(&t.schedule);
            }
        }
        names
    }

    /// A line for each schedule.
    pub fn plot(&self, cost: Cost) -> Plot {
        let value = |t: &Timing| match cost {
            Cost::Rate => t.tokens_per_second,
            Cost::Memory => t.peak_bytes as f64 / f64::from(1 << 30),
        };
        let line = |schedule: &str| Series {
            name: schedule.into(),
            marks: self
                .timings
                .iter()
                .filter(|t| t.schedule == schedule)
                .map(|t| Mark { x: self.size.of(t) as f64, y: value(t), spread: None })
                .collect(),
        };
        let work = if self.timings.iter().all(|t| t.workload.work == Work::Read) { "Reading" } else { "Training" };
        Plot {
            title: format!("{work} ({})", self.timings[0].workload.name),
            x_label: self.size.label().into(),
            y_label: if cost == Cost::Rate { "tokens/s" } else { "peak memory (GiB)" }.into(),
            x_scale: Scale::Log,
            series: self.schedules().into_iter().map(line).collect(),
            ..Plot::default()
        }
    }

    /// A table in Markdown: a row for each size and schedule.
    pub fn table(&self) -> String {
        let mut text = format!("| {} | schedule | tokens/s | ms | peak GiB | share of the product's rate |\n", self.size.label());
        text += "| --- | --- | --- | --- | --- | --- |\n";
        for t in &self.timings {
            text += &format!(
                "| {} | {} | {:.0} | {:.1} | {:.3} | {:.0} % |\n",
                self.size.of(t),
                t.schedule,
                t.tokens_per_second,
                t.ms_per_step,
                t.peak_bytes as f64 / f64::from(1 << 30),
                100.0 * t.tflops[0] / t.tflops[1],
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::Workload;
    use super::*;

    fn timing(segments: usize, layers: usize, schedule: &str, rate: f64) -> Timing {
        let workload = Workload { segments, layers, ..Workload::named("w3", false).unwrap() };
        Timing {
            workload,
            dtype: "f32".into(),
            schedule: schedule.into(),
            recompute: false,
            unwind: false,
            accumulate: 1,
            nccl: false,
            seconds: vec![1.0],
            tokens_per_second: rate,
            ms_per_step: 1000.0,
            peak_bytes: 3 << 29,
            tflops: [1.0, 4.0],
            first_seconds: 2.0,
            clocks: None,
            agreement: None,
        }
    }

    fn figures(timings: Vec<Timing>) -> Figures {
        Figures { machine: "a machine".into(), timings }
    }

    #[test]
    fn figures_are_read_as_they_were_written_and_other_files_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f.json");
        let one = figures(vec![timing(4, 2, "diagonal", 10.0)]);
        one.save(&path).unwrap();
        assert_eq!(format!("{:?}", Figures::load(&path).unwrap()), format!("{one:?}"));
        std::fs::write(&path, "{}").unwrap();
        assert!(Figures::load(&path).unwrap_err().to_string().contains("armt bench"));
    }

    #[test]
    fn a_growth_has_a_line_for_each_schedule_over_the_size_that_differs() {
        let all = [
            figures(vec![timing(40, 2, "diagonal", 11.0), timing(4, 2, "diagonal", 10.0)]),
            figures(vec![timing(4, 2, "sequential", 5.0)]),
        ];
        let growth = Growth::of(&all).unwrap();
        let plot = growth.plot(Cost::Rate);
        assert_eq!(plot.x_label, "tokens of a text");
        let lines: Vec<(&str, Vec<(f64, f64)>)> =
            plot.series.iter().map(|s| (s.name.as_str(), s.marks.iter().map(|m| (m.x, m.y)).collect())).collect();
        assert_eq!(lines, [("diagonal", vec![(1024.0, 10.0), (10240.0, 11.0)]), ("sequential", vec![(1024.0, 5.0)])]);
        assert_eq!(growth.plot(Cost::Memory).series[0].marks[0].y, 1.5);
        assert!(growth.table().contains("| 10240 | diagonal | 11 | 1000.0 | 1.500 | 25 % |"), "{}", growth.table());
    }

    #[test]
    fn timings_that_differ_in_no_size_or_in_several_are_refused() {
        let of = |timings| Growth::of(&[figures(timings)]).err().unwrap().to_string();
        assert!(of(vec![timing(4, 2, "diagonal", 1.0)]).contains("got none"));
        let said = of(vec![timing(4, 2, "diagonal", 1.0), timing(8, 3, "diagonal", 1.0)]);
        assert!(said.contains("tokens of a text and layers"), "{said}");
        assert!(of(vec![]).contains("got none"));
    }
}
