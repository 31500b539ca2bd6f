//! bAbI: short stories of plain facts with questions that need one to three of them.
//!
//! [`mod@file`] reads the published files (tasks 1 to 20); [`simulate`] makes new stories of tasks 1 to 5, as many as are wanted, by the
//! rules that were measured on the published ones; [`solve`] is what a reader of the sentences knows, and so answers the questions
//! of tasks 1 to 5 without a model; [`distract`] makes sentences that only seem to be facts.

pub mod distract;
pub mod file;
mod sentence;
pub mod simulate;
pub mod solve;
mod world;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use self::solve::Knowledge;
use crate::error::{Error, Result};

/// Tasks that can be simulated and answered without a model: qa1 to qa5.
pub const SIMULATED: usize = 5;
/// Tasks of the published files.
const TASKS: usize = 20;

/// One of the twenty tasks, written qa1 to qa20.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Task(usize);

impl Task {
    /// The task of a number; below 1 and above 20 there is none.
    pub fn new(number: usize) -> Result<Self> {
        if (1..=TASKS).contains(&number) {
            Ok(Task(number))
        } else {
            Err(Error::config("task", "qa1 to qa20", format!("qa{number}")))
        }
    }

    /// Its number, from 1.
    pub fn number(self) -> usize {
        self.0
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qa{}", self.0)
    }
}

impl FromStr for Task {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let number = s.strip_prefix("qa").and_then(|n| n.parse().ok());
        number.and_then(|n| Task::new(n).ok()).ok_or_else(|| Error::config("task", "qa1 to qa20", s))
    }
}

/// A question, its answer, and the facts that it follows from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Question {
    /// As it is asked.
    pub text: String,
    /// As it is answered: mostly one word; lists are joined by commas.
    pub answer: String,
    /// Places of the supporting facts in the story, from 0, in the order of the published files.
    pub supports: Vec<usize>,
}

/// A question and when it is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// How many of the story's facts come before it.
    pub after: usize,
    /// What is asked.
    pub question: Question,
}

/// Facts in their order, and the questions that are asked between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Story {
    /// Sentences.
    pub facts: Vec<String>,
    /// In the order in which they are asked.
    pub questions: Vec<Asked>,
}

/// One question and all facts before it: what a model is asked. Earlier questions are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Sentences.
    pub facts: Vec<String>,
    /// What is asked.
    pub question: Question,
}

impl Story {
    /// One sample for each question.
    pub fn samples(&self) -> impl Iterator<Item = Sample> + '_ {
        (0..self.questions.len()).map(|i| self.sample(i))
    }

    /// The sample of question `i`, which must be one of the story's.
    pub(crate) fn sample(&self, i: usize) -> Sample {
        let asked = &self.questions[i];
        Sample { facts: self.facts[..asked.after].to_vec(), question: asked.question.clone() }
    }
}

impl Sample {
    /// Every question of the task that the facts answer, the published one mostly among them: about each person and object of which
    /// enough is known, however long ago it was told. Training can ask several about one long text. A task above qa5 and a fact that
    /// is none of the task's sentences are refused.
    pub fn questions_at_end(&self, task: Task) -> Result<Vec<Question>> {
        Knowledge::of(&self.facts)?.questions(task)
    }

    /// The questions that earlier facts answer otherwise than the latest, and then the others, both in the order that they had.
    pub fn answered_again_first(&self, questions: Vec<Question>) -> Result<Vec<Question>> {
        let known = Knowledge::of(&self.facts)?;
        let (mut again, mut once) = (Vec::new(), Vec::new());
        for question in questions {
            let answers = known.answers(&question.text)?.len();
            if answers > 1 { again.push(question) } else { once.push(question) }
        }
        again.append(&mut once);
        Ok(again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_written_qa_and_a_number_to_twenty() {
        for n in 1..=20 {
            let task: Task = format!("qa{n}").parse().unwrap();
            assert_eq!((task.number(), task.to_string()), (n, format!("qa{n}")));
        }
        for wrong in ["qa0", "qa21", "1", "qa", "QA1", "qa1 "] {
            let error = wrong.parse::<Task>().unwrap_err().to_string();
            assert!(error.contains("qa1 to qa20") && error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn a_sample_has_the_facts_before_its_question_and_no_later_one() {
        let question = |text: &str| Question { text: text.into(), answer: "garden".into(), supports: vec![0] };
        let asked = |after, text| Asked { after, question: question(text) };
        let story = Story {
            facts: ["a.", "b.", "c."].map(String::from).to_vec(),
            questions: vec![asked(1, "first?"), asked(3, "second?")],
        };
        let samples: Vec<Sample> = story.samples().collect();
        assert_eq!(samples.iter().map(|s| s.facts.len()).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(samples[1].question.text, "second?");
    }
}
