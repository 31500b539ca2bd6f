//! Text and tokens: the tokenizer, texts of any length as a stream of tokens, and books as sentences.

mod ahead;
mod sentences;
mod stream;
mod tokenizer;
mod vocabulary;

pub use ahead::{Ahead, Counts};
pub use sentences::sentences;
pub use stream::{Piece, Source, TokenStream};
pub(crate) use tokenizer::end_tokens;
pub use tokenizer::{END_OF_TEXT, Speech, Tokenizer};
pub use vocabulary::Vocabulary;
