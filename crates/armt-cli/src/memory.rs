//! `armt memory`: what memory files hold, and in what two of them differ.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use armt::state::contents::{Contents, Difference, TextContents};
use clap::{Args, Subcommand};

use crate::place::expect_memory;
use crate::progress::{bytes, thousands};

const EXAMPLE: &str = "\
Examples:
  armt memory info war.mem
  armt memory diff before.mem after.mem --json

Nothing but the files is needed: no model. A file that is damaged is refused.";

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct MemoryArgs {
    #[command(subcommand)]
    command: MemoryCommand,
}

#[derive(Subcommand)]
enum MemoryCommand {
    /// Say whose memory a file is, what was read, and what it keeps.
    Info {
        /// Memory file, as `armt read` writes it.
        file: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Say in what two memory files differ. Ends with 1 if they do.
    Diff {
        /// A memory file.
        first: PathBuf,
        /// Another.
        second: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

pub fn run(args: &MemoryArgs) -> Result<ExitCode> {
    match &args.command {
        MemoryCommand::Info { file, json } => info(file, *json),
        MemoryCommand::Diff { first, second, json } => diff(first, second, *json),
    }
}

fn load(file: &Path) -> Result<Contents> {
    expect_memory(file)?;
    Ok(Contents::load(file)?)
}

fn info(file: &Path, json: bool) -> Result<ExitCode> {
    let contents = load(file)?;
    if json {
        crate::say(format_args!("{}", serde_json::to_string_pretty(&contents)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Contents { format, name, model, tokenizer, kind, texts, tensors, bytes: size } = contents;
    let mut lines = vec![
        ("file", format!("{}, {format}, {}", file.display(), bytes(size as u64))),
        ("model", format!("{}fingerprint {model}", name.map_or(String::new(), |name| format!("{name}, ")))),
        ("tokenizer", tokenizer.map_or("not known".into(), |print| format!("fingerprint {print}"))),
        ("memory", kind),
    ];
    let several = texts.len() > 1;
    lines.extend(texts.iter().enumerate().map(|(i, text)| {
        let number = if several { format!("{}: ", i + 1) } else { String::new() };
        ("text", format!("{number}{}", read(text)))
    }));
    lines.extend(tensors.iter().map(|t| {
        let axes: Vec<String> = t.shape.iter().map(usize::to_string).collect();
        ("tensor", format!("{} [{}] {}, norm {:.4}, largest {:.4}", t.name, axes.join(", "), t.dtype, t.norm, t.largest))
    }));
    lines.iter().try_for_each(|(label, line)| crate::say(format_args!("{label:<10}{line}")))?;
    Ok(ExitCode::SUCCESS)
}

/// What was read of a text.
fn read(text: &TextContents) -> String {
    let mut line = format!("{} tokens in {} segments", thousands(text.tokens), thousands(text.segments));
    if text.open_tokens + text.open_bytes > 0 {
        line += &format!(", and open at its end {} tokens and {} bytes", thousands(text.open_tokens as u64), text.open_bytes);
    }
    line
}

fn diff(first: &Path, second: &Path, json: bool) -> Result<ExitCode> {
    let differences = load(first)?.differences(&load(second)?);
    if json {
        let report = serde_json::json!({ "equal": differences.is_empty(), "differences": differences });
        crate::say(format_args!("{}", serde_json::to_string_pretty(&report)?))?;
    } else if differences.is_empty() {
        crate::say(format_args!("equal to the bit"))?;
    }
    for difference in differences.iter().filter(|_| !json) {
        match difference {
            Difference::Said { what, here, there } => crate::say(format_args!("{what}: {here} -> {there}"))?,
            Difference::Numbers { what, differ, of, largest, relative } => crate::say(format_args!(
                "{what}: {} of {} numbers differ, by {largest:.3e} at most, {:.3} % of its norm",
                thousands(*differ as u64),
                thousands(*of as u64),
                100.0 * relative
            ))?,
        }
    }
    Ok(if differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
