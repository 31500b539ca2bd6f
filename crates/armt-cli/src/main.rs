//! The command `armt`: arguments and messages; the work is done by the library.

mod ask;
mod bench;
mod convert;
mod data;
mod data_check;
mod device;
mod doctor;
mod eval;
mod export;
mod launch;
mod memory;
mod merge;
mod place;
mod processes;
mod progress;
mod quickstart;
mod read;
mod read_each;
mod report;
mod serve;
mod train;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

/// Associative Recurrent Memory Transformer: read very long texts in constant memory.
#[derive(Parser)]
#[command(name = "armt", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small ARMT on the CPU in a minute and see what it remembers.
    Quickstart(quickstart::QuickstartArgs),
    /// Train a model by a recipe.
    Train(train::TrainArgs),
    /// Read texts of any length into a memory file.
    Read(read::ReadArgs),
    /// Ask about what a memory has read.
    Ask(ask::AskArgs),
    /// Look into memory files.
    Memory(memory::MemoryArgs),
    /// Give a Hugging Face or GGUF model a memory.
    Convert(convert::ConvertArgs),
    /// Write a model with its adapter as a model folder.
    Merge(merge::MergeArgs),
    /// Write the plain backbone of a model as a folder that transformers opens.
    Export(export::ExportArgs),
    /// Judge a model: on key-value pairs, facts in texts of any length, texts to predict, or questions of your own.
    Eval(Box<eval::EvalArgs>),
    /// Write samples of a task as text, or look at files of your own.
    Data(data::DataArgs),
    /// Draw the curves of `armt eval`, and fill a README's tables.
    Report(report::ReportArgs),
    /// Measure how fast this machine reads and trains.
    Bench(bench::BenchArgs),
    /// Serve memories over HTTP: make them, add text, ask, fork, download.
    Serve(serve::ServeArgs),
    /// Print a shell's completions of this command: `source <(armt completions bash)`.
    Completions {
        /// Shell to complete in.
        shell: Shell,
    },
    /// Show the processor, the GPU, the driver and the libraries that were found, and what would be used.
    ///
    /// ARMT_CUDA_PATH can name a folder with CUDA's libraries, ARMT_CACHE_DIR the folder for compiled kernels.
    Doctor,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).without_time().log_internal_errors(false).init();
    armt::engine::join_thread_pool(0);
    armt_lab::carried::carry(armt_shipped::CARRIED);
    let result = match Cli::parse().command {
        Command::Quickstart(args) => quickstart::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Read(args) => read::run(&args),
        Command::Ask(args) => ask::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Data(args) => data::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Completions { shell } => completions(shell).map(|()| ExitCode::SUCCESS),
        Command::Doctor => doctor::run().map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        // Whoever listened has heard enough (`armt ask .. | head`): no failure of ours.
        if is_closed(&error) {
            return ExitCode::SUCCESS;
        }
        note(format_args!("error: {}", line(&error)));
        ExitCode::FAILURE
    })
}

fn completions(shell: Shell) -> anyhow::Result<()> {
    // Not straight to standard output: a closed pipe would panic.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "armt", &mut script);
    Ok(std::io::stdout().write_all(&script)?)
}

/// Prints a line; a closed pipe is an error, not a panic.
fn say(line: std::fmt::Arguments<'_>) -> anyhow::Result<()> {
    anyhow::Context::context(writeln!(std::io::stdout(), "{line}"), "standard output")
}

/// Whether an error is that nobody listens any more.
fn is_closed(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>()).any(|e| e.kind() == ErrorKind::BrokenPipe)
}

/// Prints a line on standard error, where nobody may be listening any more: what is done is not given up for that.
fn note(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// An error and its causes on one line, without those that the error's own text already ends with.
fn line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|c| !c.is_empty()) {
        if line.is_empty() {
            line = cause;
        } else if !line.ends_with(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.replace('\n', " ")
}
