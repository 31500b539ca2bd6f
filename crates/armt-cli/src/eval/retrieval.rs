//! Associative retrieval: how well a model retrieves, over the number of pairs.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use armt_lab::eval::interval::wilson;
use armt_lab::eval::retrieval::{Point, Report, StateSize, curve};
use armt_lab::tasks::retrieval::{Retrieval, SYMBOLS, Setting};
use armt_lab::train::run_folder::Trained;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use super::{EvalArgs, Task, first_given, positive, time};
use crate::progress::thousands;

/// Texts of each number of pairs, and at a time, if nothing is said.
const SAMPLES: usize = 1000;
const BATCH: usize = 64;
/// Symbols of a key that a segment is taken for, at most; the paper's have three.
const LONGEST_KEY: usize = 15;
/// What is asked about if nothing is said.
const PAIRS: [usize; 8] = [1, 2, 5, 10, 20, 50, 100, 200];

#[derive(Args)]
#[command(next_help_heading = "Options of remember and rewrite")]
pub struct RetrievalArgs {
    /// Numbers of pairs to ask about; those of 1,2,5,10,20,50,100,200 that there are keys for if not given.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = positive)]
    pairs: Option<Vec<usize>>,
    /// Symbols of a key; if not given, what the model's segments leave for it.
    #[arg(long, value_name = "K", value_parser = positive)]
    key_size: Option<usize>,
    /// Symbols of a value; 1 if not given.
    #[arg(long, value_name = "V", value_parser = positive)]
    value_size: Option<usize>,
    /// Different symbols that keys and values are made of, 2 to 100; 16 if not given.
    #[arg(long, value_name = "N")]
    symbols: Option<usize>,
    /// Most pairs that the model was trained on; if not given, what the log of its run says.
    #[arg(long, value_name = "N", value_parser = positive)]
    trained_pairs: Option<usize>,
    /// Minutes that its training took.
    #[arg(long, value_name = "MINUTES", value_parser = time)]
    minutes: Option<f64>,
    /// What the minutes are of, for tables: "one CPU core".
    #[arg(long, value_name = "MACHINE", requires = "minutes")]
    trained_on: Option<String>,
}

pub fn run(args: &EvalArgs, folder: &Path) -> Result<ExitCode> {
    let (own, samples, batch) = (&args.retrieval, args.samples.unwrap_or(SAMPLES), args.batch.unwrap_or(BATCH));
    let model = args.device.open_weights(folder, args.adapter.as_deref())?;
    let task = own.task(args.task, model.config().segment_size)?;
    // What would refuse any number of pairs must not merely leave none to ask about.
    task.check(1)?;
    let pairs = own.pairs.clone().unwrap_or_else(|| PAIRS.into_iter().filter(|n| task.check(*n).is_ok()).collect());
    let trained = Trained::of(folder);
    let mut report = Report {
        model: args.model.display().to_string(),
        name: args.name.clone(),
        trained_pairs: own.trained_pairs.or(trained.pairs),
        steps: trained.steps,
        minutes: own.minutes,
        trained_on: own.trained_on.clone(),
        state: Some(StateSize::of(&model)),
        task: task.setting,
        key_size: task.key_size,
        value_size: task.value_size,
        symbols: task.symbols,
        samples,
        batch,
        seed: args.seed(),
        dtype: model.weights_dtype().to_string(),
        points: Vec::new(),
    };
    let bar = bar(&pairs, samples);
    let (mut failed, mut before) = (None, 0);
    let mut each = |point: &Point| {
        bar.inc(((point.samples - before) * (point.pairs + 1)) as u64);
        bar.set_message(format!("{} pairs, {} of {} texts", thousands(point.pairs as u64), point.samples, samples));
        before = point.samples;
        if point.samples < samples {
            return ControlFlow::Continue(());
        }
        before = 0;
        report.points.push(*point);
        let kept = bar.suspend(|| show(args, point, report.points.len() == 1));
        let kept = kept.and_then(|()| Ok(args.out.as_deref().map_or(Ok(()), |out| report.save(out))?));
        match kept {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let judged = curve(&model, task, &pairs, samples, batch, args.seed(), &mut each);
    bar.finish_and_clear();
    judged?;
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

impl RetrievalArgs {
    /// The first option that was given.
    pub fn given(&self) -> Option<&'static str> {
        first_given(&[
            ("--pairs", self.pairs.is_some()),
            ("--key-size", self.key_size.is_some()),
            ("--value-size", self.value_size.is_some()),
            ("--symbols", self.symbols.is_some()),
            ("--trained-pairs", self.trained_pairs.is_some()),
            ("--minutes", self.minutes.is_some()),
            ("--trained-on", self.trained_on.is_some()),
        ])
    }

    /// The task, with the key that fits the segments where none is given.
    fn task(&self, task: Task, segment: usize) -> Result<Retrieval> {
        let setting = if task == Task::Rewrite { Setting::Rewrite } else { Setting::Remember };
        let value_size = self.value_size.unwrap_or(1);
        let key_size = match self.key_size {
            Some(k) => k,
            None if segment > value_size + 2 + LONGEST_KEY => bail!(
                "--task {}: expected a model of this task, whose segments are a key, a value and two marks; this one's have {segment} \
                 tokens (where they are those of several pairs, --key-size says which)",
                if task == Task::Rewrite { "rewrite" } else { "remember" }
            ),
            None if segment > value_size + 2 => segment - value_size - 2,
            None => bail!(
                "--value-size {value_size}: the model's segments of {segment} tokens have no room for a key, a value and two marks"
            ),
        };
        Ok(Retrieval { setting, key_size, value_size, symbols: self.symbols.unwrap_or(SYMBOLS) })
    }
}

/// A line of the table, after its head if it is the first.
fn show(args: &EvalArgs, point: &Point, first: bool) -> Result<()> {
    if first {
        args.say(format_args!("{:>8} {:>12} {:>15} {:>13}", "pairs", "exact match", "95 %", "stored pairs"))?;
    }
    let (low, high) = wilson(point.exact_match, point.samples);
    let between = format!("{low:.3} to {high:.3}");
    args.say(format_args!("{:>8} {:>12.4} {between:>15} {:>13.1}", point.pairs, point.exact_match, point.stored))
}

/// Counts segments, hidden where there is no terminal: the table's lines are progress enough there.
fn bar(pairs: &[usize], samples: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar =
        ProgressBar::new(pairs.iter().fold(0u64, |sum, n| sum.saturating_add((*n as u64 + 1).saturating_mul(samples as u64))));
    let style = ProgressStyle::with_template("{bar:20} {percent:>3}%  {eta} left, {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
