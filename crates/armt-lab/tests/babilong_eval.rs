//! BABILong judged: samples side by side give what each gives alone, and reports grow to the same file however they were made.

#![allow(clippy::unwrap_used)]

#[path = "../../armt/tests/small/mod.rs"]
mod small;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use armt::Model;
use armt::config::Alignment;
use armt::engine::Device;
use armt::generate::{Options, generate};
use armt::segment::Batch;
use armt::text::Tokenizer;
use armt_lab::Error;
use armt_lab::eval::babilong::compare::{Judged, Measure, curves, shipped_table, table};
use armt_lab::eval::babilong::{Answered, Cell, Judge, Report, Settings, count};
use armt_lab::eval::results::Experiment;
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babilong::given;
use armt_lab::tasks::babilong::{Babilong, Books, Facts, Form, Length, Stories};

#[path = "../../armt/tests/support/tiny_gpt2.rs"]
mod tiny_gpt2;

const SEGMENT: usize = 16;

/// A book of some sentences, and a tokenizer of little more than bytes.
fn babilong(folder: &Path) -> Babilong {
    let book: String = (0..300).map(|i| format!("In the {i} of all the numbers he found the same as before. ")).collect();
    std::fs::write(folder.join("book.txt"), book).unwrap();
    let (encoder, merges) = tiny_gpt2::write_bpe(folder);
    let tokenizer = Arc::new(Tokenizer::from_gpt2(&encoder, &merges).unwrap());
    Babilong::new(Arc::new(Books::open(folder, tokenizer).unwrap())).unwrap()
}

fn model(memory: usize) -> Model {
    let mut config = small::config("gpt2", 2, small::memories().remove(memory), SEGMENT, Alignment::Left);
    config.backbone["vocab_size"] = tiny_gpt2::VOCAB.into();
    small::model(config, 5, &Device::cpu())
}

fn stories(task: usize) -> Stories {
    Stories::simulated(Task::new(task).unwrap(), 3).unwrap()
}

fn judge(model: &Model, babilong: &Babilong, batch: usize, task: usize, length: usize, facts: Facts) -> Vec<Answered> {
    let mut judge = Judge::new(model, babilong, batch).unwrap();
    judge.cell(&stories(task), Length(length), facts, 6, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// The whole sample as one prompt, alone.
fn plainly(model: &Model, babilong: &Babilong, task: usize, length: usize) -> Vec<String> {
    let options = Options { max_new_tokens: 10, stop: vec![babilong.end_token()], ..Options::default() };
    let say = |number| {
        let sample = babilong.draw(&stories(task), Length(length), number).unwrap();
        let ids: Vec<i32> = sample.tokens().collect::<Result<_, _>>().unwrap();
        let prompt = Batch { ids, texts: 1, mask: None };
        let said = generate(model, &prompt, &model.empty(1).unwrap(), &options, &mut |_| {}).unwrap();
        let tokens: Vec<i32> = said.tokens[0].iter().copied().take_while(|t| *t != babilong.end_token()).collect();
        babilong.tokenizer().decode(&tokens).unwrap().trim().to_string()
    };
    (0..6).map(say).collect()
}

#[test]
fn samples_side_by_side_are_answered_as_each_alone_with_every_memory() {
    let folder = tempfile::tempdir().unwrap();
    let babilong = babilong(folder.path());
    let mut said = Vec::new();
    for memory in 0..small::memories().len() {
        let model = model(memory);
        // Stories of different length, contexts that end within a segment, at its end, and so that the question reaches over it.
        for (task, length) in [(1, 0), (5, 0), (2, 400), (5, 25 * SEGMENT), (5, 25 * SEGMENT - 3), (1, 2000)] {
            let alone = judge(&model, &babilong, 1, task, length, Facts::Told);
            let outputs: Vec<String> = alone.iter().map(|a| a.output.clone()).collect();
            assert_eq!(outputs, plainly(&model, &babilong, task, length), "memory {memory}, qa{task} at {length}");
            for batch in [4, 16] {
                assert_eq!(
                    judge(&model, &babilong, batch, task, length, Facts::Told),
                    alone,
                    "memory {memory}, qa{task} at {length}"
                );
            }
            said.extend(outputs);
        }
    }
    said.sort();
    said.dedup();
    assert!(said.len() > 10, "the model says the same whatever it reads: {said:?}");
}

#[test]
fn an_answer_counts_by_both_rules_and_progress_ends_at_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (babilong, model) = (babilong(folder.path()), model(0));
    let mut seen = Vec::new();
    let mut judge = Judge::new(&model, &babilong, 4).unwrap();
    let answers = judge.cell(&stories(1), Length(1500), Facts::Told, 6, &mut |p| {
        seen.push(p);
        ControlFlow::Continue(())
    });
    assert_eq!(seen.last().map(|p| (p.samples, p.tokens)), Some((6, 9000)));
    assert!(seen.windows(2).all(|p| p[0].tokens <= p[1].tokens && p[0].samples <= p[1].samples), "{seen:?}");
    let mut answers = answers.unwrap();
    (answers[0].exact, answers[0].label, answers[1].label) = (true, true, true);
    let cell = count(stories(1).task(), Length(1500), &answers, true);
    assert_eq!((cell.samples, cell.exact_match, cell.label_match), (6, 1.0 / 6.0, Some(2.0 / 6.0)));
    assert_eq!(count(stories(1).task(), Length(1500), &answers, false).label_match, None);
}

#[test]
fn a_stop_ends_a_cell_between_groups_and_the_judge_can_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let (babilong, model) = (babilong(folder.path()), model(0));
    let mut judge = Judge::new(&model, &babilong, 2).unwrap();
    let all = judge.cell(&stories(1), Length(1200), Facts::Told, 4, &mut |_| ControlFlow::Continue(())).unwrap();
    for after in [0, 1, 3] {
        let mut calls = 0;
        let stopped = judge.cell(&stories(1), Length(1200), Facts::Told, 4, &mut |_| {
            calls += 1;
            if calls > after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(stopped, Err(Error::Interrupted)));
        assert_eq!(judge.cell(&stories(1), Length(1200), Facts::Told, 4, &mut |_| ControlFlow::Continue(())).unwrap(), all);
    }
}

#[test]
fn facts_are_left_out_or_shuffled_and_nothing_else_changes() {
    let folder = tempfile::tempdir().unwrap();
    let babilong = babilong(folder.path());
    for number in 0..5 {
        let draw = |length, facts| babilong.draw_as(&stories(2), Length(length), number, facts).unwrap();
        let text = |length, facts| {
            let tokens: Vec<i32> = draw(length, facts).context().collect::<Result<_, _>>().unwrap();
            assert!(length == 0 || tokens.len() == length);
            babilong.tokenizer().decode(&tokens).unwrap()
        };
        let story = draw(2000, Facts::Told).story;
        let (told, shuffled, without) = (text(2000, Facts::Told), text(2000, Facts::Shuffled), text(2000, Facts::LeftOut));
        assert!(story.facts.iter().all(|f| told.contains(f) && shuffled.contains(f) && !without.contains(f)));
        assert!(told != shuffled && draw(2000, Facts::Shuffled).story == story && draw(2000, Facts::LeftOut).story == story);
        assert_eq!(text(0, Facts::LeftOut), "");
        assert_eq!(text(0, Facts::Shuffled).len(), text(0, Facts::Told).len());
        assert_eq!(draw(2000, Facts::LeftOut).prompt, draw(2000, Facts::Told).prompt);
    }
    // A question alone is still a prompt.
    assert_eq!(judge(&model(0), &babilong, 4, 1, 0, Facts::LeftOut).len(), 6);
}

#[test]
fn what_is_retrieved_are_the_sentences_that_name_what_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let babilong = babilong(folder.path());
    let tokenizer = babilong.tokenizer();
    let text = |tokens: &[i32]| tokenizer.decode(tokens).unwrap().trim().to_string();
    let pieces = |sample: &armt_lab::tasks::babilong::Sample| {
        let (mut context, mut all) = (sample.context(), Vec::new());
        while let Some(piece) = context.next_piece().unwrap() {
            all.push(text(piece.tokens()));
        }
        all
    };
    for number in 0..20 {
        let sample = babilong.draw(&stories(1), Length(4000), number).unwrap();
        let name = sample.story.question.text.trim_end_matches('?').rsplit(' ').next().unwrap().to_string();
        let named: Vec<String> = sample.story.facts.iter().filter(|f| f.contains(&name)).cloned().collect();
        let best = pieces(&sample.retrieved(tokenizer, named.len(), usize::MAX).unwrap());
        assert_eq!(best, named, "{}", sample.story.question.text);
        // Fewer are the later ones of those that are as good; what does not fit is left out.
        let one = sample.retrieved(tokenizer, 1, usize::MAX).unwrap();
        assert!(named.contains(&pieces(&one)[0]));
        assert_eq!(one.prompt.question, sample.prompt.question);
        let few = sample.retrieved(tokenizer, 100, 60).unwrap();
        assert!(few.length() <= 60 && few.length() > 0);
    }
    // The whole story is there where it fits into a segment: what is read is what would be read of it alone.
    let mut config = small::config("gpt2", 2, small::memories().remove(0), 500, Alignment::Left);
    config.backbone["vocab_size"] = tiny_gpt2::VOCAB.into();
    config.backbone["n_positions"] = 600.into();
    let model = small::model(config, 5, &Device::cpu());
    let mut judge = Judge::new(&model, &babilong, 4).unwrap();
    judge.retrieve(1);
    let mut told = Vec::new();
    let answers = judge.cell(&stories(1), Length(4000), Facts::Told, 6, &mut |progress| {
        told.push(progress.tokens);
        ControlFlow::Continue(())
    });
    assert_eq!(answers.unwrap().len(), 6);
    // A sentence fills no segment, so that nothing is read before the answers to four contexts, nor before those to the other two.
    told.dedup();
    assert_eq!(told, [16_000, 24_000]);
}

#[test]
fn what_cannot_be_judged_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let babilong = babilong(folder.path());
    assert!(Judge::new(&model(0), &babilong, 0).err().unwrap().to_string().contains("batch"));
    let few = small::model(small::config("gpt2", 2, small::memories().remove(0), SEGMENT, Alignment::Left), 5, &Device::cpu());
    let error = Judge::new(&few, &babilong, 1).err().unwrap().to_string();
    assert!(error.contains("tokens, up to 268, got one of 23 tokens"), "{error}");
    let model = model(0);
    let mut judge = Judge::new(&model, &babilong, 1).unwrap();
    let error = judge.cell(&stories(3), Length(12), Facts::Told, 1, &mut |_| ControlFlow::Continue(())).err().unwrap().to_string();
    assert!(error.contains("length 12"), "{error}");
}

fn settings() -> Settings {
    Settings {
        model: "m".into(),
        fingerprint: "f".into(),
        seed: 0,
        batch: 4,
        dtype: "f32".into(),
        device: "cpu".into(),
        label_match: true,
        simulated: false,
        facts: Facts::Told,
        retrieve: None,
        form: Form::Mixed,
        file: None,
        file_hash: None,
        books: None,
        babi: None,
        bpe: None,
    }
}

fn cell(task: usize, length: usize, exact_match: f64) -> Cell {
    let label_match = Some((exact_match + 0.1).min(1.0));
    Cell { task: Task::new(task).unwrap(), length: Length(length), samples: 10, exact_match, label_match, csv: None }
}

fn report(cells: &[Cell]) -> Report {
    let mut report = Report::new(Some("ARMT".into()), settings());
    cells.iter().for_each(|c| report.put(c.clone()));
    report
}

#[test]
fn a_report_is_the_same_in_whatever_order_its_cells_came_and_survives_its_file() {
    let cells = [cell(1, 0, 1.0), cell(1, 16_000, 0.9), cell(2, 0, 0.5), cell(10, 1_000_000, 0.25)];
    let mut backwards = cells.to_vec();
    backwards.reverse();
    assert_eq!(report(&cells), report(&backwards));
    assert_eq!(report(&cells).cells, cells);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    assert!(Report::resume(&path, &settings()).unwrap().is_none());
    report(&cells).save(&path).unwrap();
    assert_eq!(Report::resume(&path, &settings()).unwrap().unwrap(), report(&cells));
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(r#""task": "babilong""#) && text.contains(r#""length": "16k""#) && text.contains(r#""task": "qa10""#));
    for (other, part) in [
        (Settings { fingerprint: "g".into(), ..settings() }, r#"(fingerprint "f", now "g")"#),
        (Settings { facts: Facts::LeftOut, ..settings() }, r#"(facts "told", now "left_out")"#),
        (Settings { books: Some("b".into()), ..settings() }, r#"(books null, now "b")"#),
        (Settings { retrieve: Some(5), ..settings() }, r#"(retrieve null, now 5)"#),
        (Settings { file: Some("s.jsonl".into()), ..settings() }, r#"(file null, now "s.jsonl")"#),
    ] {
        let error = Report::resume(&path, &other).unwrap_err().to_string();
        assert!(error.contains("a.json: it has results of other settings") && error.contains(part), "{error}");
    }
    for (wrong, part) in [
        (text.replace("babilong", "rewrite"), "expected a report"),
        (text.replace("qa10", "qa30"), "qa1 to qa20"),
        (text.replace("0.25", "2.5"), "expected shares from 0 to 1"),
        (text[..text.len() / 2].to_string(), "expected a report"),
    ] {
        std::fs::write(&path, wrong).unwrap();
        let error = Report::resume(&path, &settings()).unwrap_err().to_string();
        assert!(error.contains("a.json") && error.contains(part), "{error}");
    }
}

/// A file of samples may change under its name, and reports of before did not say what was in it.
#[test]
fn a_report_is_of_what_its_file_of_samples_held() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("a.json"), folder.path().join("s.jsonl"));
    let of = |hash: Option<&str>| Settings { file: Some("s.jsonl".into()), file_hash: hash.map(String::from), ..settings() };
    let save = |settings| Report { cells: vec![cell(1, 0, 0.5)], ..Report::new(None, settings) }.save(&path).unwrap();
    save(of(Some("1")));
    let error = Report::resume(&path, &of(Some("2"))).unwrap_err().to_string();
    assert!(error.contains(r#"(file_hash "1", now "2")"#), "{error}");
    let error = Report::resume(&path, &settings()).unwrap_err().to_string();
    assert!(error.contains(r#"(file "s.jsonl", now null)"#), "{error}");
    save(of(None));
    let found = Report::resume(&path, &of(Some("2"))).unwrap().unwrap();
    assert_eq!((found.cells.len(), found.settings.file_hash.as_deref()), (1, Some("2")));
    std::fs::write(&file, "one").unwrap();
    let before = given::hash(&file).unwrap();
    std::fs::write(&file, "two").unwrap();
    assert_ne!(before, given::hash(&file).unwrap());
}

#[test]
fn reports_of_one_name_that_are_of_different_texts_are_no_seeds() {
    let (one, mut shipped) = (report(&[cell(1, 0, 1.0)]), report(&[cell(1, 0, 1.0)]));
    let both = |other: &Report| Judged::all(Measure::ExactMatch, [("A".into(), one.clone()), ("A".into(), other.clone())]);
    let others: [(&str, fn(&mut Settings)); 7] = [
        ("facts", |s| s.facts = Facts::LeftOut),
        ("retrieve", |s| s.retrieve = Some(5)),
        ("form", |s| s.form = Form::Now),
        ("simulated", |s| s.simulated = true),
        ("file", |s| s.file = Some("f".into())),
        ("books", |s| s.books = Some("b".into())),
        ("babi", |s| s.babi = Some("b".into())),
    ];
    (shipped.settings.form, shipped.settings.model) = (Form::Now, "models/own".into());
    let rows = |report: &Report| {
        shipped_table(&Judged::all(Measure::ExactMatch, [("own".into(), report.clone())]).unwrap()).lines().count() - 2
    };
    assert_eq!(rows(&shipped), 1);
    for (key, change) in others {
        let mut other = one.clone();
        change(&mut other.settings);
        let error = both(&other).unwrap_err().to_string();
        assert!(error.contains(&format!("A: expected reports of one {key} under one name")), "{error}");
        let mut other = shipped.clone();
        change(&mut other.settings);
        assert_eq!(rows(&other), usize::from(key == "form"), "{key}");
    }
    assert!(both(&Report { settings: Settings { seed: 1, fingerprint: "g".into(), ..settings() }, ..one.clone() }).is_ok());
}

#[test]
fn cells_that_several_add_to_one_file_are_all_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    // Each has read the file before any has written to it, as commands do that begin together.
    std::thread::scope(|scope| {
        for task in 1..=10 {
            let path = &path;
            scope.spawn(move || {
                let mut own = report(&[]);
                [0, 1000, 2000].into_iter().for_each(|length| own.add(cell(task, length, 0.5), path).unwrap());
            });
        }
    });
    assert_eq!(Report::load(&path).unwrap().cells.len(), 30);
    // Of equals that with more samples stays, and other settings are still refused.
    let mut own = report(&[]);
    own.add(Cell { samples: 5, exact_match: 0.1, ..cell(1, 0, 0.5) }, &path).unwrap();
    assert_eq!(Report::load(&path).unwrap().cell(Task::new(1).unwrap(), Length(0)).unwrap().samples, 10);
    let mut other = Report::new(None, Settings { seed: 1, ..settings() });
    assert!(other.add(cell(1, 0, 0.5), &path).unwrap_err().to_string().contains("seed"));
}

#[test]
fn models_are_compared_by_their_means_and_a_mean_needs_every_task() {
    let one = report(&[cell(1, 0, 1.0), cell(1, 1000, 0.8), cell(2, 0, 0.5)]);
    let two = report(&[cell(1, 0, 0.6), cell(1, 1000, 0.6), cell(2, 0, 0.3), cell(2, 1000, 0.2)]);
    let named = |reports: &[(&str, &Report)]| reports.iter().map(|(n, r)| (n.to_string(), (*r).clone())).collect::<Vec<_>>();
    let models = Judged::all(Measure::ExactMatch, named(&[("A|B", &one), ("RMT", &two)])).unwrap();
    let text = table(&models);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "| exact match in %, tokens | task | form | 0k | 1k | samples | seeds |");
    assert_eq!(
        lines[2..5],
        [
            "| A\\|B | qa1 | mixed | 100.0 [72.2, 100.0] | 80.0 [49.0, 94.3] | 10 | 1 |",
            "| A\\|B | qa2 | mixed | 50.0 [23.7, 76.3] | - | 10 | 1 |",
            "| A\\|B | mean | mixed | 75.0 | - | 10 | 1 |"
        ]
    );
    assert_eq!(lines[7], "| RMT | mean | mixed | 45.0 | 40.0 | 10 | 1 |");
    let plot = curves(&models);
    assert_eq!(plot.series.iter().map(|s| s.marks.len()).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((plot.series[1].marks[0].x, plot.series[1].marks[1].x), (500.0, 1000.0), "0k lies before 1k");
    let seeds = Judged::all(Measure::LabelMatch, named(&[("A", &one), ("A", &two)])).unwrap();
    let qa1 = curves(&seeds).series[0].marks.clone();
    assert!((qa1[0].y - 0.85).abs() < 1e-9 && qa1[0].spread == Some((0.7, 1.0)), "{qa1:?}");
    assert!(table(&seeds).contains("| A | qa1 | mixed | 85.0 (70.0 to 100.0) |"), "{}", table(&seeds));
    assert_eq!(seeds[0].heat_map().rows.iter().map(|r| r.0.as_str()).collect::<Vec<_>>(), ["qa1", "qa2", "mean"]);
    assert!(seeds[0].heat_map().svg().is_ok() && curves(&seeds).svg().is_ok());
    // A model of its own for each task, beside one that has only the first.
    let (first, second) = (report(&[cell(1, 0, 1.0), cell(1, 1000, 0.8)]), report(&[cell(2, 0, 0.5)]));
    let models =
        Judged::all(Measure::ExactMatch, named(&[("A", &first), ("A", &second), ("RMT", &report(&[cell(1, 0, 0.2)]))])).unwrap();
    let rows = [
        "| A | qa1 | mixed | 100.0 [72.2, 100.0] | 80.0 [49.0, 94.3] | 10 | 1 |",
        "| A | qa2 | mixed | 50.0 [23.7, 76.3] | - | 10 | 1 |",
        "| RMT | qa1 | mixed | 20.0 [5.7, 51.0] | - | 10 | 1 |",
    ];
    assert_eq!(table(&models).lines().skip(2).collect::<Vec<_>>(), rows);
    assert_eq!(curves(&models).series.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["A, qa1", "A, qa2", "RMT, qa1"]);
    assert_eq!(models[0].heat_map().rows.len(), 2);
    assert!(Judged::all(Measure::ExactMatch, named(&[("A", &report(&[]))])).is_err());
    let without = report(&[Cell { label_match: None, ..cell(1, 0, 1.0) }]);
    assert!(Judged::all(Measure::LabelMatch, named(&[("A", &without)])).unwrap_err().to_string().contains("--label-match"));
}

#[test]
fn files_of_a_models_tasks_are_one_model_of_the_results() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("babilong");
    std::fs::create_dir(&folder).unwrap();
    for (file, cell) in [("ARMT.json", cell(1, 0, 1.0)), ("ARMT.qa2.json", cell(2, 0, 0.5)), ("RMT.qa.json", cell(1, 0, 0.2))] {
        Report { name: None, ..report(&[cell]) }.save(&folder.join(file)).unwrap();
    }
    let mut own = Report { name: None, ..report(&[cell(1, 0, 0.9), cell(1, 1_000, 0.8), cell(1, 64_000, 0.7)]) };
    (own.settings.model, own.settings.form) = ("models/own".into(), Form::Now);
    own.save(&folder.join("own.json")).unwrap();
    // The same model's weights, but not what it remembers.
    own.settings.retrieve = Some(5);
    own.save(&folder.join("retrieved.json")).unwrap();
    let experiments = Experiment::all(place.path()).unwrap();
    let rows = [
        "| ARMT | qa1 | mixed | 100.0 [72.2, 100.0] | 10 | 1 |",
        "| ARMT | qa2 | mixed | 50.0 [23.7, 76.3] | 10 | 1 |",
        "| RMT.qa | qa1 | mixed | 20.0 [5.7, 51.0] | 10 | 1 |",
    ];
    let [all, shipped] = &experiments[0].tables[..] else { panic!("no paper's table, and not {:?}", experiments[0].tables) };
    let of_others = |line: &&str| line.contains("mixed");
    assert_eq!(all.text.lines().filter(of_others).map(|line| line.replace(" - |", "")).collect::<Vec<_>>(), rows);
    let front =
        ["| model | task | 0k | 64k |", "| --- | --- | --- | --- |", "| `own` | qa1 | 90.0 [59.6, 98.2] | 70.0 [39.7, 89.2] |"];
    assert_eq!((shipped.name, shipped.text.lines().collect::<Vec<_>>()), ("babilong-shipped", front.to_vec()));
    // A panel for each task, with every model's name once.
    let (_, svg) = experiments[0].plots.iter().find(|(path, _)| path.ends_with("accuracy.svg")).unwrap();
    assert_eq!([">qa1<", ">qa2<", ">ARMT<", ">RMT.qa<"].map(|part| svg.matches(part).count()), [1; 4]);
}
