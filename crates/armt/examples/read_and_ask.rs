//! Reads a text with a model, keeps what it read in a file, and asks.
//!
//! ```sh
//! cargo run --release -p armt --example read_and_ask -- models/babilong-qa1 long.txt "Where is Mary?"
//! ```

use armt::Session;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, text, questions @ ..] = arguments.as_slice() else {
        return Err("expected a model folder, a text file, and questions".into());
    };
    let mut session = Session::open(model)?;
    session.read(text)?;
    let kept = format!("{text}.memory");
    session.save(&kept)?;
    println!("{} tokens read; {kept} has what is left of them, {} bytes", session.tokens_read()?, session.state().bytes());
    for question in questions {
        println!("{question} {}", session.ask(question)?);
    }
    Ok(())
}
