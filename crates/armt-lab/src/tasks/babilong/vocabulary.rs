//! A small vocabulary for models that are trained on BABILong from scratch.

use std::collections::BTreeSet;

use armt::random::Random;
use armt::text::{END_OF_TEXT, Vocabulary};

use super::{Books, GEN};
use crate::error::{Error, Result};
use crate::tasks::babi::{Task, simulate};

/// Simulated stories of a task that have, between them, all words that its stories are made of.
const STORIES: u64 = 500;

/// A vocabulary of `size` numbers, `hashed` of them for all that is not kept: every token of the simulated stories, questions and answers of
/// the tasks, on which models are trained, of GEN and of EOS, and the most frequent of the books. What a story's sentence has at its start
/// is kept with a space before it as well, as books have it. The same books give the same vocabulary on any machine.
///
/// Refuses what [`Tokenizer::choose_vocabulary`](armt::text::Tokenizer::choose_vocabulary) refuses, tasks that cannot be simulated, and books whose tokens are numbered by a small vocabulary
/// already.
pub fn vocabulary(books: &Books, tasks: &[Task], size: usize, hashed: usize) -> Result<Vocabulary> {
    let mut needed = BTreeSet::from([GEN.to_string(), END_OF_TEXT.to_string()]);
    for task in tasks {
        for seed in 0..STORIES {
            let story = simulate::story(*task, &mut Random::of(&[task.number() as u64, seed]))?;
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
