//! What the stages of a recipe draw their texts from, opened once for a run.

use std::sync::Arc;

use super::recipe::{Recipe, Stage, TaskKind};
use crate::error::{Error, Result};
use crate::tasks::babilong::{Babilong, BabilongLessons, Books, Data, find_data, vocabulary};
use crate::tasks::lessons::{Lessons, RetrievalLessons};
use crate::tasks::retrieval;
use crate::text::Tokenizer;

/// One number of a small vocabulary in so many is for the tokens that it does not keep.
const HASHED: usize = 32;

/// Nothing, where texts are made of symbols; or books with a tokenizer.
pub enum Material {
    /// Associative retrieval.
    Symbols,
    /// BABILong.
    Books(Arc<Babilong>),
}

impl Material {
    /// Opens what a recipe needs. A folder that is missing is an error that says where it was looked for.
    pub fn open(recipe: &Recipe) -> Result<Self> {
        let task = &recipe.task;
        if task.setting != TaskKind::Babilong {
            return Ok(Material::Symbols);
        }
        let bpe = find_data(Data::Bpe, task.bpe.as_deref())?;
        let tokenizer = || -> Result<Tokenizer> {
            Tokenizer::find(&bpe)?.ok_or_else(|| Error::file(&bpe, "expected a tokenizer in this folder, found none"))
        };
        let folder = find_data(Data::TrainBooks, task.books.as_deref())?;
        let mut books = Books::open(&folder, Arc::new(tokenizer()?))?;
        if let Some(size) = task.vocabulary {
            let stories = find_data(Data::Babi, None)?;
            let small = vocabulary(&books, &stories, &[recipe.question()?], size, size.div_ceil(HASHED))?;
            books = Books::open(&folder, Arc::new(tokenizer()?.with_vocabulary(small)?))?;
        }
        Ok(Material::Books(Arc::new(Babilong::new(Arc::new(books))?)))
    }

    /// Tokens of a model for it.
    pub fn vocabulary(&self) -> usize {
        match self {
            Material::Symbols => retrieval::VOCAB,
            Material::Books(babilong) => babilong.tokenizer().vocabulary(),
        }
    }

    /// The token that ends an answer.
    pub fn end_token(&self) -> i32 {
        match self {
            Material::Symbols => retrieval::EOS,
            Material::Books(babilong) => babilong.end_token(),
        }
    }

    /// What a model needs beside its weights to be asked in words.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        match self {
            Material::Symbols => None,
            Material::Books(babilong) => Some(babilong.tokenizer()),
        }
    }

    /// A stage's texts. Sizes that do not fit together are an error.
    pub fn lessons(&self, recipe: &Recipe, stage: &Stage) -> Result<Box<dyn Lessons>> {
        let Stage { questions, batch, vary, .. } = *stage;
        Ok(match self {
            Material::Symbols => {
                let (task, pairs) = recipe.retrieval(stage)?;
                Box::new(RetrievalLessons { task, pairs, questions, batch, vary })
            }
            Material::Books(babilong) => {
                let [segment, segments] = [stage.segment, stage.segments].map(Option::unwrap_or_default);
                let (task, facts) = (recipe.question()?, stage.facts.unwrap_or(FACTS));
                let (babilong, aligned) = (babilong.clone(), stage.aligned);
                let lessons = BabilongLessons { babilong, task, segment, segments, facts, questions, aligned, batch, vary };
                lessons.check()?;
                Box::new(lessons)
            }
        })
    }
}

/// Facts of a story where a stage does not say: as many as those of qa1 have.
const FACTS: usize = 10;
