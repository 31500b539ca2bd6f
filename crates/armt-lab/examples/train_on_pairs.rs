//! Trains a small ARMT to remember pairs and asks it about more of them than it was trained on, in a few lines:
//! `cargo run --release -p armt-lab --example train_on_pairs`. Less than half a minute on two cores.

use std::ops::ControlFlow;

use armt::engine::{DType, Device};
use armt_lab::Result;
use armt_lab::eval::retrieval::curve;
use armt_lab::tasks::retrieval::RetrievalLessons;
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Event, best_model, train};

/// Few symbols first: with many the model finds that one value answers 1 question in n, and stays there.
const RECIPE: &str = r#"
seed = 7

[task]
setting = "remember"

[model]
layers = 2
width = 64
heads = 2
inner = 128
init = 0.1

[memory]
kind = "associative"
tokens = 2
d_mem = 16

[optimizer]
lr = 2e-3
warmup = 0.05
clip_value = 0
clip_norm = 1.0

[eval]
every = 50
samples = 250

[[stage]]
pairs = 2
symbols = 4
batch = 128
steps = 300
until = 0.98

[[stage]]
pairs = 4
batch = 128
steps = 600
vary = true
until = 0.98
"#;

fn main() -> Result<()> {
    let (cpu, place) = (Device::cpu(), std::env::temp_dir().join(format!("armt-pairs-{}", std::process::id())));
    let recipe = Recipe::parse(RECIPE, &[])?;
    let mut folder = RunFolder::create(&place)?;
    train(&recipe, &mut folder, false, (DType::F32, &cpu), &mut |event| {
        if let Event::Validation { progress, stage, score, .. } = event {
            println!("step {:4}: {score:.3} at {stage}", progress.total);
        }
        ControlFlow::Continue(())
    })?;

    let model = best_model(&place, DType::F32, &cpu)?;
    let lessons = recipe.lessons_of::<RetrievalLessons>();
    let (task, trained) = lessons.and_then(|l| l.stage(recipe.stages.len() - 1)).expect("a stage of retrieval");
    for point in curve(&model, task, &[1, 2, 4, 8, 16], 250, 125, 0, &mut |_| ControlFlow::Continue(()))? {
        let beyond = if point.pairs > trained { "   longer than trained" } else { "" };
        println!("{:3} pairs: {:.3} right, {:.1} stored{beyond}", point.pairs, point.exact_match, point.stored);
    }
    drop(folder);
    // Nothing is kept of an example.
    let _ = std::fs::remove_dir_all(&place);
    Ok(())
}
