//! `armt report`: curves of `armt eval` as a plot.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use armt::eval::plot::{Mark, Plot, Scale, Series};
use armt::eval::retrieval::{Point, Report};
use armt::tasks::retrieval::Setting;
use clap::{Args, ValueEnum};

use crate::eval::expect_place;

const EXAMPLE: &str = "\
Examples:
  armt report armt.json rmt.json prmt.json --out exact-match.svg
  armt report a0.json a1.json a2.json r0.json --names ARMT,ARMT,ARMT,RMT --metric stored --out capacity.svg

Files of one name become one line: their mean, with the least and the most shaded.";

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct ReportArgs {
    /// Reports, as `armt eval --out` writes them.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// SVG file to write.
    #[arg(long, value_name = "PLOT")]
    out: PathBuf,
    /// What to draw over the number of pairs.
    #[arg(long, value_enum, default_value_t = Metric::ExactMatch)]
    metric: Metric,
    /// A name for each file; the files' own if not given.
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    names: Option<Vec<String>>,
    /// Scale of the number of pairs; log if not given and they spread far.
    #[arg(long, value_enum)]
    x: Option<XScale>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Metric {
    ExactMatch,
    Stored,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum XScale {
    Linear,
    Log,
}

pub fn run(args: &ReportArgs) -> Result<ExitCode> {
    expect_place(&args.out)?;
    let names = args.names()?;
    let reports = args.files.iter().map(|f| Ok(Report::load(f)?)).collect::<Result<Vec<_>>>()?;
    let plot = plot(args.metric, args.x, &names, &reports);
    let svg = plot.svg().context("nothing to draw")?;
    std::fs::write(&args.out, svg).with_context(|| args.out.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

impl ReportArgs {
    /// A name for each file: without `--names` their stems, or whole paths where stems come twice.
    fn names(&self) -> Result<Vec<String>> {
        let files = self.files.len();
        match &self.names {
            Some(names) if names.len() != files => bail!("--names: expected {files}, one for each file, got {}", names.len()),
            Some(names) => Ok(names.clone()),
            None => {
                let stems: Vec<String> =
                    self.files.iter().map(|f| f.file_stem().unwrap_or_default().to_string_lossy().into_owned()).collect();
                let twice = |stem: &String| stems.iter().filter(|s| *s == stem).count() > 1;
                let name = |(stem, file): (&String, &PathBuf)| if twice(stem) { file.display().to_string() } else { stem.clone() };
                Ok(stems.iter().zip(&self.files).map(name).collect())
            }
        }
    }
}

fn plot(metric: Metric, x: Option<XScale>, names: &[String], reports: &[Report]) -> Plot {
    let mut series: Vec<Series> = Vec::new();
    for name in names {
        if series.iter().all(|s| s.name != *name) {
            let own = names.iter().zip(reports).filter(|(n, _)| *n == name).flat_map(|(_, r)| &r.points);
            series.push(Series { name: name.clone(), marks: marks(metric, own) });
        }
    }
    let pairs = || series.iter().flat_map(|s| &s.marks).map(|m| m.x);
    let far = pairs().fold(0.0, f64::max) >= 20.0 * pairs().fold(f64::INFINITY, f64::min);
    let x_scale = match x {
        Some(XScale::Log) => Scale::Log,
        Some(XScale::Linear) => Scale::Linear,
        None if far => Scale::Log,
        None => Scale::Linear,
    };
    let settings = [(Setting::Remember, "Remember"), (Setting::Rewrite, "Rewrite")];
    let tasks: Vec<&str> = settings.iter().filter(|(s, _)| reports.iter().any(|r| r.task == *s)).map(|(_, name)| *name).collect();
    let (y_label, y_range) = match metric {
        Metric::ExactMatch => ("exact match", Some((0.0, 1.0))),
        Metric::Stored => ("stored pairs", None),
    };
    Plot {
        title: format!("Associative retrieval: {}", tasks.join(" and ")),
        x_label: "pairs in the text".into(),
        y_label: y_label.into(),
        x_scale,
        y_range,
        series,
    }
}

/// The mean at each number of pairs, with the least and the most where there are several.
fn marks<'a>(metric: Metric, points: impl Iterator<Item = &'a Point>) -> Vec<Mark> {
    let value = |p: &Point| match metric {
        Metric::ExactMatch => p.exact_match,
        Metric::Stored => p.stored,
    };
    let mut points: Vec<(usize, f64)> = points.map(|p| (p.pairs, value(p))).collect();
    points.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mark = |run: &[(usize, f64)]| {
        let mean = run.iter().map(|(_, y)| y).sum::<f64>() / run.len() as f64;
        Mark { x: run[0].0 as f64, y: mean, spread: (run.len() > 1).then(|| (run[0].1, run[run.len() - 1].1)) }
    };
    points.chunk_by(|a, b| a.0 == b.0).map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_of_one_name_become_their_mean_and_spread() {
        let point = |pairs, exact_match| Point { pairs, samples: 10, exact_match, stored: 0.0 };
        let points = [point(5, 0.5), point(1, 1.0), point(5, 0.75)];
        let want = [Mark { x: 1.0, y: 1.0, spread: None }, Mark { x: 5.0, y: 0.625, spread: Some((0.5, 0.75)) }];
        assert_eq!(marks(Metric::ExactMatch, points.iter()), want);
    }
}
