//! A memory kind of one's own, from one file: it is registered, a transformer is given it, trained for a few steps, and judged.
//!
//! ```sh
//! cargo run --release -p armt-lab --example own_memory
//! ```
//!
//! `echo` keeps one row a layer, so it tells the last value apart from a guess, and little more: compare `kind = "associative"`.

#[path = "../tests/toys/echo.rs"]
mod echo;

use std::ops::ControlFlow;

use armt::Model;
use armt::engine::{DType, Device};
use armt_lab::eval::retrieval::curve;
use armt_lab::tasks::retrieval::{Retrieval, SYMBOLS, Setting};
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Event, train};

const RECIPE: &str = r#"
[task]
setting = "rewrite"
[model]
layers = 2
width = 64
heads = 2
inner = 128
init = 0.1
[memory]
kind = "echo"
[optimizer]
lr = 0.002
[eval]
every = 100
samples = 200
[[stage]]
pairs = 1
batch = 64
steps = 400
until = 0.99
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    armt::memory::register(echo::KIND)?;
    let device = Device::cpu();
    let place = std::env::temp_dir().join(format!("armt-own-memory-{}", std::process::id()));
    let mut folder = RunFolder::create(&place)?;
    train(&Recipe::parse(RECIPE, &[])?, &mut folder, false, (DType::F32, &device), &mut |event| {
        if let Event::Step { progress, loss, .. } = event
            && progress.step % 100 == 0
        {
            println!("step {:>4}, loss {loss:.3}", progress.step);
        }
        ControlFlow::Continue(())
    })?;
    let model = Model::load(&place.join("best"), DType::F32, &device)?;
    let task = Retrieval { setting: Setting::Rewrite, key_size: 1, value_size: 1, symbols: SYMBOLS };
    for point in curve(&model, task, &[1, 2, 4], 200, 50, 1, &mut |_| ControlFlow::Continue(()))? {
        println!("{} pairs: {:.2} exact", point.pairs, point.exact_match);
    }
    std::fs::remove_dir_all(&place)?;
    Ok(())
}
