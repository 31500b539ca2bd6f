//! Times CPU operations at the sizes of the workloads: lines `name microseconds`. `benches/cpu_ops.py` runs it beside PyTorch.

use std::time::Instant;

use armt_engine::ops::{self, Heads, Linear};
use armt_engine::{Device, Result, Tape, Tensor};

/// Median of several rounds, each long enough to time.
fn time(name: &str, mut f: impl FnMut() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    f()?;
    let rounds = (0.02 / start.elapsed().as_secs_f64().max(1e-7)).ceil() as usize;
    let mut times = Vec::new();
    for _ in 0..7 {
        let start = Instant::now();
        for _ in 0..rounds {
            f()?;
        }
        times.push(start.elapsed().as_secs_f64() / rounds as f64);
    }
    times.sort_by(f64::total_cmp);
    println!("{name} {:.3}", times[3] * 1e6);
    Ok(())
}

fn random(shape: &[usize]) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let data: Vec<f32> = (0..n).map(|i| (i as f32 * 0.731).sin()).collect();
    Tensor::from_slice(&data, shape, &Device::cpu())
}

/// Forward and backward of `f` at `x`, for a gradient of ones.
fn both(name: &str, inputs: &[&Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<()> {
    let shape = f(&inputs.iter().map(|t| t.detach()).collect::<Vec<_>>())?.shape();
    let dy = random(shape.dims())?;
    time(name, || {
        let tape = Tape::new();
        let inputs: Vec<Tensor> = inputs.iter().map(|t| tape.variable(t)).collect();
        let y = f(&inputs)?;
        tape.backward_from(&[(&y, dy.clone())])
    })
}

fn main() -> Result<()> {
    armt_engine::join_thread_pool(0);
    // groups, rows, inner, columns of W3 and W2, one layer and all layers at once
    let products = [
        [1, 272, 256, 768],
        [1, 272, 256, 256],
        [1, 272, 256, 1024],
        [1, 272, 1024, 256],
        [1, 272, 256, 64],
        [6, 272, 256, 768],
        [6, 272, 256, 256],
        [6, 272, 256, 1024],
        [6, 272, 1024, 256],
        [6, 272, 256, 64],
        [1, 256, 256, 8192],
        [1, 640, 128, 384],
        [1, 640, 128, 128],
        [1, 640, 128, 512],
        [1, 640, 512, 128],
        [4, 640, 128, 384],
        [4, 640, 128, 128],
        [4, 640, 128, 512],
        [4, 640, 512, 128],
        [4, 640, 128, 32],
    ];
    for [g, m, k, n] in products {
        let (x, w) = (random(&[g, m, k])?, random(&[g, k, n])?);
        time(&format!("matmul_{g}x{m}x{k}x{n}"), || ops::linear(&x, &w, Linear::default()).map(|_| ()))?;
    }
    for [g, m, k, n] in [[6, 272, 256, 768], [4, 640, 128, 512]] {
        let (x, dy) = (random(&[g, m, k])?, random(&[g, m, n])?);
        time(&format!("matmul_tn_{g}x{k}x{m}x{n}"), || ops::matmul_tn(&x, &dy).map(|_| ()))?;
        let w = random(&[g, k, n])?;
        time(&format!("matmul_nt_{g}x{m}x{n}x{k}"), || ops::matmul_nt(&dy, &w).map(|_| ()))?;
    }
    for shape in [[1632, 1024], [2560, 512]] {
        let (x, b) = (random(&shape)?, random(&shape)?);
        let size = format!("{}x{}", shape[0], shape[1]);
        time(&format!("add_{size}"), || ops::add(&x, &b).map(|_| ()))?;
        time(&format!("mul_{size}"), || ops::mul(&x, &b).map(|_| ()))?;
        time(&format!("gelu_{size}"), || ops::gelu(&x).map(|_| ()))?;
        time(&format!("gelu_erf_{size}"), || ops::gelu_erf(&x).map(|_| ()))?;
        time(&format!("silu_{size}"), || ops::silu(&x).map(|_| ()))?;
        time(&format!("sigmoid_{size}"), || ops::sigmoid(&x).map(|_| ()))?;
        time(&format!("relu_{size}"), || ops::relu(&x).map(|_| ()))?;
        both(&format!("gelu_both_{size}"), &[&x], |t| ops::gelu(&t[0]))?;
        time(&format!("sum_{size}"), || ops::sum_axis(&x, 0).map(|_| ()))?;
    }
    for shape in [[272, 256], [1632, 256], [640, 128], [2560, 128]] {
        let (x, gain, bias) = (random(&shape)?, random(&shape[1..])?, random(&shape[1..])?);
        let size = format!("{}x{}", shape[0], shape[1]);
        time(&format!("layer_norm_{size}"), || ops::layer_norm(&x, &gain, &bias, 1e-5).map(|_| ()))?;
        time(&format!("rms_norm_{size}"), || ops::rms_norm(&x, &gain, 1e-5).map(|_| ()))?;
        time(&format!("softmax_{size}"), || ops::softmax(&x).map(|_| ()))?;
        both(&format!("layer_norm_both_{size}"), &[&x, &gain, &bias], |t| ops::layer_norm(&t[0], &t[1], &t[2], 1e-5))?;
        both(&format!("rms_norm_both_{size}"), &[&x, &gain], |t| ops::rms_norm(&t[0], &t[1], 1e-5))?;
        both(&format!("softmax_both_{size}"), &[&x], |t| ops::softmax(&t[0]))?;
    }
    for [n, h, t, size] in [[6, 8, 272, 32], [1, 8, 272, 32], [256, 4, 10, 32]] {
        let heads = Heads { query: h, key: h, size };
        let qkv = random(&[n, t, 3 * h * size])?;
        time(&format!("attention_{n}x{h}x{t}x{size}"), || ops::attention(&qkv, heads, None).map(|_| ()))?;
        both(&format!("attention_both_{n}x{h}x{t}x{size}"), &[&qkv], |t| ops::attention(&t[0], heads, None))?;
    }
    Ok(())
}
