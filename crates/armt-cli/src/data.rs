//! `armt data`: samples of a task as text, for other programs and to look at.

use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use armt::engine::machine::expect_room;
use armt::files::Beside;
use armt::text::Tokenizer;
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babi::file::Split;
use armt_lab::tasks::babilong::json::Line;
use armt_lab::tasks::babilong::{Babilong, Books, Data, Form, Length, Stories, find_data};
use clap::{Args, Subcommand, ValueEnum};

use crate::data_check::{self, CheckArgs};
use crate::place::{Written, expect_place_for};
use crate::progress::{Meter, bytes, thousands};
use crate::train::stop_on_signals;

const EXAMPLE: &str = "\
Examples:
  armt data babilong --questions qa1,qa2 --lengths 0k,1k,16k --samples 100 --seed 0 --out babilong.jsonl
  armt data babilong --questions qa3 --lengths 1M --samples 1 --simulated --out - | head -c 2000
  armt data babilong --split train --simulated --samples 5000 --lengths 4k --out train.jsonl
  armt data babilong --form now --questions qa1 --lengths 0k,1k,64k --out now.jsonl
  armt data babilong --books pg19/test --babi tasks_1-20_v1-2 --questions qa7 --lengths 32k --out qa7.jsonl

A sample is the facts of a bAbI story in order, hidden among sentences of books, and a question about them. A length is the number of
GPT-2 tokens of facts and background, exactly; k is 1,000 and M 1,000,000; 0k is the facts alone. A story whose facts take more gives
place to another. The benchmark was published in two forms. Today's (`--form now`) has a space before every sentence, keeps the line
breaks of the books, and leaves 300 tokens of a length for the prompt, so that 1k has 700; the paper's (`--form paper`) has no spaces, keeps
line breaks, and has whole segments of 512 tokens less 20. `mixed` has a space before background and none before facts, joins lines, and
has all tokens of a length. Each line of the output is a JSON object with task, length, tokens, seed, sample, question, target and input. The same seed
gives the same samples on any machine. Stories and books are those in the project's folder `data` unless others are named.";

#[derive(Args)]
#[command(arg_required_else_help = true)]
pub struct DataArgs {
    #[command(subcommand)]
    task: DataTask,
}

#[derive(Subcommand)]
enum DataTask {
    /// Write BABILong samples as lines of JSON.
    Babilong(BabilongArgs),
    /// Look at files of questions or texts before training on them.
    Check(CheckArgs),
}

#[derive(Args)]
#[command(after_help = EXAMPLE)]
struct BabilongArgs {
    /// Tasks of bAbI, qa1 to qa20; up to qa5 with --simulated.
    #[arg(long, value_name = "QA,..", value_delimiter = ',', default_value = "qa1,qa2,qa3,qa4,qa5")]
    questions: Vec<Task>,
    /// Tokens of a sample, as 0k, 16k, 1M or a whole number.
    #[arg(long, value_name = "LENGTH,..", value_delimiter = ',', default_value = "0k,1k,2k,4k")]
    lengths: Vec<Length>,
    /// Samples of each task and length.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// Equal seeds give equal samples.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Which files of bAbI, and which of the project's books.
    #[arg(long, value_enum, default_value_t = SplitKind::Test)]
    split: SplitKind,
    #[command(flatten)]
    sources: SourceArgs,
    /// Folder of a tokenizer with <|endoftext|>, in place of GPT-2's.
    #[arg(long, value_name = "DIR")]
    bpe: Option<PathBuf>,
    /// File to write, - for standard output.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Where stories and background come from.
#[derive(Args)]
pub struct SourceArgs {
    /// New stories by the rules of the published ones instead of these.
    #[arg(long)]
    pub simulated: bool,
    /// How contexts are written and tokens counted: as the benchmark's repository does now, as the paper's does, or this project's mixture.
    #[arg(long, value_name = "now|paper|mixed", default_value_t = Form::Mixed)]
    pub form: Form,
    /// Folder of books as .txt files, in place of the project's.
    #[arg(long, value_name = "DIR")]
    pub books: Option<PathBuf>,
    /// Folder of bAbI files, in place of the project's.
    #[arg(long, value_name = "DIR", conflicts_with = "simulated")]
    pub babi: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SplitKind {
    Train,
    Test,
}

pub fn run(args: &DataArgs) -> Result<ExitCode> {
    match &args.task {
        DataTask::Babilong(args) => write_babilong(args),
        DataTask::Check(args) => data_check::run(args),
    }
}

fn write_babilong(args: &BabilongArgs) -> Result<ExitCode> {
    let started = Instant::now();
    let to_file = args.out != Path::new("-");
    if to_file {
        expect_place_for(Written::Samples, &args.out)?;
    }
    let of = |task: &Task| open_stories(*task, args.seed, args.sources.simulated, args.split(), args.sources.babi.as_deref());
    let stories = args.questions.iter().map(of).collect::<Result<Vec<_>>>()?;
    note_repeats(&stories, args.samples);
    for length in &args.lengths {
        expect_room("--lengths", &[length.0])?;
    }
    let mut babilong = args.open()?;
    let stop = stop_on_signals()?;
    babilong.stop_on(stop.clone());
    let written = if to_file {
        args.write_file(&babilong, &stories, &stop)
    } else {
        let out = BufWriter::new(std::io::stdout().lock());
        args.write(&babilong, &stories, out, Path::new("standard output"), &stop)
    };
    let tokens = match written {
        Err(error) if matches!(error.downcast_ref(), Some(armt_lab::Error::Interrupted)) => return Ok(ExitCode::from(130)),
        other => other?,
    };
    if to_file {
        let name = args.out.display();
        let size = std::fs::metadata(&args.out).with_context(|| name.to_string())?.len();
        let (lines, seconds) = (args.questions.len() * args.lengths.len(), started.elapsed().as_secs_f64());
        let (samples, tokens) = (thousands(lines as u64 * args.samples), thousands(tokens));
        let s = if samples == "1" { "" } else { "s" };
        crate::say(format_args!("{name}: {samples} sample{s}, {tokens} tokens, {} in {seconds:.1} s", bytes(size)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A task's stories: simulated, or those of a folder, or else the project's.
pub fn open_stories(task: Task, seed: u64, simulated: bool, split: Split, babi: Option<&Path>) -> Result<Stories> {
    if simulated {
        return Ok(Stories::simulated(task, seed)?);
    }
    let folder = find_data(Data::Babi, babi).context("--babi DIR names a folder of bAbI files")?;
    let published = Stories::published(&folder, task, split, seed);
    if split == Split::Train && babi.is_none() && published.is_err() {
        bail!(
            "--split train: the project has the test files of bAbI only; --simulated makes stories like those of the training files, --babi DIR reads them"
        );
    }
    Ok(published?)
}

/// Samples with the books of a folder, or else the project's.
pub fn open_samples(tokenizer: Tokenizer, split: Split, sources: &SourceArgs) -> Result<Babilong> {
    let shipped = if split == Split::Train { Data::TrainBooks } else { Data::TestBooks };
    let folder = find_data(shipped, sources.books.as_deref()).context("--books DIR names a folder of books")?;
    Ok(Babilong::new(Arc::new(Books::open_in(sources.form, &folder, Arc::new(tokenizer))?))?)
}

/// Says where questions come again in so many samples.
pub fn note_repeats(stories: &[Stories], samples: u64) {
    for stories in stories {
        if let Some(count) = stories.count().filter(|count| samples > *count as u64) {
            crate::note(format_args!(
                "note: {} has {} published questions, which come again; with --simulated every one is new",
                stories.task(),
                thousands(count as u64)
            ));
        }
    }
}

/// The tokenizer that a user has named.
pub fn find_tokenizer(folder: &Path) -> Result<Tokenizer> {
    match Tokenizer::find(folder)? {
        Some(tokenizer) => Ok(tokenizer),
        None => bail!("{}: expected tokenizer.json, or encoder.json and vocab.bpe, found neither", folder.display()),
    }
}

impl BabilongArgs {
    fn split(&self) -> Split {
        if self.split == SplitKind::Train { Split::Train } else { Split::Test }
    }

    fn open(&self) -> Result<Babilong> {
        let bpe = find_data(Data::Bpe, self.bpe.as_deref()).context("--bpe DIR names a folder of a tokenizer")?;
        open_samples(find_tokenizer(&bpe)?, self.split(), &self.sources)
    }

    /// Writes all samples beside the file and renames that, so that a file of its name is always whole.
    fn write_file(&self, babilong: &Babilong, stories: &[Stories], stop: &AtomicBool) -> Result<u64> {
        let mut beside = Beside::create(&self.out)?;
        let written = self.write(babilong, stories, BufWriter::new(beside.file()), &self.out, stop)?;
        beside.finish()?;
        Ok(written)
    }

    /// Writes all samples and gives the tokens of their contexts.
    fn write(&self, babilong: &Babilong, stories: &[Stories], mut out: impl Write, name: &Path, stop: &AtomicBool) -> Result<u64> {
        let per_sample: u64 = self.lengths.iter().map(|l| l.0 as u64).sum();
        let total = per_sample.saturating_mul(self.samples).saturating_mul(stories.len() as u64);
        // What the facts of 0k take is not known beforehand and hardly counts.
        let mut meter = Meter::new((total > 0).then_some(total), 0);
        let (mut tokens, mut shown) = (0, 0);
        let mut each = |more: usize| {
            tokens += more as u64;
            if tokens - shown > 20_000 {
                shown = tokens;
                meter.show(tokens, tokens);
            }
            if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        for stories in stories {
            for length in &self.lengths {
                for number in 0..self.samples {
                    let sample = babilong.draw(stories, *length, number)?;
                    Line { sample: &sample, task: stories.task(), length: *length, seed: self.seed, number }
                        .write(babilong, &mut out, name, &mut each)?;
                }
            }
        }
        meter.finish();
        out.flush().with_context(|| name.display().to_string())?;
        Ok(tokens)
    }
}
