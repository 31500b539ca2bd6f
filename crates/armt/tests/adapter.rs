//! Adapters: nothing changes before the first step, gradients of the factors are those of the loss, files are as peft has them, and an adapter goes
//! on its own base alone.

#![allow(clippy::unwrap_used)]

mod small;

use std::collections::HashMap;
use std::path::Path;

use armt::adapter::{Adapter, AdapterTraining, Base, LoraSettings};
use armt::config::Alignment;
use armt::engine::{DType, Device, Param, Tape, Tensor};
use armt::memory::{Associative, MemoryConfig, Window};
use armt::random::Random;
use armt::recurrence::Targets;
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::weights::Tensors;
use armt::{Error, Model, Session};
use small::{FAMILIES, off, tokens};

const LAYERS: usize = 3;

fn lora(targets: &[&str]) -> LoraSettings {
    LoraSettings { rank: 3, alpha: 5.0, targets: targets.iter().map(|t| t.to_string()).collect() }
}

/// Every projection of a family, and some of them: of matrices that lie side by side only a few.
fn targets(family: &str) -> [Vec<&'static str>; 2] {
    match family {
        "gpt2" => [vec!["c_attn", "c_proj", "c_fc"], vec!["mlp.c_proj"]],
        "gpt_neox" | "gpt_neox serial" => {
            [vec!["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], vec!["query_key_value"]]
        }
        _ => {
            [vec!["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], vec!["v_proj", "k_proj", "up_proj"]]
        }
    }
}

/// A base in a folder.
fn base(folder: &Path, family: &str, memory: MemoryConfig) -> Model {
    let config = small::config(family, LAYERS, memory, 5, Alignment::Left);
    let model = small::model(config, 7, &Device::cpu());
    model.save(folder, DType::F32).unwrap();
    model
}

fn associative() -> MemoryConfig {
    MemoryConfig::new(Associative::new(2, 4))
}

/// A model to be trained beside the base of a folder.
fn training(folder: &Path, lora: Option<&LoraSettings>) -> (Model, AdapterTraining) {
    let config = armt::Config::load(folder).unwrap();
    let model = AdapterTraining::blank(config, lora, DType::F32, &Device::cpu()).unwrap();
    model.set_weights(&Tensors::open(folder).unwrap()).unwrap();
    let training = AdapterTraining::new(&model, Base::of(folder).unwrap(), lora, 1).unwrap();
    (model, training)
}

/// Changes everything that is trained at random.
fn shake(model: &Model, training: &AdapterTraining, seed: u64) {
    let mut random = Random::new(seed);
    for p in training.params(model) {
        let values: Vec<f32> = p.value().to_f32_vec().unwrap().iter().map(|x| x + (0.2 * random.normal()) as f32).collect();
        p.set(&Tensor::from_slice(&values, p.value().shape(), &Device::cpu()).unwrap()).unwrap();
    }
    training.refresh().unwrap();
}

fn logits(model: &Model, text: &Batch) -> Vec<u32> {
    let (logits, _) = model.forward(text, &model.empty(text.texts).unwrap(), ScheduleKind::Auto).unwrap();
    logits.iter().map(|x| x.to_bits()).collect()
}

/// The tensors of a model's backbone under Hugging Face's names.
fn plain(model: &Model, folder: &Path) -> HashMap<String, (Vec<usize>, Vec<f32>)> {
    model.save_plain(folder, DType::F32).unwrap();
    let tensors = Tensors::open(folder).unwrap();
    let found = tensors.names().map(|name| tensors.find(&[name]).unwrap());
    found.map(|(name, shape, values)| (name, (shape, values))).collect()
}

#[test]
fn before_the_first_step_outputs_are_those_of_the_base_to_the_bit() {
    let text = tokens(2, 17, 3);
    for family in FAMILIES {
        for targets in targets(family) {
            let dir = tempfile::tempdir().unwrap();
            let own = base(&dir.path().join("base"), family, associative());
            let (model, training) = training(&dir.path().join("base"), Some(&lora(&targets)));
            training.refresh().unwrap();
            assert_eq!(logits(&own, &text), logits(&model, &text), "{family} {targets:?}");
            training.save(&model, &dir.path().join("adapter")).unwrap();
            let adapter = Adapter::open(&dir.path().join("adapter")).unwrap();
            let loaded = adapter.load(&dir.path().join("base"), DType::F32, &Device::cpu()).unwrap();
            assert_eq!(logits(&own, &text), logits(&loaded, &text), "{family} {targets:?}, loaded");
        }
    }
}

#[test]
fn a_loaded_adapter_is_the_trained_model_and_its_weights_are_what_peft_makes_of_its_files() {
    let text = tokens(2, 17, 3);
    for family in FAMILIES {
        for targets in targets(family) {
            let dir = tempfile::tempdir().unwrap();
            let [base_folder, adapter_folder, merged] = ["base", "adapter", "merged"].map(|name| dir.path().join(name));
            let own = base(&base_folder, family, associative());
            let settings = lora(&targets);
            let (model, training) = training(&base_folder, Some(&settings));
            shake(&model, &training, 11);
            training.save(&model, &adapter_folder).unwrap();
            let adapter = Adapter::open(&adapter_folder).unwrap();
            assert_eq!(adapter.lora().as_ref(), Some(&settings));
            let loaded = adapter.load(&base_folder, DType::F32, &Device::cpu()).unwrap();
            assert_ne!(logits(&own, &text), logits(&loaded, &text), "{family} {targets:?}: nothing was changed");
            assert_eq!(logits(&model, &text), logits(&loaded, &text), "{family} {targets:?}");
            loaded.save(&merged, DType::F32).unwrap();
            let merged = Model::load(&merged, DType::F32, &Device::cpu()).unwrap();
            assert_eq!(loaded.fingerprint().unwrap(), merged.fingerprint().unwrap());
            assert_eq!(logits(&loaded, &text), logits(&merged, &text), "{family} {targets:?}, merged");

            // peft: weight + transpose(lora_B @ lora_A, fan_in_fan_out) * (lora_alpha / r), by the names of modules.
            let before = plain(&own, &dir.path().join("plain"));
            let after = plain(&loaded, &dir.path().join("plain-after"));
            let factors = Tensors::open(&adapter_folder.join("adapter_model.safetensors")).unwrap();
            let mut changed = 0;
            for (name, (shape, values)) in &before {
                let module = name.trim_end_matches(".weight");
                let (a, b) = ["A", "B"].map(|f| format!("base_model.model.{module}.lora_{f}.weight")).into();
                let Ok((_, a_shape, a)) = factors.find(&[a.as_str()]) else {
                    assert_eq!(values, &after[name].1, "{family} {targets:?}: {name} is none of the targets");
                    continue;
                };
                let (_, b_shape, b) = factors.find(&[b.as_str()]).unwrap();
                let (rank, input, output) = (settings.rank, a_shape[1], b_shape[0]);
                assert_eq!((a_shape[0], b_shape[1]), (rank, rank));
                let transposed = family == "gpt2";
                assert_eq!(*shape, if transposed { vec![input, output] } else { vec![output, input] }, "{name}");
                let mut wanted = values.clone();
                for (o, i) in (0..output).flat_map(|o| (0..input).map(move |i| (o, i))) {
                    let product: f32 = (0..rank).map(|r| b[o * rank + r] * a[r * input + i]).sum();
                    wanted[if transposed { i * output + o } else { o * input + i }] += product * (5.0 / 3.0);
                }
                assert!(off(&after[name].1, &wanted) < 1e-6, "{family} {targets:?}: {name}");
                changed += 1;
            }
            // GPT-2 has c_proj twice in a layer.
            let each = targets.len() + usize::from(family == "gpt2" && targets.contains(&"c_proj"));
            assert_eq!(changed, LAYERS * each, "{family} {targets:?}");
        }
    }
}

#[test]
fn gradients_of_the_factors_are_those_of_the_loss() {
    let text = tokens(2, 17, 5);
    let targets_of = |text: &Batch| Targets::shifted(&text.ids, None, text.texts);
    for (family, targets) in FAMILIES.iter().flat_map(|f| targets(f).map(|t| (*f, t))) {
        let dir = tempfile::tempdir().unwrap();
        // Without a memory, whose kernel function has kinks that differences would step over.
        base(dir.path(), family, MemoryConfig::new(Window { sliding_window: false }));
        let (model, training) = training(dir.path(), Some(&lora(&targets)));
        shake(&model, &training, 12);
        let loss = |tape: &Tape| {
            let empty = model.empty(2).unwrap();
            model.loss(tape, &text, &targets_of(&text), &empty, ScheduleKind::Auto, Backprop::default()).unwrap().0
        };
        let factors: Vec<Param> = training.params(&model).into_iter().filter(|p| p.name().starts_with("lora.")).collect();
        let tape = Tape::new();
        let value = loss(&tape);
        training.zero_grad().unwrap();
        tape.backward(&value).unwrap();
        training.pull().unwrap();
        for (number, p) in factors.iter().enumerate() {
            let (before, grad) = (p.value().to_f32_vec().unwrap(), p.grad().unwrap().to_f32_vec().unwrap());
            // Along the gradient itself the loss changes by its norm.
            let norm = grad.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            assert!(norm > 1e-4, "{family} {targets:?}: {} has no gradient", p.name());
            let at = |step: f64| {
                let moved = before.iter().zip(&grad).map(|(x, g)| x + (step * f64::from(*g) / norm) as f32);
                p.set(&Tensor::from_slice(&moved.collect::<Vec<_>>(), p.value().shape(), &Device::cpu()).unwrap()).unwrap();
                training.refresh().unwrap();
                f64::from(loss(&Tape::off()).item().unwrap())
            };
            let step = 1e-3;
            let slope = (at(step) - at(-step)) / (2.0 * step);
            at(0.0);
            assert!((slope - norm).abs() < 0.01 * norm + 5e-4, "{family} {targets:?}, {number} {}: {slope} for {norm}", p.name());
        }
    }
}

#[test]
fn an_adapter_of_the_memory_alone_changes_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let [base_folder, adapter_folder] = ["base", "adapter"].map(|name| dir.path().join(name));
    let own = base(&base_folder, "llama", associative());
    let (model, training) = training(&base_folder, None);
    shake(&model, &training, 13);
    training.save(&model, &adapter_folder).unwrap();
    let adapter = Adapter::open(&adapter_folder).unwrap();
    assert_eq!(adapter.lora(), None);
    let loaded = adapter.load(&base_folder, DType::F32, &Device::cpu()).unwrap();
    let text = tokens(2, 17, 3);
    assert_eq!(logits(&model, &text), logits(&loaded, &text));
    assert_ne!(logits(&own, &text), logits(&loaded, &text));
    assert_eq!(plain(&own, &dir.path().join("a")), plain(&loaded, &dir.path().join("b")));
}

/// Of a memory in some of the layers an adapter holds these alone. One with all of them, as earlier versions wrote it, is taken too.
#[test]
fn an_adapter_holds_the_memory_of_the_layers_that_have_one() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let adapter_folder = out.path().join("adapter");
    let memory = MemoryConfig::new(Associative { memory_layers: Some(vec![1]), ..Associative::new(2, 4) });
    base(folder.path(), "llama", memory);
    let settings = lora(&["q_proj"]);
    let (model, training) = training(folder.path(), Some(&settings));
    shake(&model, &training, 3);
    training.save(&model, &adapter_folder).unwrap();
    let names: Vec<String> =
        Tensors::open(&adapter_folder.join("adapter_model.safetensors")).unwrap().names().map(String::from).collect();
    assert!(
        names.iter().any(|n| n.contains(".1.W_mq")) && !names.iter().any(|n| n.contains(".0.W_mq") || n.contains(".2.W_mq")),
        "{names:?}"
    );
    let adapter = Adapter::open(&adapter_folder).unwrap();
    let loaded = adapter.load(folder.path(), DType::F32, &Device::cpu()).unwrap();
    let text = tokens(2, 17, 4);
    assert_eq!(logits(&loaded, &text), logits(&model, &text));
}

#[test]
fn an_adapter_of_another_base_is_refused_by_the_names_of_both() {
    let dir = tempfile::tempdir().unwrap();
    let [mine, other, adapter] = ["mine", "other", "adapter"].map(|name| dir.path().join(name));
    base(&mine, "llama", associative());
    let config = small::config("llama", LAYERS, associative(), 5, Alignment::Left);
    small::model(config, 8, &Device::cpu()).save(&other, DType::F32).unwrap();
    let (model, training) = training(&mine, Some(&lora(&["q_proj"])));
    training.save(&model, &adapter).unwrap();
    let adapter = Adapter::open(&adapter).unwrap();
    let refused = adapter.load(&other, DType::F32, &Device::cpu()).err().unwrap();
    let said = refused.to_string();
    assert!(
        matches!(refused, Error::File { .. }) && said.contains("an adapter of mine") && said.contains("the model is other"),
        "{said}"
    );
    assert!(Session::open_adapted(&other, &adapter, DType::F32, &Device::cpu()).is_err());
    // Of another shape the factors do not fit in the first place.
    base(&dir.path().join("gpt2"), "gpt2", associative());
    let said = adapter.load(&dir.path().join("gpt2"), DType::F32, &Device::cpu()).err().unwrap().to_string();
    assert!(said.contains("c_attn, c_fc, c_proj") && said.contains("q_proj"), "{said}");
}

#[test]
fn projections_that_the_backbone_has_not_are_refused_with_those_it_has() {
    let cases = [
        ("gpt2", "c_attn, c_fc, c_proj"),
        ("gpt_neox", "dense, dense_4h_to_h, dense_h_to_4h, query_key_value"),
        ("qwen3", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ];
    for (family, known) in cases {
        let config = small::config(family, LAYERS, MemoryConfig::new(Window { sliding_window: false }), 5, Alignment::Left);
        // The end of a name that is no name of its own, a table, a norm and a projection of others.
        for unknown in ["proj", "wte", "q_norm", "attention"] {
            let refused =
                AdapterTraining::blank(config.clone(), Some(&lora(&[unknown])), DType::F32, &Device::cpu()).err().unwrap();
            let Error::Config { key, expected, got } = &refused else { panic!("{refused}") };
            assert_eq!((key.as_str(), got.as_str()), ("lora.targets", unknown));
            assert!(expected.contains(&format!("({known})")), "{refused}");
        }
    }
    let none = LoraSettings { rank: 0, ..lora(&["q_proj"]) };
    let config = small::config("llama", LAYERS, associative(), 5, Alignment::Left);
    let refused = AdapterTraining::blank(config, Some(&none), DType::F32, &Device::cpu()).err().unwrap();
    assert!(matches!(&refused, Error::Config { key, .. } if key == "lora.rank"), "{refused}");
}

#[test]
fn a_folder_that_holds_something_else_is_refused_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let [mine, adapter] = ["mine", "adapter"].map(|name| dir.path().join(name));
    let own = base(&mine, "llama", associative());
    let said = Adapter::open(&mine).err().unwrap().to_string();
    assert!(said.contains("mine: expected an adapter"), "{said}");
    let (model, training) = training(&mine, Some(&lora(&["q_proj"])));
    training.save(&model, &adapter).unwrap();
    // The whole model's tensors in the place of the adapter's.
    own.save(&dir.path().join("copy"), DType::F32).unwrap();
    std::fs::copy(dir.path().join("copy/model.safetensors"), adapter.join("adapter_model.safetensors")).unwrap();
    let said = Adapter::open(&adapter).unwrap().load(&mine, DType::F32, &Device::cpu()).err().unwrap().to_string();
    assert!(said.contains("no part of an adapter"), "{said}");
    // A setting that would mean another formula.
    training.save(&model, &adapter).unwrap();
    let path = adapter.join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen('{', "{\"use_rslora\": true,", 1)).unwrap();
    let said = Adapter::open(&adapter).err().unwrap().to_string();
    assert!(said.contains("adapter_config.json") && said.contains("use_rslora"), "{said}");
    // What peft writes itself has no key of ours.
    let theirs = r#"{"auto_mapping": null, "peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "use_dora": false}"#;
    std::fs::write(&path, theirs).unwrap();
    let said = Adapter::open(&adapter).err().unwrap().to_string();
    assert!(said.contains("adapter_config.json") && said.contains("an adapter of peft") && said.contains("armt convert"), "{said}");
}
