//! Texts of any lengths side by side: each has the memory, and the answers, that it would have alone.

#![allow(clippy::unwrap_used)]

mod small;

use std::ops::ControlFlow;

use armt::config::Alignment;
use armt::engine::Device;
use armt::generate::{Options, generate, generate_each};
use armt::reader::{End, Reader, Tokens};
use armt::segment::Batch;
use armt::{Error, Model, State};
use proptest::prelude::*;
use small::{VOCAB, memories, model_of_spread, numbers};

const SEGMENT: usize = 4;

/// Small models of every kind that keeps something.
fn models() -> Vec<Model> {
    let families = ["gpt2", "gpt_neox", "llama"].into_iter().cycle();
    let all = memories().into_iter().zip(families);
    let all = all.map(|(memory, family)| {
        model_of_spread(small::config(family, 3, memory, SEGMENT, Alignment::Left), 3, 0.1, &Device::cpu())
    });
    all.filter(|model| !model.recurrence().layout().parts.is_empty()).collect()
}

fn text(tokens: usize, seed: usize) -> Vec<i32> {
    (0..tokens).map(|i| ((i * i + (7 + seed) * i + i / 3 + seed) % VOCAB) as i32).collect()
}

fn bits(state: &State) -> Vec<u32> {
    numbers(state).into_iter().map(f32::to_bits).collect()
}

fn read(reader: &mut Reader, texts: &[Vec<i32>]) -> armt::Result<End> {
    let mut sources: Vec<_> = texts.iter().map(|text| text.iter().map(|t| Ok(*t))).collect();
    let mut sources: Vec<Tokens<'_>> = sources.iter_mut().map(|s| s as Tokens<'_>).collect();
    reader.read_all(&mut sources, &mut |_| ControlFlow::Continue(()))
}

/// The states of texts that are read from others, and whether their texts are closed.
fn after(model: &Model, states: Vec<State>, texts: &[Vec<i32>], close: bool) -> Vec<State> {
    let mut reader = Reader::new(model, model.empty(1).unwrap()).unwrap();
    reader.begin_each(states).unwrap();
    assert_eq!(read(&mut reader, texts).unwrap(), End::Finished);
    if close {
        reader.close().unwrap();
    }
    reader.states().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_text_has_the_memory_that_it_would_have_alone(
        lengths in prop::collection::vec(0..SEGMENT * 80, 1..7),
        more in prop::collection::vec(0..SEGMENT * 20, 7),
        close in any::<bool>(),
    ) {
        for model in models() {
            let first: Vec<Vec<i32>> = lengths.iter().enumerate().map(|(i, n)| text(*n, i)).collect();
            let second: Vec<Vec<i32>> = first.iter().zip(more.iter().enumerate()).map(|(_, (i, n))| text(*n, 9 + i)).collect();
            let empty = vec![model.empty(1).unwrap(); first.len()];
            let halves = after(&model, empty.clone(), &first, close);
            let together = after(&model, halves, &second, close);
            for (i, together) in together.iter().enumerate() {
                let half = after(&model, empty[..1].to_vec(), &first[i..i + 1], close);
                let alone = after(&model, half, &second[i..i + 1], close).remove(0);
                prop_assert_eq!((together.counts(), together.tails()), (alone.counts(), alone.tails()));
                prop_assert_eq!(bits(together), bits(&alone), "text {} of {:?}, {}", i, lengths, alone.kind());
            }
        }
    }
}

#[test]
fn answers_to_prompts_of_any_lengths_are_those_to_each_alone() {
    let options = Options { max_new_tokens: 7, keep_logits: true, ..Options::default() };
    let lengths = [1, 3, SEGMENT, SEGMENT + 1, 3, 5 * SEGMENT, 5 * SEGMENT + 3, 11];
    for model in models() {
        let prompts: Vec<Vec<i32>> = lengths.iter().enumerate().map(|(i, n)| text(*n, i)).collect();
        // Some have read something, some have an open end, and some have nothing.
        let read: Vec<Vec<i32>> = (0..lengths.len()).map(|i| text([0, 9, 8, 70][i % 4], 5 + i)).collect();
        let states = after(&model, vec![model.empty(1).unwrap(); lengths.len()], &read, false);
        let all = generate_each(&model, &prompts, &states, &options).unwrap();
        assert_eq!(all.len(), prompts.len());
        for ((prompt, state), said) in prompts.iter().zip(&states).zip(&all) {
            let prompt = Batch { ids: prompt.clone(), texts: 1, mask: None };
            let alone = generate(&model, &prompt, state, &options, &mut |_| {}).unwrap();
            assert_eq!((&said.tokens, &said.probabilities), (&alone.tokens, &alone.probabilities));
            assert_eq!((&said.logits, bits(&said.state)), (&alone.logits, bits(&alone.state)));
            let vocab = model.sizes().vocab;
            let sure: Vec<f64> = said
                .logits
                .iter()
                .map(|row| {
                    let row = &row[..vocab];
                    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    1.0 / row.iter().map(|x| f64::from(x - best).exp()).sum::<f64>()
                })
                .collect();
            assert!(
                said.probabilities[0].iter().zip(sure).all(|(p, sure)| (f64::from(*p) - sure).abs() < 1e-6),
                "the most probable is picked"
            );
        }
        assert!(matches!(generate_each(&model, &prompts[..2], &states[..1], &options), Err(Error::Texts { state: 1, texts: 2 })));
        assert!(generate_each(&model, &[vec![]], &states[..1], &options).is_err());
    }
}

#[test]
fn texts_side_by_side_must_be_as_many_as_the_memory_is_of() {
    let model = models().remove(0);
    let mut reader = Reader::new(&model, model.empty(2).unwrap()).unwrap();
    let error = read(&mut reader, &[text(9, 0)]).unwrap_err().to_string();
    assert!(error.contains("2 text(s)") && error.contains("1 came"), "{error}");
    assert!(matches!(reader.begin_each(Vec::new()), Err(Error::Texts { .. })));
}

#[test]
fn a_token_that_is_none_in_an_open_end_is_refused() {
    let model = models().remove(0);
    let tail = armt::state::Tail { tokens: vec![VOCAB as i32], ..Default::default() };
    let state = model.empty(1).unwrap().with_tails(vec![tail]).unwrap();
    assert!(matches!(Reader::new(&model, state), Err(Error::Token { .. })));
}
