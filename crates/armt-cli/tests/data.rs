//! `armt data` as a user types it.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Runs the command in a folder that has no data.
fn armt(place: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_armt"));
    command.current_dir(place).env("ARMT_DATA", concat!(env!("CARGO_MANIFEST_DIR"), "/../../data"));
    command.args(["data", "babilong"]).args(line.split(' ').filter(|w| !w.is_empty())).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn good(place: &Path, line: &str) -> String {
    let out = armt(place, line);
    assert!(out.status.success(), "{line}: {}", text(&out.stderr));
    text(&out.stdout)
}

fn bad(place: &Path, line: &str) -> String {
    let out = armt(place, line);
    assert!(!out.status.success(), "{line} went well");
    let said = text(&out.stderr);
    assert_eq!(said.lines().filter(|l| l.starts_with("error: ")).count(), 1, "{said}");
    said
}

fn lines(path: PathBuf) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn samples_of_every_task_and_length_are_written_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let said = good(folder.path(), "--questions qa1,qa20 --lengths 0k,1k,2500 --samples 3 --seed 7 --out out.jsonl");
    assert!(said.starts_with("out.jsonl: 18 samples, ") && said.contains(" tokens, "), "{said}");
    assert!(!folder.path().join("out.jsonl.part").exists());
    let lines = lines(folder.path().join("out.jsonl"));
    let heads: Vec<(&str, &str, u64)> =
        lines.iter().map(|l| (l["task"].as_str().unwrap(), l["length"].as_str().unwrap(), l["sample"].as_u64().unwrap())).collect();
    let expected = ["qa1", "qa20"]
        .into_iter()
        .flat_map(|t| ["0k", "1k", "2500"].into_iter().flat_map(move |l| (0..3).map(move |s| (t, l, s))));
    assert_eq!(heads, expected.collect::<Vec<_>>());
    for line in &lines {
        let tokens = line["tokens"].as_u64().unwrap();
        match line["length"].as_str().unwrap() {
            "0k" => assert!((5..300).contains(&tokens)),
            "1k" => assert_eq!(tokens, 1000),
            _ => assert_eq!(tokens, 2500),
        }
        assert_eq!(line["seed"], 7);
        assert!(line["question"].as_str().unwrap().ends_with('?'));
        let (input, target) = (line["input"].as_str().unwrap(), line["target"].as_str().unwrap());
        assert!(line["task"] != "qa1" || input.contains(&format!("the {target}.")), "{target} in {input}");
        assert!(input.len() as u64 > 3 * tokens && !input.contains("  "), "{input}");
    }
    // The story of a number is the same at every length.
    assert!((0..3).all(|i| lines[i]["question"] == lines[3 + i]["question"] && lines[i]["target"] == lines[6 + i]["target"]));
}

#[test]
fn the_same_seed_gives_the_same_bytes_in_a_file_and_in_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let line = |seed, out| format!("--simulated --lengths 1k --samples 2 --split train --seed {seed} --out {out}");
    good(folder.path(), &line(1, "one.jsonl"));
    let one = std::fs::read_to_string(folder.path().join("one.jsonl")).unwrap();
    assert_eq!(one.lines().count(), 10);
    assert_eq!(one, good(folder.path(), &line(1, "-")));
    assert_ne!(one, good(folder.path(), &line(2, "-")));
}

#[test]
fn books_and_stories_of_the_user_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let (books, babi) = (folder.path().join("books"), folder.path().join("babi"));
    std::fs::create_dir(&books).unwrap();
    std::fs::create_dir(&babi).unwrap();
    let book: String = (0..50).map(|i| format!("The wizard had counted up to {i} before the others came back to him. ")).collect();
    std::fs::write(books.join("wizard.txt"), book).unwrap();
    std::fs::write(babi.join("qa9_own_test.txt"), "1 Zelda is no longer in the office.\n2 Is Zelda in the office? \tno\t1\n")
        .unwrap();
    let said = good(folder.path(), "--questions qa9 --lengths 100 --samples 1 --books books --babi babi --out -");
    let line: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((line["question"].as_str(), line["target"].as_str()), (Some("Is Zelda in the office?"), Some("no")));
    let input = line["input"].as_str().unwrap();
    assert!(input.contains("Zelda is no longer in the office.") && input.contains("The wizard had counted"), "{input}");
    std::fs::write(babi.join("qa9_own_test.txt"), "1 Zelda sleeps.\n3 Does she? \tyes\t1\n").unwrap();
    let said = bad(folder.path(), "--questions qa9 --babi babi --out out.jsonl");
    assert!(said.contains("qa9_own_test.txt: line 2: expected number 1 or 2, got 3"), "{said}");
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for (line, part) in [
        ("--questions qa6 --simulated --out o", "qa1 to qa5"),
        ("--questions qa21 --out o", "qa1 to qa20"),
        ("--lengths 1.5k --out o", "0k, 16k, 1M"),
        ("--samples 0 --out o", "--samples"),
        ("--split train --out o", "--simulated makes stories"),
        ("--books nowhere --out o", "nowhere: expected a folder, found nothing"),
        ("--bpe . --out o", "expected tokenizer.json"),
        ("--babi . --out o", "qa1_*_test.txt"),
        ("--questions qa3 --lengths 12 --out o", "length 12"),
        ("--out nowhere/o", "the folder nowhere does not exist"),
    ] {
        let said = bad(folder.path(), line);
        assert!(said.contains(part), "{line}: {said}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
