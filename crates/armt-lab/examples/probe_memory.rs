//! What a memory holds after each segment: reads a text one segment at a time and asks the same question of every state on the way.
//! `cargo run --release -p armt-lab --example probe_memory`, from the project's folder.

use std::ops::ControlFlow;
use std::path::Path;

use armt::engine::{DType, Device};
use armt::reader::Reader;
use armt::{Session, State};
use armt_lab::Result;

const QUESTION: &str = "Where is Mary?";
/// What happens, and in which of the segments.
const FACTS: [(usize, &str); 3] =
    [(2, " Mary went to the kitchen."), (9, " John moved to the garden."), (17, " Mary journeyed to the office.")];
const SEGMENTS: usize = 24;

fn main() -> Result<()> {
    let mut session = Session::open_on("models/babilong-qa1", DType::F32, &Device::cpu())?;
    let (tokenizer, size) = (session.tokenizer().clone(), session.model().config().segment_size);
    let book = armt::files::read_text(Path::new("data/books/test/Edwin_A_Abbott__Flatland__1884.txt"))?;
    let mut background = tokenizer.encode(&book)?.into_iter().cycle();

    let mut reader = Reader::new(session.model(), session.state().clone())?;
    println!("segment   norm of A   change   {QUESTION}");
    let mut before: Vec<f32> = Vec::new();
    for segment in 0..SEGMENTS {
        let told: String = FACTS.iter().filter(|(at, _)| *at == segment).map(|(_, fact)| *fact).collect();
        let fact = tokenizer.encode(&told)?;
        let mut tokens: Vec<i32> = background.by_ref().take(size - fact.len()).collect();
        let middle = tokens.len() / 2;
        tokens.splice(middle..middle, fact);
        reader.read(&mut tokens.into_iter().map(Ok), &mut |_| ControlFlow::Continue(()))?;
        session.set_state(reader.state()?)?;

        let after = matrices(session.state())?;
        let change = norm(after.iter().enumerate().map(|(i, a)| a - before.get(i).unwrap_or(&0.0)));
        let said = session.ask(QUESTION)?;
        println!("{segment:7} {:11.1} {change:8.1}   {said:10}{told}", norm(after.iter().copied()));
        before = after;
    }
    Ok(())
}

/// The matrices A of all layers; none of a memory of another kind.
fn matrices(state: &State) -> Result<Vec<f32>> {
    Ok(state.get("A").map_or_else(|| Ok(Vec::new()), |a| a.to_vec::<f32>())?)
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}
