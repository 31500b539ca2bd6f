//! Small vocabularies: which tokens are kept, what becomes of the others, and files that are refused.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use armt::Model;
use armt::engine::Device;
use armt::memory::{MemoryConfig, Window};
use armt::random::Random;
use armt::text::{Tokenizer, Vocabulary};
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babi::file::Split;
use armt_lab::tasks::babilong::{Babilong, Books, Data, Length, Stories, vocabulary};

#[path = "../../armt/tests/support/tiny_gpt2.rs"]
mod tiny_gpt2;

const SIZE: usize = 8192;
const HASHED: usize = 256;

fn data(data: Data) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data").join(data.folder())
}

fn gpt2() -> Tokenizer {
    Tokenizer::find(&data(Data::Bpe)).unwrap().unwrap()
}

fn tasks() -> Vec<Task> {
    (1..=5).map(|n| Task::new(n).unwrap()).collect()
}

/// Of the test books, once: they take a second to count.
static SMALL: LazyLock<Vocabulary> = LazyLock::new(|| {
    let books = Books::open(&data(Data::TestBooks), Arc::new(gpt2())).unwrap();
    vocabulary(&books, &tasks(), SIZE, HASHED).unwrap()
});

fn small() -> Tokenizer {
    gpt2().with_vocabulary(SMALL.clone()).unwrap()
}

#[test]
fn stories_come_back_as_they_were_and_other_words_as_replacements() {
    let (small, large) = (small(), gpt2());
    assert_eq!((small.vocabulary(), SMALL.kept().len()), (SIZE, SIZE - HASHED));
    for text in [
        "Mary went back to the garden.",
        " Sandra got the football there.",
        "Where was the apple before the hallway?",
        "Jeff handed the milk to Bill.",
    ] {
        let tokens = small.encode(text).unwrap();
        assert_eq!(small.decode(&tokens).unwrap(), text);
        assert_eq!(tokens.len(), large.encode(text).unwrap().len(), "one for one");
        assert!(tokens.iter().all(|t| (0..(SIZE - HASHED) as i32).contains(t)));
    }
    let odd = small.encode("Mary met a xylophone quarterback in the garden.").unwrap();
    assert!(odd.iter().all(|t| (0..SIZE as i32).contains(t)) && odd.iter().any(|t| *t >= (SIZE - HASHED) as i32));
    let text = small.decode(&odd).unwrap();
    assert!(text.starts_with("Mary met a") && text.ends_with(" in the garden.") && text.contains('\u{fffd}'), "{text}");
    let mut speech = small.speech();
    assert_eq!(odd.iter().map(|t| speech.say(*t).unwrap()).collect::<String>(), text);
    assert!(small.decode(&[SIZE as i32]).unwrap_err().to_string().contains("from 0 to 8191"));
    assert!(small.decode(&[-1]).is_err());
}

#[test]
fn frequent_tokens_come_first_and_all_others_are_spread_over_the_hashed_numbers() {
    let (small, large) = (small(), gpt2());
    let of = |text: &str| small.encode(text).unwrap()[0];
    assert!(of(" the") < 3 && of(",") < 3 && of(" of") < 10 && of(" garden") > 100);
    let mut counts = vec![0usize; SIZE];
    for token in 0..large.vocabulary() as i32 {
        let text = large.decode(&[token]).unwrap();
        if large.encode(&text).unwrap() == [token] {
            counts[of(&text) as usize] += 1;
        }
    }
    assert!(counts[..SIZE - HASHED].iter().all(|n| *n <= 1), "a kept token's number is its own");
    assert!(counts[SIZE - HASHED..].iter().all(|n| (90..260).contains(n)), "{:?}", &counts[SIZE - HASHED..]);
}

#[test]
fn the_same_files_give_the_same_numbers_on_any_machine() {
    let hash = |tokens: &[i32]| tokens.iter().fold(0u64, |h, t| Random::of(&[h, *t as u64]).bits());
    let text = small().encode("It was the best of times, it was the quarterback of xylophones.").unwrap();
    assert_eq!((hash(SMALL.kept()), hash(&text)), (16784940137847165175, 7143327801444554598));
}

#[test]
fn babilong_has_the_same_samples_in_small_numbers() {
    let open = |t: Tokenizer| Babilong::new(Arc::new(Books::open(&data(Data::TestBooks), Arc::new(t)).unwrap())).unwrap();
    let (babilong, large) = (open(small()), open(gpt2()));
    let stories = Stories::published(&data(Data::Babi), Task::new(2).unwrap(), Split::Test, 5).unwrap();
    let tokens =
        |b: &Babilong| -> Vec<i32> { b.draw(&stories, Length(3000), 1).unwrap().tokens().collect::<Result<_, _>>().unwrap() };
    let (few, many) = (small(), gpt2());
    let translated: Vec<i32> = tokens(&large).iter().map(|t| few.encode(&many.decode(&[*t]).unwrap()).unwrap()[0]).collect();
    let same = tokens(&babilong).iter().zip(&translated).filter(|(a, b)| a == b).count();
    // A token that is part of a character has no text of its own to be found again by.
    assert!(tokens(&babilong).len() == translated.len() && same + 20 > translated.len(), "{same} of {}", translated.len());
    let (gen_token, end) = (babilong.ask_token(), babilong.end_token());
    assert!(gen_token < (SIZE - HASHED) as i32 && end < (SIZE - HASHED) as i32 && gen_token != end);
    assert_eq!(babilong.tokenizer().decode(&[gen_token]).unwrap(), gpt2().decode(&[large.ask_token()]).unwrap());
    assert_eq!(tokens(&babilong).last(), Some(&gen_token));
}

/// A tiny model folder whose vocabulary is the given text.
fn folder(vocabulary: &str) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    tiny_gpt2::write(folder.path());
    std::fs::write(folder.path().join("vocabulary.json"), vocabulary).unwrap();
    let model = Model::convert(folder.path(), MemoryConfig::new(Window { sliding_window: false }), 8, 1, &Device::cpu()).unwrap();
    (folder, model)
}

#[test]
fn damaged_files_and_those_of_another_tokenizer_or_model_are_refused_by_name() {
    let tokens = tiny_gpt2::VOCAB;
    for (text, part) in [
        (String::new(), "expected kept tokens"),
        (format!(r#"{{"tokens": {tokens}, "kept": [1, 2"#), "expected kept tokens"),
        (format!(r#"{{"tokens": {tokens}, "kept": [1, 2], "hashed": 3, "more": 1}}"#), "unknown field"),
        (format!(r#"{{"tokens": {tokens}, "kept": [1, 2, 1], "hashed": 3}}"#), "1 comes twice"),
        (format!(r#"{{"tokens": {tokens}, "kept": [1, {tokens}], "hashed": 3}}"#), "expected tokens from 0"),
        (format!(r#"{{"tokens": {tokens}, "kept": [-1], "hashed": 3}}"#), "got -1"),
        (format!(r#"{{"tokens": {tokens}, "kept": [], "hashed": 3}}"#), "at least one token"),
        (format!(r#"{{"tokens": {tokens}, "kept": [1], "hashed": 0}}"#), "one number for all others"),
        (format!(r#"{{"tokens": {tokens}, "kept": [1], "hashed": 99999999999}}"#), "expected at most"),
        (r#"{"tokens": 50257, "kept": [1], "hashed": 3}"#.into(), "for a tokenizer of 50257 tokens, but this one has 269"),
        (format!(r#"{{"tokens": {tokens}, "kept": [1, 2], "hashed": 3}}"#), "vocab_size 5, but this model's is 269"),
    ] {
        let (folder, model) = folder(&text);
        let error = Tokenizer::load_for(folder.path(), model.sizes().vocab).err().unwrap().to_string();
        assert!(error.contains("vocabulary.json") && error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_saved_vocabulary_is_read_again_beside_either_form_of_the_tokenizer() {
    let (folder, _) = folder("{}");
    std::fs::remove_file(folder.path().join("vocabulary.json")).unwrap();
    let plain = Tokenizer::find(folder.path()).unwrap().unwrap();
    let counts: Vec<u64> = (0..tiny_gpt2::VOCAB as u64).map(|i| i % 7).collect();
    let chosen = plain.choose_vocabulary(&counts, &["the end".into(), "<|endoftext|>".into()], 40, 8).unwrap();
    chosen.save(folder.path()).unwrap();
    let small = Tokenizer::find(folder.path()).unwrap().unwrap();
    assert_eq!(small.vocabulary(), 40);
    assert_eq!(small.decode(&small.encode("the end").unwrap()).unwrap(), "the end");
    let end = small.end_of_text().unwrap();
    assert!(end < 32 && small.encode("<|endoftext|>").unwrap() == [end]);
    let other = tempfile::tempdir().unwrap();
    small.save(other.path()).unwrap();
    let again = Tokenizer::load(other.path()).unwrap();
    let text = "the thin end, it's 1999 in the end";
    assert_eq!(again.encode(text).unwrap(), small.encode(text).unwrap());
    for (size, hashed) in [(tiny_gpt2::VOCAB, 8), (12, 8), (5, 8)] {
        let error = plain.choose_vocabulary(&counts, &["the end".into()], size, hashed).err().unwrap().to_string();
        assert!(error.contains("vocabulary size: expected at least"), "{error}");
    }
    assert!(small.choose_vocabulary(&[0; 40], &[], 20, 8).err().unwrap().to_string().contains("small vocabulary"));
}
