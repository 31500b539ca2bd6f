//! BABILong samples of the shipped books and stories.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use armt::random::Random;
use armt::text::Tokenizer;
use armt_lab::tasks::babi::file::Split;
use armt_lab::tasks::babi::{self, Task};
use armt_lab::tasks::babilong::{Babilong, Books, Data, Form, Length, Piece, Sample, Stories, find_data, given};

fn data(data: Data) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data").join(data.folder())
}

/// Opened once: books are tokenised as they are read, and the tests share that.
static BABILONG: LazyLock<Babilong> = LazyLock::new(open);

fn open() -> Babilong {
    let tokenizer = Tokenizer::find(&data(Data::Bpe)).unwrap().unwrap();
    Babilong::new(Arc::new(Books::open(&data(Data::TestBooks), Arc::new(tokenizer)).unwrap())).unwrap()
}

fn published(task: usize, seed: u64) -> Stories {
    Stories::published(&data(Data::Babi), Task::new(task).unwrap(), Split::Test, seed).unwrap()
}

fn simulated(task: usize, seed: u64) -> Stories {
    Stories::simulated(Task::new(task).unwrap(), seed).unwrap()
}

/// A sample's pieces, and whether each is a fact.
fn pieces(sample: &Sample) -> Vec<(bool, Vec<i32>)> {
    let (mut context, mut pieces) = (sample.context(), Vec::new());
    while let Some(piece) = context.next_piece().unwrap() {
        pieces.push((matches!(piece, Piece::Fact(_)), piece.tokens().to_vec()));
    }
    pieces
}

fn context(sample: &Sample) -> Vec<i32> {
    sample.context().collect::<Result<_, _>>().unwrap()
}

#[test]
fn a_context_has_exactly_its_length_and_all_facts_in_order() {
    let babilong = &*BABILONG;
    for stories in [published(1, 1), published(5, 2), simulated(2, 3), simulated(3, 4)] {
        for (length, samples) in [(1000, 10), (4001, 10), (60_000, 2)] {
            for number in 0..samples {
                let sample = babilong.draw(&stories, Length(length), number).unwrap();
                let pieces = pieces(&sample);
                assert_eq!((sample.length(), pieces.iter().map(|p| p.1.len()).sum::<usize>()), (length, length));
                let facts: Vec<&Vec<i32>> = pieces.iter().filter(|p| p.0).map(|p| &p.1).collect();
                let told: Vec<Vec<i32>> = sample.story.facts.iter().map(|f| babilong.tokenizer().encode(f).unwrap()).collect();
                assert_eq!(facts, told.iter().collect::<Vec<_>>());
                let background: Vec<&Vec<i32>> = pieces.iter().filter(|p| !p.0).map(|p| &p.1).collect();
                let (last, whole) = background.split_last().unwrap();
                assert!(!last.is_empty() && whole.iter().all(|s| s.len() >= 10), "only the last sentence is cut");
                for sentence in whole {
                    assert!(babilong.tokenizer().decode(sentence).unwrap().starts_with(' '));
                }
                assert_eq!(context(&sample), pieces.iter().flat_map(|p| p.1.clone()).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn nought_is_the_facts_alone() {
    let babilong = &*BABILONG;
    for task in 1..=20 {
        let sample = babilong.draw(&published(task, 0), Length(0), 7).unwrap();
        let facts: Vec<i32> = sample.story.facts.iter().flat_map(|f| babilong.tokenizer().encode(f).unwrap()).collect();
        assert_eq!(context(&sample), facts, "qa{task}");
        assert_eq!(sample.length(), facts.len());
    }
}

#[test]
fn the_question_ends_with_gen_and_the_answer_with_eos() {
    let babilong = &*BABILONG;
    let sample = babilong.draw(&published(1, 0), Length(1000), 0).unwrap();
    let encode = |text: &str| babilong.tokenizer().encode(text).unwrap();
    assert_eq!((babilong.ask_token(), babilong.end_token()), (encode("GEN")[0], 50256));
    assert_eq!(sample.prompt.question, [encode(&sample.story.question.text), vec![babilong.ask_token()]].concat());
    assert_eq!(sample.prompt.answer, [encode(&sample.story.question.answer), vec![50256]].concat());
    let tokens: Vec<i32> = sample.tokens().collect::<Result<_, _>>().unwrap();
    assert_eq!(tokens, [context(&sample), sample.prompt.question.clone()].concat());
    let others = sample.story.questions_at_end(Task::new(1).unwrap()).unwrap();
    assert!(others.iter().any(|q| babilong.prompt(q).unwrap() == sample.prompt));
}

#[test]
fn gaps_are_drawn_evenly_over_the_text() {
    let babilong = &*BABILONG;
    // One fact: its gap is uniform over n + 1. Quarters of the text get a quarter of the samples each, within four standard errors.
    let fact = "Mary went to the garden.".to_string();
    let question = babi::Question { text: "Where is Mary?".into(), answer: "garden".into(), supports: vec![0] };
    let story = babi::Sample { facts: vec![fact], question };
    let (samples, mut quarters, mut first, mut last) = (2000, [0; 4], 0, 0);
    for seed in 0..samples {
        let sample = babilong.sample(story.clone(), Length(1000), Random::of(&[seed])).unwrap();
        let pieces = pieces(&sample);
        let (at, n) = (pieces.iter().position(|p| p.0).unwrap(), pieces.len() - 1);
        quarters[4 * at / (n + 1)] += 1;
        first += u64::from(at == 0);
        last += u64::from(at == n);
    }
    // Gaps are whole, so quarters of n + 1 gaps differ by one gap: some 3 in 100 of them.
    assert!(quarters.iter().all(|q| (380..=620).contains(q)), "{quarters:?}");
    assert!(first > 20 && last > 20, "the first and the last gap are used as well: {first}, {last}");
}

#[test]
fn the_same_seed_gives_the_same_tokens_on_any_machine() {
    let (babilong, again) = (&*BABILONG, open());
    let hash = |tokens: &[i32]| tokens.iter().fold(0u64, |h, t| Random::of(&[h, *t as u64]).bits());
    let mut hashes = Vec::new();
    for (stories, others) in [(published(2, 5), published(2, 6)), (simulated(3, 5), simulated(3, 6))] {
        // Asked in another order, after another history.
        let late = again.draw(&stories, Length(8000), 3).unwrap();
        let early = again.draw(&stories, Length(8000), 2).unwrap();
        let tokens: Vec<Vec<i32>> = (0..4).map(|n| context(&babilong.draw(&stories, Length(8000), n).unwrap())).collect();
        assert!(tokens[2] == context(&early) && tokens[3] == context(&late));
        assert!((0..4).all(|i| (0..i).all(|j| tokens[i] != tokens[j])));
        assert!(tokens[0] != context(&babilong.draw(&others, Length(8000), 0).unwrap()), "another seed, another sample");
        hashes.push(hash(&tokens[0]));
    }
    assert_eq!(
        hashes,
        [14753368335323259298, 355856376568827490],
        "what was written elsewhere with this seed would not be made again"
    );
}

#[test]
fn every_published_question_comes_once_before_any_again() {
    let stories = published(1, 9);
    let mut seen: Vec<String> = (0..1000).map(|n| format!("{:?}", stories.get(n, 0).unwrap())).collect();
    assert_eq!(seen[0], format!("{:?}", stories.get(1000, 0).unwrap()));
    let mut file: Vec<String> = babi::file::samples(&data(Data::Babi), Task::new(1).unwrap(), Split::Test)
        .unwrap()
        .iter()
        .map(|s| format!("{s:?}"))
        .collect();
    assert_ne!(seen, file, "the order is the seed's");
    seen.sort();
    file.sort();
    assert_eq!(seen, file);
}

#[test]
fn a_story_that_is_too_long_gives_place_to_one_that_fits() {
    let babilong = &*BABILONG;
    for stories in [published(3, 1), simulated(3, 1)] {
        for number in 0..20 {
            assert_eq!(context(&babilong.draw(&stories, Length(200), number).unwrap()).len(), 200);
        }
        let error = babilong.draw(&stories, Length(10), 0).err().unwrap().to_string();
        assert!(error.contains("length 10") && error.contains("qa3"), "{error}");
    }
    let long = simulated(3, 1).get(0, 0).unwrap();
    let error = babilong.sample(long, Length(5), Random::new(0)).err().unwrap().to_string();
    assert!(error.contains("which its facts take, got 5"), "{error}");
}

#[test]
fn data_that_is_not_there_is_said_to_be_missing_by_name() {
    let error = find_data(Data::Babi, Some(Path::new("no/such/folder"))).unwrap_err().to_string();
    assert!(error.contains("no/such/folder: expected a folder, found nothing"), "{error}");
    let file = data(Data::Babi).join("LICENSE.txt");
    assert!(find_data(Data::Bpe, Some(&file)).unwrap_err().to_string().contains("found a file"));
    // Tests run in the crate's folder, which lies in the project's.
    assert!(find_data(Data::TrainBooks, None).is_ok());
}

/// Samples with a book of short lines: the project's have a paragraph in each.
fn in_form(form: Form) -> Babilong {
    let folder = tempfile::tempdir().unwrap();
    let book = "It rained all day upon the roofs\nof the old town, and nobody came. ".repeat(200);
    std::fs::write(folder.path().join("rain.txt"), book).unwrap();
    let books = Books::open_in(form, folder.path(), BABILONG.tokenizer().clone()).unwrap();
    let babilong = Babilong::new(Arc::new(books)).unwrap();
    // Read once, so that the folder may go.
    babilong.draw(&published(1, 3), Length(1000), 0).unwrap();
    babilong
}

#[test]
fn a_form_says_spaces_line_breaks_and_tokens() {
    for (form, tokens, before_fact, before_background) in [(Form::Now, 700, " ", " "), (Form::Paper, 1004, "", "")] {
        let babilong = in_form(form);
        let mut breaks = 0;
        for number in 0..20 {
            let sample = babilong.draw(&published(1, 3), Length(1000), number).unwrap();
            assert_eq!((sample.length(), context(&sample).len()), (tokens, tokens), "{form}");
            for (fact, piece) in pieces(&sample) {
                let text = babilong.tokenizer().decode(&piece).unwrap();
                let before = if fact { before_fact } else { before_background };
                assert_eq!(text.starts_with(' '), before == " ", "{form}: {text:?}");
                breaks += text.matches('\n').count();
            }
        }
        assert!(breaks > 0, "{form}: lines are kept");
    }
    let error = in_form(Form::Now).draw(&published(1, 3), Length(200), 0).err().unwrap().to_string();
    assert!(error.contains("more than 300 tokens"), "{error}");
}

#[test]
fn samples_of_a_file_have_its_contexts_and_what_is_missing_is_named() {
    let babilong = Babilong::new(Arc::new(Books::none(BABILONG.tokenizer().clone()))).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("given.jsonl");
    let line = |more: &str| {
        format!(r#"{{"input":" Mary went to the garden. It rained.","question":"Where is Mary?","target":"garden"{more}}}"#)
    };
    let read = |text: &str, otherwise, most| {
        std::fs::write(&path, text).unwrap();
        given::read(&babilong, &path, otherwise, most)
    };
    let of = r#","task":"qa1","length":"4k","seed":0"#;
    let all =
        read(&format!("{}\n\n{}\n{}\n", line(of), line(r#","task":"qa2","length":"0k""#), line(of)), (None, None), None).unwrap();
    let sizes: Vec<_> = all.iter().map(|g| (g.task.number(), g.length.0, g.samples.len())).collect();
    assert_eq!(sizes, [(1, 4000, 2), (2, 0, 1)]);
    let sample = &all[0].samples[0];
    assert_eq!(context(sample), babilong.tokenizer().encode(" Mary went to the garden. It rained.").unwrap());
    assert_eq!(sample.prompt, babilong.prompt(&sample.story.question).unwrap());
    let marked = read(&format!("\u{feff}{}\n", line(of)), (None, None), None).unwrap();
    assert_eq!(marked[0].samples[0].prompt, sample.prompt, "a byte order mark is no text");
    let otherwise = (Some(Task::new(3).unwrap()), Some(Length(1000)));
    let named = read(&format!("{}\n{}\n", line(""), line("")), otherwise, Some(1)).unwrap();
    assert_eq!((named[0].task.number(), named[0].length.0, named[0].samples.len()), (3, 1000, 1));
    for (text, part) in [
        (line(""), "line 1: expected a field task"),
        (line(r#","task":"qa1""#), "line 1: expected a field length"),
        (line(r#","task":"qa30""#), "line 1: task: expected qa1 to qa20, got qa30"),
        ("{}".into(), "line 1: expected a sample as JSON"),
        (String::new(), "found none"),
    ] {
        let error = read(&text, (None, None), None).err().unwrap().to_string();
        assert!(error.contains("given.jsonl") && error.contains(part), "{error}");
    }
    let error = babilong.draw(&published(1, 0), Length(1000), 0).err().unwrap().to_string();
    assert!(error.contains("books"), "{error}");
}
