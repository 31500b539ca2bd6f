//! `armt eval`: how well a model retrieves, over the number of pairs.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use armt::eval::retrieval::{Point, Report, curve};
use armt::tasks::retrieval::{Retrieval, SYMBOLS, Setting};
use armt::train::run_folder::trained_pairs;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};

use crate::device::{DeviceArgs, expect_model};
use crate::progress::thousands;

const EXAMPLE: &str = "\
Examples:
  armt eval runs/armt --task remember --pairs 1,10,50,100,200,500 --out armt.json
  armt eval runs/armt --task rewrite --samples 10000 --device cuda --dtype f32
  armt report armt.json rmt.json --out capacity.svg --metric stored

A text is N pairs of a key and a value, one a segment, and then a key: the answer is right if the whole value is. Stored pairs are
those that a memory would need to answer as often if it guessed all others. The report is written anew after each line.";

/// What is asked about if nothing is said.
const PAIRS: [usize; 8] = [1, 2, 5, 10, 20, 50, 100, 200];

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct EvalArgs {
    /// Model folder of a model that was trained on the task.
    model: PathBuf,
    /// Keys that are all different, or keys that come again with new values.
    #[arg(long, value_enum)]
    task: Task,
    /// Numbers of pairs to ask about; those of 1,2,5,10,20,50,100,200 that there are keys for if not given.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = positive)]
    pairs: Option<Vec<usize>>,
    /// Symbols of a key; if not given, what the model's segments leave for it.
    #[arg(long, value_name = "K", value_parser = positive)]
    key_size: Option<usize>,
    /// Symbols of a value.
    #[arg(long, value_name = "V", default_value = "1", value_parser = positive)]
    value_size: usize,
    /// Different symbols that keys and values are made of, 2 to 100.
    #[arg(long, value_name = "N", default_value_t = SYMBOLS)]
    symbols: usize,
    /// Texts for each number of pairs.
    #[arg(long, value_name = "N", default_value = "1000", value_parser = positive)]
    samples: usize,
    /// Texts at a time.
    #[arg(long, value_name = "N", default_value = "64", value_parser = positive)]
    batch: usize,
    /// Equal seeds give equal texts.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// What tables and plots shall call the model.
    #[arg(long)]
    name: Option<String>,
    /// Most pairs that the model was trained on; if not given, what the log of its run says.
    #[arg(long, value_name = "N", value_parser = positive)]
    trained_pairs: Option<usize>,
    /// Minutes that its training took on a GPU.
    #[arg(long, value_name = "MINUTES", value_parser = time)]
    minutes: Option<f64>,
    /// File to write the report to, in JSON.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Task {
    Remember,
    Rewrite,
}

/// A number of at least 1.
fn positive(text: &str) -> Result<usize, String> {
    text.trim().parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a whole number of at least 1".into())
}

/// A time above 0.
fn time(text: &str) -> Result<f64, String> {
    text.trim().parse().ok().filter(|t: &f64| t.is_finite() && *t > 0.0).ok_or_else(|| "expected a number above 0".into())
}

pub fn run(args: &EvalArgs) -> Result<ExitCode> {
    expect_model(&args.model)?;
    if let Some(out) = &args.out {
        expect_place(out)?;
    }
    let model = args.device.open_weights(&args.model)?;
    let task = args.task(model.config().segment_size)?;
    // What would refuse any number of pairs must not merely leave none to ask about.
    task.check(1)?;
    let pairs = args.pairs.clone().unwrap_or_else(|| PAIRS.into_iter().filter(|n| task.check(*n).is_ok()).collect());
    let mut report = Report {
        model: args.model.display().to_string(),
        name: args.name.clone(),
        trained_pairs: args.trained_pairs.or_else(|| trained_pairs(&args.model)),
        minutes: args.minutes,
        task: task.setting,
        key_size: task.key_size,
        value_size: task.value_size,
        symbols: task.symbols,
        samples: args.samples,
        batch: args.batch,
        seed: args.seed,
        dtype: model.dtype().to_string(),
        points: Vec::new(),
    };
    let bar = bar(&pairs, args.samples);
    let (mut failed, mut before) = (None, 0);
    let mut each = |point: &Point| {
        bar.inc(((point.samples - before) * (point.pairs + 1)) as u64);
        bar.set_message(format!("{} pairs, {} of {} texts", thousands(point.pairs as u64), point.samples, args.samples));
        before = point.samples;
        if point.samples < args.samples {
            return ControlFlow::Continue(());
        }
        before = 0;
        report.points.push(*point);
        let kept = bar.suspend(|| show(point, report.points.len() == 1));
        let kept = kept.and_then(|()| Ok(args.out.as_deref().map_or(Ok(()), |out| report.save(out))?));
        match kept {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let judged = curve(&model, task, &pairs, args.samples, args.batch, args.seed, &mut each);
    bar.finish_and_clear();
    judged?;
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

impl EvalArgs {
    /// The task, with the key that fits the segments where none is given.
    fn task(&self, segment: usize) -> Result<Retrieval> {
        let setting = match self.task {
            Task::Remember => Setting::Remember,
            Task::Rewrite => Setting::Rewrite,
        };
        let value_size = self.value_size;
        let key_size = match self.key_size {
            Some(k) => k,
            None if segment > value_size + 2 => segment - value_size - 2,
            None => bail!(
                "--value-size {value_size}: the model's segments of {segment} tokens have no room for a key, a value and two marks"
            ),
        };
        Ok(Retrieval { setting, key_size, value_size, symbols: self.symbols })
    }
}

/// Refuses a file that could not be written before anything slow is done.
pub fn expect_place(out: &std::path::Path) -> Result<()> {
    if out.is_dir() {
        bail!("{}: expected the name of a file to write, got a folder", out.display());
    }
    match out.parent().filter(|p| !p.as_os_str().is_empty() && !p.is_dir()) {
        Some(folder) => bail!("{}: the folder {} does not exist", out.display(), folder.display()),
        None => Ok(()),
    }
}

/// A line of the table, after its head if it is the first.
fn show(point: &Point, first: bool) -> Result<()> {
    if first {
        crate::say(format_args!("{:>8} {:>12} {:>13}", "pairs", "exact match", "stored pairs"))?;
    }
    crate::say(format_args!("{:>8} {:>12.4} {:>13.1}", point.pairs, point.exact_match, point.stored))
}

/// Counts segments, hidden where there is no terminal: the table's lines are progress enough there.
fn bar(pairs: &[usize], samples: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(pairs.iter().map(|n| (n + 1) * samples).sum::<usize>() as u64);
    let style = ProgressStyle::with_template("{bar:30} {percent:>3}%  {msg}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
