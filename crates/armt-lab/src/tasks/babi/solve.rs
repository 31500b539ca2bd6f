//! Tasks 1 to 5 without a model: what a reader of the sentences knows, and the questions that this answers.
//!
//! A person is where his latest move took him. An object is where its holder is, or where the last one left it; the places that it was
//! carried through, in order, are its path, and "before the L" is the place before L on it, counted from the latest time that it came
//! to L. Where someone was before his first move is never told: an object that he takes then has no known place until he moves.

use super::sentence::{Event, opposite, word};
use super::{Question, SIMULATED, Task};
use crate::error::{Error, Result};

/// What follows from some facts.
#[derive(Clone, Debug, Default)]
pub struct Knowledge<'a> {
    /// In the order of their first move, so that questions come in the same order everywhere.
    people: Vec<Person<'a>>,
    objects: Vec<Object<'a>>,
    gives: Vec<Give<'a>>,
    lies: Vec<Lies<'a>>,
}

#[derive(Clone, Debug)]
struct Person<'a> {
    name: &'a str,
    place: &'a str,
    /// The fact that says so.
    moved: usize,
}

#[derive(Clone, Debug)]
struct Object<'a> {
    name: &'a str,
    holder: Option<&'a str>,
    /// The latest fact in which it was taken, left or handed over.
    latest: usize,
    /// Places in order, each with the move that brought it there, or that had brought the one who took it from there.
    path: Vec<(&'a str, usize)>,
    /// The move of the one who has or had it last that says where it is.
    here: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Give<'a> {
    fact: usize,
    who: &'a str,
    object: &'a str,
    to: &'a str,
}

#[derive(Clone, Copy, Debug)]
struct Lies<'a> {
    fact: usize,
    place: &'a str,
    direction: &'a str,
    of: &'a str,
}

/// An answer and the facts that it follows from, in the order of the published files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The word.
    pub text: String,
    /// Places of the facts, from 0.
    pub supports: Vec<usize>,
}

impl<'a> Knowledge<'a> {
    /// What some facts say. A sentence that is none of tasks 1 to 5 is refused.
    pub fn of(facts: &'a [String]) -> Result<Self> {
        let mut known = Knowledge::default();
        for (fact, text) in facts.iter().enumerate() {
            let event = Event::read(text)
                .ok_or_else(|| Error::input(format!("fact {}", fact + 1), "a sentence of qa1 to qa5", format!("'{text}'")))?;
            known.learn(fact, event);
        }
        Ok(known)
    }

    fn learn(&mut self, fact: usize, event: Event<'a>) {
        match event {
            Event::Move { who, place } => {
                match self.people.iter_mut().find(|p| p.name == who) {
                    Some(person) => (person.place, person.moved) = (place, fact),
                    None => self.people.push(Person { name: who, place, moved: fact }),
                }
                for object in self.objects.iter_mut().filter(|o| o.holder == Some(who)) {
                    object.path.push((place, fact));
                    object.here = Some(fact);
                }
            }
            Event::Get { who, object } => self.hand(fact, object, Some(who), who),
            Event::Drop { who, object } => self.hand(fact, object, None, who),
            Event::Give { who, object, to } => {
                self.gives.push(Give { fact, who, object, to });
                self.hand(fact, object, Some(to), who);
            }
            Event::Lies { place, direction, of } => self.lies.push(Lies { fact, place, direction, of }),
        }
    }

    /// An object changes hands where `who` is.
    fn hand(&mut self, fact: usize, name: &'a str, holder: Option<&'a str>, who: &'a str) {
        let at = self.people.iter().find(|p| p.name == who).map(|p| (p.place, p.moved));
        let i = self.objects.iter().position(|o| o.name == name).unwrap_or_else(|| {
            self.objects.push(Object { name, holder: None, latest: fact, path: Vec::new(), here: None });
            self.objects.len() - 1
        });
        let object = &mut self.objects[i];
        (object.holder, object.latest) = (holder, fact);
        if let Some((place, moved)) = at {
            if object.path.last().is_none_or(|(last, _)| *last != place) {
                object.path.push((place, moved));
            }
            object.here = Some(moved);
        }
    }

    /// The answers to a question, that of its latest sense first; none if the facts do not tell. Only where one person gave several
    /// things to another, or something came to one place several times, is there more than one. A question that is none of tasks 1 to
    /// 5 is refused.
    pub fn answers(&self, question: &str) -> Result<Vec<Answer>> {
        let asked = question.trim().strip_suffix('?').and_then(|q| self.understand(q));
        asked.ok_or_else(|| Error::input("question", "one of qa1 to qa5", format!("'{question}'")))
    }

    fn understand(&self, asked: &str) -> Option<Vec<Answer>> {
        if let Some(object) = asked.strip_prefix("Where is the ") {
            let object = self.objects.iter().find(|o| Some(o.name) == word(object));
            return Some(object.and_then(Object::place).into_iter().collect());
        }
        if let Some(person) = asked.strip_prefix("Where is ") {
            let person = self.people.iter().find(|p| Some(p.name) == word(person));
            return Some(person.map(|p| answer(p.place, &[p.moved])).into_iter().collect());
        }
        if let Some((object, place)) = asked.strip_prefix("Where was the ").and_then(|a| a.split_once(" before the ")) {
            let object = self.objects.iter().find(|o| o.name == object);
            return Some(object.map(|o| o.before(place)).unwrap_or_default());
        }
        if let Some(of) = asked.strip_prefix("What is the ").and_then(|a| a.strip_suffix(" of")) {
            let (of, direction) = of.split_once(' ')?;
            return Some(self.beside(of, opposite(direction)?));
        }
        if let Some((direction, of)) = asked.strip_prefix("What is ").and_then(|a| a.split_once(" of the ")) {
            opposite(direction)?;
            return Some(self.beside(of, direction));
        }
        if let Some((who, to)) = asked.strip_prefix("What did ").and_then(|a| a.split_once(" give to ")) {
            return Some(self.given(|g| g.who == who && g.to == to, |g| g.object));
        }
        if let Some((who, object)) = asked.strip_prefix("Who did ").and_then(|a| a.split_once(" give the ")) {
            let object = object.strip_suffix(" to")?;
            return Some(self.given(|g| g.who == who && g.object == object, |g| g.to));
        }
        if let Some(object) = asked.strip_prefix("Who received the ") {
            return Some(self.given(|g| g.object == object, |g| g.to));
        }
        let gave = asked.strip_prefix("Who gave the ")?;
        Some(match gave.split_once(" to ") {
            Some((object, to)) => self.given(|g| g.object == object && g.to == to, |g| g.who),
            None => self.given(|g| g.object == gave, |g| g.who),
        })
    }

    /// What lies in a direction of a place, told either way round.
    fn beside(&self, of: &str, direction: &str) -> Vec<Answer> {
        let told = self.lies.iter().filter_map(|l| {
            if l.of == of && l.direction == direction {
                return Some(answer(l.place, &[l.fact]));
            }
            (l.place == of && opposite(l.direction) == Some(direction)).then(|| answer(l.of, &[l.fact]))
        });
        told.collect()
    }

    fn given(&self, which: impl Fn(&Give<'_>) -> bool, what: impl Fn(&Give<'a>) -> &'a str) -> Vec<Answer> {
        let mut answers: Vec<Answer> = Vec::new();
        for give in self.gives.iter().rev().filter(|g| which(g)) {
            if answers.iter().all(|a| a.text != what(give)) {
                answers.push(answer(what(give), &[give.fact]));
            }
        }
        answers
    }

    /// Every question of a task that is answered, in an order that depends on the facts alone. A task above qa5 is refused.
    pub fn questions(&self, task: Task) -> Result<Vec<Question>> {
        let texts: Vec<String> = match task.number() {
            1 => self.people.iter().map(|p| format!("Where is {}?", p.name)).collect(),
            2 => self.objects.iter().map(|o| format!("Where is the {}?", o.name)).collect(),
            3 => self.objects.iter().flat_map(Object::befores).collect(),
            4 => self.lies.iter().flat_map(Lies::questions).collect(),
            5 => self.gives.iter().rev().flat_map(Give::questions).collect(),
            _ => {
                let expected = format!("qa1 to qa{SIMULATED}, whose questions can be answered without a model");
                return Err(Error::config("task", &expected, task));
            }
        };
        let mut questions: Vec<Question> = Vec::new();
        for text in texts {
            if questions.iter().all(|q| q.text != text)
                && let Some(first) = self.answers(&text)?.into_iter().next()
            {
                questions.push(Question { text, answer: first.text, supports: first.supports });
            }
        }
        Ok(questions)
    }
}

impl Object<'_> {
    fn place(&self) -> Option<Answer> {
        let (place, here) = (self.path.last()?.0, self.here?);
        Some(answer(place, &[self.latest, here]))
    }

    /// Where it was before a place, the latest time first.
    fn before(&self, place: &str) -> Vec<Answer> {
        let mut answers: Vec<Answer> = Vec::new();
        for step in self.path.windows(2).rev().filter(|step| step[1].0 == place) {
            if answers.iter().all(|a| a.text != step[0].0) {
                answers.push(answer(step[0].0, &[self.latest, step[1].1, step[0].1]));
            }
        }
        answers
    }

    fn befores(&self) -> Vec<String> {
        self.path.iter().skip(1).rev().map(|(place, _)| format!("Where was the {} before the {place}?", self.name)).collect()
    }
}

impl Lies<'_> {
    fn questions(&self) -> Vec<String> {
        let Lies { place, direction, of, .. } = self;
        let back = opposite(direction).unwrap_or_default();
        vec![
            format!("What is {direction} of the {of}?"),
            format!("What is the {of} {back} of?"),
            format!("What is {back} of the {place}?"),
            format!("What is the {place} {direction} of?"),
        ]
    }
}

impl Give<'_> {
    fn questions(&self) -> Vec<String> {
        let Give { who, object, to, .. } = self;
        vec![
            format!("What did {who} give to {to}?"),
            format!("Who gave the {object} to {to}?"),
            format!("Who gave the {object}?"),
            format!("Who did {who} give the {object} to?"),
            format!("Who received the {object}?"),
        ]
    }
}

fn answer(text: &str, supports: &[usize]) -> Answer {
    Answer { text: text.into(), supports: supports.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|l| (*l).to_string()).collect()
    }

    /// The first answer and its supports; none if nothing is known.
    fn ask(lines: &[&str], question: &str) -> Option<(String, Vec<usize>)> {
        let facts = facts(lines);
        let answers = Knowledge::of(&facts).unwrap().answers(question).unwrap();
        answers.into_iter().next().map(|a| (a.text, a.supports))
    }

    fn is(answer: &str, supports: &[usize]) -> Option<(String, Vec<usize>)> {
        Some((answer.into(), supports.to_vec()))
    }

    const CARRIED: [&str; 7] = [
        "Mary got the milk there.",
        "Mary went to the garden.",
        "Mary moved to the office.",
        "Mary dropped the milk.",
        "John travelled to the office.",
        "John took the milk.",
        "John went back to the hallway.",
    ];

    #[test]
    fn an_object_is_where_its_holder_is_or_left_it() {
        assert_eq!(ask(&CARRIED[..1], "Where is the milk?"), None, "where Mary was is not told");
        assert_eq!(ask(&CARRIED[..2], "Where is the milk?"), is("garden", &[0, 1]));
        assert_eq!(ask(&CARRIED[..4], "Where is the milk?"), is("office", &[3, 2]));
        assert_eq!(ask(&CARRIED[..6], "Where is the milk?"), is("office", &[5, 4]));
        assert_eq!(ask(&CARRIED, "Where is the milk?"), is("hallway", &[5, 6]));
        assert_eq!(ask(&CARRIED, "Where is Mary?"), is("office", &[2]));
        assert_eq!(ask(&CARRIED, "Where is Sandra?"), None);
    }

    #[test]
    fn the_place_before_is_that_of_the_latest_coming() {
        assert_eq!(ask(&CARRIED[..4], "Where was the milk before the office?"), is("garden", &[3, 2, 1]));
        assert_eq!(ask(&CARRIED, "Where was the milk before the hallway?"), is("office", &[5, 6, 2]));
        assert_eq!(ask(&CARRIED, "Where was the milk before the garden?"), None);
        let twice = [
            "Mary got the milk.",
            "Mary went to the garden.",
            "Mary went to the office.",
            "Mary went to the hallway.",
            "Mary went to the office.",
        ];
        assert_eq!(ask(&twice, "Where was the milk before the office?"), is("hallway", &[0, 4, 3]));
    }

    #[test]
    fn places_lie_beside_each_other_either_way_round() {
        let lies = ["The hallway is east of the bathroom.", "The bedroom is west of the bathroom."];
        assert_eq!(ask(&lies, "What is the bathroom east of?"), is("bedroom", &[1]));
        assert_eq!(ask(&lies, "What is east of the bathroom?"), is("hallway", &[0]));
        assert_eq!(ask(&lies, "What is west of the hallway?"), is("bathroom", &[0]));
        assert_eq!(ask(&lies, "What is north of the hallway?"), None);
    }

    #[test]
    fn gifts_are_told_from_every_side() {
        let gifts = ["Fred passed the milk to Bill.", "Bill gave the milk to Mary.", "Fred gave the apple to Bill."];
        for (question, answer) in [
            ("What did Fred give to Bill?", is("apple", &[2])),
            ("Who gave the milk to Mary?", is("Bill", &[1])),
            ("Who gave the milk?", is("Bill", &[1])),
            ("Who did Fred give the milk to?", is("Bill", &[0])),
            ("Who received the apple?", is("Bill", &[2])),
            ("Who received the football?", None),
        ] {
            assert_eq!(ask(&gifts, question), answer, "{question}");
        }
        let facts = facts(&gifts);
        let both = Knowledge::of(&facts).unwrap().answers("What did Fred give to Bill?").unwrap();
        assert_eq!(both.iter().map(|a| a.text.as_str()).collect::<Vec<_>>(), ["apple", "milk"]);
    }

    #[test]
    fn all_answerable_questions_are_asked_once() {
        let facts = facts(&CARRIED);
        let known = Knowledge::of(&facts).unwrap();
        let texts = |n| -> Vec<String> { known.questions(Task::new(n).unwrap()).unwrap().into_iter().map(|q| q.text).collect() };
        assert_eq!(texts(1), ["Where is Mary?", "Where is John?"]);
        assert_eq!(texts(2), ["Where is the milk?"]);
        assert_eq!(texts(3), ["Where was the milk before the hallway?", "Where was the milk before the office?"]);
        assert!(texts(4).is_empty() && texts(5).is_empty());
        assert!(known.questions(Task::new(6).unwrap()).unwrap_err().to_string().contains("got qa6"));
    }

    #[test]
    fn what_is_not_of_these_tasks_is_refused_by_name() {
        let wrong = facts(&["Mary went to the garden.", "Mary is no longer there."]);
        assert!(Knowledge::of(&wrong).unwrap_err().to_string().contains("fact 2"), "the second");
        for question in ["Is Mary in the garden?", "Where is Mary", "What is up of the garden?"] {
            let error = Knowledge::default().answers(question).unwrap_err().to_string();
            assert!(error.contains(question), "{error}");
        }
    }
}
