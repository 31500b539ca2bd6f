//! Text and tokens: the tokenizer, texts of any length as a stream of tokens, and books as sentences.

mod ahead;
mod sentences;
mod stream;
mod tokenizer;
mod vocabulary;

pub use ahead::{Ahead, Counts};
pub use sentences::{Lines, sentences};
pub use stream::{Piece, Source, TokenStream};
pub(crate) use tokenizer::{END_OF_TEXT, end_tokens};
pub use tokenizer::{Speech, Tokenizer};
pub use vocabulary::Vocabulary;
