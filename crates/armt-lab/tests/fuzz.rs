//! Damaged files of the lab: whatever is in them, they are refused or taken as they are, and nothing panics or hangs.

#![allow(clippy::unwrap_used)]

#[path = "../../armt/tests/support/damage.rs"]
mod damage;
#[path = "../../armt/tests/support/tiny_gpt2.rs"]
mod tiny_gpt2;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use armt::engine::{DType, Device};
use armt::text::Tokenizer;
use armt_lab::bench::growth::Figures;
use armt_lab::eval::babilong::{self, is_report};
use armt_lab::eval::retrieval::Report;
use armt_lab::tasks::babi::file;
use armt_lab::tasks::babilong::Books;
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Event, train};
use damage::{damaged, damages, share};
use proptest::prelude::*;

const RECIPE: &str = r#"seed = 3
[task]
setting = "remember"
[model]
layers = 1
width = 16
heads = 2
inner = 8
init = 0.02
[memory]
kind = "associative"
tokens = 2
d_mem = 4
[optimizer]
lr = 3e-4
clip_value = 1.0
warmup = 0.1
decay = 2.0
[eval]
every = 2
samples = 4
batch = 2
patience = 1
[[stage]]
pairs = 2
batch = 2
steps = 3
until = 0.9
carry = 0.5
[[stage]]
pairs = 3
key_size = 2
batch = 4
accumulate = 2
steps = 2
vary = true
"#;

const RETRIEVAL: &str = r#"{"model": "m", "trained_pairs": 5, "minutes": 1.5, "task": "remember", "key_size": 1, "value_size": 1,
"symbols": 16, "samples": 10, "batch": 5, "seed": 0, "dtype": "f32", "points": [{"pairs": 10, "samples": 10, "exact_match": 0.5,
"stored": 4.5}]}"#;

const BABILONG: &str = r#"{"task": "babilong", "name": "ARMT", "settings": {"model": "m", "fingerprint": "f", "seed": 0, "batch": 4,
"dtype": "f32", "device": "cpu", "label_match": true, "simulated": false, "facts": "told", "books": null, "babi": null, "bpe": null},
"cells": [{"task": "qa1", "length": "16k", "samples": 10, "exact_match": 0.5, "label_match": 0.6}]}"#;

const STORIES: &str = "1 Mary got the milk there.\n2 John moved to the bedroom.\n3 Where is John? \tbedroom\t2\n4 Mary went to the hallway.\n\
                       5 Where is the milk? \thallway\t1 4\n1 The office is east of the garden.\n2 What is east of the garden?\toffice\t1\n";

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (encoder, merges) = tiny_gpt2::write_bpe(folder.path());
    Arc::new(Tokenizer::from_gpt2(&encoder, &merges).unwrap())
});

/// A run that was stopped within its first stage.
static RUN: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap().keep().join("run");
    go(&folder, false, 2).unwrap();
    folder
});

/// Begins a run or goes on with it, at most to so many steps.
fn go(folder: &Path, resume: bool, most: u64) -> armt_lab::Result<()> {
    let recipe = Recipe::parse(RECIPE, &[])?;
    let mut run = if resume { RunFolder::open(folder)? } else { RunFolder::create(folder)? };
    train(&recipe, &mut run, resume, (DType::F32, &Device::cpu()), &mut |event| match event {
        Event::Step { progress, .. } if progress.total >= most => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    })?;
    Ok(())
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let place = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &place);
        } else {
            std::fs::copy(entry.path(), place).unwrap();
        }
    }
}

/// A damaged file in a folder of its own.
fn written(name: &str, good: &str, damages: &[damage::Damage]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, damaged(good.as_bytes(), damages)).unwrap();
    (folder, path)
}

proptest! {
    #![proptest_config(share(1000))]

    #[test]
    fn a_damaged_recipe_is_refused_or_describes_models_that_can_be(damages in damages()) {
        let text = String::from_utf8_lossy(&damaged(RECIPE.as_bytes(), &damages)).into_owned();
        if let Ok(recipe) = Recipe::parse(&text, &[]) {
            prop_assert!(recipe.record().is_ok());
            for stage in &recipe.stages {
                let schedule = recipe.schedule(stage);
                prop_assert!([0, 1, stage.steps].iter().all(|step| schedule.rate(*step).is_finite()));
            }
        }
    }

    #[test]
    fn a_damaged_report_is_refused_or_has_shares(damages in damages()) {
        let (_folder, path) = written("r.json", RETRIEVAL, &damages);
        if let Ok(report) = Report::load(&path) {
            prop_assert!(report.points.iter().all(|p| (0.0..=1.0).contains(&p.exact_match)));
        }
        let _ = Figures::load(&path);
        let (_folder, path) = written("b.json", BABILONG, &damages);
        let _ = is_report(&path);
        if let Ok(report) = babilong::Report::load(&path) {
            prop_assert!(report.cells.iter().all(|c| (0.0..=1.0).contains(&c.exact_match) && c.samples > 0));
        }
    }

    #[test]
    fn damaged_stories_are_refused_or_every_one_is_asked_about(damages in damages()) {
        let (_folder, path) = written("qa1_one_test.txt", STORIES, &damages);
        if let Ok(stories) = file::read(&path) {
            prop_assert!(stories.iter().all(|s| !s.questions.is_empty()));
        }
    }
}

proptest! {
    #![proptest_config(share(600))]

    #[test]
    fn a_damaged_book_is_refused_or_read(damages in damages()) {
        let book = "CHAPTER I\r\n\r\nIt was a dark and stormy night in 1999, and the rain fell in torrents. \"So it goes,\" said Mr. H. C. \
                    Andersen (the second), and went on for quite a while. Then all was still in the house.\n";
        let (folder, _) = written("book.txt", book, &damages);
        let books = Books::open(folder.path(), TOKENIZER.clone()).unwrap();
        if let Ok(counts) = books.counts() {
            // No shorter sentence is one.
            prop_assert!(counts.iter().sum::<u64>() >= 10);
        }
    }
}

proptest! {
    #![proptest_config(share(200))]

    #[test]
    fn a_damaged_run_is_refused_or_goes_on(which in any::<prop::sample::Index>(), damages in damages()) {
        let files = ["log.jsonl", "last/state.json", "last/recipe.json", "last/config.json", "last/model.safetensors",
            "last/optimizer.safetensors", "last/memory.safetensors"];
        let name = files[which.index(files.len())];
        let folder = tempfile::tempdir().unwrap();
        copy(&RUN, folder.path());
        let path = folder.path().join(name);
        if path.exists() {
            std::fs::write(&path, damaged(&std::fs::read(&path).unwrap(), &damages)).unwrap();
        }
        let _ = go(folder.path(), true, u64::MAX);
    }
}
