//! BABILong as a stage of training: simulated stories without end, in texts of whole segments.
//!
//! A text has n segments of S tokens. Its facts come among background as in any sample, and what is asked stands at its very end:
//! `question GEN answer EOS`, several one after the other where they fit. The text ends anywhere in its last segment, which is filled up with
//! EOS, so that borders cut questions as they do those of contexts of any length; one text in four asks in a segment of its own, as
//! whoever asks a memory that was read before does. Half of the texts have a space before each fact, as running text does and the
//! benchmark does not: its tokens are others. How much is background follows from the length and the number of facts.
//!
//! Where facts are aligned, each has a segment of its own, filled up with EOS, and so has each question: what is to be learned there is
//! to write a fact into the memory and to find it again, without reading across borders and without background.

use std::sync::Arc;

use armt::engine::machine::expect_room;
use armt::random::Random;
use armt::recurrence::Targets;
use armt::segment::Batch;

use super::{Babilong, Length, Prompt};
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::babi::{Question, Sample, Task, simulate};
use crate::tasks::training::{TrainingTask, some_of};

/// One text in so many asks in a segment of its own.
const OWN_SEGMENT: usize = 4;
/// Tokens that most facts, and questions with their answers, have at most.
const SENTENCE: usize = 16;
/// How often another story is tried where one answers nothing or is too long.
const ATTEMPTS: usize = 2000;

/// Stories of up to so many facts in up to so many segments.
#[derive(Clone)]
pub struct BabilongTraining {
    /// Where background and tokens come from.
    pub babilong: Arc<Babilong>,
    /// The task, which can be simulated.
    pub task: Task,
    /// Tokens of a segment, S.
    pub segment: usize,
    /// Segments of a text.
    pub segments: usize,
    /// Facts of a story, at most.
    pub facts: usize,
    /// Questions about a story, at most, in training; each batch has a random number of them.
    pub questions: usize,
    /// Whether each fact and each question has a segment of its own.
    pub aligned: bool,
    /// Whether only such questions are asked as repeat a fact's words: of qa4 "What is north of the office?" where one lies so, and not what the
    /// office is south of.
    pub direct: bool,
    /// Texts of a batch.
    pub batch: usize,
    /// Whether each batch has a random number of segments, up to `segments`.
    pub vary: bool,
}

impl TrainingTask for BabilongTraining {
    fn name(&self) -> String {
        let Self { task, segment, segments, facts, .. } = self;
        match self.aligned {
            true => format!("{task}, a fact in each of {segments} x {segment} tokens"),
            false => format!("{task}, up to {facts} facts in {segments} x {segment} tokens"),
        }
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![("segments", self.segments), ("segment", self.segment)]
    }

    fn batch(&self, random: &mut Random) -> Result<TaskBatch> {
        let segments = if self.vary { some_of(self.segments, random) } else { self.segments };
        let sentences = self.least_facts() + 1;
        let least = if self.aligned { sentences } else { (sentences * SENTENCE).div_ceil(self.segment) };
        let segments = segments.max(least.min(self.segments));
        // A model that always saw several questions does not answer a single one.
        self.texts(self.batch, segments, 1 + random.below(self.questions), random)
    }

    fn validation(&self, texts: usize, random: &mut Random) -> Result<TaskBatch> {
        self.texts(texts, self.segments, 1, random)
    }
}

/// Whether what a question says of the answer stands in a fact in the same words.
fn repeats_a_fact(question: &Question, facts: &[String]) -> bool {
    let said = question.text.strip_prefix("What is ").and_then(|text| text.strip_suffix('?'));
    said.is_some_and(|said| facts.iter().any(|fact| fact.contains(said)))
}

/// A text and what its positions should predict.
#[derive(Default)]
struct Text {
    ids: Vec<i32>,
    next: Vec<i32>,
}

impl Text {
    fn tell(&mut self, tokens: impl IntoIterator<Item = i32>) {
        self.ids.extend(tokens);
        self.next.resize(self.ids.len(), -1);
    }

    /// A question and its answer, which is predicted from GEN on.
    fn ask(&mut self, prompt: &Prompt) {
        self.tell(prompt.question.iter().copied());
        if let Some(before) = self.next.last_mut() {
            *before = prompt.answer[0];
        }
        for (i, token) in prompt.answer.iter().enumerate() {
            self.ids.push(*token);
            self.next.push(prompt.answer.get(i + 1).copied().unwrap_or(-1));
        }
    }

    /// Fills the last segment up.
    fn fill(&mut self, segment: usize, token: i32) {
        let length = self.ids.len().next_multiple_of(segment);
        self.ids.resize(length, token);
        self.next.resize(length, -1);
    }
}

impl BabilongTraining {
    /// Refuses sizes of zero, aligned texts of too few segments, and a task that cannot be simulated.
    pub fn check(&self) -> Result<()> {
        let sizes = [("segment", self.segment), ("segments", self.segments), ("facts", self.facts), ("questions", self.questions)];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(Error::config(name, "at least 1", 0));
        }
        // Tokens and what is to be said after each.
        expect_room("segments by texts", &[self.batch, self.segments, self.segment, 2 * size_of::<i32>()])?;
        expect_room("facts", &[self.facts, SENTENCE, size_of::<i32>()])?;
        expect_room("questions", &[self.questions, SENTENCE, size_of::<i32>()])?;
        let least = self.least_facts() + 1;
        if self.aligned && self.segments < least {
            let wanted = format!("at least {least} where facts and questions have segments of their own");
            return Err(Error::config("segments", &wanted, self.segments));
        }
        if self.direct && self.task.number() != 4 {
            return Err(Error::config("direct", "false but with qa4, whose questions may repeat a fact's words", self.task));
        }
        simulate::story(self.task, &mut Random::new(0)).map(|_| ())
    }

    /// Facts that a story needs to answer anything, and does often enough: a thing must be taken or given, and in qa3 have been moved. In
    /// qa4 it always has two.
    fn least_facts(&self) -> usize {
        match self.task.number() {
            2 | 4 | 5 => 2,
            3 => 4,
            _ => 1,
        }
    }

    fn texts(&self, texts: usize, segments: usize, questions: usize, random: &mut Random) -> Result<TaskBatch> {
        let (mut ids, mut next) = (Vec::new(), Vec::new());
        for _ in 0..texts {
            let text = match self.aligned {
                true => self.aligned_text(segments, questions, random)?,
                false => self.hidden_text(segments, questions, random)?,
            };
            ids.extend(text.ids);
            next.extend(text.next);
        }
        Ok(TaskBatch { batch: Batch { ids, texts, mask: None }, targets: Targets { next } })
    }

    /// A story of `facts` facts that answers something, and all questions that it does, in random order.
    fn story(&self, facts: usize, random: &mut Random) -> Result<(Vec<String>, Vec<Question>)> {
        for _ in 0..ATTEMPTS {
            let told = simulate::facts(self.task, facts, random)?;
            let asked = Question { text: String::new(), answer: String::new(), supports: Vec::new() };
            let mut questions = Sample { facts: told.clone(), question: asked }.questions_at_end(self.task)?;
            if self.direct {
                questions.retain(|q| repeats_a_fact(q, &told));
            }
            for i in (1..questions.len()).rev() {
                questions.swap(i, random.below(i + 1));
            }
            if !questions.is_empty() {
                return Ok((told, questions));
            }
        }
        Err(Error::config("facts", &format!("enough for a question of {}", self.task), facts))
    }

    /// A fact in each segment, then a question in each of the last ones.
    fn aligned_text(&self, segments: usize, questions: usize, random: &mut Random) -> Result<Text> {
        let asked = questions.min(segments / 2);
        let (facts, all) = self.story(segments - asked, random)?;
        let mut text = Text::default();
        for fact in &facts {
            text.tell(self.babilong.encode(fact)?.iter().copied());
            text.fill(self.segment, self.babilong.end_token());
        }
        // Where there are fewer, some are asked again.
        for question in all.iter().cycle().take(asked) {
            text.ask(&self.babilong.prompt(question)?);
            text.fill(self.segment, self.babilong.end_token());
        }
        match text.ids.len() {
            length if length == segments * self.segment => Ok(text),
            _ => Err(Error::config("segment", "room for every fact and for every question with its answer", self.segment)),
        }
    }

    /// Facts among background, then as many questions as fit into a segment.
    fn hidden_text(&self, segments: usize, questions: usize, random: &mut Random) -> Result<Text> {
        let length = segments * self.segment;
        // Stories that do not fit become shorter.
        let least = self.least_facts().min(self.facts);
        let mut most = self.facts;
        for _ in 0..ATTEMPTS {
            let (mut facts, all) = self.story(least + random.below(most - least + 1), random)?;
            if random.below(2) == 0 {
                facts.iter_mut().for_each(|fact| fact.insert(0, ' '));
            }
            let mut prompts: Vec<Prompt> = Vec::new();
            let mut asked = 0;
            for question in all.iter().take(questions) {
                let prompt = self.babilong.prompt(question)?;
                let size = prompt.question.len() + prompt.answer.len();
                if asked + size <= self.segment {
                    asked += size;
                    prompts.push(prompt);
                }
            }
            let told: usize = facts.iter().map(|f| self.babilong.encode(f).map(|t| t.len())).sum::<Result<_>>()?;
            if prompts.is_empty() || told + asked > length {
                most = (facts.len() - 1).max(least);
                continue;
            }
            let before = length - self.segment;
            let context = match told <= before && random.below(OWN_SEGMENT) == 0 {
                true => before,
                false => {
                    let least = told.max((before + 1).saturating_sub(asked));
                    least + random.below(length - asked - least + 1)
                }
            };
            let sample = Sample { facts, question: all[0].clone() };
            let context = self.babilong.sample(sample, Length(context), Random::new(random.bits()))?.context();
            let mut text = Text::default();
            text.tell(context.collect::<armt::Result<Vec<i32>>>()?);
            prompts.iter().for_each(|prompt| text.ask(prompt));
            text.fill(self.segment, self.babilong.end_token());
            return Ok(text);
        }
        Err(Error::config("segment", "room for a fact and a question with its answer", self.segment))
    }
}
