//! The front door, on the model that comes with the project.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use armt::engine::{DType, Device};
use armt::generate::Options;
use armt::text::Source;
use armt::{Error, Session, State};

const FACTS: &str = "It was late. Mary went to the kitchen. The rain fell on the roof of the old house. John moved to the garden. ";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/babilong-qa1")
}

fn session() -> Session {
    Session::open_on(folder(), DType::F32, &Device::cpu()).unwrap()
}

fn bits(state: &State) -> Vec<u32> {
    state.tensors().flat_map(|(_, t)| t.to_f32_vec().unwrap()).map(f32::to_bits).collect()
}

#[test]
fn a_file_a_reader_and_pieces_of_text_leave_the_same_state() {
    let place = tempfile::tempdir().unwrap();
    let (path, text) = (place.path().join("book.txt"), FACTS.repeat(30));
    std::fs::write(&path, &text).unwrap();
    let mut sessions = [session(), session(), session()];
    sessions[0].read(&path).unwrap();
    sessions[1].read_from("the book", std::io::Cursor::new(text.clone())).unwrap();
    let pieces: Vec<String> = text.chars().collect::<Vec<_>>().chunks(7).map(|c| c.iter().collect()).collect();
    sessions[2].read_text(pieces).unwrap();
    let [a, b, c] = sessions.map(|s| (s.to_bytes().unwrap(), s.tokens_read().unwrap()));
    assert!(a == b && b == c && a.1 > 600);
}

#[test]
fn a_question_is_asked_as_the_model_was_taught_and_changes_nothing() {
    let mut session = session();
    assert!(matches!(session.ask(""), Err(Error::Input { .. })));
    session.read_text([FACTS]).unwrap();
    let before = bits(session.state());
    assert_eq!(session.ask("Where is Mary?").unwrap(), "kitchen");
    assert_eq!(session.ask("Where is John?").unwrap(), "garden");
    assert_eq!(bits(session.state()), before);
    let said = session.generate("Where is Mary?GEN", &Options { max_new_tokens: 2, ..Options::default() }).unwrap();
    assert_eq!(session.tokenizer().decode(&said.tokens[0]).unwrap().trim(), "kitchen");
    let mut heard = String::new();
    let each = &mut |piece: &str| {
        heard.push_str(piece);
        ControlFlow::Continue(())
    };
    assert_eq!(session.ask_with("Where is John?", &Options::default(), &[], each).unwrap().text, heard);
}

#[test]
fn a_fork_goes_its_own_way() {
    let mut session = session();
    session.read_text([FACTS]).unwrap();
    let mut fork = session.fork();
    fork.end_document().unwrap();
    fork.read_text(["Mary journeyed to the office. The rain fell. "]).unwrap();
    assert_eq!(session.ask("Where is Mary?").unwrap(), "kitchen");
    assert_eq!(fork.ask("Where is Mary?").unwrap(), "office");
}

#[test]
fn a_kept_state_is_asked_later_and_refused_elsewhere() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("kept");
    let mut first = session();
    first.read_text([FACTS]).unwrap();
    first.save(&file).unwrap();
    let mut later = session();
    later.load(&file).unwrap();
    assert_eq!((bits(later.state()), later.ask("Where is Mary?").unwrap()), (bits(first.state()), "kitchen".into()));
    let broken = std::fs::read(&file).unwrap();
    std::fs::write(&file, &broken[..broken.len() - 3]).unwrap();
    let before = bits(later.state());
    assert!(later.load(&file).is_err());
    assert_eq!(bits(later.state()), before, "a refused file changes nothing");
    let two = Session::stack(&[first, later.fork()]).unwrap();
    assert!(matches!(later.set_state(two), Err(Error::Texts { state: 2, texts: 1 })));
    let vocabulary = later.model().sizes().vocab as i32;
    for token in [-1, vocabulary, i32::MAX] {
        let mut tail = later.state().tails()[0].clone();
        tail.tokens.push(token);
        let strange = later.state().clone().with_tails(vec![tail]).unwrap();
        assert!(later.set_state(strange).unwrap_err().to_string().contains("outside the vocabulary"), "{token}");
        assert_eq!(bits(later.state()), before);
    }
}

#[test]
fn stacked_sessions_are_split_again() {
    let mut sessions = [session(), session()];
    sessions[0].read_text([FACTS]).unwrap();
    sessions[1].read_text([FACTS.replace("kitchen", "bedroom")]).unwrap();
    let stacked = Session::stack(&sessions).unwrap();
    assert_eq!(stacked.texts(), 2);
    let mut again = [session(), session()];
    for (session, state) in again.iter_mut().zip(stacked.split().unwrap()) {
        session.set_state(state).unwrap();
    }
    assert_eq!(again.each_ref().map(|s| s.ask("Where is Mary?").unwrap()), ["kitchen", "bedroom"]);
    assert!(Session::stack(&[]).is_err());
}

#[test]
fn sessions_read_texts_of_any_lengths_side_by_side() {
    let texts: Vec<String> = [0, 1, 40, 300]
        .map(|n| format!("{}{}Mary went to the off", FACTS.repeat(n), "The rain fell on the roof. ".repeat(100)))
        .to_vec();
    let mut alone: Vec<Session> = texts.iter().map(|_| session()).collect();
    alone.iter_mut().zip(&texts).for_each(|(session, text)| session.read_text([text.clone()]).unwrap());
    let mut together: Vec<Session> = texts.iter().map(|_| session()).collect();
    // In two parts, the second of which begins within a word and is asked for in another order.
    let source = |text: &str| Source::reader(Path::new("a text"), std::io::Cursor::new(text.to_string()));
    let (first, second): (Vec<_>, Vec<_>) = texts.iter().map(|text| text.split_at(text.len() - 10)).unzip();
    Session::read_all(&mut together, first.iter().map(|text| source(text)).collect()).unwrap();
    together.reverse();
    Session::read_all(&mut together, second.iter().rev().map(|text| source(text)).collect()).unwrap();
    together.reverse();
    for (together, alone) in together.iter_mut().zip(&alone) {
        assert!(together.to_bytes().unwrap() == alone.to_bytes().unwrap());
        together.read_text(["ice."]).unwrap();
        assert_eq!(together.ask("Where is Mary?").unwrap(), "office");
    }
    let before: Vec<Vec<u8>> = together.iter().map(|s| s.to_bytes().unwrap()).collect();
    let empty = texts.iter().enumerate().map(|(i, text)| source(if i == 2 { "" } else { text })).collect();
    assert!(Session::read_all(&mut together, empty).unwrap_err().to_string().contains("it is empty"));
    assert!(
        together.iter().zip(&before).all(|(s, before)| s.to_bytes().unwrap() == *before),
        "where one fails all stay as they are"
    );
    assert!(matches!(Session::read_all(&mut together, vec![source("x")]), Err(Error::Texts { state: 4, texts: 1 })));
}

#[test]
fn threads_share_a_model() {
    let mut session = session();
    session.read_text([FACTS]).unwrap();
    let session = Arc::new(session);
    let ask = |session: Arc<Session>| thread::spawn(move || session.ask("Where is John?").unwrap());
    let asked: Vec<_> = (0..4).map(|_| ask(session.clone())).collect();
    assert!(asked.into_iter().all(|thread| thread.join().unwrap() == "garden"));
}
