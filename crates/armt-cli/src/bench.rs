//! `armt bench`: how fast this machine reads and trains.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use armt::engine::{CpuReport, Device};
use armt::schedule::{Backprop, ScheduleKind};
use armt_lab::bench::growth::Figures;
use armt_lab::bench::{Timing, WORKLOADS, Way, Work, Workload, run as measure};
use clap::Args;

use crate::device::{DeviceArgs, WriteKind};
use crate::place::{Report, Written, expect_place_for};

#[derive(Args)]
#[command(after_help = "Workloads:
  read-gpt2 (w1)        read, GPT-2 shape (12 layers, width 768, segments of 512)
  train-retrieval (w2)  train on retrieval shape (4 layers, width 128, segments of 6)
  read-small (w3)       read, small (6 layers, width 256, segments of 256)
  train-babilong (w4)   train on BABILong shape (8 layers, width 384, segments of 512)
  read-mamba (w5)       read, Mamba-130m's shape (24 layers, width 768, N 16, segments of 512)
  read-rwkv5 (w6)       read, RWKV-5 (12 layers, width 768, heads of 64, segments of 512)
  train-mamba           train on 8 texts of 2,048 tokens, Mamba-130m's shape
  train-rwkv5           train on 8 texts of 2,048 tokens, RWKV-5 of read-rwkv5

Examples:
  armt bench read-small --device cpu
  armt bench all --json bench.json
  armt bench read-gpt2 --segments 97657 --repeats 1
  armt bench read-gpt2 --segments 200,2000,20000 --json tokens.json
  armt bench read-gpt2 --layers 1,12,24 --schedule sequential")]
pub struct BenchArgs {
    /// Workloads by name, or all.
    #[arg(default_value = "all", value_delimiter = ',')]
    workloads: Vec<String>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Timed repetitions, after two for warming up.
    #[arg(long, default_value_t = 10)]
    repeats: usize,
    /// Other numbers of segments.
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    segments: Vec<usize>,
    /// Other numbers of texts side by side.
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Other numbers of layers.
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    layers: Vec<usize>,
    /// How the memory is written.
    #[arg(long, value_enum, default_value_t = WriteKind::Paper)]
    write: WriteKind,
    /// How the grid of layers and segments is walked: auto, sequential or diagonal.
    #[arg(long, default_value = "auto")]
    schedule: ScheduleKind,
    /// Also compare the results: the schedule's with the sequential one's, and bf16's with f32's.
    #[arg(long)]
    check: bool,
    /// Training keeps only the inputs of each block and computes it again on the way back.
    #[arg(long)]
    recompute: bool,
    /// Training in f32 unwinds the memory on the way back instead of keeping each segment's, as it does in bf16.
    #[arg(long)]
    unwind: bool,
    /// Parts that a training step's batch is computed in, their gradients added.
    #[arg(long, value_name = "N", default_value_t = 1)]
    accumulate: usize,
    /// Training adds up its gradients by NCCL, over this one process: what that costs beside a step without it.
    #[arg(long)]
    nccl: bool,
    /// Where to write the figures as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

pub fn run(args: &BenchArgs) -> Result<ExitCode> {
    if let Some(path) = &args.json {
        expect_place_for(Written::Report(Report::Speed), path)?;
    }
    let (device, dtype) = args.device.open()?;
    let all = WORKLOADS.map(String::from);
    let names = if args.workloads.iter().any(|w| w == "all") { all.to_vec() } else { args.workloads.clone() };
    let mut workloads = Vec::new();
    for name in &names {
        let Some(standard) = Workload::named(name, device.is_cuda()) else {
            bail!("{name}: expected {} or all", WORKLOADS.join(", "));
        };
        for segments in or(&args.segments, standard.segments) {
            for batch in or(&args.batch, standard.batch) {
                for layers in or(&args.layers, standard.layers) {
                    if [segments, batch, layers].contains(&0) {
                        bail!("expected at least one segment, text and layer, got 0");
                    }
                    workloads.push(Workload { segments, batch, layers, write: args.write.into(), ..standard.clone() });
                }
            }
        }
    }
    let machine = machine(&device)?;
    crate::say(format_args!("{machine}, {dtype}"))?;
    let backprop = Backprop { recompute: args.recompute, unwind: args.unwind, ..Backprop::default() };
    let (repeats, schedule, accumulate) = (args.repeats, args.schedule, args.accumulate);
    let way = Way { repeats, schedule, backprop, accumulate, check: args.check, nccl: args.nccl };
    let mut figures = Figures { machine, timings: Vec::new() };
    for workload in &workloads {
        let timing = measure(workload, way, (dtype, &device), &mut |_| ControlFlow::Continue(()))?;
        crate::say(format_args!("{}", line(&timing)))?;
        figures.timings.push(timing);
        // After each: a sweep that is stopped has kept what it measured.
        if let Some(path) = &args.json {
            figures.save(path)?;
        }
        device.trim();
    }
    Ok(ExitCode::SUCCESS)
}

/// The numbers that were asked for, or else the standard one.
fn or(asked: &[usize], standard: usize) -> Vec<usize> {
    if asked.is_empty() { vec![standard] } else { asked.to_vec() }
}

/// What was measured on.
fn machine(device: &Device) -> Result<String> {
    Ok(match device {
        Device::Cpu => {
            let cpu = CpuReport::new();
            format!("cpu, {} threads, {}", cpu.threads, cpu.vectors)
        }
        Device::Cuda(cuda) => cuda.report()?.device,
    })
}

/// One workload's figures.
fn line(t: &Timing) -> String {
    let w = &t.workload;
    let (least, most) = t.seconds.iter().fold((f64::MAX, 0f64), |(a, b), s| (a.min(*s), b.max(*s)));
    let rate = match w.work {
        Work::Read => format!("{:>10.0} tokens/s", t.tokens_per_second),
        Work::Train => format!("{:>10.1} ms/step", t.ms_per_step),
    };
    let mut line = format!(
        "{:<15} {rate}   {:.1} to {:.1} ms in {} runs   peak {:.2} GiB   {:.1} of {:.1} TFLOP/s   first after {:.1} s",
        w.name,
        1e3 * least,
        1e3 * most,
        t.seconds.len(),
        t.peak_bytes as f64 / f64::from(1 << 30),
        t.tflops[0],
        t.tflops[1],
        t.first_seconds,
    );
    if let Some([sm, _, watts]) = t.clocks {
        line += &format!("   {sm:.0} MHz, {watts:.0} W");
    }
    line += &format!("   ({} x {} segments, {} layers, {})", w.batch, w.segments, w.layers, t.schedule);
    if let Some(a) = t.agreement {
        let what = if w.work == Work::Read { "memory" } else { "gradients" };
        line += &format!("\n    {what} off by {:.1e} of the sequential schedule's", a.schedules);
        if let Some(exact) = a.f32 {
            line += &format!(", {exact:.1e} of f32's");
        }
    }
    line
}
