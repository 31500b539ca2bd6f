//! Training: an interrupted and resumed run gives the numbers of an unbroken one, and trouble is named.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;

use armt::engine::{DType, Device};
use armt::train::RunFolder;
use armt::train::recipe::Recipe;
use armt::train::trainer::{Ending, Event, train};
use serde_json::Value;

const RECIPE: &str = r#"
seed = 5
[task]
setting = "rewrite"
[model]
layers = 2
width = 16
heads = 2
inner = 16
[memory]
kind = "associative"
tokens = 2
d_mem = 4
[eval]
every = 3
samples = 8
[[stage]]
pairs = 2
batch = 4
steps = 7
until = 2.0
[[stage]]
pairs = 4
key_size = 2
batch = 4
accumulate = 2
steps = 5
vary = true
until = 2.0
"#;

/// Runs to the end, or until so many steps were made.
fn run(path: &Path, resume: bool, most: u64, changes: &[String]) -> armt::Result<Ending> {
    let recipe = Recipe::parse(RECIPE, changes)?;
    let mut folder = if resume { RunFolder::open(path)? } else { RunFolder::create(path)? };
    train(&recipe, &mut folder, resume, (DType::F32, &Device::cpu()), &mut |event| match event {
        Event::Step { progress, .. } if progress.total >= most => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })
}

/// The log without what depends on the clock.
fn log(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path.join("log.jsonl")).unwrap();
    let line = |l: &str| {
        let mut value: Value = serde_json::from_str(l).unwrap();
        let keys = value.as_object_mut().unwrap();
        for key in ["tokens_per_second", "step_ms", "peak_bytes"] {
            keys.remove(key);
        }
        value
    };
    text.lines().map(line).collect()
}

#[test]
fn a_resumed_run_gives_the_numbers_of_an_unbroken_one() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    assert!(matches!(run(&whole, false, u64::MAX, &[]).unwrap(), Ending::Finished { .. }));
    assert_eq!(log(&whole).iter().filter(|l| l.get("loss").is_some()).count(), 12);
    // Broken within a stage, at a validation, at a stage's end, and within the second stage.
    for at in [2, 3, 7, 9] {
        let broken = dir.path().join(format!("broken-{at}"));
        assert_eq!(run(&broken, false, at, &[]).unwrap(), Ending::Stopped, "{at}");
        assert!(matches!(run(&broken, true, u64::MAX, &[]).unwrap(), Ending::Finished { .. }));
        for file in ["last/model.safetensors", "best/model.safetensors"] {
            let read = |run: &Path| std::fs::read(run.join(file)).unwrap();
            assert!(read(&whole) == read(&broken), "{file} differs after a break at {at}");
        }
        assert_eq!(log(&whole), log(&broken), "broken at {at}");
    }
}

#[test]
fn a_run_that_explodes_stops_with_the_step_and_the_last_good_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    let changes = ["optimizer.lr=1e30", "optimizer.clip_value=0.0", "optimizer.warmup=0.0", "stage.1.steps=50"].map(String::from);
    let error = run(&path, false, u64::MAX, &changes).err().unwrap().to_string();
    assert!(error.contains("step") && error.contains("norm") && error.contains("last"), "{error}");
    assert!(path.join("last/model.safetensors").exists());
}

#[test]
fn a_folder_with_a_run_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    run(&path, false, 1, &[]).unwrap();
    assert!(run(&path, false, 1, &[]).is_err());
    assert!(run(&dir.path().join("none"), true, 1, &[]).is_err());
}
