//! Mamba and RWKV-5, which keep states of their own: their texts can be cut anywhere, padding changes nothing, and they are saved, converted and
//! asked like any other model. (`golden_baselines` holds them to the published code.)

#![allow(clippy::unwrap_used)]

mod small;

use std::path::Path;

use armt::config::{Alignment, Config};
use armt::engine::{DType, Device, Tape};
use armt::generate::{Options, generate};
use armt::memory::{Associative, MemoryConfig, Window};
use armt::model::Conversion;
use armt::recurrence::Targets;
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::{Model, State};
use serde_json::{Value, json};
use small::{VOCAB, model, numbers, off, tokens, used_state};

#[path = "support/file.rs"]
mod file;

/// Small ones with and without what is optional.
fn backbones() -> Vec<Value> {
    vec![
        json!({"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 10, "num_hidden_layers": 3, "state_size": 5}),
        json!({"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 3, "expand": 3,
            "conv_kernel": 3, "time_step_rank": 2, "use_bias": true, "use_conv_bias": false, "tie_word_embeddings": false}),
        json!({"model_type": "rwkv5", "vocab_size": VOCAB, "hidden_size": 12, "num_hidden_layers": 3, "head_size": 4}),
        json!({"model_type": "rwkv5", "vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "head_size": 8, "intermediate_size": 12}),
    ]
}

fn of(backbone: &Value, segment: usize) -> Model {
    let mut config = Config::new(backbone.clone(), MemoryConfig::new(Window::default()), segment);
    config.segment_alignment = Alignment::Left;
    model(config, 3, &Device::cpu())
}

fn name(backbone: &Value) -> &str {
    backbone["model_type"].as_str().unwrap()
}

/// Logits, loss, and gradients of all parameters, of texts that follow a state.
fn all(
    model: &Model,
    batch: &Batch,
    state: &State,
    schedule: ScheduleKind,
    backprop: Backprop,
) -> (Vec<f32>, f32, Vec<f32>, State) {
    let (logits, after) = model.forward(batch, state, schedule).unwrap();
    model.params().iter().for_each(|p| p.zero_grad().unwrap());
    let (tape, targets) = (Tape::new(), Targets::shifted(&batch.ids, None, batch.texts));
    let (loss, _) = model.loss(&tape, batch, &targets, state, schedule, backprop).unwrap();
    tape.backward(&loss).unwrap();
    let gradients = model.params().iter().flat_map(|p| p.grad().unwrap().to_f32_vec().unwrap()).collect();
    (logits, loss.item().unwrap(), gradients, after)
}

#[test]
fn values_and_gradients_are_the_same_however_a_text_is_cut() {
    for backbone in backbones() {
        let batch = tokens(3, 23, 5);
        let whole = of(&backbone, 23);
        let state = used_state(&whole, 3, 6);
        let want = all(&whole, &batch, &state, ScheduleKind::Sequential, Backprop::default());
        assert!(want.2.iter().any(|g| *g != 0.0));
        for segment in [1, 4, 7, 22, 40] {
            let model = of(&backbone, segment);
            for schedule in [ScheduleKind::Sequential, ScheduleKind::Diagonal] {
                for recompute in [false, true] {
                    let got = all(&model, &batch, &state, schedule, Backprop { recompute, ..Backprop::default() });
                    let what = format!("{} in segments of {segment}, {schedule:?}", name(&backbone));
                    assert!(off(&got.0, &want.0) < 1e-5, "{what}: logits");
                    assert!((got.1 - want.1).abs() < 1e-5, "{what}: loss");
                    assert!(off(&got.2, &want.2) < 2e-5, "{what}: gradients differ by {}", off(&got.2, &want.2));
                    assert!(off(&numbers(&got.3), &numbers(&want.3)) < 1e-5, "{what}: state");
                }
            }
        }
    }
}

#[test]
fn gradients_end_where_they_are_told_to() {
    for backbone in backbones() {
        let (model, batch) = (of(&backbone, 5), tokens(1, 20, 5));
        let empty = model.empty(1).unwrap();
        let gradients =
            |truncate: usize, schedule| all(&model, &batch, &empty, schedule, Backprop { truncate, ..Backprop::default() }).2;
        let cut = gradients(1, ScheduleKind::Sequential);
        assert!(off(&cut, &gradients(1, ScheduleKind::Diagonal)) < 2e-5);
        assert!(off(&cut, &gradients(0, ScheduleKind::Sequential)) > 1e-3, "{}: segments before take part", name(&backbone));
    }
}

#[test]
fn padding_changes_neither_state_nor_gradient() {
    for backbone in backbones() {
        let (model, text) = (of(&backbone, 6), tokens(1, 13, 5));
        let state = used_state(&model, 1, 6);
        let alone = all(&model, &text, &state, ScheduleKind::Auto, Backprop::default());
        // At either end, and in the middle: 13 tokens among 20 places.
        for places in [(0..13).collect::<Vec<_>>(), (7..20).collect(), (0..5).chain(12..20).collect()] {
            let (mut ids, mut mask) = (vec![1; 20], vec![0; 20]);
            places.iter().zip(&text.ids).for_each(|(place, id)| (ids[*place], mask[*place]) = (*id, 1));
            let batch = Batch { ids, texts: 1, mask: Some(mask.clone()) };
            let next: Vec<i32> = {
                let targets = Targets::shifted(&text.ids, None, 1);
                let mut next = vec![-1; 20];
                places.iter().zip(&targets.next).for_each(|(place, target)| next[*place] = *target);
                next
            };
            for schedule in [ScheduleKind::Sequential, ScheduleKind::Diagonal] {
                let (logits, after) = model.forward(&batch, &state, schedule).unwrap();
                let seen: Vec<f32> = places.iter().flat_map(|place| logits[place * VOCAB..][..VOCAB].to_vec()).collect();
                assert!(off(&seen, &alone.0) < 1e-5, "{}: logits", name(&backbone));
                assert!(off(&numbers(&after), &numbers(&alone.3)) < 1e-5, "{}: state", name(&backbone));
                model.params().iter().for_each(|p| p.zero_grad().unwrap());
                let (tape, targets) = (Tape::new(), Targets { next: next.clone() });
                let (loss, _) = model.loss(&tape, &batch, &targets, &state, schedule, Backprop::default()).unwrap();
                tape.backward(&loss).unwrap();
                let gradients: Vec<f32> = model.params().iter().flat_map(|p| p.grad().unwrap().to_f32_vec().unwrap()).collect();
                assert!(off(&gradients, &alone.2) < 2e-5, "{}: gradients", name(&backbone));
            }
        }
    }
}

#[test]
fn texts_side_by_side_do_not_know_of_each_other() {
    for backbone in backbones() {
        let (model, batch) = (of(&backbone, 5), tokens(3, 12, 7));
        let state = used_state(&model, 3, 8);
        let (together, after) = model.forward(&batch, &state, ScheduleKind::Auto).unwrap();
        for (b, own) in state.split().unwrap().iter().enumerate() {
            let text = Batch { ids: batch.ids[b * 12..][..12].to_vec(), texts: 1, mask: None };
            let (alone, last) = model.forward(&text, own, ScheduleKind::Auto).unwrap();
            assert!(off(&alone, &together[b * 12 * VOCAB..][..12 * VOCAB]) < 1e-5);
            assert!(off(&numbers(&last), &numbers(&after.pick(&[b]).unwrap())) < 1e-5);
        }
    }
}

#[test]
fn generation_says_what_reading_says() {
    for backbone in backbones() {
        let (model, prompt) = (of(&backbone, 4), tokens(2, 6, 9));
        let state = used_state(&model, 2, 10);
        let options = Options { max_new_tokens: 7, keep_logits: true, ..Options::default() };
        let said = generate(&model, &prompt, &state, &options, &mut |_| {}).unwrap();
        let ids = (0..2).flat_map(|b| [&prompt.ids[b * 6..][..6], &said.tokens[b]].concat()).collect();
        let (logits, _) = model.forward(&Batch { ids, texts: 2, mask: None }, &state, ScheduleKind::Auto).unwrap();
        for (step, got) in said.logits.iter().enumerate() {
            let want: Vec<f32> = (0..2).flat_map(|b| logits[(b * 13 + 5 + step) * VOCAB..][..VOCAB].to_vec()).collect();
            assert!(off(got, &want) < 1e-5, "{} at step {step}", name(&backbone));
        }
    }
}

#[test]
fn a_state_has_the_size_that_it_should_and_is_saved_to_the_bit() {
    let sizes = [3 * (20 * 5 + 3 * 20), 2 * (24 * 3 + 2 * 24), 3 * (3 * 16 + 2 * 12), 2 * (64 + 2 * 8)];
    for (backbone, size) in backbones().iter().zip(sizes) {
        let model = of(backbone, 4);
        assert_eq!(model.empty(2).unwrap().bytes(), 2 * size * 4);
        assert_eq!((model.recurrence().layout().bytes(DType::F32), model.recurrence().layout().growth(DType::F32)), (size * 4, 0));
        let (place, state) = (tempfile::tempdir().unwrap(), used_state(&model, 2, 3));
        let file = place.path().join("state");
        model.save_state(&state, &file).unwrap();
        let bits = |s: &State| numbers(s).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&model.load_state(&file).unwrap()), bits(&state));
        let other = of(&backbones().into_iter().find(|b| b != backbone).unwrap(), 4);
        assert!(other.load_state(&file).is_err(), "a state of another model is refused");
    }
}

/// A folder as Hugging Face writes it, with names and configuration changed.
fn folder(place: &Path, model: &Model, rename: impl Fn(&str) -> String, change: impl Fn(&mut Value)) {
    let mut backbone = model.config().backbone.clone();
    change(&mut backbone);
    std::fs::write(place.join("config.json"), backbone.to_string()).unwrap();
    let tensors: Vec<_> = model.export(|p| Ok(p.value())).unwrap().into_iter().map(|(n, s, v)| (rename(&n), s, v)).collect();
    file::write(&place.join("model.safetensors"), &tensors);
}

/// BlinkDL's names, said once more.
fn authors(name: &str) -> String {
    let pairs = [
        ("rwkv.", ""),
        ("embeddings", "emb"),
        ("pre_ln", "ln0"),
        ("attention", "att"),
        ("feed_forward", "ffn"),
        ("mix_key", "mix_k"),
        ("mix_value", "mix_v"),
        ("mix_receptance", "mix_r"),
        ("mix_gate", "mix_g"),
    ];
    pairs.iter().fold(name.to_string(), |name, (theirs, ours)| name.replace(theirs, ours))
}

#[test]
fn folders_of_hugging_face_and_the_authors_names_are_taken() {
    for backbone in backbones() {
        let model = of(&backbone, 8);
        let text = tokens(1, 20, 4);
        let want = model.forward(&text, &model.empty(1).unwrap(), ScheduleKind::Auto).unwrap().0;
        let names: [&dyn Fn(&str) -> String; 2] = if name(&backbone) == "rwkv5" {
            [&str::to_string, &authors]
        } else {
            [&str::to_string, &|n| n.replace("embeddings", "embedding")]
        };
        for rename in names {
            let place = tempfile::tempdir().unwrap();
            folder(place.path(), &model, rename, |_| {});
            let same = |loaded: Model| {
                let got = loaded.forward(&text, &loaded.empty(1).unwrap(), ScheduleKind::Auto).unwrap().0;
                assert!(off(&got, &want) < 1e-5, "{}", name(&backbone));
            };
            same(Model::load(place.path(), DType::F32, &Device::cpu()).unwrap());
            // And by way of `armt convert`.
            let out = place.path().join("converted");
            let conversion = Conversion::open(place.path(), MemoryConfig::new(Window::default()), 8, 0).unwrap();
            conversion.write(&out, DType::F32).unwrap();
            let converted = Model::load(&out, DType::F32, &Device::cpu()).unwrap();
            assert_eq!(converted.config().segment_size, 8);
            same(converted);
            // And back.
            let plain = place.path().join("plain");
            Model::load(&out, DType::F32, &Device::cpu()).unwrap().save_plain(&plain, DType::F32).unwrap();
            same(Model::load(&plain, DType::F32, &Device::cpu()).unwrap());
        }
    }
}

/// What loading says of a folder that it refuses.
fn refusal(model: &Model, rename: impl Fn(&str) -> String, change: impl Fn(&mut Value)) -> String {
    let place = tempfile::tempdir().unwrap();
    folder(place.path(), model, rename, change);
    let said = Model::load(place.path(), DType::F32, &Device::cpu()).err().unwrap().to_string();
    let conversion = Conversion::open(place.path(), MemoryConfig::new(Window::default()), 8, 0)
        .and_then(|c| c.write(&place.path().join("out"), DType::F32));
    assert!(conversion.is_err(), "convert takes what loading refuses: {said}");
    said
}

#[test]
fn other_models_of_their_kind_and_missing_tensors_are_refused_by_name() {
    let [mamba, rwkv5] = [0, 2].map(|i| of(&backbones()[i], 8));
    let same = |n: &str| n.to_string();
    for (model_type, called) in
        [("mamba2", "Mamba-2"), ("falcon_mamba", "Falcon Mamba"), ("rwkv", "RWKV-4"), ("rwkv6", "RWKV-6"), ("rwkv7", "RWKV-7")]
    {
        let said = refusal(&mamba, same, |c| c["model_type"] = model_type.into());
        assert!(said.contains(called) && said.contains("mamba, rwkv5"), "{said}");
    }
    let said = refusal(&rwkv5, same, |c| c["model_version"] = "5_1".into());
    assert!(said.contains("model_version") && said.contains("5_1"), "{said}");
    for (model, gone) in [(&mamba, "backbone.layers.1.mixer.A_log"), (&rwkv5, "rwkv.blocks.2.attention.gate.weight")] {
        let said = refusal(model, |n| if n == gone { "elsewhere".into() } else { n.into() }, |_| {});
        assert!(said.contains(gone) || said.contains("elsewhere"), "{said}");
    }
    let said = refusal(&mamba, same, |c| c["state_size"] = 6.into());
    assert!(said.contains("should be") && said.contains("mixer"), "{said}");
    for (key, value) in
        [("conv_kernel", json!(1)), ("hidden_act", json!("relu")), ("hidden_size", json!(0)), ("layer_norm_epsilon", json!(-1.0))]
    {
        let said = refusal(&mamba, same, |c| c[key] = value.clone());
        assert!(said.contains(key), "{said}");
    }
    let said = refusal(&rwkv5, same, |c| c["head_size"] = 5.into());
    assert!(said.contains("head_size"), "{said}");
    for backbone in backbones() {
        let config = Config::new(backbone, MemoryConfig::new(Associative::new(2, 4)), 8);
        let said = Model::fresh(config, 0, DType::F32, &Device::cpu()).err().unwrap().to_string();
        assert!(said.contains("memory.kind") && said.contains("state of its own"), "{said}");
    }
}

#[test]
fn fresh_ones_begin_as_the_published_code_does() {
    let fresh = |backbone: &Value| {
        let config = Config::new(backbone.clone(), MemoryConfig::new(Window::default()), 8);
        Model::fresh(config, 1, DType::F32, &Device::cpu()).unwrap()
    };
    let values = |model: &Model, name: &str| model.param(name).unwrap().value().to_f32_vec().unwrap();
    let mamba = fresh(&backbones()[0]);
    assert!(
        values(&mamba, "a_log").chunks(5).all(|row| row.iter().enumerate().all(|(n, x)| (x - ((n + 1) as f32).ln()).abs() < 1e-6))
    );
    let steps: Vec<f32> = values(&mamba, "step.bias").iter().map(|b| b.exp().ln_1p()).collect();
    assert!(steps.iter().all(|s| (0.00099..0.101).contains(s)), "{steps:?}");
    assert!(steps.iter().any(|s| *s < 0.01) && steps.iter().any(|s| *s > 0.01));
    let rwkv5 = fresh(&backbones()[2]);
    // The first layer of three: channels from 0 to 11 twelfths; time_decay from -6 to -1.
    assert!(values(&rwkv5, "mix.k")[..12].iter().enumerate().all(|(i, x)| (x - i as f32 / 12.0).abs() < 1e-6));
    let decay = values(&rwkv5, "decay");
    assert!((decay[0] + 6.0).abs() < 1e-6 && (decay[11] + 1.0).abs() < 1e-6);
    let first = values(&rwkv5, "bonus");
    assert!((first[0] - 0.0).abs() < 1e-6 && (first[1] - 0.1).abs() < 1e-6 && (first[2] + 0.1).abs() < 1e-6, "{first:?}");
    assert!(values(&rwkv5, "out.weight").iter().all(|x| *x == 0.0));
}
