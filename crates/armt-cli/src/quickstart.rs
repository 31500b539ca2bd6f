//! `armt quickstart`: trains a small ARMT on the CPU and shows that it remembers far more than it was trained on.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Result, bail};
use armt::engine::Device;
use armt::eval::plot::{Mark, Plot, Scale, Series};
use armt::eval::retrieval::{Point, curve};
use armt::tasks::retrieval::{Retrieval, Setting};
use armt::train::recipe::Recipe;
use armt::train::trainer::{Ending, best_model};
use clap::Args;

use crate::device::{DeviceArgs, DeviceKind};
use crate::train::{stop_on_signals, train_in};

const RECIPE: &str = include_str!("../../../recipes/quickstart.toml");
/// Up to the trained length and beyond: there are 16 keys of one symbol.
const PAIRS: [usize; 6] = [1, 2, 5, 8, 12, 16];
/// Farther still keys must come again, and the latest value counts: something it was never trained on.
const AGAIN: [usize; 3] = [20, 50, 100];
const SAMPLES: usize = 500;

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
        std::fs::remove_dir_all(&args.out)?;
    }
    let stop = stop_on_signals()?;
    let stopped = || stop.load(Ordering::Relaxed);
    let recipe = Recipe::parse(RECIPE, &[])?;
    let with_memory = args.out.join("armt");
    let cpu = DeviceArgs { device: DeviceKind::Cpu, dtype: None };
    crate::say(format_args!("training an ARMT to remember up to 5 key-value pairs, each read in a segment of its own"))?;
    if train_in(&recipe, &with_memory, false, &cpu, "", &stopped)? == Ending::Stopped {
        return Ok(ExitCode::from(130));
    }
    // The same backbone and data without the memory: all it can learn is to guess.
    crate::say(format_args!("and the same backbone without a memory, for comparison"))?;
    let without = ["memory={ kind = \"none\" }", "stage=[{ pairs = 5, batch = 128, steps = 150 }]", "eval.every=150"];
    let plain = Recipe::parse(RECIPE, &without.map(String::from))?;
    let no_memory = args.out.join("no-memory");
    if train_in(&plain, &no_memory, false, &cpu, "", &stopped)? == Ending::Stopped {
        return Ok(ExitCode::from(130));
    }
    let task = recipe.task(recipe.stages[recipe.stages.len() - 1].get_ref());
    let again = Retrieval { setting: Setting::Rewrite, ..task };
    let judge = |folder: &Path| -> Result<Vec<Point>> {
        let model = best_model(folder, armt::engine::DType::F32, &Device::cpu())?;
        let mut quietly = |_: &Point| ControlFlow::Continue(());
        let mut points = curve(&model, task, &PAIRS, SAMPLES, 125, 0, &mut quietly)?;
        points.extend(curve(&model, again, &AGAIN, SAMPLES, 125, 0, &mut quietly)?);
        Ok(points)
    };
    let (memory, plain) = (judge(&with_memory)?, judge(&no_memory)?);
    crate::say(format_args!("\nexact match\npairs   with memory   without"))?;
    for (a, b) in memory.iter().zip(&plain) {
        let note = match a.pairs {
            0..=5 => "",
            6..=16 => "   longer than trained",
            _ => "   longer still, keys come again and the latest value counts",
        };
        crate::say(format_args!("{:>5}   {:>11.3}   {:>7.3}{note}", a.pairs, a.exact_match, b.exact_match))?;
    }
    let plot = args.out.join("exact-match.svg");
    let mark = |p: &Point| Mark { x: p.pairs as f64, y: p.exact_match, spread: None };
    let series = |name: &str, points: &[Point]| Series { name: name.into(), marks: points.iter().map(mark).collect() };
    let drawing = Plot {
        title: "Remember, trained on up to 5 pairs".into(),
        x_label: "pairs".into(),
        y_label: "exact match".into(),
        y_range: Some((0.0, 1.0)),
        x_scale: Scale::Log,
        series: vec![series("ARMT", &memory), series("no memory", &plain)],
    };
    std::fs::write(&plot, drawing.svg()?)?;
    let at = |n: usize| memory.iter().find(|p| p.pairs == n).map_or(0.0, |p| p.exact_match);
    crate::say(format_args!(
        "\nshown: trained on up to 5 pairs, it answers {:.1} % exactly at 5, {:.1} % at 16 and {:.1} % at 20; without memory {:.1} %. {:.0} s in all.\n\
         kept:  {} (model), log.jsonl beside it (tensorboard --logdir {}), {} (plot)\n\
         next:  armt eval {} --task remember --pairs 5,15; armt train recipes/remember-armt.toml --out runs/remember",
        100.0 * at(5),
        100.0 * at(16),
        100.0 * at(20),
        100.0 * plain[2].exact_match,
        started.elapsed().as_secs_f64(),
        with_memory.join("best").display(),
        args.out.display(),
        plot.display(),
        with_memory.join("best").display(),
    ))?;
    Ok(ExitCode::SUCCESS)
}
