//! The commands as a user types them: what they print, what they leave behind, and how they end.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

#[path = "commands/replaced.rs"]
mod replaced;
mod support;
use support::{Place, text};

/// A folder with a text in `text.txt`.
fn place() -> Place {
    let place = Place::new();
    let text: String = (0..400).map(|i| format!("the {i} of all numbers. ")).collect();
    std::fs::write(place.path("text.txt"), text).unwrap();
    place
}

/// A place with a converted model in `model`.
fn with_model() -> Place {
    place().with_model()
}

/// Runs a command that reads `input`.
fn fed(place: &Place, line: &str, input: &[u8]) -> Output {
    let mut child = place.command(line).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

/// What a command printed.
fn text_of(out: &Output) -> String {
    text(&out.stdout)
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// A memory file's header, in which the order of keys does not matter, and its numbers as bytes.
fn memory(path: &Path) -> (serde_json::Value, Vec<u8>) {
    let bytes = read(path);
    let (size, rest) = bytes.split_at(8);
    let (header, numbers) = rest.split_at(u64::from_le_bytes(size.try_into().unwrap()) as usize);
    (serde_json::from_slice(header).unwrap(), numbers.to_vec())
}

#[test]
fn a_model_is_converted_reads_a_text_and_answers() {
    let place = place();
    let said = place.good("convert gpt2 model --kind associative --tokens 2 --d-mem 4 --segment 16");
    assert!(said.contains("parameters") && said.contains("of memory for each text"), "{said}");
    let said = place.good("read model text.txt --memory text.mem --device cpu");
    assert!(said.contains(" tokens read in ") && said.contains("tokens/s; text.mem has"), "{said}");
    let ask = "ask model --memory text.mem the --max-tokens 8 --device cpu";
    let first = place.good(ask);
    assert!(first.ends_with('\n'));
    assert_eq!(first, place.good(ask), "the memory is only read");
    place.good(&format!("{ask} --temperature 0.9 --top-k 20 --top-p 0.9 --seed 3 --stop x"));
}

#[test]
fn a_gguf_file_is_judged_with_the_tokenizer_that_it_has() {
    let place = place();
    let model = format!("{}/../../tests/fixtures/gguf/qwen2-f16.gguf", env!("CARGO_MANIFEST_DIR"));
    let said = place.good(&format!("eval {model} --task text --text text.txt --device cpu"));
    assert!(said.contains("bits per byte"), "{said}");
    std::fs::write(place.path("qa.jsonl"), r#"{"context": "a b c", "question": "what", "answer": "c"}"#).unwrap();
    let judged = format!("eval {model} --task qa --qa qa.jsonl --device cpu --answers answers.jsonl");
    let said = place.good(&judged);
    assert!(said.contains("exact match"), "{said}");
    // Of the context and of nothing read; made again where it was, but not over the questions.
    place.good(&judged);
    let answers = std::fs::read_to_string(place.path("answers.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|l| l["length"].as_str().unwrap()).collect::<Vec<_>>(), ["0k", "unread"]);
    assert!(lines.iter().all(|l| l["question"] == "what" && l["right"] == serde_json::json!(["c"]) && l["line"] == 1), "{answers}");
    assert!(lines.iter().all(|l| l["exact"] == (l["said"] == "c") && l["file"] == "qa.jsonl"), "{answers}");
    let refused = place.bad(&judged.replace("answers.jsonl", "qa.jsonl"));
    assert!(refused.contains("qa.jsonl: it exists already and is no file of answers"), "{refused}");
}

#[test]
fn a_memory_of_int8_is_asked_in_f32_and_in_int8() {
    let place = with_model();
    place.good("read model text.txt --memory text.mem --device cpu --dtype int8");
    place.good("read model text.txt --memory exact.mem --device cpu");
    assert_ne!(memory(&place.path("text.mem")).1, memory(&place.path("exact.mem")).1);
    for dtype in ["f32", "int8"] {
        place.good(&format!("ask model --memory text.mem the --max-tokens 2 --device cpu --dtype {dtype}"));
    }
}

#[test]
fn every_kind_of_memory_can_be_made_and_read_with() {
    let place = place();
    for (kind, tokens) in
        [("rmt", "--tokens 2 --wrap-pos"), ("prmt", "--tokens 2 --wrap-pos"), ("rmt-r", "--tokens 2"), ("none", "")]
    {
        place.good(&format!("convert gpt2 {kind} --memory {kind} {tokens} --segment 16 --dtype bf16"));
        let read = format!("read {kind} text.txt --memory {kind}.mem --device cpu");
        match kind {
            "none" => assert!(place.bad(&read).contains("the model has no memory")),
            _ => drop(place.good(&read)),
        }
    }
}

#[test]
fn standard_input_gives_the_memory_of_the_file() {
    let place = with_model();
    place.good("read model text.txt --memory file.mem --device cpu");
    let out = fed(&place, "read model - --memory pipe.mem --device cpu", &read(&place.path("text.txt")));
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(memory(&place.path("file.mem")) == memory(&place.path("pipe.mem")));
    let out = fed(&place, "read model - --memory empty.mem --device cpu", b"");
    assert!(!out.status.success() && text(&out.stderr).contains("error: standard input: it is empty"), "{}", text(&out.stderr));
    assert!(!place.path("empty.mem").exists());
}

#[test]
fn resuming_goes_on_where_the_memory_ended() {
    let place = with_model();
    std::fs::write(place.path("more.txt"), "And that was not all.").unwrap();
    place.good("read model text.txt --memory both.mem --device cpu");
    let said = place.good("read model text.txt --memory both.mem --device cpu --resume");
    assert!(said.contains("nothing left to read"), "{said}");
    let said = place.good("read model text.txt more.txt --memory both.mem --device cpu --resume");
    assert!(said.contains("tokens in all"), "{said}");
    assert!(
        place
            .bad("read model more.txt --memory both.mem --device cpu --resume")
            .contains("expected the text that was read, of at least")
    );
    std::fs::write(place.path("other.txt"), "Something else. ".repeat(10_000)).unwrap();
    let before = read(&place.path("both.mem"));
    let said = place.bad("read model other.txt --memory both.mem --device cpu --resume");
    assert!(said.contains("expected the text that was read, got one that begins otherwise"), "{said}");
    assert!(read(&place.path("both.mem")) == before);
    assert!(place.bad("read model more.txt --memory none.mem --resume").contains("none.mem: there is no such memory"));
    // What is open at the end is of that text too: nothing of it is lost for another.
    for (was, is, same) in [
        ("Mary went to the kitchen.", "Daniel went to the office.", false),
        ("Mary went to the kitchen.", "Mary went", false),
        ("Mary", "Daniel is here.", false),
        ("Mary", "Mar", false),
        ("Mar", "Mary went on.", true),
        ("Mary went to the kitchen. Mary", "Mary went to the kitchen. Maryland", true),
        ("Mary went to the kitchen. Maryland", "Mary went to the kitchen. Daniel", false),
        ("Mary went to the café", "Mary went to the cafés of Paris.", true),
        ("Mary went to the kitchen. John", "Mary went to the kitchen. Johnny followed.", true),
    ] {
        std::fs::write(place.path("short.txt"), was).unwrap();
        place.good("read model short.txt --memory short.mem --device cpu --force");
        let before = read(&place.path("short.mem"));
        assert!(
            place.good("read model short.txt --memory short.mem --device cpu --resume").contains("nothing left to read"),
            "{was}"
        );
        std::fs::write(place.path("short.txt"), is).unwrap();
        let line = "read model short.txt --memory short.mem --device cpu --resume";
        if same {
            place.good(line);
            place.good("read model short.txt --memory at-once.mem --device cpu --force");
            assert!(read(&place.path("short.mem")) == read(&place.path("at-once.mem")), "{was}, {is}");
        } else {
            let said = place.bad(line);
            assert!(said.contains("expected the text that was read"), "{said}");
            assert!(read(&place.path("short.mem")) == before, "{was}, {is}");
        }
    }
}

#[test]
fn resuming_finds_what_is_open_in_the_document_that_it_is_of() {
    let place = with_model();
    std::fs::write(place.path("short.txt"), "Mary went to the kitchen").unwrap();
    let resume = "--memory short.mem --device cpu --new-document --resume";
    place.good("read model text.txt short.txt --memory short.mem --device cpu --new-document");
    let said = place.good(&format!("read model text.txt short.txt {resume}"));
    assert!(said.contains("nothing left to read"), "{said}");
    std::fs::write(place.path("other.txt"), "Daniel went on").unwrap();
    let said = place.bad(&format!("read model text.txt other.txt {resume}"));
    assert!(said.contains("expected the text that was read"), "{said}");
    assert!(place.bad(&format!("read model text.txt {resume}")).contains("expected the text that was read"));
    place.good(&format!("read model text.txt short.txt other.txt {resume}"));
    place.good("read model text.txt short.txt other.txt --memory at-once.mem --device cpu --new-document");
    assert!(read(&place.path("short.mem")) == read(&place.path("at-once.mem")));
}

#[test]
fn appending_in_pieces_gives_the_file_of_reading_at_once() {
    let place = with_model();
    let mut whole = read(&place.path("text.txt"));
    whole.extend("Where is the café? It's over 1999 ".as_bytes());
    std::fs::write(place.path("whole.txt"), &whole).unwrap();
    place.good("read model whole.txt --memory whole.mem --device cpu");
    // Within a word, and within a character.
    let cuts = [0, 7, 4001, whole.len() - 18, whole.len()];
    assert_eq!(whole[cuts[3] - 1], 0xc3);
    for (i, ends) in cuts.windows(2).enumerate() {
        std::fs::write(place.path("piece.txt"), &whole[ends[0]..ends[1]]).unwrap();
        let said =
            place.good(&format!("read model piece.txt --memory pieces.mem --device cpu {}", if i > 0 { "--append" } else { "" }));
        assert_eq!(said.contains("tokens in all"), i > 0, "{said}");
    }
    assert!(read(&place.path("pieces.mem")) == read(&place.path("whole.mem")));
    let ask = |memory: &str| place.good(&format!("ask model --memory {memory} the --max-tokens 8 --device cpu"));
    assert_eq!(ask("pieces.mem"), ask("whole.mem"));

    // Set apart, as files at once or one after the other.
    place.good("read model whole.txt text.txt whole.txt --memory at-once.mem --device cpu --new-document");
    place.good("read model whole.txt --memory apart.mem --device cpu");
    place.good("read model text.txt whole.txt --memory apart.mem --device cpu --append --new-document");
    assert!(read(&place.path("at-once.mem")) == read(&place.path("apart.mem")));
    place.good("read model whole.txt text.txt whole.txt --memory joined.mem --device cpu");
    assert!(read(&place.path("at-once.mem")) != read(&place.path("joined.mem")));
    let said = place.good("read model whole.txt text.txt whole.txt --memory apart.mem --device cpu --resume --new-document");
    assert!(said.contains("nothing left to read"), "{said}");
    assert!(place.bad("read model text.txt --memory none.mem --append").contains("leave out --append"));
    assert!(place.bad("read model text.txt --memory whole.mem").contains("--append adds to it"));
}

#[test]
fn memory_files_are_looked_into_and_compared() {
    let place = with_model();
    place.good("read model text.txt --memory a.mem --device cpu");
    let said = place.good("memory info a.mem");
    assert!(
        said.contains("model, fingerprint") && said.contains("associative") && said.contains("tensor    A [2, 1, 24, "),
        "{said}"
    );
    assert!(said.contains(" segments, and open at its end "), "{said}");
    let info: serde_json::Value = serde_json::from_str(&place.good("memory info a.mem --json")).unwrap();
    let text = &info["texts"][0];
    assert_eq!((info["name"].as_str(), info["format"].as_str()), (Some("model"), Some("armt-memory-2")));
    assert_eq!(text["tokens"].as_u64().unwrap(), 16 * text["segments"].as_u64().unwrap());
    assert!(text["open_tokens"].as_u64().unwrap() < 16 && info["tensors"][0]["norm"].as_f64().is_some());

    std::fs::copy(place.path("a.mem"), place.path("b.mem")).unwrap();
    assert_eq!(place.good("memory diff a.mem b.mem"), "equal to the bit\n");
    std::fs::write(place.path("other.txt"), "Something else. ".repeat(900)).unwrap();
    place.good("read model other.txt --memory b.mem --device cpu --force");
    let out = place.command("memory diff a.mem b.mem").output().unwrap();
    let said = text_of(&out);
    assert_eq!(out.status.code(), Some(1));
    assert!(said.contains("tokens of text 1: ") && said.contains(" numbers differ, by ") && out.stderr.is_empty(), "{said}");
    let out = place.command("memory diff a.mem b.mem --json").output().unwrap();
    let report: serde_json::Value = serde_json::from_str(&text_of(&out)).unwrap();
    assert_eq!(report["equal"], false);
    assert!(report["differences"].as_array().unwrap().iter().any(|d| d["what"] == "A" || d["what"] == "z"));

    let mut broken = read(&place.path("a.mem"));
    let last = broken.len() - 1;
    broken[last] ^= 1;
    std::fs::write(place.path("b.mem"), broken).unwrap();
    assert!(place.bad("memory info b.mem").contains("b.mem: it is damaged"));
    assert!(place.bad("memory diff a.mem none.mem").contains("none.mem: there is no such memory file"));
}

#[test]
fn an_answer_comes_with_its_probabilities() {
    let place = with_model();
    place.good("read model text.txt --memory a.mem --device cpu");
    let out = place.command("ask model --memory a.mem the --max-tokens 3 --device cpu").output().unwrap();
    let (plain, note) = (text_of(&out), text(&out.stderr));
    assert!(note.contains("note: the model is not sure: this answer has probability"), "of a model that was never trained: {note}");
    let said = place.good("ask model --memory a.mem the --max-tokens 3 --device cpu --json");
    let answer: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(answer["answer"].as_str().unwrap(), plain.strip_suffix('\n').unwrap());
    let tokens = answer["tokens"].as_array().unwrap();
    let shares: Vec<f64> = tokens.iter().map(|t| t["probability"].as_f64().unwrap()).collect();
    assert!(tokens.len() == 3 && shares.iter().all(|p| (0.0..=1.0).contains(p)));
    assert!((shares.iter().product::<f64>() - answer["probability"].as_f64().unwrap()).abs() < 1e-9);
    let info: serde_json::Value = serde_json::from_str(&place.good("memory info a.mem --json")).unwrap();
    for key in ["tokens", "segments", "open_tokens", "open_bytes"] {
        assert_eq!(answer["memory"][key], info["texts"][0][key], "{key}");
    }
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let place = with_model();
    std::fs::write(place.path("empty.txt"), "").unwrap();
    std::fs::write(place.path("odd.mem"), "no memory").unwrap();
    for (line, message) in [
        ("read nowhere text.txt --memory a.mem", "nowhere: there is no such folder"),
        ("read model nothing.txt --memory a.mem", "nothing.txt: No such file"),
        ("read model empty.txt --memory a.mem", "empty.txt: it is empty"),
        ("read model . --memory a.mem", "got a folder"),
        ("read model text.txt --memory no/a.mem", "the folder no does not exist"),
        ("read model text.txt --memory a.mem --device tpu", "invalid value 'tpu'"),
        ("read model text.txt --memory a.mem --device cpu --dtype bf16", "bf16 needs a GPU"),
        ("train quickstart --out out --device cpu --dtype int8", "int8 is for a model that is used"),
        ("ask model --memory a.mem why", "a.mem: there is no such memory file"),
        ("ask model --memory odd.mem why --device cpu", "odd.mem: not a whole memory file"),
        ("convert nowhere out --kind rmt", "nowhere: there is no such folder"),
        ("convert model out --kind rmt", "`armt export` writes its backbone"),
        ("convert gpt2 out --kind rmt --d-mem 3", "--d-mem: --kind rmt has no such setting"),
        ("convert gpt2 out --kind rmt --segment 500", "segment_size"),
        ("convert gpt2 out --kind associative --tokens 2 --segment 16 --memory-layers 0,7", "memory_layers"),
    ] {
        let said = place.bad(line);
        assert!(said.contains(message), "{line}: {said}");
    }
    for left in ["a.mem", "out"] {
        assert!(!place.path(left).exists(), "{left} was left behind");
    }
}

#[test]
fn a_memory_of_another_model_is_refused() {
    let place = with_model();
    place.good("convert gpt2 other --kind associative --tokens 2 --d-mem 4 --segment 16 --seed 9");
    place.good("read model text.txt --memory text.mem --device cpu");
    assert!(place.bad("ask other --memory text.mem why --device cpu").contains("the memory of another model"));
    // A number below 0 is a value, and not taken for an option.
    let said = place.bad("ask model --memory text.mem why --device cpu --temperature -1");
    assert!(said.contains("temperature: expected a positive number, got -1"), "{said}");
}

#[test]
fn bytes_that_are_no_text_are_reported() {
    let place = with_model();
    std::fs::write(place.path("odd.txt"), b"some \xff\xfe bytes and caf\xc3\xa9").unwrap();
    let said = place.good("read model odd.txt --memory odd.mem --device cpu");
    assert!(said.contains("2 bytes were no UTF-8"), "{said}");
    // What is packed or of another program is no text with a few odd bytes: it would be read as nonsense.
    let packed = [b"\x1f\x8b\x08\x00\x00\x00".as_slice(), b"%PDF-1.7\n\x00\x01", b"\xff\xfeM\x00a\x00r\x00y\x00"];
    for bytes in packed {
        std::fs::write(place.path("packed"), bytes).unwrap();
        let said = place.bad("read model packed --memory packed.mem --device cpu");
        assert!(said.contains("packed: expected a text in UTF-8, got a file with zero bytes"), "{said}");
        assert!(!place.path("packed.mem").exists());
    }
}

#[test]
fn every_command_shows_an_example() {
    let place = Place(tempfile::tempdir().unwrap());
    for example in ["read gpt2", "ask gpt2", "memory info", "convert gpt2", "eval runs", "report armt.json"] {
        let command = example.split(' ').next().unwrap();
        assert!(place.good(&format!("{command} --help")).contains(&format!("armt {example}")), "{example}");
    }
}

#[test]
fn shells_get_completions() {
    let place = Place(tempfile::tempdir().unwrap());
    for shell in ["bash", "zsh", "fish"] {
        assert!(place.good(&format!("completions {shell}")).contains("convert"));
    }
}

/// Ctrl-C while the text still comes: what was read is kept, and the printed command finishes the work.
#[cfg(unix)]
#[test]
fn an_interrupted_reading_is_saved_and_resumed_to_the_same_memory() {
    let place = with_model();
    place.good("read model text.txt --memory whole.mem --device cpu");
    let whole = read(&place.path("text.txt"));
    let mut child = place
        .command("read model - --memory part.mem --device cpu")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&whole[..whole.len() / 2]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    drop(input);
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    assert!(said.contains("armt read model - --memory part.mem --device cpu --resume"), "{said}");
    let out = fed(&place, "read model - --memory part.mem --device cpu --resume", &whole);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(memory(&place.path("part.mem")) == memory(&place.path("whole.mem")));
}

#[cfg(unix)]
#[test]
fn an_interrupted_appending_leaves_the_memory_as_it_was() {
    let place = with_model();
    place.good("read model text.txt --memory a.mem --device cpu");
    let before = read(&place.path("a.mem"));
    let mut child = place
        .command("read model - --memory a.mem --device cpu --append")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&read(&place.path("text.txt"))).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    drop(input);
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    assert!(text_of(&out).contains("a.mem is as it was"), "{}", text_of(&out));
    assert!(read(&place.path("a.mem")) == before);
}

#[test]
fn each_of_many_texts_has_the_memory_that_it_has_alone() {
    let place = with_model();
    let whole = read(&place.path("text.txt"));
    std::fs::create_dir_all(place.path("texts/sub")).unwrap();
    let cuts = [20, 3000, 90, 700, 5, 1500];
    for (n, cut) in cuts.iter().enumerate() {
        std::fs::write(place.path(&format!("texts/{n}.txt")), &whole[..*cut]).unwrap();
    }
    std::fs::write(place.path("texts/sub/0.txt"), &whole[..333]).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink("..", place.path("texts/sub/again")).unwrap();
    let said = place.good("read model texts --each out --batch 3 --device cpu");
    assert!(said.contains("7 of 7 texts read;"), "{said}");
    for n in 0..cuts.len() {
        place.good(&format!("read model texts/{n}.txt --memory {n}.mem --device cpu"));
        assert!(read(&place.path(&format!("out/{n}.txt.mem"))) == read(&place.path(&format!("{n}.mem"))), "{n}");
    }
    assert!(place.path("out/sub/0.txt.mem").exists());
    // A mark of the encoding at the beginning of a file is no text.
    std::fs::write(place.path("marked.txt"), [b"\xef\xbb\xbf", &whole[..3000]].concat()).unwrap();
    place.good("read model marked.txt --memory marked.mem --device cpu");
    assert!(read(&place.path("marked.mem")) == read(&place.path("1.mem")));
    // What is there is not read again; what cannot be read does not keep the others from being read.
    std::fs::remove_file(place.path("out/3.txt.mem")).unwrap();
    std::fs::write(place.path("texts/empty.txt"), "").unwrap();
    let out = place.command("read model texts --each out --device cpu").output().unwrap();
    assert!(!out.status.success());
    assert!(text_of(&out).contains("1 of 8 texts read, 6 were read before"), "{}", text_of(&out));
    assert!(text(&out.stderr).contains("empty.txt: it is empty"), "{}", text(&out.stderr));
    assert!(read(&place.path("out/3.txt.mem")) == read(&place.path("3.mem")));
    std::fs::remove_file(place.path("texts/empty.txt")).unwrap();
    assert!(place.good("read model texts --each out --force --device cpu").contains("7 of 7 texts read;"));
    // Memories are no texts, wherever they lie.
    for out in ["texts/out", "./texts"] {
        let line = format!("read model texts --each {out} --device cpu");
        assert!(place.good(&line).starts_with("7 of 7 texts read;"), "{out}");
        assert!(place.good(&line).starts_with("0 of 7 texts read, 7 were read before;"), "{out}");
        if out == "texts/out" {
            std::fs::remove_dir_all(place.path(out)).unwrap();
        }
    }
    let said = place.bad("read model texts/0.txt texts/sub/0.txt --each twice --device cpu");
    assert!(said.contains("both would have the memory"), "{said}");
    let said = place.bad("read model nothing --each out --device cpu");
    assert!(said.contains("nothing"), "{said}");
}

/// Ctrl-C after some texts of many: their memories are there, and the same command reads the rest.
#[cfg(unix)]
#[test]
fn an_interrupted_reading_of_many_texts_goes_on() {
    let place = with_model();
    let whole = read(&place.path("text.txt"));
    std::fs::create_dir(place.path("texts")).unwrap();
    for n in 0..12 {
        std::fs::write(place.path(&format!("texts/{n:02}")), whole.repeat(20 + n)).unwrap();
    }
    let line = "read model texts --each out --batch 1 --device cpu";
    let child = place.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let there = || std::fs::read_dir(place.path("out")).map_or(0, |entries| entries.count());
    while there() < 2 {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    assert!(text_of(&out).contains("the same command goes on"), "{}", text_of(&out));
    let before = there();
    assert!((2..12).contains(&before), "{before}");
    let said = place.good(line);
    assert!(said.contains(&format!("{} of 12 texts read, {before} were read before", 12 - before)), "{said}");
    place.good("read model texts/11 --memory 11.mem --device cpu");
    assert!(read(&place.path("out/11.mem")) == read(&place.path("11.mem")));
}

#[test]
fn a_model_that_has_a_memory_keeps_its_weights_and_writes_it_in_another_way() {
    let place = place();
    place.good("convert gpt2 model --kind associative --tokens 2 --d-mem 4 --segment 5");
    place.good("convert gpt2 rmt --kind rmt --tokens 2 --segment 5");
    assert_eq!(place.good("convert model other --write projected"), "other: the weights of model, --write projected\n");
    let config =
        |folder: &str| serde_json::from_slice::<serde_json::Value>(&read(&place.path(&format!("{folder}/config.json")))).unwrap();
    let (mut was, now) = (config("model"), config("other"));
    was["memory"]["write"] = "projected".into();
    assert_eq!(was, now);
    let weights = |folder: &str| -> Vec<Vec<f32>> {
        let model = armt::Model::load(&place.path(folder), armt::engine::DType::F32, &armt::engine::Device::cpu()).unwrap();
        model.params().iter().map(|p| p.value().to_vec::<f32>().unwrap()).collect()
    };
    assert!(weights("model") == weights("other"));
    place.good("eval other --task remember --pairs 1 --samples 2 --device cpu");
    place.good("convert other back --write paper");
    assert!(read(&place.path("model/config.json")) == read(&place.path("back/config.json")));
    // Rounded to bf16, and not again by the way back to f32.
    assert_eq!(place.good("convert rmt half --dtype bf16"), "half: the weights of rmt, --dtype bf16\n");
    place.good("convert half full --dtype f32");
    let size = |folder: &str| read(&place.path(&format!("{folder}/model.safetensors"))).len();
    assert!(size("half") < size("rmt"));
    assert!(weights("half") == weights("full") && weights("half") != weights("rmt"));
    for (line, message) in [
        ("convert model third", "only --write and --dtype can be changed"),
        ("convert model third --write projected --tokens 4", "only --write and --dtype can be changed"),
        ("convert rmt third --write projected", "the memory of the model in rmt is of kind rmt"),
        ("convert model model --write projected", "write to another"),
    ] {
        let error = place.bad(line);
        assert!(error.contains(message), "{line}: {error}");
    }
}
