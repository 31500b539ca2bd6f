//! What the stages of a recipe draw their texts from, opened once for a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::text::Tokenizer;

use super::origin::Origin;
use super::recipe::{Recipe, Stage, TaskKind, TaskRecipe};
use crate::error::{Error, Result};
use crate::tasks::babilong::{Babilong, BabilongTraining, Books, Data, Form, find_data, vocabulary};
use crate::tasks::retrieval;
use crate::tasks::training::{RetrievalTraining, TrainingTask};

/// One number of a small vocabulary in so many is for the tokens that it does not keep.
const HASHED: usize = 32;

/// What the texts of a training task are made of: nothing but symbols, or books with a tokenizer.
pub enum TaskData {
    /// Associative retrieval.
    Symbols,
    /// BABILong, in each of the recipe's forms.
    Books(Vec<Arc<Babilong>>),
}

impl TaskData {
    /// Opens what a recipe needs, for the model that it begins from where it does. A folder that is missing is an error that says where
    /// it was looked for; tokens that the model does not have are one too.
    pub fn open(recipe: &Recipe, origin: Option<&Origin>) -> Result<Self> {
        let task = &recipe.task;
        if task.setting != TaskKind::Babilong {
            let rows = origin.map_or(retrieval::VOCAB, |o| o.vocab());
            return if retrieval::EOS as usize >= rows {
                Err(Error::config("model.from", &format!("a model of more than {} tokens", retrieval::EOS), rows))
            } else {
                Ok(TaskData::Symbols)
            };
        }
        let (bpe, tokenizer) = tokenizer(task, origin.map(Origin::path))?;
        if let Some(origin) = origin {
            tokenizer.expect_fits(origin.vocab(), &bpe)?;
        }
        let folder = find_data(Data::TrainBooks, task.books.as_deref())?;
        let mut tokenizer = Arc::new(tokenizer);
        if let Some(size) = task.vocabulary {
            let books = Books::open(&folder, tokenizer)?;
            let small = vocabulary(&books, &recipe.stories()?, size, size.div_ceil(HASHED))?;
            tokenizer = Arc::new(self::tokenizer(task, None)?.1.with_vocabulary(small)?);
        }
        let open = |form: &Form| Ok(Arc::new(Babilong::new(Arc::new(Books::open_in(*form, &folder, tokenizer.clone())?))?));
        Ok(TaskData::Books(recipe.forms()?.iter().map(open).collect::<Result<_>>()?))
    }

    /// Tokens of a model for it.
    pub fn vocabulary(&self) -> usize {
        match self {
            TaskData::Symbols => retrieval::VOCAB,
            TaskData::Books(forms) => forms[0].tokenizer().vocabulary(),
        }
    }

    /// The token that ends an answer.
    pub fn end_token(&self) -> i32 {
        match self {
            TaskData::Symbols => retrieval::EOS,
            TaskData::Books(forms) => forms[0].end_token(),
        }
    }

    /// What a model needs beside its weights to be asked in words.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        match self {
            TaskData::Symbols => None,
            TaskData::Books(forms) => Some(forms[0].tokenizer()),
        }
    }

    /// A stage's texts. Sizes that do not fit together are an error.
    pub fn task(&self, recipe: &Recipe, stage: &Stage) -> Result<Box<dyn TrainingTask>> {
        let Stage { questions, batch, vary, .. } = *stage;
        Ok(match self {
            TaskData::Symbols => {
                let (task, pairs) = recipe.retrieval(stage)?;
                Box::new(RetrievalTraining { task, pairs, questions, batch, vary })
            }
            TaskData::Books(forms) => {
                let training = BabilongTraining {
                    babilong: forms.clone(),
                    tasks: recipe.stories()?,
                    segment: stage.segment.unwrap_or_default(),
                    segments: stage.segments.unwrap_or_default(),
                    facts: stage.facts.unwrap_or(FACTS),
                    questions,
                    aligned: stage.aligned,
                    direct: stage.direct,
                    alone: stage.alone,
                    clusters: stage.clusters,
                    distract: stage.distract,
                    batch,
                    vary,
                };
                training.check()?;
                Box::new(training)
            }
        })
    }
}

/// The tokenizer that a task names, or else that of the model to begin from, or else GPT-2's; and its folder.
fn tokenizer(task: &TaskRecipe, model: Option<&Path>) -> Result<(PathBuf, Tokenizer)> {
    if let (None, Some(model)) = (&task.bpe, model)
        && let Some(own) = Tokenizer::find(model)?
    {
        return Ok((model.into(), own));
    }
    let folder = find_data(Data::Bpe, task.bpe.as_deref())?;
    let found = Tokenizer::find(&folder)?;
    let tokenizer = found.ok_or_else(|| Error::file(&folder, "expected a tokenizer in this folder, found none"))?;
    Ok((folder, tokenizer))
}

/// Facts of a story where a stage does not say: as many as those of qa1 have.
const FACTS: usize = 10;
