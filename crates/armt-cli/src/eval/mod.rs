//! `armt eval`: how well a model answers, about pairs that it has read, facts in a long text or a user's contexts, and how well it predicts texts.

mod babilong;
pub mod qa;
mod retrieval;
pub mod text;

use std::fmt::Arguments;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use crate::device::DeviceArgs;
use crate::place::{Report, Written, expect_place, expect_place_for};
use armt_shipped::find_model;

const EXAMPLE: &str = "\
Examples:
  armt eval runs/armt --task remember --pairs 1,10,50,100,200,500 --out armt.json
  armt eval runs/armt --task rewrite --samples 10000 --device cuda --dtype f32
  armt report armt.json rmt.json --out capacity.svg --metric stored
  armt eval runs/babilong --task babilong --questions qa1,qa2 --lengths 0k,4k,128k,1M --samples 100 --out armt.json
  armt eval runs/babilong --task babilong --lengths 16k --label-match --csv answers --out labels.json
  armt eval runs/babilong --task babilong --lengths 16k --without-facts --out chance.json
  armt eval runs/babilong --task babilong --file samples.jsonl --out given.json
  armt eval runs/books --task text --text data/books/test/*.txt --out books.json
  armt eval runs/mine --task qa --qa questions.jsonl --out mine.json

remember and rewrite: a text is N pairs of a key and a value, one a segment, and then a key: the answer is right if the whole value is.
Stored pairs are those that a memory would need to answer as often if it guessed all others.

babilong: the facts of a bAbI story among sentences of books, as `armt data babilong` writes them, and a question. The answer is right if
it is the right word to the letter: greedy, at most 10 tokens, cut at <|endoftext|>. Samples are tokenised by the model's own tokenizer.

text: each document is read from an empty memory, and every token predicted. Beside the loss of each segment stands that of the same model with
its memory emptied before it: what the memory gives. A plot is drawn beside the report.

qa: a context is read into an empty memory and asked, as `armt read` and `armt ask` do it. Exact match and F1 are SQuAD's. The last line,
`unread`, is of the same questions with nothing read: what the model knows by heart or guesses.

The report is written anew after each line, that of text at the end. Ctrl-C keeps the lines so far; with babilong the same command goes on with
the others, and one with other lengths, or with more samples for some of them, adds to it. With the other tasks it begins anew.";

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct EvalArgs {
    /// A model that was trained on the task: its folder, its run's, or its name if it comes with the program (babilong-qa1).
    model: PathBuf,
    /// Keys that are all different, keys that come again with new values, facts in a long text, texts to predict, or questions of your own.
    #[arg(long, value_enum)]
    task: Task,
    /// Adapter of the model, as training writes it (RUN/adapter), or its run's folder.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Texts for each number of pairs, or each task and length; 1000 if not given, 100 with babilong. With qa contexts, all if not given; not with text.
    #[arg(long, value_name = "N", value_parser = positive)]
    samples: Option<usize>,
    /// Texts at a time; 64 if not given, 16 with babilong; not with text and qa.
    #[arg(long, value_name = "N", value_parser = positive)]
    batch: Option<usize>,
    /// Equal seeds give equal texts; 0 if not given.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// What tables and plots shall call the model.
    #[arg(long)]
    name: Option<String>,
    /// File to write the report to, in JSON.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    retrieval: retrieval::RetrievalArgs,
    #[command(flatten)]
    babilong: babilong::BabilongArgs,
    #[command(flatten)]
    text: text::TextArgs,
    #[command(flatten)]
    qa: qa::QaArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Task {
    Remember,
    Rewrite,
    Babilong,
    Text,
    Qa,
}

pub fn run(args: &EvalArgs) -> Result<ExitCode> {
    let own = [
        (&[Task::Remember, Task::Rewrite][..], args.retrieval.given()),
        (&[Task::Babilong], args.babilong.given()),
        (&[Task::Text], args.text.given()),
        (&[Task::Qa], args.qa.given()),
    ];
    let others = own.into_iter().filter(|(tasks, _)| !tasks.contains(&args.task)).find_map(|(_, given)| given);
    let given = others.or_else(|| args.unread());
    let task = args.task.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default();
    if let Some(name) = given {
        bail!("{name}: --task {task} has no such setting");
    }
    let folder = find_model(&args.model)?;
    if let Some(out) = &args.out {
        match args.task {
            // It goes on with its report, and refuses any other file by what is wrong with it.
            Task::Babilong => expect_place(out)?,
            Task::Remember | Task::Rewrite => expect_place_for(Written::Report(Report::Retrieval), out)?,
            Task::Text => expect_place_for(Written::Report(Report::Text), out)?,
            Task::Qa => expect_place_for(Written::Report(Report::Qa), out)?,
        }
    }
    match args.task {
        Task::Remember | Task::Rewrite => retrieval::run(args, &folder),
        Task::Babilong => babilong::run(args, &folder),
        Task::Text => text::run(args, &folder),
        Task::Qa => qa::run(args, &folder),
    }
}

impl EvalArgs {
    /// The first option that was given of those of several tasks that this one does not have: nothing of it is drawn, or read side by side.
    fn unread(&self) -> Option<&'static str> {
        let batch = ("--batch", self.batch.is_some());
        match self.task {
            Task::Text => first_given(&[("--samples", self.samples.is_some()), batch, ("--seed", self.seed.is_some())]),
            Task::Qa => first_given(&[batch]),
            Task::Remember | Task::Rewrite | Task::Babilong => None,
        }
    }

    /// Decides what is drawn.
    fn seed(&self) -> u64 {
        self.seed.unwrap_or_default()
    }

    /// Prints a line. Where all of it is kept in a file too, nobody need be listening.
    fn say(&self, line: Arguments<'_>) -> Result<()> {
        match crate::say(line) {
            Err(error) if self.out.is_some() && crate::is_closed(&error) => Ok(()),
            said => said,
        }
    }
}

/// Without those that came before.
fn once_each<T: PartialEq>(things: Vec<T>) -> Vec<T> {
    let mut once = Vec::new();
    for thing in things {
        if !once.contains(&thing) {
            once.push(thing);
        }
    }
    once
}

/// The first of some options that was given.
fn first_given(options: &[(&'static str, bool)]) -> Option<&'static str> {
    options.iter().find(|(_, given)| *given).map(|(name, _)| *name)
}

/// A number of at least 1.
fn positive(text: &str) -> Result<usize, String> {
    text.trim().parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a whole number of at least 1".into())
}

/// A time above 0.
fn time(text: &str) -> Result<f64, String> {
    text.trim().parse().ok().filter(|t: &f64| t.is_finite() && *t > 0.0).ok_or_else(|| "expected a number above 0".into())
}
