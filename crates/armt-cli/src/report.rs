//! `armt report`: curves of `armt eval` as plots, and as tables of documents; figures of `armt bench` as plots.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use armt_lab::bench::growth::{Cost, Figures, Growth};
use armt_lab::eval::babilong::compare::{self, Judged, curves};
use armt_lab::eval::babilong::{self, is_report};
use armt_lab::eval::plot::Scale;
use armt_lab::eval::results::{Comparison, Measure, regenerate};
use armt_lab::eval::retrieval::Report;
use armt_lab::eval::{qa, text};
use clap::{Args, ValueEnum};

use crate::place::{Written, expect_place_for};

const EXAMPLE: &str = "\
Examples:
  armt report results --readme README.md,docs/retrieval.md,docs/babilong.md
  armt report armt.json rmt.json prmt.json --out exact-match.svg
  armt report a0.json a1.json a2.json r0.json --names ARMT,ARMT,ARMT,RMT --metric stored --out capacity.svg
  armt report babilong.json --out heat.svg
  armt report babilong.json --chart curves --out lengths.svg
  armt report tokens.json --metric memory --out memory.svg

A folder of results has reports as remember/MODEL.json, rewrite/MODEL.json, babilong/MODEL.json or, of several seeds, MODEL.seed1.json
and so on. Each experiment's plots are drawn again beside them, and its table goes into the documents that have the lines
<!-- results: rewrite --> and <!-- end -->.
Reports of one name become one line: their mean, with the least and the most shaded.
Of one BABILong model a heat map of tasks by lengths is drawn, of several their means over the length.
Of one model's text its loss by the segment is drawn, of several their bits per byte.
Of questions of your own exact match is drawn over the length of the contexts, beside that with nothing read.
Of figures of `armt bench --json` that differ in one size the rate, or the memory, is drawn over it, and printed as a table.";

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct ReportArgs {
    /// A folder of results, or reports as `armt eval --out` and `armt bench --json` write them.
    #[arg(required = true, value_name = "FOLDER|FILE")]
    files: Vec<PathBuf>,
    /// Documents to write the tables of a folder's experiments into.
    #[arg(long, value_name = "FILE,..", value_delimiter = ',', conflicts_with_all = ["out", "metric", "names", "x", "chart"])]
    readme: Vec<PathBuf>,
    /// SVG file to write.
    #[arg(long, value_name = "PLOT")]
    out: Option<PathBuf>,
    /// What to draw: exact match if not given; stored pairs for retrieval, right labels for BABILong, memory in place of the rate for speed.
    #[arg(long, value_enum)]
    metric: Option<Metric>,
    /// A name for each file; the reports' own, or the files', if not given.
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    names: Option<Vec<String>>,
    /// Scale of the number of pairs; log if not given and they spread far.
    #[arg(long, value_enum)]
    x: Option<XScale>,
    /// How to draw BABILong: tasks by lengths of one model, or accuracy over the length.
    #[arg(long, value_enum)]
    chart: Option<Chart>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Metric {
    ExactMatch,
    Stored,
    LabelMatch,
    Memory,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Chart {
    Heat,
    Curves,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum XScale {
    Linear,
    Log,
}

pub fn run(args: &ReportArgs) -> Result<ExitCode> {
    match (&args.files[..], &args.out) {
        ([folder], None) if folder.is_dir() => {
            if args.metric.is_some() || args.names.is_some() || args.x.is_some() || args.chart.is_some() {
                bail!(
                    "--metric, --names, --x and --chart: expected files with them, got a folder of results, where each experiment has its own"
                );
            }
            for file in regenerate(folder, &args.readme)? {
                crate::say(format_args!("{}", file.display()))?;
            }
        }
        (_, _) if !args.readme.is_empty() => bail!("--readme: expected one folder of results before it"),
        (_, None) => bail!("--out: expected the name of a plot to write, or one folder of results instead of files"),
        (files, Some(out)) => {
            expect_place_for(Written::Plot, out)?;
            if out.extension().is_some_and(|ending| !ending.eq_ignore_ascii_case("svg")) {
                bail!("{}: expected a name that ends in .svg: plots are drawn as SVG", out.display());
            }
            if let Some(folder) = files.iter().find(|f| f.is_dir()) {
                bail!(
                    "{}: expected a report, got a folder; a folder of results is given alone and without --out",
                    folder.display()
                );
            }
            expect_names(args.names.as_deref(), files.len())?;
            let figures: Vec<Figures> = files.iter().map_while(|f| Figures::load(f).ok()).collect();
            let svg = match figures.len() == files.len() {
                true => args.speed(&figures)?,
                false if files.iter().any(|f| text::is_report(f)) => args.text(files)?,
                false if files.iter().any(|f| qa::is_report(f)) => args.qa(files)?,
                false if files.iter().any(|f| is_report(f)) => args.babilong(files)?,
                false => args.retrieval(files)?,
            };
            std::fs::write(out, svg).with_context(|| out.display().to_string())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl ReportArgs {
    /// Curves over the number of pairs.
    fn retrieval(&self, files: &[PathBuf]) -> Result<String> {
        let measure = match self.metric {
            None | Some(Metric::ExactMatch) => Measure::ExactMatch,
            Some(Metric::Stored) => Measure::Stored,
            Some(Metric::LabelMatch) => bail!("--metric label-match: expected reports of BABILong, got others"),
            Some(Metric::Memory) => bail!("--metric memory: expected figures of `armt bench`, got others"),
        };
        let scale = self.x.map(|x| match x {
            XScale::Linear => Scale::Linear,
            XScale::Log => Scale::Log,
        });
        if self.chart.is_some() {
            bail!("--chart: expected reports of BABILong, got others");
        }
        let reports = files.iter().map(|f| Ok(Report::load(f)?)).collect::<Result<Vec<_>>>()?;
        let names = self.names(files, reports.iter().map(|r| r.name.clone()));
        let plot = Comparison::of(measure, names.into_iter().zip(reports))?.plot(scale);
        plot.svg().context("nothing to draw")
    }

    /// Speed or memory over the size that differs.
    fn speed(&self, figures: &[Figures]) -> Result<String> {
        let cost = match self.metric {
            None => Cost::Rate,
            Some(Metric::Memory) => Cost::Memory,
            Some(_) => bail!("--metric: expected none or memory with figures of `armt bench`, got another"),
        };
        if self.names.is_some() || self.x.is_some() || self.chart.is_some() {
            bail!("--names, --x and --chart: expected reports of `armt eval`, got figures of `armt bench`");
        }
        let growth = Growth::of(figures)?;
        crate::say(format_args!("{}", growth.table().trim_end()))?;
        growth.plot(cost).svg().context("nothing to draw")
    }

    /// Loss by the segment's number with and without the memory, or bits per byte of several models.
    fn text(&self, files: &[PathBuf]) -> Result<String> {
        if self.metric.is_some() || self.x.is_some() || self.chart.is_some() {
            bail!("--metric, --x and --chart: expected reports of other tasks, got text");
        }
        let reports = files.iter().map(|f| Ok(text::Report::load(f)?)).collect::<Result<Vec<_>>>()?;
        if let [one] = &reports[..] {
            return Ok(one.plot().svg()?);
        }
        let names = self.names(files, reports.iter().map(|r| r.name.clone()));
        Ok(text::compare(&names.into_iter().zip(reports).collect::<Vec<_>>())?.svg()?)
    }

    /// Exact match over the length of the contexts.
    fn qa(&self, files: &[PathBuf]) -> Result<String> {
        if self.metric.is_some() || self.x.is_some() || self.chart.is_some() {
            bail!("--metric, --x and --chart: expected reports of other tasks, got questions");
        }
        let reports = files.iter().map(|f| Ok(qa::Report::load(f)?)).collect::<Result<Vec<_>>>()?;
        let names = self.names(files, reports.iter().map(|r| r.name.clone()));
        Ok(qa::compare(&names.into_iter().zip(reports).collect::<Vec<_>>())?.svg()?)
    }

    /// Tasks by lengths, or curves over the length.
    fn babilong(&self, files: &[PathBuf]) -> Result<String> {
        let measure = match self.metric {
            None | Some(Metric::ExactMatch) => compare::Measure::ExactMatch,
            Some(Metric::LabelMatch) => compare::Measure::LabelMatch,
            Some(Metric::Stored) => bail!("--metric stored: expected reports of remember or rewrite, got BABILong"),
            Some(Metric::Memory) => bail!("--metric memory: expected figures of `armt bench`, got BABILong"),
        };
        if self.x.is_some() {
            bail!("--x: expected reports of remember or rewrite, got BABILong, whose lengths are always on a logarithmic axis");
        }
        let reports = files.iter().map(|f| Ok(babilong::Report::load(f)?)).collect::<Result<Vec<_>>>()?;
        let names = self.names(files, reports.iter().map(|r| r.name.clone()));
        let models = Judged::all(measure, names.into_iter().zip(reports))?;
        Ok(match (&models[..], self.chart) {
            ([one], None | Some(Chart::Heat)) => one.heat_map().svg()?,
            (several, Some(Chart::Heat)) => bail!("--chart heat: expected reports of one model, got {} models", several.len()),
            (all, _) => curves(all).svg()?,
        })
    }

    /// The names that were given, or the reports' own, or their files'.
    fn names(&self, files: &[PathBuf], own: impl Iterator<Item = Option<String>>) -> Vec<String> {
        let file_names = file_names(files);
        self.names.clone().unwrap_or_else(|| own.zip(file_names).map(|(own, file)| own.unwrap_or(file)).collect())
    }
}

fn expect_names(names: Option<&[String]>, files: usize) -> Result<()> {
    match names {
        Some(names) if names.len() != files => bail!("--names: expected {files}, one for each file, got {}", names.len()),
        _ => Ok(()),
    }
}

/// The files' stems, or whole paths where stems come twice.
fn file_names(files: &[PathBuf]) -> Vec<String> {
    let stems: Vec<String> = files.iter().map(|f| f.file_stem().unwrap_or_default().to_string_lossy().into_owned()).collect();
    let twice = |stem: &String| stems.iter().filter(|s| *s == stem).count() > 1;
    let name = |(file, stem): (&PathBuf, &String)| if twice(stem) { file.display().to_string() } else { stem.clone() };
    files.iter().zip(&stems).map(name).collect()
}
