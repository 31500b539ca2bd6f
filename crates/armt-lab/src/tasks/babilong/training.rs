//! BABILong as a stage of training: simulated stories without end, in texts of whole segments.
//!
//! A text has n segments of S tokens. Its facts come among background as in any sample, and what is asked stands at its very end:
//! `question GEN answer EOS`, several one after the other where they fit. The text ends anywhere in its last segment, which is filled up with
//! EOS, so that borders cut questions as they do those of contexts of any length; one text in four asks in a segment of its own, as
//! whoever asks a memory that was read before does. Each text is written in one of the forms that there are. How much is background follows
//! from the length and the number of facts.
//!
//! Half of the stories are told and asked about by the rules of the published ones, as far as these are no longer than the stage's; the others
//! have any number of facts, and anything that they answer is asked. Of several tasks each text is of one: its first question is that
//! task's, the others any of the tasks' that its facts answer. A share of the texts is asked first what earlier facts answer otherwise than
//! the latest ("What did Fred give to Mary?", where he gave her several things), and a share such questions as a stage prefers.
//!
//! What the benchmark has seldom and a reader meets often comes in shares that a stage names: texts of facts alone, without background; facts
//! side by side, at the very start or at the very end; sentences among them that only seem to be facts.
//!
//! Where facts are aligned, each has a segment of its own, filled up with EOS, and so has each question: what is to be learned there is
//! to write a fact into the memory and to find it again, without reading across borders and without background.

use std::sync::Arc;

use armt::engine::machine::expect_room;
use armt::random::Random;
use serde::{Deserialize, Serialize};

use super::{Babilong, Form, Gaps, Length, Piece};
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::asked::{Prompt, Text};
use crate::tasks::babi::{Question, Sample, Task, distract, simulate};
use crate::tasks::training::{TrainingTask, some_of};

/// One text in so many asks in a segment of its own.
const OWN_SEGMENT: usize = 4;
/// Tokens that most facts, and questions with their answers, have at most.
const SENTENCE: usize = 16;
/// How often another story is tried where one answers nothing or is too long.
const ATTEMPTS: usize = 2000;
/// How often one by the published rules is, before one of any length.
const PUBLISHED_ATTEMPTS: usize = 4;
/// Places that facts side by side stand in, at most.
const CLUSTERS: usize = 3;

/// Questions that come first: one kind of them is a small part of all that a long story answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prefer {
    /// How they begin: "What did" of "What did Fred give to Mary?".
    pub questions: String,
    /// The share of the texts.
    pub share: f64,
}

impl Prefer {
    /// Refuses a share beyond 1, and no words.
    pub fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.share) {
            return Err(Error::config("prefer.share", "a share from 0 to 1", self.share));
        }
        match self.questions.is_empty() {
            true => Err(Error::config("prefer.questions", "the words that questions begin with", "none")),
            false => Ok(()),
        }
    }
}

/// Stories of up to so many facts in up to so many segments.
#[derive(Clone)]
pub struct BabilongTraining {
    /// Where background and tokens come from, in each form that texts are to have, at least one; all with one tokenizer.
    pub babilong: Vec<Arc<Babilong>>,
    /// The tasks, at least one, which can be simulated; each text is of one of them.
    pub tasks: Vec<Task>,
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
    /// Whether of qa4 only such questions are asked as repeat a fact's words: "What is north of the office?" where one lies so, and not what
    /// the office is south of.
    pub direct: bool,
    /// Share of the batches that have facts alone, in as many segments as these take.
    pub alone: f64,
    /// Share of the texts whose facts stand side by side in a few places, or all at the start or the end.
    pub clusters: f64,
    /// Sentences that only seem to be facts, at most; half of the texts have none.
    pub distract: usize,
    /// Share of the texts that are asked first what their story answers more than once, of which the latest counts.
    pub again: f64,
    /// Share of qa5's stories that are gifts alone, of any thing to anybody ([`simulate::gifts`]).
    pub gifts: f64,
    /// Share of the texts with background in which each border between segments cuts the next fact, as long as there is one; in the others as many are cut as
    /// comes of itself.
    pub cut: f64,
    /// Questions that a share of the texts is asked before the others, where their story answers such.
    pub prefer: Option<Prefer>,
    /// Texts of a batch.
    pub batch: usize,
    /// Whether each batch has a random number of segments, up to `segments`.
    pub vary: bool,
}

impl TrainingTask for BabilongTraining {
    fn name(&self) -> String {
        let Self { segment, segments, facts, .. } = self;
        let tasks = shares(&self.tasks);
        match self.aligned {
            true => format!("{tasks}, a fact in each of {segments} x {segment} tokens"),
            false => format!("{tasks}, up to {facts} facts in {segments} x {segment} tokens"),
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

    fn validation(&self, _from: usize, texts: usize, random: &mut Random) -> Result<TaskBatch> {
        self.texts(texts, self.segments, 1, random)
    }
}

/// Tasks in words, each once, with how often it comes where that is more than once: "qa1, 2 qa2".
fn shares(tasks: &[Task]) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for name in tasks.iter().map(Task::to_string) {
        match counts.iter_mut().find(|(counted, _)| *counted == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let words = counts.into_iter().map(|(name, count)| if count == 1 { name } else { format!("{count} {name}") });
    words.collect::<Vec<_>>().join(", ")
}

/// Whether what a question says of the answer stands in a fact in the same words.
fn repeats_a_fact(question: &Question, facts: &[String]) -> bool {
    let said = question.text.strip_prefix("What is ").and_then(|text| text.strip_suffix('?'));
    said.is_some_and(|said| facts.iter().any(|fact| fact.contains(said)))
}

impl BabilongTraining {
    /// Refuses sizes of zero, shares beyond 1, aligned texts of too few segments, and a task that cannot be simulated.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("segment", self.segment),
            ("segments", self.segments),
            ("facts", self.facts),
            ("questions", self.questions),
            ("stories", self.tasks.len()),
            ("forms", self.babilong.len()),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(Error::config(name, "at least 1", 0));
        }
        // Tokens and what is to be said after each.
        expect_room("segments by texts", &[self.batch, self.segments, self.segment, 2 * size_of::<i32>()])?;
        expect_room("facts", &[self.facts, SENTENCE, size_of::<i32>()])?;
        expect_room("questions", &[self.questions, SENTENCE, size_of::<i32>()])?;
        let shares =
            [("alone", self.alone), ("clusters", self.clusters), ("again", self.again), ("gifts", self.gifts), ("cut", self.cut)];
        if let Some((name, share)) = shares.into_iter().find(|(_, s)| !(0.0..=1.0).contains(s)) {
            return Err(Error::config(name, "a share from 0 to 1", share));
        }
        self.prefer.as_ref().map_or(Ok(()), Prefer::check)?;
        let least = self.least_facts() + 1;
        if self.aligned && self.segments < least {
            let wanted = format!("at least {least} where facts and questions have segments of their own");
            return Err(Error::config("segments", &wanted, self.segments));
        }
        if self.direct && self.tasks.iter().all(|task| task.number() != 4) {
            return Err(Error::config("direct", "false but with qa4, whose questions may repeat a fact's words", self.tasks[0]));
        }
        self.tasks.iter().try_for_each(|task| simulate::story(*task, &mut Random::new(0)).map(|_| ()))
    }

    /// Facts that a story of any of the tasks needs.
    fn least_facts(&self) -> usize {
        self.tasks.iter().map(|task| least_facts(*task)).max().unwrap_or(1)
    }

    fn end_token(&self) -> i32 {
        self.babilong[0].end_token()
    }

    fn texts(&self, texts: usize, segments: usize, questions: usize, random: &mut Random) -> Result<TaskBatch> {
        let alone = !self.aligned && random.uniform() < self.alone;
        let mut made = Vec::with_capacity(texts);
        for _ in 0..texts {
            made.push(match self.aligned {
                true => self.aligned_text(segments, questions, random)?,
                false => self.hidden_text(if alone { None } else { Some(segments) }, questions, random)?,
            });
        }
        Ok(TaskBatch::of(made, self.end_token()))
    }

    /// A story of up to `most` facts that answers something, and what it is asked, in this order.
    fn story(&self, task: Task, most: usize, random: &mut Random) -> Result<Asked> {
        let gifts = self.is_of_gifts(task, random);
        if !gifts && random.below(2) == 0 {
            for _ in 0..PUBLISHED_ATTEMPTS {
                let story = simulate::story(task, random)?;
                let Sample { facts, question } = story.sample(random.below(story.questions.len()));
                if facts.len() <= most && (!self.is_direct(task) || repeats_a_fact(&question, &facts)) {
                    return self.asked(task, facts, Some(question), random);
                }
            }
        }
        let least = least_facts(task).min(most);
        let count = least + random.below(most - least + 1);
        self.story_of(task, count, gifts, random)
    }

    /// Whether a text's story is to be gifts alone.
    fn is_of_gifts(&self, task: Task, random: &mut Random) -> bool {
        self.gifts > 0.0 && task.number() == 5 && random.uniform() < self.gifts
    }

    /// A story of `count` facts that answers something, whatever it is.
    fn story_of(&self, task: Task, count: usize, gifts: bool, random: &mut Random) -> Result<Asked> {
        for _ in 0..ATTEMPTS {
            let facts = if gifts { simulate::gifts(count, random) } else { simulate::facts(task, count, random)? };
            let asked = self.asked(task, facts, None, random)?;
            if !asked.questions.is_empty() {
                return Ok(asked);
            }
        }
        Err(Error::config("facts", &format!("enough for a question of {task}"), count))
    }

    /// What can be asked of some facts: first a question of their own task, then those of all tasks, in random order.
    fn asked(&self, task: Task, facts: Vec<String>, first: Option<Question>, random: &mut Random) -> Result<Asked> {
        let none = Question { text: String::new(), answer: String::new(), supports: Vec::new() };
        let sample = Sample { facts, question: none };
        let of = |task: Task, random: &mut Random| -> Result<Vec<Question>> {
            let mut questions = sample.questions_at_end(task)?;
            if self.is_direct(task) {
                questions.retain(|q| repeats_a_fact(q, &sample.facts));
            }
            super::shuffle(&mut questions, Random::new(random.bits()));
            Ok(questions)
        };
        let own = of(task, random)?;
        let Some(first) = first.or_else(|| own.first().cloned()) else {
            return Ok(Asked { facts: sample.facts, questions: Vec::new() });
        };
        let mut others = own;
        for other in self.tasks.iter().filter(|other| **other != task) {
            others.extend(of(*other, random)?);
        }
        super::shuffle(&mut others, Random::new(random.bits()));
        others.retain(|q| q.text != first.text);
        let mut questions: Vec<Question> = std::iter::once(first).chain(others).collect();
        if self.again > 0.0 && random.uniform() < self.again {
            questions = sample.answered_again_first(questions)?;
        }
        if let Some(prefer) = &self.prefer
            && random.uniform() < prefer.share
        {
            // The sort is stable: both halves keep their order.
            questions.sort_by_key(|question| !question.text.starts_with(&prefer.questions));
        }
        Ok(Asked { facts: sample.facts, questions })
    }

    fn is_direct(&self, task: Task) -> bool {
        self.direct && task.number() == 4
    }

    fn task(&self, random: &mut Random) -> Task {
        self.tasks[random.below(self.tasks.len())]
    }

    /// A fact in each segment, then a question in each of the last ones. A story that cannot have so many facts leaves some empty.
    fn aligned_text(&self, segments: usize, questions: usize, random: &mut Random) -> Result<Text> {
        let (task, asked) = (self.task(random), questions.min(segments / 2));
        let told = segments - asked;
        let gifts = self.is_of_gifts(task, random);
        let Asked { facts, questions } = self.story_of(task, told, gifts, random)?;
        let (babilong, end) = (&self.babilong[0], self.end_token());
        let mut places: Vec<usize> = (0..told).collect();
        super::shuffle(&mut places, Random::new(random.bits()));
        places.truncate(facts.len());
        places.sort_unstable();
        let mut text = Text::default();
        for (fact, place) in facts.iter().zip(places) {
            text.fill_to(place * self.segment, end);
            text.tell(babilong.encode(fact)?.iter().copied());
        }
        text.fill_to(told * self.segment, end);
        // Where there are fewer, some are asked again.
        for question in questions.iter().cycle().take(asked) {
            text.ask(&babilong.prompt(question)?);
            text.fill(self.segment, end);
        }
        match text.ids.len() {
            length if length == segments * self.segment => Ok(text),
            _ => Err(Error::config("segment", "room for every fact and for every question with its answer", self.segment)),
        }
    }

    /// Facts among background, then as many questions as fit into a segment. Without a number of segments there is no background.
    fn hidden_text(&self, segments: Option<usize>, questions: usize, random: &mut Random) -> Result<Text> {
        let task = self.task(random);
        let babilong = &self.babilong[random.below(self.babilong.len())];
        let length = segments.unwrap_or(self.segments) * self.segment;
        // Stories that do not fit become shorter.
        let least = least_facts(task).min(self.facts);
        let mut most = self.facts;
        for _ in 0..ATTEMPTS {
            let Asked { mut facts, questions: all } = self.story(task, most, random)?;
            let count = facts.len();
            let mut counts = vec![true; count];
            if self.distract > 0 && random.below(2) == 0 {
                for _ in 0..=random.below(self.distract) {
                    let place = random.below(facts.len() + 1);
                    facts.insert(place, distract::sentence(random));
                    counts.insert(place, false);
                }
            }
            // Running text has a space there, the benchmark's older forms have none.
            if babilong.form() == Form::Mixed && random.below(2) == 0 {
                facts.iter_mut().for_each(|fact| fact.insert(0, ' '));
            }
            let mut prompts: Vec<Prompt> = Vec::new();
            let mut asked = 0;
            for question in all.iter().take(questions) {
                let prompt = babilong.prompt(question)?;
                let size = prompt.question.len() + prompt.answer.len();
                if asked + size <= self.segment {
                    asked += size;
                    prompts.push(prompt);
                }
            }
            let sample = Sample { facts, question: all[0].clone() };
            let mut facts = Told { facts: babilong.facts(&sample)?, counts, next: 0 };
            let told = super::told(&facts.facts);
            if prompts.is_empty() || told + asked > length {
                most = (count - 1).max(least);
                continue;
            }
            let before = length - self.segment;
            let context = match (segments, told <= before && random.below(OWN_SEGMENT) == 0) {
                (None, _) => told,
                (Some(_), true) => before,
                (Some(_), false) => {
                    let least = told.max((before + 1).saturating_sub(asked));
                    least + random.below(length - asked - least + 1)
                }
            };
            let gaps = self.gaps(random);
            let cut = self.cut > 0.0 && random.uniform() < self.cut;
            let mut context = babilong.sample_in(gaps, sample, Length(context), Random::new(random.bits()))?.context();
            let (mut text, mut come) = (Text::default(), 0);
            while let Some(piece) = context.next_piece()? {
                match piece {
                    Piece::Fact(_) => {
                        come += 1;
                        facts.tell_until(come, &mut text);
                    }
                    Piece::Background(tokens) if cut => self.pass_and_cut(tokens, &mut facts, &mut text, random),
                    Piece::Background(tokens) => text.pass(tokens.iter().copied()),
                }
            }
            prompts.iter().for_each(|prompt| text.ask(prompt));
            text.fill(self.segment, self.end_token());
            return Ok(text);
        }
        Err(Error::config("segment", "room for a fact and a question with its answer", self.segment))
    }

    /// Background, and at a border between segments within it the next fact, told before its time so that the border cuts it.
    fn pass_and_cut(&self, background: &[i32], facts: &mut Told, text: &mut Text, random: &mut Random) {
        let mut left = background;
        while let Some(next) = facts.facts.get(facts.next).map(|fact| fact.len()).filter(|tokens| *tokens > 1) {
            let room = self.segment - text.ids.len() % self.segment;
            let before = 1 + random.below(next - 1);
            if left.len() < room || room < before {
                break;
            }
            let (first, rest) = left.split_at(room - before);
            text.pass(first.iter().copied());
            facts.tell_until(facts.next + 1, text);
            left = rest;
        }
        text.pass(left.iter().copied());
    }

    fn gaps(&self, random: &mut Random) -> Gaps {
        match (random.uniform() < self.clusters, random.below(6)) {
            (false, _) => Gaps::Any,
            (true, 0) => Gaps::Start,
            (true, 1) => Gaps::End,
            (true, _) => Gaps::Few(1 + random.below(CLUSTERS)),
        }
    }
}

/// Facts, and what is asked about them.
struct Asked {
    facts: Vec<String>,
    questions: Vec<Question>,
}

/// The facts of a text in their order, and how many of them are told.
struct Told {
    facts: Vec<Arc<[i32]>>,
    /// Whether it is a fact, or only seems to be one.
    counts: Vec<bool>,
    next: usize,
}

impl Told {
    /// Tells facts until so many are told.
    fn tell_until(&mut self, told: usize, text: &mut Text) {
        while self.next < told {
            let tokens = self.facts[self.next].iter().copied();
            if self.counts[self.next] {
                text.tell(tokens)
            } else {
                text.pass(tokens)
            }
            self.next += 1;
        }
    }
}

/// Facts that a story needs to answer anything, and does often enough: a thing must be taken or given, and in qa3 have been moved. In qa4 it
/// always has two.
fn least_facts(task: Task) -> usize {
    match task.number() {
        2 | 4 | 5 => 2,
        3 => 4,
        _ => 1,
    }
}
