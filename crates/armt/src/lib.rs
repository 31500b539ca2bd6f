//! The Associative Recurrent Memory Transformer (ARMT, arXiv 2407.04841): a transformer that reads a text segment by segment and keeps
//! what matters in associative matrices, one in each layer. Its rivals RMT and PRMT are the same model with another memory.
//!
//! A model reads, and what it has read is a value that can be kept in a small file and asked later:
//!
//! ```
//! # fn main() -> armt::Result<()> {
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/babilong-qa1");
//! # let kept = std::env::temp_dir().join(format!("armt-front-page-{}", std::process::id()));
//! # let book = kept.with_extension("txt");
//! # std::fs::write(&book, "It was a dark night. Mary went to the kitchen. John moved to the garden. The rain fell.").unwrap();
//! let mut session = armt::Session::open(folder)?;
//! session.read(&book)?;
//! assert_eq!(session.ask("Where is Mary?")?, "kitchen");
//! session.save(&kept)?;
//!
//! let mut later = armt::Session::open(folder)?;
//! later.load(&kept)?;
//! println!("{}", later.ask("Where is John?")?); // garden
//! # assert_eq!(later.ask("Where is John?")?, "garden");
//! # let _ = (std::fs::remove_file(&book), std::fs::remove_file(&kept));
//! # Ok(())
//! # }
//! ```
//!
//! The rooms, each of which uses only those before it:
//!
//! | | |
//! |---|---|
//! | [`error`](Error), [`random`], [`files`], [`compute`], [`backprop`] | what all others stand on |
//! | [`segment`], [`text`] | how texts are cut; tokenizers and streams of tokens |
//! | [`weights`], [`state`] | parameters and their names in files; the state as a value and as a file |
//! | [`backbone`] | embedding, block, head; one file a family; knows no memory |
//! | [`memory`] | one file a kind: associative, rmt, prmt, window |
//! | [`config`], [`recurrence`] | `config.json`; a model over segments with a state |
//! | [`schedule`] | two ways to walk the grid of layers and segments |
//! | [`checkpoint`], [`model`] | model folders; the model |
//! | [`probe`] | what a pass shows of a model, and gradients of a loss that is computed elsewhere |
//! | [`adapter`] | what was trained beside a backbone that stayed as it was |
//! | [`reader`], [`generate`], [`answer`], [`session`] | what a user does with it |
//!
//! The memory of one text has L dk (d + 1) numbers, dk = 2 nu d_mem. For GPT-2 with d_mem 64 that is 12 * 384 * 769 in f32:
//! 14,174,208 bytes, however long the text was.

pub mod adapter;
pub mod answer;
pub mod backbone;
pub mod backprop;
pub mod checkpoint;
pub mod compute;
pub mod config;
mod error;
pub mod files;
pub mod generate;
pub mod memory;
pub mod model;
pub mod probe;
pub mod random;
pub mod reader;
pub mod recurrence;
pub mod schedule;
pub mod segment;
pub mod session;
pub mod state;
pub mod text;
pub mod weights;

pub use armt_engine as engine;
pub use config::Config;
pub use error::{Error, Result};
pub use model::Model;
pub use session::{Session, SideBySide};
pub use state::State;
