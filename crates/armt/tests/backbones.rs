//! Backbones against `transformers`: tiny random models as it saves them, with its logits and greedy tokens. `scripts/golden-backbones.py` makes
//! the folder.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use armt::engine::{DType, Device};
use armt::generate::{Options, generate};
use armt::memory::{Associative, MemoryConfig};
use armt::model::{Conversion, Model};
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt::weights::Tensors;
use safetensors::SafeTensors;
use serde_json::{Value, json};

#[path = "support/file.rs"]
mod file;

const TOLERANCE: f32 = 5e-5;

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/backbones");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    cases.sort();
    cases
}

struct Golden {
    tokens: Batch,
    logits: Vec<f32>,
    greedy: Vec<i32>,
}

fn golden(case: &Path) -> Golden {
    let bytes = std::fs::read(case.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = |name: &str| {
        file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    let logits = file.tensor("logits").unwrap().data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let texts = file.tensor("tokens").unwrap().shape()[0];
    Golden { tokens: Batch { ids: ids("tokens"), texts, mask: None }, logits, greedy: ids("greedy") }
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f32::max)
}

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    let cases = cases();
    assert!(cases.len() >= 9, "{cases:?}");
    for case in cases {
        let model = Model::load(&case, DType::F32, &Device::cpu()).unwrap_or_else(|e| panic!("{}: {e}", case.display()));
        let Golden { tokens, logits, greedy } = golden(&case);
        let empty = model.empty(tokens.texts).unwrap();
        for schedule in [ScheduleKind::Sequential, ScheduleKind::Auto] {
            let ours = model.forward(&tokens, &empty, schedule).unwrap().0;
            assert!(farthest(&ours, &logits) < TOLERANCE, "{}: {}", case.display(), farthest(&ours, &logits));
        }
        let options = Options { max_new_tokens: 12, ..Options::default() };
        let said = generate(&model, &tokens, &empty, &options, &mut |_| {}).unwrap().tokens;
        assert_eq!(said.concat(), greedy, "{}", case.display());
    }
}

/// A fresh memory reads nothing from an empty state, and its tokens come after the text: the first segment's logits are the backbone's.
#[test]
fn a_converted_backbone_is_the_backbone_until_its_memory_has_read() {
    for case in cases() {
        let folder = tempfile::tempdir().unwrap();
        let memory = MemoryConfig::new(Associative::new(2, 4));
        let model = Model::convert(&case, memory, 20, 1, &Device::cpu()).unwrap_or_else(|e| panic!("{}: {e}", case.display()));
        model.save(folder.path(), DType::F32).unwrap();
        let loaded = Model::load(folder.path(), DType::F32, &Device::cpu()).unwrap();
        let Golden { tokens, logits, .. } = golden(&case);
        let ours = loaded.forward(&tokens, &loaded.empty(tokens.texts).unwrap(), ScheduleKind::Auto).unwrap().0;
        assert!(farthest(&ours, &logits) < TOLERANCE, "{}: {}", case.display(), farthest(&ours, &logits));
    }
}

/// A copy of a case with some keys of its configuration changed.
fn changed(name: &str, keys: &[(&str, Value)]) -> tempfile::TempDir {
    let case = cases().into_iter().find(|c| c.ends_with(name)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(&case).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    keys.iter().for_each(|(key, value)| config[*key] = value.clone());
    std::fs::write(&path, config.to_string()).unwrap();
    folder
}

#[test]
fn the_old_keys_of_rotary_scaling_mean_what_the_new_ones_do() {
    let scaling = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
    let folder =
        changed("llama-yarn", &[("rope_parameters", Value::Null), ("rope_theta", json!(500.0)), ("rope_scaling", scaling)]);
    let model = Model::load(folder.path(), DType::F32, &Device::cpu()).unwrap();
    let Golden { tokens, logits, .. } = golden(folder.path());
    let ours = model.forward(&tokens, &model.empty(tokens.texts).unwrap(), ScheduleKind::Auto).unwrap().0;
    assert!(farthest(&ours, &logits) < TOLERANCE);
}

#[test]
fn what_a_folder_asks_for_and_is_not_known_is_refused_by_its_key() {
    let refused = |name: &str, keys: &[(&str, Value)], words: &[&str]| {
        let said = Model::load(changed(name, keys).path(), DType::F32, &Device::cpu()).err().unwrap().to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{name}: {said}");
    };
    refused(
        "mistral",
        &[("rope_parameters", json!({"rope_type": "longrope", "rope_theta": 1e4}))],
        &["rope_type", "longrope", "yarn"],
    );
    refused("mistral", &[("rope_scaling", json!({"type": "su", "factor": 2.0}))], &["rope_type", "su"]);
    refused("qwen3", &[("rope_parameters", json!({"rope_type": "linear"}))], &["factor"]);
    refused("llama-yarn", &[("rope_parameters", json!({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}))], &["mscale"]);
    refused("llama-linear", &[("partial_rotary_factor", json!(0.5)), ("rope_parameters", Value::Null)], &["partial_rotary_factor"]);
    refused("qwen2", &[("hidden_act", json!("gelu"))], &["hidden_act", "silu"]);
    let folder = changed("mistral", &[]);
    let long =
        Model::convert(folder.path(), MemoryConfig::new(Associative::new(2, 4)), 47, 0, &Device::cpu()).err().unwrap().to_string();
    assert!(long.contains("at most 48 positions"), "{long}");
}

/// A folder's tensors with some more.
fn with_tensors(folder: &Path, more: impl FnOnce(&Tensors) -> Vec<(String, Vec<usize>, Vec<f32>)>) {
    let tensors = Tensors::open(folder).unwrap();
    let mut names: Vec<&str> = tensors.names().collect();
    names.sort_unstable();
    let mut all: Vec<_> = names.iter().map(|name| tensors.find(&[name]).unwrap()).collect();
    all.extend(more(&tensors));
    file::write(&folder.join("model.safetensors"), &all);
}

#[test]
fn tensors_that_no_part_of_a_model_is_are_named_and_a_tied_head_must_be_the_embedding() {
    let load = |folder: &Path| Model::load(folder, DType::F32, &Device::cpu()).err().map(|e| e.to_string());
    let extra = changed("qwen2", &[]);
    with_tensors(extra.path(), |_| vec![("model.layers.0.self_attn.q_norm.weight".into(), vec![4], vec![1.0; 4])]);
    let said = load(extra.path()).unwrap();
    assert!(said.contains("no part of the model is: model.layers.0.self_attn.q_norm.weight"), "{said}");
    let beside = changed("qwen2", &[]);
    with_tensors(beside.path(), |_| vec![("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![2], vec![1.0, 0.5])]);
    assert_eq!(load(beside.path()), None);
    for (other, refused) in [(0.0, false), (1.0, true)] {
        let tied = changed("qwen3-tied-bf16", &[]);
        with_tensors(tied.path(), |tensors| {
            let (_, shape, mut values) = tensors.find(&["model.embed_tokens.weight"]).unwrap();
            values[0] += other;
            vec![("lm_head.weight".into(), shape, values)]
        });
        let said = load(tied.path());
        assert_eq!(said.as_ref().is_some_and(|said| said.contains("tie_word_embeddings")), refused, "{said:?}");
    }
    let untied = changed("qwen3-tied-bf16", &[("tie_word_embeddings", json!(false))]);
    assert!(load(untied.path()).unwrap().contains("lm_head.weight"));
}

#[test]
fn the_end_tokens_of_generation_config_end_a_text() {
    let folder = changed("mistral", &[]);
    std::fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [2, 7]}"#).unwrap();
    let model = Model::convert(folder.path(), MemoryConfig::new(Associative::new(2, 4)), 20, 0, &Device::cpu()).unwrap();
    assert_eq!(armt::text::end_tokens(&model.config().backbone), [2, 7]);
}

/// What comes out of an export is what went into the conversion, name by name and to the bit.
#[test]
fn an_exported_backbone_is_the_one_that_was_converted() {
    for case in cases() {
        let folder = tempfile::tempdir().unwrap();
        let model = Model::convert(&case, MemoryConfig::new(Associative::new(2, 4)), 20, 1, &Device::cpu()).unwrap();
        model.save_plain(folder.path(), DType::F32).unwrap();
        let (before, after) = (Tensors::open(&case).unwrap(), Tensors::open(folder.path()).unwrap());
        let names = |tensors: &Tensors| tensors.names().map(String::from).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(names(&before), names(&after), "{}", case.display());
        names(&before).iter().for_each(|name| assert_eq!(before.find(&[name]).unwrap(), after.find(&[name]).unwrap(), "{name}"));
        let plain = Model::load(folder.path(), DType::F32, &Device::cpu()).unwrap();
        let Golden { tokens, logits, .. } = golden(&case);
        let ours = plain.forward(&tokens, &plain.empty(tokens.texts).unwrap(), ScheduleKind::Auto).unwrap().0;
        assert!(farthest(&ours, &logits) < TOLERANCE);
    }
}

#[test]
fn a_model_that_is_converted_on_its_way_to_the_disk_is_the_one_that_is_converted_in_memory() {
    for (case, dtype) in cases().into_iter().zip([DType::F32, DType::BF16].into_iter().cycle()) {
        let (whole, streamed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let memory = || MemoryConfig::new(Associative::new(2, 4));
        Model::convert(&case, memory(), 20, 5, &Device::cpu()).unwrap().save(whole.path(), dtype).unwrap();
        Conversion::open(&case, memory(), 20, 5).unwrap().write(streamed.path(), dtype).unwrap();
        assert_eq!(files(whole.path()), files(streamed.path()));
        // And the one that the safetensors crate would write.
        let bytes = std::fs::read(whole.path().join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        assert!(bytes == safetensors::serialize(tensors, Some(metadata)).unwrap(), "{}", case.display());
    }
}

/// What a folder's files hold, by their names; of folders in it the names.
fn files(folder: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let paths = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    paths.map(|path| (path.file_name().unwrap().into(), std::fs::read(&path).ok())).collect()
}

#[test]
fn a_conversion_that_fails_leaves_the_folder_as_it_was() {
    let source = changed("qwen2", &[]);
    let out = tempfile::tempdir().unwrap();
    let convert = |segment: usize| {
        let conversion = Conversion::open(source.path(), MemoryConfig::new(Associative::new(2, 4)), segment, 1).unwrap();
        conversion.write(&out.path().join("model"), DType::F32)
    };
    convert(20).unwrap();
    let before = files(&out.path().join("model"));
    with_tensors(source.path(), |_| Vec::new());
    let path = source.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let end = bytes.len() - 4;
    bytes[end..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    assert!(convert(24).unwrap_err().to_string().contains("NaN"));
    assert_eq!(files(&out.path().join("model")), before);
    std::fs::remove_dir_all(out.path().join("model")).unwrap();
    assert!(convert(24).is_err());
    assert!(files(&out.path().join("model")).is_empty(), "the same command can be given again");
}

#[test]
fn a_model_that_cannot_be_saved_leaves_the_folder_as_it_was() {
    let model = Model::load(changed("qwen2", &[]).path(), DType::F32, &Device::cpu()).unwrap();
    for in_the_way in ["config.json", "model.safetensors"] {
        let out = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            match name == in_the_way {
                true => std::fs::create_dir(out.path().join(name)).unwrap(),
                false => std::fs::write(out.path().join(name), "mine").unwrap(),
            }
        }
        let before = files(out.path());
        assert!(model.save(out.path(), DType::F32).is_err() && model.save_plain(out.path(), DType::F32).is_err());
        assert_eq!(files(out.path()), before, "{in_the_way}");
    }
}
