//! The models that the repository ships remember, and answer.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::engine::{DType, Device};
use armt::text::Tokenizer;
use armt::{Model, Session};
use armt_lab::eval::babilong::Judge;
use armt_lab::eval::retrieval::curve;
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babi::file::Split;
use armt_lab::tasks::babilong::{Babilong, Books, Facts, Length, Stories};
use armt_lab::tasks::retrieval::{Retrieval, SYMBOLS, Setting};
use armt_lab::train::recipe::Recipe;

/// A path in the repository.
fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// How well a shipped model does at each number of pairs.
fn exact(folder: &str, setting: Setting, key_size: usize, pairs: &[usize]) -> Vec<f64> {
    let model = Model::load(&at(folder), DType::F32, &Device::cpu()).unwrap();
    let task = Retrieval { setting, key_size, value_size: 1, symbols: SYMBOLS };
    let points = curve(&model, task, pairs, 32, 32, 7, &mut |_| ControlFlow::Continue(())).unwrap();
    points.iter().map(|p| p.exact_match).collect()
}

#[test]
fn the_shipped_armt_recalls_the_latest_value_at_twice_its_training_length() {
    let exact = exact("results/rewrite/armt-authors", Setting::Rewrite, 1, &[10, 100]);
    assert!(exact.iter().all(|e| *e > 0.95), "{exact:?}");
}

#[test]
fn the_shipped_armt_remembers_fifty_pairs() {
    let exact = exact("results/remember/armt", Setting::Remember, 3, &[10, 50]);
    assert!(exact[0] > 0.95 && exact[1] > 0.9, "{exact:?}");
}

fn babilong_model() -> (Model, Tokenizer) {
    let folder = at("models/babilong-qa1");
    (Model::load(&folder, DType::F32, &Device::cpu()).unwrap(), Tokenizer::load(&folder).unwrap())
}

#[test]
fn the_shipped_babilong_model_answers_published_questions_and_needs_the_facts() {
    let (model, tokenizer) = babilong_model();
    let books = Books::open(&at("data/books/test"), Arc::new(tokenizer)).unwrap();
    let babilong = Babilong::new(Arc::new(books)).unwrap();
    let stories = Stories::published(&at("data/babi"), Task::new(1).unwrap(), Split::Test, 0).unwrap();
    let mut judge = Judge::new(&model, &babilong, 20).unwrap();
    let mut right = |length, facts, samples| {
        let answers = judge.cell(&stories, Length(length), facts, samples, &mut |_| ControlFlow::Continue(())).unwrap();
        answers.iter().filter(|a| a.exact).count()
    };
    assert!(right(4_000, Facts::Told, 20) >= 19);
    assert!(right(16_000, Facts::Told, 8) >= 7);
    assert!(right(4_000, Facts::LeftOut, 20) <= 8, "one of six rooms is right by chance");
}

#[test]
fn the_shipped_babilong_model_is_asked_about_running_text() {
    let mut session = Session::open_on(at("models/babilong-qa1"), DType::F32, &Device::cpu()).unwrap();
    let book = std::fs::read_to_string(std::fs::read_dir(at("data/books/test")).unwrap().next().unwrap().unwrap().path()).unwrap();
    let lines: Vec<&str> = book.lines().skip(200).take(1200).collect();
    let part = |n: usize| lines[n * 300..][..300].join(" ");
    let text = format!(
        "{} Mary went to the kitchen. {} John moved to the garden. {} Mary journeyed to the office. {}",
        part(0),
        part(1),
        part(2),
        part(3)
    );
    session.read_text([text]).unwrap();
    for (who, place) in [("Mary", "office"), ("John", "garden")] {
        let said = session.ask(&format!("Where is {who}?")).unwrap();
        assert_eq!(said, place, "{who} after {} tokens", session.state().tokens_read());
    }
}

/// Every file below a folder with this name, or this ending.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found
}

/// They were written by earlier versions, some with names of keys that have changed since.
#[test]
fn models_and_recipes_that_were_shipped_once_are_still_read() {
    let configs: Vec<PathBuf> = [at("models"), at("results")].iter().flat_map(|f| files(f, "config.json")).collect();
    for config in &configs {
        let folder = config.parent().unwrap();
        let model = Model::load(folder, DType::F32, &Device::cpu()).unwrap_or_else(|e| panic!("{e}"));
        assert!(model.empty(1).is_ok(), "{}", folder.display());
    }
    let mut recipes = files(&at("results"), ".toml");
    // A table of others' figures.
    recipes.retain(|path| !path.ends_with("paper.toml"));
    for recipe in &recipes {
        Recipe::load(recipe, &[]).unwrap_or_else(|e| panic!("{e}"));
    }
    assert!(configs.len() >= 10 && recipes.len() >= 3, "{} models, {} recipes", configs.len(), recipes.len());
}
