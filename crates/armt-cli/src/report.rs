//! `armt report`: curves of `armt eval` as plots, and as tables of a README.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use armt::eval::plot::Scale;
use armt::eval::results::{Comparison, Measure, regenerate};
use armt::eval::retrieval::Report;
use clap::{Args, ValueEnum};

use crate::eval::expect_place;

const EXAMPLE: &str = "\
Examples:
  armt report results --readme README.md
  armt report armt.json rmt.json prmt.json --out exact-match.svg
  armt report a0.json a1.json a2.json r0.json --names ARMT,ARMT,ARMT,RMT --metric stored --out capacity.svg

A folder of results has reports as remember/MODEL.json, rewrite/MODEL.json or, of several seeds, MODEL.seed1.json and so on. Each
experiment's plot is drawn again beside them, and its table goes into the README between the lines
<!-- results: rewrite --> and <!-- end -->.
Reports of one name become one line: their mean, with the least and the most shaded.";

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct ReportArgs {
    /// A folder of results, or reports as `armt eval --out` writes them.
    #[arg(required = true, value_name = "FOLDER|FILE")]
    files: Vec<PathBuf>,
    /// File to write the tables of a folder's experiments into.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["out", "metric", "names", "x"])]
    readme: Option<PathBuf>,
    /// SVG file to write.
    #[arg(long, value_name = "PLOT")]
    out: Option<PathBuf>,
    /// What to draw over the number of pairs; exact match if not given.
    #[arg(long, value_enum)]
    metric: Option<Metric>,
    /// A name for each file; the reports' own, or the files', if not given.
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
    match (&args.files[..], &args.out) {
        ([folder], None) if folder.is_dir() => {
            if args.metric.is_some() || args.names.is_some() || args.x.is_some() {
                bail!(
                    "--metric, --names and --x: expected files with them, got a folder of results, where each experiment has its own"
                );
            }
            for file in regenerate(folder, args.readme.as_deref())? {
                crate::say(format_args!("{}", file.display()))?;
            }
        }
        (_, _) if args.readme.is_some() => bail!("--readme: expected one folder of results before it"),
        (_, None) => bail!("--out: expected the name of a plot to write, or one folder of results instead of files"),
        (files, Some(out)) => {
            expect_place(out)?;
            if let Some(folder) = files.iter().find(|f| f.is_dir()) {
                bail!(
                    "{}: expected a report, got a folder; a folder of results is given alone and without --out",
                    folder.display()
                );
            }
            let measure = match args.metric {
                None | Some(Metric::ExactMatch) => Measure::ExactMatch,
                Some(Metric::Stored) => Measure::Stored,
            };
            let scale = args.x.map(|x| match x {
                XScale::Linear => Scale::Linear,
                XScale::Log => Scale::Log,
            });
            expect_names(args.names.as_deref(), files.len())?;
            let reports = files.iter().map(|f| Ok(Report::load(f)?)).collect::<Result<Vec<_>>>()?;
            let names = args.names.clone().unwrap_or_else(|| own_names(files, &reports));
            let plot = Comparison::of(measure, names.into_iter().zip(reports)).plot(scale);
            let svg = plot.svg().context("nothing to draw")?;
            std::fs::write(out, svg).with_context(|| out.display().to_string())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn expect_names(names: Option<&[String]>, files: usize) -> Result<()> {
    match names {
        Some(names) if names.len() != files => bail!("--names: expected {files}, one for each file, got {}", names.len()),
        _ => Ok(()),
    }
}

/// The reports' names, or where they have none their files' stems, or whole paths where stems come twice.
fn own_names(files: &[PathBuf], reports: &[Report]) -> Vec<String> {
    let stems: Vec<String> = files.iter().map(|f| f.file_stem().unwrap_or_default().to_string_lossy().into_owned()).collect();
    let twice = |stem: &String| stems.iter().filter(|s| *s == stem).count() > 1;
    let file_name = |i: usize| if twice(&stems[i]) { files[i].display().to_string() } else { stems[i].clone() };
    reports.iter().enumerate().map(|(i, r)| r.name.clone().unwrap_or_else(|| file_name(i))).collect()
}
