//! A small vocabulary for models that are trained on BABILong from scratch.

use std::collections::BTreeSet;
use std::path::Path;

use armt::text::{END_OF_TEXT, Vocabulary};

use super::{Books, GEN};
use crate::error::{Error, Result};
use crate::tasks::babi::Task;
use crate::tasks::babi::file::{self, Split};

/// A vocabulary of `size` numbers, `hashed` of them for all that is not kept: every token of the stories, questions and answers of the
/// tasks' published test files, of GEN and of EOS, and the most frequent of the books. What a story's sentence has at its start is kept
/// with a space before it as well, as books have it. The same files give the same vocabulary on any machine.
///
/// Refuses what [`Vocabulary::choose`] refuses, and books whose tokens are numbered by a small vocabulary already.
pub fn vocabulary(books: &Books, babi: &Path, tasks: &[Task], size: usize, hashed: usize) -> Result<Vocabulary> {
    let mut needed = BTreeSet::from([GEN.to_string(), END_OF_TEXT.to_string()]);
    for task in tasks {
        let stories = file::read(&file::find(babi, *task, Split::Test)?)?;
        for story in stories {
            let asked = story.questions.into_iter().flat_map(|q| [q.question.text, q.question.answer]);
            needed.extend(story.facts.into_iter().chain(asked).flat_map(|text| [format!(" {text}"), text]));
        }
    }
    let tokenizer = books.tokenizer();
    if tokenizer.end_of_text().is_none() {
        return Err(Error::unfit(format!("a tokenizer with the token {END_OF_TEXT}, as GPT-2's has"), "one without"));
    }
    Ok(tokenizer.choose_vocabulary(&books.counts()?, &Vec::from_iter(needed), size, hashed)?)
}
