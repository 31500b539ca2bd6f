//! Questions about contexts that a user has: lines of JSON with a context, a question and its answer.
//!
//! Rows with one context after another are one context with several questions, and a row may have a list of them. A context is told, hidden
//! among other text where a recipe says so (`distract`), and asked about at its end: as whoever asks a memory does, in a segment of its own, in
//! training half of the time right behind it. Loss is on the answers alone.

mod hidden;
mod lessons;
mod rows;

pub use self::hidden::Hiding;
pub use self::lessons::{Distract, QaLessons, QaTraining, SETTING};
pub use self::rows::{Asked, Fields, Read, Told, read};
