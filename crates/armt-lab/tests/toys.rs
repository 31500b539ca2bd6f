//! The rooms wait for what comes: a memory kind and a recurrence that the library has never heard of, each one file and one line of a
//! registry, read, train, are saved, resumed, asked and judged like the others.

#![allow(clippy::unwrap_used)]

#[path = "toys/decay.rs"]
mod decay;
#[path = "toys/echo.rs"]
mod echo;
#[path = "toys/lives.rs"]
mod lives;

use std::sync::Once;

use armt::engine::{DType, Device, Tape};
use armt::memory::{MemoryConfig, Window};
use armt::recurrence::Targets;
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::{Config, Model};
use lives::{STAGES, lives_here};
use serde_json::json;

fn registered() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        armt::memory::register(echo::KIND).unwrap();
        armt::recurrence::register(decay::MODEL_TYPE, decay::build).unwrap();
    });
}

#[test]
fn a_memory_kind_of_ones_own_lives_here() {
    registered();
    let recipe = format!(
        "seed = 3\n[task]\nsetting = \"rewrite\"\n[model]\nlayers = 2\nwidth = 16\nheads = 2\ninner = 16\n[memory]\nkind = \"echo\"\n{STAGES}"
    );
    lives_here(&recipe, "echo");
}

#[test]
fn a_recurrence_of_ones_own_lives_here() {
    registered();
    let place = tempfile::tempdir().unwrap();
    let backbone = json!({"model_type": "decay", "vocab_size": 130, "layers": 2, "width": 16});
    let config = Config::new(backbone, MemoryConfig::new(Window::default()), 4);
    Model::fresh(config, 5, DType::F32, &Device::cpu()).unwrap().save(place.path(), DType::F32).unwrap();
    let folder = place.path().display();
    lives_here(&format!("seed = 3\n[task]\nsetting = \"rewrite\"\n[model]\nfrom = \"{folder}\"\n{STAGES}"), "decay");
}

/// A state with its gradient makes the cut of a text a matter of convenience.
#[test]
fn the_gradient_of_a_recurrence_is_the_same_however_its_text_is_cut() {
    registered();
    let gradients = |segment: usize| {
        let backbone = json!({"model_type": "decay", "vocab_size": 30, "layers": 2, "width": 8});
        let config = Config::new(backbone, MemoryConfig::new(Window::default()), segment);
        let model = Model::fresh(config, 5, DType::F32, &Device::cpu()).unwrap();
        let batch = Batch { ids: (0..24).map(|i| i * i % 30).collect(), texts: 2, mask: None };
        let (tape, targets) = (Tape::new(), Targets::shifted(&batch.ids, None, 2));
        let empty = model.empty(2).unwrap();
        let loss = model.loss(&tape, &batch, &targets, &empty, ScheduleKind::Auto, Backprop::default()).unwrap().0;
        tape.backward(&loss).unwrap();
        model.params().iter().flat_map(|p| p.grad().unwrap().to_f32_vec().unwrap()).collect::<Vec<_>>()
    };
    let whole = gradients(12);
    for segment in [1, 4, 5] {
        assert!(whole.iter().zip(gradients(segment)).all(|(a, b)| (a - b).abs() < 1e-5), "segments of {segment}");
    }
}

#[test]
fn names_that_are_taken_are_refused() {
    registered();
    assert!(armt::memory::register(echo::KIND).is_err());
    assert!(armt::recurrence::register("gpt2", decay::build).is_err());
}
