//! Adapters in training: what a run writes beside its models is all of what it learned, and interrupted runs give the numbers of unbroken ones.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;

use armt::adapter::Adapter;
use armt::engine::{DType, Device};
use armt::model::Model;
use armt::weights::Tensors;
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::run_folder::remove_run;
use armt_lab::train::trainer::{Ending, Event, train};
use serde_json::{Value, json};

const RECIPE: &str = r#"
seed = 5
[task]
setting = "rewrite"
[eval]
every = 3
samples = 8
[[stage]]
pairs = 2
batch = 4
steps = 5
until = "never"
[[stage]]
pairs = 4
key_size = 2
batch = 4
accumulate = 2
steps = 4
until = "never"
"#;

const LORA: &str = "train.lora={ rank = 2, alpha = 4, targets = [\"q_proj\", \"v_proj\", \"down_proj\"] }";

/// A model to begin from, of segments that no stage has.
fn base(folder: &Path) {
    let backbone = json!({"model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2});
    let memory = json!({"kind": "associative", "tokens": 2, "d_mem": 4});
    let config = json!({"model_type": "armt", "segment_size": 9, "memory": memory, "backbone": backbone});
    Model::fresh(serde_json::from_value(config).unwrap(), 7, DType::F32, &Device::cpu()).unwrap().save(folder, DType::F32).unwrap();
}

/// Runs to the end, or until so many steps were made.
fn run(base: &Path, out: &Path, resume: bool, most: u64, changes: &[&str]) -> armt_lab::Result<Ending> {
    let from = format!("model.from={}", base.display());
    let changes: Vec<String> = changes.iter().map(|c| c.to_string()).chain([from]).collect();
    let recipe = Recipe::parse(RECIPE, &changes)?;
    let mut folder = if resume { RunFolder::open(out)? } else { RunFolder::create(out)? };
    train(&recipe, &mut folder, resume, (DType::F32, &Device::cpu()), &mut |event| match event {
        Event::Step { progress, .. } if progress.total >= most => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })
}

/// The losses of a run's steps, and its validations.
fn log(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path.join("log.jsonl")).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines.map(|l| json!([l["step"], l["loss"], l["exact_match"]])).collect()
}

fn first_loss(path: &Path) -> f64 {
    log(path)[0][1].as_f64().unwrap()
}

#[test]
fn an_adapter_on_its_base_is_the_best_model_of_its_run_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("base");
    base(&from);
    let before = Tensors::open(&from).unwrap();
    for (name, change) in [("lora", LORA), ("memory", "train.only=memory")] {
        let out = dir.path().join(name);
        run(&from, &out, false, u64::MAX, &[change]).unwrap();
        let adapted = Adapter::open(&out.join("adapter")).unwrap().load(&from, DType::F32, &Device::cpu()).unwrap();
        let best = Model::load(&out.join("best"), DType::F32, &Device::cpu()).unwrap();
        assert_eq!(adapted.config(), best.config(), "{name}");
        assert_eq!(adapted.fingerprint().unwrap(), best.fingerprint().unwrap(), "{name}");
        // What is no target and no memory stays, and the rest has learned.
        let after = Tensors::open(&out.join("best")).unwrap();
        let mut names: Vec<&str> = before.names().collect();
        names.sort_unstable();
        let changed: Vec<&str> =
            names.into_iter().filter(|n| before.find(&[*n]).unwrap().2 != after.find(&[*n]).unwrap().2).collect();
        let of_memory = |n: &&&str| n.contains("W_m") || n.contains("memory_cell.memory");
        let of_lora = |n: &&&str| ["q_proj", "v_proj", "down_proj"].iter().any(|t| n.contains(t));
        assert!(changed.iter().all(|n| of_memory(&n) || (name == "lora" && of_lora(&n))), "{name}: {changed:?}");
        assert!(changed.iter().filter(of_memory).count() > 4, "{name}: {changed:?}");
        assert_eq!(changed.iter().filter(of_lora).count(), if name == "lora" { 6 } else { 0 }, "{name}: {changed:?}");
        remove_run(&out).unwrap();
        assert!(!out.exists());
    }
}

#[test]
fn a_resumed_run_of_an_adapter_gives_the_numbers_of_an_unbroken_one_without_its_base() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("base");
    for (name, change) in [("lora", LORA), ("memory", "train.only=memory")] {
        base(&from);
        let whole = dir.path().join(format!("{name}-whole"));
        run(&from, &whole, false, u64::MAX, &[change]).unwrap();
        assert_eq!(log(&whole).iter().filter(|l| !l[1].is_null()).count(), 9);
        // Broken at the first step, within a stage, at a stage's end, and within the second stage.
        for at in [1, 4, 5, 7] {
            base(&from);
            let broken = dir.path().join(format!("{name}-broken-{at}"));
            assert_eq!(run(&from, &broken, false, at, &[change]).unwrap(), Ending::Stopped, "{at}");
            std::fs::remove_dir_all(&from).unwrap();
            assert!(matches!(run(&from, &broken, true, u64::MAX, &[change]).unwrap(), Ending::Finished { .. }));
            assert_eq!(log(&whole), log(&broken), "{name} broken at {at}");
            let tensors = "adapter_model.safetensors";
            for file in ["last/model.safetensors".into(), format!("last/{tensors}"), format!("adapter/{tensors}")] {
                let read = |run: &Path| std::fs::read(run.join(&file)).unwrap();
                assert!(read(&whole) == read(&broken), "{file} of {name} differs after a break at {at}");
            }
        }
    }
}

#[test]
fn a_run_begins_with_the_adapter_that_it_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let [from, first, other] = ["base", "first", "other"].map(|name| dir.path().join(name));
    base(&from);
    run(&from, &first, false, u64::MAX, &[LORA, "optimizer.lr=1e-2"]).unwrap();
    let given = format!("train.adapter={}", first.join("adapter").display());
    let loss = |name: &str, from: &Path, changes: &[&str]| {
        let out = dir.path().join(name);
        run(from, &out, false, 1, changes).unwrap();
        first_loss(&out)
    };
    // The adapter on its base, all of it trained, and the best model itself begin with the same loss; the base alone does not.
    let wanted = loss("best", &first.join("best"), &[]);
    assert_eq!(loss("goes-on", &from, &[LORA, &given]), wanted);
    assert_eq!(loss("whole", &from, &[&given]), wanted);
    assert_ne!(loss("base-alone", &from, &[LORA]), wanted);
    // The adapter that goes on is still one of the first base.
    let goes_on = Adapter::open(&dir.path().join("goes-on/last")).unwrap();
    assert_eq!(goes_on.base(), Adapter::open(&first.join("adapter")).unwrap().base());

    let refused = |name: &str, from: &Path, changes: &[&str]| {
        let error = run(from, &dir.path().join(name), false, 1, changes).unwrap_err().to_string();
        assert!(!dir.path().join(name).join("last").exists(), "{error}");
        error
    };
    let said = refused("another-rank", &from, &[&LORA.replace("rank = 2", "rank = 3"), &given]);
    assert!(
        said.contains("train.lora: expected the adapter's (rank 2, alpha 4, targets q_proj, v_proj, down_proj), got rank 3"),
        "{said}"
    );
    let said = refused("memory-alone", &from, &["train.only=memory", &given]);
    assert!(said.contains("train.lora: expected the adapter's"), "{said}");
    base(&other);
    let config = std::fs::read_to_string(other.join("config.json")).unwrap();
    std::fs::write(other.join("config.json"), config.replace("\"segment_size\": 9", "\"segment_size\": 10")).unwrap();
    let said = refused("another-base", &other, &[LORA, &given]);
    assert!(said.contains("an adapter of base") && said.contains("the model is other"), "{said}");
}

#[test]
fn what_cannot_be_adapted_is_refused_by_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("base");
    base(&from);
    let refused = |changes: &[&str]| run(&from, &dir.path().join("run"), false, 1, changes).unwrap_err().to_string();
    let said = refused(&["train.lora={ rank = 2, alpha = 4, targets = [\"c_attn\"] }"]);
    assert!(said.contains("lora.targets") && said.contains("q_proj") && said.contains("got c_attn"), "{said}");
    assert!(refused(&["train.lora={ rank = 0, alpha = 4, targets = [\"q_proj\"] }"]).contains("lora.rank: expected at least 1"));
    assert!(refused(&["train.lora={ rank = 2, alpha = 4, targets = [] }"]).contains("lora.targets"));
    let fresh = "[task]\nsetting = \"rewrite\"\n[memory]\nkind = \"associative\"\ntokens = 2\nd_mem = 4\n[[stage]]\npairs = 2\nbatch = 4\nsteps = 5";
    for (change, key) in [(LORA, "train.lora"), ("train.adapter=somewhere", "train.adapter")] {
        let said = Recipe::parse(fresh, &[change.to_string()]).unwrap_err().to_string();
        assert!(said.contains(key) && said.contains("model.from"), "{said}");
    }
}
