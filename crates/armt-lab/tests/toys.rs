//! The rooms wait for what comes: a memory kind and a recurrence that the library has never heard of, each one file and one line of a
//! registry, read, train, are saved, resumed, asked and judged like the others.

#![allow(clippy::unwrap_used)]

#[path = "toys/decay.rs"]
mod decay;
#[path = "toys/echo.rs"]
mod echo;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Once;

use armt::engine::{DType, Device, Tape};
use armt::generate::{Options, generate};
use armt::memory::{MemoryConfig, Window};
use armt::reader::Reader;
use armt::recurrence::Targets;
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::{Config, Model};
use armt_lab::eval::retrieval::curve;
use armt_lab::tasks::retrieval::{Retrieval, SYMBOLS, Setting};
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Event, train};
use serde_json::json;

fn registered() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        armt::memory::register(echo::KIND).unwrap();
        armt::recurrence::register(decay::MODEL_TYPE, decay::build).unwrap();
    });
}

const STAGES: &str = r#"
[eval]
every = 4
samples = 8
[[stage]]
pairs = 3
batch = 4
steps = 8
until = "never"
"#;

/// Runs a recipe to its end, or until so many steps were made.
fn run(recipe: &str, folder: &Path, resume: bool, most: u64) {
    let recipe = Recipe::parse(recipe, &[]).unwrap();
    let mut folder = if resume { RunFolder::open(folder).unwrap() } else { RunFolder::create(folder).unwrap() };
    train(&recipe, &mut folder, resume, (DType::F32, &Device::cpu()), &mut |event| match event {
        Event::Step { progress, .. } if progress.total >= most => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })
    .unwrap();
}

/// All that is asked of a model: trained, resumed, loaded, read with, kept, generated with, judged.
fn lives_here(recipe: &str, kind: &str) {
    let place = tempfile::tempdir().unwrap();
    let [whole, halves] = ["whole", "halves"].map(|name| place.path().join(name));
    run(recipe, &whole, false, u64::MAX);
    run(recipe, &halves, false, 3);
    run(recipe, &halves, true, u64::MAX);
    let load = |folder: &Path| Model::load(&folder.join("best"), DType::F32, &Device::cpu()).unwrap();
    let (model, again) = (load(&whole), load(&halves));
    assert_eq!(model.fingerprint().unwrap(), again.fingerprint().unwrap(), "a run in two halves ends with the same model");

    let text: Vec<i32> = (0..101).map(|i| i * i % 100).collect();
    let batch = Batch { ids: text.clone(), texts: 1, mask: None };
    let empty = model.empty(1).unwrap();
    assert_eq!(empty.kind(), kind);
    let [(a, state), (b, _)] =
        [ScheduleKind::Sequential, ScheduleKind::Diagonal].map(|schedule| model.forward(&batch, &empty, schedule).unwrap());
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "both schedules give the same");
    let mut reader = Reader::new(&model, empty.clone()).unwrap();
    reader.read(&mut text.iter().map(|t| Ok(*t)), &mut |_| ControlFlow::Continue(())).unwrap();
    reader.close().unwrap();
    let read = reader.state().unwrap();
    let numbers = |state: &armt::State| state.tensors().flat_map(|(_, t)| t.to_f32_vec().unwrap()).collect::<Vec<_>>();
    assert!(numbers(&state).iter().zip(numbers(&read)).all(|(a, b)| (a - b).abs() < 1e-4));
    assert!(numbers(&state).iter().any(|x| *x != 0.0), "something is kept");

    let file = place.path().join("state");
    model.save_state(&read, &file).unwrap();
    assert_eq!(numbers(&again.load_state(&file).unwrap()), numbers(&read));

    // What is generated is what reading the whole says.
    let options = Options { max_new_tokens: 3, keep_logits: true, ..Options::default() };
    let prompt = Batch { ids: text[..3].to_vec(), texts: 1, mask: None };
    let said = generate(&model, &prompt, &read, &options, &mut |_| {}).unwrap();
    let open = Batch { ids: [&text[..3], &said.tokens[0][..1]].concat(), texts: 1, mask: None };
    let (logits, _) = model.forward(&open, &read, ScheduleKind::Auto).unwrap();
    let last = &logits[3 * model.sizes().vocab..];
    assert!(said.logits[1].iter().zip(last).all(|(a, b)| (a - b).abs() < 1e-4), "a cache changes nothing");

    let task = Retrieval { setting: Setting::Rewrite, key_size: 1, value_size: 1, symbols: SYMBOLS };
    let points = curve(&model, task, &[1, 3], 8, 4, 1, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(points.len(), 2);
}

#[test]
fn a_memory_kind_of_ones_own_lives_here() {
    registered();
    let recipe = format!(
        "seed = 3\n[task]\nsetting = \"rewrite\"\n[model]\nlayers = 2\nwidth = 16\nheads = 2\ninner = 16\n[memory]\nkind = \"echo\"\n{STAGES}"
    );
    lives_here(&recipe, "echo");
}

#[test]
fn a_recurrence_of_ones_own_lives_here() {
    registered();
    let place = tempfile::tempdir().unwrap();
    let backbone = json!({"model_type": "decay", "vocab_size": 130, "layers": 2, "width": 16});
    let config = Config::new(backbone, MemoryConfig::new(Window::default()), 4);
    Model::fresh(config, 5, DType::F32, &Device::cpu()).unwrap().save(place.path(), DType::F32).unwrap();
    let folder = place.path().display();
    lives_here(&format!("seed = 3\n[task]\nsetting = \"rewrite\"\n[model]\nfrom = \"{folder}\"\n{STAGES}"), "decay");
}

/// A state with its gradient makes the cut of a text a matter of convenience.
#[test]
fn the_gradient_of_a_recurrence_is_the_same_however_its_text_is_cut() {
    registered();
    let gradients = |segment: usize| {
        let backbone = json!({"model_type": "decay", "vocab_size": 30, "layers": 2, "width": 8});
        let config = Config::new(backbone, MemoryConfig::new(Window::default()), segment);
        let model = Model::fresh(config, 5, DType::F32, &Device::cpu()).unwrap();
        let batch = Batch { ids: (0..24).map(|i| i * i % 30).collect(), texts: 2, mask: None };
        let (tape, targets) = (Tape::new(), Targets::shifted(&batch.ids, None, 2));
        let empty = model.empty(2).unwrap();
        let loss = model.loss(&tape, &batch, &targets, &empty, ScheduleKind::Auto, Backprop::default()).unwrap().0;
        tape.backward(&loss).unwrap();
        model.params().iter().flat_map(|p| p.grad().unwrap().to_f32_vec().unwrap()).collect::<Vec<_>>()
    };
    let whole = gradients(12);
    for segment in [1, 4, 5] {
        assert!(whole.iter().zip(gradients(segment)).all(|(a, b)| (a - b).abs() < 1e-5), "segments of {segment}");
    }
}

#[test]
fn names_that_are_taken_are_refused() {
    registered();
    assert!(armt::memory::register(echo::KIND).is_err());
    assert!(armt::recurrence::register("gpt2", decay::build).is_err());
}
