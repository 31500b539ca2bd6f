//! `armt train`: runs a recipe in a folder.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use armt::engine::Device;
use armt_lab::bench::median;
use armt_lab::tasks::training::Measure;
use armt_lab::train::meter::{duration, rate};
use armt_lab::train::recipe::Recipe;
use armt_lab::train::run_folder::RunFolder;
use armt_lab::train::trainer::{Ending, Event, train};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::device::DeviceArgs;
use armt_shipped::{find_adapter, find_recipe};

/// Time between lines where there is no terminal.
const PAUSE: Duration = Duration::from_secs(5);

#[derive(Args)]
#[command(after_help = "Examples:
  armt train recipes/remember-armt.toml --out runs/remember
  armt train recipes/remember-armt.toml --out runs/remember --resume
  armt train recipes/rewrite-armt.toml --out runs/fast --set optimizer.lr=1e-3 --set stage.1.steps=500
  armt train recipes/babilong-qa1-gpt2.toml --out runs/gpt2 --set model.from=gpt2-armt --steps 10

The folder gets `best/` and `last/` (models that `armt eval` takes), log.jsonl, and TensorBoard events.
Ctrl-C saves; --resume goes on to the numbers of an unbroken run.")]
pub struct TrainArgs {
    /// Recipe (TOML): a file, or the name of one that comes with the program (remember-armt).
    recipe: PathBuf,
    /// Folder of the run.
    #[arg(long)]
    out: PathBuf,
    /// Go on with the run in OUT.
    #[arg(long)]
    resume: bool,
    /// Begin with this adapter of the model that the recipe begins from: `train.adapter` of the recipe.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Change a value of the recipe: key=value, as often as needed.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    changes: Vec<String>,
    /// Stop, and save, after so many minutes.
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    minutes: Option<Duration>,
    /// Stop, and save, after so many steps.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: &TrainArgs) -> Result<ExitCode> {
    let adapter = args.adapter.as_ref().map(|named| format!("train.adapter={}", find_adapter(named).display()));
    let changes: Vec<String> = args.changes.iter().cloned().chain(adapter).collect();
    let recipe = Recipe::load(&find_recipe(&args.recipe)?, &changes)?;
    let begun = Arc::new(AtomicBool::new(false));
    let stop = stop_once(begun.clone())?;
    let started = Instant::now();
    let done = |made| {
        begun.store(true, Ordering::Relaxed);
        let late = args.minutes.is_some_and(|l| started.elapsed() >= l) || args.steps.is_some_and(|steps| made >= steps);
        late || stop.load(Ordering::Relaxed)
    };
    let trained = train_in(&recipe, &args.out, args.resume, &args.device, "", &done)?;
    if let Some(cost) = trained.cost {
        crate::say(format_args!("{cost}"))?;
    }
    match trained.ending {
        Ending::Finished { measure, score } => {
            let best = args.out.join("best");
            crate::say(format_args!(
                "finished in {:.0} s: {}; the model is in {}",
                started.elapsed().as_secs_f64(),
                measure.told(score),
                best.display()
            ))?;
            if recipe.train.adapts() {
                let adapter = args.out.join("adapter");
                crate::say(format_args!(
                    "what was trained is in {}: with the model it began from, it is all to keep",
                    adapter.display()
                ))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Ending::Stopped => {
            let mut command = format!("armt train {} --out {} --resume", args.recipe.display(), args.out.display());
            args.changes.iter().for_each(|c| command += &format!(" --set {c}"));
            crate::say(format_args!("stopped and saved; to go on:\n  {command}"))?;
            Ok(if stop.load(Ordering::Relaxed) { ExitCode::from(130) } else { ExitCode::SUCCESS })
        }
    }
}

/// A time of at least 0 that can be counted.
fn minutes(text: &str) -> Result<Duration, String> {
    let minutes = text.trim().parse::<f64>().ok().and_then(|m| Duration::try_from_secs_f64(60.0 * m).ok());
    minutes.ok_or_else(|| "expected a number of minutes, of at least 0".into())
}

/// A flag that Ctrl-C sets.
pub fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    stop_once(Arc::new(AtomicBool::new(true)))
}

/// A flag that Ctrl-C sets once the work has begun. Before that there is nothing to save, and Ctrl-C ends the program at once: to open books
/// and weights may take long.
fn stop_once(begun: Arc<AtomicBool>) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) || !begun.load(Ordering::Relaxed) {
            std::process::exit(130);
        }
        crate::note(format_args!("\nstopping after this step; Ctrl-C again quits at once"));
    })
    .context("Ctrl-C could not be caught")?;
    Ok(stop)
}

/// How a training went.
pub struct Trained {
    pub ending: Ending,
    /// What its steps took; none if it made none.
    pub cost: Option<String>,
}

/// Runs a recipe with a progress bar, or lines where there is no terminal. `stop` hears how many steps were made.
pub fn train_in(
    recipe: &Recipe,
    out: &Path,
    resume: bool,
    device: &DeviceArgs,
    title: &str,
    stop: &dyn Fn(u64) -> bool,
) -> Result<Trained> {
    let (device, dtype) = device.open()?;
    let mut folder = if resume { RunFolder::open(out)? } else { RunFolder::create(out)? };
    let mut view = View::new(title, recipe.stages.len());
    let ending = train(recipe, &mut folder, resume, (dtype, &device), &mut |event| {
        view.show(event);
        if stop(view.seconds.len() as u64) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    view.finish();
    Ok(Trained { ending: ending?, cost: view.cost(&device) })
}

/// What a person sees of a run.
struct View {
    bar: Option<ProgressBar>,
    title: String,
    stages: usize,
    stage: usize,
    stage_started: Instant,
    steps_before: u64,
    tokens: usize,
    /// What the last validation of the stage said.
    judged: Option<String>,
    /// Of each step.
    seconds: Vec<f64>,
    last: Instant,
}

impl View {
    fn new(title: &str, stages: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(1);
            let style = ProgressStyle::with_template("{bar:12} {pos}/{len}  {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let now = Instant::now();
        View {
            bar,
            title: title.into(),
            stages,
            stage: usize::MAX,
            stage_started: now,
            steps_before: 0,
            tokens: 0,
            judged: None,
            seconds: Vec::new(),
            last: now,
        }
    }

    fn show(&mut self, event: &Event<'_>) {
        match event {
            Event::Step { progress, steps, stage, loss, tokens, seconds } => {
                self.seconds.push(*seconds);
                if self.stage != progress.stage {
                    let now = Instant::now();
                    let started = now.checked_sub(Duration::from_secs_f64(*seconds)).unwrap_or(now);
                    (self.stage, self.stage_started, self.tokens, self.judged) = (progress.stage, started, 0, None);
                    self.steps_before = progress.step - 1;
                }
                self.tokens += tokens;
                let seconds = self.stage_started.elapsed().as_secs_f64().max(1e-6);
                let made = (progress.step - self.steps_before) as f64;
                let left = Duration::try_from_secs_f64(seconds / made * (steps - progress.step) as f64).unwrap_or(Duration::MAX);
                let judged = self.judged.as_ref().map_or(String::new(), |told| format!(", {told}"));
                // What a narrow terminal has no room for is cut off: the least important is last.
                let line = format!(
                    "{}stage {}/{}, {stage}: loss {loss:.4}{judged}, at most {} left, {}",
                    self.title,
                    progress.stage + 1,
                    self.stages,
                    duration(left),
                    rate(self.tokens as f64 / seconds, "tokens"),
                );
                if let Some(bar) = &self.bar {
                    bar.set_length(*steps);
                    bar.set_position(progress.step);
                    bar.set_message(line);
                } else if self.last.elapsed() >= PAUSE {
                    self.last = Instant::now();
                    crate::note(format_args!("step {}/{steps}: {line}", progress.step));
                }
            }
            Event::Judged { texts, of } => {
                if let Some(bar) = &self.bar {
                    bar.set_message(format!("{}validation: {texts} of {of} texts", self.title));
                }
            }
            Event::Validation { progress, stage, measure, score } => {
                let told = measure.told(*score);
                let line = format!(
                    "{}stage {}/{}, step {}: {told} at {stage}",
                    self.title,
                    progress.stage + 1,
                    self.stages,
                    progress.step,
                );
                self.judged = Some(match measure {
                    Measure::ExactMatch => told,
                    Measure::Loss => format!("in validation {told}"),
                });
                match &self.bar {
                    Some(bar) => bar.println(line),
                    None => crate::note(format_args!("{line}")),
                }
            }
            _ => {}
        }
    }

    fn cost(&self, device: &Device) -> Option<String> {
        let peak = device.pool_stats().peak_bytes as f64 / f64::from(1 << 30);
        (!self.seconds.is_empty()).then(|| {
            let (steps, ms) = (self.seconds.len(), 1e3 * median(&self.seconds));
            format!("steps: {steps}, {ms:.1} ms each (median), tensors of at most {peak:.2} GiB on {device}")
        })
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
