//! Adapters as a user types them: trained beside a model, used with it, merged into it.

#![allow(clippy::unwrap_used)]

mod support;
use support::Place;

const RECIPE: &str = r#"
[task]
setting = "text"
train = ["book.txt"]
valid = ["book.txt"]
[model]
from = "model"
[train]
lora = { rank = 2, alpha = 4, targets = ["c_attn", "mlp.c_proj"] }
[optimizer]
lr = 1e-2
[eval]
every = 2
samples = 2
batch = 2
[[stage]]
segment = 20
segments = 2
batch = 2
steps = 4
until = "never"
"#;

/// A folder with a model, a book, a recipe and a run of it.
fn place() -> Place {
    let place = Place::new().with_model();
    let book: String = (0..200).map(|i| format!("In the {i} of all the numbers he found the same as before. ")).collect();
    std::fs::write(place.path("book.txt"), book).unwrap();
    std::fs::write(place.path("recipe.toml"), RECIPE).unwrap();
    let said = place.good("train recipe.toml --out run --device cpu");
    assert!(said.contains("what was trained is in run/adapter"), "{said}");
    place
}

/// The tensors of a memory file, without whose it is called.
fn tensors(place: &Place, memory: &str) -> Vec<u8> {
    let bytes = std::fs::read(place.path(memory)).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].to_vec()
}

#[test]
fn a_model_with_its_adapter_is_the_merged_model_to_the_bit() {
    let place = place();
    let said = place.good("merge model run/adapter merged");
    assert!(said.starts_with("merged: "), "{said}");
    place.good("read model book.txt --adapter run/adapter --memory with.mem --device cpu");
    place.good("read merged book.txt --memory merged.mem --device cpu");
    place.good("read model book.txt --memory base.mem --device cpu");
    assert_eq!(tensors(&place, "with.mem"), tensors(&place, "merged.mem"));
    assert_ne!(tensors(&place, "with.mem"), tensors(&place, "base.mem"));

    // Either takes the other's memory file: they are one model. The base alone does not.
    let asked = |line: &str| place.good(&format!("ask {line} he --max-tokens 5 --json --device cpu"));
    let answer = asked("model --adapter run --memory with.mem");
    assert_eq!(answer, asked("merged --memory with.mem"));
    assert_eq!(answer, asked("model --adapter run/adapter --memory merged.mem"));
    assert_ne!(answer, asked("model --memory base.mem"));
    assert!(place.bad("ask model --memory with.mem he --device cpu").contains("with.mem"));

    let judged = |line: &str| place.good(&format!("eval {line} --task text --text book.txt --device cpu"));
    let wanted = judged("merged");
    assert_eq!(judged("model --adapter run/adapter"), wanted);
    assert_ne!(judged("model"), wanted);
}

#[test]
fn training_goes_on_with_an_adapter_and_refuses_that_of_another_model() {
    let place = place();
    place.good("train recipe.toml --out more --adapter run --device cpu --steps 2");
    place.good("train recipe.toml --out more --resume --device cpu");
    place.good("merge model more/adapter merged");
    // What was merged is another model.
    for line in [
        "merge merged run/adapter twice",
        "read merged book.txt --adapter run/adapter --memory no.mem --device cpu",
        "train recipe.toml --out no --set model.from=merged --adapter run/adapter --device cpu",
    ] {
        let said = place.bad(line);
        assert!(said.contains("run/adapter: it is an adapter of model") && said.contains("the model is merged"), "{line}: {said}");
    }
    assert!(!place.path("twice").exists() && !place.path("no.mem").exists());
    assert!(place.bad("merge model model out").contains("model: expected an adapter"));
    assert!(place.bad("merge model run/adapter model --force").contains("write to another"));
}
