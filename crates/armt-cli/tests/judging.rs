//! Models judged and their figures drawn, as a user types it: `armt eval` of retrieval, `armt bench` and `armt report`.

#![allow(clippy::unwrap_used)]

use std::fs::read;

mod support;
use support::{Place, text};

#[test]
fn a_model_is_judged_on_retrieval_and_the_curve_is_drawn() {
    let place = Place::new();
    place.good("convert gpt2 model --kind associative --tokens 2 --d-mem 4 --segment 5");
    let line = "eval model --task remember --pairs 1,3 --samples 10 --batch 4 --device cpu --out a.json";
    let table = place.good(line);
    let words: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(words.len(), 3, "{table}");
    assert_eq!((words[0][0], words[1][0], words[2][0]), ("pairs", "1", "3"));
    let report: serde_json::Value = serde_json::from_slice(&read(place.path("a.json")).unwrap()).unwrap();
    assert_eq!(
        (report["model"].as_str(), report["key_size"].as_u64(), report["task"].as_str()),
        (Some("model"), Some(2), Some("remember"))
    );
    assert_eq!((report["points"][1]["pairs"].as_u64(), report["points"][1]["samples"].as_u64()), (Some(3), Some(10)));
    let first = read(place.path("a.json")).unwrap();
    place.good(line);
    assert!(first == read(place.path("a.json")).unwrap(), "equal seeds, equal reports");

    place.good("eval model --task rewrite --pairs 300 --samples 2 --device cpu --out b.json");
    place.good("report a.json b.json --out plot.svg --names one,<two>");
    let svg = text(&read(place.path("plot.svg")).unwrap());
    assert!(
        svg.starts_with("<svg") && svg.contains(">one<") && svg.contains("&lt;two&gt;") && svg.contains("Remember and Rewrite")
    );
    place.good("report a.json a.json --metric stored --out stored.svg");
    assert!(text(&read(place.path("stored.svg")).unwrap()).contains("all of them"));

    let said = place.bad("report a.json b.json --out mixed.svg --names one,one");
    assert!(said.contains("one: expected reports of one task under one name") && !place.path("mixed.svg").exists(), "{said}");

    std::fs::create_dir_all(place.path("results/remember")).unwrap();
    std::fs::write(place.path("README.md"), "<!-- results: remember -->\n<!-- end -->\n").unwrap();
    for seed in 1..3 {
        let named = format!("--name ARMT --trained-pairs 2 --minutes 1.5 --trained-on cores --symbols 32 --seed {seed}");
        place.good(&format!(
            "eval model --task remember --pairs 1,300 --samples 2 --device cpu {named} --out results/remember/armt.seed{seed}.json"
        ));
    }
    let said = place.good("report results --readme README.md");
    assert_eq!(said, "results/remember/stored-pairs.svg\nREADME.md\n");
    let table = text(&read(place.path("README.md")).unwrap());
    assert!(
        table.contains("| 1 | 300 |") && table.contains("\n| ARMT | ") && table.contains(" | 2 | - | 1.5 of cores | 816 | 2 |\n"),
        "{table}"
    );
    place.good("convert gpt2 short --kind associative --tokens 2 --d-mem 4 --segment 4");
    let table = place.good("eval short --task remember --samples 2 --device cpu");
    assert_eq!(table.lines().count(), 5, "16 keys are enough for 1, 2, 5 and 10 pairs: {table}");
}

#[test]
fn what_cannot_be_judged_or_drawn_is_refused_with_a_reason() {
    let place = Place::new();
    place.good("convert gpt2 model --kind associative --tokens 2 --d-mem 4 --segment 5");
    std::fs::write(place.path("no.json"), "{}").unwrap();
    for (line, message) in [
        ("eval babilong-qa1 --task remember --device cpu", "--task remember: expected a model of this task"),
        (
            "eval model --task remember --pairs 257 --device cpu",
            "as many as there are different keys, only 256 of 2 of 16 symbols, got 257",
        ),
        ("eval model --task remember --key-size 3 --device cpu", "expected a model of segments of 6 tokens"),
        ("eval model --task remember --value-size 3 --device cpu", "no room for a key"),
        ("eval model --task remember --symbols 101 --device cpu", "symbols: expected 2 to 100"),
        ("eval model --task remember --symbols 4 --pairs 17 --device cpu", "only 16 of 2 of 4 symbols"),
        ("eval model --task text --text no.json --samples 3", "--samples: --task text has no such setting"),
        ("eval model --task text --text no.json --batch 3", "--batch: --task text has no such setting"),
        ("eval model --task text --text no.json --seed 3", "--seed: --task text has no such setting"),
        ("eval model --task qa --qa no.json --batch 3", "--batch: --task qa has no such setting"),
        ("eval model --task qa --qa no.json --distract .", "--distract: expected --hidden-in"),
        ("eval model --task qa --qa no.json --seed 3", "--seed: expected --distract and --hidden-in"),
        ("eval model --task remember --minutes 0", "expected a number above 0"),
        ("report . --readme README.md", "expected reports of `armt eval`"),
        ("report . --names a", "expected files with them"),
        ("report no.json", "--out: expected the name of a plot"),
        ("report no.json --readme README.md", "--readme: expected one folder"),
        ("report . no.json --out a.svg", "expected a report, got a folder"),
        ("eval gone --task remember", "there is no such folder"),
        ("eval model --task remember --out no/such.json --device cpu", "the folder no does not exist"),
        ("report no.json --out a.svg", "expected a report of `armt eval`"),
        ("report gone.json --out a.svg", "gone.json"),
        ("report no.json --out a.svg --names a,b", "--names: expected 1, one for each file, got 2"),
    ] {
        let said = place.bad(line);
        assert!(said.contains(message), "{line}: {said}");
    }
    assert!(!place.path("a.svg").exists());
}

#[test]
fn figures_of_speed_are_drawn_over_the_size_that_differs() {
    let place = Place::new();
    let bench = "bench train-retrieval --device cpu --batch 1 --layers 1 --repeats 1";
    let short = place.good(&bench.replace("train-retrieval", "w2 --segments 1"));
    assert!(
        short.contains("train-retrieval") && place.bad("bench w9 --device cpu").contains("read-gpt2, train-retrieval"),
        "{short}"
    );
    place.good(&format!("{bench} --segments 1,2 --json tokens.json"));
    let table = place.good("report tokens.json --out rate.svg");
    assert!(table.starts_with("| tokens of a text |") && table.contains("| 12 | diagonal |"), "{table}");
    place.good("report tokens.json --metric memory --out memory.svg");
    for (plot, label) in [("rate.svg", "tokens/s"), ("memory.svg", "peak memory (GiB)")] {
        assert!(text(&read(place.path(plot)).unwrap()).contains(label), "{plot}");
    }
    assert!(place.bad("report tokens.json --metric stored --out a.svg").contains("none or memory"));
    place.good(&format!("{bench} --segments 1 --json one.json"));
    assert!(place.bad("report one.json --out a.svg").contains("differ in one size"));
}
