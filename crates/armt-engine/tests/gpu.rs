//! The GPU tests: one binary that can be carried to a machine with a GPU, `gpu [FILTER]`. It runs every operation's cases on CUDA against
//! the CPU, in f32 and bf16, and what exists only there: graphs, device errors, the kernel cache. The last line is
//! `N passed, M failed`. Without a GPU it says so and succeeds.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode};

use armt_engine::{Communicator, DType, Device, Error, Graph, Membership, Result, Tensor, ops};
use support::training::{Problem, train};
use support::{cases, compare, run};

type Outcome = std::result::Result<(), String>;

/// Norm of the difference over the norm.
const F32_TOLERANCE: f64 = 1e-4;
const BF16_TOLERANCE: f64 = 2e-2;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--test-threads")).collect();
    if let [mode] = args.as_slice() {
        match mode.as_str() {
            "--child-failure" => return child_failure(),
            "--child-matmul" => return child_matmul(),
            "--child-train" => return child_train(),
            _ => {}
        }
    }
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(why) => {
            println!("GPU tests skipped: {why}");
            return ExitCode::SUCCESS;
        }
    };
    let filter = args.first().cloned().unwrap_or_default();
    let (mut passed, mut failed) = (0, 0);
    let mut judge = |name: &str, test: &dyn Fn() -> Outcome| {
        if !name.contains(&filter) {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(test)).unwrap_or_else(|_| Err("panicked".into()));
        match outcome {
            Ok(()) => passed += 1,
            Err(why) => {
                failed += 1;
                println!("FAILED {name}: {why}");
            }
        }
    };
    for case in cases::all().into_iter().chain(cases::large()) {
        judge(&format!("{} f32", case.name), &|| compare(&case, DType::F32, &device, F32_TOLERANCE));
        judge(&format!("{} bf16", case.name), &|| compare(&case, DType::BF16, &device, BF16_TOLERANCE));
        judge(&format!("{} twice", case.name), &|| same_bits_twice(&case, &device));
    }
    let own: [(&str, fn(&Device) -> Outcome); 13] = [
        ("a replayed training step gives the bits of a direct one", |d| graph_replays(d, DType::F32)),
        ("a replayed bf16 training step gives the bits of a direct one", |d| graph_replays(d, DType::BF16)),
        ("a repeated step allocates nothing", repeated_step),
        ("the optimizer agrees with the CPU", optimizer_agrees),
        ("recomputed regions give the same bits", recompute_bits),
        ("host copies are refused during a capture", copies_in_capture),
        ("four threads on one device get the bits of one", four_threads),
        ("too large a buffer is an error that names the sizes", out_of_memory),
        ("tensors of two devices are refused", two_devices),
        ("a failing kernel is reported and the program ends cleanly", failure_is_reported),
        ("a damaged kernel cache is rebuilt", damaged_cache),
        ("sums over one process are what was there, run and replayed", sums_over_one),
        ("steps that wait for their kernels give the bits of those that need not", first_steps),
    ];
    for (name, test) in own {
        judge(name, &|| test(&device));
    }
    if let Device::Cuda(cuda) = &device
        && let Ok(report) = cuda.report()
    {
        println!("{}, {}, driver {}, cuBLASLt {}", report.device, report.architecture, report.driver, report.cublaslt);
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn text<T>(result: Result<T>) -> std::result::Result<T, String> {
    result.map_err(|e| e.to_string())
}

fn expect(condition: bool, message: impl Into<String>) -> Outcome {
    if condition { Ok(()) } else { Err(message.into()) }
}

fn same_bits_twice(case: &support::Case, device: &Device) -> Outcome {
    for dtype in [DType::F32, DType::BF16] {
        let (a, b) = (text(run(case, dtype, device))?, text(run(case, dtype, device))?);
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let equal = a.outputs.iter().zip(&b.outputs).all(|(x, y)| bits(x) == bits(y))
            && a.gradients.iter().flatten().zip(b.gradients.iter().flatten()).all(|(x, y)| bits(x) == bits(y));
        expect(equal, format!("two runs in {dtype} differ"))?;
    }
    Ok(())
}

fn graph_replays(device: &Device, dtype: DType) -> Outcome {
    let direct = || -> Result<(Vec<f32>, Vec<u32>)> {
        let mut problem = Problem::new(device, dtype)?;
        let mut losses = Vec::new();
        for _ in 0..6 {
            problem.optimizer.prepare(0.01)?;
            losses.push(problem.step(false)?.item()?);
        }
        Ok((losses, problem.values()?))
    };
    let replayed = || -> Result<(Vec<f32>, Vec<u32>)> {
        let mut problem = Problem::new(device, dtype)?;
        problem.optimizer.prepare(0.01)?;
        // The warm-up run is the first step; the capture itself runs nothing.
        let mut first = None;
        let (graph, loss) = Graph::capture(device, || {
            let loss = problem.step(false)?;
            first.get_or_insert(loss.clone());
            Ok(loss)
        })?;
        let mut losses = vec![first.map_or(Ok(f32::NAN), |l| l.item())?];
        for _ in 1..6 {
            problem.optimizer.prepare(0.01)?;
            graph.replay()?;
            losses.push(loss.item()?);
        }
        Ok((losses, problem.values()?))
    };
    let (direct, replayed) = (text(direct())?, text(replayed())?);
    expect(direct.0[5] < direct.0[0], format!("the loss does not fall: {:?}", direct.0))?;
    expect(direct.0 == replayed.0, format!("losses {:?} and {:?}", direct.0, replayed.0))?;
    expect(direct.1 == replayed.1, "parameters differ")
}

fn repeated_step(device: &Device) -> Outcome {
    let mut problem = text(Problem::new(device, DType::BF16))?;
    let mut step = || -> Result<()> {
        problem.optimizer.prepare(0.01)?;
        problem.step(true).map(|_| ())
    };
    text(step())?;
    let before = device.pool_stats();
    for _ in 0..5 {
        text(step())?;
    }
    let after = device.pool_stats();
    expect(before.allocations == after.allocations, format!("{before:?} then {after:?}"))?;
    expect(before.used_bytes == after.used_bytes, "buffers stay behind")
}

fn optimizer_agrees(device: &Device) -> Outcome {
    let train = |device: &Device| -> Result<Vec<f32>> {
        let mut problem = Problem::new(device, DType::F32)?;
        for _ in 0..3 {
            problem.optimizer.prepare(0.01)?;
            problem.step(false)?;
        }
        let mut all = problem.optimizer.grad_norm().to_vec::<f32>()?;
        for p in &problem.params {
            all.extend(p.value().to_vec::<f32>()?);
        }
        Ok(all)
    };
    let e = support::norm_error(&text(train(device))?, &text(train(&Device::cpu()))?);
    expect(e < F32_TOLERANCE, format!("parameters differ by {e:.2e} after three steps"))
}

fn recompute_bits(device: &Device) -> Outcome {
    let train = |recompute: bool| -> Result<Vec<u32>> {
        let mut problem = Problem::new(device, DType::BF16)?;
        problem.optimizer.prepare(0.01)?;
        problem.step(recompute)?;
        problem.values()
    };
    expect(text(train(false))? == text(train(true))?, "gradients differ")
}

fn copies_in_capture(device: &Device) -> Outcome {
    let x = text(Tensor::full(1.0, [4], device))?;
    let refused = Graph::capture(device, || ops::add(&x, &Tensor::from_slice(&[1f32; 4], [4], device)?));
    expect(matches!(refused, Err(Error::Capture { .. })), "a host copy was captured")?;
    // The device works on after the refusal.
    expect(text(ops::add(&x, &x).and_then(|y| y.to_vec::<f32>()))? == [2.0; 4], "wrong sum afterwards")
}

/// Each thread captures and replays graphs of its own, and issues single operations and host copies meanwhile.
fn four_threads(device: &Device) -> Outcome {
    let alone: Vec<Vec<u32>> = text((0..4).map(|seed| train(device, seed)).collect())?;
    for round in 0..5 {
        let together: Vec<Vec<u32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|seed| scope.spawn(move || train(device, seed))).collect();
            let results = threads.into_iter().map(|t| t.join().map_err(|_| "a thread panicked".to_string()).and_then(text));
            results.collect::<std::result::Result<_, _>>()
        })?;
        let differ: Vec<usize> = (0..4).filter(|i| alone[*i] != together[*i]).collect();
        expect(differ.is_empty(), format!("round {round}: threads {differ:?} got other bits"))?;
    }
    Ok(())
}

/// NCCL with one process: a sum, beside what the device does meanwhile, is what was there; so is one of a recorded graph.
fn sums_over_one(device: &Device) -> Outcome {
    let communicator = match Communicator::join(device, Membership::alone()) {
        Ok(communicator) => communicator,
        Err(why @ Error::Library { .. }) => {
            println!("skipped: {why}");
            return Ok(());
        }
        Err(why) => return Err(why.to_string()),
    };
    let (own, other) = (text(Tensor::full(3.0, [5], device))?, text(Tensor::full(1.0, [4], device))?);
    let step = || {
        communicator.begin_sums(std::slice::from_ref(&own))?;
        other.copy_from(&ops::add(&other, &other)?)?;
        communicator.finish_sums()?;
        own.copy_from(&ops::add(&own, &own)?)
    };
    let values = || text(own.to_vec::<f32>().and_then(|own| Ok((own, other.to_vec::<f32>()?))));
    let (graph, ()) = text(communicator.watched(|| Graph::capture(device, step)))?;
    expect(values()? == (vec![6.0; 5], vec![2.0; 4]), "the step that was run")?;
    text(communicator.watched(|| graph.replay().and_then(|()| device.synchronize())))?;
    expect(values()? == (vec![12.0; 5], vec![4.0; 4]), "the step that was replayed")?;
    let mut host = [1.5, -2.0];
    text(communicator.add_up(&mut host))?;
    expect(host == [1.5, -2.0], "numbers of the host")?;
    let wrong = text(Tensor::zeros([2], DType::I32, device))?;
    expect(matches!(communicator.begin_sums(&[wrong]), Err(Error::DType { .. })), "whole numbers were added up")?;
    // A communicator ends only after the graphs that it is in.
    drop(graph);
    text(communicator.leave())
}

fn out_of_memory(device: &Device) -> Outcome {
    match Tensor::zeros([1 << 20, 1 << 20, 4], DType::F32, device) {
        Err(Error::OutOfMemory { requested, total, .. }) => {
            expect(requested >= 1 << 44 && total > 1 << 30, format!("requested {requested}, total {total}"))?;
        }
        Err(other) => return Err(other.to_string()),
        Ok(_) => return Err("16 TiB were allocated".into()),
    }
    let x = text(Tensor::full(3.0, [2], device))?;
    expect(text(ops::mul(&x, &x).and_then(|y| y.to_vec::<f32>()))? == [9.0; 2], "wrong product afterwards")
}

fn two_devices(device: &Device) -> Outcome {
    let (a, b) = (text(Tensor::full(1.0, [2], device))?, text(Tensor::full(1.0, [2], &Device::cpu()))?);
    match ops::add(&a, &b) {
        Err(e @ Error::Device { .. }) => expect(e.to_string().contains("cuda:0") && e.to_string().contains("cpu"), e.to_string()),
        _ => Err("not refused".into()),
    }
}

/// This binary again, with other arguments and environment.
fn again(argument: &str, cache: Option<&std::path::Path>) -> std::result::Result<(bool, String), String> {
    let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    // What does not wait for its kernels must do as well as what does: tests run both, with an empty cache and with a full one.
    command.arg(argument).env("ARMT_COMPILE_AHEAD", "off");
    if let Some(cache) = cache {
        command.env("ARMT_CACHE_DIR", cache);
    }
    let output = command.output().map_err(|e| e.to_string())?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}

/// Fails in the middle of a step, reports it, and drops everything.
fn child_failure() -> ExitCode {
    let run = || -> Result<f32> {
        let device = Device::cuda(0)?;
        let problem = Problem::new(&device, DType::F32)?;
        if let Device::Cuda(cuda) = &device {
            cuda.fail_on_purpose()?;
        }
        problem.step(false)?.item()
    };
    match run() {
        Ok(loss) => println!("loss {loss}"),
        Err(e) => println!("reported: {e}"),
    }
    ExitCode::SUCCESS
}

fn failure_is_reported(_: &Device) -> Outcome {
    let (success, said) = again("--child-failure", None)?;
    expect(success && said.contains("reported:") && said.contains("CUDA_ERROR"), said)
}

fn child_matmul() -> ExitCode {
    let run = || -> Result<Vec<f32>> {
        let x = Tensor::full(2.0, [2, 2], &Device::cuda(0)?)?;
        ops::gelu(&ops::relu(&ops::matmul(&x, &x)?)?)?.to_vec::<f32>()
    };
    println!("{:?}", run());
    ExitCode::SUCCESS
}

fn damaged_cache(_: &Device) -> Outcome {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let (_, first) = again("--child-matmul", Some(dir.path()))?;
    expect(first.starts_with("Ok("), format!("first run: {first}"))?;
    let folder = dir.path().join("kernels");
    let entries = || std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>();
    expect(!entries().is_empty(), "no kernel was kept")?;
    for path in entries() {
        let mut bytes = std::fs::read(&path).map_err(|e| e.to_string())?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0xff;
        std::fs::write(&path, bytes).map_err(|e| e.to_string())?;
    }
    let (_, second) = again("--child-matmul", Some(dir.path()))?;
    expect(first == second, format!("with damaged entries: {second}"))?;
    // A folder that cannot be: results are the same all the same.
    let (_, third) = again("--child-matmul", Some(&entries()[0]))?;
    expect(first == third, format!("without a cache: {third}"))
}

/// Four threads, whose first steps ask for kernels at the same time.
fn child_train() -> ExitCode {
    let run = || -> Result<Vec<Vec<u32>>> {
        let device = &Device::cuda(0)?;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|seed| scope.spawn(move || train(device, seed))).collect();
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(Error::Bug("a thread panicked".into())))).collect()
        })
    };
    println!("{:?}", run());
    ExitCode::SUCCESS
}

fn first_steps(_: &Device) -> Outcome {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let (_, waiting) = again("--child-train", Some(dir.path()))?;
    expect(waiting.starts_with("Ok("), &waiting)?;
    let (_, at_once) = again("--child-train", Some(dir.path()))?;
    expect(waiting == at_once, "bits differ")
}
