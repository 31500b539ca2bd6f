//! The models that the repository ships remember.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;

use armt::Model;
use armt::engine::{DType, Device};
use armt::eval::retrieval::curve;
use armt::tasks::retrieval::{Retrieval, SYMBOLS, Setting};

/// How well a shipped model does at each number of pairs.
fn exact(folder: &str, setting: Setting, key_size: usize, pairs: &[usize]) -> Vec<f64> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results").join(folder);
    let model = Model::load(&folder, DType::F32, &Device::cpu()).unwrap();
    let task = Retrieval { setting, key_size, value_size: 1, symbols: SYMBOLS };
    let points = curve(&model, task, pairs, 64, 32, 7, &mut |_| ControlFlow::Continue(())).unwrap();
    points.iter().map(|p| p.exact_match).collect()
}

#[test]
fn the_shipped_armt_recalls_the_latest_value_at_twice_its_training_length() {
    let exact = exact("rewrite/armt-authors", Setting::Rewrite, 1, &[10, 100]);
    assert!(exact.iter().all(|e| *e > 0.95), "{exact:?}");
}

#[test]
fn the_shipped_armt_remembers_fifty_pairs() {
    let exact = exact("remember/armt", Setting::Remember, 3, &[10, 50]);
    assert!(exact[0] > 0.95 && exact[1] > 0.9, "{exact:?}");
}
