//! `armt merge`: a model and its adapter as one model folder.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use armt::adapter::Adapter;
use armt::engine::{DType, Device};
use clap::Args;

use crate::convert::{COMPANIONS, copy, expect_room};
use crate::device::NumberKind;
use crate::progress::thousands;
use armt_shipped::{find_adapter, find_model};

/// What a tokenizer may be kept in.
const TOKENIZERS: [&str; 5] = ["tokenizer.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe"];

#[derive(Args)]
#[command(after_help = "\
Examples:
  armt merge gpt2-armt runs/mine/adapter gpt2-mine
  armt read gpt2-mine book.txt --memory book.mem

The model is the one that `--adapter` gives, to the bit. An adapter of another model than BASE is refused.")]
pub struct MergeArgs {
    /// Model folder that the adapter was trained on.
    base: PathBuf,
    /// Adapter, as training writes it (RUN/adapter), or its run's folder.
    adapter: PathBuf,
    /// Folder to write.
    out: PathBuf,
    /// Numbers in the file.
    #[arg(long, value_enum, default_value_t = NumberKind::F32)]
    dtype: NumberKind,
    /// Write into a folder that is not empty.
    #[arg(long)]
    force: bool,
}

pub fn run(args: &MergeArgs) -> Result<ExitCode> {
    let base = find_model(&args.base)?;
    expect_room(&args.out, &base, args.force)?;
    let model = Adapter::open(&find_adapter(&args.adapter))?.load(&base, DType::F32, &Device::cpu())?;
    model.save(&args.out, args.dtype.dtype())?;
    for name in TOKENIZERS.iter().chain(&COMPANIONS).filter(|name| base.join(Path::new(name)).is_file()) {
        copy(name, &base, &args.out)?;
    }
    crate::say(format_args!("{}: {} parameters", args.out.display(), thousands(model.parameters() as u64)))?;
    Ok(ExitCode::SUCCESS)
}
