//! `armt convert`: a Hugging Face folder or a GGUF file with a fresh memory; or a model with a memory, whose memory is written in another way or
//! whose weights are kept in other numbers.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use armt::config::Config;
use armt::engine::{DType, Device};
use armt::memory::{Associative, MemoryConfig, Prmt, Rmt, RmtR, Window, Write};
use armt::model::Conversion;
use armt::weights::Tensors;
use armt::weights::gguf::Gguf;
use armt::{Model, checkpoint, recurrence};
use armt_lab::train::recipe::MemoryRecipe;
use armt_shipped::find_model;
use clap::{Args, ValueEnum};

use crate::device::{NumberKind, WriteKind, expect_backbone};
use crate::progress::{bytes, thousands};

const EXAMPLE: &str = "\
Examples:
  armt convert gpt2 gpt2-armt --kind associative
  armt convert Llama-3.2-1B llama-rmt --kind rmt --tokens 32 --segment 1024 --dtype bf16
  armt convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2-armt --d-mem 64
  armt convert data/gpt2 gpt2-random --kind associative --random
  armt convert mamba-130m-hf mamba-130m
  armt convert runs/rewrite rewrite-projected --write projected
  armt convert runs/rewrite rewrite-small --dtype bf16

The weights of the backbone are taken as they are; those of the memory are new and have to be trained before it remembers:
`armt train RECIPE --set model.from=OUT`. A model that has a memory already keeps all its weights and gets another --write, another --dtype, or both. Mamba and RWKV-5 keep a state of their own and get no memory beside it.";

/// Memory tokens, and tokens of a segment, if nothing is said.
const TOKENS: usize = 16;
const SEGMENT: usize = 512;

/// Files that go along where they are there.
pub const COMPANIONS: [&str; 5] =
    ["generation_config.json", "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json", "vocabulary.json"];

#[derive(Args, Clone)]
#[command(after_help = EXAMPLE)]
pub struct ConvertArgs {
    /// Hugging Face folder of GPT-2, GPT-NeoX (Pythia), Llama, Mistral, Qwen2 or Qwen3: config.json, model.safetensors, tokenizer.json. Or a
    /// GGUF file of Llama, Qwen2 or Qwen3 in F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K. Or a folder of Mamba or RWKV-5.2, under Hugging Face's
    /// names or, of RWKV-5, the authors'. Or a plain model that comes with the program (books). Or, with --write or --dtype
    /// and nothing else, a model of ours, or its run.
    source: PathBuf,
    /// Folder to write.
    out: PathBuf,
    /// What is kept between segments (default: associative; none for Mamba and RWKV-5).
    #[arg(long, value_enum, alias = "memory")]
    kind: Option<MemoryKind>,
    /// Memory tokens of a segment (default: 16).
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Width of keys and queries (associative; default: 64).
    #[arg(long, value_name = "N")]
    d_mem: Option<usize>,
    /// Ordinary tokens of a segment (default: 512).
    #[arg(long, value_name = "N")]
    segment: Option<usize>,
    /// Leave out the correction of the normalisation (associative).
    #[arg(long)]
    no_correction: bool,
    /// How the memory is written: the paper's way, or projected, which does not wear out (associative; default: paper).
    #[arg(long, value_enum)]
    write: Option<WriteKind>,
    /// Give memory tokens position rows of their own [GPT-2].
    #[arg(long)]
    wrap_pos: bool,
    /// Let each segment see the keys and values of the one before (none).
    #[arg(long)]
    window: bool,
    /// Layers that have a memory, as 0,1,5; all if not given (associative). Adapters are smaller by that; time, and the memory of a text, are not.
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    memory_layers: Option<Vec<usize>>,
    /// Numbers in the file (default: f32).
    #[arg(long, value_enum)]
    dtype: Option<NumberKind>,
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
    RmtR,
    None,
}

pub fn run(args: &ConvertArgs) -> Result<ExitCode> {
    // A name that is no file here may be that of a model that comes with the program.
    let source = if args.source.exists() { args.source.clone() } else { find_model(&args.source)? };
    let args = &ConvertArgs { source, ..args.clone() };
    if let Some(folder) = with_memory(&args.source)? {
        return args.change(&folder);
    }
    args.expect_source()?;
    let memory = args.memory()?;
    expect_room(&args.out, &args.source, args.force)?;
    let tokenizer = checkpoint::tokenizer(&args.source)?;
    let fits = |vocab: usize| tokenizer.as_ref().map_or(Ok(()), |tokenizer| tokenizer.expect_fits(vocab, &args.source));
    let segment = args.segment.unwrap_or(SEGMENT);
    let (config, (parameters, fresh), state) = if args.random {
        let model = Model::convert_random(&args.source, memory, segment, args.seed, &Device::cpu())?;
        fits(model.sizes().vocab)?;
        model.save(&args.out, args.numbers())?;
        let layout = model.recurrence().layout();
        let state = [layout.bytes(model.dtype()), layout.growth(model.dtype())];
        (model.config().clone(), (model.parameters(), model.memory_parameters()), state)
    } else {
        let conversion = Conversion::open(&args.source, memory, segment, args.seed)?;
        fits(conversion.sizes().vocab)?;
        conversion.write(&args.out, args.numbers())?;
        (conversion.config().clone(), conversion.parameters(), [conversion.state_bytes(), conversion.state_growth()])
    };
    match &tokenizer {
        Some(_) if args.source.is_dir() && args.source.join("tokenizer.json").is_file() => {
            copy("tokenizer.json", &args.source, &args.out)?
        }
        Some(made) => made.save(&args.out)?,
        None => crate::note(format_args!(
            "warning: {} has no tokenizer.json: `armt read` will need one in {}",
            args.source.display(),
            args.out.display()
        )),
    }
    args.warn(&config);
    for name in COMPANIONS.iter().filter(|name| args.source.join(name).is_file()) {
        copy(name, &args.source, &args.out)?;
    }
    let own = match fresh {
        0 => String::new(),
        fresh => format!(", {} of them the memory's", thousands(fresh as u64)),
    };
    let state = match state {
        [fixed, 0] => format!("{} of memory for each text, however long", bytes(fixed as u64)),
        [_, growth] => format!("a memory for each text that grows by {} with every segment", bytes(growth as u64)),
    };
    crate::say(format_args!("{}: {} parameters{own}; {state}", args.out.display(), thousands(parameters as u64)))?;
    Ok(ExitCode::SUCCESS)
}

/// The folder of a model that has a memory already: the source itself, or the best of a run. None for a plain model.
fn with_memory(source: &Path) -> Result<Option<PathBuf>> {
    let Some(folder) = find_model(source).ok().filter(|found| found.is_dir()) else { return Ok(None) };
    let keys = armt::files::read_json::<serde_json::Value>(&folder.join("config.json"), "a model's configuration")?;
    Ok(keys.get("model_type").is_some_and(|kind| kind == "armt").then_some(folder))
}

impl ConvertArgs {
    /// The type of the numbers in the file.
    fn numbers(&self) -> DType {
        self.dtype.map_or(DType::F32, |numbers| numbers.dtype())
    }

    /// The same weights, in other numbers or with a memory that is written in another way. What would need other weights is refused.
    fn change(&self, folder: &Path) -> Result<ExitCode> {
        let others = [
            self.kind.is_some(),
            self.tokens.is_some(),
            self.d_mem.is_some(),
            self.segment.is_some(),
            self.no_correction,
            self.wrap_pos,
            self.window,
            self.memory_layers.is_some(),
            self.random,
        ];
        if others.contains(&true) || (self.write.is_none() && self.dtype.is_none()) {
            bail!(
                "{}: it has a memory already, and only --write and --dtype can be changed; `armt export` writes its backbone, which can be converted",
                folder.display()
            );
        }
        expect_room(&self.out, folder, self.force)?;
        let mut config = Config::load(folder)?;
        if let Some(write) = self.write {
            config.memory = MemoryRecipe::Written { write: write.into() }.over(&config.memory, &folder.display().to_string())?;
        }
        let model = Model::blank(config, DType::F32, &Device::cpu())?;
        model.set_weights(&Tensors::open(folder)?)?;
        model.save(&self.out, self.numbers())?;
        for name in COMPANIONS.iter().chain(&["tokenizer.json"]).filter(|name| folder.join(name).is_file()) {
            copy(name, folder, &self.out)?;
        }
        let name = |value: Option<clap::builder::PossibleValue>| value.map(|v| v.get_name().to_string()).unwrap_or_default();
        let write = self.write.map(|write| format!(", --write {}", name(write.to_possible_value())));
        let numbers = self.dtype.map(|numbers| format!(", --dtype {}", name(numbers.to_possible_value())));
        let changed = [write, numbers].into_iter().flatten().collect::<String>();
        crate::say(format_args!("{}: the weights of {}{changed}", self.out.display(), folder.display()))?;
        Ok(ExitCode::SUCCESS)
    }

    /// The memory that is asked for. What only another kind of memory has is refused.
    fn memory(&self) -> Result<MemoryConfig> {
        let chosen = self.kind.map_or_else(|| self.usual_kind(), Ok)?;
        let kind = chosen.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default();
        let refuse = |name: &str, given: bool| {
            if given { bail!("{name}: --kind {kind} has no such setting") } else { Ok(()) }
        };
        if chosen != MemoryKind::Associative {
            refuse("--d-mem", self.d_mem.is_some())?;
            refuse("--no-correction", self.no_correction)?;
            refuse("--memory-layers", self.memory_layers.is_some())?;
            refuse("--write", self.write.is_some())?;
        }
        if chosen != MemoryKind::None {
            refuse("--window", self.window)?;
        }
        let (tokens, wrap_pos) = (self.tokens.unwrap_or(TOKENS), self.wrap_pos);
        Ok(match chosen {
            MemoryKind::Associative => MemoryConfig::new(Associative {
                tokens,
                d_mem: self.d_mem.unwrap_or(64),
                nu: 3,
                correction: !self.no_correction,
                wrap_pos,
                write: self.write.map_or(Write::Paper, Write::from),
                memory_layers: self.memory_layers.clone(),
            }),
            MemoryKind::Rmt => MemoryConfig::new(Rmt { tokens, wrap_pos }),
            MemoryKind::Prmt => MemoryConfig::new(Prmt { tokens, wrap_pos }),
            MemoryKind::RmtR => {
                refuse("--wrap-pos", wrap_pos)?;
                MemoryConfig::new(RmtR { tokens })
            }
            MemoryKind::None => {
                refuse("--wrap-pos", wrap_pos)?;
                MemoryConfig::new(Window { sliding_window: self.window })
            }
        })
    }

    /// What a backbone gets where nothing is asked for: nothing beside a state of its own.
    fn usual_kind(&self) -> Result<MemoryKind> {
        let backbone = checkpoint::backbone_config(&self.source)?;
        let own = backbone.get("model_type").and_then(serde_json::Value::as_str).is_some_and(recurrence::keeps_its_own);
        Ok(if own { MemoryKind::None } else { MemoryKind::Associative })
    }

    /// Refuses what is no model, and weights that only PyTorch can open, with what opens them.
    fn expect_source(&self) -> Result<()> {
        let source = &self.source;
        if source.is_file() {
            return match Gguf::is(source) {
                true => Ok(()),
                false => bail!("{}: expected a folder or a GGUF file, got another file", source.display()),
            };
        }
        expect_backbone(source)?;
        let weights = ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| source.join(name).is_file());
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().find(|name| source.join(name).is_file());
        match pickled.filter(|_| !weights && !self.random) {
            Some(name) => bail!(
                "{}: it has only {name}, which can run programs when it is opened; with transformers: AutoModelForCausalLM.from_pretrained('{}').save_pretrained('{}-safe') writes model.safetensors",
                source.display(),
                source.display(),
                source.display()
            ),
            None => Ok(()),
        }
    }

    /// Says what the folder asks for and this program leaves to others.
    fn warn(&self, config: &Config) {
        let positions = config.backbone.get("max_position_embeddings").and_then(serde_json::Value::as_u64);
        let needed = (config.segment_size + config.memory.around().total()) as u64;
        if let Some(positions) = positions.filter(|positions| needed > *positions) {
            crate::note(format_args!(
                "warning: a segment and its memory tokens take {needed} positions, but the backbone was trained on {positions}: a smaller --segment"
            ));
        }
        let path = self.source.join("generation_config.json");
        let generation = armt::files::read_json::<serde_json::Value>(&path, "how to generate");
        if generation.is_ok_and(|g| g.get("do_sample").is_some_and(|sample| sample == true)) {
            crate::note(format_args!(
                "note: generation_config.json asks for sampling; `armt ask` takes --temperature, --top-k and --top-p"
            ));
        }
    }
}

/// Refuses a folder with something in it unless it is to be overwritten, and the source itself always.
pub fn expect_room(folder: &Path, source: &Path, force: bool) -> Result<()> {
    let out = folder.display();
    if folder.exists() && !folder.is_dir() {
        bail!("{out}: expected a folder to write, got a file");
    }
    if let (Ok(a), Ok(b)) = (folder.canonicalize(), source.canonicalize())
        && a == b
    {
        bail!("{out}: this is the folder to read from; write to another");
    }
    let used = std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    if used && !force {
        bail!("{out}: the folder is not empty; --force writes into it");
    }
    Ok(())
}

pub fn copy(name: &str, from: &Path, to: &Path) -> Result<()> {
    let path = to.join(name);
    std::fs::copy(from.join(name), &path).with_context(|| path.display().to_string())?;
    Ok(())
}
