//! The tape: depth, sums of gradients, slices of stacked parameters, regions that are recomputed, and buffers that are reused.

#![allow(clippy::unwrap_used)]

use armt_engine::ops::{self, Activation, Heads, Linear};
use armt_engine::{DType, Device, Error, Param, Result, Tape, Tensor};

fn cpu() -> Device {
    Device::cpu()
}

fn tensor(shape: &[usize], seed: u32) -> Tensor {
    let n: usize = shape.iter().product();
    let hash = |i: usize| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503_001));
    let data: Vec<f32> = (0..n).map(|i| (hash(i) as f32 / u32::MAX as f32 - 0.5) * 1.4).collect();
    Tensor::from_slice(&data, shape, &cpu()).unwrap()
}

fn param(name: &str, shape: &[usize], seed: u32) -> Param {
    Param::new(name, &tensor(shape, seed), DType::F32).unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.to_vec::<f32>().unwrap()
}

#[test]
fn a_chain_of_a_hundred_thousand_operations_needs_no_deep_stack() {
    // On a thread with a stack that recursion over the chain could not fit into.
    let run = || {
        let tape = Tape::new();
        let x = tape.variable(&Tensor::full(1.0, [1], &cpu()).unwrap());
        let mut y = x.clone();
        for _ in 0..100_000 {
            y = ops::scale(&y, 1.00001).unwrap();
        }
        tape.backward(&y).unwrap();
        let (slope, value) = (tape.grad(&x).unwrap().item().unwrap(), y.item().unwrap());
        assert!((slope - value).abs() < 1e-3 * value && (value - std::f32::consts::E).abs() < 0.05);
        // Dropping an unplayed tape of that depth is no recursion either.
        let tape = Tape::new();
        let mut y = tape.variable(&Tensor::full(1.0, [1], &cpu()).unwrap());
        for _ in 0..100_000 {
            y = ops::scale(&y, 1.0).unwrap();
        }
    };
    std::thread::Builder::new().stack_size(128 << 10).spawn(run).unwrap().join().unwrap();
}

#[test]
fn gradients_of_a_parameter_used_often_add_up() {
    let w = param("w", &[3], 1);
    for round in 1..=2 {
        let tape = Tape::new();
        let x = tensor(&[3], 2);
        let y = ops::add(&ops::mul(&x, &tape.param(&w)).unwrap(), &tape.param(&w)).unwrap();
        tape.backward(&ops::sum(&y).unwrap()).unwrap();
        let want: Vec<f32> = values(&x).iter().map(|x| round as f32 * (x + 1.0)).collect();
        assert_eq!(values(w.grad().unwrap()).iter().zip(&want).filter(|(g, w)| (*g - *w).abs() > 1e-5).count(), 0);
    }
    w.zero_grad().unwrap();
    assert_eq!(values(w.grad().unwrap()), [0.0; 3]);
}

#[test]
fn layers_of_a_stacked_parameter_get_their_gradients_in_place() {
    let (w, x) = (param("w", &[4, 3, 2], 3), tensor(&[2, 5, 3], 4));
    let marker = vec![7f32; 24];
    w.grad().unwrap().overwrite(&marker).unwrap();
    let tape = Tape::new();
    let layers = tape.param_rows(&w, 1..3).unwrap();
    tape.backward(&ops::sum(&ops::matmul(&x, &layers).unwrap()).unwrap()).unwrap();
    let got = values(w.grad().unwrap());
    assert_eq!((&got[..6], &got[18..]), (&marker[..6], &marker[18..]), "other layers are not touched");
    // d sum(x w) / dw[l][k][n] = sum over rows of x[l][row][k]
    let x = values(&x);
    for (l, k, n) in [(0, 0, 0), (1, 2, 1), (0, 1, 1)] {
        let want = 7.0 + (0..5).map(|row| x[(l * 5 + row) * 3 + k]).sum::<f32>();
        assert!((got[((l + 1) * 3 + k) * 2 + n] - want).abs() < 1e-5);
    }
    // Layers of layers, and a layer on its own.
    let tape = Tape::new();
    let one = ops::rows(&ops::rows(&tape.param(&w), 1..4).unwrap(), 2..3).unwrap();
    w.zero_grad().unwrap();
    tape.backward(&ops::sum(&one).unwrap()).unwrap();
    assert_eq!(values(w.grad().unwrap()), [[0f32; 18].as_slice(), &[1.0; 6]].concat());
}

#[test]
fn detached_values_and_no_grad_let_nothing_through() {
    let tape = Tape::new();
    let x = tape.variable(&tensor(&[4], 5));
    let y = ops::mul(&x, &x.detach()).unwrap();
    let silent = tape.no_grad(|| ops::mul(&x, &x)).unwrap();
    assert!(!silent.is_tracked() && y.is_tracked());
    tape.backward(&ops::sum(&ops::add(&y, &silent).unwrap()).unwrap()).unwrap();
    assert_eq!(values(&tape.grad(&x).unwrap()), values(&x.detach()), "d(x * const)/dx = const");

    let off = Tape::off();
    let w = param("w", &[4], 6);
    assert!(!ops::mul(&off.param(&w), &off.variable(&x.detach())).unwrap().is_tracked());
    assert!(off.is_empty());
}

#[test]
fn misuse_of_the_tape_is_an_error() {
    let tape = Tape::new();
    let x = tape.variable(&tensor(&[4], 7));
    let error = tape.backward(&x).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }) && error.to_string().contains("one element"), "{error}");
    let y = ops::sum(&x).unwrap();
    assert!(matches!(Tape::new().backward(&y), Err(Error::Tape(_))));
    tape.backward(&y).unwrap();
    assert!(tape.is_empty());
    for again in [tape.backward(&y), tape.seed(&x, &x), tape.backward_from(&[(&x, tensor(&[4], 8))])] {
        assert!(again.unwrap_err().to_string().contains("played already"));
    }
    assert_eq!(values(&tape.grad(&x).unwrap()), [1.0; 4], "what it gave is still there");
}

#[test]
fn an_operation_on_tensors_of_two_tapes_is_refused_when_either_is_played() {
    let (first, second) = (Tape::new(), Tape::new());
    let (x, a) = (first.variable(&tensor(&[4], 1)), second.variable(&tensor(&[4], 2)));
    let y = ops::sum(&ops::mul(&a, &x).unwrap()).unwrap();
    let error = second.backward(&y).unwrap_err();
    assert!(matches!(error, Error::Tape(_)) && error.to_string().contains("of another"), "{error}");

    let tape = Tape::new();
    let (x, hidden) = (tape.variable(&tensor(&[4], 1)), tape.variable(&tensor(&[4], 2)));
    let region = move |_: &Tape, inputs: &[Tensor]| Ok(vec![ops::mul(&inputs[0], &hidden)?]);
    let error = tape.recompute(&[&x], region).unwrap_err();
    assert!(error.to_string().contains("not among its inputs"), "{error}");
}

#[test]
fn what_is_repeated_over_nothing_has_a_gradient_of_zeros() {
    let bias = param("bias", &[1000], 5);
    let tape = Tape::new();
    let rows = Tensor::zeros([0, 1000], DType::F32, &cpu()).unwrap();
    tape.backward(&ops::sum(&ops::add(&rows, &tape.param(&bias)).unwrap()).unwrap()).unwrap();
    assert_eq!(values(bias.grad().unwrap()), [0.0; 1000]);
}

#[test]
fn rows_without_numbers_are_refused() {
    let (x, w) = (Tensor::zeros([5, 0], DType::F32, &cpu()).unwrap(), Tensor::zeros([0, 3], DType::F32, &cpu()).unwrap());
    assert!(matches!(ops::linear(&x, &w, Linear::default()), Err(Error::Shape { .. })));
    let (q, a, z) = (tensor(&[2, 3, 4], 1), Tensor::zeros([2, 24, 0], DType::F32, &cpu()).unwrap(), tensor(&[2, 24], 2));
    assert!(matches!(ops::assoc_read(&q, &a, &z, 3, None), Err(Error::Shape { .. })));
}

#[test]
fn a_query_that_is_not_a_number_reaches_its_row_of_attention_and_no_other() {
    let (mut q, kv) = (values(&tensor(&[1, 5, 4], 1)), tensor(&[1, 5, 4], 2));
    q[2 * 4] = f32::NAN;
    let q = Tensor::from_slice(&q, [1, 5, 4], &cpu()).unwrap();
    let y = values(&ops::attention_cached(&q, &kv, &kv, Heads { query: 1, key: 1, size: 4 }, None).unwrap());
    for (row, y) in y.chunks(4).enumerate() {
        assert!(y.iter().all(|y| y.is_nan() == (row == 2)), "row {row}: {y:?}");
    }
}

#[test]
fn a_gradient_of_another_type_is_refused() {
    let tape = Tape::new();
    let x = tape.variable(&tensor(&[4], 1));
    let y = ops::scale(&x, 2.0).unwrap();
    let rounded = ops::cast(&tensor(&[4], 2), DType::BF16).unwrap();
    assert!(matches!(tape.seed(&y, &rounded), Err(Error::DType { .. })));
    assert!(matches!(tape.backward_from(&[(&y, rounded)]), Err(Error::DType { .. })));
}

/// A small stack of layers with a residual and a parameter used in each of several steps, like a recurrent model.
fn block(tape: &Tape, x: &Tensor, state: &Tensor, w: &[Param; 3]) -> Result<(Tensor, Tensor)> {
    let bias = tape.param(&w[1]);
    let h = ops::linear(x, &tape.param(&w[0]), Linear { bias: Some(&bias), activation: Activation::Gelu, ..Linear::default() })?;
    let h = ops::add(&h, state)?;
    let y = ops::linear(&h, &tape.param(&w[2]), Linear { residual: Some(x), ..Linear::default() })?;
    let next = ops::add(&ops::scale(&h, 0.5)?, &ops::mul(state, state)?)?;
    Ok((y, next))
}

fn recurrent(recompute: bool) -> (Vec<f32>, Vec<Vec<f32>>) {
    let w = [param("w0", &[5, 5], 10), param("b", &[5], 11), param("w1", &[5, 5], 12)];
    let tape = Tape::new();
    let x0 = tape.variable(&tensor(&[7, 5], 13));
    let s0 = tape.variable(&tensor(&[7, 5], 14));
    let (mut x, mut s) = (x0.clone(), s0.clone());
    for _ in 0..6 {
        (x, s) = if recompute {
            let w = w.clone();
            // The input is passed twice, as nothing forbids.
            let region = move |tape: &Tape, t: &[Tensor]| block(tape, &t[0], &t[1], &w).map(|(y, s)| vec![y, s, t[2].clone()]);
            let out = tape.recompute(&[&x, &s, &x], region).unwrap();
            (out[0].clone(), out[1].clone())
        } else {
            block(&tape, &x, &s, &w).unwrap()
        };
    }
    let loss = ops::sum(&ops::add(&ops::mul(&x, &x).unwrap(), &s).unwrap()).unwrap();
    tape.backward(&loss).unwrap();
    let mut gradients: Vec<Vec<f32>> = w.iter().map(|p| values(p.grad().unwrap())).collect();
    gradients.extend([&x0, &s0].map(|t| values(&tape.grad(t).unwrap())));
    (values(&loss), gradients)
}

#[test]
fn recomputed_regions_give_the_same_bits() {
    let (plain, recomputed) = (recurrent(false), recurrent(true));
    assert_eq!(plain.0, recomputed.0);
    for (a, b) in plain.1.iter().zip(&recomputed.1) {
        assert!(a.iter().any(|g| *g != 0.0));
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(a), bits(b));
    }
}

#[test]
fn a_region_keeps_its_inputs_only_and_takes_leaves_as_inputs() {
    let w = param("w", &[3, 3], 20);
    let tape = Tape::new();
    let leaf = tape.param(&w);
    let x = tape.variable(&tensor(&[2, 3], 21));
    let out = tape
        .recompute(&[&x, &leaf], |_, t| {
            let mut y = t[0].clone();
            for _ in 0..10 {
                y = ops::gelu(&ops::matmul(&y, &t[1])?)?;
            }
            Ok(vec![y])
        })
        .unwrap();
    assert_eq!(tape.len(), 1, "ten layers are one record");
    tape.backward(&ops::sum(&out[0]).unwrap()).unwrap();
    assert!(values(w.grad().unwrap()).iter().any(|g| *g != 0.0));
    assert!(tape.grad(&x).is_some());
}

#[test]
fn every_misfit_says_what_was_expected_and_what_came() {
    let (a, b) = (tensor(&[2, 3], 1), tensor(&[4, 3], 2));
    let error = ops::matmul(&a, &b).unwrap_err().to_string();
    assert!(error.contains("matmul") && error.contains("[3, 3]") && error.contains("[4, 3]"), "{error}");
    let half = ops::cast(&a, DType::BF16).unwrap();
    let error = ops::add(&a, &half).unwrap_err().to_string();
    assert!(error.contains("expected") && error.contains("f32") && error.contains("bf16"), "{error}");
    let error = ops::add(&a, &b).unwrap_err().to_string();
    assert!(error.contains("[2, 3]") && error.contains("[4, 3]"), "{error}");
    let error = Tensor::from_slice(&[1f32, 2.0], [3], &cpu()).unwrap_err().to_string();
    assert!(error.contains("2 elements") && error.contains("[3]"), "{error}");
    assert!(a.to_vec::<i32>().is_err());
    assert!(ops::rows(&a, 1..5).is_err());
    assert!(ops::reshape(&a, [5]).is_err());
    assert!(armt_engine::Graph::capture(&cpu(), || Ok(())).err().unwrap().to_string().contains("CUDA"));
}

#[test]
fn a_machine_without_a_gpu_says_so() {
    if let Err(error) = Device::cuda(0) {
        let text = error.to_string();
        assert!(text.contains("CUDA") || text.contains("driver") || text.contains("lib"), "{text}");
        let (device, why) = Device::auto();
        assert!(!device.is_cuda() && why.is_some());
    }
    assert!(Device::cuda(99).is_err());
}

#[test]
fn bf16_on_the_cpu_goes_through_f32() {
    let x = ops::cast(&tensor(&[3, 4], 1), DType::BF16).unwrap();
    let w = Param::new("w", &tensor(&[4, 2], 2), DType::BF16).unwrap();
    let tape = Tape::new();
    let y = ops::matmul(&tape.variable(&x), &tape.param(&w)).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
    tape.backward(&ops::sum(&y).unwrap()).unwrap();
    assert_eq!(w.grad().unwrap().dtype(), DType::F32);
    assert!(values(w.grad().unwrap()).iter().any(|g| *g != 0.0));
}

#[test]
fn a_seed_counts_as_if_its_part_were_added_to_the_loss() {
    let (x, weights) = (tensor(&[3, 5], 21), tensor(&[5, 4], 22));
    let gradient = |seeded: bool, heard: bool| {
        let tape = Tape::new();
        let x = tape.variable(&x);
        let y = ops::matmul(&x, &weights).unwrap();
        let part = ops::mul(&y, &y).unwrap();
        let mut loss = ops::sum(&x).unwrap();
        if heard {
            loss = ops::add(&loss, &ops::sum(&y).unwrap()).unwrap();
        }
        match seeded {
            true => tape.seed(&y, &ops::scale(&y.detach(), 2.0).unwrap()).unwrap(),
            false => loss = ops::add(&loss, &ops::sum(&part).unwrap()).unwrap(),
        }
        tape.backward(&loss).unwrap();
        values(&tape.grad(&x).unwrap())
    };
    // Also where nothing else goes back through what is seeded.
    for heard in [true, false] {
        let (seeded, added) = (gradient(true, heard), gradient(false, heard));
        assert!(seeded.iter().zip(&added).all(|(s, a)| (s - a).abs() < 1e-5), "{seeded:?} is not {added:?}");
    }
    let (tape, other) = (Tape::new(), tensor(&[2], 1));
    tape.seed(&other, &other).unwrap();
    assert!(tape.seed(&other, &tensor(&[3], 1)).is_err(), "a gradient of another shape");
}

/// Layers that settle from the top, as on the way back of a diagonal: each group is told when its gradient is whole, and not only at the end.
#[test]
fn gradients_are_told_when_nothing_more_is_added_to_them() {
    let (weight, bias) = (param("weight", &[3, 2, 2], 1), param("bias", &[2], 2));
    let run = |recompute: bool, told: &mut dyn FnMut(usize)| {
        let tape = Tape::new();
        let mut x = ops::add(&tape.variable(&tensor(&[1, 2], 3)), &ops::reshape(&tape.param(&bias), [1, 2]).unwrap()).unwrap();
        // Of the upper layers the last use comes first on the way back, and layer 2 is used twice.
        for layer in [0, 1, 2, 2] {
            let w = weight.clone();
            let product = move |tape: &Tape, x: &[Tensor]| {
                let w = ops::reshape(&tape.param_rows(&w, layer..layer + 1)?, [2, 2])?;
                Ok(vec![ops::matmul(&x[0], &w)?])
            };
            x = if recompute { tape.recompute(&[&x], product) } else { product(&tape, &[x]) }.unwrap().remove(0);
        }
        let gradient = weight.grad().unwrap();
        let layer = |l| vec![ops::rows(gradient, l..l + 1).unwrap()];
        let never = vec![Tensor::zeros([2], DType::F32, &cpu()).unwrap()];
        let groups = [never, layer(2), vec![ops::rows(gradient, 0..2).unwrap()], vec![bias.grad().unwrap().clone()]];
        weight.zero_grad().unwrap();
        bias.zero_grad().unwrap();
        tape.backward_telling(&ops::sum(&x).unwrap(), &groups, &mut |group| {
            told(group);
            Ok(())
        })
        .unwrap();
        groups.map(|group| values(&group[0]))
    };
    for recompute in [false, true] {
        let mut told = Vec::new();
        let last = run(recompute, &mut |group| {
            let (weight, bias) = (values(weight.grad().unwrap()), values(bias.grad().unwrap()));
            told.push((group, weight, bias));
        });
        assert_eq!(told.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1, 2, 3], "each once, in order");
        assert_eq!(told[1].1[8..], last[1], "layer 2 when it is told");
        assert_eq!(told[2].1[..8], last[2], "layers 0 and 1");
        assert_eq!(told[3].2, last[3], "the bias");
        assert!(last.iter().skip(1).flatten().all(|g| *g != 0.0));
        // A region may add to anything, so that nothing is told before the last has been played.
        let early = told[1].1[..8].iter().all(|g| *g == 0.0);
        assert_eq!(early, !recompute, "layer 2 is told before the way back comes to the others");
    }
    let stops = Tape::new();
    let y = ops::sum(&stops.param(&bias)).unwrap();
    let error = stops.backward_telling(&y, &[vec![bias.grad().unwrap().clone()]], &mut |_| Err(Error::Tape("enough".into())));
    assert!(error.unwrap_err().to_string().contains("enough"));
}
