//! Frozen and trainable parameters: what each holds, and how one becomes the other.

#![allow(clippy::unwrap_used)]

use armt_engine::ops::{self, Linear};
use armt_engine::optim::{AdamW, Group, Settings};
use armt_engine::{DType, Device, Error, Param, Tape, Tensor};

fn tensor(data: &[f32]) -> Tensor {
    Tensor::from_slice(data, [data.len()], &Device::cpu()).unwrap()
}

#[test]
fn a_frozen_parameter_is_its_value_in_the_type_of_the_computation_and_nothing_else() {
    let value = tensor(&[1.0, -2.5, 0.1]);
    let shared = Param::frozen("w", &value, DType::F32).unwrap();
    assert!(!shared.is_trainable() && shared.shadow().is_none());
    value.overwrite(&[4f32, 5.0, 6.0]).unwrap();
    assert_eq!(shared.value().to_vec::<f32>().unwrap(), [4.0, 5.0, 6.0], "a value of the right type is not copied");

    let rounded = Param::frozen("w", &tensor(&[1.0, -2.5, 0.1]), DType::BF16).unwrap();
    assert_eq!((rounded.value().dtype(), rounded.compute().dtype()), (DType::BF16, DType::BF16));
    assert_eq!(rounded.value().to_f32_vec().unwrap(), [1.0, -2.5, 0.100_097_656]);
    let same =
        Param::frozen("w", &Tensor::from_f32_slice(&[1.0, -2.5, 0.1], [3], DType::BF16, &Device::cpu()).unwrap(), DType::BF16);
    assert_eq!(same.unwrap().value().to_f32_vec().unwrap(), rounded.value().to_f32_vec().unwrap());
    assert!(matches!(Param::frozen("w", &value, DType::I32), Err(Error::DType { .. })));
}

#[test]
fn nothing_flows_to_a_frozen_parameter_and_all_else_is_the_same() {
    let (x, w) = (tensor(&[0.5, -1.0]), tensor(&[2.0, 3.0, -1.0, 0.25]));
    let w = ops::reshape(&w, [2, 2]).unwrap();
    let run = |param: &Param| {
        let tape = Tape::new();
        let x = tape.variable(&ops::reshape(&x, [1, 2]).unwrap());
        let y = ops::linear(&x, &tape.param(param), Linear::default()).unwrap();
        tape.backward(&ops::sum(&y).unwrap()).unwrap();
        (y.to_vec::<f32>().unwrap(), tape.grad(&x).unwrap().to_vec::<f32>().unwrap())
    };
    let (frozen, trainable) = (Param::frozen("w", &w, DType::F32).unwrap(), Param::new("w", &w, DType::F32).unwrap());
    assert_eq!(run(&frozen), run(&trainable));
    assert!(trainable.grad().unwrap().to_vec::<f32>().unwrap().iter().any(|g| *g != 0.0));
    assert!(matches!(frozen.grad(), Err(Error::Frozen { name }) if name == "w"));
    assert!(frozen.zero_grad().is_ok() && frozen.refresh().is_ok());
    let tape = Tape::new();
    assert!(!tape.param(&frozen).is_tracked() && tape.param(&trainable).is_tracked());
    let group = Group { params: vec![frozen], weight_decay: 0.0, rate: 1.0 };
    assert!(matches!(AdamW::new(vec![group], Settings::default()), Err(Error::Frozen { .. })));
}

#[test]
fn a_frozen_parameter_becomes_a_trainable_one_with_a_buffer_of_its_own_and_back() {
    let frozen = Param::frozen("w", &tensor(&[1.0, 0.1]), DType::BF16).unwrap();
    let trainable = frozen.to_trainable(DType::BF16).unwrap();
    assert_eq!(trainable.name(), "w");
    assert_eq!(trainable.value().dtype(), DType::F32);
    assert_eq!(trainable.value().to_vec::<f32>().unwrap(), frozen.value().to_f32_vec().unwrap());
    trainable.set(&tensor(&[3.0, 4.0])).unwrap();
    assert_eq!(trainable.compute().to_f32_vec().unwrap(), [3.0, 4.0]);
    assert_eq!(frozen.value().to_f32_vec().unwrap()[0], 1.0);
    for compute in [DType::F32, DType::BF16] {
        let used = trainable.to_frozen(compute).unwrap();
        trainable.set(&tensor(&[5.0, 6.0])).unwrap();
        assert_eq!(used.value().to_f32_vec().unwrap(), [3.0, 4.0]);
        trainable.set(&tensor(&[3.0, 4.0])).unwrap();
    }
}

#[test]
fn a_value_can_be_set_in_either_type_and_other_shapes_are_refused() {
    let cpu = Device::cpu();
    for param in [
        Param::frozen("w", &tensor(&[0.0; 2]), DType::BF16).unwrap(),
        Param::frozen("w", &tensor(&[0.0; 2]), DType::F32).unwrap(),
        Param::new("w", &tensor(&[0.0; 2]), DType::BF16).unwrap(),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            param.set(&Tensor::from_f32_slice(&[1.5, -2.0], [2], dtype, &cpu).unwrap()).unwrap();
            assert_eq!(param.compute().to_f32_vec().unwrap(), [1.5, -2.0]);
            param.set(&tensor(&[0.0; 2])).unwrap();
        }
        assert!(matches!(param.set(&tensor(&[0.0; 3])), Err(Error::Shape { .. })));
    }
}

#[test]
fn matrices_in_int8_multiply_as_their_rounded_values_do_and_nothing_else() {
    let (layers, k, n) = (3, 8, 32);
    let values: Vec<f32> = (0..layers * k * n).map(|i| (i * 7919 % 2003) as f32 / 1001.0 - 1.0).collect();
    let w = Param::int8("w", &[layers, k, n]).unwrap().unwrap();
    assert!(!w.is_trainable() && w.value().dtype() == DType::I8);
    w.set_values(&values).unwrap();
    assert!(w.set_values(&values[1..]).is_err(), "another number of elements");
    let exact = Param::frozen("w", &Tensor::from_slice(&values, [layers, k, n], &Device::cpu()).unwrap(), DType::F32).unwrap();
    let x: Vec<f32> = (0..2 * 5 * k).map(|i| (i * 31 % 17) as f32 / 8.0 - 1.0).collect();
    let (x, bias) =
        (Tensor::from_slice(&x, [2, 5, k], &Device::cpu()).unwrap(), Tensor::full(0.5, [2, n], &Device::cpu()).unwrap());
    let run = |w: &Param| {
        let with = Linear { bias: Some(&bias), ..Linear::default() };
        Tape::off().linear_rows(&x, w, 1..3, with).unwrap().to_vec::<f32>().unwrap()
    };
    let most = run(&w).iter().zip(run(&exact)).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(0.0 < most && most < 0.05, "{most}");

    let tape = Tape::new();
    let tracked = tape.linear_rows(&tape.variable(&x), &w, 1..3, Linear::default()).err().unwrap().to_string();
    assert!(tracked.contains("hands no gradient on"), "{tracked}");
    assert!(ops::linear(&x, &tape.param_rows(&w, 1..3).unwrap(), Linear::default()).is_err(), "without its scales");
    assert!(w.to_trainable(DType::F32).is_err() && w.value().to_f32_vec().is_err());
    for shape in [&[2usize, 6, 32][..], &[2, 8, 24], &[8, 32]] {
        assert!(Param::int8("w", shape).unwrap().is_none(), "{shape:?}");
    }
}
