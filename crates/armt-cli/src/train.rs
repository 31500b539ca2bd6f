//! `armt train`: runs a recipe in a folder.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use armt::engine::{Communicator, Device, Membership, nccl_report};
use armt_lab::bench::median;
use armt_lab::tasks::training::Measure;
use armt_lab::train::meter::{duration, rate};
use armt_lab::train::recipe::Recipe;
use armt_lab::train::run_folder::RunFolder;
use armt_lab::train::trainer::{Ending, Event, train, train_among};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::device::{DeviceArgs, DeviceKind};
use crate::launch::run_together;
use crate::processes::{self, Seat};
use crate::read::quote;
use armt_shipped::{find_adapter, find_recipe};

/// Time between lines where there is no terminal.
const PAUSE: Duration = Duration::from_secs(5);

#[derive(Args)]
#[command(after_help = "Examples:
  armt train questions-small --out runs/people --device cpu
  armt train remember-armt --out runs/remember
  armt train remember-armt --out runs/remember --resume
  armt train rewrite-armt --out runs/fast --set optimizer.lr=1e-3 --set stage.1.steps=500
  armt train mine.toml --out runs/mine --set model.from=gpt2-armt --set stages=1 --steps 10
  armt train remember-armt --out runs/remember --gpus 8
  torchrun --no-python --nproc-per-node 8 armt train remember-armt --out runs/remember

The folder gets `best/` and `last/` (models that `armt eval` takes), log.jsonl, and TensorBoard events.
Ctrl-C saves; --resume goes on to the numbers of an unbroken run.
Several GPUs, of one machine or more, each have a part of every batch: by --gpus, or as torchrun, Ray Train or
Slurm's srun starts one process for each. They need NCCL: pip install nvidia-nccl-cu12, or -cu13.")]
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
    #[arg(long, value_name = "MINUTES", value_parser = minutes, allow_negative_numbers = true)]
    minutes: Option<Duration>,
    /// Stop, and save, after so many steps.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Train on so many GPUs of this machine, a process on each.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    gpus: Option<u16>,
    /// Where several processes train together: how long a step may wait for the others before one counts as gone.
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    timeout: Duration,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: &TrainArgs) -> Result<ExitCode> {
    let seat = Seat::find(&processes::variable)?;
    match (args.gpus.map(usize::from), seat) {
        (Some(gpus), Some(seat)) if gpus != seat.world => {
            bail!("--gpus {gpus}: expected none, or {} as there are processes, where they were started already", seat.world)
        }
        (Some(gpus), None) => run_on_gpus(args, gpus),
        (_, Some(seat)) => {
            let one = || {
                args.device.expect_gpus()?;
                processes::with_environment_for_nccl()?;
                run_one(args, &args.device, Some(seat))
            };
            one().with_context(|| format!("process {} of {}", seat.rank, seat.world))
        }
        (None, None) => run_one(args, &args.device, None),
    }
}

impl TrainArgs {
    fn recipe(&self) -> Result<Recipe> {
        let adapter = self.adapter.as_ref().map(|named| format!("train.adapter={}", find_adapter(named).display()));
        let changes: Vec<String> = self.changes.iter().cloned().chain(adapter).collect();
        Ok(Recipe::load(&find_recipe(&self.recipe)?, &changes)?)
    }

    /// The command that goes on with the run, as a shell takes it.
    fn again(&self) -> String {
        let quoted = |path: &Path| quote(&path.to_string_lossy());
        let mut words =
            vec!["armt".into(), "train".into(), quoted(&self.recipe), "--out".into(), quoted(&self.out), "--resume".into()];
        words.extend(self.adapter.iter().flat_map(|adapter| ["--adapter".into(), quoted(adapter)]));
        words.extend(self.gpus.iter().flat_map(|gpus| ["--gpus".into(), gpus.to_string()]));
        words.extend(self.changes.iter().flat_map(|change| ["--set".into(), quote(change)]));
        words.extend(self.device.arguments());
        words.join(" ")
    }
}

/// Starts this program once for each GPU.
fn run_on_gpus(args: &TrainArgs, gpus: usize) -> Result<ExitCode> {
    args.device.expect_gpus()?;
    // What every process would refuse is refused once.
    args.recipe()?;
    let shown = Device::cuda_count().with_context(|| format!("--gpus {gpus}"))?;
    if gpus > shown {
        bail!("--gpus {gpus}: expected at most {shown}, as many as this machine shows");
    }
    if gpus == 1 {
        return run_one(args, &DeviceArgs { device: DeviceKind::Cuda, ..args.device }, None);
    }
    nccl_report().with_context(|| format!("--gpus {gpus}"))?;
    // The system gives a port that is free. Somebody else may take it before NCCL does, which is an error then.
    let listener = std::net::TcpListener::bind((processes::LOCAL, 0)).context("a free port")?;
    let port = listener.local_addr().context("a free port")?.port();
    drop(listener);
    let program = std::env::current_exe().context("this program's own file")?;
    let commands = (0..gpus).map(|rank| {
        let mut command = Command::new(&program);
        let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", gpus), ("MASTER_PORT", port.into())];
        command.args(std::env::args_os().skip(1)).envs(numbers.map(|(name, value)| (name, value.to_string())));
        command.env("MASTER_ADDR", processes::LOCAL).env("NCCL_COMM_ID", format!("{}:{port}", processes::LOCAL));
        command
    });
    let signals = Arc::new(AtomicUsize::new(0));
    let counted = signals.clone();
    ctrlc::set_handler(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    })
    .context("Ctrl-C could not be caught")?;
    let ended = run_together(commands.collect(), &signals)?;
    if let Some((rank, how)) = &ended.failed {
        crate::note(format_args!("process {rank} of {gpus}: {how}; the others were ended"));
    }
    Ok(ExitCode::from(ended.code))
}

/// Trains in this process, alone or as one of several.
fn run_one(args: &TrainArgs, device: &DeviceArgs, seat: Option<Seat>) -> Result<ExitCode> {
    let recipe = args.recipe()?;
    let begun = Arc::new(AtomicBool::new(false));
    // Of several the first speaks for all.
    let speaks = seat.is_none_or(|seat| seat.rank == 0);
    let stop = stop_once(begun.clone(), speaks)?;
    let started = Instant::now();
    let done = |made| {
        begun.store(true, Ordering::Relaxed);
        let late = args.minutes.is_some_and(|l| started.elapsed() >= l) || args.steps.is_some_and(|steps| made >= steps);
        late || stop.load(Ordering::Relaxed)
    };
    let trained = match seat {
        None => train_in(&recipe, &args.out, args.resume, device, "", &done)?,
        Some(seat) => train_together(&recipe, args, seat, &done)?,
    };
    if !speaks {
        return Ok(if stop.load(Ordering::Relaxed) { ExitCode::from(130) } else { ExitCode::SUCCESS });
    }
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
            crate::say(format_args!("stopped and saved; to go on:\n  {}", args.again()))?;
            Ok(if stop.load(Ordering::Relaxed) { ExitCode::from(130) } else { ExitCode::SUCCESS })
        }
    }
}

/// A time of at least 0 that can be counted.
fn minutes(text: &str) -> Result<Duration, String> {
    let minutes = text.trim().parse::<f64>().ok().and_then(|m| Duration::try_from_secs_f64(60.0 * m).ok());
    minutes.ok_or_else(|| "expected a number of minutes, of at least 0".into())
}

/// A time above 0 that can be counted.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim().parse::<f64>().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    seconds.filter(|s| !s.is_zero()).ok_or_else(|| "expected a number of seconds, above 0".into())
}

/// A flag that Ctrl-C sets.
pub fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    stop_once(Arc::new(AtomicBool::new(true)), true)
}

/// A flag that Ctrl-C sets once the work has begun. Before that there is nothing to save, and Ctrl-C ends the program at once: to open books
/// and weights may take long.
fn stop_once(begun: Arc<AtomicBool>, speaks: bool) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) || !begun.load(Ordering::Relaxed) {
            std::process::exit(130);
        }
        if speaks {
            crate::note(format_args!("\nstopping after this step; Ctrl-C again quits at once"));
        }
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
    let (device, dtype) = device.open_to_train()?;
    let mut folder = if resume { RunFolder::open(out)? } else { RunFolder::create(out)? };
    let mut view = View::new(title, recipe.stages.len());
    let ending = train(recipe, &mut folder, resume, (dtype, &device), &mut |event| {
        view.show(event);
        if stop(view.seconds.len() as u64) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    view.finish();
    Ok(Trained { ending: ending?, cost: view.cost(&device) })
}

/// Runs a recipe as one of several processes, each on a GPU. The first shows how it goes.
fn train_together(recipe: &Recipe, args: &TrainArgs, seat: Seat, stop: &dyn Fn(u64) -> bool) -> Result<Trained> {
    let (device, dtype) = args.device.open_for(seat)?;
    let Seat { rank, world, .. } = seat;
    // Before the others are met: what the first refuses ends it at once.
    let mut folder = match (rank, args.resume) {
        (0, true) => RunFolder::open(&args.out)?,
        (0, false) => RunFolder::create(&args.out)?,
        _ => RunFolder::watch(&args.out),
    };
    let told = format!("error: process {rank} of {world}");
    let give_up = Box::new(move |why: &str| {
        crate::note(format_args!("{told}: {why}"));
        // What the device's libraries do at a program's end may wait for the device, which does not answer.
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(5));
            std::process::abort();
        });
        std::process::exit(1)
    });
    let communicator = Communicator::join(&device, Membership { rank, world, timeout: args.timeout, give_up })?;
    if rank == 0 {
        crate::note(format_args!("device: {device}, one of {world}, with NCCL of {}", nccl_report()?));
    }
    let mut view = (rank == 0).then(|| View::new("", recipe.stages.len()));
    let (mut made, mut lost) = (0, None);
    let ending = train_among(&communicator, recipe, &mut folder, args.resume, (dtype, &device), &mut |event| {
        view.iter_mut().for_each(|view| view.show(event));
        made += u64::from(matches!(event, Event::Step { .. }));
        // All stop after the same event as soon as one of them is asked to.
        let mut wishes = [if stop(made) { 1.0 } else { 0.0 }];
        match communicator.add_up(&mut wishes) {
            Ok(()) if wishes == [0.0] => ControlFlow::Continue(()),
            Ok(()) => ControlFlow::Break(()),
            Err(error) => {
                lost = Some(error);
                ControlFlow::Break(())
            }
        }
    });
    view.iter().for_each(View::finish);
    let ending = ending?;
    if let Some(error) = lost {
        return Err(error.into());
    }
    // Whoever started them may end all when one ends: nobody goes before the first has saved.
    communicator.add_up(&mut [0.0])?;
    communicator.leave()?;
    Ok(Trained { ending, cost: view.and_then(|view| view.cost(&device)) })
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
            Event::Note { progress, text } => {
                let line = format!("{}stage {}/{}: {text}", self.title, progress.stage + 1, self.stages);
                match &self.bar {
                    Some(bar) => bar.println(line),
                    None => crate::note(format_args!("{line}")),
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
