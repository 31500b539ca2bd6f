//! Kills: whatever moment a command is killed at, the same command, or its `--resume`, comes to the result of one that was let be.
//!
//! Each is killed at some moments spread over the time that it takes unharmed. `ARMT_FUZZ_CASES` tries as many moments.

#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use support::{Place, text};

/// Moments at which a command is killed.
fn moments() -> u32 {
    std::env::var("ARMT_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).map_or(4, |n: u32| n.min(200))
}

/// Runs a command and kills it after a time, unless it ended before.
fn killed(place: &Place, line: &str, after: Duration) {
    let mut child = place.command(line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + after;
    while Instant::now() < end && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    // SIGKILL, of which a program hears nothing. One that has ended cannot be killed any more.
    let _ = child.kill();
    child.wait().unwrap();
}

/// How long a command takes that must succeed.
fn timed(place: &Place, line: &str) -> Duration {
    let start = Instant::now();
    place.good(line);
    start.elapsed()
}

/// Runs `line` to its end, or `again` where that is refused because there is something to go on from.
fn finish(place: &Place, line: &str, again: &str) {
    let out = place.command(line).output().unwrap();
    if !out.status.success() {
        let said = text(&out.stderr);
        let second = place.command(again).output().unwrap();
        assert!(second.status.success(), "{line}: {said}{again}: {}", text(&second.stderr));
    }
}

/// The numbers of a safetensors file, without a header whose order may be any.
fn numbers(path: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut numbers: Vec<_> = file.iter().map(|(name, view)| (name.to_string(), view.data().to_vec())).collect();
    numbers.sort();
    numbers
}

const RECIPE: &str = "seed = 1\n[task]\nsetting = \"remember\"\n[model]\nlayers = 1\nwidth = 16\nheads = 2\ninner = 16\n[memory]\n\
    kind = \"associative\"\ntokens = 2\nd_mem = 4\n[eval]\nevery = 5\nsamples = 8\n[[stage]]\npairs = 2\nbatch = 4\nsteps = 20\n\
    until = \"never\"\n[[stage]]\npairs = 3\nbatch = 4\nsteps = 15\nuntil = 0.0\n";

#[test]
fn a_training_that_is_killed_anywhere_comes_to_the_same_model() {
    let place = Place::new();
    std::fs::write(place.path("recipe.toml"), RECIPE).unwrap();
    let line = |out: &str| format!("train recipe.toml --out {out} --device cpu");
    let time = timed(&place, &line("whole"));
    for i in 0..moments() {
        let run = line(&format!("run{i}"));
        killed(&place, &run, time * (2 * i + 1) / (2 * moments()));
        // And once more on the way.
        killed(&place, &format!("{run} --resume"), time / 4);
        finish(&place, &run, &format!("{run} --resume"));
        for model in ["last", "best"] {
            let file = |run: &str| numbers(&place.path(&format!("{run}/{model}/model.safetensors")));
            assert!(file("whole") == file(&format!("run{i}")), "{model} after a kill at moment {i}");
        }
    }
}

#[test]
fn a_reading_that_is_killed_anywhere_leaves_a_whole_memory_or_none() {
    let place = Place::new().with_model();
    std::fs::write(place.path("text.txt"), "the cat sat in the hat, and in 1999 it went. ".repeat(2000)).unwrap();
    let time = timed(&place, "read model text.txt --memory whole.mem --device cpu");
    for i in 0..moments() {
        let line = format!("read model text.txt --memory {i}.mem --device cpu");
        killed(&place, &line, time * (2 * i + 1) / (2 * moments()));
        finish(&place, &line, &format!("{line} --resume"));
        // Equal to the byte: counts and what was read are in it too.
        let file = |name: &str| std::fs::read(place.path(name)).unwrap();
        assert!(file("whole.mem") == file(&format!("{i}.mem")), "after a kill at moment {i}");
    }
}

#[test]
fn a_judging_that_is_killed_anywhere_comes_to_the_same_report() {
    let place = Place::new().with_model();
    std::fs::create_dir(place.path("books")).unwrap();
    let book: String = (0..300).map(|i| format!("In the {i} of all the numbers he found the same as before. ")).collect();
    std::fs::write(place.path("books/book.txt"), book).unwrap();
    let line = |out: &str| {
        format!("eval model --task babilong --books books --questions qa1,qa2 --lengths 0k,1k --samples 4 --device cpu --out {out}")
    };
    let time = timed(&place, &line("whole.json"));
    for i in 0..moments() {
        let out = format!("{i}.json");
        killed(&place, &line(&out), time * (2 * i + 1) / (2 * moments()));
        place.good(&line(&out));
        let file = |name: &str| std::fs::read(place.path(name)).unwrap();
        assert!(file("whole.json") == file(&out), "after a kill at moment {i}");
    }
}
