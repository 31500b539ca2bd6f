//! `armt convert`: a Hugging Face folder with a fresh memory.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use armt::Model;
use armt::engine::Device;
use armt::memory::{Associative, MemoryConfig, Prmt, Rmt, Window};
use armt::text::Tokenizer;
use clap::{Args, ValueEnum};

use crate::device::{NumberKind, WriteKind, expect_backbone};
use crate::progress::{bytes, thousands};

const EXAMPLE: &str = "\
Examples:
  armt convert gpt2 gpt2-armt --kind associative
  armt convert Llama-3.2-1B llama-rmt --kind rmt --tokens 32 --segment 1024 --dtype bf16
  armt convert data/gpt2 gpt2-random --kind associative --random

The weights of the backbone are taken as they are; those of the memory are new and have to be trained before it remembers:
`armt train RECIPE --set model.from=OUT`.";

/// Files that go along where they are there.
const COMPANIONS: [&str; 5] =
    ["generation_config.json", "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json", "vocabulary.json"];

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct ConvertArgs {
    /// Hugging Face folder of GPT-2, GPT-NeoX (Pythia) or Llama: config.json, model.safetensors, tokenizer.json.
    source: PathBuf,
    /// Folder to write.
    out: PathBuf,
    /// What is kept between segments.
    #[arg(long, value_enum, alias = "memory")]
    kind: MemoryKind,
    /// Memory tokens of a segment.
    #[arg(long, value_name = "N", default_value_t = 16)]
    tokens: usize,
    /// Width of keys and queries (associative; default: 64).
    #[arg(long, value_name = "N")]
    d_mem: Option<usize>,
    /// Ordinary tokens of a segment.
    #[arg(long, value_name = "N", default_value_t = 512)]
    segment: usize,
    /// Leave out the correction of the normalisation (associative).
    #[arg(long)]
    no_correction: bool,
    /// How the memory is written: the paper's way, or projected, which does not wear out (associative).
    #[arg(long, value_enum, default_value_t = WriteKind::Paper)]
    write: WriteKind,
    /// Give memory tokens position rows of their own [GPT-2].
    #[arg(long)]
    wrap_pos: bool,
    /// Layers that have a memory, as 0,1,5; all if not given (associative).
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    memory_layers: Option<Vec<usize>>,
    /// Numbers in the file.
    #[arg(long, value_enum, default_value_t = NumberKind::F32)]
    dtype: NumberKind,
    /// Random weights for the backbone too: the source needs none, only its config.json.
    #[arg(long)]
    random: bool,
    /// Equal seeds give equal memories, and equal random weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write into a folder that is not empty.
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryKind {
    Associative,
    Rmt,
    Prmt,
    None,
}

pub fn run(args: &ConvertArgs) -> Result<ExitCode> {
    let memory = args.memory()?;
    expect_backbone(&args.source)?;
    args.expect_room()?;
    let tokenizer = Tokenizer::find(&args.source)?;
    let make = if args.random { Model::convert_random } else { Model::convert };
    let model = make(&args.source, memory, args.segment, args.seed, &Device::cpu())?;
    if let Some(tokenizer) = &tokenizer {
        tokenizer.expect_fits(model.sizes().vocab, &args.source)?;
    }
    model.save(&args.out, args.dtype.dtype())?;
    match &tokenizer {
        Some(_) if args.source.join("tokenizer.json").is_file() => copy("tokenizer.json", &args.source, &args.out)?,
        Some(made) => made.save(&args.out)?,
        None => crate::note(format_args!(
            "warning: {} has no tokenizer.json: `armt read` will need one in {}",
            args.source.display(),
            args.out.display()
        )),
    }
    for name in COMPANIONS.iter().filter(|name| args.source.join(name).is_file()) {
        copy(name, &args.source, &args.out)?;
    }
    let (parameters, fresh) = (model.parameters(), model.memory_parameters());
    crate::say(format_args!(
        "{}: {} parameters, {} of them the memory's; {} of memory for each text, however long",
        args.out.display(),
        thousands(parameters as u64),
        thousands(fresh as u64),
        bytes(model.recurrence().layout().bytes(model.dtype()) as u64)
    ))?;
    Ok(ExitCode::SUCCESS)
}

impl ConvertArgs {
    /// The memory that is asked for. What only another kind of memory has is refused.
    fn memory(&self) -> Result<MemoryConfig> {
        let kind = self.kind.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default();
        let refuse = |name: &str, given: bool| {
            if given { bail!("{name}: --kind {kind} has no such setting") } else { Ok(()) }
        };
        if self.kind != MemoryKind::Associative {
            refuse("--d-mem", self.d_mem.is_some())?;
            refuse("--no-correction", self.no_correction)?;
            refuse("--memory-layers", self.memory_layers.is_some())?;
            refuse("--write", self.write != WriteKind::Paper)?;
        }
        let (tokens, wrap_pos) = (self.tokens, self.wrap_pos);
        Ok(match self.kind {
            MemoryKind::Associative => MemoryConfig::new(Associative {
                tokens,
                d_mem: self.d_mem.unwrap_or(64),
                nu: 3,
                correction: !self.no_correction,
                wrap_pos,
                write: self.write.into(),
                memory_layers: self.memory_layers.clone(),
            }),
            MemoryKind::Rmt => MemoryConfig::new(Rmt { tokens, wrap_pos }),
            MemoryKind::Prmt => MemoryConfig::new(Prmt { tokens, wrap_pos }),
            MemoryKind::None => {
                refuse("--wrap-pos", wrap_pos)?;
                MemoryConfig::new(Window { sliding_window: false })
            }
        })
    }

    /// Refuses a folder with something in it unless it is to be overwritten, and the source itself always.
    fn expect_room(&self) -> Result<()> {
        let out = self.out.display();
        if self.out.exists() && !self.out.is_dir() {
            bail!("{out}: expected a folder to write, got a file");
        }
        if let (Ok(a), Ok(b)) = (self.out.canonicalize(), self.source.canonicalize())
            && a == b
        {
            bail!("{out}: this is the folder to convert; write to another");
        }
        let used = std::fs::read_dir(&self.out).is_ok_and(|mut entries| entries.next().is_some());
        if used && !self.force {
            bail!("{out}: the folder is not empty; --force writes into it");
        }
        Ok(())
    }
}

fn copy(name: &str, from: &Path, to: &Path) -> Result<()> {
    let path = to.join(name);
    std::fs::copy(from.join(name), &path).with_context(|| path.display().to_string())?;
    Ok(())
}
