//! GGUF files against the `gguf` package and `transformers`. `scripts/golden-gguf.py` makes the folder.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use armt::checkpoint;
use armt::engine::Device;
use armt::generate::{Options, generate};
use armt::memory::{Associative, MemoryConfig};
use armt::model::Model;
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt::text::{Pieces, Source, TokenStream, Tokenizer};
use armt::weights::Tensors;
use armt::weights::gguf::Gguf;
use safetensors::SafeTensors;

fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn fixture(name: &str) -> PathBuf {
    project("tests/fixtures/gguf").join(name)
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn values_of_every_type_are_those_of_the_gguf_package_to_the_bit() {
    let bytes = std::fs::read(fixture("types.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = Tensors::open(&fixture("types.gguf")).unwrap();
    let names = [
        ("token_embd", "model.embed_tokens"),
        ("output", "lm_head"),
        ("output_norm", "model.norm"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
        ("blk.0.attn_output", "model.layers.0.self_attn.o_proj"),
        ("blk.0.ffn_gate", "model.layers.0.mlp.gate_proj"),
        ("blk.0.ffn_up", "model.layers.0.mlp.up_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
    ];
    assert_eq!(golden.names().len(), names.len());
    for (theirs, ours) in names {
        let (_, shape, values) = tensors.find(&[&format!("{ours}.weight")]).unwrap();
        let name = format!("{theirs}.weight");
        assert_eq!(shape, golden.tensor(&name).unwrap().shape(), "{name}");
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&values), bits(&floats(&golden, &name)), "{name}");
    }
}

#[test]
fn logits_and_tokens_of_a_converted_file_are_those_of_transformers() {
    let known = Tokenizer::load(&project("data/books-bpe")).unwrap();
    let text = "It was the best of times, it was the worst of times: 1859. Café\n\n";
    for name in ["llama-q8", "qwen2-f16", "qwen3-q4"] {
        let bytes = std::fs::read(fixture(&format!("{name}.safetensors"))).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let tokens = golden.tensor("tokens").unwrap();
        let ids = tokens.data().as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        let batch = Batch { ids, texts: tokens.shape()[0], mask: None };
        let file = fixture(&format!("{name}.gguf"));
        let model = Model::convert(&file, MemoryConfig::new(Associative::new(2, 4)), 32, 0, &Device::cpu()).unwrap();
        let (logits, _) = model.forward(&batch, &model.empty(batch.texts).unwrap(), ScheduleKind::Auto).unwrap();
        let vocab = model.sizes().vocab;
        let last: Vec<f32> = logits.chunks(batch.tokens() * vocab).flat_map(|row| row[row.len() - 4 * vocab..].to_vec()).collect();
        let golden = floats(&golden, "logits");
        let farthest = last.iter().zip(&golden).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f32::max);
        assert!(last.len() == golden.len() && farthest < 5e-5, "{name}: {farthest}");
        let tokenizer = checkpoint::tokenizer(&file).unwrap().unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), known.encode(text).unwrap(), "{name}");
        assert_eq!(tokenizer.decode(&known.encode(text).unwrap()).unwrap(), text);
    }
}

/// SentencePiece as Llama has it: a space before the text, merges by score, bytes for what has no piece.
#[test]
fn pieces_with_scores_are_merged_best_first_and_fall_back_to_bytes() {
    let words = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "ab", "bc", "▁ab", "abc"];
    let pieces = Pieces {
        model: "llama".into(),
        tokens: words.map(String::from).to_vec(),
        kinds: vec![2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1],
        scores: [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0].to_vec(),
        space_before: true,
        begin: Some(1),
        ..Pieces::default()
    };
    let tokenizer = Tokenizer::from_pieces(&pieces).unwrap();
    let said = |text: &str| tokenizer.encode(text).unwrap().iter().map(|t| words[*t as usize]).collect::<Vec<_>>();
    assert_eq!(said("abc"), ["▁ab", "c"]);
    assert_eq!(said("bc ab"), ["▁", "bc", "▁ab"]);
    assert_eq!(said("é"), ["▁", "<0xC3>", "<0xA9>"]);
    assert_eq!(tokenizer.decode(&tokenizer.encode("bc é ab").unwrap()).unwrap(), "bc é ab");
    // Half of a character is no text yet, and is said with its other half.
    let mut speech = tokenizer.speech();
    let heard: Vec<String> = tokenizer.encode("aé").unwrap().iter().map(|t| speech.say(*t).unwrap()).collect();
    assert_eq!(heard.concat().trim(), "aé");
    assert!(heard.iter().all(|piece| !piece.contains('\u{fffd}')), "{heard:?}");
    assert_eq!(tokenizer.begin_of_text(), Some(1));
    assert_eq!(Tokenizer::from_pieces(&Pieces { begin: None, ..pieces.clone() }).unwrap().begin_of_text(), None);
    let source = Source::reader(Path::new("text"), "ab ".repeat(60_000).as_bytes().to_vec().leak() as &'static [u8]);
    let mut stream = TokenStream::new(Arc::new(tokenizer), vec![source]).unwrap();
    let mut all = Vec::new();
    while let Some(piece) = stream.next_piece().unwrap() {
        all.extend(piece.tokens);
    }
    assert_eq!((all[0], all.iter().filter(|t| **t == 1).count()), (1, 1), "a text begins once, however many pieces it has");
    let refused = Tokenizer::from_pieces(&Pieces { model: "bert".into(), ..pieces.clone() }).err().unwrap().to_string();
    assert!(refused.contains("gpt2 or llama, got bert"), "{refused}");
    let refused =
        Tokenizer::from_pieces(&Pieces { model: "gpt2".into(), pre: "tekken".into(), ..pieces }).err().unwrap().to_string();
    assert!(refused.contains("tekken"), "{refused}");
}

#[test]
fn a_damaged_file_is_refused_and_nothing_panics() {
    let good = std::fs::read(fixture("llama-q8.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    for cut in [3, 20, 300, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..cut]).unwrap();
        let said = Tensors::open(&path).err().unwrap().to_string();
        assert!(said.contains("damaged.gguf"), "{cut}: {said}");
    }
    let mut random = armt::random::Random::new(1);
    for _ in 0..400 {
        let mut bytes = good.clone();
        for _ in 0..4 {
            let (at, value) = (random.below(4000), random.below(256) as u8);
            bytes[at] = value;
        }
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(gguf) = Gguf::open(&path) {
            let _ = (gguf.config(), Tensors::open(&path), checkpoint::tokenizer(&path));
        }
    }
}

/// A text as a GGUF file has it.
fn text(text: &str) -> Vec<u8> {
    [(text.len() as u64).to_le_bytes().to_vec(), text.as_bytes().to_vec()].concat()
}

/// A file of keys alone: each has a name, the number of its type and the bytes of its value.
fn keys(keys: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
    let counts = [0, keys.len() as u64].map(u64::to_le_bytes).concat();
    let keys = keys.iter().flat_map(|(name, kind, value)| [text(name), kind.to_le_bytes().to_vec(), value.clone()].concat());
    [b"GGUF".to_vec(), 3u32.to_le_bytes().to_vec(), counts, keys.collect()].concat()
}

/// The value of a key that is a list.
fn list(kind: u32, count: u64, items: Vec<u8>) -> Vec<u8> {
    [kind.to_le_bytes().to_vec(), count.to_le_bytes().to_vec(), items].concat()
}

#[test]
fn texts_begin_with_a_token_as_llama_cpp_begins_them_unless_the_file_says_otherwise() {
    const TEXT: u32 = 8;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.gguf");
    // No merges lead to `abc`.
    let pieces = ["<|begin|>", "a", "b", "c", "abc"];
    for (pre, said, begins, whole) in [
        ("llama3", None, true, true),
        ("llama-v3", None, true, true),
        ("llama-bpe", None, true, true),
        ("llama-bpe", Some(false), false, true),
        ("qwen2", None, false, false),
        ("qwen2", Some(true), true, false),
        ("gpt-2", None, false, false),
    ] {
        let mut all = vec![
            ("tokenizer.ggml.model", TEXT, text("gpt2")),
            ("tokenizer.ggml.pre", TEXT, text(pre)),
            ("tokenizer.ggml.tokens", 9, list(TEXT, 5, pieces.map(text).concat())),
            ("tokenizer.ggml.token_type", 9, list(0, 5, vec![3, 1, 1, 1, 1])),
            ("tokenizer.ggml.merges", 9, list(TEXT, 0, vec![])),
            ("tokenizer.ggml.bos_token_id", 4, vec![0; 4]),
        ];
        all.extend(said.map(|said| ("tokenizer.ggml.add_bos_token", 7, vec![u8::from(said)])));
        std::fs::write(&path, keys(&all)).unwrap();
        let tokenizer = checkpoint::tokenizer(&path).unwrap().unwrap();
        assert_eq!(tokenizer.begin_of_text(), begins.then_some(0), "{pre}, {said:?}");
        assert_eq!(tokenizer.encode("abc").unwrap(), if whole { vec![4] } else { vec![1, 2, 3] }, "{pre}");
    }
}

#[test]
fn a_tensor_with_a_size_of_0_is_refused_by_its_name() {
    let good = std::fs::read(fixture("llama-q8.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    for tensor in Gguf::open(&fixture("llama-q8.gguf")).unwrap().tensors {
        let name = text(&tensor.name);
        let sizes = good.windows(name.len()).position(|bytes| bytes == name).unwrap() + name.len() + 4;
        for size in 0..tensor.shape.len() {
            let mut bytes = good.clone();
            bytes[sizes + 8 * size..][..8].fill(0);
            std::fs::write(&path, bytes).unwrap();
            let said = Tensors::open(&path).err().unwrap().to_string();
            assert!(said.contains(&tensor.name) && said.contains("no values"), "{said}");
        }
    }
}

#[test]
fn long_lists_are_passed_over_where_nothing_reads_them_and_refused_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.gguf");
    for (name, read) in [("general.things", false), ("tokenizer.ggml.token_type", true)] {
        std::fs::write(&path, keys(&[(name, 9, list(0, 1 << 27, vec![]))])).unwrap();
        // The items are a hole in the file.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() + (1 << 27)).unwrap();
        match Gguf::open(&path) {
            Ok(gguf) => assert!(!read && gguf.key(name).unwrap().as_array().unwrap().is_empty()),
            Err(error) => assert!(read && error.to_string().contains("tokenizer.ggml.token_type has 134217728 items"), "{error}"),
        }
    }
}

const SMOLLM2_TOKENS: usize = 684;
const SMOLLM2_PERPLEXITY: f64 = 29.985_664;

/// Real weights, where they are: `scripts/fetch-smollm2` puts them into `target/weights`. The figure is that of `transformers` on the file's
/// values (`torch` 2.15, `transformers` 5.22).
#[test]
fn smollm2_finds_a_text_as_probable_as_transformers_does() {
    let file = project("target/weights/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !file.is_file() {
        eprintln!("skipped: {} is not there; scripts/fetch-smollm2 fetches it", file.display());
        return;
    }
    let tokenizer = checkpoint::tokenizer(&file).unwrap().unwrap();
    let model = Model::convert(&file, MemoryConfig::new(armt::memory::Window::default()), 1024, 0, &Device::cpu()).unwrap();
    let book = project("data/books/test/Anne_Bronte__Agnes_Grey__1847.txt");
    let text: String = std::fs::read_to_string(book).unwrap().chars().take(3000).collect();
    let ids = tokenizer.encode(&text).unwrap();
    let batch = Batch { ids: ids[..ids.len() - 1].to_vec(), texts: 1, mask: None };
    let (logits, _) = model.forward(&batch, &model.empty(1).unwrap(), ScheduleKind::Auto).unwrap();
    let vocab = model.sizes().vocab;
    let nll = ids[1..].iter().zip(logits.chunks(vocab)).map(|(next, row)| {
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - most).exp()).sum();
        sum.ln() - f64::from(row[*next as usize] - most)
    });
    let perplexity = (nll.sum::<f64>() / (ids.len() - 1) as f64).exp();
    assert_eq!(ids.len(), SMOLLM2_TOKENS);
    assert!((perplexity / SMOLLM2_PERPLEXITY - 1.0).abs() < 0.01, "{perplexity}");
    // What `transformers` goes on with, too.
    let prompt = Batch { ids: tokenizer.encode("The capital of France is").unwrap(), texts: 1, mask: None };
    let options = Options { max_new_tokens: 6, ..Options::default() };
    let said = generate(&model, &prompt, &model.empty(1).unwrap(), &options, &mut |_| ()).unwrap();
    assert_eq!(tokenizer.decode(&said.tokens[0]).unwrap(), " Paris.\n\nThe answer");
}
