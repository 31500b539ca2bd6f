//! Training by a recipe, alone or as one of several processes, for `armt.Trainer`, and the samples of `armt.Dataset`.

use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use armt::files::Beside;
use armt::text::Tokenizer;
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babi::file::Split;
use armt_lab::tasks::babilong::json::Line;
use armt_lab::tasks::babilong::{Babilong, Books, Data, Form, Length, Stories, find_data};
use armt_lab::tasks::training::Measure;
use armt_lab::train::RunFolder;
use armt_lab::train::first::FirstStage;
use armt_lab::train::recipe::Recipe as Read;
use armt_lab::train::replicas::Replicas;
use armt_lab::train::trainer::{Ending, Event, train_among};
use armt_shipped::find_recipe;
use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::{Failure, Result, refuse};
use crate::model::device_of;
use crate::research::TrainableModel;
use crate::threads::compute;

/// A recipe that was read and checked.
#[pyclass(frozen, module = "armt._armt")]
pub struct Recipe(Read);

#[pymethods]
impl Recipe {
    /// A recipe of a file, or the name of one that comes with the package, with changes `key=value`.
    #[staticmethod]
    fn load(py: Python<'_>, name: PathBuf, changes: Vec<String>) -> Result<Self> {
        compute(py, || Ok(Recipe(Read::load(&find_recipe(&name)?, &changes)?)))
    }

    /// A recipe of the JSON of its keys, with changes `key=value`.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str, changes: Vec<String>) -> Result<Self> {
        compute(py, || {
            let keys: serde_json::Value = serde_json::from_str(text).map_err(|e| refuse("the keys of a recipe", e))?;
            let text = toml::to_string(&keys).map_err(|e| refuse("the keys of a recipe", e))?;
            Ok(Recipe(Read::parse(&text, &changes)?))
        })
    }

    /// Every key with its value, defaults too.
    fn record(&self) -> Result<std::collections::BTreeMap<String, String>> {
        Ok(self.0.record()?)
    }

    /// The model before the first step.
    fn first_model(&self, py: Python<'_>, device: &str, dtype: Option<&str>) -> Result<TrainableModel> {
        compute(py, || {
            let (device, dtype) = device_of(device, dtype)?;
            Ok(FirstStage::open(&self.0)?.model(dtype, &device)?.into())
        })
    }

    /// The tokens that a step of the first stage learns from and what each should predict, both int32 [texts, tokens]; -1 where nothing is
    /// asked.
    fn first_batch<'py>(&self, py: Python<'py>, step: u64) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let drawn = compute(py, || Ok(FirstStage::open(&self.0)?.batch(step)?))?;
        let axes = PyTuple::new(py, [drawn.batch.texts, drawn.batch.tokens()])?;
        let shaped = |values: Vec<i32>| values.into_pyarray(py).call_method1("reshape", (&axes,));
        Ok((shaped(drawn.batch.ids)?, shaped(drawn.targets.next)?))
    }
}

/// The processes that train together, as Python knows them: a function that adds up an array over all of them in place.
struct Together {
    rank: usize,
    world: usize,
    all_reduce: Option<Py<PyAny>>,
    /// What the function raised.
    raised: Mutex<Option<PyErr>>,
}

impl Replicas for Together {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn add_up(&self, values: &mut [f32]) -> armt_lab::Result<()> {
        let Some(all_reduce) = &self.all_reduce else { return Ok(()) };
        let added = Python::attach(|py| {
            let array = PyArray1::from_slice(py, values);
            all_reduce.call1(py, (&array,))?;
            values.copy_from_slice(&array.readonly().as_slice().map_err(PyErr::from)?[..values.len()]);
            py.check_signals()
        });
        added.map_err(|error| {
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            armt_lab::Error::Interrupted
        })
    }
}

/// Runs a recipe. `each` is called with a dict for every step and validation and may give False to stop; gives what was measured, or None if it was
/// stopped.
#[pyfunction]
#[pyo3(signature = (recipe, out, *, resume, device, dtype, each, all_reduce, rank, world))]
pub fn train(
    py: Python<'_>,
    recipe: &Recipe,
    out: PathBuf,
    resume: bool,
    device: &str,
    dtype: Option<&str>,
    each: Py<PyAny>,
    all_reduce: Option<Py<PyAny>>,
    rank: usize,
    world: usize,
) -> Result<Option<(&'static str, f64)>> {
    if rank >= world || (world > 1 && all_reduce.is_none()) {
        return Err(refuse("a rank below world, and an all_reduce where world is above 1", format!("rank {rank} of {world}")));
    }
    let together = Together { rank, world, all_reduce, raised: Mutex::default() };
    compute(py, || {
        let (device, dtype) = device_of(device, dtype)?;
        let mut folder = match (rank, resume) {
            (0, true) => RunFolder::open(&out)?,
            (0, false) => RunFolder::create(&out)?,
            _ => RunFolder::watch(&out),
        };
        let mut raised = None;
        let ending = train_among(&together, &recipe.0, &mut folder, resume, (dtype, &device), &mut |event| {
            let told = Python::attach(|py| {
                let goes_on = match record(py, event)? {
                    Some(record) => !each.call1(py, (record,))?.bind(py).is(pyo3::types::PyBool::new(py, false)),
                    None => true,
                };
                py.check_signals()?;
                Ok(goes_on)
            });
            match told {
                Ok(true) => ControlFlow::Continue(()),
                Ok(false) => ControlFlow::Break(()),
                Err(error) => {
                    raised = Some(error);
                    ControlFlow::Break(())
                }
            }
        });
        if let Some(error) = raised.or(together.raised.lock().unwrap_or_else(PoisonError::into_inner).take()) {
            return Err(Failure::Python(error));
        }
        match ending? {
            Ending::Finished { measure, score } => Ok(Some(figure(measure, score))),
            Ending::Stopped => Ok(None),
        }
    })
}

/// What a validation's score says, by its name.
fn figure(measure: Measure, score: f64) -> (&'static str, f64) {
    measure.figures(score).first().copied().unwrap_or(("score", score))
}

/// An event as callbacks hear it.
fn record<'py>(py: Python<'py>, event: &Event<'_>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let record = PyDict::new(py);
    let progress = match event {
        Event::Step { progress, loss, tokens, seconds, .. } => {
            record.set_item("event", "step")?;
            record.set_item("loss", loss)?;
            record.set_item("tokens", tokens)?;
            record.set_item("seconds", seconds)?;
            progress
        }
        Event::Validation { progress, measure, score, .. } => {
            record.set_item("event", "validation")?;
            let (name, value) = figure(*measure, *score);
            record.set_item(name, value)?;
            progress
        }
        // Only Ctrl-C is looked for.
        _ => return Ok(None),
    };
    record.set_item("stage", progress.stage + 1)?;
    record.set_item("step", progress.step)?;
    record.set_item("total", progress.total)?;
    Ok(Some(record))
}

/// Writes BABILong samples as lines of JSON, as `armt data babilong` does.
#[pyfunction]
#[pyo3(signature = (path, task, length, *, samples, seed, split, simulated))]
pub fn write_babilong(
    py: Python<'_>,
    path: PathBuf,
    task: &str,
    length: &str,
    samples: u64,
    seed: u64,
    split: &str,
    simulated: bool,
) -> Result<()> {
    compute(py, || {
        let (task, length): (Task, Length) = (task.parse()?, length.parse()?);
        let (split, books) = match split {
            "train" => (Split::Train, Data::TrainBooks),
            "test" => (Split::Test, Data::TestBooks),
            other => return Err(refuse("split train or test", other)),
        };
        let stories = match simulated {
            true => Stories::simulated(task, seed)?,
            false => Stories::published(&find_data(Data::Babi, None)?, task, split, seed)?,
        };
        let bpe = find_data(Data::Bpe, None)?;
        let tokenizer = Tokenizer::find(&bpe)?.ok_or_else(|| armt::Error::file(&bpe, "expected a tokenizer, found none"))?;
        let babilong = Babilong::new(Arc::new(Books::open_in(Form::Mixed, &find_data(books, None)?, Arc::new(tokenizer))?))?;
        let mut beside = Beside::create(&path)?;
        let mut out = BufWriter::new(beside.file());
        for number in 0..samples {
            let sample = babilong.draw(&stories, length, number)?;
            let line = Line { sample: &sample, task, length, seed, number };
            line.write(&babilong, &mut out, &path, &mut |_| ControlFlow::Continue(()))?;
            Python::attach(|py| py.check_signals())?;
        }
        out.flush().map_err(|source| armt::Error::io(&path, source))?;
        drop(out);
        Ok(beside.finish()?)
    })
}
