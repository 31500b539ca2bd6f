//! What a pass shows of a model is what the model computes, for every family and memory.

#![allow(clippy::unwrap_used)]

mod small;

use armt::config::Alignment;
use armt::engine::{Device, Tape};
use armt::probe::{backward, log_probabilities, probe};
use armt::recurrence::Targets;
use armt::schedule::{Backprop, ScheduleKind};
use small::{FAMILIES, VOCAB, memories, model, off, tokens, used_state};

#[test]
fn a_probe_has_the_logits_and_states_of_a_pass() {
    for (n, (family, memory)) in FAMILIES.iter().zip(memories()).enumerate() {
        let (layers, size) = (3, 4);
        let model = model(small::config(family, layers, memory, size, Alignment::Left), n as u64, &Device::cpu());
        let (batch, state) = (tokens(2, 14, n as u64), used_state(&model, 2, 9));
        let shown = probe(&model, &batch, &state).unwrap();
        let (logits, after) = model.forward(&batch, &state, ScheduleKind::Sequential).unwrap();
        assert!(off(&shown.logits, &logits) < 1e-5, "{family}");
        assert_eq!(shown.states.len(), 4);
        for ((name, a), (_, b)) in shown.states[3].tensors().zip(after.tensors()) {
            assert!(off(&a.to_f32_vec().unwrap(), &b.to_f32_vec().unwrap()) < 1e-5, "{family}: {name}");
        }
        let width = model.sizes().width;
        assert_eq!(shown.hidden.len(), (layers + 1) * batch.ids.len() * width);
        // The last layer's outputs give the logits.
        let last = &shown.hidden[layers * batch.ids.len() * width..];
        let h = armt::engine::Tensor::from_slice(last, [2, 14, width], &Device::cpu()).unwrap();
        assert!(off(&model.logits(&Tape::off(), &h).unwrap().to_f32_vec().unwrap(), &logits) < 1e-5, "{family}");
    }
}

#[test]
fn gradients_of_a_loss_of_the_logits_are_those_of_the_models_own() {
    for (n, (family, memory)) in FAMILIES.iter().zip(memories()).enumerate() {
        let model = model(small::config(family, 2, memory, 5, Alignment::Left), n as u64, &Device::cpu());
        let (batch, state) = (tokens(2, 13, 3), used_state(&model, 2, 5));
        let targets = Targets::shifted(&batch.ids, None, 2);
        let gradients = |model: &armt::Model| model.export(armt::engine::Param::grad).unwrap();
        model.params().iter().for_each(|p| p.zero_grad().unwrap());
        let tape = Tape::new();
        let (loss, _) = model.loss(&tape, &batch, &targets, &state, ScheduleKind::Auto, Backprop::default()).unwrap();
        tape.backward(&loss).unwrap();
        let own = gradients(&model);
        backward(&model, &batch, &state, &mut |logits| {
            let asked = targets.next.iter().filter(|t| **t >= 0).count() as f32;
            let mut slopes = vec![0.0; logits.len()];
            for ((row, slopes), target) in
                logits.chunks(VOCAB).zip(slopes.chunks_mut(VOCAB)).zip(&targets.next).filter(|(_, t)| **t >= 0)
            {
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = row.iter().map(|x| (x - most).exp()).sum();
                slopes.iter_mut().zip(row).for_each(|(s, x)| *s = (x - most).exp() / sum / asked);
                slopes[*target as usize] -= 1.0 / asked;
            }
            Ok(slopes)
        })
        .unwrap();
        for ((name, _, a), (_, _, b)) in gradients(&model).iter().zip(&own) {
            assert!(off(a, b) < 1e-4, "{family}: {name}");
        }
        assert!(own.iter().any(|(_, _, g)| g.iter().any(|x| x.abs() > 1e-3)), "{family}");
    }
}

#[test]
fn derivatives_of_another_number_than_the_logits_are_refused() {
    let model = model(small::config("gpt2", 2, memories().remove(0), 5, Alignment::Left), 1, &Device::cpu());
    let (batch, state) = (tokens(1, 7, 3), model.empty(1).unwrap());
    let error = backward(&model, &batch, &state, &mut |_| Ok(vec![0.0])).unwrap_err().to_string();
    assert!(error.contains("a derivative for each of 161 logits, got 1"), "{error}");
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let model = model(small::config("llama", 2, memories().remove(0), 5, Alignment::Left), 2, &Device::cpu());
    let (batch, state) = (tokens(1, 13, 4), used_state(&model, 1, 5));
    let logits = model.forward(&batch, &state, ScheduleKind::Auto).unwrap().0;
    let expected: Vec<f32> = logits
        .chunks(VOCAB)
        .zip(&batch.ids[1..])
        .map(|(row, next)| row[*next as usize] - row.iter().map(|x| x.exp()).sum::<f32>().ln())
        .collect();
    let found = log_probabilities(&model, &batch.ids, &state).unwrap();
    assert_eq!(found.len(), 12);
    assert!(off(&found, &expected) < 1e-5);
    assert!(log_probabilities(&model, &batch.ids[..1], &state).unwrap().is_empty());
}

#[test]
fn some_parameters_are_set_by_their_names_and_the_others_stay() {
    let model = model(small::config("gpt2", 2, memories().remove(0), 5, Alignment::Left), 1, &Device::cpu());
    let values = || model.export(|p| Ok(p.value())).unwrap();
    let before = values();
    let (name, shape, own) = before[3].clone();
    let other: Vec<f32> = own.iter().map(|x| x + 1.0).collect();
    for (bad, words) in [
        (("nobody".to_string(), shape.clone(), other.clone()), "a parameter of the model, got nobody"),
        ((name.clone(), vec![1], vec![1.0]), "of shape"),
        ((name.clone(), shape.clone(), vec![f32::NAN; own.len()]), "not a finite number"),
    ] {
        let error = model.import(&[(name.clone(), shape.clone(), other.clone()), bad]).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(values() == before, "nothing is changed where one does not fit");
    }
    model.import(&[(name.clone(), shape, other.clone())]).unwrap();
    for ((own, _, now), (_, _, was)) in values().iter().zip(&before) {
        assert_eq!(now, if *own == name { &other } else { was });
    }
}
