//! Texts that go on: pieces of any kind, read one after the other, leave the file that the whole read at once leaves.

#![allow(clippy::unwrap_used)]

use std::io::Cursor;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use armt::engine::{DType, Device, Tensor};
use armt::memory::{Associative, MemoryConfig, Prmt, Rmt, Window};
use armt::state::file::to_bytes;
use armt::text::{OpenText, Source, TokenStream, Tokenized, Tokenizer, TokenizerThreads};
use armt::{Error, Model, Session, SideBySide};
use proptest::prelude::*;
use serde_json::{Value, json};

#[path = "support/tiny_gpt2.rs"]
mod tiny_gpt2;

const SEGMENT: usize = 8;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/babilong-qa1")
}

/// GPT-2's own tokenizer, with the small vocabulary of the shipped model.
static SHIPPED: LazyLock<Session> = LazyLock::new(|| Session::open_on(folder(), DType::F32, &Device::cpu()).unwrap());

static THREADS: LazyLock<Arc<TokenizerThreads>> = LazyLock::new(|| TokenizerThreads::shared().unwrap());

/// Small models of every kind of memory.
static SMALL: LazyLock<Vec<Session>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    tiny_gpt2::write(folder.path());
    let (encoder, merges) = tiny_gpt2::write_bpe(folder.path());
    let tokenizer = Arc::new(Tokenizer::from_gpt2(&encoder, &merges).unwrap());
    let memories = [
        MemoryConfig::new(Associative::new(2, 4)),
        MemoryConfig::new(Rmt { tokens: 2, wrap_pos: false }),
        MemoryConfig::new(Prmt { tokens: 2, wrap_pos: false }),
        MemoryConfig::new(Window { sliding_window: true }),
    ];
    let one = |memory: MemoryConfig| {
        let model = Model::convert(folder.path(), memory, SEGMENT, 3, &Device::cpu()).unwrap();
        if let Some(values) = model.param("assoc.value") {
            let numbers: Vec<f32> = (0..values.value().elements()).map(|i| ((i * 7919 % 101) as f32 - 50.0) * 0.01).collect();
            values.set(&Tensor::from_slice(&numbers, values.value().shape(), &Device::cpu()).unwrap()).unwrap();
        }
        Session::new(model, tokenizer.clone()).unwrap()
    };
    memories.into_iter().map(one).collect()
});

/// GPT-2's pieces behind other expressions: Llama 3's, and Qwen2's after NFC.
static SPLIT: LazyLock<Vec<Arc<Tokenizer>>> = LazyLock::new(|| {
    let gpt2 = Tokenizer::find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/gpt2")).unwrap().unwrap();
    let folder = tempfile::tempdir().unwrap();
    gpt2.save(folder.path()).unwrap();
    let json: Value = serde_json::from_slice(&std::fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap();
    let others = [(r"\p{N}{1,3}", Value::Null), (r"\p{N}", json!({"type": "NFC"}))].map(|(numbers, normalizer)| {
        let expression = format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        let mut json = json.clone();
        json["normalizer"] = normalizer;
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]});
        Arc::new(Tokenizer::from_json(json.to_string().as_bytes()).unwrap())
    });
    others.to_vec()
});

/// The tokens of a text that comes in pieces, and what is open at its end.
fn tokens_in_pieces(tokenizer: &Arc<Tokenizer>, text: &[u8], cuts: &[usize], block: usize) -> (Vec<i32>, OpenText) {
    let (mut tokens, mut open, mut from) = (Vec::new(), OpenText::default(), 0);
    for to in cuts.iter().copied().chain([text.len()]) {
        if to == from {
            continue;
        }
        let source = Source::reader(Path::new("a piece"), Cursor::new(text[from..to].to_vec()));
        let mut stream = TokenStream::with_block(tokenizer.clone(), vec![source], block).unwrap().after(&open).on_threads(&THREADS);
        while let Some(piece) = stream.next_piece().unwrap() {
            tokens.extend(piece.tokens);
        }
        (open, from) = (stream.rest(), to);
    }
    (tokens, open)
}

fn append(session: &mut Session, piece: &[u8]) {
    session.read_from("a piece", Cursor::new(piece.to_vec())).unwrap();
}

#[test]
fn a_session_asks_and_reads_on_with_a_memory_that_was_kept_in_bf16() {
    for empty in SMALL.iter() {
        let mut session = empty.fork();
        append(&mut session, &b"the first of all numbers. ".repeat(9));
        let kept = session.model().recurrence().layout().computed_in(session.state().clone(), DType::BF16).unwrap();
        session.from_bytes(&to_bytes(&kept, session.owner()).unwrap()).unwrap();
        session.ask("the first").unwrap();
        append(&mut session, &b"the last of all numbers. ".repeat(9));
        assert!(session.state().tensors().all(|(_, tensor)| tensor.dtype() != DType::BF16), "{}", session.state().kind());
    }
}

/// The file after pieces of a text, each of which is read from the file that the one before left.
fn in_pieces(empty: &Session, text: &[u8], cuts: &[usize]) -> Vec<u8> {
    let mut bytes: Option<Vec<u8>> = None;
    let ends = cuts.iter().copied().chain([text.len()]);
    let mut from = 0;
    for to in ends {
        if to == from {
            continue;
        }
        let mut session = empty.fork();
        if let Some(bytes) = &bytes {
            session.from_bytes(bytes).unwrap();
        }
        append(&mut session, &text[from..to]);
        bytes = Some(session.to_bytes().unwrap());
        from = to;
    }
    bytes.unwrap()
}

/// Words, spaces of all kinds, characters of several bytes, contractions, special tokens, and bytes that are no text.
fn fragment() -> impl Strategy<Value = Vec<u8>> {
    let words = [
        "the",
        " the",
        "in",
        "it's",
        "we're",
        "'",
        "'l",
        "l",
        "1999",
        "12a",
        " ",
        "  ",
        "   \n",
        "\n\n",
        "\t",
        "\r\n",
        ". ",
        ",",
        "\"So",
        "é",
        "日本。",
        "語",
        "🙂",
        "\u{a0}",
        "\u{3000}",
        "\u{301}",
        "\u{d7}",
        "<|endoftext|>",
        "<|end",
        "|>",
        "Mary went to the kitchen. ",
    ];
    prop_oneof![
        12 => prop::sample::select(words.map(|w| w.as_bytes().to_vec()).to_vec()),
        1 => prop::collection::vec(any::<u8>(), 1..4),
    ]
}

/// Han, kana, Hangul, Latin, Greek and Arabic letters, marks that join them, digits, and punctuation and whitespace of every kind.
fn written() -> impl Strategy<Value = Vec<u8>> {
    let one = prop_oneof![
        "[\u{4e00}-\u{9fa5}]{1,4}",
        "[\u{3041}-\u{3096}\u{3099}-\u{309c}\u{30a1}-\u{30fc}]{1,4}",
        "[\u{ac00}-\u{ac20}\u{1100}-\u{1103}\u{1161}-\u{1163}\u{11a8}-\u{11aa}]{1,4}",
        "[A-Za-z]{1,4}",
        "[a-eà-ö\u{300}-\u{308}\u{212b}α-ωا-ي]{1,4}",
        "[0-9०-९]{1,5}",
        "[、。，！？：；「」『』（）\u{37e}\u{2026}]{1,3}",
        "[!-/:-@'’\"]{1,3}",
        "'(s|S|t|re|VE|m|ll|d|ſ)",
        "[ \n\r\t\u{a0}\u{2000}\u{3000}]{1,3}",
    ];
    one.prop_map(String::into_bytes)
}

fn cuts(text: &[u8], places: &[prop::sample::Index]) -> Vec<usize> {
    let mut cuts: Vec<usize> = places.iter().map(|place| place.index(text.len() + 1)).collect();
    cuts.sort_unstable();
    cuts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_leave_the_file_of_the_whole(
        parts in prop::collection::vec(fragment(), 1..60),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let text = parts.concat();
        let cuts = cuts(&text, &places);
        for session in SMALL.iter() {
            let whole = in_pieces(session, &text, &[]);
            prop_assert!(whole == in_pieces(session, &text, &cuts), "{cuts:?} of {:?}", String::from_utf8_lossy(&text));
        }
    }

    #[test]
    fn what_was_tokenized_ahead_leaves_the_file_of_the_whole(
        parts in prop::collection::vec(fragment(), 1..60),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        at_once in 1..4usize,
    ) {
        let text = parts.concat();
        let cuts = cuts(&text, &places);
        for session in SMALL.iter() {
            // Two texts: one comes in pieces, of which some are read at once, the other whole.
            let mut own = [session.fork(), session.fork()];
            let mut reader = SideBySide::new(session).unwrap();
            let ends: Vec<usize> = cuts.iter().copied().chain([text.len()]).collect();
            let (mut open, mut from) = (OpenText::default(), 0);
            for ends in ends.chunks(at_once) {
                let mut ahead = Tokenized { open: open.clone(), ..Tokenized::default() };
                for to in ends {
                    let more = Tokenized::more(session.tokenizer(), &ahead.open, text[from..*to].to_vec()).unwrap();
                    ahead.tokens.extend(more.tokens);
                    (ahead.open, from) = (more.open, *to);
                }
                open.clone_from(&ahead.open);
                let other = match own[1].tokens_read().unwrap() {
                    0 => Tokenized::more(session.tokenizer(), &OpenText::default(), text.clone()).unwrap(),
                    _ => Tokenized { open: own[1].state().tails()[0].text.clone(), ..Tokenized::default() },
                };
                reader.read_tokenized(&mut own, vec![ahead, other], &mut |_| ControlFlow::Continue(())).unwrap();
            }
            let whole = in_pieces(session, &text, &[]);
            prop_assert!(own.iter().all(|own| own.to_bytes().unwrap() == whole), "{cuts:?} of {:?}", String::from_utf8_lossy(&text));
        }
    }

    #[test]
    fn pieces_leave_the_tokens_of_gpt2_s_own_tokenizer(
        parts in prop::collection::vec(fragment(), 1..200),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        block in 16..300usize,
    ) {
        let (text, tokenizer) = (parts.concat(), SHIPPED.tokenizer());
        let (mut tokens, open) = tokens_in_pieces(tokenizer, &text, &cuts(&text, &places), block);
        tokens.extend(tokenizer.encode_open(&open).unwrap());
        prop_assert_eq!(tokens, tokenizer.encode(&String::from_utf8_lossy(&text)).unwrap());
    }

    #[test]
    fn pieces_leave_the_tokens_of_llama_s_and_qwen_s_tokenizers(
        parts in prop::collection::vec(prop_oneof![3 => written(), 1 => fragment()], 1..200),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        block in 16..300usize,
    ) {
        let text = parts.concat();
        let whole = String::from_utf8_lossy(&text);
        for tokenizer in SPLIT.iter() {
            let (mut tokens, open) = tokens_in_pieces(tokenizer, &text, &cuts(&text, &places), block);
            tokens.extend(tokenizer.encode_open(&open).unwrap());
            prop_assert_eq!(tokens, tokenizer.encode(&whole).unwrap(), "{:?}", &whole);
        }
    }
}

#[test]
fn a_book_cut_anywhere_leaves_the_file_of_the_whole() {
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/books/test/Edwin_A_Abbott__Flatland__1884.txt");
    let text = &std::fs::read(book).unwrap()[..90_000];
    let whole = in_pieces(&SHIPPED, text, &[]);
    assert!(whole == in_pieces(&SHIPPED, text, &[1, 2, 3_001, 3_002, 40_000, 40_001, 77_777, 89_999]));
    let mut session = SHIPPED.fork();
    session.from_bytes(&whole).unwrap();
    let tail = &session.state().tails()[0];
    assert!(tail.tokens.len() < session.model().config().segment_size, "{}", tail.tokens.len());
    assert!(!tail.text.bytes.is_empty() && tail.text.bytes.len() < 40, "{:?}", tail.text);
    let text = String::from_utf8_lossy(text);
    assert_eq!(session.tokens_read().unwrap(), session.tokenizer().encode(&text).unwrap().len() as u64);
}

#[test]
fn threads_give_the_tokens_of_one_call_over_a_book() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let gpt2 = Arc::new(Tokenizer::find(&folder.join("gpt2")).unwrap().unwrap());
    for book in ["train/Mark_Twain__Adventures_of_Huckleberry_Finn__1884.txt", "test/Anne_Bronte__Agnes_Grey__1847.txt"] {
        let text = std::fs::read_to_string(folder.join("books").join(book)).unwrap();
        for threads in [1, 3] {
            let source = Source::reader(Path::new("a book"), Cursor::new(text.clone()));
            let threads = TokenizerThreads::with(threads).unwrap();
            let mut stream = TokenStream::new(gpt2.clone(), vec![source]).unwrap().on_threads(&threads);
            let mut tokens: Vec<i32> = stream.by_ref().collect::<armt::Result<_>>().unwrap();
            tokens.extend(gpt2.encode_open(&stream.rest()).unwrap());
            assert!(tokens == gpt2.encode(&text).unwrap(), "{book}");
        }
    }
}

#[test]
fn a_text_without_spaces_does_not_wait_for_one() {
    let text = "我们去了厨房，然后约翰搬到花园。".repeat(2000);
    let mut session = SHIPPED.fork();
    append(&mut session, text.as_bytes());
    assert!(session.state().tokens_read() > 20_000 && session.state().tails()[0].text.bytes.len() < 100);
}

#[test]
fn a_text_without_spaces_does_not_wait_for_one_with_llama_s_and_qwen_s_tokenizers() {
    let text = "我们去了厨房，然后约翰搬到花园。".repeat(1 << 15);
    for tokenizer in SPLIT.iter() {
        let (tokens, open) = tokens_in_pieces(tokenizer, text.as_bytes(), &[], 1 << 20);
        let closed = text.len() - open.bytes.len();
        assert!(text.len() > 1_000_000 && open.bytes.len() < 100, "{} bytes are open", open.bytes.len());
        assert!(tokens == tokenizer.encode(&text[..closed]).unwrap());
    }
}

#[test]
fn what_is_open_is_asked_too_and_stays_open() {
    let mut session = SHIPPED.fork();
    append(&mut session, b"It was late. Mary went to the kit");
    assert_eq!((session.state().tokens_read(), session.state().tails()[0].tokens.len() > 5), (0, true));
    append(&mut session, b"chen. The rain fell. John moved to the gard");
    append(&mut session, b"en.");
    let before = session.to_bytes().unwrap();
    assert_eq!(session.ask("Where is Mary?").unwrap(), "kitchen");
    assert_eq!(session.ask("Where is John?").unwrap(), "garden");
    assert!(session.to_bytes().unwrap() == before);
    append(&mut session, " The rain fell on the roof of the old house.".repeat(60).as_bytes());
    append(&mut session, b" Mary journeyed to the office.");
    assert_eq!(session.ask("Where is Mary?").unwrap(), "office", "an answer is of all that was read by then");
}

#[test]
fn a_document_of_its_own_begins_a_segment() {
    let [mut apart, mut joined] = [SHIPPED.fork(), SHIPPED.fork()];
    for session in [&mut apart, &mut joined] {
        append(session, b"Mary went to the kit");
    }
    apart.end_document().unwrap();
    assert!(apart.state().tails()[0].is_empty());
    assert_eq!(apart.state().segments_read(), 1);
    let ended = apart.to_bytes().unwrap();
    apart.end_document().unwrap();
    assert!(apart.to_bytes().unwrap() == ended, "a text ends once");
    for session in [&mut apart, &mut joined] {
        append(session, b"chen sink.");
        session.end_document().unwrap();
    }
    assert_eq!((apart.state().segments_read(), joined.state().segments_read()), (2, 1));
    assert!(apart.state().tokens_read() > joined.state().tokens_read(), "no word spans both");
}

#[test]
fn what_would_lose_an_open_end_refuses_it() {
    let mut session = SMALL[0].fork();
    append(&mut session, b"the in the xx");
    let (model, state) = (session.model(), session.state());
    assert!(!state.tails()[0].text.bytes.is_empty());
    assert!(matches!(armt::reader::Reader::new(model, state.clone()), Err(Error::Input { .. })), "its bytes are no tokens");
    let batch = armt::segment::Batch { ids: vec![1, 2], texts: 1, mask: None };
    assert!(matches!(model.forward(&batch, state, armt::schedule::ScheduleKind::Auto), Err(Error::Input { .. })));
    // Stacked and split again each text has its own.
    let other = SMALL[0].fork();
    let both = Session::stack(&[session.fork(), other]).unwrap();
    let again = both.split().unwrap();
    assert_eq!((again[0].tails(), again[1].tails()[0].is_empty()), (state.tails(), true));
}
