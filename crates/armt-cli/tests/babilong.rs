//! `armt eval --task babilong` and `armt report` of its results, as a user types them.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

mod support;
use support::Place;

/// A folder with a tiny model and a book.
fn place() -> Place {
    let place = Place::new().with_model();
    std::fs::create_dir(place.path("books")).unwrap();
    let book: String = (0..300).map(|i| format!("In the {i} of all the numbers he found the same as before. ")).collect();
    std::fs::write(place.path("books/book.txt"), book).unwrap();
    place
}

/// The command with what all tests say.
fn eval(more: &str) -> String {
    format!("eval model --task babilong --books books --device cpu {more}")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn a_model_is_judged_cell_by_cell_and_every_answer_can_be_kept() {
    let place = place();
    let said =
        place.good(&eval("--questions qa1,qa20 --lengths 0k,300 --samples 3 --batch 2 --label-match --csv answers --out a.json"));
    let words: Vec<Vec<&str>> = said.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(words[0], ["task", "length", "samples", "exact", "match", "95", "%", "label", "match", "95", "%"]);
    let heads: Vec<(&str, &str, &str)> = words[1..].iter().map(|w| (w[0], w[1], w[2])).collect();
    assert_eq!(heads, [("qa1", "0k", "3"), ("qa1", "300", "3"), ("qa20", "0k", "3"), ("qa20", "300", "3")]);
    let report: Value = serde_json::from_str(&read(&place.path("a.json"))).unwrap();
    assert_eq!((report["task"].as_str(), report["cells"].as_array().unwrap().len()), (Some("babilong"), 4));
    let settings = &report["settings"];
    assert_eq!(
        (settings["model"].as_str(), settings["batch"].as_u64(), settings["device"].as_str()),
        (Some("model"), Some(2), Some("cpu"))
    );
    let answers = read(&place.path("answers/qa1_300_instruction_no_examples_no_post_prompt_no.csv"));
    assert!(answers.starts_with("target,output,question\n") && answers.matches("?\n").count() == 3, "{answers}");
    assert_eq!(std::fs::read_dir(place.path("answers")).unwrap().count(), 4);
    // The same again is read from the file, and an answer that is missing is made again.
    let again = eval("--questions qa1,qa20 --lengths 0k,300 --samples 3 --batch 2 --label-match --csv answers --out a.json");
    assert_eq!(place.good(&again), format!("{said}nothing left to judge: all of it is in a.json\n"));
    std::fs::remove_file(place.path("answers/qa1_300_instruction_no_examples_no_post_prompt_no.csv")).unwrap();
    assert_eq!(place.good(&again), said);
    assert_eq!(read(&place.path("answers/qa1_300_instruction_no_examples_no_post_prompt_no.csv")), answers);
    for option in ["--without-facts", "--shuffled", "--simulated"] {
        place.good(&eval(&format!("--questions qa1 --lengths 0k,300 --samples 2 {option}")));
    }
}

#[test]
fn a_report_goes_on_with_missing_cells_to_the_same_file() {
    let place = place();
    place.good(&eval("--questions qa1,qa2 --lengths 0k,400 --samples 2 --out whole.json"));
    place.good(&eval("--questions qa2 --lengths 400 --samples 2 --out parts.json"));
    place.good(&eval("--questions qa1 --lengths 400,0k --samples 2 --out parts.json"));
    place.good(&eval("--questions qa1,qa2 --lengths 0k,400 --samples 2 --out parts.json"));
    assert_eq!(read(&place.path("whole.json")), read(&place.path("parts.json")));
    let before = read(&place.path("whole.json"));
    for (more, part) in [
        ("--samples 2 --seed 1", "(seed 0, now 1)"),
        ("--samples 2 --batch 1", "(batch 16, now 1)"),
        ("--samples 2 --shuffled", "(facts \"told\", now \"shuffled\")"),
    ] {
        let said = place.bad(&eval(&format!("--questions qa1 --lengths 0k,400 {more} --out whole.json")));
        assert!(said.contains("whole.json: it has results of other settings") && said.contains(part), "{said}");
    }
    assert_eq!(read(&place.path("whole.json")), before);
    // A cell stays if it has as many samples as are asked for, and is judged again if it has fewer.
    place.good(&eval("--questions qa1 --lengths 0k --samples 1 --out whole.json"));
    assert_eq!(read(&place.path("whole.json")), before);
    place.good(&eval("--questions qa1 --lengths 0k --samples 3 --out whole.json"));
    let report: serde_json::Value = serde_json::from_str(&read(&place.path("whole.json"))).unwrap();
    let samples: Vec<_> = report["cells"].as_array().unwrap().iter().map(|c| c["samples"].as_u64().unwrap()).collect();
    assert_eq!(samples, [3, 2, 2, 2]);
}

#[test]
fn answers_of_another_run_are_neither_taken_for_this_ones_nor_replaced() {
    let place = place();
    let line = |more: &str| eval(&format!("--questions qa1 --lengths 0k --csv answers {more}"));
    let file = place.path("answers/qa1_0k_instruction_no_examples_no_post_prompt_no.csv");
    place.good(&line("--samples 2 --out a.json"));
    let answers = read(&file);
    for more in ["--samples 2", "--samples 2 --seed 1", "--samples 3 --seed 1 --out b.json"] {
        let said = place.bad(&line(more));
        assert!(said.contains("post_prompt_no.csv: it exists already and its answers are of no report"), "{more}: {said}");
    }
    assert!(!place.path("b.json").exists() && read(&file) == answers);
    std::fs::write(&file, format!("{answers}own,line,here\n")).unwrap();
    assert!(place.bad(&line("--samples 2 --out a.json")).contains("its answers are of no report"));
    std::fs::remove_file(&file).unwrap();
    assert!(place.bad(&line("--samples 1 --out a.json")).contains("--samples: expected 2"));
    place.good(&line("--samples 2 --out a.json"));
    assert_eq!(read(&file), answers);
    // More samples have more answers.
    place.good(&line("--samples 3 --out a.json"));
    assert!(read(&file).starts_with(&answers) && read(&file).lines().count() == 4);
}

#[test]
fn a_file_of_samples_that_has_changed_is_another_file() {
    let place = place();
    let make = |seed| {
        place.good(&format!("data babilong --books books --questions qa1 --lengths 0k --samples 2 --seed {seed} --out s.jsonl"))
    };
    let line = "eval model --task babilong --file s.jsonl --out a.json --device cpu";
    make(0);
    place.good(line);
    assert!(place.good(line).contains("nothing left to judge"));
    make(1);
    let said = place.bad(line);
    assert!(said.contains("a.json: it has results of other settings (file_hash "), "{said}");
}

#[test]
fn what_no_machine_could_hold_is_refused_by_its_option() {
    let place = place();
    std::fs::write(place.path("q.jsonl"), "{\"context\": \"a b\", \"question\": \"c\", \"answer\": \"d\"}\n").unwrap();
    let qa = "eval model --task qa --qa q.jsonl --distract books --device cpu";
    for (line, option) in [
        (eval("--questions qa1 --lengths 99999999999M --samples 1"), "--lengths"),
        (eval("--questions qa1 --lengths 0k --simulated --samples 99999999999999"), "--samples"),
        (eval("--questions qa1 --lengths 0k --simulated --batch 99999999999 --samples 99999999999"), "--"),
        (format!("{qa} --hidden-in 99999999999M"), "--hidden-in"),
        ("data babilong --books books --questions qa1 --lengths 99999999999M --samples 1 --out s.jsonl".into(), "--lengths"),
    ] {
        let said = place.bad(&line);
        assert!(said.contains(option) && said.contains("bytes"), "{line}: {said}");
    }
}

/// `armt eval .. --out r.json | head -1`
#[test]
fn a_report_is_finished_though_nobody_listens() {
    let place = place();
    let closed = || std::io::pipe().unwrap().1;
    std::fs::write(place.path("text.txt"), "a b c d ".repeat(50)).unwrap();
    let run = |line: &str| place.command(line).stdout(closed()).status().unwrap();
    assert!(run(&eval("--questions qa1,qa2 --lengths 0k,300 --samples 2 --out a.json")).success());
    let report: Value = serde_json::from_str(&read(&place.path("a.json"))).unwrap();
    assert_eq!(report["cells"].as_array().unwrap().len(), 4);
    assert!(run("eval model --task text --text text.txt --out text.json --device cpu").success());
    assert!(place.path("text.json").exists() && place.path("text.svg").exists());
}

/// Ctrl-C within a long context.
#[cfg(unix)]
#[test]
fn questions_about_long_contexts_can_be_interrupted() {
    let place = place();
    std::fs::write(place.path("q.jsonl"), "{\"context\": \"a b\", \"question\": \"c\", \"answer\": \"d\"}\n").unwrap();
    let line = "eval model --task qa --qa q.jsonl --distract books --hidden-in 0k,0k,2M --device cpu --out a.json";
    let mut child = place.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(said.next().unwrap().unwrap().contains("questions"));
    assert!(said.next().unwrap().unwrap().trim_start().starts_with("0k"));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    // The same length is judged once.
    assert_eq!(said.map(Result::unwrap).collect::<Vec<_>>(), ["stopped: a.json has the lines so far"]);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// Ctrl-C within a long cell: the cells before it are kept, and the same command finishes the work.
#[cfg(unix)]
#[test]
fn an_interrupted_command_keeps_its_cells_and_goes_on_to_the_same_file() {
    let place = place();
    let line = |out: &str| eval(&format!("--questions qa1 --lengths 0k,60k --samples 2 --simulated --out {out}"));
    place.good(&line("whole.json"));
    let mut child = place.command(&line("part.json")).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(said.next().unwrap().unwrap().starts_with("task"));
    assert!(said.next().unwrap().unwrap().starts_with("qa1"));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let rest: Vec<String> = said.map(Result::unwrap).collect();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130), "{rest:?}");
    assert_eq!(rest, ["stopped: part.json has 1 cell; the same command goes on with the others"]);
    assert_ne!(read(&place.path("whole.json")), read(&place.path("part.json")));
    place.good(&line("part.json"));
    assert_eq!(read(&place.path("whole.json")), read(&place.path("part.json")));
}

#[test]
fn a_model_with_a_small_vocabulary_is_converted_reads_answers_and_is_judged() {
    let place = place();
    // As many numbers as the model has: of 269 tokens 260 are kept, <|endoftext|> as 259, and the others share 9.
    let kept: Vec<String> = (0..259).chain([268]).map(|t| t.to_string()).collect();
    let vocabulary = format!(r#"{{"tokens": 269, "kept": [{}], "hashed": 9}}"#, kept.join(", "));
    std::fs::write(place.path("gpt2/vocabulary.json"), &vocabulary).unwrap();
    place.good("convert gpt2 small --kind associative --tokens 2 --d-mem 4 --segment 16");
    assert_eq!(read(&place.path("small/vocabulary.json")).replace(' ', "").trim(), vocabulary.replace(' ', ""));
    place.good("read small books/book.txt --memory book.mem --device cpu");
    place.good("ask small --memory book.mem the --device cpu");
    let judged = "--task babilong --books books --questions qa1 --lengths 0k,300 --samples 2 --device cpu";
    place.good(&format!("eval small {judged} --csv small.csv"));
    place.good(&format!("eval model {judged} --csv large.csv"));
    let answers = |folder: &str| read(&place.path(folder).join("qa1_300_instruction_no_examples_no_post_prompt_no.csv"));
    assert_ne!(answers("small.csv"), answers("large.csv"), "the tokens were other ones");
}

#[test]
fn results_are_drawn_by_what_they_hold_and_a_readme_gets_their_table() {
    let place = place();
    std::fs::create_dir_all(place.path("results/babilong")).unwrap();
    for (model, seed) in [("armt", 0), ("rmt.seed1", 1), ("rmt.seed2", 2)] {
        let named = if seed == 0 { "--name ARMT" } else { "" };
        place.good(&eval(&format!(
            "--questions qa1,qa2 --lengths 0k,300 --samples 2 --label-match --seed {seed} {named} --out results/babilong/{model}.json"
        )));
    }
    let one = "results/babilong/armt.json";
    place.good(&format!("report {one} --out heat.svg"));
    assert!(read(&place.path("heat.svg")).contains("exact match in %: ARMT"));
    place.good(&format!("report {one} --chart curves --metric label-match --out lines.svg"));
    assert!(
        read(&place.path("lines.svg")).contains(">BABILong: ARMT<") && read(&place.path("lines.svg")).contains(">label match<")
    );
    place.good(&format!("report {one} results/babilong/rmt.seed1.json --out both.svg"));
    assert!(read(&place.path("both.svg")).contains("mean of qa1, qa2"));
    std::fs::write(place.path("README.md"), "<!-- results: babilong -->\n<!-- end -->\n").unwrap();
    assert_eq!(
        place.good("report results --readme README.md"),
        "results/babilong/armt.svg\nresults/babilong/rmt.svg\nresults/babilong/accuracy.svg\nREADME.md\n"
    );
    let table = read(&place.path("README.md"));
    assert!(
        table.contains("| task | form | 0k | 300 | samples | seeds |") && table.contains("\n| ARMT | mean | mixed | "),
        "{table}"
    );
    for (line, part) in [
        (format!("report {one} --metric stored --out x.svg"), "--metric stored"),
        (format!("report {one} --x linear --out x.svg"), "--x"),
        (format!("report {one} results/babilong/rmt.seed1.json --chart heat --out x.svg"), "one model, got 2"),
        (format!("report {one} heat.svg --out x.svg"), "heat.svg: expected a report"),
        ("report heat.svg --chart heat --out x.svg".into(), "--chart: expected reports of BABILong"),
    ] {
        let said = place.bad(&line);
        assert!(said.contains(part), "{line}: {said}");
    }
    assert!(!place.path("x.svg").exists());
}

#[test]
fn what_cannot_be_judged_is_refused_with_a_reason_and_leaves_nothing() {
    let place = place();
    std::fs::create_dir(place.path("bare")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(place.path("model").join(file), place.path("bare").join(file)).unwrap();
    }
    std::fs::create_dir(place.path("small")).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(place.path("model").join(file), place.path("small").join(file)).unwrap();
    }
    std::fs::write(place.path("small/vocabulary.json"), r#"{"tokens": 269, "kept": [1, 268], "hashed": 2}"#).unwrap();
    std::fs::write(place.path("other.json"), "{}").unwrap();
    for (line, part) in [
        (eval("--questions qa21"), "qa1 to qa20"),
        (eval("--questions qa6 --simulated"), "qa1 to qa5"),
        (eval("--lengths 1.5k"), "0k, 16k, 1M"),
        (eval("--questions qa3 --lengths 1k,12 --out new.json"), "length 12: expected room for the facts of qa3"),
        (eval("--samples 0"), "at least 1"),
        (eval("--pairs 3"), "--pairs: --task babilong has no such setting"),
        (eval("--shuffled --without-facts"), "cannot be used with"),
        (eval("--out other.json"), "other.json: expected a report of `armt eval --task babilong`"),
        (eval("--out no/new.json"), "the folder no does not exist"),
        ("eval bare --task babilong --device cpu".into(), "bare: this model has no tokenizer"),
        (
            "eval small --task babilong --device cpu".into(),
            "vocabulary.json: it is for a model of vocab_size 4, but this model's is 269",
        ),
        ("eval gone --task babilong".into(), "there is no such folder"),
        ("eval model --task babilong --books none --device cpu".into(), "none: expected a folder"),
        ("eval model --task remember --lengths 1k --device cpu".into(), "--lengths: --task remember has no such setting"),
    ] {
        let said = place.bad(&line);
        assert!(said.contains(part), "{line}: {said}");
    }
    assert!(!place.path("new.json").exists());
    place.good("eval bare --task babilong --bpe model --books books --questions qa1 --lengths 0k --samples 1 --device cpu");
}
