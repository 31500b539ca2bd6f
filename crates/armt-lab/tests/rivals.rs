//! The paper's other models train, are saved, resumed, asked and judged like ARMT.

#![allow(clippy::unwrap_used)]

#[path = "toys/lives.rs"]
mod lives;

use std::ops::ControlFlow;
use std::path::Path;

use armt::engine::{DType, Device};
use armt_lab::eval::retrieval::curve;
use armt_lab::tasks::retrieval::{Retrieval, SYMBOLS, Setting};
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Event, train};
use lives::{STAGES, lives_here};

const REWRITE: &str = "seed = 3\n[task]\nsetting = \"rewrite\"\n";

#[test]
fn mamba_lives_here() {
    lives_here(&format!("{REWRITE}[model]\nkind = \"mamba\"\nlayers = 2\nwidth = 16\nstate = 4\n{STAGES}"), "mamba");
}

#[test]
fn rwkv5_lives_here() {
    lives_here(&format!("{REWRITE}[model]\nkind = \"rwkv5\"\nlayers = 2\nwidth = 16\nhead = 8\n{STAGES}"), "rwkv5");
}

#[test]
fn rmt_r_lives_here() {
    let model = "[model]\nlayers = 2\nwidth = 16\nheads = 2\ninner = 16\n[memory]\nkind = \"rmt_r\"\ntokens = 2\n";
    lives_here(&format!("{REWRITE}{model}{STAGES}"), "rmt_r");
}

/// The losses of the first and the last steps of a training.
fn losses(recipe: &str) -> (f32, f32) {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::parse(recipe, &[]).unwrap();
    let (mut folder, mut all) = (RunFolder::create(&place.path().join("run")).unwrap(), Vec::new());
    train(&recipe, &mut folder, false, (DType::F32, &Device::cpu()), &mut |event| {
        if let Event::Step { loss, .. } = event {
            all.push(*loss);
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    (mean(&all[..10]), mean(&all[all.len() - 10..]))
}

/// The value of one pair is copied from one segment to the next: learned only where gradients go back through the state.
#[test]
fn they_learn_through_the_state() {
    let stages = "[optimizer]\nlr = 3e-3\n[eval]\nevery = 1000\nsamples = 8\n[[stage]]\npairs = 1\nbatch = 32\nsteps = 150\nuntil = \"never\"\n";
    for model in [
        "[model]\nkind = \"mamba\"\nlayers = 2\nwidth = 32\nstate = 8\n",
        "[model]\nkind = \"rwkv5\"\nlayers = 2\nwidth = 32\nhead = 16\n",
        "[model]\nlayers = 2\nwidth = 32\nheads = 2\ninner = 32\n[memory]\nkind = \"rmt_r\"\ntokens = 2\n",
    ] {
        let (first, last) = losses(&format!("{REWRITE}{model}{stages}"));
        assert!(last < 0.9 * first, "{model}: the loss goes from {first} to {last}");
    }
}

/// A segment may be a whole text: the state and its gradient go on, so that nothing but time depends on it.
#[test]
fn pairs_that_share_a_segment_change_no_loss_and_no_judgement() {
    let stages = "[eval]\nevery = 1000\nsamples = 8\n[[stage]]\npairs = 3\nbatch = 8\nsteps = 20\nuntil = \"never\"\n";
    for model in ["kind = \"mamba\"\nlayers = 2\nwidth = 32\nstate = 8\n", "kind = \"rwkv5\"\nlayers = 2\nwidth = 32\nhead = 16\n"]
    {
        let told = [1, 2, 512].map(|together| {
            let recipe = format!("seed = 3\n[task]\nsetting = \"rewrite\"\ntogether = {together}\n[model]\n{model}{stages}");
            let place = tempfile::tempdir().unwrap();
            let mut folder = RunFolder::create(&place.path().join("run")).unwrap();
            let recipe = Recipe::parse(&recipe, &[]).unwrap();
            let (mut losses, cpu) = (Vec::new(), Device::cpu());
            train(&recipe, &mut folder, false, (DType::F32, &cpu), &mut |event| {
                if let Event::Step { loss, .. } = event {
                    losses.push(*loss);
                }
                ControlFlow::Continue(())
            })
            .unwrap();
            let model = armt::Model::load(&folder.best_folder(), DType::F32, &cpu).unwrap();
            let task = Retrieval { setting: Setting::Rewrite, key_size: 1, value_size: 1, symbols: SYMBOLS };
            assert_eq!(model.config().segment_size, together * task.segment_size());
            let judged = curve(&model, task, &[1, 30], 40, 40, 1, &mut |_| ControlFlow::Continue(())).unwrap();
            (losses, judged.iter().map(|point| point.exact_match).collect::<Vec<_>>())
        });
        for (losses, judged) in &told[1..] {
            let apart = losses.iter().zip(&told[0].0).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(losses.len() == 20 && apart < 1e-4, "{model}: losses {apart} apart");
            assert_eq!(judged, &told[0].1, "{model}");
        }
    }
}

#[test]
fn mistakes_of_a_recipe_are_named() {
    let refused = |model: &str| Recipe::parse(&format!("{REWRITE}{model}{STAGES}"), &[]).err().unwrap().to_string();
    for (model, told) in [
        ("[model]\nkind = \"mamba2\"\n", &["Mamba-2", "mamba, rwkv5"][..]),
        ("[model]\nkind = \"mamba\"\nstat = 4\n", &["stat", "state"]),
        ("[model]\nkind = \"rwkv5\"\nwidth = 12\nhead = 8\n", &["head_size", "12"]),
        ("[model]\nkind = \"mamba\"\nlayers = 0\n", &["num_hidden_layers"]),
        ("[model]\nkind = \"mamba\"\n[memory]\nkind = \"rmt\"\ntokens = 2\n", &["memory.kind", "a state of its own"]),
        ("[model]\nkind = \"mamba\"\nfrom = \"folder\"\n", &["from"]),
    ] {
        let said = refused(model);
        assert!(told.iter().all(|part| said.contains(part)), "{model}: {said}");
    }
}

#[test]
fn the_recipes_have_models_of_the_size_they_say() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    for (setting, name, numbers) in ["remember", "rewrite"]
        .iter()
        .flat_map(|s| [("mamba", 35_840), ("mamba-large", 101_376), ("rwkv5", 33_792)].map(|(name, numbers)| (s, name, numbers)))
    {
        let recipe = Recipe::load(&root.join(format!("{setting}-{name}.toml")), &[]).unwrap();
        let config = recipe.config(0, &recipe.fresh(128, 0).unwrap());
        let model = armt::Model::fresh(config, 0, DType::F32, &Device::cpu()).unwrap();
        assert_eq!(model.empty(1).unwrap().bytes() / 4, numbers, "{setting}-{name}");
    }
    let recipe = Recipe::load(&root.join("remember-rmt-r.toml"), &[]).unwrap();
    let config = recipe.config(0, &recipe.fresh(128, 0).unwrap());
    let model = armt::Model::fresh(config, 0, DType::F32, &Device::cpu()).unwrap();
    assert_eq!(model.recurrence().layout().growth(DType::F32) / 4, 32 * 128);
}
