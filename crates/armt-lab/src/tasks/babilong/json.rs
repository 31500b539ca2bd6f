//! Samples as lines of JSON, for other programs.
//!
//! `{"task":"qa1","length":"16k","tokens":16000,"seed":0,"sample":0,"question":"Where is Mary?","target":"garden","input":".."}`: the
//! last three are the names of the published BABILong sets. The input is written sentence by sentence as it comes, as its form has it. In
//! the mixed one there is one space between sentences; the tokens that models of this project read, which are counted, have none before a
//! fact.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use super::{Babilong, Form, Length, Piece, Sample};
use crate::error::{Error, Result};
use crate::tasks::babi::Task;

/// A sample, and what is said of it beside its text.
#[derive(Clone, Copy)]
pub struct Line<'s> {
    /// The sample.
    pub sample: &'s Sample,
    /// Its task.
    pub task: Task,
    /// The length that was asked for.
    pub length: Length,
    /// The seed of all samples.
    pub seed: u64,
    /// Its number.
    pub number: u64,
}

impl Line<'_> {
    /// Writes the line, and says after each sentence how many tokens it had; [`Error::Interrupted`] if the answer is to break off.
    /// What cannot be written is an error with the `name` of where it should go.
    pub fn write(
        &self,
        babilong: &Babilong,
        out: &mut impl Write,
        name: &Path,
        each: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<()> {
        let fail = |source| Error::Io { path: name.into(), source };
        let (sample, question) = (self.sample, &self.sample.story.question);
        let Line { task, length, seed, number, .. } = self;
        let tokens = sample.length();
        write!(out, r#"{{"task":"{task}","length":"{length}","tokens":{tokens},"seed":{seed},"sample":{number},"question":""#)
            .map_err(fail)?;
        out.write_all(inside_quotes(&question.text).as_bytes()).map_err(fail)?;
        out.write_all(br#"","target":""#).map_err(fail)?;
        out.write_all(inside_quotes(&question.answer).as_bytes()).map_err(fail)?;
        out.write_all(br#"","input":""#).map_err(fail)?;
        let (mut context, mut first) = (sample.context(), true);
        while let Some(piece) = context.next_piece()? {
            let text = babilong.tokenizer().decode(piece.tokens())?;
            // The last sentence may be cut within a character.
            let text = if let Piece::Fact(_) = piece { &text } else { text.trim_end_matches(char::REPLACEMENT_CHARACTER) };
            let mixed = babilong.form() == Form::Mixed;
            if mixed && !first {
                out.write_all(b" ").map_err(fail)?;
            }
            // Where every sentence has a space before it, a text has none.
            let text = if mixed {
                text.trim()
            } else if first {
                text.trim_start()
            } else {
                text
            };
            first = false;
            out.write_all(inside_quotes(text).as_bytes()).map_err(fail)?;
            if each(piece.tokens().len()).is_break() {
                return Err(Error::Interrupted);
            }
        }
        out.write_all(b"\"}\n").map_err(fail)
    }
}

/// A text as it stands within the quotes of a JSON string.
fn inside_quotes(text: &str) -> String {
    let mut quoted = serde_json::Value::from(text).to_string();
    quoted.pop();
    if !quoted.is_empty() {
        quoted.remove(0);
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_text_has_in_it_comes_back_from_json() {
        for text in ["", "plain", "a \"quote\" \\ and\nline", "\u{1}é—“x”"] {
            let json = format!("\"{}\"", inside_quotes(text));
            assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }
}
