//! The Associative Recurrent Memory Transformer (ARMT, arXiv 2407.04841): a transformer that reads a text segment by segment and keeps
//! what matters in associative matrices, one in each layer. Its rivals RMT and PRMT are the same model with another memory.
//!
//! A model reads, and what it has read is a value that can be kept in a small file and asked later:
//!
//! ```no_run
//! use std::{ops::ControlFlow, path::Path, sync::Arc};
//!
//! use armt::engine::{DType, Device};
//! use armt::generate::Options;
//! use armt::reader::{Reader, answer};
//! use armt::text::{Ahead, Source, TokenStream, Tokenizer};
//! use armt::{MemoryState, Model};
//!
//! # fn main() -> armt::Result<()> {
//! let (folder, book, file) = (Path::new("my-model"), Path::new("book.txt"), Path::new("book.memory"));
//! let (device, _) = Device::auto();
//! let model = Model::load(folder, DType::F32, &device)?;
//! let tokenizer = Arc::new(Tokenizer::load_for(folder, &model)?);
//!
//! let mut reader = Reader::new(&model, MemoryState::empty(&model, 1)?)?;
//! let stream = TokenStream::new(tokenizer.clone(), vec![Source::file(book)?])?;
//! let mut tokens = Ahead::start(stream, Arc::default())?; // tokenizes on a thread of its own
//! reader.read(&mut tokens, &mut |_| ControlFlow::Continue(()))?;
//! reader.state().save(file, &model)?;
//!
//! let memory = MemoryState::load(file, &model)?;
//! let said = answer(&model, &tokenizer, &memory, "Where is Mary?", &Options::default(), &[], &mut |_| ControlFlow::Continue(()))?;
//! println!("{said}");
//! # Ok(())
//! # }
//! ```
//!
//! The rooms: [`config`] is one validated configuration; [`model`] the transformer block and its parameters, stacked over layers;
//! [`memory`] what is kept between segments; [`schedule`] two ways to walk the grid of layers and segments; [`checkpoint`] model
//! folders with Hugging Face's and the authors' names; [`generate`] and [`reader`] what a user does with it.
//!
//! The memory of one text has L dk (d + 1) numbers, dk = 2 nu d_mem. For GPT-2 with d_mem 64 that is 12 * 384 * 769 in f32:
//! 14,174,208 bytes, however long the text was.

pub mod checkpoint;
pub mod config;
mod error;
pub mod files;
pub mod generate;
pub mod memory;
pub mod model;
pub mod random;
pub mod reader;
pub mod schedule;
pub mod segment;
pub mod text;

pub use armt_engine as engine;
pub use config::Config;
pub use error::{Error, Result};
pub use memory::MemoryState;
pub use model::Model;
