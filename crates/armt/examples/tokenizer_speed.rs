//! How fast texts become tokens, by a tokenizer that has seen none before and by one that has seen these, and that pieces on several threads give those
//! of one call: `cargo run --release -p armt --example tokenizer_speed`, from the project's folder.

use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use armt::text::{Source, TokenStream, Tokenizer, TokenizerThreads};
use armt::{Error, Result};

fn main() -> Result<()> {
    let fresh = || -> Result<Arc<Tokenizer>> {
        let found = Tokenizer::find("data/gpt2".as_ref())?;
        Ok(Arc::new(found.ok_or_else(|| Error::input("a tokenizer in data/gpt2", "none"))?))
    };
    let mut text = String::new();
    for folder in ["data/books/train", "data/books/test"] {
        let mut books: Vec<_> =
            std::fs::read_dir(folder).map_err(|e| Error::io(folder.as_ref(), e))?.flatten().map(|e| e.path()).collect();
        books.sort();
        for book in books {
            text += &armt::files::read_text(&book)?;
        }
    }
    let tokenizer = fresh()?;
    let started = Instant::now();
    let whole = tokenizer.encode(&text)?;
    say("one call", whole.len(), started);
    let started = Instant::now();
    tokenizer.encode(&text)?;
    say("one call, words that are known", whole.len(), started);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for threads in (0..).map(|n| 1 << n).take_while(|threads| *threads <= cores) {
        let source = Source::reader(Path::new("the books"), Cursor::new(text.clone()));
        let (tokenizer, threads) = (fresh()?, (threads, TokenizerThreads::with(threads)?));
        let started = Instant::now();
        let mut stream = TokenStream::new(tokenizer.clone(), vec![source])?.on_threads(&threads.1);
        let mut tokens = Vec::new();
        while let Some(piece) = stream.next_piece()? {
            tokens.extend(piece.tokens);
        }
        tokens.extend(tokenizer.encode_open(&stream.rest())?);
        say(&format!("{} threads", threads.0), tokens.len(), started);
        if tokens != whole {
            return Err(Error::input("the tokens of one call", "others"));
        }
    }
    Ok(())
}

fn say(how: &str, tokens: usize, started: Instant) {
    let seconds = started.elapsed().as_secs_f64();
    println!("{how}: {tokens} tokens in {seconds:.2} s, {:.0} tokens/s", tokens as f64 / seconds);
}
