//! Memory files and model folders: back to the bit, or refused with the reason.

#![allow(clippy::unwrap_used)]

mod small;

use std::collections::HashMap;
use std::path::Path;

use armt::config::Alignment;
use armt::engine::{DType, Device, Param, Tensor};
use armt::memory::{Associative, MemoryConfig, Window};
use armt::model::Model;
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt::state::file::{from_bytes, to_bytes};
use armt::weights::Tensors;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use small::{FAMILIES, memories, model, numbers, tokens, used_state};

fn cpu() -> Device {
    Device::cpu()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn armt(family: &str, seed: u64) -> Model {
    model(small::config(family, 2, memories().remove(0), 4, Alignment::Left), seed, &cpu())
}

#[test]
fn reading_on_from_a_file_gives_the_bits_of_reading_in_one_go() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memory.safetensors");
    for memory in memories() {
        let model = model(small::config("gpt2", 3, memory.clone(), 4, Alignment::Left), 1, &cpu());
        let text = tokens(2, 32, 2);
        let part = |from: usize, to: usize| {
            let ids = (0..2).flat_map(|b| text.ids[b * 32 + from..b * 32 + to].to_vec()).collect();
            Batch { ids, texts: 2, mask: None }
        };
        let empty = model.empty(2).unwrap();
        let (_, whole) = model.forward(&text, &empty, ScheduleKind::Auto).unwrap();
        let (_, half) = model.forward(&part(0, 12), &empty, ScheduleKind::Auto).unwrap();
        model.save_state(&half, &path).unwrap();
        let restored = model.load_state(&path).unwrap();
        assert_eq!((restored.tokens_read(), restored.segments_read(), restored.texts()), (12, 3, 2));
        assert_eq!(bits(&numbers(&restored)), bits(&numbers(&half)), "{}", memory.kind());
        let (_, end) = model.forward(&part(12, 32), &restored, ScheduleKind::Auto).unwrap();
        assert_eq!(bits(&numbers(&end)), bits(&numbers(&whole)), "{}", memory.kind());
        assert_eq!((end.tokens_read(), end.segments_read()), (32, 8));
    }
}

#[test]
fn a_memory_that_was_kept_in_bf16_is_gone_on_with_in_f32() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memory.safetensors");
    for memory in memories() {
        let model = model(small::config("gpt2", 2, memory.clone(), 4, Alignment::Left), 1, &cpu());
        let kept = model.recurrence().layout().computed_in(used_state(&model, 1, 7), DType::BF16).unwrap();
        model.save_state(&kept, &path).unwrap();
        let loaded = model.load_state(&path).unwrap();
        assert_eq!(bits(&numbers(&loaded)), bits(&numbers(&kept)), "{}", memory.kind());
        let options = armt::generate::Options { max_new_tokens: 2, ..Default::default() };
        armt::generate::generate(&model, &tokens(1, 9, 8), &loaded, &options, &mut |_| {}).unwrap();
        let (_, after) = model.forward(&tokens(1, 9, 8), &loaded, ScheduleKind::Auto).unwrap();
        assert_eq!(after.segments_read(), 4, "{}", memory.kind());
    }
}

#[test]
fn a_state_can_be_kept_and_used_twice() {
    let model = armt("llama", 3);
    let state = used_state(&model, 1, 4);
    let before = numbers(&state);
    let (a, _) = model.forward(&tokens(1, 6, 5), &state.clone(), ScheduleKind::Auto).unwrap();
    let (b, _) = model.forward(&tokens(1, 6, 5), &state.detach(), ScheduleKind::Auto).unwrap();
    assert_eq!((bits(&a), bits(&before)), (bits(&b), bits(&numbers(&state))), "reading changes no state it was given");
}

/// A tensor of a file: name, type, axes, bytes.
type Part = (String, Dtype, Vec<usize>, Vec<u8>);

/// The tensors and metadata of a memory file.
fn parts(bytes: &[u8]) -> (Vec<Part>, HashMap<String, String>) {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let mut parts: Vec<Part> =
        file.iter().map(|(name, v)| (name.to_string(), v.dtype(), v.shape().to_vec(), v.data().to_vec())).collect();
    parts.sort_by(|a, b| a.0.cmp(&b.0));
    (parts, header.metadata().clone().unwrap())
}

/// A memory file as the first version of the program wrote it, its checksum right whatever it holds.
fn first_format(parts: &[Part], model: &Model, kind: &str, batch: &str) -> Vec<u8> {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |bytes: &[u8]| bytes.iter().for_each(|b| h = (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3));
    for (name, _, shape, data) in parts {
        add(name.as_bytes());
        shape.iter().for_each(|s| add(&s.to_le_bytes()));
        add(data);
    }
    let metadata = [
        ("format", "armt-memory-1".to_string()),
        ("fingerprint", model.fingerprint().unwrap()),
        ("kind", kind.into()),
        ("batch", batch.into()),
        ("tokens_read", "5".into()),
        ("segments_read", "1".into()),
        ("checksum", format!("{h:016x}")),
    ];
    let views = parts.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize(views, Some(metadata.map(|(k, v)| (k.to_string(), v)).into())).unwrap()
}

#[test]
fn equal_memories_give_equal_bytes_and_files_of_the_first_format_are_still_read() {
    for memory in memories() {
        let kind = memory.kind().to_string();
        let model = model(small::config("gpt2", 2, memory, 4, Alignment::Left), 6, &cpu());
        let (state, owner, layout) = (used_state(&model, 2, 7), model.owner().unwrap(), model.recurrence().layout());
        let bytes = to_bytes(&state, &owner).unwrap();
        let again = from_bytes(&bytes, &layout, &owner, &cpu()).unwrap();
        assert_eq!(to_bytes(&again, &owner).unwrap(), bytes, "{kind}");
        assert_eq!(again.counts(), state.counts());

        let first = first_format(&parts(&bytes).0, &model, state.kind(), "2");
        let old = from_bytes(&first, &layout, &owner, &cpu()).unwrap();
        assert_eq!(bits(&numbers(&old)), bits(&numbers(&state)), "{kind}");
        assert_eq!((old.texts(), old.tokens_read(), old.segments_read(), old.counts()[1].text), (2, 5, 1, None));
    }
}

#[test]
fn no_byte_of_a_memory_file_can_be_changed_unseen() {
    let model = armt("gpt2", 6);
    let (owner, layout) = (model.owner().unwrap(), model.recurrence().layout());
    let good = to_bytes(&used_state(&model, 1, 7), &owner).unwrap();
    assert!(from_bytes(&good, &layout, &owner, &cpu()).is_ok());
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        assert!(from_bytes(&bytes, &layout, &owner, &cpu()).is_err(), "byte {at}");
    }
    // What the first format left out of its checksum, each for itself.
    for (old, new) in
        [("tokens_read\":\"5", "tokens_read\":\"6"), ("segments_read\":\"1", "segments_read\":\"2"), ("texts\":\"1", "texts\":\"2")]
    {
        let at = good.windows(old.len()).position(|w| w == old.as_bytes()).unwrap();
        let bytes = [&good[..at], new.as_bytes(), &good[at + new.len()..]].concat();
        let error = from_bytes(&bytes, &layout, &owner, &cpu()).err().unwrap().to_string();
        assert!(error.contains("checksum"), "{new}: {error}");
    }
}

#[test]
fn tensors_of_other_axes_and_impossible_numbers_of_texts_are_refused_before_they_are_made() {
    for memory in memories() {
        let model = model(small::config("gpt2", 2, memory, 4, Alignment::Left), 6, &cpu());
        let (state, owner, layout) = (used_state(&model, 1, 7), model.owner().unwrap(), model.recurrence().layout());
        let (parts, _) = parts(&to_bytes(&state, &owner).unwrap());
        let refused = |parts: &[Part], batch: &str, what: &str| {
            let bytes = first_format(parts, &model, state.kind(), batch);
            let error = from_bytes(&bytes, &layout, &owner, &cpu()).err();
            assert!(error.is_some(), "{} with {what}", state.kind());
        };
        for batch in ["1000000000000", "18446744073709551616", "-1", "", "2"] {
            if parts.is_empty() && batch == "2" {
                continue; // A memory that keeps nothing may be of any number.
            }
            refused(&parts, batch, batch);
        }
        for i in 0..parts.len() {
            let change = |f: &dyn Fn(&mut Vec<usize>)| {
                let mut changed = parts.clone();
                f(&mut changed[i].2);
                changed
            };
            refused(&change(&|shape| shape.splice(0..0, [1, 1, 1, 1, 1, 1]).for_each(drop)), "1", "more than six axes");
            refused(&change(&|shape| shape.push(1)), "1", "an axis more");
            refused(&change(&|shape| *shape = vec![shape.iter().product()]), "1", "one axis");
            refused(&change(&|shape| shape.rotate_right(1)), "1", "axes in another order");
            let mut fewer = parts.clone();
            fewer.remove(i);
            refused(&fewer, "1", "a tensor missing");
            let mut none = parts.clone();
            (none[i].2[0], none[i].3) = (0, Vec::new());
            refused(&none, "1", "nothing on an axis");
        }
        let mut more = parts.clone();
        more.push(("zz".into(), Dtype::F32, vec![1], vec![0; 4]));
        refused(&more, "1", "a tensor too many");
    }
}

#[test]
fn a_memory_file_that_does_not_fit_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memory.safetensors");
    let model = armt("gpt2", 6);
    model.save_state(&used_state(&model, 1, 7), &path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], model: &Model, word: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = model.load_state(&path).err().unwrap().to_string();
        assert!(error.contains(word) && error.contains("memory.safetensors"), "{error}");
    };
    refused(&good, &armt("gpt2", 8), "another model");
    refused(&good, &armt("llama", 6), "another model");
    refused(&good[..good.len() - 5], &model, "not a whole memory file");
    refused(&good[..100], &model, "not a whole memory file");
    refused(b"", &model, "not a whole memory file");
    let mut flipped = good.clone();
    let end = flipped.len() - 7;
    flipped[end] ^= 1;
    refused(&flipped, &model, "checksum");
    // A file that is whole and of this model, but holds NaN; and a memory that does, which is not written.
    let (mut broken, _) = parts(&good);
    broken[0].3[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&first_format(&broken, &model, "associative", "1"), &model, "NaN");
    let state = used_state(&model, 1, 7);
    let a = Tensor::full(f32::NAN, state.get("A").unwrap().shape(), &cpu()).unwrap();
    let tensors = vec![a, state.get("z").unwrap().clone()];
    let broken = model.recurrence().layout().state(tensors, state.counts().to_vec()).unwrap();
    let error = model.save_state(&broken, &path).err().unwrap().to_string();
    assert!(error.contains("not written") && error.contains("NaN"), "{error}");
    // Any other safetensors file.
    model.save(dir.path(), DType::F32).unwrap();
    refused(&std::fs::read(dir.path().join("model.safetensors")).unwrap(), &model, "format");
    assert!(model.load_state(Path::new("nowhere.safetensors")).is_err());
    // A memory of two texts is not one of three.
    let error = model.forward(&tokens(3, 5, 1), &used_state(&model, 2, 1), ScheduleKind::Auto).err().unwrap().to_string();
    assert!(error.contains("2 text"), "{error}");
}

#[test]
fn the_state_of_gpt2_size_is_as_documented() {
    // L dk (d + 1) floats: 12 layers, dk = 2 * 3 * 64, d = 768.
    assert_eq!(12 * 384 * (768 + 1) * 4, 14_174_208);
    let model = armt("gpt2", 9);
    let (l, dk, d) = (2, 2 * 3 * 4, 16);
    assert_eq!(model.empty(3).unwrap().bytes(), 3 * l * dk * (d + 1) * 4);
}

#[test]
fn a_saved_model_loads_back_to_the_bit_in_f32_and_bf16() {
    for family in FAMILIES {
        for memory in memories() {
            let dir = tempfile::tempdir().unwrap();
            let model = model(small::config(family, 2, memory, 4, Alignment::Right), 10, &cpu());
            model.save(dir.path(), DType::F32).unwrap();
            let loaded = Model::load(dir.path(), DType::F32, &cpu()).unwrap();
            assert_eq!(loaded.config(), model.config());
            for (a, b) in model.params().iter().zip(loaded.params()) {
                assert_eq!(bits(&a.value().to_vec::<f32>().unwrap()), bits(&b.value().to_vec::<f32>().unwrap()), "{}", a.name());
            }
            assert_eq!(model.fingerprint().unwrap(), loaded.fingerprint().unwrap());
            // bf16 rounds once; from then on it is exact.
            model.save(dir.path(), DType::BF16).unwrap();
            let once = Model::load(dir.path(), DType::F32, &cpu()).unwrap();
            once.save(dir.path(), DType::BF16).unwrap();
            let twice = Model::load(dir.path(), DType::F32, &cpu()).unwrap();
            assert_ne!(once.fingerprint().unwrap(), model.fingerprint().unwrap());
            assert_eq!(once.fingerprint().unwrap(), twice.fingerprint().unwrap());
        }
    }
}

/// Writes tensors as Hugging Face does, in one file or in shards with an index.
fn write_hugging_face(folder: &Path, config: &serde_json::Value, tensors: &[(String, Vec<usize>, Vec<f32>)], shards: usize) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, _, v)| v.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let mut map = HashMap::new();
    for shard in 0..shards {
        let file = if shards == 1 { "model.safetensors".into() } else { format!("model-{shard:05}-of-{shards:05}.safetensors") };
        let views: Vec<(&str, TensorView<'_>)> = tensors
            .iter()
            .zip(&bytes)
            .enumerate()
            .filter(|(i, _)| i % shards == shard)
            .map(|(_, ((name, shape, _), bytes))| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()))
            .collect();
        map.extend(views.iter().map(|(name, _)| (name.to_string(), file.clone())));
        std::fs::write(folder.join(&file), safetensors::serialize(views, None).unwrap()).unwrap();
    }
    if shards > 1 {
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}

/// A plain backbone and its tensors under Hugging Face's names.
fn plain(family: &str) -> (Model, Vec<(String, Vec<usize>, Vec<f32>)>) {
    let config = small::config(family, 2, MemoryConfig::new(Window { sliding_window: false }), 8, Alignment::Left);
    let model = model(config, 11, &cpu());
    let tensors = model.export(|p| Ok(p.value())).unwrap();
    (model, tensors)
}

#[test]
fn hugging_face_folders_load_whole_or_in_shards() {
    for family in FAMILIES {
        let (model, tensors) = plain(family);
        for shards in [1, 3] {
            let dir = tempfile::tempdir().unwrap();
            let mut backbone = model.config().backbone.clone();
            backbone["max_position_embeddings"] = 8.into();
            if family == "gpt2" {
                // The published GPT-2 files leave out the prefix.
                let short: Vec<_> = tensors
                    .iter()
                    .map(|(n, s, v)| (n.trim_start_matches("transformer.").to_string(), s.clone(), v.clone()))
                    .collect();
                write_hugging_face(dir.path(), &backbone, &short, shards);
            } else {
                write_hugging_face(dir.path(), &backbone, &tensors, shards);
            }
            let loaded = Model::load(dir.path(), DType::F32, &cpu()).unwrap();
            for (a, b) in model.params().iter().zip(loaded.params()) {
                assert_eq!(a.value().to_vec::<f32>().unwrap(), b.value().to_vec::<f32>().unwrap(), "{family} {}", a.name());
            }
        }
    }
}

#[test]
fn converting_keeps_the_backbone_and_starts_the_memory_as_the_authors_do() {
    for family in FAMILIES {
        let (backbone, tensors) = plain(family);
        let dir = tempfile::tempdir().unwrap();
        write_hugging_face(dir.path(), &backbone.config().backbone, &tensors, 1);
        let wrap_pos = family == "gpt2";
        let memory = Associative { wrap_pos, ..Associative::new(3, 4) };
        let model = Model::convert(dir.path(), MemoryConfig::new(memory), 8, 12, &cpu()).unwrap();
        // Without a memory to read, the first segment's logits are the backbone's, but for memory tokens that come after.
        let text = tokens(2, 8, 13);
        let (a, _) = backbone.forward(&text, &backbone.empty(2).unwrap(), ScheduleKind::Auto).unwrap();
        let (b, state) = model.forward(&text, &model.empty(2).unwrap(), ScheduleKind::Auto).unwrap();
        assert!(small::off(&b, &a) < 1e-5, "{family}");
        assert!(model.param("assoc.value").unwrap().value().to_vec::<f32>().unwrap().iter().all(|x| *x == 0.0));
        let (a, z) = (state.get("A").unwrap(), state.get("z").unwrap());
        assert!(a.to_vec::<f32>().unwrap().iter().all(|x| *x == 0.0), "values are zero at first");
        assert!(z.to_vec::<f32>().unwrap().iter().any(|x| *x > 0.0));
        let spread = |p: &Param| {
            let v = p.value().to_vec::<f32>().unwrap();
            (v.iter().map(|x| x * x).sum::<f32>() / v.len() as f32).sqrt()
        };
        let ratio = spread(model.param("memory").unwrap()) / spread(model.param("embed").unwrap());
        assert!(ratio > 0.6 && ratio < 1.6, "memory tokens have the embedding's spread, not {ratio} of it");
        if wrap_pos {
            let table = model.param("positions").unwrap().value();
            assert_eq!(table.dims(), [35, 16]);
            let old = backbone.param("positions").unwrap().value().to_vec::<f32>().unwrap();
            assert_eq!(table.to_vec::<f32>().unwrap()[..old.len()], old);
        }
        // What was converted saves and loads like any other.
        let out = tempfile::tempdir().unwrap();
        model.save(out.path(), DType::F32).unwrap();
        assert_eq!(Model::load(out.path(), DType::F32, &cpu()).unwrap().fingerprint().unwrap(), model.fingerprint().unwrap());
    }
}

#[test]
fn a_model_file_that_does_not_fit_is_refused_and_changes_nothing() {
    let (model, tensors) = plain("llama");
    let before = model.fingerprint().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&mut Vec<(String, Vec<usize>, Vec<f32>)>), word: &str| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        write_hugging_face(dir.path(), &model.config().backbone, &tensors, 1);
        let error = model.set_weights(&Tensors::open(dir.path()).unwrap()).err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
        assert_eq!(model.fingerprint().unwrap(), before);
    };
    refused(&|t| t.retain(|(name, _, _)| !name.contains("layers.1.self_attn.k_proj")), "layers.1.self_attn.k_proj.weight");
    refused(&|t| t[0].1.reverse(), "[23, 16]");
    refused(&|t| t[1].2[0] = f32::INFINITY, "inf");
    let truncated = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), &truncated[..truncated.len() - 9]).unwrap();
    assert!(Tensors::open(dir.path()).is_err());
}

#[test]
fn a_model_is_loaded_in_one_pass_over_its_values() {
    let (model, mut tensors) = plain("gpt2");
    let params = model.params();
    let of_last = model.recurrence().entries().iter().position(|e| e.param.name() == params[params.len() - 1].name()).unwrap();
    tensors[of_last].2[0] = f32::NAN;
    let dir = tempfile::tempdir().unwrap();
    write_hugging_face(dir.path(), &model.config().backbone, &tensors, 1);
    let mut heard = 0;
    let loaded = Model::load_changed(dir.path(), model.config().clone(), (DType::F32, &cpu()), |_, _, _| {
        heard += 1;
        Ok(())
    });
    assert!(loaded.err().unwrap().to_string().contains("NaN"));
    assert_eq!(heard, params.len() - 1, "what is wrong at the end is met there");
}

#[test]
fn an_index_of_shards_names_files_beside_it_only() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    let shard = safetensors::serialize([("a", TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap())], None).unwrap();
    let outside = dir.path().join("outside.safetensors");
    for place in [&outside, &folder.join("own.safetensors")] {
        std::fs::write(place, &shard).unwrap();
    }
    let open = |name: &str| {
        let index = serde_json::json!({"weight_map": {"a": name}});
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
        Tensors::open(&folder).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(open("own.safetensors"), Ok(()));
    for name in [outside.to_str().unwrap(), "../outside.safetensors", "/dev/zero", "a/../../outside.safetensors", "", "."] {
        let error = open(name).unwrap_err();
        assert!(error.contains("index.json"), "{name}: {error}");
    }
}

/// A file of n tensors takes n times one tensor's time, not n times n.
#[test]
fn a_file_of_very_many_tensors_is_opened_as_fast_as_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("many.safetensors");
    let n = 100_000;
    let one = |i: usize| format!("\"t{i}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{},{}]}}", 4 * i, 4 * i + 4);
    let header = format!("{{{}}}", (0..n).map(one).collect::<Vec<_>>().join(","));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; 4 * n]].concat();
    std::fs::write(&path, bytes).unwrap();
    let start = std::time::Instant::now();
    let tensors = Tensors::open(&path).unwrap();
    assert!((0..n).all(|i| tensors.find(&[&format!("t{i}")]).is_ok()));
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn configurations_that_cannot_be_are_refused_by_key() {
    let base = || small::config("gpt2", 2, memories().remove(0), 4, Alignment::Left);
    let refused = |config: armt::Config, word: &str| {
        let error = armt::recurrence::check(&config).err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(armt::Config { segment_size: 0, ..base() }, "segment_size");
    refused(armt::Config { segment_size: 31, ..base() }, "32 positions");
    let with = |key: &str, value: serde_json::Value| {
        let mut config = base();
        config.backbone[key] = value;
        config
    };
    refused(with("n_head", 3.into()), "heads");
    refused(with("n_embd", "wide".into()), "n_embd");
    refused(with("activation_function", "relu".into()), "activation_function");
    refused(with("model_type", "bert".into()), "bert");
    refused(with("scale_attn_weights", false.into()), "scale_attn_weights");
    for (with, word) in [(vec![2], "layers below 2"), (vec![], "at least one layer"), (vec![1, 0, 1], "1 again")] {
        let mut layers = base();
        layers.memory = Associative { memory_layers: Some(with), ..Associative::new(2, 4) }.into();
        refused(layers, word);
    }
    // Sizes whose products are no number any more.
    let most = 9_223_372_036_854_775_807_u64;
    refused(with("n_embd", most.into()), "width");
    refused(with("n_layer", most.into()), "layers");
    let mut keys = base();
    keys.memory = Associative::new(2, most as usize).into();
    refused(keys, "d_mem");
    let mut heads = small::config("llama", 2, memories().remove(0), 4, Alignment::Left);
    heads.backbone["head_dim"] = (1_u64 << 40).into();
    refused(heads, "heads");
    let dir = tempfile::tempdir().unwrap();
    let mut value = serde_json::to_value(base()).unwrap();
    value["segmentsize"] = 4.into();
    std::fs::write(dir.path().join("config.json"), value.to_string()).unwrap();
    let error = armt::Config::load(dir.path()).err().unwrap().to_string();
    assert!(error.contains("segmentsize") && error.contains("config.json"), "{error}");
}

#[test]
fn a_model_in_use_has_its_weights_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let trained = armt("llama", 6);
    trained.save(dir.path(), DType::F32).unwrap();
    let text = tokens(2, 9, 3);
    let logits = |model: &Model| model.forward(&text, &model.empty(2).unwrap(), ScheduleKind::Auto).unwrap().0;
    for used in [trained.for_use().unwrap(), Model::load(dir.path(), DType::F32, &cpu()).unwrap()] {
        assert!(used.params().iter().all(|p| !p.is_trainable() && p.grad().is_err()));
        assert_eq!((logits(&used), used.fingerprint().unwrap()), (logits(&trained), trained.fingerprint().unwrap()));
        assert!(used.set_weights(&Tensors::open(dir.path()).unwrap()).is_err(), "its fingerprint would no longer be its own");
    }
    let again = Model::load_trainable(dir.path(), DType::F32, &cpu()).unwrap();
    assert!(again.params().iter().all(|p| p.is_trainable()));
}
