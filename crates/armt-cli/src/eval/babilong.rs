//! BABILong: how well a model answers about facts in a long text, by task and length.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use armt::Model;
use armt::engine::machine::expect_room;
use armt::text::Tokenizer;
use armt_lab::eval::babilong::{Answered, Cell, CellProgress, Judge, Report, Settings, count, csv};
use armt_lab::eval::interval::wilson;
use armt_lab::eval::retrieval::StateSize;
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babi::file::Split;
use armt_lab::tasks::babilong::given::{self, Given};
use armt_lab::tasks::babilong::{Babilong, Books, Facts, Form, Length};
use clap::Args;

use super::{EvalArgs, first_given, once_each};
use crate::data::{SourceArgs, find_tokenizer, note_repeats, open_samples, open_stories};
use crate::progress::Meter;
use crate::train::stop_on_signals;

/// Samples of each task and length, and at a time, if nothing is said.
const SAMPLES: usize = 100;
const BATCH: usize = 16;
/// Lengths at which the first sample is drawn beforehand, to see whether any story's facts fit; longer ones hold them all.
const CROWDED: usize = 10_000;

#[derive(Args)]
#[command(next_help_heading = "Options of babilong")]
pub struct BabilongArgs {
    /// Tasks of bAbI, qa1 to qa20, up to qa5 with --simulated; qa1 to qa5 if not given.
    #[arg(long, value_name = "QA,..", value_delimiter = ',')]
    questions: Option<Vec<Task>>,
    /// Tokens of a context, as 0k, 16k, 1M or a whole number; 0k,1k,2k,4k if not given.
    #[arg(long, value_name = "LENGTH,..", value_delimiter = ',')]
    lengths: Option<Vec<Length>>,
    /// Count also what is right by the benchmark's rule: the right label and no other in the first sentence of the answer.
    #[arg(long)]
    label_match: bool,
    /// Put background in the place of the facts: a model that still answers has not read them.
    #[arg(long, conflicts_with = "shuffled")]
    without_facts: bool,
    /// Tell the facts in an order that is drawn.
    #[arg(long)]
    shuffled: bool,
    /// Give the model the K sentences of a context that BM25 finds for the question, in one segment, in place of the context: retrieval without a
    /// memory.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    retrieve: Option<u32>,
    /// Samples that were made elsewhere: lines of JSON with input, question and target, and with task and length, or one of each is named by
    /// --questions and --lengths.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["without_facts", "shuffled", "simulated", "form", "books", "babi", "retrieve"])]
    file: Option<PathBuf>,
    #[command(flatten)]
    sources: SourceArgs,
    /// Folder of the tokenizer, if it is not in the model's.
    #[arg(long, value_name = "DIR")]
    bpe: Option<PathBuf>,
    /// Folder to write every answer into, a CSV file for each task and length as the benchmark's scripts read them.
    #[arg(long, value_name = "DIR")]
    csv: Option<PathBuf>,
}

pub fn run(args: &EvalArgs, folder: &Path) -> Result<ExitCode> {
    let own = &args.babilong;
    if let Some(file) = &own.file {
        return run_file(args, folder, file);
    }
    let stories = own
        .tasks()
        .into_iter()
        .map(|task| open_stories(task, args.seed(), own.sources.simulated, Split::Test, own.sources.babi.as_deref()));
    let stories = stories.collect::<Result<Vec<_>>>()?;
    note_repeats(&stories, args.samples.unwrap_or(SAMPLES) as u64);
    let lengths = own.lengths();
    let (tokenizer, missing) = own.tokenizer(folder)?;
    let mut babilong = open_samples(tokenizer, Split::Test, &own.sources)?;
    for length in &lengths {
        // Nothing keeps a context. But what has more tokens than the machine has bytes is a slip of the hand, and would be planned for years.
        expect_room("--lengths", &[length.0])?;
    }
    for stories in &stories {
        for length in lengths.iter().filter(|l| l.0 < CROWDED) {
            babilong.draw(stories, *length, 0)?;
        }
    }
    let model = args.device.open_weights(folder, args.adapter.as_deref())?;
    babilong.tokenizer().expect_fits(model.sizes().vocab, &missing)?;
    let stop = stop_on_signals()?;
    babilong.stop_on(stop.clone());
    let samples = args.samples.unwrap_or(SAMPLES);
    let mut run = Run::new(args, &model, &stop)?;
    expect_room("--samples", &[samples, size_of::<Answered>()])?;
    expect_room("--batch", &[samples.min(run.report.settings.batch), StateSize::of(&model).numbers, size_of::<f32>()])?;
    let wanted: Vec<_> = stories.iter().flat_map(|stories| lengths.iter().map(|length| (stories.task(), *length))).collect();
    wanted.iter().try_for_each(|(task, length)| run.expect_own_csv(*task, *length, samples))?;
    let mut judge = Judge::new(&model, &babilong, run.report.settings.batch)?;
    judge.stop_on(stop.clone());
    own.retrieve.iter().for_each(|k| judge.retrieve(*k as usize));
    for stories in &stories {
        for length in &lengths {
            let facts = run.report.settings.facts;
            let cell = Wanted { task: stories.task(), length: *length, samples };
            let judged = run.cell(cell, &mut |each| judge.cell(stories, *length, facts, samples, each));
            if let Some(code) = run.stopped(judged)? {
                return Ok(code);
            }
        }
    }
    run.finish()
}

/// Judges samples that were made elsewhere.
fn run_file(args: &EvalArgs, folder: &Path, file: &Path) -> Result<ExitCode> {
    let own = &args.babilong;
    let (tokenizer, missing) = own.tokenizer(folder)?;
    let babilong = Babilong::new(Arc::new(Books::none(Arc::new(tokenizer))))?;
    let otherwise = (only("--questions", own.questions.as_deref())?, only("--lengths", own.lengths.as_deref())?);
    let given = given::read(&babilong, file, otherwise, args.samples)?;
    let model = args.device.open_weights(folder, args.adapter.as_deref())?;
    babilong.tokenizer().expect_fits(model.sizes().vocab, &missing)?;
    let stop = stop_on_signals()?;
    let mut run = Run::new(args, &model, &stop)?;
    given.iter().try_for_each(|given| run.expect_own_csv(given.task, given.length, given.samples.len()))?;
    let mut judge = Judge::new(&model, &babilong, run.report.settings.batch)?;
    judge.stop_on(stop.clone());
    for Given { task, length, samples } in &given {
        let cell = Wanted { task: *task, length: *length, samples: samples.len() };
        let judged = run.cell(cell, &mut |each| judge.given(*task, samples, each));
        if let Some(code) = run.stopped(judged)? {
            return Ok(code);
        }
    }
    run.finish()
}

/// The one thing that is named for a whole file, if any is.
fn only<T: Copy>(option: &str, named: Option<&[T]>) -> Result<Option<T>> {
    match named {
        None => Ok(None),
        Some([one]) => Ok(Some(*one)),
        Some(several) => bail!("{option}: expected one for all of --file, got {}", several.len()),
    }
}

impl BabilongArgs {
    /// The first option that was given.
    pub fn given(&self) -> Option<&'static str> {
        first_given(&[
            ("--questions", self.questions.is_some()),
            ("--lengths", self.lengths.is_some()),
            ("--label-match", self.label_match),
            ("--simulated", self.sources.simulated),
            ("--without-facts", self.without_facts),
            ("--shuffled", self.shuffled),
            ("--retrieve", self.retrieve.is_some()),
            ("--file", self.file.is_some()),
            ("--form", self.sources.form != Form::Mixed),
            ("--books", self.sources.books.is_some()),
            ("--babi", self.sources.babi.is_some()),
            ("--bpe", self.bpe.is_some()),
            ("--csv", self.csv.is_some()),
        ])
    }

    fn tasks(&self) -> Vec<Task> {
        once_each(self.questions.clone().unwrap_or_else(|| (1..=5).filter_map(|n| Task::new(n).ok()).collect()))
    }

    fn lengths(&self) -> Vec<Length> {
        once_each(self.lengths.clone().unwrap_or_else(|| [0, 1000, 2000, 4000].map(Length).to_vec()))
    }

    /// The tokenizer, numbered by the model's small vocabulary where it has one; and the folder that is to blame if it does not fit.
    fn tokenizer(&self, model: &std::path::Path) -> Result<(Tokenizer, PathBuf)> {
        let Some(folder) = &self.bpe else {
            return match Tokenizer::find(model)? {
                Some(tokenizer) => Ok((tokenizer, model.into())),
                None => bail!(
                    "{}: this model has no tokenizer (tokenizer.json, or encoder.json and vocab.bpe); --bpe DIR names a folder with one",
                    model.display()
                ),
            };
        };
        let tokenizer = find_tokenizer(folder)?;
        let blamed = if tokenizer.is_small() || !model.join("vocabulary.json").is_file() { folder.clone() } else { model.into() };
        let tokenizer = if tokenizer.is_small() { tokenizer } else { tokenizer.with_vocabulary_of(model)? };
        Ok((tokenizer, blamed))
    }

    fn settings(&self, args: &EvalArgs, model: &Model) -> Result<Settings> {
        let text = |path: &Option<PathBuf>| path.as_ref().map(|p| p.display().to_string());
        Ok(Settings {
            model: args.model.display().to_string(),
            fingerprint: model.fingerprint()?,
            seed: args.seed(),
            batch: args.batch.unwrap_or(BATCH),
            dtype: model.weights_dtype().to_string(),
            device: model.device().to_string(),
            label_match: self.label_match,
            simulated: self.sources.simulated,
            facts: match (self.without_facts, self.shuffled) {
                (true, _) => Facts::LeftOut,
                (_, true) => Facts::Shuffled,
                _ => Facts::Told,
            },
            retrieve: self.retrieve.map(|k| k as usize),
            form: self.sources.form,
            file: text(&self.file),
            file_hash: self.file.as_deref().map(given::hash).transpose()?,
            books: text(&self.sources.books),
            babi: text(&self.sources.babi),
            bpe: text(&self.bpe),
        })
    }
}

/// The command under way.
struct Run<'a> {
    args: &'a EvalArgs,
    report: Report,
    stop: &'a AtomicBool,
    /// Cells that were printed, and those of them that were judged now.
    shown: usize,
    judged: usize,
}

/// A cell that is wanted.
struct Wanted {
    task: Task,
    length: Length,
    samples: usize,
}

/// Judges a cell, telling how far it is.
type Judging<'j> = dyn FnMut(&mut dyn FnMut(CellProgress) -> ControlFlow<()>) -> armt_lab::Result<Vec<Answered>> + 'j;

impl<'a> Run<'a> {
    /// Goes on with the report that is there, or begins one.
    fn new(args: &'a EvalArgs, model: &Model, stop: &'a AtomicBool) -> Result<Self> {
        let settings = args.babilong.settings(args, model)?;
        let found = match &args.out {
            Some(out) => Report::resume(out, &settings)?,
            None => None,
        };
        let mut report = found.unwrap_or_else(|| Report::new(None, settings));
        report.name = args.name.clone().or(report.name);
        if let Some(folder) = &args.babilong.csv {
            armt::files::make_folder(folder)?;
        }
        Ok(Run { args, report, stop, shown: 0, judged: 0 })
    }

    /// The file of a cell's answers, where they are to be written.
    fn csv(&self, task: Task, length: Length) -> Option<PathBuf> {
        self.args.babilong.csv.as_deref().map(|folder| csv::file(folder, task, length))
    }

    /// Refuses a file of answers that are not those of the report's cell, before anything is judged: it would be replaced by others. Refuses fewer
    /// answers than the cell has, where its file is to be made anew.
    fn expect_own_csv(&self, task: Task, length: Length, samples: usize) -> Result<()> {
        let Some(file) = self.csv(task, length) else { return Ok(()) };
        let cell = self.report.cell(task, length);
        if !file.exists() {
            return match cell.filter(|cell| cell.samples > samples) {
                Some(cell) => bail!(
                    "--samples: expected {}, as many as the report has of {task} {length}, to write their answers, got {samples}",
                    cell.samples
                ),
                None => Ok(()),
            };
        }
        if cell.and_then(|cell| cell.csv.as_ref()) != Some(&given::hash(&file)?) {
            bail!(
                "{}: it exists already and its answers are of no report that this command goes on with; name another folder, or remove it",
                file.display()
            );
        }
        Ok(())
    }

    /// Judges a cell that is not in the report yet with so many samples, or whose answers are to be written and are not, and keeps it.
    fn cell(&mut self, wanted: Wanted, judging: &mut Judging<'_>) -> Result<()> {
        let Wanted { task, length, samples } = wanted;
        let written = self.csv(task, length).is_none_or(|file| file.exists());
        let known = self.report.cell(task, length).filter(|c| written && c.samples >= samples).cloned();
        let cell = match known {
            Some(cell) => cell,
            None => {
                let answered = self.judge(&wanted, judging)?;
                let mut cell = count(task, length, &answered, self.report.settings.label_match);
                if let Some(folder) = &self.args.babilong.csv {
                    csv::write(folder, task, length, &answered)?;
                    cell.csv = Some(csv::hash(&answered));
                }
                match self.args.out.as_deref() {
                    Some(out) => self.report.add(cell.clone(), out)?,
                    None => self.report.put(cell.clone()),
                }
                self.judged += 1;
                cell
            }
        };
        self.shown += 1;
        show(self.args, &cell, self.shown == 1)
    }

    fn judge(&self, wanted: &Wanted, judging: &mut Judging<'_>) -> Result<Vec<Answered>> {
        let Wanted { task, length, samples } = wanted;
        // What the facts of 0k take is not known beforehand: there, samples are counted.
        let tokens = (length.0 as u64).saturating_mul(*samples as u64);
        let mut meter = Meter::new(Some(if tokens > 0 { tokens } else { *samples as u64 }), 0);
        let answered = judging(&mut |progress| {
            meter.label(format!("{task} {length}, {} of {samples} answered: ", progress.samples));
            meter.show(progress.tokens, if tokens > 0 { progress.tokens } else { progress.samples as u64 });
            if self.stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        meter.finish();
        Ok(answered?)
    }

    /// Says so where there was nothing left to do.
    fn finish(&self) -> Result<ExitCode> {
        if self.judged == 0
            && let Some(out) = &self.args.out
        {
            self.args.say(format_args!("nothing left to judge: all of it is in {}", out.display()))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Where a cell was interrupted: says what was kept and how to go on, and gives the code to end with.
    fn stopped(&self, judged: Result<()>) -> Result<Option<ExitCode>> {
        match judged {
            Err(error) if matches!(error.downcast_ref(), Some(armt_lab::Error::Interrupted)) => {}
            other => return other.map(|()| None),
        }
        match &self.args.out {
            Some(out) if !self.report.cells.is_empty() => {
                let cells = self.report.cells.len();
                let s = if cells == 1 { "" } else { "s" };
                self.args.say(format_args!(
                    "stopped: {} has {cells} cell{s}; the same command goes on with the others",
                    out.display()
                ))?;
            }
            _ => self.args.say(format_args!("stopped; nothing was kept"))?,
        }
        Ok(Some(ExitCode::from(130)))
    }
}

/// A line of the table, after its head if it is the first.
fn show(args: &EvalArgs, cell: &Cell, first: bool) -> Result<()> {
    let between = |share: f64| {
        let (low, high) = wilson(share, cell.samples);
        format!("{low:.3} to {high:.3}")
    };
    let column = |head: &str, share: Option<f64>| match (first, share) {
        (_, None) => String::new(),
        (true, Some(_)) => format!(" {head:>12} {:>15}", "95 %"),
        (false, Some(share)) => format!(" {share:>12.4} {:>15}", between(share)),
    };
    let columns = column("exact match", Some(cell.exact_match)) + &column("label match", cell.label_match);
    if first {
        args.say(format_args!("{:<6} {:>8} {:>8}{columns}", "task", "length", "samples"))?;
        return show(args, cell, false);
    }
    args.say(format_args!("{:<6} {:>8} {:>8}{columns}", cell.task.to_string(), cell.length.to_string(), cell.samples))
}
