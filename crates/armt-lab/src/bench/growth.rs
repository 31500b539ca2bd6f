//! How cost grows with one of a workload's sizes: figures of `armt bench --json` as plots and tables.

use std::path::Path;

use armt::files::{read_json, write_json};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Timing, Work, Workload};
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

    /// A workload without this size, to see whether two differ in another.
    fn without(self, workload: &Workload) -> Workload {
        let workload = workload.clone();
        match self {
            Size::Tokens => Workload { segments: 0, ..workload },
            Size::Layers => Workload { layers: 0, ..workload },
            Size::Batch => Workload { batch: 0, ..workload },
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

/// Refuses timings that no line could join: they differ in more than the size that grows and the schedule.
fn expect_one_work(figures: &[Figures], size: Size) -> Result<()> {
    let all = || figures.iter().flat_map(|f| f.timings.iter().map(move |t| (f, t)));
    let told = |(f, t): (&Figures, &Timing)| -> Result<Vec<(String, Value)>> {
        let json = |e| Error::input("timings", "figures of `armt bench`", e);
        let workload = serde_json::to_value(size.without(&t.workload)).map_err(json)?;
        let own = ["machine", "dtype", "recompute", "unwind", "accumulate", "nccl"].map(String::from);
        let values = [json!(f.machine), json!(t.dtype), json!(t.recompute), json!(t.unwind), json!(t.accumulate), json!(t.nccl)];
        let work = workload.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone()));
        Ok(work.chain(own.into_iter().zip(values)).collect())
    };
    let Some(first) = all().next().map(told).transpose()? else { return Ok(()) };
    for timing in all() {
        let other = told(timing)?;
        // A key that stands in one of them alone has the value that most have in the other.
        let missing = first.iter().find(|(key, _)| other.iter().all(|(known, _)| known != key));
        let differs = other.iter().find(|pair| !first.contains(pair)).or(missing);
        if let Some((key, value)) = differs {
            let before = first.iter().find(|(known, _)| known == key).map_or(Value::Null, |(_, before)| before.clone());
            let expected = format!("some of one {key}, that differ in the {} alone", size.label());
            return Err(Error::input("timings", expected, format!("{before} and {value}")));
        }
    }
    Ok(())
}

/// Timings of one kind of work that differ in one size, and maybe in the schedule.
pub struct Growth<'f> {
    timings: Vec<&'f Timing>,
    size: Size,
}

impl<'f> Growth<'f> {
    /// Sorts timings by the size that differs. Refuses timings that differ in none, or in several, and those that are of other work, or were done in
    /// another way or on another machine.
    pub fn of(figures: &'f [Figures]) -> Result<Self> {
        let mut timings: Vec<&Timing> = figures.iter().flat_map(|f| &f.timings).collect();
        let differs = |size: &Size| timings.iter().any(|t| size.of(t) != size.of(timings[0]));
        let sizes: Vec<Size> = [Size::Tokens, Size::Layers, Size::Batch].into_iter().filter(differs).collect();
        let &[size] = sizes.as_slice() else {
            let found: Vec<&str> = sizes.iter().map(|s| s.label()).collect();
            let found = if found.is_empty() { "none".into() } else { found.join(" and ") };
            return Err(Error::input("timings", "some that differ in one size", found));
        };
        expect_one_work(figures, size)?;
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

    #[test]
    fn timings_of_other_work_or_done_in_another_way_are_no_growth() {
        let others: [(&str, fn(&mut Timing)); 8] = [
            ("name", |t| t.workload = Workload { segments: 8, ..Workload::named("w1", false).unwrap() }),
            ("width", |t| t.workload.width += 64),
            ("write", |t| t.workload.write = armt::memory::Write::Projected),
            ("dtype", |t| t.dtype = "bf16".into()),
            ("recompute", |t| t.recompute = true),
            ("unwind", |t| t.unwind = true),
            ("accumulate", |t| t.accumulate = 2),
            ("nccl", |t| t.nccl = true),
        ];
        for (key, change) in others {
            let (one, mut other) = (timing(4, 2, "diagonal", 1.0), timing(8, 2, "diagonal", 1.0));
            change(&mut other);
            let refused = Growth::of(&[figures(vec![one, other])]).err().unwrap().to_string();
            assert!(key == "name" || refused.contains(&format!("some of one {key}")), "{key}: {refused}");
        }
        let elsewhere = Figures { machine: "another".into(), ..figures(vec![timing(8, 2, "diagonal", 1.0)]) };
        let refused = Growth::of(&[figures(vec![timing(4, 2, "diagonal", 1.0)]), elsewhere]).err().unwrap().to_string();
        assert!(refused.contains("some of one machine"), "{refused}");
    }
}
