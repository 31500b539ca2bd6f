//! One configuration of a model: backbone, memory, segments. It is what `config.json` of a model folder holds.
//!
//! The backbone part is a Hugging Face configuration, kept as it came (those have many keys that do not matter here); a family checks it
//! into an [`Architecture`] that knows only what the computation needs. Our own parts refuse unknown keys.

use std::path::Path;

use armt_engine::machine::expect_room;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::backbone::Architecture;
use crate::backbone::architecture::Positions;
use crate::backbone::families::Family;
use crate::error::{Error, Result};
use crate::files::read_text;
use crate::memory::{MemoryConfig, Window};
pub use crate::segment::Alignment;

/// `config.json` of a model folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Always `armt`: tells our folders from those of plain backbones.
    pub model_type: ModelType,
    /// Ordinary tokens in a segment.
    pub segment_size: usize,
    /// Where a text that does not fill its segments is short.
    #[serde(default)]
    pub segment_alignment: Alignment,
    /// What `armt ask` puts after a question, if anything: the model was trained to answer after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_question: Option<String>,
    /// What is kept between segments. By default nothing but what the backbone itself keeps.
    #[serde(default = "nothing")]
    pub memory: MemoryConfig,
    /// The backbone, as Hugging Face describes it.
    pub backbone: Value,
}

/// The one value that `model_type` has in our folders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Ours.
    #[default]
    Armt,
}

/// Tokens of a segment of a plain model whose texts can be cut anywhere.
pub const UNBOUND: usize = 512;

fn nothing() -> MemoryConfig {
    MemoryConfig::new(Window::default())
}

impl Config {
    /// A backbone with a memory.
    pub fn new(backbone: Value, memory: MemoryConfig, segment_size: usize) -> Self {
        Config {
            model_type: ModelType::Armt,
            segment_size,
            segment_alignment: Alignment::default(),
            after_question: None,
            memory,
            backbone,
        }
    }

    /// A plain backbone as a model without memory, its whole context, or what of it a token sees, one segment. What is no transformer has no
    /// context, and segments of [`UNBOUND`] tokens.
    pub fn plain(backbone: Value) -> Result<Self> {
        let context = ["n_positions", "max_position_embeddings"].iter().find_map(|k| backbone.get(k)?.as_u64());
        let segment_size = match context {
            Some(context) => context as usize,
            None if Family::of(&backbone).is_err() => UNBOUND,
            None => return Err(Error::config("n_positions", "the length of the context", "nothing")),
        };
        // What is no transformer has no window, and is refused elsewhere.
        let window = Family::of(&backbone).and_then(|family| family.architecture(&backbone)).ok().and_then(|a| a.sliding_window);
        Ok(Config::new(backbone, nothing(), window.map_or(segment_size, |window| segment_size.min(window))))
    }

    /// Reads `config.json` of a folder, ours or a plain backbone's.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let value: Value = serde_json::from_str(&read_text(&path)?).map_err(|e| Error::file(&path, e))?;
        let config = match value.get("model_type").and_then(Value::as_str) {
            // From the text, for errors with lines.
            Some("armt") | None => serde_json::from_str(&read_text(&path)?).map_err(|e| Error::file(&path, e))?,
            Some(_) => Config::plain(value).map_err(|e| Error::file(&path, e))?,
        };
        Ok(config)
    }

    /// `model_type` of the backbone.
    pub fn model_type_of_backbone(&self) -> &str {
        self.backbone.get("model_type").and_then(Value::as_str).unwrap_or("nothing")
    }

    /// Tokens of the backbone.
    pub fn vocab(&self) -> Result<usize> {
        let size = self.backbone.get("vocab_size").and_then(Value::as_u64).filter(|n| *n > 0);
        size.map(|n| n as usize).ok_or_else(|| Error::config("backbone.vocab_size", "a positive integer", "something else"))
    }

    /// Refuses segments without tokens.
    pub fn check_segments(&self) -> Result<()> {
        if self.segment_size == 0 { Err(Error::config("segment_size", "at least 1", 0)) } else { Ok(()) }
    }

    /// The backbone's architecture, if it is a transformer's, checked to fit the memory and the segments.
    pub fn architecture(&self) -> Result<Architecture> {
        self.check_segments()?;
        let architecture = Family::of(&self.backbone)?.architecture(&self.backbone)?;
        let around = self.memory.around();
        match architecture.positions {
            Positions::Learned(rows) => {
                let needed = self.segment_size.saturating_add(if around.wrapped { 0 } else { around.total() });
                if needed > rows {
                    let expected = format!("at most {rows} positions for a segment and its memory tokens");
                    return Err(Error::config("segment_size", &expected, needed));
                }
            }
            Positions::Rotary(_) if around.wrapped => {
                return Err(Error::config("memory.wrap_pos", "false: only GPT-2 has a table of positions", true));
            }
            Positions::Rotary(_) => {}
        }
        if let Some(window) = architecture.sliding_window {
            let (needed, window) = (self.segment_size.saturating_add(around.total()), window);
            if needed > window {
                let expected =
                    format!("at most {window} positions for a segment and its memory tokens: the backbone sees no further back");
                return Err(Error::config("segment_size", &expected, needed));
            }
        }
        self.expect_room(&architecture)?;
        self.memory.check(&architecture)?;
        Ok(architecture)
    }

    /// Refuses sizes whose weights, or whose shortest text, no machine like this one could hold.
    fn expect_room(&self, a: &Architecture) -> Result<()> {
        let number = size_of::<f32>();
        let rows = if let Positions::Learned(rows) = a.positions { rows } else { 0 };
        let around = self.memory.around().total();
        expect_room("backbone: tokens by width", &[a.vocab, a.width, number])?;
        expect_room("backbone: positions by width", &[rows, a.width, number])?;
        expect_room("backbone: layers by width by width", &[a.layers, a.width, a.width, number])?;
        expect_room("backbone: layers by width by inner width", &[a.layers, a.width, a.inner, number])?;
        let heads = a.heads.query.saturating_add(a.heads.key.saturating_mul(2));
        expect_room("backbone: layers by width by heads", &[a.layers, a.width, heads, a.heads.size, number])?;
        expect_room("memory.tokens", &[around, a.width, number])?;
        Ok(expect_room("segment_size", &[self.segment_size.saturating_add(around), a.width, number])?)
    }
}
