//! Training: an interrupted and resumed run gives the numbers of an unbroken one, and trouble is named.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;

use armt::config::Config;
use armt::engine::{DType, Device};
use armt::model::Model;
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Ending, Event, train};
use serde_json::{Value, json};

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
fn run(path: &Path, resume: bool, most: u64, changes: &[String]) -> armt_lab::Result<Ending> {
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
    let mut logs = Vec::new();
    // From an empty memory, and some texts from the memory of those before.
    for (name, changes) in [("empty", vec![]), ("carried", vec!["stage.1.carry=0.6".to_string()])] {
        let whole = dir.path().join(format!("{name}-whole"));
        assert!(matches!(run(&whole, false, u64::MAX, &changes).unwrap(), Ending::Finished { .. }));
        assert_eq!(log(&whole).iter().filter(|l| l.get("loss").is_some()).count(), 12);
        // Broken within a stage, at a validation, at a stage's end, and within the second stage.
        for at in [2, 3, 7, 9] {
            let broken = dir.path().join(format!("{name}-broken-{at}"));
            assert_eq!(run(&broken, false, at, &changes).unwrap(), Ending::Stopped, "{at}");
            assert!(matches!(run(&broken, true, u64::MAX, &changes).unwrap(), Ending::Finished { .. }));
            for file in ["last/model.safetensors", "best/model.safetensors"] {
                let read = |run: &Path| std::fs::read(run.join(file)).unwrap();
                assert!(read(&whole) == read(&broken), "{file} differs after a break at {at}");
            }
            assert_eq!(log(&whole), log(&broken), "broken at {at}");
        }
        logs.push(log(&whole));
    }
    assert_ne!(logs[0], logs[1]);
}

#[test]
fn pairs_that_share_a_segment_are_read_in_fewer_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let together = |n: usize| vec![format!("stage.1.together={n}")];
    let recipe = |n| Recipe::parse(RECIPE, &together(n)).unwrap();
    let base: Config = serde_json::from_value(json!({"model_type": "armt", "segment_size": 1, "memory": {"kind": "none"},
        "backbone": {"model_type": "gpt2"}}))
    .unwrap();
    assert_eq!([1, 2, 3].map(|n| recipe(n).config(0, &base).segment_size), [4, 8, 12]);
    assert_eq!(recipe(3).config(1, &base).segment_size, 5, "the other stage stays as it is");
    let all = Recipe::parse(RECIPE, &["task.together=3".into(), "stage.1.together=2".into()]).unwrap();
    assert_eq!([0, 1].map(|stage| all.config(stage, &base).segment_size), [8, 15]);
    // Two pairs and a question: two segments, the second of them not full, and one.
    for n in [2, 3] {
        let path = dir.path().join(n.to_string());
        assert!(matches!(run(&path, false, u64::MAX, &together(n)).unwrap(), Ending::Finished { .. }));
    }
    let refused = run(&dir.path().join("none"), false, u64::MAX, &together(0)).unwrap_err().to_string();
    assert!(refused.contains("together"), "{refused}");
}

#[test]
fn a_stage_that_gains_nothing_ends_early_unless_it_is_to_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let steps = |name: &str, more: &[&str]| {
        let path = dir.path().join(name);
        let changes = ["optimizer.lr=1e-12", "eval.every=1", "eval.patience=2"].iter().chain(more).map(|c| c.to_string());
        run(&path, false, u64::MAX, &changes.collect::<Vec<_>>()).unwrap();
        [1, 2].map(|stage| log(&path).iter().filter(|l| l.get("loss").is_some() && l["stage"] == stage).count())
    };
    let [first, second] = steps("impatient", &[]);
    assert!(first <= 3 && second <= 3, "{first} and {second} steps");
    assert_eq!(steps("patient", &["stage.1.patience=0"]), [7, second]);
}

/// Runs until the `n`th validation is told.
fn run_to_validation(path: &Path, n: usize, changes: &[String]) -> Ending {
    let recipe = Recipe::parse(RECIPE, changes).unwrap();
    let (mut folder, mut seen) = (RunFolder::create(path).unwrap(), 0);
    let ending = train(&recipe, &mut folder, false, (DType::F32, &Device::cpu()), &mut |event| {
        seen += usize::from(matches!(event, Event::Validation { .. }));
        if seen >= n { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    ending.unwrap()
}

#[test]
fn the_end_of_a_stage_is_kept_whatever_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    for (name, changes) in [
        ("until", vec!["stage.1.until=0.0".to_string()]),
        ("patience", ["optimizer.lr=1e-12", "eval.every=1", "eval.patience=2"].map(String::from).to_vec()),
        ("last", vec![]),
    ] {
        let whole = dir.path().join(format!("{name}-whole"));
        assert!(matches!(run(&whole, false, u64::MAX, &changes).unwrap(), Ending::Finished { .. }));
        let validations = log(&whole).iter().filter(|l| l.get("exact_match").is_some()).count();
        for n in 1..=validations {
            let broken = dir.path().join(format!("{name}-{n}"));
            assert_eq!(run_to_validation(&broken, n, &changes), Ending::Stopped, "{name} {n}");
            assert!(matches!(run(&broken, true, u64::MAX, &changes).unwrap(), Ending::Finished { .. }));
            assert_eq!(log(&whole), log(&broken), "{name}, stopped at validation {n}");
            for file in ["last/model.safetensors", "best/model.safetensors"] {
                let read = |run: &Path| std::fs::read(run.join(file)).unwrap();
                assert!(read(&whole) == read(&broken), "{name}: {file} differs after a stop at validation {n}");
            }
        }
        // A run that has finished is finished.
        let before = log(&whole);
        assert!(matches!(run(&whole, true, u64::MAX, &changes).unwrap(), Ending::Finished { .. }));
        assert_eq!(log(&whole), before, "{name}");
    }
}

#[test]
fn a_stop_within_a_validation_leaves_it_to_be_made() {
    let dir = tempfile::tempdir().unwrap();
    let changes = ["eval.batch=3".to_string()];
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    run(&whole, false, u64::MAX, &changes).unwrap();
    let recipe = Recipe::parse(RECIPE, &changes).unwrap();
    let mut folder = RunFolder::create(&broken).unwrap();
    let ending = train(&recipe, &mut folder, false, (DType::F32, &Device::cpu()), &mut |event| match event {
        Event::Judged { texts: 6, of: 8 } => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    assert_eq!(ending.unwrap(), Ending::Stopped);
    drop(folder);
    run(&broken, true, u64::MAX, &changes).unwrap();
    assert_eq!(log(&whole), log(&broken));
}

#[test]
fn a_run_goes_on_by_its_own_recipe_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    run(&path, false, 2, &[]).unwrap();
    for (change, key) in [
        ("seed=6", "seed: expected 5"),
        ("optimizer.lr=1e-3", "optimizer.lr: expected 0.0003, with which the run was begun"),
        ("task.setting=remember", "task.setting"),
        ("stage.2.steps=6", "stage.2.steps: expected 5"),
        ("model.width=32", "model.fresh.width"),
        ("stages=1", "stage.2."),
        // Keys that have no value unless a recipe says one, and that the run does not know.
        ("stage.1.lr=1e-3", "stage.1.lr: expected no such key"),
        ("stage.1.patience=1", "stage.1.patience"),
        ("memory.write=projected", "memory.write"),
        ("memory.memory_layers=[0]", "memory.memory_layers.1"),
        ("stage.1.together=2", "stage.1.together"),
    ] {
        let error = run(&path, true, u64::MAX, &[change.to_string()]).err().unwrap().to_string();
        assert!(error.contains(key), "{change}: {error}");
    }
    // A run of an earlier version does not know the keys that came later: they say what it did.
    let file = path.join("last/recipe.json");
    let mut begun: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for key in ["optimizer.skip", "train.only", "eval.gated", "backprop.sparse", "backprop.background"] {
        assert!(begun.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    std::fs::write(&file, begun.to_string()).unwrap();
    let error = run(&path, true, u64::MAX, &["backprop.sparse=0.1".into()]).err().unwrap().to_string();
    assert!(error.contains("backprop.sparse: expected no such key"), "{error}");
    // What is said again changes nothing.
    let same = ["optimizer.lr=3e-4", "eval.patience=0"].map(String::from);
    assert!(matches!(run(&path, true, u64::MAX, &same).unwrap(), Ending::Finished { .. }));
}

#[test]
fn a_state_that_no_run_can_be_in_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    run(&path, false, 2, &[]).unwrap();
    let file = path.join("last/state.json");
    let good: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for (key, value) in [
        ("stage", json!(127)),
        ("stage", json!(1)),
        ("step", json!(8)),
        ("step", json!(1)),
        ("total", json!(1)),
        ("total", json!(u64::MAX)),
        ("best", json!(1.5)),
        ("best", json!(-1)),
        ("waited", json!(3)),
        ("stage", json!(-1)),
        ("more", json!(0)),
    ] {
        let mut state = good.clone();
        state[key] = value.clone();
        std::fs::write(&file, state.to_string()).unwrap();
        let error = run(&path, true, u64::MAX, &[]).err().map(|e| e.to_string());
        assert!(error.as_ref().is_some_and(|e| e.contains("last/")), "{key} {value}: {error:?}");
    }
    std::fs::write(&file, good.to_string()).unwrap();
    assert!(matches!(run(&path, true, u64::MAX, &[]).unwrap(), Ending::Finished { .. }));
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

/// Writes a GPT-2 with a memory, as `armt convert` does.
fn write_model(folder: &Path) -> Model {
    let backbone = json!({"model_type": "gpt2", "vocab_size": 128, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2});
    let memory = json!({"kind": "associative", "tokens": 2, "d_mem": 4});
    let config = json!({"model_type": "armt", "segment_size": 8, "memory": memory, "backbone": backbone});
    let config: Config = serde_json::from_value(config).unwrap();
    let model = Model::fresh(config, 1, DType::F32, &Device::cpu()).unwrap();
    model.save(folder, DType::BF16).unwrap();
    model
}

/// Changes of the recipe to begin from a folder.
fn from(folder: &Path) -> Vec<String> {
    vec!["model={}".into(), format!("model.from={}", folder.display())]
}

#[test]
fn a_run_from_a_model_folder_is_resumed_without_it_to_the_same_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    write_model(&folder);
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    assert!(matches!(run(&whole, false, u64::MAX, &from(&folder)).unwrap(), Ending::Finished { .. }));
    assert_eq!(run(&broken, false, 9, &from(&folder)).unwrap(), Ending::Stopped);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(matches!(run(&broken, true, u64::MAX, &from(&folder)).unwrap(), Ending::Finished { .. }));
    assert_eq!(log(&whole), log(&broken));
    // It is the folder's GPT-2 with the last stage's segments; and a run's best model is one to begin from.
    let model = Model::load(&whole.join("best"), DType::F32, &Device::cpu()).unwrap();
    assert_eq!((model.config().segment_size, model.config().backbone["n_embd"].as_u64()), (5, Some(16)));
    for again in [whole.clone(), whole.join("best")] {
        let changes = [from(&again), ["optimizer.lr=1e-30", "optimizer.weight_decay=0.0"].map(String::from).to_vec()].concat();
        let out = tempfile::tempdir().unwrap();
        assert_eq!(run(out.path(), false, 1, &changes).unwrap(), Ending::Stopped);
        let after = Model::load(&out.path().join("last"), DType::F32, &Device::cpu()).unwrap();
        for (a, b) in model.params().iter().zip(after.params()) {
            assert!(a.value().to_vec::<f32>().unwrap() == b.value().to_vec::<f32>().unwrap(), "{} changed", a.name());
        }
    }
}

#[test]
fn a_run_writes_the_memory_of_a_model_that_it_begins_from_in_its_own_way() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, out) = (dir.path().join("model"), dir.path().join("run"));
    write_model(&folder);
    let open = |folder: &Path| Model::load(folder, DType::F32, &Device::cpu()).unwrap();
    let model = open(&folder);
    let projected = |more: &[&str]| {
        [&from(&folder), &["memory.write=projected".to_string()][..], &more.iter().map(|c| c.to_string()).collect::<Vec<_>>()]
            .concat()
    };
    let error = run(&out, false, 1, &projected(&["train.only=memory"])).err().unwrap().to_string();
    assert!(error.contains("memory.write: expected that of the model in"), "{error}");
    assert_eq!(run(&out, false, 1, &projected(&["optimizer.lr=1e-30", "optimizer.weight_decay=0.0"])).unwrap(), Ending::Stopped);
    let after = open(&out.join("last"));
    assert_eq!(after.config().memory.keys()["write"], "projected");
    for (a, b) in model.params().iter().zip(after.params()) {
        assert!(a.value().to_vec::<f32>().unwrap() == b.value().to_vec::<f32>().unwrap(), "{} changed", a.name());
    }
    // From there on it is the run's own.
    assert!(matches!(
        run(&out, true, u64::MAX, &projected(&["optimizer.lr=1e-30", "optimizer.weight_decay=0.0"])).unwrap(),
        Ending::Finished { .. }
    ));
    let error = run(&out, true, u64::MAX, &from(&folder)).err().unwrap().to_string();
    assert!(error.contains("memory.write"), "{error}");
}

#[test]
fn a_folder_that_a_run_cannot_begin_from_is_refused_by_name_and_leaves_no_run() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, out) = (dir.path().join("model"), dir.path().join("run"));
    let refused = |changes: &[&str], words: &[&str]| {
        let changes = [from(&folder), changes.iter().map(|c| c.to_string()).collect()].concat();
        let error = run(&out, false, 1, &changes).err().unwrap().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    };
    refused(&[], &["model: expected the model to begin from", "found nothing"]);
    let model = write_model(&folder);
    refused(&["memory.tokens=3"], &["memory.tokens: expected 2, as the model in", "model has", "got 3"]);
    refused(&["memory={ kind = \"rmt\", tokens = 2 }"], &["memory.kind: expected \"associative\"", "got \"rmt\""]);
    refused(&["stage.2.key_size=15"], &["stage 2: segment_size: expected at most 16 positions", "got 20"]);
    std::fs::write(folder.join("config.json"), model.config().backbone.to_string()).unwrap();
    refused(&[], &["config.json: expected a model with a memory, got a plain gpt2", "armt convert"]);
    let mut small = serde_json::to_value(model.config()).unwrap();
    small["backbone"]["vocab_size"] = 100.into();
    std::fs::write(folder.join("config.json"), small.to_string()).unwrap();
    refused(&[], &["model.from: expected a model of more than 102 tokens, got 100"]);
    small["backbone"]["vocab_size"] = 130.into();
    std::fs::write(folder.join("config.json"), small.to_string()).unwrap();
    refused(&[], &["wte.weight should be [130, 16], but is [128, 16]"]);
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    refused(&[], &["model.safetensors"]);
    write_model(&folder);
    assert_eq!(run(&out, false, 1, &from(&folder)).unwrap(), Ending::Stopped, "what was refused is not in the way");
}

#[test]
fn every_recipe_of_the_project_can_be_read_and_the_papers_fits_gpt2() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let recipes: Vec<_> = std::fs::read_dir(root.join("recipes")).unwrap().map(|entry| entry.unwrap().path()).collect();
    for path in recipes.iter().filter(|path| path.extension().is_some_and(|e| e == "toml")) {
        Recipe::load(path, &[]).unwrap();
    }
    let recipe = Recipe::load(&root.join("recipes/babilong-qa1-gpt2.toml"), &[]).unwrap();
    let backbone: Value = serde_json::from_slice(&std::fs::read(root.join("data/gpt2/config.json")).unwrap()).unwrap();
    let config = json!({"model_type": "armt", "segment_size": 512, "memory": recipe.memory, "backbone": backbone});
    let stages = recipe.configs(&serde_json::from_value(config).unwrap()).unwrap();
    assert!(stages.len() == 7 && stages.iter().all(|config| config.segment_size == 512));
}
