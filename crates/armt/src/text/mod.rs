//! Text and tokens: the tokenizer, texts of any length as a stream of tokens, and books as sentences.

mod border;
mod pieces;
mod prefetch;
mod sentences;
mod stream;
mod tokenizer;
mod vocabulary;
mod words;

pub use pieces::Pieces;
pub use prefetch::{Counts, TokenPrefetch};
pub use sentences::{Lines, sentences};
pub use stream::{BehindMark, Piece, Source, TokenStream, Tokenized, TokenizerThreads};
pub use tokenizer::{END_OF_TEXT, OpenText, Speech, Tokenizer, end_tokens};
pub use vocabulary::Vocabulary;
