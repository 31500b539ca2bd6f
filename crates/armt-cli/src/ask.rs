//! `armt ask`: a question against a memory file.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use armt::Session;
use armt::answer::{Answer, AnswerToken};
use armt::generate::{Options, Sampling};
use clap::Args;
use serde_json::{Value, json};

use crate::device::DeviceArgs;
use crate::place::expect_memory;
use armt_shipped::find_model;

const EXAMPLE: &str = "\
Examples:
  armt ask gpt2-armt --memory war.mem \"Where is Pierre? Answer:\" --stop .
  armt ask gpt2-armt --memory war.mem \"And then\" --max-tokens 100 --temperature 0.8 --top-p 0.95 --seed 1

The memory file is only read. Without --temperature, --top-k or --top-p the most probable token is taken each time; an answer that is then
less probable than all others together is followed by a note on standard error.

--json prints answer, probability, tokens (each with token, text and probability) and memory (tokens, segments, open_tokens, open_bytes).";

/// Less probable than this, an answer is more likely to be another.
const UNSURE: f64 = 0.5;

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct AskArgs {
    /// Model that the memory was made with: its folder, its run's, or its name if it comes with the program.
    model: PathBuf,
    /// Adapter that the memory was made with.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Memory file, as `armt read` writes it.
    #[arg(long, value_name = "FILE")]
    memory: PathBuf,
    /// The text that the model goes on from, with `after_question` of its config.json behind it.
    question: String,
    /// Most tokens to answer with.
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    max_tokens: usize,
    /// Pick tokens at random; above 1 wilder, below 1 tamer, 0 is always the most probable.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Pick only among the K most probable tokens.
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Pick only among the most probable tokens that together have probability P.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Equal seeds give equal answers.
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true)]
    seed: u64,
    /// End the answer before this text (\n is a new line); can be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print the answer with the probabilities of its tokens and what the memory has read, as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: &AskArgs) -> Result<ExitCode> {
    find_model(&args.model)?;
    expect_memory(&args.memory)?;
    if args.question.trim().is_empty() {
        bail!("expected a question, got an empty text");
    }
    let options = Options { max_new_tokens: args.max_tokens, sampling: args.sampling(), ..Options::default() };
    let mut session = args.device.open_session(&args.model, args.adapter.as_deref())?;
    session.load(&args.memory)?;
    let stop: Vec<String> = args.stop.iter().map(|s| s.replace("\\n", "\n")).collect();
    if args.json {
        let answer = session.ask_with(&args.question, &options, &stop, &mut |_| ControlFlow::Continue(()))?;
        crate::say(format_args!("{}", serde_json::to_string_pretty(&report(&session, &answer))?))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = std::io::stdout();
    let mut failed = None;
    let each = &mut |text: &str| match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            failed = Some(error);
            ControlFlow::Break(())
        }
    };
    let answer = session.ask_with(&args.question, &options, &stop, each)?;
    let written = failed.map_or_else(|| writeln!(std::io::stdout()), Err);
    written.or_else(|e| if e.kind() == std::io::ErrorKind::BrokenPipe { Ok(()) } else { Err(e) }).context("standard output")?;
    let probability = answer.probability();
    if options.sampling == Sampling::Greedy && probability < UNSURE {
        crate::note(format_args!("note: the model is not sure: this answer has probability {}", share(probability)));
    }
    Ok(ExitCode::SUCCESS)
}

/// A probability as people read it.
fn share(probability: f64) -> String {
    if probability < 0.001 { "below 0.001".into() } else { format!("{probability:.3}") }
}

/// An answer as a program takes it.
fn report(session: &Session, answer: &Answer) -> Value {
    let (count, tail) = (session.state().counts()[0], &session.state().tails()[0]);
    let token = |t: &AnswerToken| json!({ "token": t.token, "text": t.text, "probability": t.probability });
    json!({
        "answer": answer.text,
        "probability": answer.probability(),
        "tokens": answer.tokens.iter().map(token).collect::<Vec<_>>(),
        "memory": {
            "tokens": count.tokens,
            "segments": count.segments,
            "open_tokens": tail.tokens.len(),
            "open_bytes": tail.text.bytes.len(),
        },
    })
}

impl AskArgs {
    fn sampling(&self) -> Sampling {
        let chosen = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some();
        match self.temperature.unwrap_or(1.0) {
            temperature if chosen && temperature != 0.0 => {
                Sampling::Random { temperature, top_k: self.top_k, top_p: self.top_p, seed: self.seed }
            }
            _ => Sampling::Greedy,
        }
    }
}
