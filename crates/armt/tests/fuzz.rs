//! Damaged files: whatever is in them, they are refused or read as they are, and nothing panics, hangs or takes the machine's memory.

#![allow(clippy::unwrap_used)]

#[path = "support/damage.rs"]
mod damage;
mod small;
#[path = "support/tiny_gpt2.rs"]
mod tiny_gpt2;

use std::path::PathBuf;
use std::sync::LazyLock;

use armt::config::{Alignment, Config};
use armt::engine::{DType, Device};
use armt::model::Model;
use armt::state::contents::Contents;
use armt::state::file::{Owner, from_bytes, to_bytes};
use armt::state::{StateLayout, Tail};
use armt::text::{OpenText, Tokenizer, Vocabulary};
use armt::weights::Tensors;
use damage::{damaged, damages, share};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};

/// A folder that lives as long as the test.
fn folder() -> PathBuf {
    tempfile::tempdir().unwrap().keep()
}

fn configs() -> Vec<Config> {
    let families = small::FAMILIES.iter().zip(small::memories());
    families.map(|(family, memory)| small::config(family, 2, memory, 4, Alignment::Left)).collect()
}

/// Of every kind of memory: its layout, its owner and a file.
static MEMORIES: LazyLock<Vec<(StateLayout, Owner, Vec<u8>)>> = LazyLock::new(|| {
    let one = |memory| {
        let model = small::model(small::config("gpt2", 2, memory, 4, Alignment::Left), 6, &Device::cpu());
        let owner = model.owner().unwrap();
        // One text is open at its end.
        let open = Tail { tokens: vec![3, 0, 7], text: OpenText { bytes: b"caf\xc3".to_vec(), cut: true } };
        let state = small::used_state(&model, 2, 7).with_tails(vec![open, Tail::default()]).unwrap();
        let bytes = to_bytes(&state, &owner).unwrap();
        (model.recurrence().layout(), owner, bytes)
    };
    small::memories().into_iter().map(one).collect()
});

/// A model's file, and the parts of an index of shards.
static MODEL: LazyLock<(PathBuf, Vec<u8>, Vec<u8>)> = LazyLock::new(|| {
    let folder = folder();
    small::model(configs().remove(0), 3, &Device::cpu()).save(&folder, DType::F32).unwrap();
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    for shard in shards {
        let view = TensorView::new(Dtype::F32, vec![2], &[0; 8]).unwrap();
        std::fs::write(folder.join(shard), safetensors::serialize([(shard, view)], None).unwrap()).unwrap();
    }
    let index = serde_json::json!({"metadata": {"total_size": 16}, "weight_map": {"a": shards[0], "b": shards[1]}});
    (folder, bytes, index.to_string().into_bytes())
});

static TOKENIZER: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let folder = folder();
    let (encoder, merges) = tiny_gpt2::write_bpe(&folder);
    Tokenizer::from_gpt2(&encoder, &merges).unwrap().save(&folder).unwrap();
    std::fs::read(folder.join("tokenizer.json")).unwrap()
});

/// Parts of a tokenizer that most of its bytes are not: what damage to the vocabulary would hardly ever reach.
const PARTS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":3,"content":"<s>","single_word":false,
"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend",
"prepend":"_"},{"type":"Replace","pattern":{"String":" "},"content":"_"}]},"pre_tokenizer":{"type":"Split","pattern":{"Regex":"[0-9]+"},
"behavior":"Isolated","invert":false},"post_processor":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":false,"use_regex":true},
"decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"_"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},
{"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","dropout":null,"unk_token":"<s>",
"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":true,"byte_fallback":false,"vocab":{"a":0,"b":1,"ab":2,"<s>":3},
"merges":["a b"]}}"#;

proptest! {
    #![proptest_config(share(1500))]

    #[test]
    fn a_damaged_memory_file_is_refused(which in any::<prop::sample::Index>(), damages in damages()) {
        let (layout, owner, good) = &MEMORIES[which.index(MEMORIES.len())];
        let bytes = damaged(good, &damages);
        let _ = Contents::of(&bytes);
        if let Ok(state) = from_bytes(&bytes, layout, owner, &Device::cpu()) {
            // Damage may have left it as it was, or moved only what does not count.
            prop_assert_eq!(&to_bytes(&state, owner).unwrap(), good);
        }
    }

    #[test]
    fn a_damaged_configuration_is_refused_or_a_model_of_it_can_be_made(which in 0..4usize, damages in damages()) {
        let good = serde_json::to_vec_pretty(&configs()[which]).unwrap();
        let Ok(config) = serde_json::from_slice::<Config>(&damaged(&good, &damages)) else { return Ok(()) };
        let Ok(architecture) = config.architecture() else { return Ok(()) };
        // What the machine could hold, but a test should not.
        let numbers = architecture.layers.saturating_mul(architecture.width).saturating_mul(architecture.width.max(architecture.inner));
        let tables = architecture.vocab.saturating_mul(architecture.width);
        if numbers.max(tables).max(config.segment_size) < 1 << 14 && config.memory.around().total() < 64 {
            let small = ["d_mem", "nu"].iter().all(|key| config.memory.keys().get(*key).is_none_or(|n| n.as_u64() < Some(64)));
            let positions = config.backbone.get("n_positions").and_then(|n| n.as_u64()).unwrap_or(0);
            if small && positions < 1 << 12 {
                let _ = Model::fresh(config, 1, DType::F32, &Device::cpu());
            }
        }
    }

    #[test]
    fn damaged_weights_are_refused_or_read(damages in damages()) {
        let (_, good, _) = &*MODEL;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), damaged(good, &damages)).unwrap();
        if let Ok(tensors) = Tensors::open(file.path()) {
            let names: Vec<String> = tensors.names().map(String::from).collect();
            names.iter().for_each(|name| drop(tensors.weight(&[name])));
        }
    }
}

proptest! {
    #![proptest_config(share(700))]

    #[test]
    fn a_damaged_index_of_shards_names_files_beside_it_or_is_refused(damages in damages()) {
        let (folder, _, good) = &*MODEL;
        std::fs::write(folder.join("model.safetensors.index.json"), damaged(good, &damages)).unwrap();
        let _ = Tensors::open(folder);
    }

    #[test]
    fn a_damaged_vocabulary_is_refused_or_numbers_its_tokens(damages in damages()) {
        let folder = tempfile::tempdir().unwrap();
        let good = br#"{"tokens": 269, "kept": [13, 262, 11, 0, 5, 7, 256], "hashed": 16}"#;
        std::fs::write(folder.path().join("vocabulary.json"), damaged(good, &damages)).unwrap();
        if let Ok(Some(vocabulary)) = Vocabulary::find(folder.path()) {
            prop_assert!(vocabulary.size() > vocabulary.kept().len());
        }
    }
}

proptest! {
    #![proptest_config(share(400))]

    #[test]
    fn a_damaged_tokenizer_is_refused_or_works(damages in damages()) {
        if let Ok(tokenizer) = Tokenizer::from_json(&damaged(&TOKENIZER, &damages)) {
            let tokens = tokenizer.encode("Where is the cat in 1999?\n\n").unwrap_or_default();
            let _ = tokenizer.decode(&tokens);
        }
    }

    #[test]
    fn damaged_parts_of_a_tokenizer_are_refused_or_work(damages in damages()) {
        if let Ok(tokenizer) = Tokenizer::from_json(&damaged(PARTS.as_bytes(), &damages)) {
            let tokens = tokenizer.encode("ab a b 1999").unwrap_or_default();
            let _ = (tokenizer.decode(&tokens), tokenizer.fingerprint());
        }
    }
}

/// Every place that a file can end at: a copy that was cut short.
#[test]
fn a_tokenizer_that_is_cut_anywhere_is_refused() {
    let whole = Tokenizer::from_json(PARTS.as_bytes());
    assert!(whole.is_ok(), "{}", whole.err().unwrap());
    for end in 0..PARTS.len() {
        assert!(Tokenizer::from_json(&PARTS.as_bytes()[..end]).is_err(), "{end}");
    }
    // A number that nothing should be made as large as.
    for number in ["16777216", "4294967295"] {
        let error = Tokenizer::from_json(PARTS.replace(r#""b":1,"#, &format!(r#""b":{number},"#)).as_bytes()).err();
        assert!(error.is_some_and(|e| e.to_string().contains(number)), "{number}");
    }
    // Whole JSON in which a part lacks something.
    for (part, without) in [(r#""decoder":{"type":"Sequence","#, r#""decoder":{"#), (r#"{"type":"ByteFallback"}"#, "{}")] {
        assert!(PARTS.contains(part));
        assert!(Tokenizer::from_json(PARTS.replace(part, without).as_bytes()).is_err(), "{without}");
    }
}
