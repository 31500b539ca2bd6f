//! `armt export`: the plain backbone of a model, as others open it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use armt::Model;
use armt::engine::{DType, Device};
use clap::Args;

use crate::convert::{COMPANIONS, copy, expect_room};
use crate::device::NumberKind;
use crate::progress::thousands;
use armt_shipped::find_model;

#[derive(Args)]
#[command(after_help = "\
Examples:
  armt export runs/mine/best mine-plain
  armt export gpt2-armt gpt2-back --dtype bf16

The folder opens with transformers: AutoModelForCausalLM.from_pretrained('OUT'). What belongs to the memory is left out.")]
pub struct ExportArgs {
    /// Model folder.
    model: PathBuf,
    /// Folder to write.
    out: PathBuf,
    /// Numbers in the file.
    #[arg(long, value_enum, default_value_t = NumberKind::F32)]
    dtype: NumberKind,
    /// Write into a folder that is not empty.
    #[arg(long)]
    force: bool,
}

pub fn run(args: &ExportArgs) -> Result<ExitCode> {
    let folder = find_model(&args.model)?;
    expect_room(&args.out, &folder, args.force)?;
    let model = Model::load(&folder, DType::F32, &Device::cpu())?;
    model.save_plain(&args.out, args.dtype.dtype())?;
    let named = |name: &&&str| folder.join(Path::new(name)).is_file();
    // A small vocabulary is no part of what others know.
    for name in ["tokenizer.json"].iter().chain(&COMPANIONS).filter(|name| **name != "vocabulary.json").filter(named) {
        copy(name, &folder, &args.out)?;
    }
    let kept = model.parameters() - model.memory_parameters();
    crate::say(format_args!(
        "{}: {} parameters of a {}",
        args.out.display(),
        thousands(kept as u64),
        model.config().model_type_of_backbone()
    ))?;
    Ok(ExitCode::SUCCESS)
}
