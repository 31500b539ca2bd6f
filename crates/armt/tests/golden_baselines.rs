//! Parity of Mamba, RWKV-5 and RMT-R with the published code: `transformers`, the `rwkv` package, and the authors' own of RMT-R. Walks a folder of
//! cases (`tests/fixtures/golden-baselines`, or the one that `ARMT_GOLDEN_BASELINES` names). Each case is a folder with a model, its inputs, and
//! what the published code makes of them; logits, states, loss and every gradient are compared, with the text in one piece and cut into segments, token by
//! token where there is data for it, and with padding.
//!
//! `golden_baselines [--device cuda] [FILTER]`. The last line is `N passed, M failed`.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use armt::config::{Alignment, Config, ModelType};
use armt::engine::{DType, Device, Param, Tape};
use armt::generate::{Options, generate};
use armt::memory::{MemoryConfig, RmtR, Window};
use armt::recurrence::Targets;
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::weights::Tensors;
use armt::{Model, State};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

#[path = "support/file.rs"]
mod file;

type Outcome = Result<(), String>;

/// Most that a logit, a loss or a number of a state may be off, and a gradient, relative to the largest of its tensor.
const TOLERANCE: f32 = 1e-4;

const BOTH: [ScheduleKind; 2] = [ScheduleKind::Sequential, ScheduleKind::Diagonal];

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
    let folder = std::env::var_os("ARMT_GOLDEN_BASELINES").map_or_else(tracked, PathBuf::from);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) => {
            eprintln!("{}: {e}", folder.display());
            return ExitCode::FAILURE;
        }
    };
    let mut cases: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).filter(|p| p.join("manifest.json").is_file()).collect();
    cases.sort();
    let filter = args.into_iter().find(|a| !a.starts_with('-')).unwrap_or_default();
    let mut suite = Suite { device, filter, passed: 0, failed: 0 };
    cases.iter().for_each(|case| suite.case(case));
    println!("golden baselines: {} passed, {} failed", suite.passed, suite.failed);
    if suite.failed == 0 && suite.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

struct Suite {
    device: Device,
    filter: String,
    passed: usize,
    failed: usize,
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

    fn case(&mut self, folder: &Path) {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let case = Case::open(folder, &self.device);
        match case.json("manifest.json")["model"].as_str().unwrap_or_default() {
            kind if kind.starts_with("RMT-R") => self.rmt_r(&name, &case),
            kind if kind.starts_with("Mamba") && case.has("prefix_len") => self.mamba_in_steps(&name, &case),
            kind if kind.starts_with("Mamba") => self.mamba(&name, &case),
            kind if kind.starts_with("RWKV-5") => self.rwkv5(&name, &case),
            other => self.judge(&name, || Err(format!("the manifest's model {other:?} is not known"))),
        }
    }

    /// In one piece and in segments of several sizes, by both schedules.
    fn each_way(&mut self, name: &str, case: &Case, test: impl Fn(&Model, ScheduleKind) -> Outcome) {
        let tokens = case.ids().tokens();
        for segment in [tokens, 1, 4, 7] {
            let model = case.model(segment);
            for schedule in BOTH {
                self.judge(&format!("{name} in segments of {segment}, {schedule:?}"), || test(&model, schedule));
            }
        }
    }

    fn mamba(&mut self, name: &str, case: &Case) {
        self.each_way(name, case, |model, schedule| {
            let batch = case.ids();
            let (got, _) = model.forward(&batch, &model.empty(batch.texts).unwrap(), schedule).unwrap();
            expect("a logit", difference(&got, &case.floats("logits")), TOLERANCE)?;
            if case.has("logits_f64") {
                expect("a logit of f64", difference(&got, &case.floats("logits_f64")), TOLERANCE)?;
            }
            gradients(case, model, &case.targets(), schedule, &["grads.safetensors", "grads_f64.safetensors"])
        });
        for (mask, logits) in [("attention_mask", "logits_masked"), ("attention_mask_left", "logits_masked_left")] {
            // The published code lets biases of padding at the left into the convolution; here padding changes nothing.
            let biased = case.json("config.json")["use_bias"].as_bool().unwrap_or(false);
            if !case.has(logits) || biased && mask == "attention_mask_left" {
                continue;
            }
            self.each_way(&format!("{name} with {mask}"), case, |model, schedule| padded(case, model, schedule, mask, logits));
        }
    }

    /// A prefix, and after it one token at a time.
    fn mamba_in_steps(&mut self, name: &str, case: &Case) {
        self.each_way(name, case, |model, schedule| {
            let (batch, prefix) = (case.ids(), case.number("prefix_len"));
            let (got, half) = model.forward(&part(&batch, 0..prefix), &model.empty(batch.texts).unwrap(), schedule).unwrap();
            expect("a logit of the prefix", difference(&got, &case.floats("logits_prefix")), TOLERANCE)?;
            mamba_states(case, "prefix", &half)?;
            let (got, last) = model.forward(&part(&batch, prefix..batch.tokens()), &half, schedule).unwrap();
            expect("a logit after it", difference(&got, &case.floats("logits_continued")), TOLERANCE)?;
            mamba_states(case, "final", &last)?;
            let (got, _) = model.forward(&batch, &model.empty(batch.texts).unwrap(), schedule).unwrap();
            expect("a logit", difference(&got, &case.floats("logits_full")), TOLERANCE)?;
            generated(model, &part(&batch, prefix..batch.tokens()), &half, &case.floats("logits_continued"))
        });
    }

    fn rwkv5(&mut self, name: &str, case: &Case) {
        self.each_way(name, case, |model, schedule| {
            let (batch, prefix) = (case.ids(), case.number("prefix_len"));
            let empty = model.empty(1).unwrap();
            let (got, last) = model.forward(&batch, &empty, schedule).unwrap();
            expect("a logit", difference(&got, &case.floats("logits")), TOLERANCE)?;
            if case.has("logits_f64") {
                expect("a logit of f64", difference(&got, &case.floats("logits_f64")), TOLERANCE)?;
            }
            rwkv5_states(case, "final", &last)?;
            let (got, half) = model.forward(&part(&batch, 0..prefix), &empty, schedule).unwrap();
            expect("a logit of the prefix", difference(&got, &case.floats("logits_prefix")), TOLERANCE)?;
            rwkv5_states(case, "prefix", &half)?;
            let (got, last) = model.forward(&part(&batch, prefix..batch.tokens()), &half, schedule).unwrap();
            expect("a logit after it", difference(&got, &case.floats("logits_continued")), TOLERANCE)?;
            rwkv5_states(case, "final", &last)?;
            generated(model, &part(&batch, prefix..batch.tokens()), &half, &case.floats("logits_continued_single"))?;
            gradients(case, model, &case.targets(), schedule, &["grads.safetensors", "grads_f64.safetensors"])
        });
    }

    fn rmt_r(&mut self, name: &str, case: &Case) {
        let model = case.model(0);
        self.judge(&format!("{name} logits, memory and gradients"), || {
            let batch = case.ids();
            let (got, last) = model.forward(&batch, &model.empty(batch.texts).unwrap(), ScheduleKind::Auto).unwrap();
            expect("a logit", difference(&got, &case.floats("logits")), TOLERANCE)?;
            // All write tokens of all segments, one after the other.
            let kept = last.get("memory").unwrap();
            let (rows, d) = (kept.dims()[1], kept.dims()[2]);
            let (kept, segments) = (kept.to_f32_vec().unwrap(), batch.tokens().div_ceil(model.config().segment_size));
            let own = rows / segments * d;
            for s in 0..segments {
                let got: Vec<f32> = kept.chunks(rows * d).flat_map(|text| text[s * own..][..own].to_vec()).collect();
                let want = case.floats(&format!("memory_after_segment.{s}"));
                expect(&format!("the memory after segment {s}"), difference(&got, &want), TOLERANCE)?;
            }
            let mask: Vec<bool> = case.integers("labels_mask").0.iter().map(|x| *x != 0).collect();
            let targets = Targets::shifted(&batch.ids, Some(&mask), batch.texts);
            gradients(case, &model, &targets, ScheduleKind::Auto, &["grads.safetensors"])
        });
    }
}

/// A model and what the published code makes of it.
struct Case {
    folder: PathBuf,
    device: Device,
    bytes: Vec<u8>,
}

impl Case {
    fn open(folder: &Path, device: &Device) -> Self {
        let bytes = std::fs::read(folder.join("io.safetensors")).unwrap();
        Case { folder: folder.into(), device: device.clone(), bytes }
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&std::fs::read_to_string(self.folder.join(name)).unwrap()).unwrap()
    }

    fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.bytes).unwrap().tensor(name).is_ok()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        floats(&self.bytes, name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// Integer values and the shape.
    fn integers(&self, name: &str) -> (Vec<i32>, Vec<usize>) {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap();
        let data = view.data();
        let values = match view.dtype() {
            Dtype::I64 => data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as i32).collect(),
            Dtype::U8 | Dtype::BOOL => data.iter().map(|b| i32::from(*b)).collect(),
            other => panic!("{name} is {other:?}"),
        };
        (values, view.shape().to_vec())
    }

    fn number(&self, name: &str) -> usize {
        self.integers(name).0[0] as usize
    }

    /// The texts: one where there is no axis for several.
    fn ids(&self) -> Batch {
        let (ids, shape) = self.integers("input_ids");
        Batch { ids, texts: if shape.len() == 2 { shape[0] } else { 1 }, mask: None }
    }

    fn targets(&self) -> Targets {
        Targets::shifted(&self.integers("labels").0, None, self.ids().texts)
    }

    /// The model with the case's weights, in segments of so many tokens, or of those that the case was made with.
    fn model(&self, segment: usize) -> Model {
        let (mut backbone, manifest) = (self.json("config.json"), self.json("manifest.json"));
        if backbone["model_type"].is_null() {
            backbone["model_type"] = "rwkv5".into();
        }
        let number = |key: &str| manifest[key].as_u64().map(|n| n as usize);
        let memory = match number("write_tokens") {
            Some(tokens) => MemoryConfig::new(RmtR { tokens }),
            None => MemoryConfig::new(Window::default()),
        };
        let config = Config {
            model_type: ModelType::Armt,
            segment_size: if segment == 0 { number("segment_size").unwrap() } else { segment },
            segment_alignment: Alignment::Left,
            after_question: None,
            memory,
            backbone,
        };
        let model = Model::fresh(config, 0, DType::F32, &self.device).unwrap();
        let place = tempfile::tempdir().unwrap();
        model.set_weights(&self.weights(&model, place.path())).unwrap();
        model
    }

    /// The case's weights, those that its file leaves out from `left_out.safetensors`, of the case itself or of the tracked one of its name.
    fn weights(&self, model: &Model, place: &Path) -> Tensors {
        let own = Tensors::open(&self.folder.join("model.safetensors")).unwrap();
        let tracked = tracked().join(self.folder.file_name().unwrap());
        let beside = [&self.folder, &tracked].map(|folder| folder.join("left_out.safetensors"));
        let beside = beside.iter().find(|path| path.is_file()).map(|path| Tensors::open(path).unwrap());
        let all = model.recurrence().entries().into_iter().map(|entry| {
            let names: Vec<&str> = entry.names().collect();
            let found = own.find(&names).or_else(|e| beside.as_ref().map_or(Err(e), |beside| beside.find(&names)));
            let (_, shape, values) = found.unwrap_or_else(|e| panic!("{e}"));
            (entry.name.clone(), shape, values)
        });
        let (path, all) = (place.join("model.safetensors"), all.collect::<Vec<_>>());
        file::write(&path, &all);
        Tensors::open(&path).unwrap()
    }
}

/// The cases that come with the project.
fn tracked() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden-baselines")
}

fn floats(bytes: &[u8], name: &str) -> Option<Vec<f32>> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let view = file.tensor(name).ok()?;
    Some(match view.dtype() {
        Dtype::F32 => view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::F64 => view.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b) as f32).collect(),
        other => panic!("{name} is {other:?}"),
    })
}

/// Tokens of each text.
fn part(batch: &Batch, range: std::ops::Range<usize>) -> Batch {
    let tokens = batch.tokens();
    let ids = (0..batch.texts).flat_map(|b| batch.ids[b * tokens..][range.clone()].to_vec()).collect();
    Batch { ids, texts: batch.texts, mask: None }
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

fn expect(what: &str, off: f32, tolerance: f32) -> Outcome {
    if off <= tolerance { Ok(()) } else { Err(format!("{what} is off by {off:.2e}, more than {tolerance:.0e}")) }
}

/// Layer l of a tensor of a state, `[L, ..]`.
fn layer(state: &State, name: &str, l: usize) -> (Vec<f32>, Vec<usize>) {
    let tensor = state.get(name).unwrap();
    let size = tensor.elements() / tensor.dims()[0];
    (tensor.to_f32_vec().unwrap()[l * size..][..size].to_vec(), tensor.dims()[1..].to_vec())
}

fn mamba_states(case: &Case, when: &str, state: &State) -> Outcome {
    for l in 0..state.get("ssm").unwrap().dims()[0] {
        let got = layer(state, "ssm", l).0;
        expect(&format!("S of layer {l}, {when}"), difference(&got, &case.floats(&format!("{when}.ssm_state.{l}"))), TOLERANCE)?;
        // Theirs are the last K inputs [B, E, K], of which the first is never used again.
        let ((got, shape), want) = (layer(state, "conv", l), case.floats(&format!("{when}.conv_state.{l}")));
        let (k, e) = (shape[1] + 1, shape[2]);
        let at = |i: usize| (i / ((k - 1) * e) * e + i % e) * k + i / e % (k - 1) + 1;
        let want: Vec<f32> = (0..got.len()).map(|i| want[at(i)]).collect();
        expect(&format!("the convolution's tail of layer {l}, {when}"), difference(&got, &want), TOLERANCE)?;
    }
    Ok(())
}

fn rwkv5_states(case: &Case, when: &str, state: &State) -> Outcome {
    for l in 0..state.get("wkv").unwrap().dims()[0] {
        for (ours, theirs) in [("wkv", "wkv_state"), ("att_shift", "att_shift"), ("ffn_shift", "ffn_shift")] {
            let want = case.floats(&format!("{when}.{theirs}.{l}"));
            expect(&format!("{theirs} of layer {l}, {when}"), difference(&layer(state, ours, l).0, &want), TOLERANCE)?;
        }
    }
    Ok(())
}

/// Logits of positions that the mask shows, with the others hidden.
fn padded(case: &Case, model: &Model, schedule: ScheduleKind, mask: &str, logits: &str) -> Outcome {
    let (mask, batch, vocab) = (case.integers(mask).0, case.ids(), model.sizes().vocab);
    let batch = Batch { mask: Some(mask.clone()), ..batch };
    let (got, _) = model.forward(&batch, &model.empty(batch.texts).unwrap(), schedule).unwrap();
    let want = case.floats(logits);
    for (i, _) in mask.iter().enumerate().filter(|(_, m)| **m != 0) {
        let at = i * vocab..(i + 1) * vocab;
        expect(&format!("a logit of position {i}"), difference(&got[at.clone()], &want[at]), TOLERANCE)?;
    }
    Ok(())
}

/// What follows each token of the texts, where generation is given one after the other.
fn generated(model: &Model, texts: &Batch, state: &State, want: &[f32]) -> Outcome {
    let (tokens, vocab) = (texts.tokens(), model.sizes().vocab);
    let options = Options { max_new_tokens: 1, keep_logits: true, ..Options::default() };
    for end in 1..=tokens {
        let said = generate(model, &part(texts, 0..end), state, &options, &mut |_| {}).unwrap();
        let want: Vec<f32> = (0..texts.texts).flat_map(|b| want[(b * tokens + end - 1) * vocab..][..vocab].to_vec()).collect();
        expect(&format!("a logit after {end} tokens"), difference(&said.logits[0], &want), TOLERANCE)?;
    }
    Ok(())
}

fn gradients(case: &Case, model: &Model, targets: &Targets, schedule: ScheduleKind, files: &[&str]) -> Outcome {
    let batch = case.ids();
    let state = model.empty(batch.texts).unwrap();
    for recompute in [false, true] {
        model.params().iter().for_each(|p| p.zero_grad().unwrap());
        let (tape, backprop) = (Tape::new(), Backprop { recompute, ..Backprop::default() });
        let (loss, _) = model.loss(&tape, &batch, targets, &state, schedule, backprop).unwrap();
        tape.backward(&loss).unwrap();
        let want = if case.has("loss") { "loss" } else { "loss_f64" };
        expect("the loss", (loss.item().unwrap() - case.floats(want)[0]).abs(), TOLERANCE)?;
        let there: Vec<&&str> = files.iter().filter(|file| case.folder.join(file).is_file()).collect();
        if there.is_empty() {
            return Err(format!("there is none of {files:?}"));
        }
        for file in there {
            let bytes = std::fs::read(case.folder.join(file)).unwrap();
            let all = SafeTensors::deserialize(&bytes).unwrap().len();
            let mut compared = 0;
            let entries = model.recurrence().entries();
            for (entry, (name, _, got)) in entries.iter().zip(model.export(Param::grad).unwrap()) {
                let mut names = entry.names().flat_map(|name| [format!("grad.{name}"), format!("grad64.{name}")]);
                let Some(want) = names.find_map(|name| floats(&bytes, &name)) else { continue };
                // What should be zero, and is but for rounding, is compared with 1.
                let scale = if largest(&want) > 1e-7 { largest(&want) } else { 1.0 };
                expect(&format!("the gradient of {name} in {file}"), difference(&got, &want) / scale, TOLERANCE)?;
                compared += 1;
            }
            if compared != all {
                return Err(format!("{compared} of {all} gradients of {file} were compared"));
            }
        }
    }
    Ok(())
}
