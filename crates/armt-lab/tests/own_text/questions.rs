//! Questions about contexts: how rows are read, how contexts are hidden, and what is learned and judged.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use armt::engine::{DType, Device};
use armt::model::Model;
use armt::text::Tokenizer;
use armt_lab::eval::qa;
use armt_lab::tasks::babilong::Length;
use armt_lab::tasks::check;
use armt_lab::tasks::qa::{Fields, Hiding, read};
use armt_lab::tasks::training::Sizes;
use armt_lab::tasks::words::Words;
use armt_lab::train::recipe::Recipe;
use armt_lab::train::trainer::best_model;

use super::{TEXT, run, shipped, task, tokenizer, words, write};

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
