//! The model that the repository ships remembers: trained on up to 50 updates, asked after 100.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;

use armt::Model;
use armt::engine::{DType, Device};
use armt::eval::retrieval::curve;
use armt::tasks::retrieval::{Retrieval, SYMBOLS, Setting};

#[test]
fn the_shipped_armt_recalls_the_latest_value_at_twice_its_training_length() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results/rewrite/armt");
    let model = Model::load(&folder, DType::F32, &Device::cpu()).unwrap();
    let task = Retrieval { setting: Setting::Rewrite, key_size: 1, value_size: 1, symbols: SYMBOLS };
    let points = curve(&model, task, &[10, 100], 64, 32, 7, &mut |_| ControlFlow::Continue(())).unwrap();
    assert!(points.iter().all(|p| p.exact_match > 0.95), "{points:?}");
}
