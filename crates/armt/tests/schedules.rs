//! The diagonal schedule gives what the sequential one gives: outputs, memory and gradients, for any number of segments, layers and
//! texts, ramps, short segments and padding included, from a memory that is not empty.

#![allow(clippy::unwrap_used)]

mod small;

use std::sync::Mutex;

use armt::State;
use armt::config::Alignment;
use armt::engine::{DType, Device, Tape, ops};
use armt::memory::{Associative, MemoryConfig, Rmt, Window};
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::{Model, recurrence::Targets};
use proptest::prelude::*;
use small::{FAMILIES, memories, model, numbers, off, tokens, used_state};

/// f32 rounding, relative to the largest value.
const TOLERANCE: f32 = 1e-5;
/// Of gradients: the way back through a random recurrence amplifies rounding more than the way there (1.4e-5 of 25 was met).
const GRADIENT_TOLERANCE: f32 = 1e-4;

struct Run {
    logits: Vec<f32>,
    state: State,
    loss: f32,
    gradients: Vec<(String, Vec<f32>)>,
}

/// What the last `asked` positions of each text should predict: the outputs of segments before them are wanted by nobody.
fn last_targets(text: &Batch, asked: usize) -> Targets {
    let tokens = text.tokens();
    let mut targets = Targets::shifted(&text.ids, None, text.texts);
    targets.next.iter_mut().enumerate().for_each(|(i, t)| *t = if i % tokens + asked < tokens { -1 } else { *t });
    targets
}

fn run(model: &Model, batch: &Batch, asked: usize, state: &State, schedule: ScheduleKind) -> Run {
    let (logits, _) = model.forward(batch, state, schedule).unwrap();
    model.params().iter().for_each(|p| p.zero_grad().unwrap());
    let tape = Tape::new();
    let targets = last_targets(batch, asked);
    let (loss, state) = model.loss(&tape, batch, &targets, state, schedule, Backprop::default()).unwrap();
    tape.backward(&loss).unwrap();
    let gradients = model.export(armt::engine::Param::grad).unwrap().into_iter().map(|(name, _, g)| (name, g)).collect();
    Run { logits, state, loss: loss.item().unwrap(), gradients }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn diagonal_and_sequential_agree(
        family in 0..FAMILIES.len(),
        // All but RMT and RMT-R, which come last and have no diagonal.
        memory in 0..memories().len() - 2,
        layers in 1..5usize,
        size in 2..6usize,
        length in 2..26usize,
        batch in 1..4usize,
        asked in 2..30usize,
        alignment in 0..3usize,
        padded in any::<bool>(),
        used in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let alignment = [Alignment::Left, Alignment::Right, Alignment::Center][alignment];
        let config = small::config(FAMILIES[family], layers, memories()[memory].clone(), size, alignment);
        let model = model(config, seed, &Device::cpu());
        let mut text = tokens(batch, length, seed ^ 1);
        if padded {
            // The last text is half as long as the others.
            let mask = (0..batch * length).map(|i| i32::from(i / length + 1 < batch || i % length <= length / 2));
            text.mask = Some(mask.collect());
        }
        let state = if used { used_state(&model, batch, seed ^ 2) } else { model.empty(batch).unwrap() };
        let a = run(&model, &text, asked, &state, ScheduleKind::Sequential);
        // Random weights make a recurrence that may grow without bound; then rounding does too.
        prop_assume!(numbers(&a.state).iter().all(|x| x.abs() < 100.0));
        let b = run(&model, &text, asked, &state, ScheduleKind::Diagonal);
        // Positions that see nothing but padding may be anything.
        let seen = |logits: &[f32]| -> Vec<f32> {
            let visible = |i: usize| text.mask.as_ref().is_none_or(|m| m[i] != 0);
            logits.chunks(small::VOCAB).enumerate().filter(|(i, _)| visible(*i)).flat_map(|(_, row)| row.to_vec()).collect()
        };
        prop_assert!(off(&seen(&b.logits), &seen(&a.logits)) < TOLERANCE, "logits differ by {}", off(&b.logits, &a.logits));
        prop_assert!((a.loss - b.loss).abs() < TOLERANCE * a.loss.abs());
        prop_assert!(off(&numbers(&b.state), &numbers(&a.state)) < TOLERANCE, "memory differs");
        prop_assert_eq!((a.state.tokens_read(), a.state.segments_read()), (b.state.tokens_read(), b.state.segments_read()));
        let largest = |g: &[f32]| g.iter().fold(0f32, |m, g| m.max(g.abs()));
        // Gradients that almost vanish are differences of larger ones, and as exact as those are.
        let floor = 0.1 * a.gradients.iter().map(|(_, g)| largest(g)).fold(0f32, f32::max);
        for ((name, x), (_, y)) in a.gradients.iter().zip(&b.gradients) {
            let most = x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
            prop_assert!(most <= GRADIENT_TOLERANCE * largest(x).max(floor), "gradient of {} differs by {:e} of {:e}", name, most, largest(x));
        }
    }
}

#[test]
fn rmt_has_no_diagonal_and_says_why() {
    let config = small::config("gpt2", 2, MemoryConfig::new(Rmt { tokens: 2, wrap_pos: false }), 4, Alignment::Left);
    let model = model(config, 1, &Device::cpu());
    let text = tokens(1, 8, 2);
    let state = model.empty(1).unwrap();
    let error = model.forward(&text, &state, ScheduleKind::Diagonal).err().unwrap().to_string();
    assert!(error.contains("RMT") && error.contains("last layer"), "{error}");
    assert!(model.forward(&text, &state, ScheduleKind::Auto).is_ok());
}

#[test]
fn layers_without_memory_are_not_touched_by_it() {
    let mut memory = memories().remove(0).get::<Associative>().unwrap().clone();
    memory.memory_layers = Some(vec![0]);
    let one = small::config("gpt2", 3, MemoryConfig::new(memory), 4, Alignment::Left);
    let model = model(one, 3, &Device::cpu());
    let text = tokens(1, 4, 4);
    let logits = |state: &State| model.forward(&text, state, ScheduleKind::Diagonal).unwrap().0;
    // Row 0 of A and z of one state, and the other layers' rows of another.
    let (used, other) = (used_state(&model, 1, 5), used_state(&model, 1, 6));
    let mixed = |with: &State, without: &State| {
        let rows = with.tensors().zip(without.tensors()).map(|((_, a), (_, b))| {
            let (a, b) = (ops::rows(a, 0..1).unwrap(), ops::rows(b, 1..3).unwrap());
            ops::concat(&[&a, &b], 0).unwrap()
        });
        model.recurrence().layout().state(rows.collect(), with.counts().to_vec()).unwrap()
    };
    assert_eq!(logits(&mixed(&used, &other)), logits(&used), "of layers without a memory nothing is read");
    assert_ne!(logits(&mixed(&other, &used)), logits(&used), "that of the layer with one is");
}

#[test]
fn a_window_takes_the_bytes_that_its_layout_says_after_a_whole_segment() {
    let memory = MemoryConfig::new(Window { sliding_window: true });
    let model = model(small::config("llama", 3, memory, 8, Alignment::Left), 8, &Device::cpu());
    let layout = model.recurrence().layout();
    for (length, is_whole) in [(3, false), (8, true), (19, true)] {
        let (_, state) = model.forward(&tokens(1, length, 1), &model.empty(1).unwrap(), ScheduleKind::Auto).unwrap();
        assert_eq!(state.bytes() == layout.bytes(DType::F32), is_whole, "{length} tokens: {} bytes", state.bytes());
    }
    assert_eq!(layout.growth(DType::F32), 0);
}

#[test]
fn texts_of_any_widths_follow_one_another_under_both_schedules() {
    for memory in memories() {
        let kind = memory.kind().to_string();
        // Weights that are not too large: otherwise the memory grows without bound, and rounding with it.
        let config = small::config("llama", 3, memory, 8, Alignment::Left);
        let model = small::model_of_spread(config, 8, 0.1, &Device::cpu());
        let mut state = model.empty(2).unwrap();
        for (seed, length) in [(1, 3), (2, 8), (3, 3), (4, 19)] {
            let text = tokens(2, length, seed);
            let (want, plain) = model.forward(&text, &state, ScheduleKind::Sequential).unwrap();
            let (got, fast) = model.forward(&text, &state, ScheduleKind::Auto).unwrap();
            assert!(off(&got, &want) < TOLERANCE, "{kind}, {length} tokens: logits differ by {}", off(&got, &want));
            let memory = off(&numbers(&fast), &numbers(&plain));
            assert!(memory < TOLERANCE, "{kind}, {length} tokens: memory differs by {memory}");
            state = fast;
        }
    }
}

#[test]
fn a_window_sees_the_previous_segment_and_no_further() {
    let config = small::config("llama", 1, MemoryConfig::new(Window { sliding_window: true }), 4, Alignment::Left);
    let model = model(config, 6, &Device::cpu());
    let logits = |ids: Vec<i32>| {
        let batch = Batch { ids, texts: 1, mask: None };
        model.forward(&batch, &model.empty(1).unwrap(), ScheduleKind::Diagonal).unwrap().0
    };
    let base = tokens(1, 12, 7).ids;
    let change = |at: usize| {
        let mut ids = base.clone();
        ids[at] = (ids[at] + 1) % small::VOCAB as i32;
        logits(ids)
    };
    let (plain, last) = (logits(base.clone()), 11 * small::VOCAB..12 * small::VOCAB);
    assert!(off(&change(6)[last.clone()], &plain[last.clone()]) > 1e-4, "the previous segment is seen");
    assert_eq!(&change(1)[last.clone()], &plain[last], "with one layer, the one before it is not");
}

/// Gradients of a loss on the last `asked` tokens.
fn gradients(
    model: &Model,
    text: &Batch,
    asked: usize,
    state: &State,
    schedule: ScheduleKind,
    backprop: Backprop,
) -> Vec<Vec<f32>> {
    gradients_of(model, text, &last_targets(text, asked), state, schedule, backprop)
}

fn gradients_of(
    model: &Model,
    text: &Batch,
    targets: &Targets,
    state: &State,
    schedule: ScheduleKind,
    backprop: Backprop,
) -> Vec<Vec<f32>> {
    model.params().iter().for_each(|p| p.zero_grad().unwrap());
    let tape = Tape::new();
    let (loss, _) = model.loss(&tape, text, targets, state, schedule, backprop).unwrap();
    tape.backward(&loss).unwrap();
    model.params().iter().map(|p| p.grad().unwrap().to_vec::<f32>().unwrap()).collect()
}

#[test]
fn recomputing_blocks_gives_the_same_gradients() {
    for memory in memories() {
        let associative = memory.kind() == "associative";
        let model = small::model_of_spread(small::config("gpt2", 3, memory, 4, Alignment::Left), 9, 0.1, &Device::cpu());
        let (text, state) = (tokens(2, 22, 10), model.empty(2).unwrap());
        for schedule in [ScheduleKind::Sequential, ScheduleKind::Auto] {
            let plain = gradients(&model, &text, 22, &state, schedule, Backprop::default());
            let lean = gradients(&model, &text, 22, &state, schedule, Backprop { recompute: true, ..Backprop::default() });
            // To the bit, but for a memory that is unwound.
            let tolerance = if associative { 1e-4 } else { 0.0 };
            for ((plain, lean), p) in plain.iter().zip(&lean).zip(model.params()) {
                assert!(
                    off(lean, plain) <= tolerance,
                    "{} of {:?} is off by {}",
                    p.name(),
                    model.config().memory,
                    off(lean, plain)
                );
            }
        }
    }
}

/// A memory that is unwound lets each write wait for the read that follows it; one that is kept does not.
#[test]
fn writes_that_wait_for_their_read_give_the_same_gradients_and_memory() {
    let associative = memories().into_iter().filter(|m| m.kind() == "associative");
    for (memory, layers, tokens_read) in associative.flat_map(|m| [(m.clone(), 3, 22), (m.clone(), 1, 22), (m, 3, 3)]) {
        let config = small::config("gpt2", layers, memory, 4, Alignment::Left);
        let model = small::model_of_spread(config, 13, 0.1, &Device::cpu());
        let text = tokens(2, tokens_read, 14);
        for state in [model.empty(2).unwrap(), used_state(&model, 2, 15)] {
            for (schedule, truncate) in
                [ScheduleKind::Sequential, ScheduleKind::Auto].into_iter().flat_map(|s| [0, 1, 2].map(|t| (s, t)))
            {
                let kept = Backprop { truncate, ..Backprop::default() };
                let waiting = Backprop { unwind: true, ..kept };
                for asked in [tokens_read, 2] {
                    let both = [kept, waiting].map(|b| gradients(&model, &text, asked, &state, schedule, b));
                    for ((kept, waiting), p) in both[0].iter().zip(&both[1]).zip(model.params()) {
                        assert!(off(waiting, kept) < 1e-4, "{} is off by {}", p.name(), off(waiting, kept));
                    }
                    let targets = last_targets(&text, asked);
                    let after = |b| model.loss(&Tape::new(), &text, &targets, &state, schedule, b).unwrap().1;
                    assert_eq!(numbers(&after(waiting)), numbers(&after(kept)), "the memory differs");
                }
            }
        }
    }
}

/// The cost of importance is a mean over all writes: the same however the grid is walked, and what a step down its gradient lowers.
#[test]
fn a_cost_of_importance_is_one_of_all_writes_and_teaches_to_write_less() {
    for memory in memories().into_iter().filter(|m| m.kind() == "associative") {
        let model = small::model_of_spread(small::config("gpt2", 3, memory, 4, Alignment::Left), 17, 0.1, &Device::cpu());
        let (text, state) = (tokens(2, 22, 18), model.empty(2).unwrap());
        let with = |schedule, backprop| gradients(&model, &text, 3, &state, schedule, backprop);
        let sparse = Backprop { sparse: 0.5, ..Backprop::default() };
        let plain = with(ScheduleKind::Sequential, Backprop::default());
        let costed = with(ScheduleKind::Sequential, sparse);
        let others = [sparse, Backprop { unwind: true, ..sparse }, Backprop { recompute: true, ..sparse }]
            .map(|b| with(ScheduleKind::Auto, b));
        for (other, p) in
            others.iter().flat_map(|other| other.iter().zip(&costed).zip(model.params())).map(|((o, c), p)| (off(o, c), p))
        {
            assert!(other < 1e-4, "{} is off by {other}", p.name());
        }
        // Importance is sigmoid(h . w + bias): its bias has the mean of s (1 - s) over all writes from the cost, and a little by what later
        // segments read.
        let bias = model.params().iter().position(|p| p.name().contains("beta_bias")).unwrap();
        let added: f32 = costed[bias].iter().zip(&plain[bias]).map(|(c, p)| c - p).sum();
        assert!((0.5 * 0.15..=0.5 * 0.3).contains(&added), "the cost moves the bias by {added}");
    }
}

/// The cost of background is one of the segments that hold nothing else, in each text its own: the same however the grid is walked, nothing
/// where there is no such segment, and twice as much where there are twice as many.
#[test]
fn a_cost_of_background_is_one_of_its_segments_alone() {
    for memory in memories().into_iter().filter(|m| m.kind() == "associative") {
        let model = small::model_of_spread(small::config("gpt2", 3, memory, 4, Alignment::Left), 17, 0.1, &Device::cpu());
        let (text, state) = (tokens(2, 22, 18), model.empty(2).unwrap());
        let marked = |segments: &[(usize, usize)]| {
            let mut targets = last_targets(&text, 3);
            for (row, segment) in segments {
                targets.next[row * 22 + segment * 4..][..4].fill(Targets::BACKGROUND);
            }
            targets
        };
        let cost = Backprop { background: 0.5, ..Backprop::default() };
        let with = |targets: &Targets, schedule, backprop| gradients_of(&model, &text, targets, &state, schedule, backprop);
        let plain = with(&marked(&[]), ScheduleKind::Sequential, Backprop::default());
        assert_eq!(
            with(&marked(&[(0, 1), (1, 3)]), ScheduleKind::Sequential, Backprop::default()),
            plain,
            "marks alone cost nothing"
        );
        // A segment of which a part counts is none of background.
        let mut partly = marked(&[(0, 1)]);
        partly.next[7] = -1;
        assert_eq!(with(&partly, ScheduleKind::Sequential, cost), plain);
        let bias = model.params().iter().position(|p| p.name().contains("beta_bias")).unwrap();
        let added = |targets: &Targets| {
            let costed = with(targets, ScheduleKind::Sequential, cost);
            let others = [cost, Backprop { unwind: true, ..cost }, Backprop { recompute: true, ..cost }];
            for other in others.map(|backprop| with(targets, ScheduleKind::Auto, backprop)) {
                for ((other, costed), p) in other.iter().zip(&costed).zip(model.params()) {
                    assert!(off(other, costed) < 1e-4, "{} is off by {}", p.name(), off(other, costed));
                }
            }
            costed[bias].iter().zip(&plain[bias]).map(|(c, p)| c - p).sum::<f32>()
        };
        // The slope of -ln(1 - s) is s, near 0.5 here; two of twelve segments are background, then four.
        let (two, four) = (added(&marked(&[(0, 1), (1, 3)])), added(&marked(&[(0, 0), (0, 1), (1, 2), (1, 3)])));
        assert!((two - 0.5 * 0.5 / 6.0).abs() < 0.3 * two, "two segments move the bias by {two}");
        assert!((four / two - 2.0).abs() < 0.2, "four segments move the bias by {four}, two by {two}");
    }
}

#[test]
fn truncated_gradients_are_those_of_the_last_stretch_alone() {
    for memory in memories() {
        let model = small::model_of_spread(small::config("gpt_neox", 3, memory, 4, Alignment::Left), 11, 0.1, &Device::cpu());
        if model.config().memory == MemoryConfig::new(Window { sliding_window: true }) {
            continue; // a window's segments are cut from one another always
        }
        let (text, empty) = (tokens(2, 24, 12), model.empty(2).unwrap());
        let part = |range: std::ops::Range<usize>| {
            let ids = (0..2).flat_map(|b| text.ids[b * 24..][range.clone()].to_vec()).collect();
            Batch { ids, texts: 2, mask: None }
        };
        // Six segments in stretches of two: the last stretch begins with the fifth.
        let (_, before) = model.forward(&part(0..16), &empty, ScheduleKind::Sequential).unwrap();
        let alone = gradients(&model, &part(16..24), 3, &before, ScheduleKind::Sequential, Backprop::default());
        let whole = gradients(&model, &text, 3, &empty, ScheduleKind::Sequential, Backprop::default());
        for schedule in [ScheduleKind::Sequential, ScheduleKind::Auto] {
            let cut = gradients(&model, &text, 3, &empty, schedule, Backprop { truncate: 2, ..Backprop::default() });
            for ((cut, alone), p) in cut.iter().zip(&alone).zip(model.params()) {
                assert!(off(cut, alone) < 1e-4, "{} of {:?} is off by {}", p.name(), model.config().memory, off(cut, alone));
            }
            let remembers = model.config().memory.kind() != "none";
            assert_eq!(cut.iter().zip(&whole).any(|(c, w)| off(c, w) > 1e-3), remembers, "the cut does nothing");
        }
    }
}

/// What one test records, no other may issue between.
static GPU: Mutex<()> = Mutex::new(());

/// On a GPU the last layer computes its few wanted rows alone only beside large batches.
#[test]
fn a_large_batch_gives_the_same_under_both_schedules() {
    let agree = |device: &Device, batch: usize| {
        let config = small::config("gpt2", 3, memories().remove(0), 24, Alignment::Left);
        let model = small::model_of_spread(config, 21, 0.1, device);
        let (text, state) = (tokens(batch, 4 * 24, 22), used_state(&model, batch, 23));
        let both = [ScheduleKind::Sequential, ScheduleKind::Diagonal].map(|schedule| run(&model, &text, 2, &state, schedule));
        let memories = both.each_ref().map(|run| numbers(&run.state));
        assert!(off(&memories[1], &memories[0]) < 1e-4, "memory is off by {}", off(&memories[1], &memories[0]));
        for ((name, x), (_, y)) in both[0].gradients.iter().zip(&both[1].gradients) {
            assert!(off(y, x) < 1e-4, "the gradient of {name} is off by {}", off(y, x));
        }
    };
    agree(&Device::cpu(), 64);
    let _alone = GPU.lock().unwrap();
    match Device::cuda(0) {
        Ok(cuda) => agree(&cuda, 4096), // 4096 x 26 x 16 elements of a layer's inputs
        Err(why) => println!("not on the GPU: {why}"),
    }
}

#[test]
fn bf16_weights_give_nearly_the_same_losses() {
    let config = small::config("llama", 2, memories().remove(0), 4, Alignment::Left);
    let text = tokens(2, 10, 9);
    let loss = |dtype: DType| {
        let model = Model::fresh(config.clone(), 10, dtype, &Device::cpu()).unwrap();
        let targets = Targets::shifted(&text.ids, None, 2);
        let state = model.empty(2).unwrap();
        model.loss(&Tape::off(), &text, &targets, &state, ScheduleKind::Auto, Backprop::default()).unwrap().0.item().unwrap()
    };
    let (full, half) = (loss(DType::F32), loss(DType::BF16));
    assert!((full - half).abs() < 2e-2 * full, "{full} and {half}");
}
