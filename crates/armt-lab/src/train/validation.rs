//! A validation: how well a model does on texts that it does not learn from, as one number.

use std::ops::ControlFlow;

use armt::State;
use armt::model::Model;
use armt::random::Random;
use armt::schedule::ScheduleKind;

use super::recipe::EvalRecipe;
use super::step::emptied;
use crate::error::{Error, Result};
use crate::eval::likelihood::{Likelihood, of_batch};
use crate::eval::retrieval::count_exact;
use crate::tasks::training::{Measure, TrainingTask, Window, Windows};

/// Hears of how many texts so many were judged, and may end it.
type Told<'a> = &'a mut dyn FnMut(usize, usize) -> ControlFlow<()>;

/// The score of a model, as [`Measure`] has it; `None` where it was ended before. Texts of which nothing is asked are an error.
pub(super) fn score(
    model: &Model,
    task: &dyn TrainingTask,
    eval: &EvalRecipe,
    random: Random,
    told: Told<'_>,
) -> Result<Option<f64>> {
    match task.validation_in_order(eval.batch)? {
        Some(windows) => onward(model, windows, eval.samples, told),
        None => apart(model, task, eval, random, told),
    }
}

/// Refuses a task that has nothing to be judged on, which only files may turn out to have.
pub(super) fn expect_texts(task: &dyn TrainingTask, eval: &EvalRecipe) -> Result<()> {
    let first = match task.validation_in_order(eval.batch)? {
        Some(mut windows) => windows.next().transpose()?.map(|window| window.asked),
        None if task.judged(eval.samples)? > 0 => Some(task.validation(0, 1, &mut Random::new(0))?),
        None => None,
    };
    match first.is_some_and(|asked| asked.targets.next.iter().any(|next| *next >= 0)) {
        true => Ok(()),
        false => Err(nothing()),
    }
}

fn nothing() -> Error {
    Error::config("task.valid", "texts of at least two tokens", "none")
}

/// Texts by themselves, each from an empty memory.
fn apart(model: &Model, task: &dyn TrainingTask, eval: &EvalRecipe, mut random: Random, told: Told<'_>) -> Result<Option<f64>> {
    let samples = task.judged(eval.samples)?;
    let (mut right, mut sum) = (0, Likelihood::default());
    for from in (0..samples).step_by(eval.batch) {
        let asked = task.validation(from, eval.batch.min(samples - from), &mut random)?;
        match task.measure() {
            Measure::ExactMatch => right += count_exact(model, &asked, ScheduleKind::Auto)?,
            Measure::Loss => sum += of_batch(model, &asked, &model.empty(asked.batch.texts)?)?.0,
        }
        if told(samples.min(from + eval.batch), samples).is_break() {
            return Ok(None);
        }
    }
    match task.measure() {
        Measure::ExactMatch => Ok(Some(right as f64 / samples as f64)),
        Measure::Loss => probability(sum).map(Some),
    }
}

/// Texts that go on from those of the batch before, and from the memory that these left; `samples` in all, or some more to have whole batches.
fn onward(model: &Model, windows: Windows<'_>, samples: usize, told: Told<'_>) -> Result<Option<f64>> {
    let (mut judged, mut sum) = (0, Likelihood::default());
    let mut memory: Option<State> = None;
    for window in windows {
        let Window { asked, begins } = window?;
        let before = match &memory {
            Some(memory) => emptied(model, memory, &begins)?,
            None => model.empty(asked.batch.texts)?,
        };
        let (part, after) = of_batch(model, &asked, &before)?;
        sum += part;
        memory = Some(after);
        judged += asked.batch.texts;
        if told(samples.min(judged), samples).is_break() {
            return Ok(None);
        }
        if judged >= samples {
            break;
        }
    }
    probability(sum).map(Some)
}

/// The mean probability of the right token.
fn probability(sum: Likelihood) -> Result<f64> {
    match sum.tokens {
        0 => Err(nothing()),
        _ => Ok((-sum.loss()).exp()),
    }
}
