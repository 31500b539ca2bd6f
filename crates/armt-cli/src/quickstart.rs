//! `armt quickstart`: trains a small ARMT on the CPU and shows that it remembers far more than it was trained on.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use armt::engine::{DType, Device};
use armt_lab::eval::plot::{Guide, Mark, Plot, Scale, Series};
use armt_lab::eval::retrieval::{Point, curve};
use armt_lab::tasks::retrieval::{Retrieval, RetrievalLessons};
use armt_lab::train::recipe::Recipe;
use armt_lab::train::run_folder::remove_run;
use armt_lab::train::trainer::{Ending, best_model};
use armt_shipped::QUICKSTART;
use clap::Args;

use crate::device::{DeviceArgs, DeviceKind};
use crate::train::{stop_on_signals, train_in};

/// Pairs that the recipe's last stage trains on.
const TRAINED: usize = 8;
/// Up to the trained length and to four times that, which takes all keys of one symbol.
const PAIRS: [usize; 7] = [1, 2, 4, TRAINED, 16, 24, FARTHEST];
const FARTHEST: usize = 4 * TRAINED;
const SAMPLES: usize = 500;
/// What is made in the folder: two runs and a plot.
const RUNS: [&str; 2] = ["armt", "no-memory"];
const PLOT: &str = "exact-match.svg";
/// The backbone and data without the memory: all that it can learn is to guess, and that it does soon.
const WITHOUT: [&str; 3] =
    ["memory={ kind = \"none\" }", "stage=[{ pairs = 8, batch = 64, steps = 150, vary = true }]", "eval.every=150"];

#[derive(Args)]
pub struct QuickstartArgs {
    /// Folder for checkpoints, log and plot.
    #[arg(long, default_value = "runs/quickstart")]
    out: PathBuf,
    /// Train again where OUT holds an earlier run.
    #[arg(long)]
    force: bool,
}

pub fn run(args: &QuickstartArgs) -> Result<ExitCode> {
    let started = Instant::now();
    if args.out.exists() {
        if !args.force {
            bail!("{}: it exists already; --force trains again, --out names another folder", args.out.display());
        }
        remove_earlier(&args.out)?;
    }
    let stop = stop_on_signals()?;
    let stopped = |_| stop.load(Ordering::Relaxed);
    let cpu = DeviceArgs { device: DeviceKind::Cpu, dtype: None };
    let [with, without] = RUNS.map(|name| args.out.join(name));
    let (recipe, plain) = (Recipe::parse(QUICKSTART, &[])?, Recipe::parse(QUICKSTART, &WITHOUT.map(String::from))?);
    crate::say(format_args!("training an ARMT to remember up to {TRAINED} key-value pairs, each read in a segment of its own"))?;
    if train_in(&recipe, &with, false, &cpu, "", &stopped)?.ending == Ending::Stopped {
        return Ok(ExitCode::from(130));
    }
    crate::say(format_args!("and the same backbone without a memory, for comparison"))?;
    if train_in(&plain, &without, false, &cpu, "", &stopped)?.ending == Ending::Stopped {
        return Ok(ExitCode::from(130));
    }
    let (memory, plain) = (judge(&recipe, &with, &stop)?, judge(&recipe, &without, &stop)?);
    if stop.load(Ordering::Relaxed) {
        return Ok(ExitCode::from(130));
    }
    crate::say(format_args!("\nexact match\npairs   with memory   without"))?;
    for (a, b) in memory.iter().zip(&plain) {
        let note = if a.pairs > TRAINED { "   longer than trained" } else { "" };
        crate::say(format_args!("{:>5}   {:>11.3}   {:>7.3}{note}", a.pairs, a.exact_match, b.exact_match))?;
    }
    let plot = args.out.join(PLOT);
    std::fs::write(&plot, draw(&memory, &plain).svg()?).with_context(|| plot.display().to_string())?;
    let percent = |points: &[Point], n: usize| points.iter().find(|p| p.pairs == n).map_or(0.0, |p| 100.0 * p.exact_match);
    let best = with.join("best");
    crate::say(format_args!(
        "\nshown: trained on up to {TRAINED} pairs, it answers {:.1} % exactly at {TRAINED} and {:.1} % at {FARTHEST}; without memory {:.1} %. \
         {:.0} s in all.\n\
         kept:  {} (model), log.jsonl above it (tensorboard --logdir {}), {} (plot)\n\
         next:  armt eval {} --task remember --symbols 32 --pairs 12,20\n       armt train questions-small --out runs/people (questions of your own: docs/own-text.md)",
        percent(&memory, TRAINED),
        percent(&memory, FARTHEST),
        percent(&plain, TRAINED),
        started.elapsed().as_secs_f64(),
        best.display(),
        args.out.display(),
        plot.display(),
        best.display(),
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Removes what an earlier quickstart left in a folder, and nothing else: a folder that holds anything in its place is refused.
fn remove_earlier(out: &Path) -> Result<()> {
    if !out.is_dir() {
        bail!("{}: expected a folder, got a file", out.display());
    }
    for run in RUNS.map(|name| out.join(name)) {
        if run.symlink_metadata().is_ok() {
            remove_run(&run)?;
        }
    }
    let plot = out.join(PLOT);
    if plot.is_file() {
        std::fs::remove_file(&plot).with_context(|| plot.display().to_string())?;
    }
    Ok(())
}

/// The curve of a run's best model.
fn judge(recipe: &Recipe, folder: &Path, stop: &AtomicBool) -> Result<Vec<Point>> {
    let model = best_model(folder, DType::F32, &Device::cpu())?;
    let (task, _) = last_stage(recipe).context("expected a recipe of retrieval")?;
    let mut each = |_: &Point| if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    Ok(curve(&model, task, &PAIRS, SAMPLES, 125, 0, &mut each)?)
}

/// The task of a recipe's last stage, and its pairs.
fn last_stage(recipe: &Recipe) -> Option<(Retrieval, usize)> {
    recipe.lessons_of::<RetrievalLessons>()?.stage(recipe.stages.len().checked_sub(1)?)
}

fn draw(memory: &[Point], plain: &[Point]) -> Plot {
    let mark = |p: &Point| Mark { x: p.pairs as f64, y: p.exact_match, spread: None };
    let series = |name: &str, points: &[Point]| Series { name: name.into(), marks: points.iter().map(mark).collect() };
    Plot {
        title: "Remember: the value of one of n keys".into(),
        x_label: "pairs in the text".into(),
        y_label: "exact match".into(),
        y_range: Some((0.0, 1.0)),
        x_scale: Scale::Log,
        x_ticks: Vec::new(),
        series: vec![series("ARMT", memory), series("no memory", plain)],
        reference: None,
        guides: vec![Guide { x: TRAINED as f64, label: format!("trained on up to {TRAINED}"), series: None }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_recipes_are_right_and_reach_as_far_as_is_said() {
        for changes in [&[][..], &WITHOUT.map(String::from)] {
            let recipe = Recipe::parse(QUICKSTART, changes).unwrap_or_else(|e| panic!("{e}"));
            let (task, pairs) = last_stage(&recipe).unwrap_or_else(|| panic!("no retrieval"));
            assert_eq!(pairs, TRAINED);
            assert!(task.check(FARTHEST).is_ok());
        }
    }
}
