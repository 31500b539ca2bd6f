//! Texts and questions of a user: what is found in files, how windows follow one another, and that models learn from them.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use armt::engine::{DType, Device};
use armt::model::Model;
use armt::text::Tokenizer;
use armt_lab::eval::text;
use armt_lab::tasks::check;
use armt_lab::tasks::documents::{Document, Documents};
use armt_lab::tasks::training::{TrainingTask, Window};
use armt_lab::tasks::words::Words;
use armt_lab::train::RunFolder;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::{Ending, Event, best_model, train};

#[path = "own_text/questions.rs"]
mod questions;

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
