//! Questions against a memory.

use std::ops::ControlFlow;

use crate::error::{Error, Result};
use crate::generate::{Options, generate_each, generate_until};
use crate::model::Model;
use crate::segment::Batch;
use crate::state::State;
use crate::text::Tokenizer;

/// What a model answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The answer.
    pub text: String,
    /// Its tokens, and the one that ended it where one did.
    pub tokens: Vec<AnswerToken>,
    /// Whether it came to its end, at an end token or a stop text, and not because it had as many tokens as it might.
    pub ended: bool,
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerToken {
    /// Its number.
    pub token: i32,
    /// What it adds to the text; nothing while a character is not whole, and where it ends the answer.
    pub text: String,
    /// How probable it was, of all tokens that could have come.
    pub probability: f32,
}

impl Answer {
    /// How probable the answer was: the product over its tokens.
    pub fn probability(&self) -> f64 {
        self.tokens.iter().map(|t| f64::from(t.probability)).product()
    }
}

/// Answers a question from a memory: the question is the text that the model goes on with, and the memory is only read. `each` hears the
/// answer as it comes and may end it. It also ends at the end token of the model or the tokenizer, and before any of the texts in `stop`.
///
/// A question without a token is an error.
pub fn answer(
    model: &Model,
    tokenizer: &Tokenizer,
    state: &State,
    question: &str,
    options: &Options,
    stop: &[String],
    each: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Answer> {
    answer_tokens(model, tokenizer, state, tokenizer.encode(question)?, options, stop, each)
}

/// Answers as [`answer`] does to a question of tokens.
pub fn answer_tokens(
    model: &Model,
    tokenizer: &Tokenizer,
    state: &State,
    prompt: Vec<i32>,
    options: &Options,
    stop: &[String],
    each: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Answer> {
    if prompt.is_empty() {
        return Err(Error::input("a question", "nothing"));
    }
    let mut options = options.clone();
    options.stop.extend(end_tokens(model, tokenizer));
    let mut speech = tokenizer.speech();
    let mut answer = Speaking { text: String::new(), said: 0, stop };
    let (mut failure, mut texts) = (None, Vec::new());
    let said = generate_until(model, &Batch { ids: prompt, texts: 1, mask: None }, state, &options, &mut |next| {
        if options.stop.contains(&next[0]) {
            return ControlFlow::Break(());
        }
        match speech.say(next[0]) {
            Ok(text) => {
                texts.push(text.clone());
                answer.add(&text, each)
            }
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = failure {
        return Err(error);
    }
    // What was held back as the possible start of a stop text is none.
    let _ = answer.say(answer.text.len(), each);
    let ended = ends(&said.tokens[0], &options) || answer.text.len() < texts.iter().map(String::len).sum();
    let tokens = said.tokens[0].iter().zip(&said.probabilities[0]).enumerate();
    let tokens = tokens.map(|(i, (token, probability))| AnswerToken {
        token: *token,
        text: texts.get(i).cloned().unwrap_or_default(),
        probability: *probability,
    });
    Ok(Answer { text: answer.text, tokens: tokens.collect(), ended })
}

/// Answers questions of tokens, each from a state of its own, side by side; greedy, or by the same numbers for all. There is nothing to
/// hear on the way.
pub fn answer_each(
    model: &Model,
    tokenizer: &Tokenizer,
    states: &[State],
    prompts: &[Vec<i32>],
    options: &Options,
) -> Result<Vec<Answer>> {
    let mut options = options.clone();
    options.stop.extend(end_tokens(model, tokenizer));
    let all = generate_each(model, prompts, states, &options)?.into_iter().map(|said| {
        let mut speech = tokenizer.speech();
        let tokens = said.tokens[0].iter().zip(&said.probabilities[0]).map(|(&token, &probability)| {
            let text = if options.stop.contains(&token) { String::new() } else { speech.say(token)? };
            Ok(AnswerToken { token, text, probability })
        });
        let tokens = tokens.collect::<Result<Vec<_>>>()?;
        let ended = ends(&said.tokens[0], &options);
        Ok(Answer { text: tokens.iter().map(|t| t.text.as_str()).collect(), tokens, ended })
    });
    all.collect()
}

/// Whether the last of some tokens ends a text.
fn ends(tokens: &[i32], options: &Options) -> bool {
    tokens.last().is_some_and(|last| options.stop.contains(last))
}

/// Tokens that end an answer.
pub fn end_tokens(model: &Model, tokenizer: &Tokenizer) -> impl Iterator<Item = i32> {
    crate::text::end_tokens(&model.config().backbone).into_iter().chain(tokenizer.end_of_text())
}

/// An answer under way. The end of the text that could be the start of a stop text is held back.
struct Speaking<'s> {
    text: String,
    said: usize,
    stop: &'s [String],
}

impl Speaking<'_> {
    fn add(&mut self, text: &str, each: &mut dyn FnMut(&str) -> ControlFlow<()>) -> ControlFlow<()> {
        self.text.push_str(text);
        let stops = self.stop.iter().filter(|s| !s.is_empty());
        if let Some(at) = stops.clone().filter_map(|s| self.text[self.said..].find(s.as_str())).min() {
            self.text.truncate(self.said + at);
            let _ = self.say(self.text.len(), each);
            return ControlFlow::Break(());
        }
        let open = &self.text[self.said..];
        let held = |s: &String| (1..s.len()).rev().find(|n| s.is_char_boundary(*n) && open.ends_with(&s[..*n]));
        let held = stops.filter_map(held).max().unwrap_or(0);
        self.say(self.text.len() - held, each)
    }

    fn say(&mut self, to: usize, each: &mut dyn FnMut(&str) -> ControlFlow<()>) -> ControlFlow<()> {
        if to == self.said {
            return ControlFlow::Continue(());
        }
        let from = std::mem::replace(&mut self.said, to);
        each(&self.text[from..to])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_text_is_found_across_tokens_and_never_said() {
        let stop = ["\n\n".to_string(), "END".to_string()];
        let mut said = String::new();
        let mut answer = Speaking { text: String::new(), said: 0, stop: &stop };
        let mut each = |s: &str| {
            said.push_str(s);
            ControlFlow::Continue(())
        };
        for piece in ["one\n", "two E", "N", "x EN"] {
            assert!(answer.add(piece, &mut each).is_continue());
        }
        assert!(answer.add("D three", &mut each).is_break());
        assert_eq!(said, "one\ntwo ENx ");
        assert_eq!(answer.text, said);
    }
}
