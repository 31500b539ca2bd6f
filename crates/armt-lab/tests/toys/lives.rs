//! All that is asked of a model that lives in this house: trained, resumed, loaded, read with, kept, generated with, judged.

use std::ops::ControlFlow;
use std::path::Path;

use armt::Model;
use armt::engine::{DType, Device};
use armt::generate::{Options, generate};
use armt::reader::Reader;
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt_lab::eval::retrieval::curve;
use armt_lab::tasks::retrieval::{Retrieval, SYMBOLS, Setting};
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Event, train};

/// A short training.
pub const STAGES: &str = r#"
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

/// Trains a model by a recipe whose state is of a kind, and asks all of it.
pub fn lives_here(recipe: &str, kind: &str) {
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
    let diagonal = if model.recurrence().carries_through_top() { ScheduleKind::Auto } else { ScheduleKind::Diagonal };
    let [(a, state), (b, _)] =
        [ScheduleKind::Sequential, diagonal].map(|schedule| model.forward(&batch, &empty, schedule).unwrap());
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
