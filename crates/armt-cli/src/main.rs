//! The command `armt`: arguments and messages; the work is done by the library.

mod doctor;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Associative Recurrent Memory Transformer: read very long texts in constant memory.
#[derive(Parser)]
#[command(name = "armt", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the processor, the GPU, the driver and the libraries that were found, and what would be used.
    ///
    /// ARMT_CUDA_PATH can name a folder with CUDA's libraries, ARMT_CACHE_DIR the folder for compiled kernels.
    Doctor,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).without_time().init();
    armt::engine::join_thread_pool(0);
    let result = match Cli::parse().command {
        Command::Doctor => doctor::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
