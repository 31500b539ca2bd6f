//! From text to memory and back to text: the stream of tokens, the reader, and answers.

#![allow(clippy::unwrap_used)]

use std::io::Cursor;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use armt::answer::answer;
use armt::engine::{DType, Device};
use armt::generate::{Options, Sampling};
use armt::memory::{Associative, MemoryConfig, Prmt, Rmt};
use armt::reader::{End, Reader, Tokens};
use armt::text::{Source, TokenPrefetch, TokenStream, Tokenizer, Vocabulary};
use armt::{Error, Model, Session, State};
use proptest::prelude::*;

#[path = "support/tiny_gpt2.rs"]
mod tiny_gpt2;

const SEGMENT: usize = 8;
/// Segments of a group on the CPU.
const GROUP: u64 = 32;

fn tokenizer() -> Arc<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let (encoder, merges) = tiny_gpt2::write_bpe(folder.path());
    Arc::new(Tokenizer::from_gpt2(&encoder, &merges).unwrap())
}

fn tokens_of(tokenizer: &Arc<Tokenizer>, texts: &[&[u8]], block: usize) -> (Vec<i32>, u64) {
    let sources = texts.iter().map(|t| Source::reader(Path::new("text"), Cursor::new(t.to_vec()))).collect();
    let mut stream = TokenStream::with_block(tokenizer.clone(), sources, block).unwrap();
    let mut tokens = Vec::new();
    while let Some(piece) = stream.next_piece().unwrap() {
        tokens.extend(piece.tokens);
    }
    let replaced = stream.so_far().replaced;
    // A character that is cut at the end is not wrong before the text has ended there.
    let rest = stream.rest();
    let cut = std::str::from_utf8(&rest.bytes).map_or_else(|e| rest.bytes.len() - e.valid_up_to(), |_| 0);
    tokens.extend(tokenizer.encode_open(&rest).unwrap());
    (tokens, replaced + cut as u64)
}

fn model(memory: MemoryConfig) -> Model {
    let folder = tempfile::tempdir().unwrap();
    tiny_gpt2::write(folder.path());
    let model = Model::convert(folder.path(), memory, SEGMENT, 3, &Device::cpu()).unwrap();
    // The value projection starts at zero, which would leave nothing in the memory to compare.
    if let Some(projection) = model.param("assoc.value") {
        let value = projection.value();
        let numbers: Vec<f32> = (0..value.elements()).map(|i| ((i * 7919 % 101) as f32 - 50.0) * 0.01).collect();
        projection.set(&armt::engine::Tensor::from_slice(&numbers, value.shape(), &Device::cpu()).unwrap()).unwrap();
    }
    model
}

fn associative() -> MemoryConfig {
    let a = Associative::new(2, 4);
    MemoryConfig::new(a)
}

/// Some text of about `n` tokens.
fn tokens(n: usize) -> Vec<i32> {
    (0..n).map(|i| ((i * i + 3 * i) % tiny_gpt2::VOCAB) as i32).collect()
}

/// The memory after a text and its end.
fn read_all(model: &Model, state: State, tokens: &[i32]) -> State {
    let mut reader = Reader::new(model, state).unwrap();
    let mut source = tokens.iter().map(|t| Ok(*t));
    assert_eq!(reader.read(&mut source, &mut |_| ControlFlow::Continue(())).unwrap(), End::Finished);
    reader.close().unwrap();
    reader.state().unwrap()
}

fn bits(state: &State) -> Vec<u32> {
    let all = |t: &armt::engine::Tensor| t.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
    state.tensors().flat_map(|(_, t)| all(t)).collect()
}

fn fragment() -> impl Strategy<Value = String> {
    let words = [
        "the",
        " the",
        "in",
        "xx",
        "it's",
        "1999",
        " ",
        "  ",
        "     ",
        "\n",
        "\n\n",
        "\n ",
        "\t",
        "\r\n",
        ". ",
        ",",
        "\"",
        " a",
        "é",
        "日本",
        "🙂",
        "\u{a0}",
        "\u{3000}",
        "<|endoftext|>",
        "' s",
    ];
    prop::sample::select(words.map(String::from).to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_gives_the_tokens_of_the_whole_text(parts in prop::collection::vec(fragment(), 1..80)) {
        let (tokenizer, text) = (tokenizer(), parts.concat());
        for block in [16, 17, 23, 64, 4096] {
            let (tokens, replaced) = tokens_of(&tokenizer, &[text.as_bytes()], block);
            prop_assert_eq!(&tokens, &tokenizer.encode(&text).unwrap());
            prop_assert_eq!(replaced, 0);
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced_as_anywhere_else(bytes in prop::collection::vec(
        prop::sample::select(vec![b'a', b' ', 0xc3, 0xa9, 0xe6, 0x97, 0xa5, 0xf0, 0x9f, 0x99, 0x82, 0xff]), 1..120,
    )) {
        let (tokenizer, text) = (tokenizer(), String::from_utf8_lossy(&bytes).into_owned());
        for block in [16, 19, 4096] {
            let (tokens, replaced) = tokens_of(&tokenizer, &[&bytes], block);
            prop_assert_eq!(&tokens, &tokenizer.encode(&text).unwrap());
            prop_assert_eq!(replaced > 0, std::str::from_utf8(&bytes).is_err());
        }
    }
}

#[test]
fn a_long_run_without_spaces_is_cut_at_the_same_places_for_any_block() {
    let tokenizer = tokenizer();
    let text = format!("some words {}é{} and more", "x".repeat((1 << 20) - 1), "x日".repeat(1 << 17));
    let (once, _) = tokens_of(&tokenizer, &[text.as_bytes()], 8 << 20);
    let (blocks, _) = tokens_of(&tokenizer, &[text.as_bytes()], 50_021);
    assert_eq!(once, blocks);
    assert_eq!(tokenizer.decode(&once).unwrap(), text);
}

#[test]
fn invalid_bytes_are_counted_and_a_cut_character_at_the_end_is_one() {
    let tokenizer = tokenizer();
    let (tokens, replaced) = tokens_of(&tokenizer, &[b"good \xff\xfe bad", b"cut \xe6\x97"], 16);
    assert_eq!(replaced, 4);
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "good \u{fffd}\u{fffd} badcut \u{fffd}");
}

#[test]
fn sources_are_one_text_and_an_empty_one_is_named() {
    let tokenizer = tokenizer();
    let (tokens, _) = tokens_of(&tokenizer, &[b"i", b"n the caf\xc3", b"\xa9"], 16);
    assert_eq!(tokens, tokenizer.encode("in the café").unwrap());

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nothing.txt");
    std::fs::write(&path, "").unwrap();
    assert!(Source::file(&path).err().unwrap().to_string().contains("nothing.txt: it is empty"));
    let source = Source::reader(Path::new("pipe"), Cursor::new(vec![]));
    let error = TokenStream::new(tokenizer, vec![source]).unwrap().next_piece().unwrap_err();
    assert!(error.to_string().contains("pipe: it is empty"), "{error}");
}

#[test]
fn a_tokenizer_survives_its_file_and_a_damaged_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Tokenizer::load(folder.path()).err().unwrap().to_string();
    assert!(missing.contains("tokenizer.json"), "{missing}");
    let own = tokenizer();
    own.save(folder.path()).unwrap();
    let loaded = Tokenizer::load(folder.path()).unwrap();
    let text = "the end's <|endoftext|>  in\n\n1999 日本";
    assert_eq!(loaded.encode(text).unwrap(), own.encode(text).unwrap());
    assert_eq!(loaded.vocabulary(), tiny_gpt2::VOCAB);
    std::fs::write(folder.path().join("tokenizer.json"), "{\"model\": 3").unwrap();
    assert!(Tokenizer::load(folder.path()).err().unwrap().to_string().contains("tokenizer.json: expected"));
}

#[test]
fn merges_that_are_none_are_named_with_their_line() {
    let folder = tempfile::tempdir().unwrap();
    let (encoder, merges) = tiny_gpt2::write_bpe(folder.path());
    std::fs::write(&merges, "#version: 0.2\nĠ t\nonlyone\n").unwrap();
    let error = Tokenizer::from_gpt2(&encoder, &merges).err().unwrap().to_string();
    assert!(error.contains("vocab.bpe: line 3"), "{error}");
}

#[test]
fn a_reading_in_two_halves_gives_the_bits_of_one_reading() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory.safetensors");
    for memory in [
        associative(),
        MemoryConfig::new(Rmt { tokens: 2, wrap_pos: false }),
        MemoryConfig::new(Prmt { tokens: 2, wrap_pos: false }),
    ] {
        let model = model(memory);
        let text = tokens(SEGMENT * GROUP as usize * 2 + 21);
        let whole = read_all(&model, model.empty(1).unwrap(), &text);
        assert_eq!((whole.tokens_read(), whole.segments_read()), (text.len() as u64, 2 * GROUP + 3));

        let mut reader = Reader::new(&model, model.empty(1).unwrap()).unwrap();
        let mut source = text.iter().map(|t| Ok(*t));
        assert_eq!(reader.read(&mut source, &mut |_| ControlFlow::Break(())).unwrap(), End::Stopped);
        let state = reader.state().unwrap();
        assert_eq!((state.segments_read(), state.tails()[0].is_empty()), (GROUP, true));
        model.save_state(&state, &file).unwrap();

        let mut reader = Reader::new(&model, model.load_state(&file).unwrap()).unwrap();
        let mut source = text.iter().map(|t| Ok(*t));
        reader.skip(&mut source).unwrap();
        reader.read(&mut source, &mut |_| ControlFlow::Continue(())).unwrap();
        reader.close().unwrap();
        let state = reader.state().unwrap();
        assert_eq!(state.tokens_read(), whole.tokens_read());
        assert!(bits(&whole).iter().any(|b| *b != 0));
        assert_eq!(bits(&state), bits(&whole), "{}", model.config().memory.kind());
    }
}

#[test]
fn a_source_that_fails_leaves_what_was_read() {
    let model = model(associative());
    let group = SEGMENT * GROUP as usize;
    let text = tokens(group + 5);
    let mut reader = Reader::new(&model, model.empty(1).unwrap()).unwrap();
    let broken = || Err(Error::input("a disk", "the disk is gone"));
    let mut source = text.iter().map(|t| Ok(*t)).chain(std::iter::once_with(broken));
    assert!(reader.read(&mut source, &mut |_| ControlFlow::Continue(())).is_err());
    assert_eq!((reader.state().unwrap().tokens_read(), reader.group()), (group as u64, GROUP));
    assert_eq!(reader.left_out(), [text[group..].to_vec()]);
    let mut rest = std::iter::empty();
    assert_eq!(reader.read(&mut rest, &mut |_| ControlFlow::Continue(())).unwrap(), End::Finished);
    reader.close().unwrap();
    assert_eq!(bits(&reader.state().unwrap()), bits(&read_all(&model, model.empty(1).unwrap(), &text)));
}

#[test]
fn a_text_that_ended_short_can_be_continued() {
    let model = model(associative());
    let (first, second) = (tokens(SEGMENT + 3), tokens(SEGMENT * 2));
    let state = read_all(&model, model.empty(1).unwrap(), &first);
    let mut reader = Reader::new(&model, state).unwrap();
    let both = [first.clone(), second].concat();
    let mut source = both.iter().map(|t| Ok(*t));
    reader.skip(&mut source).unwrap();
    reader.read(&mut source, &mut |_| ControlFlow::Continue(())).unwrap();
    let state = reader.state().unwrap();
    assert_eq!((state.tokens_read(), state.segments_read()), (both.len() as u64, 4));

    let mut short = first[..5].iter().map(|t| Ok(*t));
    let error = reader.skip(&mut short).unwrap_err().to_string();
    assert!(error.contains("got one of 5"), "{error}");
}

#[test]
fn a_reading_is_gone_on_with_from_the_text_that_was_read_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory.safetensors");
    let model = model(associative());
    let text = tokens(SEGMENT * 4 + 3);
    let state = read_all(&model, model.empty(1).unwrap(), &text);
    model.save_state(&state, &file).unwrap();
    let skip = |tokens: &[i32], state: State| {
        let mut reader = Reader::new(&model, state).unwrap();
        reader.skip(&mut tokens.iter().map(|t| Ok(*t))).map(|()| reader.state().unwrap())
    };
    let load = || model.load_state(&file).unwrap();
    assert!(skip(&text, load()).is_ok());
    let mut other = text.clone();
    other[7] ^= 1;
    let error = skip(&[other, vec![1; 100]].concat(), load()).err().unwrap().to_string();
    assert!(error.contains("the text that was read"), "{error}");
    // Where it is not known what was read, what is passed over is taken for it.
    let count = state.counts()[0];
    let unknown = load().with_counts(vec![armt::state::Count { text: None, ..count }]);
    assert_eq!(skip(&text, unknown).unwrap().counts(), [count]);
}

#[test]
fn a_memory_read_with_another_vocabulary_or_tokenizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory.safetensors");
    let (model, whole) = (model(associative()), tokenizer());
    let (encoder, merges) = tiny_gpt2::write_bpe(folder.path());
    let bpe = || Tokenizer::from_gpt2(&encoder, &merges).unwrap();
    let kept = |kept: Vec<i32>| Arc::new(bpe().with_vocabulary(Vocabulary::new(tiny_gpt2::VOCAB, kept, 9).unwrap()).unwrap());
    let most: Vec<i32> = (0..tiny_gpt2::VOCAB as i32 - 9).collect();
    let rotated: Vec<i32> = most.iter().skip(1).chain(&most[..1]).copied().collect();
    let mut session = Session::new(model.clone(), kept(most.clone())).unwrap();
    session.read_text(["where is the milk? it is in the kitchen."]).unwrap();
    session.save(&file).unwrap();
    let load = |tokenizer: Arc<Tokenizer>| Session::new(model.clone(), tokenizer).unwrap().load(&file);
    load(kept(most)).unwrap();
    for other in [kept(rotated), whole.clone()] {
        let error = load(other).unwrap_err().to_string();
        assert!(error.contains("another tokenizer or vocabulary"), "{error}");
    }
    // The files that a tokenizer is in do not matter.
    whole.save(folder.path()).unwrap();
    assert_eq!(Tokenizer::load(folder.path()).unwrap().fingerprint().unwrap(), whole.fingerprint().unwrap());
}

#[test]
fn no_tokens_change_nothing_and_unknown_tokens_are_refused() {
    let model = model(associative());
    let mut reader = Reader::new(&model, model.empty(1).unwrap()).unwrap();
    let mut go = |tokens: Vec<i32>| reader.read(&mut tokens.into_iter().map(Ok), &mut |_| ControlFlow::Continue(()));
    assert_eq!(go(vec![]).unwrap(), End::Finished);
    assert!(go(vec![1, 9999]).unwrap_err().to_string().contains("token 9999"));
}

/// Reads texts side by side to their ends, with the reader as it is.
fn read_side_by_side(reader: &mut Reader, texts: &[Vec<i32>]) {
    let mut sources: Vec<_> = texts.iter().map(|text| text.iter().map(|t| Ok(*t))).collect();
    let mut sources: Vec<Tokens<'_>> = sources.iter_mut().map(|s| s as Tokens<'_>).collect();
    assert_eq!(reader.read_all(&mut sources, &mut |_| ControlFlow::Continue(())).unwrap(), End::Finished);
    reader.close().unwrap();
}

#[test]
fn recorded_groups_give_the_bits_of_direct_ones() {
    let Ok(cuda) = Device::cuda(0) else {
        println!("skipped: there is no GPU");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    model(associative()).save(folder.path(), DType::F32).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let model = Model::load(folder.path(), dtype, &cuda).unwrap();
        let mut reader = Reader::new(&model, model.empty(2).unwrap()).unwrap();
        let group = reader.group() as usize * SEGMENT;
        let texts: Vec<Vec<i32>> = (0..2).map(|i| tokens(4 * group + SEGMENT + 3 + i)[i..].to_vec()).collect();
        // A reader that sees each group for the first time records nothing.
        let mut direct = model.empty(2).unwrap();
        for from in (0..texts[0].len()).step_by(group) {
            let parts: Vec<Vec<i32>> = texts.iter().map(|t| t[from..t.len().min(from + group)].to_vec()).collect();
            let mut reader = Reader::new(&model, direct).unwrap();
            read_side_by_side(&mut reader, &parts);
            direct = reader.state().unwrap();
        }
        for _ in 0..3 {
            reader.begin(model.empty(2).unwrap()).unwrap();
            read_side_by_side(&mut reader, &texts);
            let state = reader.state().unwrap();
            assert_eq!(state.tokens_read(), texts[0].len() as u64);
            assert!(bits(&state).iter().any(|b| *b != 0));
            assert_eq!(bits(&state), bits(&direct), "{dtype}");
        }
    }
}

#[test]
fn a_stop_reaches_a_reader_whose_text_does_not_come() {
    /// A pipe that nobody writes to.
    struct Silent;
    impl std::io::Read for Silent {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            loop {
                std::thread::park();
            }
        }
    }
    let model = model(associative());
    let stream = TokenStream::new(tokenizer(), vec![Source::reader(Path::new("pipe"), Silent)]).unwrap();
    let stop = Arc::new(AtomicBool::new(true));
    let mut reader = Reader::new(&model, model.empty(1).unwrap()).unwrap();
    let mut ahead = TokenPrefetch::start(stream, stop).unwrap();
    assert_eq!(reader.read(&mut ahead, &mut |_| ControlFlow::Continue(())).unwrap(), End::Stopped);
}

#[test]
fn answers_come_piece_by_piece_and_end_before_a_stop_text() {
    let (model, tokenizer) = (model(associative()), tokenizer());
    let state = read_all(&model, model.empty(1).unwrap(), &tokens(50));
    let sampling = Sampling::Random { temperature: 1.0, top_k: None, top_p: None, seed: 5 };
    let options = Options { max_new_tokens: 20, sampling, ..Options::default() };
    let ask = |stop: &[String]| {
        let mut said = String::new();
        let text = answer(&model, &tokenizer, &state, "in the xx?", &options, stop, &mut |s| {
            said.push_str(s);
            ControlFlow::Continue(())
        });
        let text = text.unwrap().text;
        assert_eq!(text, said);
        text
    };
    let whole = ask(&[]);
    assert!(!whole.is_empty());
    let (at, stop) = whole.char_indices().nth(3).map(|(i, c)| (whole.find(c).unwrap_or(i), c.to_string())).unwrap();
    assert_eq!(ask(&[stop]), whole[..at]);
    assert!(answer(&model, &tokenizer, &state, "", &options, &[], &mut |_| ControlFlow::Continue(())).is_err());
}

#[test]
fn a_tokenizer_larger_than_the_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    tiny_gpt2::write(folder.path());
    let model = Model::load(folder.path(), DType::F32, &Device::cpu()).unwrap();
    let (encoder, merges) = tiny_gpt2::write_bpe(folder.path());
    Tokenizer::from_gpt2(&encoder, &merges).unwrap().save(folder.path()).unwrap();
    assert!(Tokenizer::load_for(folder.path(), model.sizes().vocab).is_ok());
    let text = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let old = format!("\"<|endoftext|>\":{}", tiny_gpt2::VOCAB - 1);
    assert!(text.contains(&old));
    std::fs::write(folder.path().join("tokenizer.json"), text.replace(&old, "\"<|endoftext|>\":5000")).unwrap();
    let error = Tokenizer::load_for(folder.path(), model.sizes().vocab).err().unwrap().to_string();
    assert!(error.contains("tokenizer.json: its tokens go up to 5000"), "{error}");
}
