//! The chunked loss: the same numbers as the plain one, in memory that does not grow with all logits. One test in a file of its
//! own, because the CPU's pool belongs to the whole process.

use armt_engine::{DType, Device, Param, Result, Tape, Tensor, ops};

const ROWS: usize = 512;
const CLASSES: usize = 4096;
const WIDTH: usize = 8;
const ALL_LOGITS: usize = ROWS * CLASSES * 4;

fn values(n: usize, salt: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + salt) * 7919) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Loss, gradients of h and of the weight, and the bytes that were needed on top of what was there.
fn measure(loss: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>) -> Result<(f32, Vec<f32>, Vec<f32>, usize)> {
    let device = Device::cpu();
    let weight = Param::new("weight", &Tensor::from_slice(&values(CLASSES * WIDTH, 1), [CLASSES, WIDTH], &device)?, DType::F32)?;
    let h = Tensor::from_slice(&values(ROWS * WIDTH, 2), [2, ROWS / 2, WIDTH], &device)?;
    let targets: Vec<i32> = (0..ROWS).map(|i| if i % 5 == 0 { -1 } else { (i * 31 % CLASSES) as i32 }).collect();
    let targets = Tensor::from_slice(&targets, [2, ROWS / 2], &device)?;
    let before = device.pool_stats().used_bytes;
    device.reset_peak();
    let tape = Tape::new();
    let h = tape.variable(&h);
    let loss = loss(&h, &tape.param(&weight), &targets)?;
    tape.backward(&loss)?;
    let needed = device.pool_stats().peak_bytes - before;
    let dh = tape.grad(&h).map_or(Ok(Vec::new()), |g| g.to_vec::<f32>())?;
    Ok((loss.item()?, dh, weight.grad()?.to_vec::<f32>()?, needed))
}

fn assert_close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |m, w| m.max(w.abs()));
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= 1e-5 * largest, "{g} instead of {w}");
    }
}

#[test]
fn the_chunked_loss_is_the_plain_one_without_all_logits() {
    let plain = measure(|h, w, t| ops::cross_entropy(&ops::matmul_nt(h, w)?, t)).unwrap();
    let chunked = measure(|h, w, t| ops::linear_cross_entropy(h, w, t, 16)).unwrap();
    assert_close(&[chunked.0], &[plain.0]);
    assert_close(&chunked.1, &plain.1);
    assert_close(&chunked.2, &plain.2);
    assert!(plain.3 >= 2 * ALL_LOGITS, "logits and their gradient are {} bytes, {} were counted", 2 * ALL_LOGITS, plain.3);
    assert!(chunked.3 < ALL_LOGITS / 16, "{} bytes for chunks of {}", chunked.3, 16 * CLASSES * 4);
}
