//! What a memory holds after each segment: reads a text one segment at a time and asks the same question of every state on the way.
//! `cargo run --release -p armt-lab --example probe_memory`, from the project's folder.

use std::ops::ControlFlow;
use std::path::Path;

use armt::engine::{DType, Device};
use armt::generate::Options;
use armt::memory::Content;
use armt::reader::{Reader, answer};
use armt::text::Tokenizer;
use armt::{MemoryState, Model};
use armt_lab::Result;

const QUESTION: &str = "Where is Mary?";
/// What happens, and in which of the segments.
const FACTS: [(usize, &str); 3] =
    [(2, " Mary went to the kitchen."), (9, " John moved to the garden."), (17, " Mary journeyed to the office.")];
const SEGMENTS: usize = 24;

fn main() -> Result<()> {
    let folder = Path::new("models/babilong-qa1");
    let model = Model::load(folder, DType::F32, &Device::cpu())?;
    let tokenizer = Tokenizer::load(folder)?;
    let size = model.config().segment_size;
    let book = armt::files::read_text(Path::new("data/books/test/Edwin_A_Abbott__Flatland__1884.txt"))?;
    let mut background = tokenizer.encode(&book)?.into_iter().cycle();

    let mut reader = Reader::new(&model, MemoryState::empty(&model, 1)?)?;
    println!("segment   norm of A   change   {QUESTION}");
    let mut before: Vec<f32> = Vec::new();
    for segment in 0..SEGMENTS {
        let told: String = FACTS.iter().filter(|(at, _)| *at == segment).map(|(_, fact)| *fact).collect();
        let fact = tokenizer.encode(&told)?;
        let mut tokens: Vec<i32> = background.by_ref().take(size - fact.len()).collect();
        let middle = tokens.len() / 2;
        tokens.splice(middle..middle, fact);
        reader.read(&mut tokens.into_iter().map(Ok), &mut |_| ControlFlow::Continue(()))?;

        let after = matrix(reader.state())?;
        let change = if before.is_empty() { norm(&after) } else { norm(&difference(&after, &before)) };
        let question = format!("{QUESTION}{}", model.config().after_question.as_deref().unwrap_or_default());
        let said =
            answer(&model, &tokenizer, reader.state(), &question, &Options::default(), &[], &mut |_| ControlFlow::Continue(()))?;
        println!("{segment:7} {:11.1} {change:8.1}   {said:10}{told}", norm(&after));
        before = after;
    }
    Ok(())
}

/// All layers' matrices A; none of a memory of another kind.
fn matrix(state: &MemoryState) -> Result<Vec<f32>> {
    match &state.content {
        Content::Associative { a, .. } => Ok(a.to_vec::<f32>()?),
        _ => Ok(Vec::new()),
    }
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}
