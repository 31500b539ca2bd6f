//! The program as it is after an installation: far from the project, with nothing but what it carries.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::PathBuf;
use std::process::{Command, Output};

use support::text;

/// A folder with a copy of the program, and with a home of its own.
struct Far {
    place: tempfile::TempDir,
}

impl Far {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        std::fs::copy(env!("CARGO_BIN_EXE_armt"), place.path().join("armt")).unwrap();
        std::fs::create_dir(place.path().join("work")).unwrap();
        Far { place }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join("work").join(name)
    }

    fn run(&self, line: &str, variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(self.place.path().join("armt"));
        command.current_dir(self.path("")).env_remove("ARMT_DATA").env("XDG_DATA_HOME", self.place.path().join("home"));
        let words: Vec<&str> = line.split('"').collect();
        // Every second part was between quotes.
        let words = words.iter().enumerate();
        let words = words.flat_map(|(i, part)| if i % 2 == 1 { vec![*part] } else { part.split_whitespace().collect() });
        command.envs(variables.iter().copied()).args(words).output().unwrap()
    }

    fn good(&self, line: &str) -> String {
        let out = self.run(line, &[]);
        assert!(out.status.success(), "{line}: {}", text(&out.stderr));
        text(&out.stdout)
    }
}

#[test]
fn models_recipes_and_data_are_found_by_name_anywhere() {
    let far = Far::new();
    std::fs::write(far.path("a.txt"), "It was late. Mary went to the kitchen. John moved to the garden.").unwrap();
    far.good("read babilong-qa1 a.txt --memory a.mem --device cpu");
    assert_eq!(far.good("ask babilong-qa1 --memory a.mem \"Where is Mary?\" --device cpu"), "kitchen\n");
    let table = far.good("eval babilong-qa1 --task babilong --questions qa1 --lengths 1k --samples 2 --device cpu");
    assert!(table.contains("qa1"), "{table}");
    far.good("data babilong --questions qa2 --lengths 1k --samples 1 --out b.jsonl");
    let small = "--set stage.1.batch=2 --set eval.samples=2 --set eval.every=1 --set stage.1.steps=2 --device cpu";
    far.good(&format!("train remember-armt --out run --set stages=1 {small}"));
    // A run's folder stands for its best model.
    let table = far.good("eval run --task remember --pairs 1,3 --samples 2 --device cpu");
    assert_eq!(table.lines().count(), 3, "{table}");
    far.good(&format!("train rewrite-rmt.toml --out extended --steps 1 {small}"));
    // A recipe of one's own may extend one that is carried, and begin from a model that is.
    let own = "extends = \"babilong-qa1-background\"\n[model]\nfrom = \"babilong-qa1\"\n";
    std::fs::write(far.path("own.toml"), own).unwrap();
    far.good(&format!("train own.toml --out own --set stages=1 --set stage.1.segments=2 {small}"));
    // Recipes of texts and questions name the project's data by their paths in it.
    far.good("train questions-small --out people --set stage.1.steps=2 --set eval.every=1 --device cpu");
    far.good("eval people --task qa --qa data/questions/people.jsonl --samples 2 --distract data/books/test --hidden-in 0k,1k --device cpu");
    far.good("data check data/questions/people.jsonl --model books");
    far.good("convert books books-armt --tokens 2 --d-mem 8 --segment 64");
    far.good("train text-small --out text --set stages=1 --set stage.1.steps=1 --set eval.samples=1 --device cpu");

    for (line, variables, said) in [
        ("read nothing a.txt --memory b.mem", &[][..], "or a model that comes with the program: babilong-qa1"),
        ("train nothing --out x", &[], "or one that comes with the program: babilong-five-1, "),
        (
            "train recipes/text-small.toml --out x",
            &[],
            "there is no such recipe; `armt train text-small` takes the one that comes with the program",
        ),
        ("data check data/questions/nothing.jsonl", &[], "data/questions/nothing.jsonl: expected a text file"),
        ("eval extended --task rewrite --device cpu", &[], "its latest is extended/last"),
        ("eval babilong-qa1 --task babilong --device cpu", &[("ARMT_DATA", "/nowhere")], "ARMT_DATA"),
        ("eval babilong-qa1 --task babilong --device cpu", &[("XDG_DATA_HOME", "/dev/null/x")], "ARMT_DATA"),
    ] {
        let out = far.run(line, variables);
        assert!(!out.status.success() && text(&out.stderr).contains(said), "{line}: {}", text(&out.stderr));
    }
}
