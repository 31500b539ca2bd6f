//! Mamba, RWKV-5 and RMT-R as a user meets them: converted, read with, asked, trained, stopped and resumed, and refused by name.

#![allow(clippy::unwrap_used)]

mod support;
use serde_json::{Value, json};
use support::Place;

/// A folder of a random model as Hugging Face describes it, with the tokenizer of the tiny GPT-2.
fn backbone(place: &Place, name: &str, config: &Value) {
    let folder = place.path(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for file in ["encoder.json", "vocab.bpe"] {
        std::fs::copy(place.path("gpt2").join(file), folder.join(file)).unwrap();
    }
}

fn configs(vocab: u64) -> [(&'static str, Value); 2] {
    [
        ("mamba", json!({"model_type": "mamba", "vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4})),
        ("rwkv5", json!({"model_type": "rwkv5", "vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": 2, "head_size": 8})),
    ]
}

/// A place with random models in `mamba`, `rwkv5` and `rmt-r`, and a text.
fn place() -> Place {
    let place = Place::new();
    let text: String = (0..300).map(|i| format!("the {i} of all numbers. ")).collect();
    std::fs::write(place.path("text.txt"), text).unwrap();
    let gpt2: Value = serde_json::from_slice(&std::fs::read(place.path("gpt2/config.json")).unwrap()).unwrap();
    for (name, config) in configs(gpt2["vocab_size"].as_u64().unwrap()) {
        backbone(&place, &format!("{name}-hf"), &config);
        place.good(&format!("convert {name}-hf {name} --random --segment 16"));
    }
    place.good("convert gpt2 rmt-r --kind rmt-r --tokens 2 --segment 16");
    place
}

#[test]
fn they_are_converted_read_with_and_asked() {
    let place = place();
    // A folder that was converted is exported, and the export converted again, to the same weights.
    for name in ["mamba", "rwkv5"] {
        place.good(&format!("export {name} {name}-plain"));
        let said = place.good(&format!("convert {name}-plain {name}-again --segment 16"));
        assert!(said.contains("of memory for each text, however long"), "{said}");
        let weights = |folder: &str| std::fs::read(place.path(folder).join("model.safetensors")).unwrap();
        assert_eq!(weights(name).len(), weights(&format!("{name}-again")).len());
    }
    for name in ["mamba", "rwkv5", "rmt-r"] {
        let said = place.good(&format!("read {name} text.txt --memory {name}.mem --device cpu"));
        assert!(said.contains(" tokens read in "), "{said}");
        let ask = format!("ask {name} --memory {name}.mem the --max-tokens 8 --device cpu");
        let first = place.good(&ask);
        assert_eq!(first, place.good(&ask), "the memory is only read");
        let said = place.good(&format!("memory info {name}.mem"));
        assert!(said.contains(&name.replace('-', "_")), "{said}");
        // In two readings, to the same bytes.
        let text = std::fs::read(place.path("text.txt")).unwrap();
        std::fs::write(place.path("one.txt"), &text[..2001]).unwrap();
        std::fs::write(place.path("two.txt"), &text[2001..]).unwrap();
        place.good(&format!("read {name} one.txt --memory parts.mem --device cpu --force"));
        place.good(&format!("read {name} two.txt --memory parts.mem --device cpu --append"));
        let file = |memory: &str| std::fs::read(place.path(memory)).unwrap();
        assert!(file("parts.mem") == file(&format!("{name}.mem")), "{name}");
        std::fs::remove_file(place.path("parts.mem")).unwrap();
    }
    let said = place.good("convert gpt2 other --kind rmt-r --tokens 2 --segment 16");
    assert!(said.contains("grows by") && said.contains("with every segment"), "{said}");
}

#[test]
fn they_are_trained_stopped_and_resumed_to_the_bit() {
    let place = place();
    std::fs::create_dir(place.path("texts")).unwrap();
    std::fs::copy(place.path("text.txt"), place.path("texts/text.txt")).unwrap();
    for name in ["mamba", "rwkv5", "rmt-r"] {
        let recipe = format!(
            "[task]\nsetting = \"text\"\ntrain = [\"texts\"]\nvalid = [\"texts\"]\n[model]\nfrom = \"{name}\"\n[eval]\nevery = 2\nsamples = 2\nbatch = 2\n[[stage]]\nsegment = 8\nsegments = 3\nbatch = 2\nsteps = 6\nuntil = \"never\"\n"
        );
        std::fs::write(place.path("recipe.toml"), recipe).unwrap();
        place.good(&format!("train recipe.toml --out {name}-whole --device cpu"));
        place.good(&format!("train recipe.toml --out {name}-parts --device cpu --steps 3"));
        place.good(&format!("train recipe.toml --out {name}-parts --device cpu --resume"));
        let weights = |run: &str| std::fs::read(place.path(run).join("last/model.safetensors")).unwrap();
        assert!(weights(&format!("{name}-whole")) == weights(&format!("{name}-parts")), "{name}");
        place.good(&format!("eval {name}-whole --task text --text texts --device cpu"));
    }
}

#[test]
fn other_models_of_their_kind_are_refused_by_name() {
    let place = place();
    for (model_type, called) in
        [("mamba2", "Mamba-2"), ("falcon_mamba", "Falcon Mamba"), ("rwkv", "RWKV-4"), ("rwkv6", "RWKV-6"), ("rwkv7", "RWKV-7")]
    {
        backbone(
            &place,
            model_type,
            &json!({"model_type": model_type, "vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 2}),
        );
        let said = place.bad(&format!("convert {model_type} out --random"));
        assert!(said.contains(called), "{said}");
        assert!(!place.path("out").exists());
    }
    let said = place.bad("convert mamba-hf out --kind associative --random");
    assert!(said.contains("state of its own"), "{said}");
    // A folder without its weights, and a file without a tensor.
    assert!(place.bad("convert mamba-hf out").contains("model.safetensors"));
    std::fs::copy(place.path("gpt2/model.safetensors"), place.path("rwkv5-hf/model.safetensors")).unwrap();
    let said = place.bad("convert rwkv5-hf out");
    assert!(said.contains("model.safetensors") || said.contains("rwkv5-hf"), "{said}");
}
