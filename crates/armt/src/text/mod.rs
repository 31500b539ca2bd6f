//! Text and tokens: the tokenizer, and texts of any length as a stream of tokens.

mod ahead;
mod stream;
mod tokenizer;

pub use ahead::{Ahead, Counts};
pub use stream::{Piece, Source, TokenStream};
pub(crate) use tokenizer::end_tokens;
pub use tokenizer::{Speech, Tokenizer};
