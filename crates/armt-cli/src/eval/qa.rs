//! Questions: what a model that has read a context answers.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use armt::engine::machine::expect_room;
use armt::files::write_beside;
use armt_lab::eval::interval::wilson;
use armt_lab::eval::qa::{Answered, Judged, Qa, Report, Row, Way, count, count_unread, judge, judge_unread};
use armt_lab::tasks::babilong::{Books, Data, Length, find_data};
use armt_lab::tasks::qa::{Fields, Hiding, Told, read};
use armt_lab::tasks::words::Words;
use clap::Args;
use serde_json::json;

use super::{EvalArgs, first_given, once_each};
use crate::place::{Written, expect_place_for};
use crate::progress::Meter;
use crate::train::stop_on_signals;

#[derive(Args)]
#[command(next_help_heading = "Options of qa")]
pub struct QaArgs {
    /// Questions to judge on: .jsonl files (also .gz and .zst), folders and patterns.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    qa: Vec<String>,
    #[command(flatten)]
    fields: FieldArgs,
    /// Folder of .txt files whose sentences contexts are hidden among, for lengths above 0k.
    #[arg(long, value_name = "DIR")]
    distract: Option<PathBuf>,
    /// Tokens that contexts are brought to by other text, as 0k,4k,16k; 0k, as they are, if not given.
    #[arg(long, value_name = "LENGTH,..", value_delimiter = ',')]
    hidden_in: Vec<Length>,
    /// File to write every answer to, a line of JSON each: whether it is right, what was said, and what would have been.
    #[arg(long, value_name = "FILE")]
    answers: Option<PathBuf>,
}

/// Names of the fields of a row.
#[derive(Args)]
pub struct FieldArgs {
    /// Field of a row that has the context; context or input if not given.
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// Field that has the question; question if not given.
    #[arg(long, value_name = "NAME")]
    pub question: Option<String>,
    /// Field that has the answer; answer or target if not given.
    #[arg(long, value_name = "NAME")]
    pub answer: Option<String>,
}

impl FieldArgs {
    pub fn fields(&self) -> Fields {
        Fields { context: self.context.clone(), question: self.question.clone(), answer: self.answer.clone() }
    }

    pub fn given(&self) -> Option<&'static str> {
        first_given(&[
            ("--context", self.context.is_some()),
            ("--question", self.question.is_some()),
            ("--answer", self.answer.is_some()),
        ])
    }
}

impl QaArgs {
    /// The first option that was given.
    pub fn given(&self) -> Option<&'static str> {
        let own = first_given(&[
            ("--qa", !self.qa.is_empty()),
            ("--distract", self.distract.is_some()),
            ("--hidden-in", !self.hidden_in.is_empty()),
            ("--answers", self.answers.is_some()),
        ]);
        own.or_else(|| self.fields.given())
    }
}

pub fn run(args: &EvalArgs, folder: &Path) -> Result<ExitCode> {
    let own = &args.qa;
    if own.qa.is_empty() {
        bail!("--qa: expected files of questions, got none");
    }
    let lengths = if own.hidden_in.is_empty() { vec![Length(0)] } else { once_each(own.hidden_in.clone()) };
    if own.distract.is_none() && lengths.iter().any(|l| l.0 > 0) {
        bail!("--hidden-in: expected --distract DIR with texts to hide contexts in");
    }
    if own.hidden_in.is_empty() && own.distract.is_some() {
        bail!("--distract: expected --hidden-in with the lengths to hide contexts in");
    }
    if own.distract.is_none() && args.seed.is_some() {
        bail!("--seed: expected --distract and --hidden-in: nothing else is drawn");
    }
    // A context is hidden as a whole.
    lengths.iter().try_for_each(|length| expect_room("--hidden-in", &[length.0, size_of::<i32>()]))?;
    if let Some(path) = &own.answers {
        expect_place_for(Written::Answers, path)?;
        if args.out.as_ref() == Some(path) {
            bail!("--answers {}: expected another file than --out", path.display());
        }
    }
    let read = read(&own.qa, &own.fields.fields())?;
    if let Some(first) = read.wrong.into_iter().next() {
        return Err(first.into());
    }
    let mut contexts = read.told;
    if let Some(most) = args.samples {
        contexts.truncate(most);
    }
    if contexts.is_empty() {
        bail!("--qa: expected at least one question, got none");
    }
    let session = args.device.open_session(folder, args.adapter.as_deref())?;
    let model = session.model();
    let words = Words::new(session.tokenizer().clone(), Some(model.config()))?;
    let hiding = match &own.distract {
        Some(folder) => {
            let folder = find_data(Data::TestBooks, Some(folder)).context("--distract DIR names a folder of .txt files")?;
            Some(Hiding(Arc::new(Books::open(&folder, words.tokenizer.clone())?)))
        }
        None => None,
    };
    let stop = stop_on_signals()?;
    let mut report = Report {
        task: Qa::Qa,
        model: args.model.display().to_string(),
        name: args.name.clone(),
        files: own.qa.clone(),
        lengths: Vec::new(),
        unread: None,
    };
    let asked: usize = contexts.iter().map(|told| told.questions.len()).sum();
    args.say(format_args!("{:>8} {:>10} {:>12} {:>15} {:>8}", "length", "questions", "exact match", "95 %", "F1"))?;
    let mut lines = String::new();
    // Nothing read comes last: what a user has asked for is told first.
    for length in lengths.into_iter().map(Some).chain([None]) {
        let name = length.map_or("unread".into(), |length| length.to_string());
        // What contexts have as they are is not known beforehand: there, questions are counted.
        let tokens = length.map_or(0, |length| (length.0 as u64).saturating_mul(contexts.len() as u64));
        let mut meter = Meter::new(Some(if tokens > 0 { tokens } else { asked as u64 }), 0);
        let mut each = |judged: Judged| {
            meter.label(format!("{name}, {} of {asked} answered: ", judged.answers));
            meter.show(judged.tokens, if tokens > 0 { judged.tokens } else { judged.answers as u64 });
            if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let judged = match length {
            Some(length) => {
                let hidden = hiding.as_ref().map(|hiding| (hiding, length));
                let way = Way { hidden, seed: args.seed(), stop: Some(stop.clone()) };
                judge(model, &words, &contexts, &way, &mut each)
            }
            None => judge_unread(model, &words, &contexts, &mut each),
        };
        meter.finish();
        let answers = match judged {
            Err(armt_lab::Error::Interrupted) => {
                match &args.out {
                    Some(out) if !report.lengths.is_empty() => {
                        args.say(format_args!("stopped: {} has the lines so far", out.display()))?;
                    }
                    _ => args.say(format_args!("stopped; nothing was kept"))?,
                }
                return Ok(ExitCode::from(130));
            }
            other => other?,
        };
        let row = length.map_or_else(|| count_unread(&answers), |length| count(length, &answers));
        args.say(format_args!("{}", line(&row)))?;
        if let Some(path) = &own.answers {
            lines.extend(told_answers(&row.length, &contexts, &answers).map(|line| line + "\n"));
            write_beside(path, lines.as_bytes())?;
        }
        match length {
            Some(_) => report.lengths.push(row),
            None => report.unread = Some(row),
        }
        if let Some(out) = &args.out {
            report.save(out)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Lines of JSON of the answers to all questions of some contexts, in their order.
fn told_answers<'a>(length: &'a str, contexts: &'a [Told], answers: &'a [Answered]) -> impl Iterator<Item = String> + 'a {
    let asked = contexts.iter().flat_map(|told| told.questions.iter().map(move |asked| (told, asked)));
    asked.zip(answers).map(move |((told, asked), Answered { said, exact, f1, .. })| {
        let (question, right) = (&asked.question, &asked.answers);
        let (file, line) = (told.path.display().to_string(), told.line);
        json!({"exact": exact, "f1": f1, "length": length, "question": question, "said": said, "right": right, "file": file, "line": line})
            .to_string()
    })
}

fn line(row: &Row) -> String {
    let (low, high) = wilson(row.exact_match, row.questions);
    let interval = format!("{low:.3} to {high:.3}");
    format!("{:>8} {:>10} {:>12.3} {interval:>15} {:>8.3}", row.length, row.questions, row.exact_match, row.f1)
}
