//! `armt data check`: a look at files before anything is trained on them.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use armt_lab::tasks::babilong::{Data, find_data};
use armt_lab::tasks::check::{Checked, has_questions, questions, texts};
use armt_shipped::find_model;
use clap::Args;

use crate::data::find_tokenizer;
use crate::eval::qa::FieldArgs;
use crate::progress::thousands;

/// Rows that are told of one by one; of more only the number.
const TOLD: usize = 10;

#[derive(Args)]
#[command(after_help = "\
Examples:
  armt data check questions.jsonl
  armt data check squad.jsonl --answer answers.text --model runs/mine/best
  armt data check data/books/train --model gpt2-armt

Rows with a question are checked as questions, others as texts. Rows that lack a field are named by their lines, and the command then fails.")]
pub struct CheckArgs {
    /// Files of questions or texts, folders and patterns.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<String>,
    /// Model whose tokenizer counts: its folder, its run's, or its name if it comes with the program; GPT-2's if not given.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    fields: FieldArgs,
    /// Field of a row that has its text; text if not given.
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
}

pub fn run(args: &CheckArgs) -> Result<ExitCode> {
    // A run, or a model that comes with the program; or else a folder that has a tokenizer and nothing more.
    let named = args.model.as_ref().map(|named| find_model(named).unwrap_or_else(|_| named.clone()));
    let folder = find_data(Data::Bpe, named.as_deref()).context("--model DIR names a folder of a tokenizer")?;
    let tokenizer = Arc::new(find_tokenizer(&folder)?);
    let fields = args.fields.fields();
    let asked = has_questions(&args.files, &fields)?;
    if let Some(option) = args.fields.given().filter(|_| !asked) {
        let name = fields.question.as_deref().unwrap_or("question");
        bail!("{option}: expected rows of questions, but none of the first has a field {name}");
    }
    let Checked { lengths, unwritable, wrong, .. } = match asked {
        true => questions(&args.files, &fields, &tokenizer)?,
        false => texts(&args.files, &args.field, &tokenizer)?,
    };
    crate::say(format_args!("{:<10} {:>10} {:>12} {:>10} {:>10} {:>10}", "", "count", "tokens", "least", "median", "most"))?;
    for (name, l) in lengths {
        let [count, total, least, median, most] = [l.count, l.total, l.least, l.median, l.most].map(thousands);
        crate::say(format_args!("{name:<10} {count:>10} {total:>12} {least:>10} {median:>10} {most:>10}"))?;
    }
    if unwritable > 0 {
        let s = if unwritable == 1 { "" } else { "s" };
        crate::say(format_args!("{} answer{s} that the tokenizer does not give back as written", thousands(unwritable)))?;
    }
    for error in wrong.iter().take(TOLD) {
        crate::note(format_args!("{error}"));
    }
    if wrong.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let more = wrong.len().saturating_sub(TOLD);
    let s = if wrong.len() == 1 { "" } else { "s" };
    let more = if more > 0 { format!(", {} of them not shown", thousands(more as u64)) } else { String::new() };
    crate::note(format_args!("{} row{s} cannot be used{more}", thousands(wrong.len() as u64)));
    Ok(ExitCode::FAILURE)
}
