//! Answers in the benchmark's own form, a CSV file for each task and length, so that its scripts can score them.
//!
//! Its `collect_results` takes task, length and the form of the prompt from a file's name, and the columns `target`, `output` and
//! `question` by theirs. Models that were trained on the task get no instruction, no examples and no text after these.

use std::path::{Path, PathBuf};

use armt::files::write_beside;

use super::Answered;
use crate::error::Result;
use crate::tasks::babi::Task;
use crate::tasks::babilong::Length;

/// Where a cell's answers go.
pub fn file(folder: &Path, task: Task, length: Length) -> PathBuf {
    folder.join(format!("{task}_{length}_instruction_no_examples_no_post_prompt_no.csv"))
}

/// Writes a cell's answers, beside the file first and then renamed.
pub fn write(folder: &Path, task: Task, length: Length, answers: &[Answered]) -> Result<()> {
    Ok(write_beside(&file(folder, task, length), text(answers).as_bytes())?)
}

/// BLAKE3 of the file of a cell's answers, by which a report knows it again.
pub fn hash(answers: &[Answered]) -> String {
    blake3::hash(text(answers).as_bytes()).to_string()
}

fn text(answers: &[Answered]) -> String {
    let line = |a: &Answered| format!("{},{},{}\n", field(&a.target), field(&a.output), field(&a.question));
    std::iter::once("target,output,question\n".to_string()).chain(answers.iter().map(line)).collect()
}

/// A text between quotes where it must be.
fn field(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_sample_with_quotes_where_they_are_needed() {
        let answered = |target: &str, output: &str| Answered {
            target: target.into(),
            output: output.into(),
            question: "Where is \"Mary\"?".into(),
            ..Answered::default()
        };
        assert_eq!(
            text(&[answered("milk,apple", "a\nb"), answered("garden", "garden")]),
            "target,output,question\n\"milk,apple\",\"a\nb\",\"Where is \"\"Mary\"\"?\"\ngarden,garden,\"Where is \"\"Mary\"\"?\"\n"
        );
        let name = file(Path::new("out"), Task::new(1).unwrap(), Length(16_000));
        assert_eq!(name, Path::new("out/qa1_16k_instruction_no_examples_no_post_prompt_no.csv"));
    }
}
