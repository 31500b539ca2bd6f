//! Generation: the cache changes nothing, full segments go into the memory, and sampling is seeded.

#![allow(clippy::unwrap_used)]

mod small;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use armt::backbone::Architecture;
use armt::config::Alignment;
use armt::engine::{Device, Tensor};
use armt::generate::{Options, Sampling, generate_each};
use armt::memory::{Memory, MemoryConfig, Settings, Step};
use armt::model::Model;
use armt::schedule::ScheduleKind;
use armt::segment::Batch;
use armt::state::{LayerState, StateLayout, Tail};
use armt::weights::Maker;
use serde_json::{Map, Value};
use small::{FAMILIES, memories, model, numbers, off, tokens};

fn of(family: &str, memory: MemoryConfig, seed: u64) -> Model {
    model(small::config(family, 2, memory, 6, Alignment::Left), seed, &Device::cpu())
}

fn generate(model: &Model, prompt: &Batch, options: &Options) -> armt::generate::Generated {
    armt::generate::generate(model, prompt, &model.empty(prompt.texts).unwrap(), options, &mut |_| {}).unwrap()
}

/// Logits of the next token without a cache: the prompt grows by a token and everything runs again.
fn plainly(model: &Model, prompt: &Batch, steps: usize) -> (Vec<Vec<i32>>, Vec<Vec<f32>>) {
    let options = Options { max_new_tokens: 1, roll_over: false, keep_logits: true, ..Options::default() };
    let mut rows: Vec<Vec<i32>> = prompt.ids.chunks(prompt.tokens()).map(<[i32]>::to_vec).collect();
    let (mut tokens, mut logits) = (vec![Vec::new(); rows.len()], Vec::new());
    for _ in 0..steps {
        let out = generate(model, &Batch::from_rows(&rows).unwrap(), &options);
        for (b, new) in out.tokens.iter().enumerate() {
            rows[b].push(new[0]);
            tokens[b].push(new[0]);
        }
        logits.extend(out.logits);
    }
    (tokens, logits)
}

#[test]
fn the_cache_gives_what_running_everything_again_gives() {
    for family in FAMILIES {
        for memory in memories() {
            let model = of(family, memory, 1);
            let prompt = tokens(2, 14, 2); // two full segments and two tokens
            let options = Options { max_new_tokens: 4, roll_over: false, keep_logits: true, ..Options::default() };
            let out = generate(&model, &prompt, &options);
            let (want, logits) = plainly(&model, &prompt, 4);
            assert_eq!(out.tokens, want, "{family} {}", model.config().memory.kind());
            for (a, b) in out.logits.iter().zip(&logits) {
                assert!(off(a, b) < 1e-4, "{family} {}: {}", model.config().memory.kind(), off(a, b));
            }
            assert_eq!(out.state.segments_read(), 2, "the open segment is not written");
        }
    }
}

#[test]
fn the_first_token_after_a_prompt_is_the_one_that_reading_it_predicts() {
    // With memory tokens after the text or without, what comes before them cannot see them.
    for family in FAMILIES {
        for memory in memories() {
            let model = of(family, memory, 10);
            let prompt = tokens(2, 15, 11);
            let out = generate(&model, &prompt, &Options { max_new_tokens: 1, keep_logits: true, ..Options::default() });
            let (logits, _) = model.forward(&prompt, &model.empty(2).unwrap(), ScheduleKind::Sequential).unwrap();
            let v = small::VOCAB;
            let last: Vec<f32> = (0..2).flat_map(|b| logits[(b * 15 + 14) * v..][..v].to_vec()).collect();
            assert!(off(&out.logits[0], &last) < 1e-4, "{family} {}", model.config().memory.kind());
        }
    }
}

#[test]
fn a_prompt_longer_than_what_is_read_at_once_leaves_the_state_of_reading_it_whole() {
    for memory in memories() {
        let model = of(FAMILIES[0], memory, 12);
        let prompt = tokens(1, 270 * 6, 13);
        let out = generate(&model, &prompt, &Options { max_new_tokens: 1, ..Options::default() });
        let mut segments = model.segments(&prompt).unwrap();
        segments.pop();
        let whole = model.absorb(&segments, &model.empty(1).unwrap(), None).unwrap();
        assert_eq!(out.state.segments_read(), 269);
        assert_eq!(numbers(&out.state), numbers(&whole), "{}", model.config().memory.kind());
    }
}

/// Keeps nothing, and asks for a stop in its tenth step.
#[derive(Clone, Debug, Default)]
struct Tripwire {
    steps: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Settings for Tripwire {
    fn kind(&self) -> &'static str {
        "tripwire"
    }

    fn keys(&self) -> Map<String, Value> {
        Map::new()
    }

    fn build(&self, _: &mut Maker, _: &Architecture, _: usize) -> armt::Result<Box<dyn Memory>> {
        Ok(Box::new(self.clone()))
    }
}

impl Memory for Tripwire {
    fn layout(&self) -> StateLayout {
        StateLayout::nothing("tripwire")
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> armt::Result<(Tensor, LayerState)> {
        if self.steps.fetch_add(1, Ordering::Relaxed) + 1 == 10 {
            self.stop.store(true, Ordering::Relaxed);
        }
        Ok((step.block(x)?, memory))
    }
}

#[test]
fn a_prompt_and_an_open_text_are_not_read_on_once_a_stop_is_asked_for() {
    let long = tokens(1, 200 * 6 + 3, 2);
    // What is read: a prompt, prompts side by side, and what is open before a prompt.
    for which in 0..3 {
        let tripwire = Tripwire::default();
        let model = of(FAMILIES[0], MemoryConfig::new(tripwire.clone()), 1);
        let options = Options { interrupt: Some(tripwire.stop.clone()), ..Options::default() };
        let empty = model.empty(1).unwrap();
        let open = Tail { tokens: long.ids.clone(), ..Tail::default() };
        let said = match which {
            0 => armt::generate::generate(&model, &long, &empty, &options, &mut |_| {}).map(|_| ()),
            1 => generate_each(&model, std::slice::from_ref(&long.ids), &[empty], &options).map(|_| ()),
            _ => {
                let state = empty.with_tails(vec![open]).unwrap();
                armt::generate::generate(&model, &tokens(1, 3, 3), &state, &options, &mut |_| {}).map(|_| ())
            }
        };
        assert!(matches!(said, Err(armt::Error::Interrupted)));
        assert_eq!(tripwire.steps.load(Ordering::Relaxed), 10, "{which}");
    }
}

#[test]
fn what_is_interrupted_says_so() {
    let model = of(FAMILIES[0], memories()[0].clone(), 1);
    let options = Options { interrupt: Some(Arc::new(AtomicBool::new(true))), ..Options::default() };
    for prompt in [tokens(1, 4, 1), tokens(1, 40, 1)] {
        let said = armt::generate::generate(&model, &prompt, &model.empty(1).unwrap(), &options, &mut |_| {});
        assert!(matches!(said, Err(armt::Error::Interrupted)));
    }
}

#[test]
fn a_full_segment_goes_into_the_memory_and_the_next_begins() {
    let model = of("gpt_neox", memories().remove(0), 3);
    let prompt = tokens(1, 4, 4);
    let out = generate(&model, &prompt, &Options { max_new_tokens: 12, ..Options::default() });
    assert_eq!(out.tokens[0].len(), 12);
    assert_eq!((out.state.segments_read(), out.state.tokens_read()), (2, 12));
    // The memory is that of the same text read.
    let text: Vec<i32> = prompt.ids.iter().chain(&out.tokens[0]).take(12).copied().collect();
    let read = Batch { ids: text, texts: 1, mask: None };
    let (_, state) = model.forward(&read, &model.empty(1).unwrap(), ScheduleKind::Sequential).unwrap();
    assert!(off(&numbers(&out.state), &numbers(&state)) < 1e-5);
}

#[test]
fn a_stop_token_ends_a_text_and_the_others_go_on() {
    let model = of("llama", memories().remove(0), 5);
    let prompt = tokens(3, 5, 6);
    let free = generate(&model, &prompt, &Options { max_new_tokens: 6, ..Options::default() });
    let stop = free.tokens[0][1];
    let out = generate(&model, &prompt, &Options { max_new_tokens: 6, stop: vec![stop], ..Options::default() });
    let until = |row: &[i32]| row.iter().position(|t| *t == stop).map_or(row.len(), |i| i + 1);
    for (a, b) in free.tokens.iter().zip(&out.tokens) {
        assert_eq!(&a[..until(a)], b.as_slice());
    }
    assert!(out.tokens[0].len() <= 2);
}

#[test]
fn equal_seeds_give_equal_texts() {
    let model = of("gpt2", memories().remove(0), 7);
    let prompt = tokens(1, 5, 8);
    let text = |seed: u64| {
        let sampling = Sampling::Random { temperature: 1.5, top_k: Some(10), top_p: Some(0.95), seed };
        generate(&model, &prompt, &Options { max_new_tokens: 20, sampling, ..Options::default() }).tokens
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn a_prompt_that_cannot_be_continued_is_refused() {
    let model = of("gpt2", memories().remove(0), 9);
    let state = model.empty(2).unwrap();
    let uneven = Batch::from_rows(&[vec![1, 2, 3], vec![1]]).unwrap();
    let error = armt::generate::generate(&model, &uneven, &state, &Options::default(), &mut |_| {}).err().unwrap().to_string();
    assert!(error.contains("equal length"), "{error}");
    let outside = Batch { ids: vec![1, 99], texts: 2, mask: None };
    let error = armt::generate::generate(&model, &outside, &state, &Options::default(), &mut |_| {}).err().unwrap().to_string();
    assert!(error.contains("99") && error.contains("23"), "{error}");
}
