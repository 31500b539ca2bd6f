//! A repeated step allocates nothing. Alone in its file: the CPU's pool belongs to the whole process.

#![allow(clippy::unwrap_used)]

use armt_engine::ops::{self, Activation, Linear};
use armt_engine::optim::{AdamW, Clip, Group, Settings};
use armt_engine::{DType, Device, Param, Tape, Tensor};

#[test]
fn a_repeated_training_step_allocates_nothing() {
    let device = Device::cpu();
    let filled =
        |name: &str, shape: [usize; 2]| Param::new(name, &Tensor::full(0.01, shape, &device).unwrap(), DType::F32).unwrap();
    let (w1, b1, w2) = (filled("w1", [64, 96]), filled("b1", [1, 96]), filled("w2", [96, 64]));
    let x = Tensor::full(0.5, [50, 64], &device).unwrap();
    let group = Group { params: vec![w1.clone(), b1.clone(), w2.clone()], weight_decay: 0.01, rate: 1.0 };
    let mut optimizer = AdamW::new(vec![group], Settings { clip: Clip::Norm(1.0), ..Settings::default() }).unwrap();
    let mut step = || {
        optimizer.zero_grad().unwrap();
        let tape = Tape::new();
        let mut h = x.clone();
        for _ in 0..4 {
            let (bias, residual) = (tape.param(&b1), h.clone());
            let with = Linear { bias: Some(&bias), activation: Activation::Gelu, ..Linear::default() };
            h = ops::linear(&h, &tape.param(&w1), with).unwrap();
            h = ops::linear(&h, &tape.param(&w2), Linear { residual: Some(&residual), ..Linear::default() }).unwrap();
        }
        tape.backward(&ops::mean(&ops::mul(&h, &h).unwrap()).unwrap()).unwrap();
        optimizer.step(1e-3).unwrap();
    };
    step();
    let after_first = device.pool_stats();
    for _ in 0..5 {
        step();
    }
    let after = device.pool_stats();
    assert!(after_first.allocations > 0);
    assert_eq!((after.allocations, after.held_bytes), (after_first.allocations, after_first.held_bytes));
    assert_eq!(after.used_bytes, after_first.used_bytes, "nothing stays behind");
    device.trim();
    assert_eq!(device.pool_stats().held_bytes, device.pool_stats().used_bytes);
}
