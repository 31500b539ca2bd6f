//! What lies in a file already: nothing is replaced unasked, and nothing of another kind at all.

use super::support::text;
use super::{read, with_model};

#[test]
fn nothing_is_overwritten_unasked() {
    let place = with_model();
    std::fs::write(place.path("out.mem"), "precious").unwrap();
    assert!(place.bad("read model text.txt --memory out.mem").contains("out.mem: it exists already"));
    assert_eq!(read(&place.path("out.mem")), b"precious");
    assert!(place.bad("convert gpt2 model --kind rmt").contains("model: the folder is not empty"));
    assert!(place.bad("convert gpt2 gpt2 --kind rmt --force").contains("gpt2: this is the folder to read from"));
    place.good("read model text.txt --memory out.mem --force --device cpu");
}

#[test]
fn files_of_questions_and_samples_are_taken_for_what_they_are() {
    let place = with_model();
    let rows = "{\"context\": \"Ada lives in Turin.\", \"question\": \"Where does Ada live?\", \"answer\": \"Turin\"}\n".repeat(3);
    std::fs::write(place.path("marked.jsonl"), format!("\u{feff}{rows}")).unwrap();
    let said = place.good("data check marked.jsonl --model model");
    assert!(said.lines().any(|line| line.split_whitespace().take(2).eq(["questions", "3"])), "{said}");
    // A field that no row has is a slip of the hand, and the rows are no texts for it.
    for option in ["--question quest", "--question quest --context c", "--question quest --answer a"] {
        let said = place.bad(&format!("data check marked.jsonl --model model {option}"));
        assert!(said.contains("expected rows of questions, but none of the first has a field quest"), "{said}");
    }
    std::fs::write(place.path("begins-badly.jsonl"), format!("{{\"context\": \"broken\n{rows}")).unwrap();
    let out = place.command("data check begins-badly.jsonl --model model").output().unwrap();
    let said = text(&out.stderr);
    assert!(!out.status.success() && said.contains("line 1: expected a JSON object") && !said.contains("line 2"), "{said}");

    place.good("data babilong --questions qa1 --lengths 0k --samples 2 --out samples.jsonl");
    for option in ["--questions qa2", "--lengths 4k"] {
        let said = place.bad(&format!("eval model --task babilong --file samples.jsonl {option} --device cpu"));
        assert!(said.contains("line 1: expected") && said.contains("as all of the file was said to be"), "{said}");
    }
}

#[test]
fn a_file_of_another_kind_is_never_replaced() {
    let place = with_model();
    let text = read(&place.path("text.txt"));
    std::fs::write(place.path("rows.jsonl"), "{\"context\": \"a b\", \"question\": \"c\", \"answer\": \"d\"}\n").unwrap();
    let rows = read(&place.path("rows.jsonl"));
    // What others have made is of another kind though its form is the same.
    let own = [
        ("figure.svg", "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"90\" height=\"90\"><circle r=\"9\"/></svg>\n"),
        ("page.svg", "<?xml version=\"1.0\"?>\n<project><artifactId>own</artifactId></project>\n"),
        ("own.jsonl", "{\"task\": \"my own data set\", \"text\": \"a b\"}\n"),
        ("notes.json", "{\n  \"task\": \"buy flour\",\n  \"machine\": \"mine\"\n}\n"),
    ];
    own.iter().for_each(|(name, text)| std::fs::write(place.path(name), text).unwrap());
    std::fs::create_dir(place.path("books")).unwrap();
    std::fs::write(place.path("books/book.txt"), "In all the numbers he found the same as before. ".repeat(300)).unwrap();
    place.good("eval model --task babilong --books books --questions qa1 --lengths 0k --samples 1 --out facts.json --device cpu");
    let facts = read(&place.path("facts.json"));
    for (line, message) in [
        (
            "eval model --task text --text text.txt --out figure.json --device cpu",
            "figure.svg: it exists already and is no SVG plot",
        ),
        ("report facts.json --out page.svg", "page.svg: it exists already and is no SVG plot"),
        ("data babilong --samples 1 --lengths 0k --out own.jsonl", "own.jsonl: it exists already and is no file of samples"),
        (
            "eval model --task qa --qa rows.jsonl --out notes.json --device cpu",
            "notes.json: it exists already and is no report of qa",
        ),
        (
            "bench read-small --repeats 1 --segments 1 --json notes.json --device cpu",
            "notes.json: it exists already and is no report of",
        ),
        (
            "eval model --task qa --qa rows.jsonl --out facts.json --device cpu",
            "facts.json: it exists already and is no report of qa",
        ),
        (
            "eval model --task text --text text.txt --out facts.json --device cpu",
            "facts.json: it exists already and is no report of text",
        ),
        ("read model text.txt --memory text.txt --force --device cpu", "text.txt: it is also a text to read"),
        ("read model text.txt --memory ./text.txt --append --device cpu", "text.txt: it is also a text to read"),
        ("eval model --task text --text text.txt --out text.txt --device cpu", "text.txt: it exists already and is no report"),
        ("eval model --task qa --qa rows.jsonl --out rows.jsonl --device cpu", "rows.jsonl: it exists already and is no report"),
        ("eval model --task babilong --samples 1 --out rows.jsonl --device cpu", "rows.jsonl: expected a report of"),
        ("data babilong --samples 1 --lengths 0k --out text.txt", "text.txt: it exists already and is no file of samples"),
        ("data babilong --samples 1 --lengths 0k --out rows.jsonl", "rows.jsonl: it exists already and is no file of samples"),
        ("bench read-small --repeats 1 --segments 1 --json text.txt --device cpu", "text.txt: it exists already and is no report"),
        ("report rows.jsonl --out text.txt", "text.txt: it exists already and is no SVG plot"),
    ] {
        let said = place.bad(line);
        assert!(said.contains(message), "{line}: {said}");
    }
    assert!(read(&place.path("text.txt")) == text && read(&place.path("rows.jsonl")) == rows);
    assert!(own.iter().all(|(name, text)| read(&place.path(name)) == text.as_bytes()) && read(&place.path("facts.json")) == facts);
    // What a command has written it writes anew.
    for line in [
        "eval model --task text --text text.txt --out text.json --device cpu",
        "eval model --task qa --qa rows.jsonl --out qa.json --answers answers.jsonl --device cpu",
        "report text.json --out text.svg",
        "data babilong --questions qa1 --samples 1 --lengths 0k --out samples.jsonl",
        "bench read-small --repeats 1 --segments 1 --layers 1 --json bench.json --device cpu",
    ] {
        place.good(line);
        place.good(line);
    }
}
