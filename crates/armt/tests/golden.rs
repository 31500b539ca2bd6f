//! Parity with the authors' PyTorch code. Walks a folder of golden cases (`tests/fixtures/golden`, or the one that `ARMT_GOLDEN` names),
//! and for each case of its manifest builds the model from the case's configuration and weights and compares logits, loss, memory after
//! each segment, every gradient, the padded and the aligned variants, and generated tokens, under every schedule that the memory has.
//!
//! `golden [--device cuda] [FILTER]`; on the GPU tolerances are wider. The last line is `N passed, M failed`.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use armt::config::{Alignment, Config, ModelType};
use armt::engine::{DType, Device, Tape};
use armt::generate::Options;
use armt::memory::{Associative, MemoryConfig, Prmt, Rmt, Window, Write};
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::weights::Tensors;
use armt::{Model, recurrence::Targets};
use safetensors::SafeTensors;
use serde_json::Value;

type Outcome = Result<(), String>;

/// How far a device may be off, relative to the largest value where that is above 1: logits, losses and memory; gradients relative to
/// their largest. (The golden values are f32 themselves: one logit of 4.6 is 2.8e-4 away from what f64 gives.)
#[derive(Clone, Copy)]
struct Tolerance {
    logits: f32,
    gradients: f32,
}

struct Suite {
    folder: PathBuf,
    manifest: Value,
    device: Device,
    tolerance: Tolerance,
    filter: String,
    passed: usize,
    failed: usize,
}

fn main() -> ExitCode {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let on = args.iter().position(|a| a == "--device").map(|i| args.drain(i..i + 2).nth(1).unwrap_or_default());
    let device = match on.as_deref() {
        Some("cuda") => match Device::cuda(0) {
            Ok(device) => device,
            Err(why) => {
                println!("golden cases on the GPU skipped: {why}");
                return ExitCode::SUCCESS;
            }
        },
        _ => Device::cpu(),
    };
    let tolerance =
        if device.is_cuda() { Tolerance { logits: 1e-3, gradients: 1e-3 } } else { Tolerance { logits: 2e-4, gradients: 5e-4 } };
    let folder = std::env::var_os("ARMT_GOLDEN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden"), PathBuf::from);
    let path = folder.join("manifest.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) => {
            eprintln!("{}: {e}", path.display());
            return ExitCode::FAILURE;
        }
    };
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let filter = args.into_iter().find(|a| !a.starts_with('-')).unwrap_or_default();
    let mut suite = Suite { folder, manifest, device, tolerance, filter, passed: 0, failed: 0 };
    suite.run();
    println!("golden: {} passed, {} failed", suite.passed, suite.failed);
    if suite.failed == 0 && suite.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One golden model and its data.
struct Case<'a> {
    entry: &'a Value,
    bytes: Vec<u8>,
    tensors: Tensors,
}

impl<'a> Case<'a> {
    fn open(folder: &Path, file: &str, entry: &'a Value) -> Self {
        let path = folder.join(file);
        Case { entry, bytes: std::fs::read(&path).unwrap(), tensors: Tensors::open(&path).unwrap() }
    }

    fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.bytes).unwrap().tensor(name).is_ok()
    }

    /// Float values.
    fn floats(&self, name: &str) -> Vec<f32> {
        self.tensors.find(&[name]).unwrap().2
    }

    /// Integer values and the number of rows.
    fn integers(&self, name: &str) -> (Vec<i32>, usize) {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap();
        let data = view.data();
        let values = match view.dtype() {
            safetensors::Dtype::I64 => data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as i32).collect(),
            safetensors::Dtype::U8 | safetensors::Dtype::BOOL => data.iter().map(|b| i32::from(*b)).collect(),
            other => panic!("{name} is {other:?}"),
        };
        (values, view.shape()[0])
    }

    fn number(&self, key: &str) -> usize {
        self.entry[key].as_u64().unwrap_or_else(|| panic!("the manifest has no {key}")) as usize
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        self.entry[key].as_bool().unwrap_or(default)
    }

    /// The configuration that the manifest's fields describe.
    fn config(&self) -> Config {
        let wrap_pos = self.flag("wrap_pos", false);
        let memory = match self.entry["memory"].as_str().unwrap_or("none") {
            "associative" => MemoryConfig::new(Associative {
                tokens: self.number("num_mem_tokens"),
                d_mem: self.number("d_mem"),
                nu: self.entry["nu"].as_u64().unwrap_or(3) as usize,
                correction: self.flag("correction", true),
                wrap_pos,
                memory_layers: None,
                write: Write::Paper,
            }),
            "rmt" => MemoryConfig::new(Rmt { tokens: self.number("num_mem_tokens"), wrap_pos }),
            "prmt" => MemoryConfig::new(Prmt { tokens: self.number("num_mem_tokens"), wrap_pos }),
            _ => MemoryConfig::new(Window { sliding_window: false }),
        };
        Config {
            model_type: ModelType::Armt,
            segment_size: self.number("segment_size"),
            segment_alignment: Alignment::Left,
            after_question: None,
            memory,
            backbone: self.entry["config"].clone(),
        }
    }

    /// The model with the case's weights.
    fn model(&self, device: &Device) -> Model {
        let model = Model::fresh(self.config(), 0, DType::F32, device).unwrap();
        model.set_weights(&self.tensors.under("param.")).unwrap();
        model
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

/// Largest difference; NaN counts as infinite.
fn difference(got: &[f32], want: &[f32]) -> f32 {
    if got.len() != want.len() {
        return f32::INFINITY;
    }
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
}

/// Largest difference relative to the largest value, or absolute where that is below 1.
fn off(got: &[f32], want: &[f32]) -> f32 {
    difference(got, want) / largest(want).max(1.0)
}

fn expect(what: &str, off: f32, tolerance: f32) -> Outcome {
    if off <= tolerance { Ok(()) } else { Err(format!("{what} is off by {off:.2e}, more than {tolerance:.0e}")) }
}

impl Suite {
    fn judge(&mut self, name: &str, test: impl FnOnce() -> Outcome) {
        if !name.contains(&self.filter) {
            return;
        }
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).unwrap_or_else(|_| Err("panicked".into()));
        match outcome {
            Ok(()) => self.passed += 1,
            Err(why) => {
                self.failed += 1;
                println!("FAILED {name}: {why}");
            }
        }
    }

    fn run(&mut self) {
        let manifest = self.manifest.clone();
        let files = manifest["files"].as_object().unwrap();
        for (file, entry) in files {
            match entry["kind"].as_str() {
                Some("model") => self.model(file, entry),
                Some("generation") => {
                    let weights = entry["weights"].as_str().unwrap();
                    self.generation(file, entry, weights, &files[weights]);
                }
                // The engine's own tests read the operations' cases.
                Some("dpfp" | "associative_layer") => {}
                other => self.judge(file, || Err(format!("the manifest's kind {other:?} is not known"))),
            }
        }
    }

    fn model(&mut self, file: &str, entry: &Value) {
        let case = Case::open(&self.folder, file, entry);
        let (device, tolerance) = (self.device.clone(), self.tolerance);
        let schedules: &[ScheduleKind] = if entry["memory"] == "rmt" {
            &[ScheduleKind::Sequential]
        } else {
            &[ScheduleKind::Sequential, ScheduleKind::Diagonal]
        };
        let model = case.model(&device);
        for &schedule in schedules {
            let name = |what: &str| format!("{file} {schedule:?} {what}");
            self.judge(&name("logits"), || logits(&case, &model, schedule, tolerance));
            self.judge(&name("memory"), || memory(&case, &model, schedule, tolerance));
            self.judge(&name("gradients"), || gradients(&case, &model, schedule, tolerance));
            if case.has("pad_logits") {
                self.judge(&name("padded"), || padded(&case, &model, schedule, tolerance));
            }
            for (alignment, key) in [(Alignment::Left, "left"), (Alignment::Right, "right"), (Alignment::Center, "center")] {
                let tensor = format!("align_{key}_logits");
                if case.has(&tensor) {
                    self.judge(&name(key), || aligned(&case, &model, schedule, alignment, &tensor, tolerance));
                }
            }
        }
        if entry["memory"] == "rmt" {
            self.judge(&format!("{file} has no diagonal"), || match ScheduleKind::Diagonal.schedule(model.recurrence()) {
                Err(e) if e.to_string().contains("RMT") => Ok(()),
                _ => Err("asking for one is not an error that says so".into()),
            });
        }
    }

    fn generation(&mut self, file: &str, entry: &Value, weights: &str, weights_entry: &Value) {
        let case = Case::open(&self.folder, file, entry);
        let model = Case::open(&self.folder, weights, weights_entry).model(&self.device);
        let tolerance = self.tolerance;
        let names: Vec<String> = entry["tensors"].as_object().unwrap().keys().cloned().collect();
        for tag in names.iter().filter_map(|n| n.strip_prefix("input_ids_")) {
            self.judge(&format!("{file} {tag}"), || generated(&case, &model, tag, tolerance));
        }
    }
}

fn batch_of(case: &Case<'_>) -> Batch {
    let (ids, batch) = case.integers("input_ids");
    Batch { ids, texts: batch, mask: None }
}

fn logits(case: &Case<'_>, model: &Model, schedule: ScheduleKind, tolerance: Tolerance) -> Outcome {
    let batch = batch_of(case);
    let state = model.empty(batch.texts).unwrap();
    let (got, after) = model.forward(&batch, &state, schedule).unwrap();
    expect("a logit", off(&got, &case.floats("logits")), tolerance.logits)?;
    if after.tokens_read() != batch.tokens() as u64 {
        return Err(format!("{} tokens were read", after.tokens_read()));
    }
    Ok(())
}

/// Memory after each segment, each time from the start.
fn memory(case: &Case<'_>, model: &Model, schedule: ScheduleKind, tolerance: Tolerance) -> Outcome {
    let batch = batch_of(case);
    let (tokens, size) = (batch.tokens(), model.config().segment_size);
    for s in 0..tokens.div_ceil(size) {
        if !case.has(&format!("mem.W.0.{s}")) {
            continue;
        }
        let end = ((s + 1) * size).min(tokens);
        let ids = (0..batch.texts).flat_map(|b| batch.ids[b * tokens..][..end].to_vec()).collect();
        let part = Batch { ids, texts: batch.texts, mask: None };
        let state = model.empty(batch.texts).unwrap();
        let (_, state) = model.forward(&part, &state, schedule).unwrap();
        let (Some(a), Some(z)) = (state.get("A"), state.get("z")) else { return Err("the memory is of another kind".into()) };
        for (got, key) in [(a, "W"), (z, "z")] {
            let values = got.to_vec::<f32>().unwrap();
            let size = values.len() / model.sizes().layers;
            for (l, got) in values.chunks(size).enumerate() {
                let want = case.floats(&format!("mem.{key}.{l}.{s}"));
                expect(&format!("{key} of layer {l} after segment {s}"), off(got, &want), tolerance.logits)?;
            }
        }
    }
    Ok(())
}

fn targets_of(case: &Case<'_>, mask: Option<&str>) -> Targets {
    let (labels, batch) = case.integers("labels");
    let mask: Option<Vec<bool>> = mask.map(|m| case.integers(m).0.iter().map(|x| *x != 0).collect());
    Targets::shifted(&labels, mask.as_deref(), batch)
}

fn gradients(case: &Case<'_>, model: &Model, schedule: ScheduleKind, tolerance: Tolerance) -> Outcome {
    let batch = batch_of(case);
    let state = model.empty(batch.texts).unwrap();
    if case.has("loss_nomask") {
        let tape = Tape::off();
        let (loss, _) = model.loss(&tape, &batch, &targets_of(case, None), &state, schedule, Backprop::default()).unwrap();
        expect("the loss without mask", (loss.item().unwrap() - case.floats("loss_nomask")[0]).abs(), tolerance.logits)?;
    }
    model.params().iter().for_each(|p| p.zero_grad().unwrap());
    let tape = Tape::new();
    let (loss, _) =
        model.loss(&tape, &batch, &targets_of(case, Some("labels_mask")), &state, schedule, Backprop::default()).unwrap();
    tape.backward(&loss).unwrap();
    expect("the loss", (loss.item().unwrap() - case.floats("loss")[0]).abs(), tolerance.logits)?;
    let mut compared = 0;
    for (name, _, got) in model.export(armt::engine::Param::grad).unwrap() {
        let key = format!("grad.{name}");
        if !case.has(&key) {
            continue;
        }
        let want = case.floats(&key);
        // A gradient that should be zero is compared with 1.
        let scale = if largest(&want) > 0.0 { largest(&want) } else { 1.0 };
        expect(&format!("the gradient of {name}"), difference(&got, &want) / scale, tolerance.gradients)?;
        compared += 1;
    }
    let expected = case.entry["tensors"].as_object().unwrap().keys().filter(|k| k.starts_with("grad.")).count();
    if compared == expected { Ok(()) } else { Err(format!("{compared} of {expected} gradients were compared")) }
}

fn padded(case: &Case<'_>, model: &Model, schedule: ScheduleKind, tolerance: Tolerance) -> Outcome {
    let (mask, _) = case.integers("pad_attention_mask");
    let batch = Batch { mask: Some(mask.clone()), ..batch_of(case) };
    let state = model.empty(batch.texts).unwrap();
    let (got, _) = model.forward(&batch, &state, schedule).unwrap();
    let (want, vocab) = (case.floats("pad_logits"), model.sizes().vocab);
    for (i, _) in mask.iter().enumerate().filter(|(_, m)| **m != 0) {
        let at = i * vocab..(i + 1) * vocab;
        expect(&format!("a logit of position {i}"), off(&got[at.clone()], &want[at]), tolerance.logits)?;
    }
    let tape = Tape::off();
    let (loss, _) =
        model.loss(&tape, &batch, &targets_of(case, Some("pad_labels_mask")), &state, schedule, Backprop::default()).unwrap();
    expect("the loss", (loss.item().unwrap() - case.floats("pad_loss")[0]).abs(), tolerance.logits)
}

fn aligned(
    case: &Case<'_>,
    model: &Model,
    schedule: ScheduleKind,
    alignment: Alignment,
    tensor: &str,
    tolerance: Tolerance,
) -> Outcome {
    let (all, want) = (batch_of(case), case.floats(tensor));
    let tokens = want.len() / all.texts / model.sizes().vocab;
    let ids = (0..all.texts).flat_map(|b| all.ids[b * all.tokens()..][..tokens].to_vec()).collect();
    let batch = Batch { ids, texts: all.texts, mask: None };
    let state = model.empty(batch.texts).unwrap();
    let (got, _) = model.forward_aligned(&batch, &state, schedule, alignment).unwrap();
    expect("a logit", off(&got, &want), tolerance.logits)
}

fn generated(case: &Case<'_>, model: &Model, tag: &str, tolerance: Tolerance) -> Outcome {
    let (ids, batch) = case.integers(&format!("input_ids_{tag}"));
    let (want, _) = case.integers(&format!("generated_{tag}"));
    let steps = case.number("new_tokens");
    let prompt = Batch { ids, texts: batch, mask: None };
    let state = model.empty(batch).unwrap();
    let options = Options { max_new_tokens: steps, roll_over: false, keep_logits: true, ..Options::default() };
    let out = armt::generate::generate(model, &prompt, &state, &options, &mut |_| {}).unwrap();
    if out.tokens.concat() != want {
        return Err(format!("generated {:?} instead of {want:?}", out.tokens));
    }
    let (logits, vocab) = (case.floats(&format!("step_logits_{tag}")), model.sizes().vocab);
    for (step, got) in out.logits.iter().enumerate() {
        for b in 0..batch {
            let want = &logits[(b * steps + step) * vocab..][..vocab];
            expect(&format!("a logit of step {step}"), off(&got[b * vocab..][..vocab], want), tolerance.logits)?;
        }
    }
    Ok(())
}
