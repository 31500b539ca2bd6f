//! The optimizer: its formula, its clipping, and its state on disk.

#![allow(clippy::unwrap_used)]

use armt_engine::optim::{AdamW, Clip, Group, Settings};
use armt_engine::{DType, Device, Error, Param, Tensor};

fn param(name: &str, values: &[f32]) -> Param {
    Param::new(name, &Tensor::from_slice(values, [values.len()], &Device::cpu()).unwrap(), DType::F32).unwrap()
}

fn group(params: &[&Param], weight_decay: f32) -> Group {
    Group { params: params.iter().map(|p| (*p).clone()).collect(), weight_decay, rate: 1.0 }
}

/// AdamW in f64, as the paper of Loshchilov and Hutter has it and PyTorch computes it.
fn reference(p: &mut [f64], state: &mut [(f64, f64)], g: &[f64], step: i32, lr: f64, wd: f64, s: &Settings) {
    let (b1, b2) = (f64::from(s.beta1), f64::from(s.beta2));
    for ((p, (m, v)), g) in p.iter_mut().zip(state).zip(g) {
        *p -= lr * wd * *p;
        *m = b1 * *m + (1.0 - b1) * g;
        *v = b2 * *v + (1.0 - b2) * g * g;
        *p -= lr * (*m / (1.0 - b1.powi(step))) / ((*v / (1.0 - b2.powi(step))).sqrt() + f64::from(s.eps));
    }
}

fn gradient(step: usize, i: usize) -> f32 {
    ((step * 31 + i * 7) as f32 * 0.37).sin() * 3.0
}

fn set_gradient(p: &Param, step: usize) -> Vec<f32> {
    let g: Vec<f32> = (0..p.value().elements()).map(|i| gradient(step, i)).collect();
    p.grad().unwrap().overwrite(&g).unwrap();
    g
}

#[test]
fn ten_steps_follow_the_formula_with_and_without_clipping() {
    for (clip, n) in [(Clip::None, 5), (Clip::Value(0.5), 5), (Clip::Norm(1.0), 40_000)] {
        let settings = Settings { clip, ..Settings::default() };
        let start: Vec<f32> = (0..n).map(|i| (i as f32 * 0.1).cos()).collect();
        let p = param("p", &start);
        let mut optimizer = AdamW::new(vec![group(&[&p], 0.1)], settings).unwrap();
        let mut want: Vec<f64> = start.iter().map(|&x| f64::from(x)).collect();
        let mut state = vec![(0.0, 0.0); n];
        for step in 1..=10 {
            let g = set_gradient(&p, step);
            let norm: f64 = g.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
            let g: Vec<f64> = g
                .iter()
                .map(|&g| match clip {
                    Clip::None => f64::from(g),
                    Clip::Value(limit) => f64::from(g.clamp(-limit, limit)),
                    Clip::Norm(most) => f64::from(g) * (f64::from(most) / (norm + 1e-6)).min(1.0),
                })
                .collect();
            optimizer.step(0.01).unwrap();
            reference(&mut want, &mut state, &g, step as i32, 0.01, 0.1, &settings);
            if clip == Clip::Norm(1.0) {
                assert!((f64::from(optimizer.grad_norm().item().unwrap()) - norm).abs() < 1e-4 * norm);
            }
        }
        for (got, want) in p.value().to_vec::<f32>().unwrap().iter().zip(&want) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{clip:?}: {got} instead of {want}");
        }
    }
}

#[test]
fn groups_have_their_own_decay_and_rate() {
    let (a, b) = (param("a", &[1.0]), param("b", &[1.0]));
    let groups = vec![group(&[&a], 0.5), Group { params: vec![b.clone()], weight_decay: 0.0, rate: 0.0 }];
    let mut optimizer = AdamW::new(groups, Settings::default()).unwrap();
    optimizer.step(0.1).unwrap(); // gradients are zero: only decay acts
    assert!((a.value().item().unwrap() - 0.95).abs() < 1e-6);
    assert_eq!(b.value().item().unwrap(), 1.0);
}

#[test]
fn a_shadow_follows_its_parameter() {
    let value = Tensor::from_slice(&[1f32, -2.0], [2], &Device::cpu()).unwrap();
    let p = Param::new("p", &value, DType::BF16).unwrap();
    let mut optimizer = AdamW::new(vec![group(&[&p], 0.0)], Settings::default()).unwrap();
    p.grad().unwrap().overwrite(&[1f32, 1.0]).unwrap();
    optimizer.step(0.5).unwrap();
    let rounded: Vec<f32> = p.compute().to_f32_vec().unwrap();
    for (shadow, master) in rounded.iter().zip(p.value().to_vec::<f32>().unwrap()) {
        assert!((shadow - master).abs() <= master.abs() / 256.0 && *shadow != 1.0);
    }
}

#[test]
fn saved_state_goes_on_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("optimizer.safetensors");
    let start: Vec<f32> = (0..100).map(|i| i as f32 * 0.01).collect();
    let unbroken = param("p", &start);
    let mut optimizer = AdamW::new(vec![group(&[&unbroken], 0.01)], Settings::default()).unwrap();
    for step in 1..=5 {
        set_gradient(&unbroken, step);
        optimizer.step(0.01).unwrap();
    }
    optimizer.save(&path).unwrap();
    let resumed = param("p", &unbroken.value().to_vec::<f32>().unwrap());
    let mut second = AdamW::new(vec![group(&[&resumed], 0.01)], Settings::default()).unwrap();
    second.restore(&path).unwrap();
    assert_eq!(second.steps(), 5);
    for step in 6..=10 {
        for (p, o) in [(&unbroken, &mut optimizer), (&resumed, &mut second)] {
            set_gradient(p, step);
            o.step(0.01).unwrap();
        }
    }
    assert_eq!(unbroken.value().to_vec::<f32>().unwrap(), resumed.value().to_vec::<f32>().unwrap());
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("optimizer.safetensors");
    let p = param("p", &[1.0, 2.0]);
    let mut optimizer = AdamW::new(vec![group(&[&p], 0.0)], Settings::default()).unwrap();
    p.grad().unwrap().overwrite(&[1f32, 1.0]).unwrap();
    optimizer.step(0.1).unwrap();
    optimizer.save(&path).unwrap();
    let good = std::fs::read(&path).unwrap();

    let refused = |bytes: &[u8], other: &Param, word: &str| {
        std::fs::write(&path, bytes).unwrap();
        let mut o = AdamW::new(vec![group(&[other], 0.0)], Settings::default()).unwrap();
        let error = o.restore(&path).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("optimizer.safetensors"), "{error}");
        assert_eq!(o.steps(), 0);
    };
    refused(&good, &param("q", &[1.0, 2.0]), "mean.q");
    refused(&good, &param("p", &[1.0, 2.0, 3.0]), "[3]");
    refused(&good[..good.len() - 3], &p, "");
    refused(b"", &p, "");
    let mut nan = good.clone();
    let end = nan.len();
    nan[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&nan, &p, "NaN");
}

#[test]
fn bad_parameters_are_named() {
    let p = param("twice", &[1.0]);
    let error = AdamW::new(vec![group(&[&p, &p], 0.0)], Settings::default()).err().unwrap();
    assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains("twice"));
    assert!(AdamW::new(vec![], Settings::default()).is_err());
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing_where_its_norm_is_taken() {
    for bad in [f32::NAN, f32::INFINITY] {
        let p = param("p", &[1.0, 2.0, 3.0]);
        let settings = Settings { clip: Clip::Norm(1.0), ..Settings::default() };
        let mut optimizer = AdamW::new(vec![group(&[&p], 0.1)], settings).unwrap();
        p.grad().unwrap().overwrite(&[0.5f32, bad, 0.5]).unwrap();
        optimizer.step(0.1).unwrap();
        assert_eq!(p.value().to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0]);
        // Nor is anything of it left for the next step.
        p.grad().unwrap().overwrite(&[0.5f32, 0.5, 0.5]).unwrap();
        optimizer.step(0.1).unwrap();
        assert!(p.value().to_vec::<f32>().unwrap().iter().zip([1.0, 2.0, 3.0]).all(|(now, then)| now.is_finite() && *now < then));
    }
}
