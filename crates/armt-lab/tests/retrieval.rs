//! Associative retrieval judged: exact match is that of generation, and curves hold together.

#![allow(clippy::unwrap_used)]

#[path = "../../armt/tests/small/mod.rs"]
mod small;

use std::ops::ControlFlow;

use armt::config::{Alignment, Config, ModelType};
use armt::engine::Device;
use armt::generate::{Options, generate};
use armt::memory::{Associative, MemoryConfig, Prmt, Rmt};
use armt::model::Model;
use armt::random::Random;
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt_lab::eval::retrieval::{Point, Report, StateSize, count_exact, curve};
use armt_lab::tasks::retrieval::{Retrieval, SYMBOLS, Setting, VOCAB};
use serde_json::json;

const TASK: Retrieval = Retrieval { setting: Setting::Remember, key_size: 2, value_size: 2, symbols: SYMBOLS };

fn model(memory: MemoryConfig, seed: u64) -> Model {
    let backbone = json!({"model_type": "gpt_neox", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "rotary_pct": 0.5});
    let segment_size = TASK.segment_size();
    let config = Config {
        model_type: ModelType::Armt,
        segment_size,
        segment_alignment: Alignment::Left,
        after_question: None,
        memory,
        backbone,
    };
    small::model(config, seed, &Device::cpu())
}

fn associative() -> MemoryConfig {
    MemoryConfig::new(Associative::new(2, 4))
}

#[test]
fn exact_match_is_that_of_greedy_generation() {
    for memory in [
        associative(),
        MemoryConfig::new(Rmt { tokens: 2, wrap_pos: false }),
        MemoryConfig::new(Prmt { tokens: 2, wrap_pos: false }),
    ] {
        let model = model(memory, 1);
        let (pairs, texts, answer) = (3, 4, TASK.value_size + 1);
        let mut example = TASK.batch(pairs, texts, &mut Random::new(2)).unwrap();
        let tokens = example.batch.tokens();
        // A random model is never right, so the first text's answer becomes what it says, and the second's all but its last token.
        let prompt = |ids: &[i32]| {
            let ids = ids.chunks(tokens).flat_map(|row| row[..tokens - answer].to_vec()).collect();
            Batch { ids, texts, mask: None }
        };
        let options = Options { max_new_tokens: answer, ..Options::default() };
        let empty = model.empty(texts).unwrap();
        let said = generate(&model, &prompt(&example.batch.ids), &empty, &options, &mut |_| {}).unwrap().tokens;
        for (text, right) in [(0, answer), (1, answer - 1), (2, 0)] {
            for (i, token) in said[text][..right].iter().enumerate() {
                let at = text * tokens + tokens - answer + i;
                example.batch.ids[at] = *token;
                example.targets.next[at - 1] = *token;
            }
        }
        let again = generate(&model, &prompt(&example.batch.ids), &empty, &options, &mut |_| {}).unwrap().tokens;
        let rows = example.batch.ids.chunks(tokens);
        let generated = again.iter().zip(rows).filter(|(said, row)| said[..] == row[tokens - answer..]).count();
        assert_eq!(generated, 1);
        for schedule in [ScheduleKind::Auto, ScheduleKind::Sequential] {
            assert_eq!(count_exact(&model, &example, schedule).unwrap(), generated, "{}", model.config().memory.kind());
        }
    }
}

#[test]
fn a_text_that_is_asked_nothing_does_not_count() {
    let model = model(associative(), 1);
    let mut example = TASK.batch(1, 2, &mut Random::new(1)).unwrap();
    example.targets.next.fill(-1);
    assert_eq!(count_exact(&model, &example, ScheduleKind::Auto).unwrap(), 0);
    example.targets.next.pop();
    assert!(count_exact(&model, &example, ScheduleKind::Auto).is_err());
}

#[test]
fn a_curve_has_a_point_for_each_number_of_pairs_and_is_seeded() {
    let model = model(associative(), 1);
    let mut seen = Vec::new();
    let mut each = |p: &Point| {
        seen.push((p.pairs, p.samples));
        ControlFlow::Continue(())
    };
    let points = curve(&model, TASK, &[1, 4], 5, 2, 3, &mut each).unwrap();
    assert_eq!(seen, [(1, 2), (1, 4), (1, 5), (4, 2), (4, 4), (4, 5)]);
    assert_eq!(points.iter().map(|p| (p.pairs, p.samples)).collect::<Vec<_>>(), [(1, 5), (4, 5)]);
    let alone = curve(&model, TASK, &[4], 5, 2, 3, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(alone[0], points[1], "a point does not depend on those before it");
    let stopped = curve(&model, TASK, &[1, 4], 5, 2, 3, &mut |p| {
        if p.pairs == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(stopped.unwrap(), points[..1]);
}

#[test]
fn a_curve_refuses_what_does_not_fit() {
    let model = model(associative(), 1);
    let of = |task, pairs: &[usize], samples| {
        curve(&model, task, pairs, samples, 2, 0, &mut |_| ControlFlow::Continue(())).unwrap_err().to_string()
    };
    let said = of(Retrieval { key_size: 1, ..TASK }, &[1], 1);
    assert!(said.contains("5 tokens") && said.contains("got one of 6"), "{said}");
    assert!(of(TASK, &[1, 257], 1).contains("257"));
    assert!(of(TASK, &[1], 0).contains("samples: expected at least 1"));
}

#[test]
fn a_report_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let points = vec![Point { pairs: 3, samples: 10, exact_match: 0.7, stored: 2.04 }];
    let report = Report {
        model: "m".into(),
        name: Some("M".into()),
        trained_pairs: Some(2),
        steps: Some(700),
        minutes: Some(1.5),
        trained_on: Some("one core".into()),
        state: Some(StateSize { numbers: 33_024, growth: 0 }),
        task: Setting::Rewrite,
        key_size: 1,
        value_size: 1,
        symbols: 32,
        samples: 10,
        batch: 5,
        seed: 0,
        dtype: "f32".into(),
        points,
    };
    report.save(&path).unwrap();
    assert_eq!(Report::load(&path).unwrap(), report);
    let older = std::fs::read_to_string(&path).unwrap().replace("\"symbols\": 32,", "");
    std::fs::write(&path, older).unwrap();
    assert_eq!(Report::load(&path).unwrap().symbols, SYMBOLS, "reports from before there was a choice");
    std::fs::write(&path, "{}").unwrap();
    assert!(Report::load(&path).unwrap_err().to_string().contains("report of `armt eval`"));
}
