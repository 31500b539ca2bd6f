//! Texts and questions of a user: what is found in files, how windows follow one another, and that models learn from them.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use armt::engine::{DType, Device};
use armt::model::Model;
use armt::text::Tokenizer;
use armt_lab::eval::{qa, text};
use armt_lab::tasks::babilong::Length;
use armt_lab::tasks::check;
use armt_lab::tasks::documents::{Document, Documents};
use armt_lab::tasks::qa::{Fields, Hiding, read};
use armt_lab::tasks::training::{Sizes, TrainingTask, Window};
use armt_lab::tasks::words::Words;
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Ending, Event, best_model, train};

fn shipped(folder: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data").join(folder)
}

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::find(&shipped("books-bpe")).unwrap().unwrap())
}

fn words() -> Words {
    Words::new(tokenizer(), None).unwrap()
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    let file = std::fs::File::create(&path).unwrap();
    match name.rsplit_once('.') {
        Some((_, "gz")) => {
            let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::default());
            packed.write_all(text.as_bytes()).unwrap();
            packed.finish().unwrap();
        }
        Some((_, "zst")) => ruzstd::encoding::compress(text.as_bytes(), file, ruzstd::encoding::CompressionLevel::Fastest),
        _ => (&file).write_all(text.as_bytes()).unwrap(),
    }
    path.display().to_string()
}

/// The texts of all documents.
fn texts(documents: &Documents) -> Vec<String> {
    let tokenizer = tokenizer();
    let of = |file| {
        documents
            .of_file(file)
            .unwrap()
            .map(|found| {
                let ids = found.unwrap().tokens(&tokenizer).unwrap().collect::<Result<Vec<i32>, _>>().unwrap();
                tokenizer.decode(&ids).unwrap()
            })
            .collect::<Vec<_>>()
    };
    (0..documents.files().len()).flat_map(of).collect()
}

#[test]
fn documents_are_files_rows_or_lines_packed_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let (lines, rows) =
        ("One line.\n\nAnother line.\n", "{\"text\": \"A row.\"}\n\n{\"text\": \"Second row.\", \"n\": 1}\n{\"text\": \" \"}\n");
    for packing in ["", ".gz", ".zst"] {
        let text = write(folder.path(), &format!("a.txt{packing}"), lines);
        let table = write(folder.path(), &format!("b.jsonl{packing}"), rows);
        let open = |files: &[String], document| Documents::open(files, "text", document);
        let both = open(&[text.clone(), table.clone()], None).unwrap();
        assert_eq!(texts(&both), [lines, "A row.", "Second row."], "{packing}");
        assert_eq!(texts(&open(std::slice::from_ref(&text), Some(Document::Line)).unwrap()), ["One line.", "Another line."]);
        assert_eq!(texts(&open(std::slice::from_ref(&table), Some(Document::File)).unwrap()), ["A row.\nSecond row.\n "]);
        let error = open(&[text], Some(Document::Row)).unwrap_err().to_string();
        assert!(error.contains("a.txt") && error.contains("file or line"), "{error}");
    }
    let all = Documents::open(&[folder.path().display().to_string()], "text", None).unwrap();
    assert_eq!(all.files().len(), 6);
    let some = Documents::open(&[format!("{}/*.jsonl*", folder.path().display())], "text", None).unwrap();
    assert_eq!(some.files().len(), 3);
}

#[test]
fn what_cannot_be_read_is_named_with_its_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String =
        (1..=20).map(|i| if i == 17 { "{\"text\": 3}\n".into() } else { format!("{{\"text\": \"row {i}\"}}\n") }).collect();
    let table = write(folder.path(), "rows.jsonl", &rows);
    let documents = Documents::open(std::slice::from_ref(&table), "text", None).unwrap();
    let errors: Vec<String> = documents.of_file(0).unwrap().filter_map(|f| f.err()).map(|e| e.to_string()).collect();
    assert_eq!(errors.len(), 1);
    assert!(errors[0].contains("rows.jsonl: line 17: expected a text in the field text"), "{errors:?}");
    let checked = check::texts(&[table], "text", &tokenizer()).unwrap();
    assert_eq!((checked.wrong.len(), checked.lengths[0].1.count), (1, 19));
    let refused = |files: &[String]| Documents::open(files, "text", None).unwrap_err().to_string();
    assert!(refused(&["nowhere/*.txt".into()]).contains("nowhere/*.txt: expected a text file"));
    assert!(refused(&[write(folder.path(), "x.doc", "text")]).contains(".txt, .md or .jsonl"));
    let broken = write(folder.path(), "cut.txt.gz", &"many words ".repeat(1000));
    let bytes = std::fs::read(&broken).unwrap();
    std::fs::write(&broken, &bytes[..bytes.len() / 2]).unwrap();
    let cut = Documents::open(&[broken], "text", None).unwrap().of_file(0).unwrap().next().unwrap().unwrap();
    assert!(cut.tokens(&tokenizer()).unwrap().any(|token| token.is_err()), "half of a packed file is not the whole");
}

const TEXT: &str = r#"
seed = 4
[task]
setting = "text"
train = ["TRAIN"]
valid = ["VALID"]
bpe = "BPE"
document = "line"
[model]
layers = 2
width = 32
heads = 2
inner = 64
[memory]
kind = "associative"
tokens = 2
d_mem = 8
[optimizer]
lr = 3e-3
[eval]
every = 20
samples = 8
batch = 4
[[stage]]
segment = 8
segments = 3
batch = 3
steps = 60
"#;

/// Documents of different lengths, each of words of its own.
fn lines() -> String {
    let word = |d: usize, i: usize| format!("w{}{} ", (b'a' + d as u8) as char, i % 10);
    (0..7).map(|d| (0..5 + 40 * (d % 3)).map(|i| word(d, i)).collect::<String>() + "\n").collect()
}

fn recipe(folder: &Path, changes: &[&str]) -> Recipe {
    let (train, valid) = (write(folder, "train.txt", &lines()), write(folder, "valid.txt", &lines()));
    let text = TEXT.replace("TRAIN", &train).replace("VALID", &valid).replace("BPE", &shipped("books-bpe").display().to_string());
    Recipe::parse(&text, &changes.iter().map(|c| c.to_string()).collect::<Vec<_>>()).unwrap()
}

fn task(recipe: &Recipe) -> Box<dyn TrainingTask> {
    recipe.lessons().open(None).unwrap().task(0, recipe.sizes(0).unwrap()).unwrap()
}

fn windows(task: &dyn TrainingTask, n: usize) -> Vec<Window> {
    task.in_order(7).unwrap().unwrap().take(n).collect::<Result<_, _>>().unwrap()
}

#[test]
fn joined_windows_go_on_where_the_one_before_ended_and_every_token_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    let task = task(&recipe);
    let windows = windows(task.as_ref(), 30);
    for pair in windows.windows(2) {
        let [one, next] = pair else { unreachable!() };
        assert_eq!((one.asked.batch.texts, one.asked.batch.tokens()), (3, 24));
        for place in 0..3 {
            let row = |v: &Vec<i32>| v[place * 24..(place + 1) * 24].to_vec();
            let (ids, targets) = (row(&one.asked.batch.ids), row(&one.asked.targets.next));
            assert_eq!(ids[1..], targets[..23]);
            assert_eq!(targets[23], row(&next.asked.batch.ids)[0]);
        }
    }
    assert_eq!(windows.iter().map(|w| w.asked.batch.ids.clone()).collect::<Vec<_>>(), {
        let again = self::windows(task.as_ref(), 30);
        again.iter().map(|w| w.asked.batch.ids.clone()).collect::<Vec<_>>()
    });
}

#[test]
fn carried_windows_are_of_one_document_each_and_say_where_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &["stage.1.carry=1.0"]);
    let tokenizer = tokenizer();
    let mut of: [Option<char>; 3] = [None; 3];
    let (mut begun, mut onward) = (0, 0);
    for window in windows(task(&recipe).as_ref(), 60) {
        for (place, of) in of.iter_mut().enumerate() {
            let ids = &window.asked.batch.ids[place * 24..(place + 1) * 24];
            let text = tokenizer.decode(ids).unwrap();
            let letters: Vec<char> = text.split('w').skip(1).filter_map(|w| w.chars().next()).collect();
            assert!(letters.windows(2).all(|l| l[0] == l[1]), "two documents in a window: {text}");
            match window.begins[place] {
                true => begun += 1,
                false => {
                    onward += 1;
                    assert_eq!(*of, letters.first().copied(), "a window goes on in another document: {text}");
                }
            }
            *of = letters.first().copied();
        }
    }
    assert!(begun > 5 && onward > 5, "{begun} {onward}");
}

#[test]
fn the_loss_may_be_of_the_last_segment_alone() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &["stage.1.loss=last"]);
    for window in windows(task(&recipe).as_ref(), 10) {
        let asked = |i: &usize| window.asked.targets.next[*i] >= 0;
        assert_eq!((0..72).filter(asked).map(|i| i % 24).collect::<std::collections::BTreeSet<_>>(), (16..24).collect());
    }
}

/// Runs a recipe to its end, or to a stop after some steps, and gives the losses of its steps.
fn run(recipe: &Recipe, at: &Path, resume: bool, stop: u64) -> Vec<f32> {
    let mut folder = if resume { RunFolder::open(at).unwrap() } else { RunFolder::create(at).unwrap() };
    let mut losses = Vec::new();
    let ending = train(recipe, &mut folder, resume, (DType::F32, &Device::cpu()), &mut |event| match event {
        Event::Step { progress, loss, .. } => {
            losses.push(*loss);
            if progress.total == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        _ => ControlFlow::Continue(()),
    });
    assert!(matches!(ending.unwrap(), Ending::Stopped | Ending::Finished { .. }));
    losses
}

#[test]
fn a_model_learns_a_text_and_resumes_to_the_same_losses_with_and_without_its_memory() {
    for carry in ["stage.1.carry=0.0", "stage.1.carry=1.0"] {
        let folder = tempfile::tempdir().unwrap();
        let recipe = recipe(folder.path(), &[carry]);
        let whole = run(&recipe, &folder.path().join("whole"), false, 0);
        assert!(whole[59] < 0.6 * whole[0], "{carry}: {} to {}", whole[0], whole[59]);
        let parts = folder.path().join("parts");
        let first = run(&recipe, &parts, false, 33);
        assert_eq!([first, run(&recipe, &parts, true, 0)].concat(), whole, "{carry}");
    }
}

/// What the last validation of a run says, and the model that it was of.
fn validated(recipe: &Recipe, at: &Path) -> (f64, Model) {
    let (mut folder, mut last) = (RunFolder::create(at).unwrap(), None);
    let device = Device::cpu();
    train(recipe, &mut folder, false, (DType::F32, &device), &mut |event| {
        if let Event::Validation { score, .. } = event {
            last = Some(*score);
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    (-last.unwrap().ln(), Model::load(&folder.last_folder(), DType::F32, &device).unwrap())
}

#[test]
fn a_stage_that_carries_memories_on_is_judged_with_memories_that_go_through_whole_documents() {
    // One after the other, side by side, and with more places than documents.
    for places in [1, 3, 20] {
        let folder = tempfile::tempdir().unwrap();
        let batch = format!("eval.batch={places}");
        let recipe = recipe(folder.path(), &["stage.1.carry=1.0", "eval.every=60", "eval.samples=1000", &batch]);
        let (loss, model) = validated(&recipe, &folder.path().join("run"));
        let valid = [folder.path().join("valid.txt").display().to_string()];
        let documents = Documents::open(&valid, "text", Some(Document::Line)).unwrap();
        let report = text::judge(&model, &documents, &words(), None, &mut |_| ControlFlow::Continue(())).unwrap();
        assert!((loss - report.loss).abs() < 1e-5, "{places} side by side: {loss}, eval has {}", report.loss);
        assert!((loss - report.emptied_loss).abs() > 1e-3, "the memory changes what is said: {}", report.emptied_loss);
    }
}

#[test]
fn a_report_has_the_loss_of_each_segment_and_that_of_an_emptied_memory() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), &[]);
    run(&recipe, &folder.path().join("run"), false, 0);
    let model = best_model(&folder.path().join("run"), DType::F32, &Device::cpu()).unwrap();
    let documents =
        Documents::open(&[folder.path().join("valid.txt").display().to_string()], "text", Some(Document::Line)).unwrap();
    let report = text::judge(&model, &documents, &words(), None, &mut |_| ControlFlow::Continue(())).unwrap();
    let [first, second] = [report.by_segment[0], report.by_segment[1]];
    assert!((first.loss - first.emptied).abs() < 1e-5, "nothing was read before the first: {first:?}");
    assert!((second.loss - second.emptied).abs() > 1e-5, "{second:?}");
    let tokens: u64 = report.by_segment.iter().map(|s| s.tokens).sum();
    let mean = report.by_segment.iter().map(|s| s.loss * s.tokens as f64).sum::<f64>() / tokens as f64;
    assert!((mean - report.loss).abs() < 1e-9 && (report.perplexity - report.loss.exp()).abs() < 1e-9);
    assert_eq!((report.documents, tokens), (7, report.tokens));
    assert_eq!(report.by_segment.iter().map(|s| s.bytes).sum::<u64>(), report.bytes);
    // The loss of the whole, computed in another way: all logits of one document.
    let ids = words().tokenizer.encode(lines().lines().nth(1).unwrap()).unwrap();
    let batch = armt::segment::Batch { ids: ids[..ids.len() - 1].to_vec(), texts: 1, mask: None };
    let logits = model.forward(&batch, &model.empty(1).unwrap(), armt::schedule::ScheduleKind::Sequential).unwrap().0;
    let vocab = model.sizes().vocab;
    let nll: f64 = ids[1..]
        .iter()
        .enumerate()
        .map(|(i, next)| {
            let row = &logits[i * vocab..(i + 1) * vocab];
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum.ln() - f64::from(row[*next as usize])
        })
        .sum();
    write(folder.path(), "one.txt", lines().lines().nth(1).unwrap());
    let one = Documents::open(&[folder.path().join("one.txt").display().to_string()], "text", None).unwrap();
    let one = text::judge(&model, &one, &words(), None, &mut |_| ControlFlow::Continue(())).unwrap();
    assert!((one.loss - nll / (ids.len() - 1) as f64).abs() < 1e-4, "{} {}", one.loss, nll / (ids.len() - 1) as f64);
    assert!((one.bits_per_byte - nll / std::f64::consts::LN_2 / one.bytes as f64).abs() < 1e-3);
    let few = text::judge(&model, &documents, &words(), Some(2), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(few.by_segment, report.by_segment[..2]);
    assert!(report.plot().svg().unwrap().contains("memory emptied"));
    let compared = text::compare(&[("all".into(), report.clone()), ("few".into(), few.clone())]).unwrap();
    let bits: f64 = report.by_segment[0].loss * first.tokens as f64 / std::f64::consts::LN_2 / first.bytes as f64;
    assert_eq!(compared.series.iter().map(|s| s.marks.len()).collect::<Vec<_>>(), [report.by_segment.len(), 2]);
    assert!((compared.series[1].marks[0].y - bits).abs() < 1e-12);
    let mut old = few;
    old.by_segment[0].bytes = 0;
    assert!(text::compare(&[("old".into(), old)]).is_err(), "a report without bytes cannot be compared by them");
    let path = folder.path().join("report.json");
    report.save(&path).unwrap();
    let loaded = text::Report::load(&path).unwrap();
    assert!((loaded.loss - report.loss).abs() < 1e-12 && loaded.by_segment.len() == report.by_segment.len());
}

const ROWS: &str = r#"{"context": "Ann has a red hat.", "question": "What colour is Ann's hat?", "answer": "red"}
{"context": "Ann has a red hat.", "question": "Who has a hat?", "answer": "Ann"}
{"input": "Bob sold his old boat.", "question": "What did Bob sell?", "target": "his old boat"}
{"context": "Two and three.", "questions": [{"question": "First?", "answer": ["two", "2"]}, {"question": "Second?", "answer": "three"}]}
"#;

#[test]
fn rows_with_one_context_are_one_context_with_several_questions() {
    let folder = tempfile::tempdir().unwrap();
    let read = read(&[write(folder.path(), "q.jsonl", ROWS)], &Fields::default()).unwrap();
    assert!(read.wrong.is_empty(), "{:?}", read.wrong);
    let shown: Vec<(usize, usize)> = read.told.iter().map(|t| (t.line, t.questions.len())).collect();
    assert_eq!(shown, [(1, 2), (3, 1), (4, 2)]);
    assert_eq!(read.told[2].questions[0].answers, ["two", "2"]);
    let squad = r#"{"title": "x", "context": "c", "question": "q?", "answers": {"text": ["a", "b"], "answer_start": [0, 1]}}"#;
    let fields = Fields { answer: Some("answers.text".into()), ..Fields::default() };
    let squad = self::read(&[write(folder.path(), "s.jsonl", squad)], &fields).unwrap();
    assert_eq!(squad.told[0].questions[0].answers, ["a", "b"]);
    // As SQuAD itself has them.
    let own = r#"{"context": ["c"], "question": "q?", "answers": [{"text": "a"}, {"text": "b"}]}"#;
    let own = self::read(&[write(folder.path(), "o.jsonl", own)], &fields).unwrap();
    assert_eq!((own.told[0].context.as_str(), own.told[0].questions[0].answers.as_slice()), ("c", &["a".into(), "b".into()][..]));
    // Of several paragraphs none is left out in silence.
    let several = r#"{"context": ["one", "two"], "question": "q?", "answer": "a"}"#;
    let several = self::read(&[write(folder.path(), "p.jsonl", several)], &Fields::default()).unwrap();
    assert!(several.wrong[0].to_string().contains("line 1: expected a text in context, got a list of 2"), "{:?}", several.wrong);
}

#[test]
fn each_text_of_a_folder_is_found_once() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    for hidden in [".checkpoints", "inner"] {
        std::fs::create_dir(folder.path().join(hidden)).unwrap();
    }
    for (name, text) in
        [("a.txt", "one"), ("empty.txt", ""), ("inner/b.txt", "two"), ("._a.txt", "no"), (".checkpoints/a.txt", "no")]
    {
        write(folder.path(), name, text);
    }
    #[cfg(unix)]
    std::os::unix::fs::symlink(folder.path(), inner.join("loop")).unwrap();
    let names = [folder.path(), inner.as_path()].map(|path| path.display().to_string());
    let documents = Documents::open(&names, "text", None).unwrap();
    assert_eq!(texts(&documents), ["one", "two"]);
}

#[test]
fn a_text_of_which_nothing_can_be_learned_is_told_as_that() {
    let folder = tempfile::tempdir().unwrap();
    for (carry, text) in [("0.0", ""), ("1.0", "a")] {
        let train_on = format!("task.train=[\"{}\"]", write(folder.path(), "short.txt", text));
        let recipe = recipe(folder.path(), &[&train_on, "task.document=file", &format!("stage.1.carry={carry}")]);
        let mut run = RunFolder::create(&folder.path().join(format!("run-{carry}"))).unwrap();
        let ending = train(&recipe, &mut run, false, (DType::F32, &Device::cpu()), &mut |_| ControlFlow::Continue(()));
        let error = ending.err().unwrap().to_string();
        assert!(error.contains("task.train: expected texts"), "{error}");
    }
}

/// What a run that cannot be is refused with, and whether its folder holds a checkpoint.
fn refused(recipe: &Recipe, at: &Path) -> (String, bool) {
    let ending = train(recipe, &mut RunFolder::create(at).unwrap(), false, (DType::F32, &Device::cpu()), &mut |event| {
        assert!(!matches!(event, Event::Step { .. }), "a step was made");
        ControlFlow::Continue(())
    });
    (ending.err().unwrap().to_string(), at.join("last").exists())
}

#[test]
fn what_a_text_cannot_be_judged_by_is_refused_by_its_key_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let valid = |name, text| format!("task.valid=[\"{}\"]", write(folder.path(), name, text));
    let (empty, short) = (valid("empty.txt", ""), valid("short.txt", "a"));
    for (name, changes, message) in [
        ("apart", vec![empty.as_str()], "task.valid: expected texts"),
        ("carried", vec![short.as_str(), "stage.1.carry=1.0"], "task.valid: expected texts"),
        ("gated", vec!["eval.gated=true"], "eval.gated: expected false"),
    ] {
        let (error, kept) =
            refused(&recipe(folder.path(), &[changes, vec!["task.document=file"]].concat()), &folder.path().join(name));
        assert!(error.contains(message) && !kept, "{name}: {error}");
    }
}

#[test]
fn a_validation_that_fails_loses_no_step_and_is_made_when_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let rows = |last: &str| format!("{}{last}\n", format!("{{\"text\": \"{}\"}}\n", "one two three ".repeat(9)).repeat(5));
    let valid = format!("task.valid=[\"{}\"]", write(folder.path(), "valid.jsonl", &rows("{\"text\": \"end\"}")));
    let changes = [&valid, "stage.1.carry=1.0", "task.document=row", "task.train=[\"VALID\"]", "eval.samples=1000"]
        .map(|c| c.replace("VALID", &folder.path().join("valid.jsonl").display().to_string()));
    let recipe = recipe(folder.path(), &changes.each_ref().map(String::as_str));
    let whole = run(&recipe, &folder.path().join("whole"), false, 0);
    let broken = folder.path().join("broken");
    let mut losses = Vec::new();
    let ending = train(&recipe, &mut RunFolder::create(&broken).unwrap(), false, (DType::F32, &Device::cpu()), &mut |event| {
        if let Event::Step { progress, loss, .. } = event {
            losses.push(*loss);
            if progress.due {
                write(folder.path(), "valid.jsonl", &rows("{"));
            }
        }
        ControlFlow::Continue(())
    });
    let error = ending.err().unwrap().to_string();
    assert!(error.contains("valid.jsonl: line 6") && losses.len() == 20, "{error}");
    write(folder.path(), "valid.jsonl", &rows("{\"text\": \"end\"}"));
    assert_eq!([losses, run(&recipe, &broken, true, 0)].concat(), whole);
}

#[test]
fn texts_that_are_judged_on_and_learned_from_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let note = |valid: &str| task(&recipe(folder.path(), &[&format!("task.valid=[{valid}]")])).note(8);
    let (train, other) = (folder.path().join("sub/../train.txt"), folder.path().join("valid.txt"));
    std::fs::create_dir(folder.path().join("sub")).unwrap();
    assert_eq!(note(&format!("{other:?}")), None);
    let said = note(&format!("{other:?}, {train:?}"));
    assert_eq!(said.as_deref(), Some("of 2 files of task.valid 1 are in task.train too"));
}

#[test]
fn a_run_does_not_go_on_with_more_files_than_it_was_begun_with() {
    let folder = tempfile::tempdir().unwrap();
    run(&recipe(folder.path(), &[]), &folder.path().join("run"), false, 2);
    let (one, more) = (folder.path().join("train.txt"), write(folder.path(), "more.txt", &lines()));
    let recipe = recipe(folder.path(), &[&format!("task.train=[\"{}\", \"{more}\"]", one.display())]);
    let mut run = RunFolder::open(&folder.path().join("run")).unwrap();
    let ending = train(&recipe, &mut run, true, (DType::F32, &Device::cpu()), &mut |_| ControlFlow::Continue(()));
    let error = ending.err().unwrap().to_string();
    assert!(error.contains("task.train.2: expected no such key"), "{error}");
}

#[test]
fn rows_that_lack_something_are_named_by_their_lines() {
    let folder = tempfile::tempdir().unwrap();
    let broken = format!(
        "{ROWS}{{\"context\": \"c\", \"question\": \"q\"}}\nnot json\n{{\"context\": \"\", \"question\": \"q\", \"answer\": \"a\"}}\n"
    );
    let file = write(folder.path(), "broken.jsonl", &broken);
    let checked = check::questions(std::slice::from_ref(&file), &Fields::default(), &tokenizer()).unwrap();
    let said: Vec<String> = checked.wrong.iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(said[0].contains("line 5: expected a field answer or target"), "{said:?}");
    assert!(
        said[1].contains("line 6: expected a JSON object") && said[2].contains("line 7: expected a text in context"),
        "{said:?}"
    );
    assert_eq!(
        checked.lengths.iter().map(|(name, l)| (*name, l.count)).collect::<Vec<_>>(),
        [("contexts", 3), ("questions", 5), ("answers", 5)]
    );
    assert!(check::has_questions(&[file], &Fields::default()).unwrap());
}

fn qa_recipe(folder: &Path, rows: &str, changes: &[String]) -> Recipe {
    let file = write(folder, "qa.jsonl", rows);
    let text = TEXT
        .replace("\"text\"", "\"qa\"")
        .replace("train = [\"TRAIN\"]\nvalid = [\"VALID\"]", &format!("train = [\"{file}\"]"))
        .replace("document = \"line\"\n", "")
        .replace("BPE", &shipped("books-bpe").display().to_string())
        .replace("segments = 3", "segments = 8\nquestions = 2");
    Recipe::parse(&text, changes).unwrap()
}

#[test]
fn texts_of_questions_end_in_them_and_ask_for_the_answers_alone() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = qa_recipe(folder.path(), ROWS, &[]);
    let data = recipe.lessons().open(None).unwrap();
    let task = data.task(0, Sizes { batch: 30, judged: 5, vary: false, carried: false }).unwrap();
    let (tokenizer, end) = (tokenizer(), data.end_token());
    let answers = ["red", "Ann", "his old boat", "two", "three"].map(|a| [tokenizer.encode(a).unwrap(), vec![end]].concat());
    let batch = task.batch(&mut armt::random::Random::new(3)).unwrap();
    let width = batch.batch.tokens();
    assert_eq!(width % 8, 0);
    for place in 0..30 {
        let next = &batch.targets.next[place * width..(place + 1) * width];
        let asked: Vec<Vec<i32>> = next.split(|t| *t < 0).filter(|run| !run.is_empty()).map(<[i32]>::to_vec).collect();
        assert!(!asked.is_empty() && asked.iter().all(|run| answers.contains(run)), "{asked:?}");
    }
    assert_eq!(task.judged(1000).unwrap(), 5);
    let judged = task.validation(0, 5, &mut armt::random::Random::new(0)).unwrap();
    let width = judged.batch.tokens();
    for place in 0..5 {
        let first = judged.targets.next[place * width..].iter().position(|t| *t >= 0).unwrap();
        let ids = &judged.batch.ids[place * width..];
        let segment = first / 8 * 8;
        let question = tokenizer.decode(&ids[..=first]).unwrap();
        assert!(question.contains('?'), "{question}");
        assert!(segment == 0 || ids[..segment].iter().rposition(|t| *t != end).is_some());
    }
    assert_eq!(recipe.config(0, &recipe.fresh(1024, 0).unwrap()).after_question.as_deref(), Some("\n"));
}

#[test]
fn contexts_are_hidden_whole_among_other_text_at_several_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let words = words();
    let books = Arc::new(armt_lab::tasks::babilong::Books::open(&shipped("books/train"), words.tokenizer.clone()).unwrap());
    let hiding = Hiding(books);
    let context = words.tokenizer.encode("Ann has a red hat.").unwrap();
    let mut places = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let text = hiding.hide(&context, 300, armt::random::Random::new(seed)).unwrap().around(&context);
        assert_eq!(text.len(), 300);
        places.insert(text.windows(context.len()).position(|w| w == context).unwrap() / 60);
    }
    assert!(places.len() > 2, "{places:?}");
    assert_eq!(hiding.hide(&context, 0, armt::random::Random::new(0)).unwrap().around(&context), context);
    let from = shipped("books/train").display().to_string();
    let changes = [format!("task.distract.from={from}"), "task.distract.lengths=[\"0k\", \"40\"]".into()];
    let recipe = qa_recipe(folder.path(), ROWS, &changes);
    let task = task(&recipe);
    let batches: Vec<_> = (0..20).map(|seed| task.batch(&mut armt::random::Random::new(seed)).unwrap()).collect();
    let lengths: std::collections::BTreeSet<usize> = batches.iter().map(|b| b.batch.tokens()).collect();
    assert!(lengths.len() > 1, "{lengths:?}");
    // What is around a context is background; alone it has none.
    let passes = |b: &armt_lab::tasks::TaskBatch| b.targets.next.contains(&armt::recurrence::Targets::BACKGROUND);
    assert!(batches.iter().any(passes) && !batches.iter().all(passes));
}

#[test]
fn a_model_learns_questions_by_heart_and_says_the_answers_when_it_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let changes = ["stage.1.steps=400", "stage.1.batch=8", "eval.every=50", "stage.1.segment=16"].map(String::from);
    let recipe = qa_recipe(folder.path(), ROWS, &changes);
    run(&recipe, &folder.path().join("run"), false, 0);
    let model = best_model(&folder.path().join("run"), DType::F32, &Device::cpu()).unwrap();
    let told = read(&[folder.path().join("qa.jsonl").display().to_string()], &Fields::default()).unwrap().told;
    let answers = qa::judge(&model, &words(), &told, &qa::Way::default(), &mut |_| ControlFlow::Continue(())).unwrap();
    let row = qa::count(Length(0), &answers);
    assert_eq!((row.questions, row.exact_match, row.f1), (5, 1.0, 1.0), "{answers:?}");
    // Beside it stands what it says with nothing read, in the report and in the plot.
    let unread = qa::judge_unread(&model, &words(), &told, &mut |_| ControlFlow::Continue(())).unwrap();
    let unread = qa::count_unread(&unread);
    assert_eq!((unread.questions, unread.length.as_str()), (5, "unread"));
    let report = qa::Report {
        task: qa::Qa::Qa,
        model: "run".into(),
        name: None,
        files: vec!["qa.jsonl".into()],
        lengths: vec![row],
        unread: Some(unread),
    };
    let path = folder.path().join("report.json");
    report.save(&path).unwrap();
    assert!(qa::is_report(&path) && qa::Report::load(&path).unwrap() == report);
    let plot = qa::compare(&[("mine".into(), report.clone())]).unwrap();
    assert_eq!(plot.series.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["mine", "mine, nothing read"]);
    assert!(plot.svg().unwrap().contains("nothing read"));
    // A report of an earlier version has no such row.
    std::fs::write(&path, serde_json::to_vec(&qa::Report { unread: None, ..report }).unwrap()).unwrap();
    assert_eq!(qa::Report::load(&path).unwrap().unread, None);
}

#[test]
fn a_stage_of_questions_tells_what_it_learns_what_it_judges_and_what_it_leaves_out() {
    let folder = tempfile::tempdir().unwrap();
    let note = |changes: &[String]| {
        let recipe = qa_recipe(folder.path(), ROWS, changes);
        let task = recipe.lessons().open(None).unwrap().task(0, Sizes { batch: 4, judged: 5, vary: false, carried: false });
        task.unwrap().note(3).unwrap()
    };
    assert_eq!(note(&[]), "5 questions to learn, and 3 of these to judge: task.valid names no others");
    let held =
        write(folder.path(), "held.jsonl", "{\"context\": \"One and two.\", \"question\": \"First?\", \"answer\": \"one\"}\n");
    let valid = format!("task.valid=[\"{held}\"]");
    assert_eq!(note(std::slice::from_ref(&valid)), "5 questions to learn, and 1 of 1 held out to judge");
    let said = note(&[valid, "stage.1.segment=8".into(), "stage.1.segments=3".into()]);
    assert!(
        said.contains(" held out to judge; ") && said.ends_with(" do not fit in 3 segments of 8 tokens and are left out"),
        "{said}"
    );
    let empty = write(folder.path(), "empty.jsonl", "");
    let recipe = qa_recipe(folder.path(), ROWS, &[format!("task.valid=[\"{empty}\"]")]);
    let refused = recipe.lessons().open(None).err().unwrap().to_string();
    assert!(refused.contains("task.valid: expected questions, got none"), "{refused}");
}

/// A folder of the books' tokenizer that puts a token before every text, and that token.
fn with_beginning(folder: &Path) -> (String, i32) {
    let mut file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(shipped("books-bpe").join("tokenizer.json")).unwrap()).unwrap();
    let begin = file["model"]["vocab"]["$"].as_i64().unwrap();
    file["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "$", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"$": {"id": "$", "ids": [begin], "tokens": ["$"]}},
    });
    std::fs::create_dir(folder).unwrap();
    std::fs::write(folder.join("tokenizer.json"), file.to_string()).unwrap();
    (folder.display().to_string(), begin as i32)
}

#[test]
fn a_hidden_context_has_the_token_that_texts_begin_with_before_everything_and_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    let (bpe, begin) = with_beginning(&folder.path().join("bpe"));
    let from = shipped("books/train").display().to_string();
    let lengths = "task.distract.lengths=[\"40\"]".to_string();
    for more in [vec![], vec![format!("task.distract.from={from}"), lengths]] {
        let recipe = qa_recipe(folder.path(), ROWS, &[more, vec![format!("task.bpe={bpe}")]].concat());
        let task = task(&recipe);
        let judged = task.validation(0, 5, &mut armt::random::Random::new(0)).unwrap();
        for asked in [task.batch(&mut armt::random::Random::new(3)).unwrap(), judged] {
            for text in asked.batch.ids.chunks(asked.batch.tokens()) {
                let places: Vec<usize> = (0..text.len()).filter(|i| text[*i] == begin).collect();
                assert_eq!(places, [0], "{text:?}");
            }
        }
    }
}

#[test]
fn a_judging_hears_of_every_token_of_a_long_context_and_can_be_left_within_it() {
    let folder = tempfile::tempdir().unwrap();
    let (bpe, _) = with_beginning(&folder.path().join("bpe"));
    let recipe = qa_recipe(folder.path(), ROWS, &[format!("task.bpe={bpe}"), "stage.1.steps=1".into()]);
    run(&recipe, &folder.path().join("run"), false, 0);
    let model = best_model(&folder.path().join("run"), DType::F32, &Device::cpu()).unwrap();
    let words = Words::new(Arc::new(Tokenizer::find(Path::new(&bpe)).unwrap().unwrap()), None).unwrap();
    let told = read(&[folder.path().join("qa.jsonl").display().to_string()], &Fields::default()).unwrap().told;
    let books = armt_lab::tasks::babilong::Books::open(&shipped("books/train"), words.tokenizer.clone()).unwrap();
    let hiding = Hiding(Arc::new(books));
    let way = |stop| qa::Way { hidden: Some((&hiding, Length(2000))), stop, ..qa::Way::default() };
    let judge = |each: &mut dyn FnMut(qa::Judged) -> ControlFlow<()>| qa::judge(&model, &words, &told[..2], &way(None), each);
    let mut heard = Vec::new();
    let answers = judge(&mut |judged| {
        heard.push((judged.answers, judged.tokens));
        ControlFlow::Continue(())
    });
    // The token before everything is one of the length's.
    assert_eq!((answers.unwrap().len(), *heard.last().unwrap()), (3, (3, 4000)));
    assert!(heard.contains(&(2, 2000)) && heard.iter().any(|(answers, tokens)| *answers == 0 && (1..2000).contains(tokens)));
    let left = judge(&mut |judged| if judged.tokens > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
    assert!(matches!(left, Err(armt_lab::Error::Interrupted)));
    let stopped = way(Some(Arc::new(true.into())));
    let left = qa::judge(&model, &words, &told[..2], &stopped, &mut |_| ControlFlow::Continue(()));
    assert!(matches!(left, Err(armt_lab::Error::Interrupted)), "a flag that is set ends a reading within a group of segments");
}

/// The trained model answers as `armt ask` has it, through a session: with the tokenizer and the words after a question of its folder.
#[test]
fn a_folder_keeps_what_stands_after_a_question() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = qa_recipe(folder.path(), ROWS, &["stage.1.steps=1".into(), "task.after_question=\" Answer:\"".into()]);
    run(&recipe, &folder.path().join("run"), false, 0);
    let best = folder.path().join("run/best");
    assert_eq!(Model::load(&best, DType::F32, &Device::cpu()).unwrap().config().after_question.as_deref(), Some(" Answer:"));
    let file = folder.path().join("qa.jsonl");
    let text = format!(
        "[task]\nsetting = \"qa\"\ntrain = [\"{}\"]\n[model]\nfrom = \"{}\"\n[[stage]]\nsegment = 16\nsegments = 3\nbatch = 2\nsteps = 1",
        file.display(),
        best.display()
    );
    run(&Recipe::parse(&text, &[]).unwrap(), &folder.path().join("on"), false, 0);
    let on = Model::load(&folder.path().join("on/best"), DType::F32, &Device::cpu()).unwrap();
    assert_eq!(on.config().after_question.as_deref(), Some(" Answer:"));
    let session = armt::Session::open_on(folder.path().join("on/best"), DType::F32, &Device::cpu()).unwrap();
    assert!(session.ask("Who has a hat?").is_ok());
}

/// With the backbone frozen the memory's gradients are those of training all, so its parameters change as they do in the first step of that,
/// and the backbone's stay as they are to the bit.
#[test]
fn a_memory_alone_is_trained_with_the_gradients_of_the_whole_and_the_backbone_stays() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base");
    run(&recipe(folder.path(), &["stage.1.steps=20"]), &base, false, 0);
    let text = |only: &str| {
        let changes = ["stage.1.steps=1", "optimizer.weight_decay=0.0", "optimizer.warmup=0.0"].map(String::from);
        let text = TEXT
            .replace("TRAIN", &folder.path().join("train.txt").display().to_string())
            .replace("VALID", &folder.path().join("valid.txt").display().to_string())
            .replace("BPE", &shipped("books-bpe").display().to_string());
        let (head, rest) = text.split_once("[model]").unwrap();
        let stage = rest.split_once("[optimizer]").unwrap().1;
        let text = format!("{head}[model]\nfrom = \"{}\"\n[train]\nonly = \"{only}\"\n[optimizer]{stage}", base.display());
        Recipe::parse(&text, &changes).unwrap()
    };
    let all = run(&text("all"), &folder.path().join("all"), false, 0);
    assert_eq!(all, run(&text("memory"), &folder.path().join("memory"), false, 0), "one loss");
    let tensors = |name: &str| armt::weights::Tensors::open(&folder.path().join(name)).unwrap();
    let (before, all, memory) = (tensors("base/best"), tensors("all/last"), tensors("memory/last"));
    let (mut same, mut changed) = (0, 0);
    let mut names: Vec<&str> = before.names().collect();
    names.sort_unstable();
    for name in names {
        let [before, all, memory] = [&before, &all, &memory].map(|t| t.find(&[name]).unwrap().2);
        let of_memory = name.contains("W_m") || name.contains("memory_cell.memory");
        match of_memory {
            true => {
                changed += 1;
                assert_eq!(all, memory, "{name}");
                assert_ne!(before, memory, "{name}");
            }
            false => {
                same += 1;
                assert_eq!(before, memory, "{name}");
                assert_ne!(before, all, "{name}");
            }
        }
    }
    assert!(same > 10 && changed > 6, "{same} {changed}");
}
