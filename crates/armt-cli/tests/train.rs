//! `armt train` from a converted model, as a user types it.

#![allow(clippy::unwrap_used)]

use serde_json::Value;

mod support;
use support::Place;

const RECIPE: &str = r#"
[task]
setting = "babilong"
books = "books"
[model]
from = "model"
[memory]
kind = "associative"
tokens = 2
d_mem = 4
[eval]
every = 3
samples = 4
batch = 3
[[stage]]
segment = 30
segments = 3
facts = 1
batch = 2
steps = 3
until = 2.0
[[stage]]
segment = 28
segments = 4
facts = 1
batch = 2
accumulate = 2
steps = 2
until = 2.0
"#;

/// A folder with a tiny model of segments of 16 tokens, a book and a recipe.
fn place() -> Place {
    let place = Place::new().with_model();
    std::fs::create_dir(place.path("books")).unwrap();
    let book: String = (0..300).map(|i| format!("In the {i} of all the numbers he found the same as before. ")).collect();
    std::fs::write(place.path("books/book.txt"), book).unwrap();
    std::fs::write(place.path("recipe.toml"), RECIPE).unwrap();
    place
}

fn log(place: &Place, run: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(place.path(run).join("log.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_converted_model_is_trained_stopped_resumed_and_judged() {
    let place = place();
    let said = place.good("train recipe.toml --out run --device cpu --steps 2");
    assert!(
        said.contains("steps: 2, ") && said.contains(" ms each (median), tensors of at most ") && said.contains(" on cpu"),
        "{said}"
    );
    assert!(said.contains("armt train recipe.toml --out run --resume --device cpu\n"), "{said}");
    // A shell takes what is printed as it was given.
    let forms = r#"task.forms=["now","mixed"]"#;
    let said = place.good(&format!("train recipe.toml --out quoted --device cpu --steps 1 --set {forms}"));
    assert!(said.contains(&format!("--resume --set '{forms}' --device cpu\n")), "{said}");
    for line in log(&place, "run") {
        assert!(line["step_ms"].as_f64().unwrap() > 0.0 && line["peak_bytes"].as_u64().unwrap() > 0, "{line}");
        assert_eq!(line["tokens"].as_u64().unwrap() % 60, 0, "{line}");
    }
    let said = place.good("train recipe.toml --out run --device cpu --resume");
    assert!(said.contains("steps: 3, ") && said.contains("finished in"), "{said}");
    let config: Value = serde_json::from_slice(&std::fs::read(place.path("run/best/config.json")).unwrap()).unwrap();
    assert_eq!((config["segment_size"].as_u64(), config["backbone"]["model_type"].as_str()), (Some(28), Some("gpt2")));
    // The tokenizer went along.
    place.good("eval run/best --task babilong --books books --questions qa1 --lengths 0k --samples 2 --device cpu");
    // And the run is one to begin from.
    place.good("train recipe.toml --out more --device cpu --set model.from=run --steps 1");
}

#[test]
fn a_model_without_weights_is_made_from_its_shape_and_trained() {
    let place = place();
    std::fs::remove_file(place.path("gpt2/model.safetensors")).unwrap();
    // The flag as it was called first.
    let convert = "--memory associative --tokens 2 --d-mem 4 --segment 16";
    assert!(place.bad(&format!("convert gpt2 random {convert}")).contains("model.safetensors"));
    let said = place.good(&format!("convert gpt2 random {convert} --random"));
    assert!(said.contains("parameters"), "{said}");
    let bytes = |folder: &str| std::fs::read(place.path(folder).join("model.safetensors")).unwrap();
    place.good(&format!("convert gpt2 same {convert} --random"));
    place.good(&format!("convert gpt2 other {convert} --random --seed 1"));
    assert!(bytes("random") != bytes("other") && bytes("random").len() == bytes("same").len());
    place.good("train recipe.toml --out run --device cpu --set model.from=random --steps 1");
}

#[test]
fn what_training_cannot_begin_from_is_named() {
    let place = place();
    let train = "train recipe.toml --out run --device cpu";
    for (more, message) in [
        ("--set model.from=nowhere", "nowhere: expected the model to begin from, as `armt convert` writes it, found nothing"),
        (
            "--set model.from=books",
            "books: expected the model to begin from, as `armt convert` writes it, found a folder without config.json",
        ),
        (
            "--set model.from=gpt2",
            "gpt2/config.json: expected a model with a memory, got a plain gpt2: `armt convert` gives it one",
        ),
        ("--set model.width=64", "model.width: expected no such key beside from: the model in model has its own, got 64"),
        ("--set memory.d_mem=8", "memory.d_mem: expected 4, as the model in model has, or no section [memory], got 8"),
        (
            "--set stage.2.segment=31",
            "stage 2: segment_size: expected at most 32 positions for a segment and its memory tokens, got 33",
        ),
        ("--set task.vocabulary=300", "task.vocabulary: expected no such key with model.from"),
        ("--steps 0", "0 is not in 1.."),
    ] {
        let said = place.bad(&format!("{train} {more}"));
        assert!(said.contains(message), "{more}: {said}");
    }
    // The tokenizer is the model's own; GPT-2's has more tokens than the model.
    std::fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    let said = place.bad(train);
    assert!(said.contains("its tokens go up to 50256, but the model has 269"), "{said}");
    place.good(&format!("{train} --set task.bpe=gpt2 --steps 1"));
}
