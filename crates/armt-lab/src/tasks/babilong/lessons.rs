//! BABILong as a task of recipes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Babilong, BabilongTraining, Books, Data, Form, GEN, Prefer, find_data, vocabulary};
use crate::error::{Error, Result};
use crate::tasks::babi::{SIMULATED, Task};
use crate::tasks::training::{self, Begun, Keys, Lessons, Sizes, TaskData, TrainingTask, expect_positive, keys_of};

/// Facts hidden in books.
pub const SETTING: training::Setting = training::Setting { name: "babilong", read: training::read::<BabilongLessons> };

/// One number of a small vocabulary in so many is for the tokens that it does not keep.
const HASHED: usize = 32;
/// Facts of a story where a stage does not say: as many as those of qa1 have.
const FACTS: usize = 10;

/// What a recipe says of BABILong.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BabilongLessons(Keys<TaskKeys, StageKeys>);

/// `[task]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskKeys {
    setting: String,
    /// The stories, `"qa1"` to `"qa5"`, or a list of some of these, of which each text is of one; qa1 if not given. Recipes once called it
    /// `question`.
    #[serde(default, alias = "question")]
    stories: OneOrMore,
    /// Folder of books to hide facts in; the project's own if not given.
    #[serde(default)]
    books: Option<PathBuf>,
    /// The forms that texts are written in, `now`, `paper` and `mixed` (`armt data babilong --form`), each text in one of them; all of them
    /// if not given.
    #[serde(default)]
    forms: Option<Vec<Form>>,
    /// Folder of a tokenizer; if not given that of `model.from`, or else GPT-2's.
    #[serde(default)]
    bpe: Option<PathBuf>,
    /// Tokens of the model, the frequent ones of the books and all of the stories; as many as the tokenizer has if not given.
    #[serde(default)]
    vocabulary: Option<usize>,
}

/// A text, or several.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a name, or a list of names")]
enum OneOrMore {
    /// Nothing was said.
    #[default]
    None,
    /// `"qa1"`
    One(String),
    /// `["qa1", "qa2"]`
    More(Vec<String>),
}

/// `[[stage]]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StageKeys {
    /// Tokens of a segment.
    segment: usize,
    /// Segments of a text.
    segments: usize,
    /// Facts of a story, at most; 10 if not given.
    #[serde(default)]
    facts: Option<usize>,
    /// Each fact and each question has a segment of its own, and there is no background.
    #[serde(default)]
    aligned: bool,
    /// Of qa4, only questions that repeat a fact's words, and none that turns its relation around.
    #[serde(default)]
    direct: bool,
    /// Share of the batches that have facts alone, without background, in as many segments as these take; none if not given.
    #[serde(default)]
    alone: f64,
    /// Share of the texts whose facts stand side by side in one to three places, a third of these at the very start or end of the text; none
    /// if not given.
    #[serde(default)]
    clusters: f64,
    /// Sentences among the facts, at most, that name people and rooms and change nothing ("Mary did not go to the garden."); half of the texts
    /// have none; 0 if not given.
    #[serde(default)]
    distract: usize,
    /// Share of the texts that are asked first what their story answers more than once, of which the latest counts; none if not given.
    #[serde(default, skip_serializing_if = "is_none")]
    again: f64,
    /// Share of qa5's stories that are gifts alone, of any thing to anybody; none if not given.
    #[serde(default, skip_serializing_if = "is_none")]
    gifts: f64,
    /// Share of the texts whose borders between segments cut a fact, as far as there are facts; otherwise it comes as it comes.
    #[serde(default, skip_serializing_if = "is_none")]
    cut: f64,
    /// Questions that a share of the texts is asked first, `{ questions = "What did", share = 0.5 }`; none if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prefer: Option<Prefer>,
    /// Questions at the end of a text, a random number up to this: 1 in the paper, and in validation always.
    #[serde(default = "one")]
    questions: usize,
}

fn one() -> usize {
    1
}

/// Runs of earlier versions did not write it down.
fn is_none(share: &f64) -> bool {
    *share == 0.0
}

impl BabilongLessons {
    /// The tasks of bAbI, at least one; one that is named twice comes twice as often.
    pub fn stories(&self) -> Result<Vec<Task>> {
        let names = match &self.0.task.stories {
            OneOrMore::None => vec!["qa1"],
            OneOrMore::One(name) => vec![name.as_str()],
            OneOrMore::More(names) => names.iter().map(String::as_str).collect(),
        };
        if names.is_empty() {
            return Err(Error::config("task.stories", "at least one task", "none"));
        }
        let tasks = names.into_iter().map(|name| {
            let task: Task = name.parse().map_err(|_| Error::config("task.stories", "qa1 to qa5", name))?;
            match task.number() <= SIMULATED {
                true => Ok(task),
                false => Err(Error::config("task.stories", &format!("qa1 to qa{SIMULATED}, which can be simulated"), task)),
            }
        });
        tasks.collect()
    }

    /// The forms that texts are written in, at least one.
    fn forms(&self) -> Result<&[Form]> {
        match self.0.task.forms.as_deref() {
            None => Ok(&Form::ALL),
            Some([]) => Err(Error::config("task.forms", "at least one form", "none")),
            Some(forms) => Ok(forms),
        }
    }

    fn stage(&self, stage: usize) -> Result<StageKeys> {
        let known = self.0.stages.get(stage).cloned();
        known.ok_or_else(|| Error::input("stage", format!("one of {}", self.0.stages.len()), stage))
    }
}

impl Lessons for BabilongLessons {
    fn keys(&self) -> Result<Value> {
        keys_of(&self.0)
    }

    fn check(&self) -> Result<()> {
        self.stories().and_then(|_| self.forms()).map(|_| ())
    }

    fn check_for_folder(&self) -> Result<()> {
        match self.0.task.vocabulary {
            Some(size) => Err(Error::config("task.vocabulary", "no such key with model.from, whose model has its own", size)),
            None => Ok(()),
        }
    }

    fn check_stage(&self, stage: usize, _sizes: Sizes) -> Result<()> {
        let StageKeys { segment, segments, facts, questions, alone, clusters, again, gifts, cut, prefer, .. } =
            self.stage(stage)?;
        let facts = facts.unwrap_or(FACTS);
        expect_positive(&[("segment", segment), ("segments", segments), ("facts", facts), ("questions", questions)])?;
        let shares = [("alone", alone), ("clusters", clusters), ("again", again), ("gifts", gifts), ("cut", cut)];
        if let Some((key, share)) = shares.into_iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            return Err(Error::config(key, "a share from 0 to 1", share));
        }
        prefer.map_or(Ok(()), |prefer| prefer.check())
    }

    fn segment_size(&self, stage: usize) -> usize {
        self.stage(stage).map_or(0, |keys| keys.segment)
    }

    fn knows_background(&self) -> bool {
        true
    }

    fn after_question(&self, _own: Option<&str>) -> Option<String> {
        Some(GEN.into())
    }

    fn open(&self, begun: Option<&Begun<'_>>) -> Result<Box<dyn TaskData>> {
        let task = &self.0.task;
        let (bpe, tokenizer) = tokenizer(task.bpe.as_deref(), begun.map(|b| b.folder))?;
        if let Some(begun) = begun {
            tokenizer.expect_fits(begun.vocab, &bpe)?;
        }
        let folder = find_data(Data::TrainBooks, task.books.as_deref())?;
        let mut tokenizer = Arc::new(tokenizer);
        if let Some(size) = task.vocabulary {
            let books = Books::open(&folder, tokenizer)?;
            let small = vocabulary(&books, &self.stories()?, size, size.div_ceil(HASHED))?;
            tokenizer = Arc::new(self::tokenizer(task.bpe.as_deref(), None)?.1.with_vocabulary(small)?);
        }
        let open = |form: &Form| Ok(Arc::new(Babilong::new(Arc::new(Books::open_in(*form, &folder, tokenizer.clone())?))?));
        let forms = self.forms()?.iter().map(open).collect::<Result<_>>()?;
        Ok(Box::new(Stories { lessons: self.clone(), forms }))
    }
}

/// BABILong in each of a recipe's forms.
struct Stories {
    lessons: BabilongLessons,
    forms: Vec<Arc<Babilong>>,
}

impl TaskData for Stories {
    fn vocabulary(&self) -> usize {
        self.forms[0].tokenizer().vocabulary()
    }

    fn end_token(&self) -> i32 {
        self.forms[0].end_token()
    }

    fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        Some(self.forms[0].tokenizer())
    }

    fn task(&self, stage: usize, sizes: Sizes) -> Result<Box<dyn TrainingTask>> {
        let keys = self.lessons.stage(stage)?;
        let training = BabilongTraining {
            babilong: self.forms.clone(),
            tasks: self.lessons.stories()?,
            segment: keys.segment,
            segments: keys.segments,
            facts: keys.facts.unwrap_or(FACTS),
            questions: keys.questions,
            aligned: keys.aligned,
            direct: keys.direct,
            alone: keys.alone,
            clusters: keys.clusters,
            distract: keys.distract,
            again: keys.again,
            gifts: keys.gifts,
            cut: keys.cut,
            prefer: keys.prefer,
            batch: sizes.batch,
            vary: sizes.vary,
        };
        training.check()?;
        Ok(Box::new(training))
    }
}

/// The tokenizer that a recipe names, or else that of the model to begin from, or else GPT-2's; and its folder.
pub(in crate::tasks) fn tokenizer(named: Option<&Path>, model: Option<&Path>) -> Result<(PathBuf, Tokenizer)> {
    if let (None, Some(model)) = (named, model)
        && let Some(own) = Tokenizer::find(model)?
    {
        return Ok((model.into(), own));
    }
    let folder = find_data(Data::Bpe, named)?;
    let found = Tokenizer::find(&folder)?;
    let tokenizer = found.ok_or_else(|| Error::file(&folder, "expected a tokenizer in this folder, found none"))?;
    Ok((folder, tokenizer))
}
