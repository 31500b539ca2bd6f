//! Questions as a task of recipes.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use armt::engine::machine::expect_room;
use armt::random::Random;
use armt::text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Fields, Hiding, Told, read};
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::tasks::asked::{Prompt, Text};
use crate::tasks::babilong::{Books, Data, Length, find_data, shuffle};
use crate::tasks::training::{self, Begun, Keys, Lessons, Sizes, TaskData, TrainingTask, expect_positive, keys_of};
use crate::tasks::words::Words;

/// A user's questions.
pub const SETTING: training::Setting = training::Setting { name: "qa", read: training::read::<QaLessons> };

/// What stands between a question and its answer where nothing is said.
const AFTER: &str = "\n";

/// What a recipe says of questions.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct QaLessons(Keys<TaskKeys, StageKeys>);

/// `[task]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskKeys {
    setting: String,
    /// Files of questions to learn: names, folders and patterns.
    train: Vec<String>,
    /// Files of questions to be judged on; those of `train` if not given.
    #[serde(default)]
    valid: Vec<String>,
    /// Names of the fields.
    #[serde(default)]
    fields: Fields,
    /// What stands between a question and its answer; the model's own if not given, or else a line's end.
    #[serde(default)]
    after_question: Option<String>,
    /// Other text to hide contexts in.
    #[serde(default)]
    distract: Option<Distract>,
    /// Folder of a tokenizer; if not given that of `model.from`, or else GPT-2's.
    #[serde(default)]
    bpe: Option<PathBuf>,
}

/// Other text to hide contexts in.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distract {
    /// Folder of `.txt` files.
    pub from: PathBuf,
    /// Tokens of a context with what is around it, as 0k (none), 4k or a whole number; each batch has one of them, as much of it as its stage has room for.
    pub lengths: Vec<String>,
}

impl Distract {
    /// The lengths, at least one.
    fn lengths(&self) -> Result<Vec<Length>> {
        match self.lengths.is_empty() {
            true => Err(Error::config("task.distract", "at least one of lengths", "none")),
            false => self.lengths.iter().map(|length| length.parse()).collect(),
        }
    }
}

/// `[[stage]]`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StageKeys {
    /// Tokens of a segment.
    segment: usize,
    /// Segments of a text, at most: contexts that do not fit with a question are left out.
    segments: usize,
    /// Questions about a context in training, at most; each batch has a random number of them. 1 if not given, and in validation always.
    #[serde(default = "one")]
    questions: usize,
}

fn one() -> usize {
    1
}

impl QaLessons {
    fn stage(&self, stage: usize) -> Result<StageKeys> {
        let known = self.0.stages.get(stage).copied();
        known.ok_or_else(|| Error::input("stage", format!("one of {}", self.0.stages.len()), stage))
    }
}

impl Lessons for QaLessons {
    fn keys(&self) -> Result<Value> {
        keys_of(&self.0)
    }

    fn check(&self) -> Result<()> {
        let TaskKeys { train, distract, .. } = &self.0.task;
        if train.is_empty() {
            return Err(Error::config("task.train", "at least one file", "none"));
        }
        distract.as_ref().map_or(Ok(()), |d| d.lengths().map(|_| ()))
    }

    fn check_stage(&self, stage: usize, sizes: Sizes) -> Result<()> {
        let StageKeys { segment, segments, questions } = self.stage(stage)?;
        if sizes.vary {
            return Err(Error::config("vary", "false: the lengths of questions' texts are those of task.distract", "true"));
        }
        expect_positive(&[("segment", segment), ("segments", segments), ("questions", questions)])?;
        for texts in [sizes.batch, sizes.judged] {
            expect_room("segments by texts", &[texts, segments, segment, 2 * size_of::<i32>()])?;
        }
        Ok(())
    }

    fn segment_size(&self, stage: usize) -> usize {
        self.stage(stage).map_or(0, |keys| keys.segment)
    }

    fn knows_background(&self) -> bool {
        self.0.task.distract.is_some()
    }

    fn after_question(&self, own: Option<&str>) -> Option<String> {
        self.0.task.after_question.as_deref().or(own).or(Some(AFTER)).map(String::from)
    }

    fn open(&self, begun: Option<&Begun<'_>>) -> Result<Box<dyn TaskData>> {
        let TaskKeys { train, valid, fields, distract, bpe, .. } = &self.0.task;
        let words = Words::open(bpe.as_deref(), begun)?;
        let after = self.after_question(begun.and_then(|b| b.config.after_question.as_deref())).unwrap_or_default();
        let contexts = |key: &str, files: &[String]| -> Result<Arc<[Context]>> {
            let read = read(files, fields)?;
            if let Some(first) = read.wrong.into_iter().next() {
                return Err(first);
            }
            let contexts = read.told.iter().map(|told| Context::new(told, &words, &after)).collect::<Result<Vec<_>>>()?;
            if contexts.is_empty() { Err(Error::config(key, "questions", "none")) } else { Ok(contexts.into()) }
        };
        let train = contexts("task.train", train)?;
        let valid = if valid.is_empty() { train.clone() } else { contexts("task.valid", valid)? };
        let hiding = match distract {
            Some(d) => {
                let folder = find_data(Data::TrainBooks, Some(&d.from))?;
                Some((Hiding(Arc::new(Books::open(&folder, words.tokenizer.clone())?)), d.lengths()?))
            }
            None => None,
        };
        Ok(Box::new(Questions { lessons: self.clone(), train, valid, hiding, words }))
    }
}

/// A context as tokens, without the one that texts begin with: other text may come before it.
#[derive(Clone, Debug)]
struct Context {
    tokens: Vec<i32>,
    prompts: Vec<Prompt>,
}

/// A context's tokens and those of one of its questions.
fn asked_in(contexts: &[Context], (context, prompt): (usize, usize)) -> (&[i32], &[i32]) {
    let context = &contexts[context];
    (&context.tokens, &context.prompts[prompt].question)
}

impl Context {
    fn new(told: &Told, words: &Words, after: &str) -> Result<Self> {
        let prompts = told.questions.iter().map(|asked| {
            let question = words.tokenizer.encode(&format!("{}{after}", asked.question))?;
            let mut answer = words.tokenizer.encode(&asked.answers[0])?;
            answer.push(words.end);
            Ok(Prompt { question, answer })
        });
        Ok(Context { tokens: words.tokenizer.encode(&told.context)?, prompts: prompts.collect::<Result<_>>()? })
    }
}

/// The questions of a recipe.
struct Questions {
    lessons: QaLessons,
    train: Arc<[Context]>,
    valid: Arc<[Context]>,
    hiding: Option<(Hiding, Vec<Length>)>,
    words: Words,
}

impl TaskData for Questions {
    fn vocabulary(&self) -> usize {
        self.words.tokenizer.vocabulary()
    }

    fn end_token(&self) -> i32 {
        self.words.end
    }

    fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        Some(&self.words.tokenizer)
    }

    fn task(&self, stage: usize, sizes: Sizes) -> Result<Box<dyn TrainingTask>> {
        let StageKeys { segment, segments, questions } = self.lessons.stage(stage)?;
        let begin = self.words.begin();
        let fits = |all: &Arc<[Context]>| -> Vec<(usize, usize)> {
            let pairs = all.iter().enumerate().flat_map(|(c, context)| (0..context.prompts.len()).map(move |q| (c, q)));
            let room = |c: usize, q: usize| {
                context_room(begin, &all[c].tokens, segment) + all[c].prompts[q].length().next_multiple_of(segment)
            };
            pairs.filter(|(c, q)| room(*c, *q) <= segment * segments).collect()
        };
        let (train_pairs, mut valid_pairs) = (fits(&self.train), fits(&self.valid));
        // Where fewer are judged than there are, they come from all over the file.
        shuffle(&mut valid_pairs, Random::new(0));
        if train_pairs.is_empty() || valid_pairs.is_empty() {
            let shortest = self.train.iter().map(|c| c.tokens.len()).min().unwrap_or_default();
            let expected = format!(
                "room for a context and a question, each in segments of its own; the shortest context has {shortest} tokens"
            );
            return Err(Error::config("segments", &expected, format!("{segments} segments of {segment} tokens")));
        }
        Ok(Box::new(QaTraining {
            train: self.train.clone(),
            valid: self.valid.clone(),
            train_pairs,
            valid_pairs,
            hiding: self.hiding.clone(),
            begin,
            end: self.words.end,
            segment,
            segments,
            questions,
            batch: sizes.batch,
        }))
    }
}

/// Contexts with their questions at the end.
pub struct QaTraining {
    train: Arc<[Context]>,
    valid: Arc<[Context]>,
    /// Contexts and questions that fit the stage.
    train_pairs: Vec<(usize, usize)>,
    valid_pairs: Vec<(usize, usize)>,
    hiding: Option<(Hiding, Vec<Length>)>,
    /// Before every text, if anything is.
    begin: Option<i32>,
    end: i32,
    segment: usize,
    segments: usize,
    questions: usize,
    batch: usize,
}

/// Tokens of the segments that a context takes, with the token that texts begin with.
fn context_room(begin: Option<i32>, context: &[i32], segment: usize) -> usize {
    (usize::from(begin.is_some()) + context.len()).next_multiple_of(segment)
}

/// Where the questions of a text begin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In a segment of their own.
    Own,
    /// Right behind the context.
    Behind,
}

impl QaTraining {
    /// A length that contexts are hidden in, if any is.
    fn length(&self, random: &mut Random) -> usize {
        match &self.hiding {
            Some((_, lengths)) => lengths[random.below(lengths.len())].0,
            None => 0,
        }
    }

    fn text(&self, context: &[i32], prompts: &[&Prompt], length: usize, place: Place, random: &mut Random) -> Result<Text> {
        let asked: usize = prompts.iter().map(|p| p.length()).sum();
        let room = self.segment * self.segments - asked.next_multiple_of(self.segment);
        let mut text = Text::default();
        text.tell(self.begin);
        match &self.hiding {
            Some((hiding, _)) => {
                let length = length.min(room).saturating_sub(text.ids.len());
                let hidden = hiding.hide(context, length, Random::new(random.bits()))?;
                text.pass(hidden.before);
                text.tell(context.iter().copied());
                text.pass(hidden.after);
            }
            None => text.tell(context.iter().copied()),
        }
        if place == Place::Own {
            text.fill(self.segment, self.end);
        }
        prompts.iter().for_each(|prompt| text.ask(prompt));
        text.fill(self.segment, self.end);
        Ok(text)
    }
}

impl TrainingTask for QaTraining {
    fn name(&self) -> String {
        let hidden = if self.hiding.is_some() { ", among other text," } else { "" };
        format!("questions{hidden} in up to {} x {} tokens", self.segments, self.segment)
    }

    fn note(&self, samples: usize) -> Option<String> {
        let asked = |contexts: &[Context]| contexts.iter().map(|context| context.prompts.len()).sum::<usize>();
        let (learned, held, judged) = (self.train_pairs.len(), self.valid_pairs.len(), samples.min(self.valid_pairs.len()));
        let mut text = match Arc::ptr_eq(&self.train, &self.valid) {
            true => format!("{learned} questions to learn, and {judged} of these to judge: task.valid names no others"),
            false => format!("{learned} questions to learn, and {judged} of {held} held out to judge"),
        };
        if !Arc::ptr_eq(&self.train, &self.valid) {
            let all = |contexts| move |pair: &(usize, usize)| asked_in(contexts, *pair);
            let known: HashSet<_> = self.train_pairs.iter().map(all(&self.train)).collect();
            let common = self.valid_pairs.iter().map(all(&self.valid)).filter(|asked| known.contains(asked)).count();
            if common > 0 {
                text += &format!(", {common} of which are among those to learn too");
            }
        }
        let left = [asked(&self.train) - learned, asked(&self.valid) - held];
        if left != [0, 0] {
            text += &format!(
                "; {} to learn and {} to judge do not fit in {} segments of {} tokens and are left out",
                left[0], left[1], self.segments, self.segment
            );
        }
        Some(text)
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![("segments", self.segments), ("segment", self.segment), ("questions", self.train_pairs.len())]
    }

    fn batch(&self, random: &mut Random) -> Result<TaskBatch> {
        let (length, most) = (self.length(random), 1 + random.below(self.questions));
        let mut texts = Vec::with_capacity(self.batch);
        for _ in 0..self.batch {
            let (c, first) = self.train_pairs[random.below(self.train_pairs.len())];
            let context = &self.train[c];
            let mut prompts = vec![&context.prompts[first]];
            // Others of the context, any of them, as long as they fit.
            let room = self.segment * self.segments - context_room(self.begin, &context.tokens, self.segment);
            for _ in 1..most.min(context.prompts.len()) {
                let other = &context.prompts[random.below(context.prompts.len())];
                let asked: usize = prompts.iter().map(|p| p.length()).sum();
                if asked + other.length() <= room {
                    prompts.push(other);
                }
            }
            let place = if random.below(2) == 0 { Place::Own } else { Place::Behind };
            texts.push(self.text(&context.tokens, &prompts, length, place, random)?);
        }
        Ok(TaskBatch::of(texts, self.end))
    }

    fn judged(&self, samples: usize) -> Result<usize> {
        Ok(samples.min(self.valid_pairs.len()))
    }

    fn validation(&self, from: usize, texts: usize, random: &mut Random) -> Result<TaskBatch> {
        let pairs = self.valid_pairs.iter().skip(from).take(texts);
        let texts = pairs.map(|(c, q)| {
            let (context, length) = (&self.valid[*c], self.length(random));
            self.text(&context.tokens, &[&context.prompts[*q]], length, Place::Own, random)
        });
        Ok(TaskBatch::of(texts.collect::<Result<_>>()?, self.end))
    }
}
