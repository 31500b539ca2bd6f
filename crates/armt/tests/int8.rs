//! Models whose matrices are kept in int8: near the model in f32, by both schedules and in generation, with files that each reads of the other.

#![allow(clippy::unwrap_used)]

mod small;

use armt::Model;
use armt::config::{Alignment, Config};
use armt::engine::{DType, Device};
use armt::generate::{Options, generate};
use armt::memory::{Associative, MemoryConfig, Rmt, Window, Write};
use armt::schedule::ScheduleKind;
use serde_json::{Value, json};
use small::{VOCAB, config, model, model_of_spread, tokens, used_state};

/// Models of every kind that has matrices, some of which cannot be packed.
fn models() -> Vec<Model> {
    let cpu = Device::cpu();
    let associative = MemoryConfig::new(Associative { write: Write::Projected, ..Associative::new(2, 4) });
    let rivals: [Value; 2] = [
        json!({"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 5}),
        json!({"model_type": "rwkv5", "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "head_size": 8}),
    ];
    let plain = rivals.map(|backbone| Config::new(backbone, MemoryConfig::new(Window::default()), 7));
    let mut models: Vec<Model> = plain.into_iter().map(|config| model(config, 5, &cpu)).collect();
    for family in ["gpt2", "gpt_neox", "llama", "qwen3"] {
        models.push(model_of_spread(config(family, 3, associative.clone(), 7, Alignment::Left), 5, 0.1, &cpu));
    }
    models.push(model(config("gpt2", 2, MemoryConfig::new(Rmt { tokens: 2, wrap_pos: false }), 7, Alignment::Left), 5, &cpu));
    models
}

/// Norm of the difference over the norm of the second.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    let norm = |v: Vec<f32>| v.iter().map(|x| x * x).sum::<f32>().sqrt();
    norm(a.iter().zip(b).map(|(a, b)| a - b).collect()) / norm(b.to_vec())
}

#[test]
fn a_model_in_int8_is_near_the_one_in_f32_by_both_schedules() {
    for exact in models() {
        let name = exact.config().model_type_of_backbone().to_string();
        let rounded = exact.for_use_in(DType::I8).unwrap();
        assert_eq!((rounded.dtype(), rounded.weights_dtype()), (DType::F32, DType::I8));
        let packed: Vec<&str> = rounded.params().iter().filter(|p| p.scales().is_some()).map(|p| p.name()).collect();
        assert!(
            !packed.is_empty() && packed.iter().all(|p| p.ends_with(".weight") && !p.starts_with("assoc")),
            "{name}: {packed:?}"
        );
        let (batch, state) = (tokens(2, 24, 3), used_state(&exact, 2, 9));
        let run = |model: &Model, schedule| model.forward(&batch, &state, schedule).unwrap();
        let (logits, after) = run(&exact, ScheduleKind::Sequential);
        for schedule in [ScheduleKind::Sequential, ScheduleKind::Auto] {
            let (got, state) = run(&rounded, schedule);
            let off = apart(&got, &logits);
            assert!(0.0 < off && off < 0.06, "{name}: logits off by {off}");
            for ((part, a), (_, b)) in state.tensors().zip(after.tensors()).filter(|((_, a), _)| a.dtype().is_float()) {
                let off = apart(&a.to_f32_vec().unwrap(), &b.to_f32_vec().unwrap());
                assert!(off < 0.1, "{name}: {part} off by {off}");
            }
        }
        // Token by token as segment by segment: the first that is generated is the likeliest after the text.
        let options = Options { max_new_tokens: 1, ..Options::default() };
        let next = generate(&rounded, &batch, &state, &options, &mut |_| {}).unwrap().tokens;
        let (got, _) = run(&rounded, ScheduleKind::Sequential);
        let last = |text: usize| &got[((text + 1) * batch.tokens() - 1) * VOCAB..][..VOCAB];
        let likeliest = |row: &[f32]| (0..VOCAB).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as i32;
        assert_eq!(next, [vec![likeliest(last(0))], vec![likeliest(last(1))]], "{name}");
    }
}

#[test]
fn a_folder_is_loaded_in_int8_and_states_go_from_one_to_the_other() {
    let place = tempfile::tempdir().unwrap();
    let (folder, file) = (place.path().join("model"), place.path().join("text.mem"));
    let made = model(config("gpt2", 3, MemoryConfig::new(Associative::new(2, 4)), 7, Alignment::Left), 5, &Device::cpu());
    made.save(&folder, DType::F32).unwrap();
    let [exact, rounded] = [DType::F32, DType::I8].map(|dtype| Model::load(&folder, dtype, &Device::cpu()).unwrap());
    assert_eq!(exact.fingerprint().unwrap(), rounded.fingerprint().unwrap());
    assert_eq!(exact.parameters(), rounded.parameters());
    let (batch, rounded_again) = (tokens(1, 21, 3), made.for_use_in(DType::I8).unwrap());
    let read = |model: &Model| model.forward(&batch, &model.empty(1).unwrap(), ScheduleKind::Auto).unwrap();
    let ((logits, state), (again, _)) = (read(&rounded), read(&rounded_again));
    assert_eq!(logits, again);
    rounded.save_state(&state, &file).unwrap();
    let loaded = exact.load_state(&file).unwrap();
    assert_eq!(small::numbers(&loaded), small::numbers(&state));
    // What is packed cannot be written back.
    assert!(rounded.save(&place.path().join("again"), DType::F32).is_err());
}

#[test]
fn what_is_trained_is_not_kept_in_int8() {
    let config = config("gpt2", 2, MemoryConfig::new(Associative::new(2, 4)), 7, Alignment::Left);
    let refused = Model::blank(config, DType::I8, &Device::cpu()).err().unwrap().to_string();
    assert!(refused.contains("int8 is for models that are used"), "{refused}");
}
