//! The README and the guides as a reader tries them: their commands, their flags, and their links.
//!
//! Blocks marked `console` are run, all of a document in one folder that has the project's data, models, recipes and results: lines after `$ `
//! are commands, the others what they print. How long something took is not compared, nor how fast it went. Of commands in all other blocks
//! the subcommands and flags are looked up in the program's own help.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Every document of the project, by its path from the root.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !["target", "runs", "shared"].contains(&name.as_str()) && !name.starts_with('.') {
                folders.push(path);
            } else if name.ends_with(".md") {
                found.push(path.strip_prefix(root()).unwrap().to_path_buf());
            }
        }
    }
    found.sort();
    found
}

fn read(document: &Path) -> String {
    std::fs::read_to_string(root().join(document)).unwrap()
}

/// The fenced blocks of a document: what they are marked with, and their lines.
fn blocks(text: &str) -> Vec<(String, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        match (line.strip_prefix("```"), open) {
            (Some(mark), false) => {
                found.push((mark.trim().into(), Vec::new()));
                open = true;
            }
            (Some(_), true) => open = false,
            (None, true) => found.last_mut().unwrap().1.push(line.into()),
            (None, false) => {}
        }
    }
    found
}

/// Commands and what they print.
fn commands(lines: &[String]) -> Vec<(String, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for line in lines {
        match line.strip_prefix("$ ") {
            Some(command) => found.push((command.into(), Vec::new())),
            None => found.last_mut().expect("a block begins with a command").1.push(line.clone()),
        }
    }
    found
}

/// A line without numbers that are times and rates.
fn timeless(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let is_time = |i: usize| {
        let unit = words.get(i + 1).map(|unit| unit.trim_matches([',', ';', '.', '(', ')']));
        words[i].starts_with(|c: char| c.is_ascii_digit()) && unit.is_some_and(|u| ["s", "ms", "tokens/s", "minutes"].contains(&u))
    };
    let shown: Vec<&str> = (0..words.len()).map(|i| if is_time(i) { "N" } else { words[i] }).collect();
    shown.join(" ").trim_end().to_string()
}

/// Runs the commands that a document shows, in a folder of its own. Gives how many there are.
#[cfg(unix)]
fn run_shown(document: &Path) -> usize {
    let program = Path::new(env!("CARGO_BIN_EXE_armt")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let blocks = blocks(&read(document));
    let shown: Vec<_> = blocks.iter().filter(|(mark, _)| mark == "console").flat_map(|(_, lines)| commands(lines)).collect();
    let place = tempfile::tempdir().unwrap();
    for folder in ["data", "models", "recipes", "results"] {
        std::os::unix::fs::symlink(root().join(folder), place.path().join(folder)).unwrap();
    }
    for (command, expected) in &shown {
        let output = Command::new("sh").args(["-c", command]).current_dir(place.path()).env("PATH", &path).output().unwrap();
        let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}: {command}: {errors}", document.display());
        if !expected.is_empty() {
            let (said, expected): (Vec<String>, Vec<String>) =
                (said.lines().map(timeless).collect(), expected.iter().map(|l| timeless(l)).collect());
            assert_eq!(said, expected, "{}: {command}", document.display());
        }
    }
    shown.len()
}

#[cfg(unix)]
#[test]
fn commands_of_the_guides_print_what_they_say() {
    let documents = documents();
    let run: usize = std::thread::scope(|scope| {
        let running: Vec<_> = documents.iter().map(|document| scope.spawn(|| run_shown(document))).collect();
        running.into_iter().map(|run| run.join().unwrap()).sum()
    });
    assert!(run >= 8, "only {run} commands were found");
}

/// The program's help for a subcommand, or nothing where there is none.
fn help(words: &[&str]) -> Option<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_armt")).args(words).arg("--help").output().unwrap();
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn every_command_that_a_document_names_has_its_flags() {
    let mut known: HashMap<Vec<String>, Option<String>> = HashMap::new();
    let mut looked = 0;
    for document in documents() {
        for (_, lines) in blocks(&read(&document)) {
            // A command may go on in the next line.
            let text = lines.join("\n").replace("\\\n", " ");
            for line in text.lines() {
                let line = line.split(" #").next().unwrap_or_default();
                for command in line.split(['|', ';', '(', ')', '"']).filter_map(|c| c.split("armt ").nth(1).filter(|_| begins(c))) {
                    let words: Vec<&str> = command.split_whitespace().collect();
                    let Some(subcommand) = words.first().filter(|w| w.chars().all(|c| c.is_ascii_lowercase())) else { continue };
                    let task = ["data", "memory"].contains(subcommand).then(|| words.get(1).copied()).flatten();
                    let path: Vec<&str> = [*subcommand].into_iter().chain(task).collect();
                    let asked = path.iter().map(|word| word.to_string()).collect();
                    let help = known.entry(asked).or_insert_with(|| help(&path)).as_ref();
                    let help = help.unwrap_or_else(|| panic!("{}: {line}: there is no `armt {subcommand}`", document.display()));
                    let flags: BTreeSet<&str> = help.split([' ', '\n', ',', '=']).filter(|w| w.starts_with("--")).collect();
                    for flag in words.iter().filter(|w| w.starts_with("--") && w.len() > 2) {
                        let flag = flag.split('=').next().unwrap_or_default();
                        assert!(flags.contains(flag), "{}: {line}: `armt {subcommand}` has no {flag}", document.display());
                    }
                    looked += 1;
                }
            }
        }
    }
    assert!(looked > 40, "only {looked} commands were found");
}

/// Whether a piece of a line begins with the program's name, with variables and a prompt before it at most.
fn begins(piece: &str) -> bool {
    let before = piece.split("armt ").next().unwrap_or_default().trim_start_matches("$ ").trim();
    before.is_empty() || before.ends_with('=') || before.ends_with("do")
}

/// What a heading is linked by.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase().replace('`', "");
    text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_lead_to_files_and_headings_that_are_there() {
    let mut broken = Vec::new();
    for document in documents() {
        let text = read(&document);
        let folder = document.parent().unwrap().to_path_buf();
        // Links in code are none.
        let prose: Vec<&str> = text.split("```").step_by(2).collect();
        for (at, _) in prose.join("").match_indices("](") {
            let prose = prose.join("");
            let link = prose[at + 2..].split(')').next().unwrap_or_default().to_string();
            if link.starts_with("http") || link.is_empty() {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { document.clone() } else { folder.join(file) };
            if !root().join(&target).exists() {
                broken.push(format!("{}: {link}: there is no such file", document.display()));
            } else if !heading.is_empty() && !read(&target).lines().filter(|l| l.starts_with('#')).any(|l| anchor(l) == heading) {
                broken.push(format!("{}: {link}: there is no such heading", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
