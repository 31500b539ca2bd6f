//! BABILong's training texts: whole segments, questions at the end, and answers that follow from the facts.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use armt::random::Random;
use armt::recurrence::Targets;
use armt::text::Tokenizer;
use armt_lab::tasks::TaskBatch;
use armt_lab::tasks::babi::Task;
use armt_lab::tasks::babi::solve::Knowledge;
use armt_lab::tasks::babilong::{Babilong, BabilongTraining, Books, Form, Prefer};
use armt_lab::tasks::training::TrainingTask;

/// The test books, opened once: they take a second to tokenise.
static BABILONG: LazyLock<Arc<Babilong>> = LazyLock::new(|| {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let tokenizer = Arc::new(Tokenizer::find(&data.join("gpt2")).unwrap().unwrap());
    let books = Books::open(&data.join("books/test"), tokenizer).unwrap();
    Arc::new(Babilong::new(Arc::new(books)).unwrap())
});

fn training() -> BabilongTraining {
    BabilongTraining {
        babilong: vec![BABILONG.clone()],
        tasks: vec![Task::new(1).unwrap()],
        segment: 64,
        segments: 3,
        facts: 6,
        questions: 3,
        aligned: false,
        direct: false,
        alone: 0.0,
        clusters: 0.0,
        distract: 0,
        again: 0.0,
        gifts: 0.0,
        cut: 0.0,
        prefer: None,
        batch: 5,
        vary: false,
    }
}

/// Texts as words, cut after each EOS.
fn pieces(training: &BabilongTraining, ids: &[i32]) -> Vec<String> {
    let end = training.babilong[0].end_token();
    let pieces = ids.split(|id| *id == end).filter(|piece| !piece.is_empty());
    pieces.map(|piece| training.babilong[0].tokenizer().decode(piece).unwrap()).collect()
}

/// The facts of each text of a batch, and the first question after them.
fn stories(training: &BabilongTraining) -> Vec<(Vec<String>, String)> {
    let batch = training.batch(&mut Random::new(3)).unwrap();
    let (length, ask, end) = (batch.batch.tokens(), training.babilong[0].ask_token(), training.babilong[0].end_token());
    let texts = batch.batch.ids.chunks(length).zip(batch.targets.next.chunks(length));
    let stories = texts.map(|(ids, next)| {
        let asked = ids.iter().position(|id| *id == ask).unwrap();
        let told: Vec<i32> = (0..asked).filter(|i| next[*i] == -1 && ids[*i] != end).map(|i| ids[i]).collect();
        let told = training.babilong[0].tokenizer().decode(&told).unwrap();
        let mut facts: Vec<String> = told.split_inclusive('.').map(|fact| fact.trim().to_string()).collect();
        let question = facts.pop().unwrap();
        (facts, question)
    });
    stories.collect()
}

/// Every target is the token after it, and stands where GEN or a token of an answer does.
fn expect_targets(training: &BabilongTraining, batch: &TaskBatch) {
    let length = batch.batch.tokens();
    let (ask, end) = (training.babilong[0].ask_token(), training.babilong[0].end_token());
    assert_eq!(batch.targets.next.len(), batch.batch.ids.len());
    for (ids, next) in batch.batch.ids.chunks(length).zip(batch.targets.next.chunks(length)) {
        let mut answering = false;
        for i in 0..length {
            answering = ids[i] == ask || (answering && ids[i] != end);
            assert!(if answering { next[i] == ids[i + 1] } else { next[i] < 0 }, "position {i} has {}", next[i]);
        }
    }
}

#[test]
fn a_stage_names_each_task_once_and_how_often_it_comes() {
    let tasks = [1, 3, 2, 3, 3].map(|number| Task::new(number).unwrap()).to_vec();
    assert_eq!(BabilongTraining { tasks, ..training() }.name(), "qa1, 3 qa3, qa2, up to 6 facts in 3 x 64 tokens");
    assert_eq!(BabilongTraining { aligned: true, ..training() }.name(), "qa1, a fact in each of 3 x 64 tokens");
}

#[test]
fn an_aligned_text_has_a_fact_or_a_question_in_each_segment_and_they_answer_it() {
    for number in [1, 2, 5] {
        let training = BabilongTraining {
            tasks: vec![Task::new(number).unwrap()],
            segment: 24,
            segments: 16,
            questions: 2,
            aligned: true,
            ..training()
        };
        let batch = training.batch(&mut Random::new(3)).unwrap();
        assert_eq!((batch.batch.texts, batch.batch.tokens()), (5, 16 * 24));
        expect_targets(&training, &batch);
        for text in batch.batch.ids.chunks(16 * 24) {
            let segments: Vec<Vec<String>> = text.chunks(24).map(|s| pieces(&training, s)).collect();
            assert!(segments.iter().all(|s| s.len() == 1), "{segments:?}");
            let told = segments.iter().position(|s| s[0].contains("GEN")).unwrap();
            assert!([14, 15].contains(&told), "one or two questions at the end");
            let facts: Vec<String> = segments[..told].iter().map(|s| s[0].clone()).collect();
            let known = Knowledge::of(&facts).unwrap();
            for asked in &segments[told..] {
                let (question, answer) = asked[0].split_once("GEN").unwrap();
                assert_eq!(known.answers(question).unwrap()[0].text, answer, "{question} {facts:?}");
            }
        }
    }
}

#[test]
fn a_text_with_background_is_whole_segments_and_asks_at_its_end() {
    let training = BabilongTraining { batch: 60, ..training() };
    let batch = training.batch(&mut Random::new(4)).unwrap();
    assert_eq!((batch.batch.texts, batch.batch.tokens()), (60, 3 * 64));
    expect_targets(&training, &batch);
    let end = training.babilong[0].end_token();
    let (mut questions, mut ends, mut own) = (0, HashSet::new(), 0);
    for text in batch.batch.ids.chunks(3 * 64) {
        let last = text.iter().rposition(|id| *id != end).unwrap() + 1;
        assert!(last >= 2 * 64, "the last segment has a part of the last answer, if only its EOS");
        ends.insert(last);
        let asked = text.iter().filter(|id| **id == training.babilong[0].ask_token()).count();
        assert!((1..=3).contains(&asked), "{asked} questions");
        questions += asked;
        // All but the first are pieces of their own; the first stands behind the context.
        for piece in &pieces(&training, text)[1..] {
            assert!(piece.starts_with("Where is ") && piece.contains("?GEN"), "{piece}");
        }
        let asks = |piece: &String| piece.starts_with("Where is ");
        own += usize::from(pieces(&training, &text[2 * 64..]).first().is_some_and(asks));
    }
    assert!(questions > 60, "several questions where they fit");
    assert!(ends.len() > 20, "texts end anywhere: {ends:?}");
    assert!((6..30).contains(&own), "about one in four asks in a segment of its own: {own} of 60");
    let judged = training.validation(0, 7, &mut Random::new(5)).unwrap();
    for text in judged.batch.ids.chunks(3 * 64) {
        assert_eq!(text.iter().filter(|id| **id == training.babilong[0].ask_token()).count(), 1);
    }
}

/// What is not marked as background is the story's facts, whole: no sentence of a book, and none that only seems to be a fact.
#[test]
fn all_but_the_facts_of_a_story_is_marked_as_background() {
    let training = BabilongTraining { batch: 40, distract: 4, segments: 6, ..training() };
    let batch = training.batch(&mut Random::new(7)).unwrap();
    let (length, ask) = (batch.batch.tokens(), training.babilong[0].ask_token());
    let mut passed = 0;
    for (ids, next) in batch.batch.ids.chunks(length).zip(batch.targets.next.chunks(length)) {
        let question = ids.iter().position(|id| *id == ask).unwrap();
        let context = next[..question].iter().rposition(|next| *next == Targets::BACKGROUND).unwrap() + 1;
        let kept: Vec<i32> = (0..context).filter(|i| next[*i] == -1).map(|i| ids[i]).collect();
        passed += context - kept.len();
        let facts = training.babilong[0].tokenizer().decode(&kept).unwrap();
        let facts: Vec<String> = facts.split_inclusive('.').map(|fact| fact.trim().to_string()).collect();
        assert!(facts.iter().all(|fact| fact.ends_with('.')), "{facts:?}");
        Knowledge::of(&facts).unwrap();
    }
    assert!(passed > 40 * 100, "{passed} tokens of background");
}

/// Of 30 facts some gift mostly has an older one between the same people, or of the same thing.
#[test]
fn what_is_answered_again_is_asked_first_where_a_stage_says_so() {
    let several = |again: f64| {
        let tasks = vec![Task::new(5).unwrap()];
        let training = BabilongTraining { tasks, facts: 30, segments: 12, questions: 1, batch: 60, again, ..training() };
        let several = stories(&training).into_iter();
        let several = several.filter(|(facts, question)| Knowledge::of(facts).unwrap().answers(question).unwrap().len() > 1);
        several.count()
    };
    let (seldom, often) = (several(0.0), several(1.0));
    assert!(seldom < 40 && often > seldom + 10, "{seldom} and {often} of 60");
}

#[test]
fn preferred_questions_come_first_in_their_share_of_the_texts() {
    let asked = |share: f64| {
        let prefer = Some(Prefer { questions: "What did".into(), share });
        let tasks = vec![Task::new(5).unwrap()];
        let training = BabilongTraining { tasks, facts: 30, segments: 12, questions: 1, batch: 60, prefer, ..training() };
        let batch = training.batch(&mut Random::new(5)).unwrap();
        batch.batch.ids.chunks(batch.batch.tokens()).filter(|ids| pieces(&training, ids)[0].contains("What did")).count()
    };
    let (never, half, always) = (asked(0.0), asked(0.5), asked(1.0));
    assert!(never < half && half < always, "{never}, {half}, {always} of 60");
    assert_eq!(always, 60, "each gift answers such a question");
    for (questions, share, key) in
        [("What did", 1.5, "prefer.share"), ("What did", f64::NAN, "prefer.share"), ("", 0.5, "prefer.questions")]
    {
        let training = BabilongTraining { prefer: Some(Prefer { questions: questions.into(), share }), ..training() };
        assert!(training.check().unwrap_err().to_string().contains(key), "{key}");
    }
}

#[test]
fn stories_of_gifts_alone_are_of_several_things() {
    let tasks = vec![Task::new(5).unwrap()];
    for aligned in [false, true] {
        let training = BabilongTraining { tasks: tasks.clone(), segments: 8, gifts: 1.0, batch: 40, aligned, ..training() };
        let several = stories(&training).into_iter().filter(|(facts, _)| {
            let gave = |fact: &String| ["gave", "passed", "handed"].iter().any(|word| fact.contains(word));
            assert!(facts.iter().all(gave), "{facts:?}");
            ["milk", "apple", "football"].iter().filter(|thing| facts.iter().any(|fact| fact.contains(*thing))).count() > 1
        });
        let several = several.count();
        assert!(several > 25, "{several} of 40 tell of more than one thing");
    }
}

#[test]
fn borders_between_segments_cut_facts_in_the_share_of_texts_that_a_stage_names() {
    let cut = |cut: f64| {
        let training = BabilongTraining { segments: 4, questions: 1, batch: 60, cut, ..training() };
        for (facts, question) in stories(&training) {
            let known = Knowledge::of(&facts).unwrap();
            assert!(!known.answers(&question).unwrap().is_empty(), "{question} {facts:?}");
        }
        let batch = training.batch(&mut Random::new(3)).unwrap();
        assert_eq!(batch.batch.tokens(), 4 * 64);
        // The first two borders: the third may cut a question.
        let is_fact = |next: i32| next != Targets::BACKGROUND;
        let texts = batch.targets.next.chunks(4 * 64);
        texts.flat_map(|next| [64, 128].map(|border| is_fact(next[border - 1]) && is_fact(next[border]))).filter(|cut| *cut).count()
    };
    let (seldom, often) = (cut(0.0), cut(1.0));
    assert!(seldom < 50 && often > seldom + 40, "{seldom} and {often} of 120 borders");
}

#[test]
fn a_varying_number_of_segments_stays_within_the_stage_and_seeds_decide_it() {
    let training = BabilongTraining { vary: true, ..training() };
    let lengths: Vec<usize> = (0..30).map(|i| training.batch(&mut Random::new(i)).unwrap().batch.tokens() / 64).collect();
    assert!((1..=3).all(|n| lengths.contains(&n)) && lengths.iter().all(|n| *n <= 3), "{lengths:?}");
    let ids = |seed| training.batch(&mut Random::new(seed)).unwrap().batch.ids;
    assert_eq!(ids(1), ids(1));
    assert_ne!(ids(1), ids(2));
}

#[test]
fn every_task_that_can_be_simulated_has_texts_of_every_length() {
    for number in 1..=5 {
        let task = Task::new(number).unwrap();
        let training = BabilongTraining { tasks: vec![task], segment: 32, segments: 6, facts: 6, vary: true, ..training() };
        let aligned = BabilongTraining { aligned: true, ..training.clone() };
        // A story of qa4 has two facts, so that its aligned texts have three segments.
        let aligned = if number == 4 { BabilongTraining { segments: 3, ..aligned } } else { aligned };
        for seed in 0..6 {
            for training in [&training, &aligned] {
                let batch = training.batch(&mut Random::new(seed)).unwrap();
                assert_eq!(batch.batch.tokens() % 32, 0);
                expect_targets(training, &batch);
            }
        }
    }
}

/// A fact in each of two segments, then the question: it stands in one of them, but for "What is" and the mark.
#[test]
fn direct_questions_repeat_a_facts_words() {
    let training = BabilongTraining {
        tasks: vec![Task::new(4).unwrap()],
        segment: 32,
        segments: 3,
        aligned: true,
        questions: 1,
        batch: 40,
        ..training()
    };
    let repeated = |training: &BabilongTraining| {
        let batch = training.batch(&mut Random::new(3)).unwrap();
        let texts = batch.batch.ids.chunks(96).map(|text| pieces(training, text));
        texts
            .filter(|text| {
                text[..2].iter().any(|fact| fact.contains(text[2].split_once("What is ").unwrap().1.split_once('?').unwrap().0))
            })
            .count()
    };
    assert_eq!(repeated(&BabilongTraining { direct: true, ..training.clone() }), 40);
    assert!(repeated(&training) < 30);
}

#[test]
fn sizes_without_room_are_refused_by_their_key() {
    let said = |training: BabilongTraining| match training.check() {
        Err(error) => error.to_string(),
        Ok(()) => training.batch(&mut Random::new(0)).unwrap_err().to_string(),
    };
    assert!(said(BabilongTraining { segments: 0, ..training() }).contains("segments"));
    assert!(said(BabilongTraining { aligned: true, segments: 1, ..training() }).contains("at least 2"));
    assert!(said(BabilongTraining { segment: 6, segments: 1, ..training() }).contains("room for a fact and a question"));
    assert!(said(BabilongTraining { aligned: true, segment: 4, ..training() }).contains("room for every fact"));
    assert!(said(BabilongTraining { tasks: vec![Task::new(7).unwrap()], ..training() }).contains("qa1 to qa5"));
    assert!(said(BabilongTraining { direct: true, ..training() }).contains("qa4"));
}

/// The facts of a text without background, and what is asked of them.
fn told(text: &str) -> (Vec<String>, String, String) {
    let (said, answer) = text.split_once("GEN").unwrap();
    let at = said[..said.len() - 1].rfind(['.', '?']).unwrap() + 1;
    let facts = said[..at].split_inclusive(['.', '?']).map(|f| f.trim().to_string()).collect();
    (facts, said[at..].trim().to_string(), answer.to_string())
}

#[test]
fn facts_alone_have_no_background_and_take_no_more_segments_than_they_need() {
    for number in 1..=5 {
        let task = Task::new(number).unwrap();
        let training =
            BabilongTraining { tasks: vec![task], alone: 1.0, facts: 12, questions: 1, segment: 128, segments: 9, ..training() };
        let example = training.batch(&mut Random::new(7)).unwrap();
        expect_targets(&training, &example);
        assert!(example.batch.tokens() <= 3 * 128 && example.batch.tokens().is_multiple_of(128), "{}", example.batch.tokens());
        for text in example.batch.ids.chunks(example.batch.tokens()) {
            let (facts, question, answer) = told(&pieces(&training, text)[0]);
            assert_eq!(Knowledge::of(&facts).unwrap().answers(&question).unwrap()[0].text, answer, "{question} {facts:?}");
        }
    }
}

#[test]
fn sentences_that_only_seem_to_be_facts_come_in_half_of_the_texts_and_change_no_answer() {
    let training = BabilongTraining { alone: 1.0, distract: 4, questions: 1, segment: 256, batch: 60, ..training() };
    let example = training.batch(&mut Random::new(8)).unwrap();
    let mut misled = 0;
    for text in example.batch.ids.chunks(example.batch.tokens()) {
        let (said, question, answer) = told(&pieces(&training, text)[0]);
        let facts: Vec<String> = said.iter().filter(|s| Knowledge::of(std::slice::from_ref(*s)).is_ok()).cloned().collect();
        misled += usize::from(facts.len() < said.len());
        assert_eq!(Knowledge::of(&facts).unwrap().answers(&question).unwrap()[0].text, answer, "{question} {said:?}");
    }
    assert!((15..46).contains(&misled), "{misled} of 60");
}

#[test]
fn facts_side_by_side_stand_in_at_most_three_places() {
    let places = |clusters: f64| {
        let training = BabilongTraining { clusters, facts: 10, questions: 1, segment: 512, segments: 2, batch: 40, ..training() };
        let example = training.batch(&mut Random::new(9)).unwrap();
        let count = |text: &[i32]| {
            let text = &pieces(&training, text)[0];
            let facts: Vec<&str> = text.split_inclusive('.').collect();
            let is_fact = |s: &str| Knowledge::of(&[s.trim().to_string()]).is_ok();
            (0..facts.len()).filter(|i| is_fact(facts[*i]) && (*i == 0 || !is_fact(facts[i - 1]))).count()
        };
        example.batch.ids.chunks(example.batch.tokens()).map(count).max().unwrap()
    };
    assert!(places(1.0) <= 3 && places(0.0) > 3, "{} and {}", places(1.0), places(0.0));
}

#[test]
fn each_text_is_of_one_task_and_its_first_question_is_of_that() {
    let tasks: Vec<Task> = [1, 4, 5].map(|n| Task::new(n).unwrap()).to_vec();
    let training = BabilongTraining { tasks, alone: 1.0, questions: 1, segment: 256, batch: 60, ..training() };
    let example = training.batch(&mut Random::new(10)).unwrap();
    let mut counts = [0; 3];
    for text in example.batch.ids.chunks(example.batch.tokens()) {
        let (facts, question, _) = told(&pieces(&training, text)[0]);
        let kind = if question.starts_with("Where") { 0 } else { 1 + usize::from(facts.iter().all(|f| !f.contains(" of the "))) };
        counts[kind] += 1;
    }
    assert!(counts.iter().all(|n| *n > 8), "{counts:?}");
    let aligned = BabilongTraining { tasks: training.tasks.clone(), aligned: true, segment: 24, segments: 8, ..training };
    let example = aligned.batch(&mut Random::new(11)).unwrap();
    assert_eq!(example.batch.tokens(), 8 * 24, "stories of two facts leave segments empty");
    expect_targets(&aligned, &example);
}

#[test]
fn texts_are_written_in_every_form_that_there_is() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let tokenizer = BABILONG.tokenizer();
    let open = |form: &Form| {
        let books = Books::open_in(*form, &data.join("books/test"), tokenizer.clone()).unwrap();
        Arc::new(Babilong::new(Arc::new(books)).unwrap())
    };
    let training =
        BabilongTraining { babilong: [Form::Now, Form::Paper].iter().map(open).collect(), batch: 30, segment: 256, ..training() };
    let example = training.batch(&mut Random::new(12)).unwrap();
    let texts: Vec<String> = example.batch.ids.chunks(3 * 256).map(|text| pieces(&training, text)[0].clone()).collect();
    let facts = ["John ", "Mary ", "Sandra ", "Daniel "].map(|name| format!(".{name}"));
    let close = texts.iter().filter(|text| facts.iter().any(|fact| text.contains(fact.as_str()))).count();
    assert!((5..26).contains(&close), "about half have no space before a fact: {close} of 30");
}
