//! How fast samples are made: `cargo run --release -p armt-lab --example stream_babilong [LENGTH [SAMPLES]]`, from the project's folder.

use std::sync::Arc;
use std::time::Instant;

use armt::text::Tokenizer;
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babilong::{Babilong, Books, Data, Length, Stories, find_data};
use armt_lab::{Error, Result};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let length: Length = arguments.next().as_deref().unwrap_or("50M").parse()?;
    let number = |text: String| text.parse().map_err(|_| Error::input("samples", "a whole number", text));
    let samples: u64 = arguments.next().map_or(Ok(2), number)?;
    let bpe = find_data(Data::Bpe, None)?;
    let tokenizer = Tokenizer::find(&bpe)?.ok_or_else(|| Error::file(&bpe, "expected a tokenizer, found none"))?;
    let books = Books::open(&find_data(Data::TestBooks, None)?, Arc::new(tokenizer))?;
    let babilong = Babilong::new(Arc::new(books))?;
    let stories = Stories::simulated(Task::new(2)?, 0)?;
    // The first sample takes the time of tokenising its books as well.
    for (what, numbers) in [("first", 0..1), ("others", 1..samples)] {
        let (mut planned, mut streamed, mut tokens, mut sum) = (0.0, 0.0, 0u64, 0u64);
        for number in numbers {
            let started = Instant::now();
            let sample = babilong.draw(&stories, length, number)?;
            planned += started.elapsed().as_secs_f64();
            let started = Instant::now();
            for token in sample.tokens() {
                (tokens, sum) = (tokens + 1, sum + u64::from(token?.unsigned_abs()));
            }
            streamed += started.elapsed().as_secs_f64();
        }
        let rate = tokens as f64 / (planned + streamed) / 1e6;
        println!(
            "{what}: {tokens} tokens planned in {planned:.3} s, streamed in {streamed:.3} s, {rate:.1} M tokens/s in all (sum {sum})"
        );
    }
    Ok(())
}
