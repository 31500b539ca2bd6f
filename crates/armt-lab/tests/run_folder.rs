//! The folder of a run: what a crash, a second process or a damaged file may do to it, and what it keeps.

#![allow(clippy::unwrap_used)]

#[path = "../../armt/tests/small/mod.rs"]
mod small;

use std::path::Path;

use armt::config::Alignment;
use armt::engine::optim::{AdamW, Group, Settings};
use armt::engine::{DType, Device, Tensor};
use armt::model::Model;
use armt_lab::train::RunFolder;
use armt_lab::train::run_folder::{Trained, remove_run};
use armt_lab::train::trainer::RunProgress;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct State {
    step: u64,
    loss: f64,
}

fn state(step: u64) -> State {
    State { step, loss: 1.0 / (step as f64 + 3.0) }
}

fn armt(seed: u64) -> Model {
    small::model(small::config("gpt2", 2, small::memories().remove(0), 4, Alignment::Left), seed, &Device::cpu())
}

fn adamw(model: &Model) -> AdamW {
    let params = model.params().into_iter().cloned().collect();
    AdamW::new(vec![Group { params, weight_decay: 0.01, rate: 1.0 }], Settings::default()).unwrap()
}

/// A model and its optimizer after a step, so that no moment is zero.
fn trained(seed: u64) -> (Model, AdamW) {
    let model = armt(seed);
    let mut optimizer = adamw(&model);
    model.params().iter().for_each(|p| p.grad().unwrap().overwrite(&p.value().to_vec::<f32>().unwrap()).unwrap());
    optimizer.step(1e-3).unwrap();
    (model, optimizer)
}

/// A run with a checkpoint at step 1, its folder closed.
fn run_with_a_checkpoint() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    save(&RunFolder::create(dir.path()).unwrap(), 1);
    dir
}

fn save(run: &RunFolder, step: u64) {
    let (model, optimizer) = trained(step);
    run.save_last(&model, &optimizer, None, &state(step)).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for name in names(from) {
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

fn steps_logged(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("log.jsonl")).unwrap();
    text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["step"].clone()).collect()
}

#[test]
fn a_checkpoint_comes_back_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let run = RunFolder::create(&dir.path().join("runs/first")).unwrap();
    let (model, optimizer) = trained(1);
    run.save_last(&model, &optimizer, None, &state(1)).unwrap();
    run.save_best(&model).unwrap();
    assert_eq!(names(run.path()), ["best", "last", "log.jsonl"]);
    assert_eq!(names(&run.last_folder()), ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"]);
    assert_eq!(names(&run.best_folder()), ["config.json", "model.safetensors"]);

    let path = run.path().to_path_buf();
    drop(run);
    let run = RunFolder::open(&path).unwrap();
    assert_eq!(run.load_state::<State>().unwrap(), state(1));
    for folder in [run.last_folder(), run.best_folder()] {
        let loaded = Model::load(&folder, DType::F32, &Device::cpu()).unwrap();
        assert_eq!(loaded.fingerprint().unwrap(), model.fingerprint().unwrap());
    }
    let mut restored = adamw(&model);
    restored.restore(&run.last_folder().join("optimizer.safetensors")).unwrap();
    restored.save(&path.join("again.safetensors")).unwrap();
    assert_eq!(restored.steps(), 1);
    let read = |p: &Path| std::fs::read(p).unwrap();
    // The header's metadata is a map without an order; the numbers are the tail.
    let (first, again) = (read(&run.last_folder().join("optimizer.safetensors")), read(&path.join("again.safetensors")));
    let numbers = 8 * model.parameters();
    assert_eq!(first[first.len() - numbers..], again[again.len() - numbers..]);
}

#[test]
fn a_run_that_was_killed_before_its_first_checkpoint_can_be_begun_again() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("last.new")).unwrap();
    std::fs::write(dir.path().join("last.new/config.json"), "{").unwrap();
    std::fs::write(dir.path().join("log.jsonl"), "").unwrap();
    std::fs::write(dir.path().join("events.out.tfevents.1.armt"), "").unwrap();
    let error = RunFolder::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("begin it anew"), "{error}");
    save(&RunFolder::create(dir.path()).unwrap(), 1);
    assert!(RunFolder::open(dir.path()).is_ok());
    // A run with a checkpoint is one, also if it was killed while it replaced that.
    std::fs::rename(dir.path().join("last"), dir.path().join("last.old")).unwrap();
    assert!(RunFolder::create(dir.path()).is_err());
}

#[test]
fn only_what_a_run_has_written_is_removed_with_it() {
    let run = || {
        let dir = run_with_a_checkpoint();
        std::fs::write(dir.path().join("events.out.tfevents.1.armt"), "").unwrap();
        dir
    };
    let dir = run();
    let open = RunFolder::open(dir.path()).unwrap();
    assert!(remove_run(dir.path()).unwrap_err().to_string().contains("another process"));
    drop(open);
    remove_run(dir.path()).unwrap();
    assert!(!dir.path().exists());
    for foreign in ["thesis.tex", "last/notes.txt", "best/sub/model.safetensors", "photos/1.jpg"] {
        let dir = run();
        let file = dir.path().join(foreign);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "mine").unwrap();
        let error = remove_run(dir.path()).unwrap_err().to_string();
        assert!(error.contains("not removed"), "{error}");
        assert!(file.exists() && dir.path().join("last/model.safetensors").exists() && dir.path().join("log.jsonl").exists());
    }
}

#[test]
fn a_later_checkpoint_replaces_the_earlier_and_leaves_nothing_behind() {
    let dir = run_with_a_checkpoint();
    let run = RunFolder::open(dir.path()).unwrap();
    save(&run, 2);
    run.save_best(&armt(1)).unwrap();
    run.save_best(&armt(2)).unwrap();
    assert_eq!(run.load_state::<State>().unwrap(), state(2));
    let best = Model::load(&run.best_folder(), DType::F32, &Device::cpu()).unwrap();
    assert_eq!(best.fingerprint().unwrap(), armt(2).fingerprint().unwrap());
    assert_eq!(names(dir.path()), ["best", "last", "log.jsonl"]);
}

#[test]
fn a_folder_that_holds_a_run_is_refused_by_name() {
    for held in ["log.jsonl", "last", "last.old", "best"] {
        let dir = tempfile::tempdir().unwrap();
        if held == "log.jsonl" {
            std::fs::write(dir.path().join(held), "{}\n").unwrap();
        } else {
            std::fs::create_dir(dir.path().join(held)).unwrap();
        }
        let error = RunFolder::create(dir.path()).unwrap_err().to_string();
        assert!(error.contains(held) && error.contains(dir.path().to_str().unwrap()), "{error}");
        assert_eq!(names(dir.path()), [held], "nothing is added");
    }
}

#[test]
fn a_run_that_never_began_is_not_in_the_way_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let first = RunFolder::create(dir.path()).unwrap();
    let error = RunFolder::create(dir.path()).unwrap_err().to_string();
    assert!(error.contains("another process"), "{error}");
    drop(first);
    save(&RunFolder::create(dir.path()).unwrap(), 1);
    assert!(RunFolder::create(dir.path()).is_err());
}

#[test]
fn a_folder_without_a_run_or_a_checkpoint_cannot_be_resumed() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().to_path_buf(), dir.path().join("missing")] {
        let error = RunFolder::open(&path).unwrap_err().to_string();
        assert!(error.contains("holds none"), "{error}");
    }
    assert!(names(dir.path()).is_empty());
    drop(RunFolder::create(dir.path()).unwrap());
    let error = RunFolder::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("before its first"), "{error}");
}

#[test]
fn a_run_that_another_is_writing_to_is_refused() {
    let dir = run_with_a_checkpoint();
    let mut first = RunFolder::open(dir.path()).unwrap();
    let refused = || RunFolder::open(dir.path()).unwrap_err().to_string();
    assert!(refused().contains("another process"), "{}", refused());
    first.log(&json!({"step": 5})).unwrap();
    first.truncate_log(1).unwrap();
    assert!(refused().contains("another process"), "the lock outlives a rewriting of the log");
    drop(first);
    RunFolder::open(dir.path()).unwrap();
}

/// Every state that a crash within `save_last` can leave, and the step that must come back.
#[test]
fn a_crash_at_any_moment_leaves_a_whole_checkpoint() {
    let later = run_with_a_checkpoint();
    save(&RunFolder::open(later.path()).unwrap(), 2);
    let later = later.path().join("last");
    let half = |to: &Path| {
        copy(&later, to);
        std::fs::remove_file(to.join("state.json")).unwrap();
        std::fs::write(to.join("model.safetensors"), "half").unwrap();
    };
    let moments: [(&str, u64, &dyn Fn(&Path)); 5] = [
        ("writing", 1, &|dir| half(&dir.join("last.new"))),
        ("written, not renamed", 1, &|dir| copy(&later, &dir.join("last.new"))),
        ("between the renames", 2, &|dir| {
            copy(&later, &dir.join("last.new"));
            std::fs::rename(dir.join("last"), dir.join("last.old")).unwrap();
        }),
        ("renamed, the old one being removed", 2, &|dir| {
            std::fs::rename(dir.join("last"), dir.join("last.old")).unwrap();
            std::fs::remove_file(dir.join("last.old/state.json")).unwrap();
            copy(&later, &dir.join("last"));
        }),
        ("only the old one is left", 1, &|dir| std::fs::rename(dir.join("last"), dir.join("last.old")).unwrap()),
    ];
    for (moment, step, crash) in moments {
        let dir = run_with_a_checkpoint();
        crash(dir.path());
        let run = RunFolder::open(dir.path()).unwrap();
        assert_eq!(run.load_state::<State>().unwrap(), state(step), "{moment}");
        let model = Model::load(&run.last_folder(), DType::F32, &Device::cpu()).unwrap();
        assert_eq!(model.fingerprint().unwrap(), trained(step).0.fingerprint().unwrap(), "{moment}");
        assert_eq!(names(dir.path()), ["last", "log.jsonl"], "{moment}");
        save(&run, 3);
        assert_eq!(run.load_state::<State>().unwrap(), state(3), "{moment}");
    }
}

#[test]
fn a_crash_within_the_first_checkpoint_leaves_none() {
    let whole = run_with_a_checkpoint();
    let dir = tempfile::tempdir().unwrap();
    drop(RunFolder::create(dir.path()).unwrap());
    copy(&whole.path().join("last"), &dir.path().join("last.new"));
    assert!(RunFolder::open(dir.path()).unwrap_err().to_string().contains("before its first"));
}

#[test]
fn weights_that_are_not_finite_do_not_replace_a_checkpoint() {
    let dir = run_with_a_checkpoint();
    let run = RunFolder::open(dir.path()).unwrap();
    let (model, optimizer) = trained(2);
    let embed = model.param("embed").unwrap().clone();
    let mut values = embed.value().to_vec::<f32>().unwrap();
    values[7] = f32::NAN;
    embed.set(&Tensor::from_slice(&values, embed.value().shape(), &Device::cpu()).unwrap()).unwrap();
    let error = run.save_last(&model, &optimizer, None, &state(2)).unwrap_err().to_string();
    assert!(error.contains("wte") && error.contains("NaN"), "{error}");
    assert!(run.save_best(&model).is_err());
    assert_eq!(run.load_state::<State>().unwrap(), state(1));
    assert_eq!(names(dir.path()), ["last", "log.jsonl"]);
}

#[test]
fn a_damaged_state_is_refused_by_name() {
    let dir = run_with_a_checkpoint();
    let run = RunFolder::open(dir.path()).unwrap();
    let path = run.last_folder().join("state.json");
    let whole = std::fs::read(&path).unwrap();
    for damaged in [&whole[..whole.len() / 2], &b""[..], b"\xff\xfe\0", b"{\"step\": \"one\", \"loss\": 1}", b"{\"loss\": 1}"] {
        std::fs::write(&path, damaged).unwrap();
        let error = run.load_state::<State>().unwrap_err().to_string();
        assert!(error.contains("state.json") && error.contains("expected the state of a run"), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(run.load_state::<State>().unwrap_err().to_string().contains("state.json"));
}

#[test]
fn the_log_of_a_resumed_run_has_no_doubles() {
    let dir = run_with_a_checkpoint();
    let mut run = RunFolder::open(dir.path()).unwrap();
    run.log(&json!({"run": "begins"})).unwrap();
    (1..=4).for_each(|step| run.log(&json!({"step": step, "text": "a\nb"})).unwrap());
    drop(run);
    // The process died in the middle of a line.
    let path = dir.path().join("log.jsonl");
    let text = std::fs::read_to_string(&path).unwrap() + "{\"step\": 5, \"lo";
    std::fs::write(&path, text).unwrap();

    let mut run = RunFolder::open(dir.path()).unwrap();
    run.truncate_log(2).unwrap();
    assert_eq!(steps_logged(dir.path()), [Value::Null, json!(1), json!(2)]);
    run.log(&json!({"step": 3})).unwrap();
    assert_eq!(steps_logged(dir.path()), [Value::Null, json!(1), json!(2), json!(3)]);
    run.truncate_log(9).unwrap();
    assert_eq!(steps_logged(dir.path()).len(), 4);
}

#[test]
fn a_damaged_log_is_refused_by_its_line_and_kept() {
    let dir = run_with_a_checkpoint();
    let path = dir.path().join("log.jsonl");
    let text = "{\"step\": 1}\n{\"step\"\n{\"step\": 3}\n";
    std::fs::write(&path, text).unwrap();
    let mut run = RunFolder::open(dir.path()).unwrap();
    let error = run.truncate_log(1).unwrap_err().to_string();
    assert!(error.contains("log.jsonl") && error.contains("line 2"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn pairs_and_steps_are_the_most_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let best = dir.path().join("best");
    std::fs::create_dir(&best).unwrap();
    assert_eq!(Trained::of(&best), Trained::default());
    std::fs::write(dir.path().join("log.jsonl"), "{\"pairs\":2}\n{\"pairs\":50,\"step\":1}\n{\"step\":2}\nhalf a li").unwrap();
    assert_eq!(Trained::of(&best), Trained { pairs: Some(50), steps: Some(2) });
    assert_eq!(Trained::of(&dir.path().join("none")), Trained::default());
}

/// A run that an earlier version left can be gone on with: its `state.json` has these keys.
#[test]
fn the_state_of_a_run_is_read_as_it_always_was_written() {
    let old = r#"{"stage": 2, "step": 150, "total": 900, "best": 0.75, "waited": 1}"#;
    let progress: RunProgress = serde_json::from_str(old).unwrap();
    let RunProgress { stage, step, total, best, waited, due, over, .. } = progress;
    assert_eq!((stage, step, total, best, waited, due, over), (2, 150, 900, 0.75, 1, false, false));
    assert_eq!(serde_json::to_value(progress).unwrap(), serde_json::from_str::<Value>(old).unwrap());
}
