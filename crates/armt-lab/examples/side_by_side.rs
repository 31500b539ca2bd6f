//! How fast texts of any lengths are read side by side, beside texts of one length: `cargo run --release -p armt-lab --example side_by_side`,
//! from the project's folder.
//!
//! 64 texts of 1,000 to 100,000 tokens, evenly spread, and 64 of as many tokens each as these have on average.

use std::ops::ControlFlow;
use std::time::Instant;

use armt::engine::{DType, Device};
use armt::reader::{Reader, Tokens};
use armt::{Model, Result};

const TEXTS: usize = 64;

fn main() -> Result<()> {
    let (device, _) = Device::auto();
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let model = Model::load("models/babilong-qa1".as_ref(), dtype, &device)?;
    let unequal: Vec<usize> = (0..TEXTS).map(|i| 1_000 + 99_000 * ((i * 37) % TEXTS) / (TEXTS - 1)).collect();
    let tokens: usize = unequal.iter().sum();
    let equal = vec![tokens / TEXTS; TEXTS];
    println!("{TEXTS} texts, {tokens} tokens, on {device}");
    // Once before it counts.
    read(&model, &equal[..4])?;
    let kinds = [("of one length", &equal), ("of 1,000 to 100,000 tokens", &unequal)];
    let mut best = [f64::INFINITY; 2];
    // In turn, so that what else the machine does is in both.
    for _ in 0..5 {
        for (best, (_, lengths)) in best.iter_mut().zip(kinds) {
            *best = best.min(read(&model, lengths)?);
        }
    }
    for (seconds, (name, lengths)) in best.iter().zip(kinds) {
        println!("{name}: {seconds:.2} s, {:.0} tokens/s, best of 5", lengths.iter().sum::<usize>() as f64 / seconds);
    }
    Ok(())
}

/// Seconds that texts of these lengths take.
fn read(model: &Model, lengths: &[usize]) -> Result<f64> {
    let vocabulary = model.sizes().vocab;
    let text = |(seed, length): (usize, &usize)| (0..*length).map(move |i| Ok(((i * i + 7 * i + 31 * seed) % vocabulary) as i32));
    let mut sources: Vec<_> = lengths.iter().enumerate().map(text).collect();
    let mut sources: Vec<Tokens<'_>> = sources.iter_mut().map(|source| source as Tokens<'_>).collect();
    let mut reader = Reader::new(model, model.empty(lengths.len())?)?;
    let started = Instant::now();
    reader.read_all(&mut sources, &mut |_| ControlFlow::Continue(()))?;
    reader.close()?;
    Ok(started.elapsed().as_secs_f64())
}
