//! What the operation tests share: cases, plain f64 loops to compare with, and the comparison itself.
//!
//! A [`Case`] says how to make an operation's inputs, how to run it on the engine, and how a naive loop in f64 computes the same. The CPU
//! tests check the forward pass against the loop and the backward pass against central differences of the loop; the GPU tests run the
//! same cases on CUDA and compare with the CPU. Cases live in `cases`, one file for each operation.

#![allow(dead_code, unused_imports)] // each test binary uses its part

pub mod cases;
pub mod training;

use armt_engine::{DType, Device, Param, Result, Tape, Tensor, ops};

/// A plain array in f64.
#[derive(Clone, Debug)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Array {
    pub fn zeros(shape: &[usize]) -> Self {
        Array { shape: shape.to_vec(), data: vec![0.0; shape.iter().product()] }
    }

    /// Fills from a function of the flat index.
    pub fn from_fn(shape: &[usize], f: impl FnMut(usize) -> f64) -> Self {
        Array { shape: shape.to_vec(), data: (0..shape.iter().product()).map(f).collect() }
    }

    /// Size of the last axis.
    pub fn last(&self) -> usize {
        *self.shape.last().unwrap_or(&1)
    }

    fn to_f32(&self) -> Vec<f32> {
        self.data.iter().map(|&x| x as f32).collect()
    }
}

/// A small seeded generator (splitmix64).
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// One input of a case.
#[derive(Clone)]
pub struct Input {
    /// Its values. Rounded to what bf16 can hold before anything is computed, so that f32 and bf16 runs start equal.
    pub array: Array,
    /// i32 inputs are never differentiated.
    pub integer: bool,
    /// Memory and the like: f32 also where the computation is in bf16.
    pub always_f32: bool,
    /// Whether gradients are compared.
    pub differentiable: bool,
    /// Given as a parameter, whose gradient is added up in f32, instead of a variable.
    pub parameter: bool,
}

/// A differentiable input of normal random values.
pub fn normal(rng: &mut Rng, shape: &[usize]) -> Input {
    spread(rng, shape, 1.0)
}

/// Random values with a standard deviation.
pub fn spread(rng: &mut Rng, shape: &[usize], deviation: f64) -> Input {
    let array = Array::from_fn(shape, |_| round_bf16(deviation * rng.normal()));
    Input { array, integer: false, always_f32: false, differentiable: true, parameter: false }
}

/// An integer input.
pub fn integers(shape: &[usize], mut f: impl FnMut(usize) -> i32) -> Input {
    Input {
        array: Array::from_fn(shape, |i| f64::from(f(i))),
        integer: true,
        always_f32: false,
        differentiable: false,
        parameter: false,
    }
}

impl Input {
    /// f32 also where the computation is in bf16.
    pub fn in_f32(mut self) -> Self {
        self.always_f32 = true;
        self
    }

    /// Not differentiated.
    pub fn constant(mut self) -> Self {
        self.differentiable = false;
        self
    }

    /// A parameter.
    pub fn parameter(mut self) -> Self {
        self.parameter = true;
        self
    }

    /// Changes every value.
    pub fn map(mut self, f: impl Fn(f64) -> f64) -> Self {
        self.array.data.iter_mut().for_each(|x| *x = round_bf16(f(*x)));
        self
    }

    fn tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = self.array.shape.as_slice();
        if self.integer {
            let data: Vec<i32> = self.array.data.iter().map(|&x| x as i32).collect();
            return Tensor::from_slice(&data, shape, device);
        }
        let t = Tensor::from_slice(&self.array.to_f32(), shape, device)?;
        if self.always_f32 { Ok(t) } else { ops::cast(&t, dtype) }
    }
}

fn round_bf16(x: f64) -> f64 {
    let bits = (x as f32).to_bits();
    f64::from(f32::from_bits(bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000))
}

/// One operation at one size.
pub struct Case {
    pub name: String,
    pub inputs: Vec<Input>,
    /// The operation on the engine.
    pub run: Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Sync>,
    /// The operation as plain loops. The second argument is the unperturbed point, for what gradients do not flow through.
    pub naive: Box<dyn Fn(&[Array], &[Array]) -> Vec<Array> + Sync>,
}

impl Case {
    /// A case with one output and nothing detached.
    pub fn new(
        name: impl Into<String>,
        inputs: Vec<Input>,
        run: impl Fn(&[Tensor]) -> Result<Tensor> + Sync + 'static,
        naive: impl Fn(&[Array]) -> Array + Sync + 'static,
    ) -> Self {
        Case {
            name: name.into(),
            inputs,
            run: Box::new(move |t| run(t).map(|y| vec![y])),
            naive: Box::new(move |a, _| vec![naive(a)]),
        }
    }
}

/// What a run on the engine gave: outputs, and gradients of the differentiable inputs of sum(weights * outputs).
pub struct Outcome {
    pub outputs: Vec<Vec<f32>>,
    pub gradients: Vec<Option<Vec<f32>>>,
}

/// Weights that turn outputs into one number to differentiate.
fn weights(output: usize, len: usize) -> Vec<f64> {
    let mut rng = Rng(1000 + output as u64);
    (0..len).map(|_| round_bf16(rng.normal())).collect()
}

/// Runs a case forward and backward.
pub fn run(case: &Case, dtype: DType, device: &Device) -> Result<Outcome> {
    let tape = Tape::new();
    let params: Vec<Option<Param>> = case
        .inputs
        .iter()
        .map(|i| i.parameter.then(|| Param::new("p", &i.tensor(DType::F32, device)?, dtype)).transpose())
        .collect::<Result<_>>()?;
    let inputs: Vec<Tensor> = case
        .inputs
        .iter()
        .zip(&params)
        .map(|(i, param)| match param {
            Some(param) => Ok(tape.param(param)),
            None => i.tensor(dtype, device).map(|t| if i.differentiable { tape.variable(&t) } else { t }),
        })
        .collect::<Result<_>>()?;
    let outputs = (case.run)(&inputs)?;
    let seeds: Vec<(&Tensor, Tensor)> = outputs
        .iter()
        .enumerate()
        .filter(|(_, y)| y.is_tracked())
        .map(|(i, y)| {
            let w: Vec<f32> = weights(i, y.elements()).iter().map(|&x| x as f32).collect();
            Ok((y, ops::cast(&Tensor::from_slice(&w, y.shape(), device)?, y.dtype())?))
        })
        .collect::<Result<_>>()?;
    let any = !seeds.is_empty();
    if any {
        tape.backward_from(&seeds)?;
    }
    let gradients = inputs
        .iter()
        .zip(&case.inputs)
        .zip(&params)
        .map(|((t, i), param)| {
            match (i.differentiable && any, param.as_ref().map_or_else(|| tape.grad(t), |p| p.grad().ok().cloned())) {
                (false, _) => Ok(None),
                (true, Some(g)) => g.to_f32_vec().map(Some),
                (true, None) => Ok(Some(vec![0.0; t.elements()])),
            }
        })
        .collect::<Result<_>>()?;
    Ok(Outcome { outputs: outputs.iter().map(Tensor::to_f32_vec).collect::<Result<_>>()?, gradients })
}

/// Largest difference, relative to the largest value of the reference. NaN and infinity never pass.
pub fn error(got: &[f32], want: impl IntoIterator<Item = f64>) -> f64 {
    let want: Vec<f64> = want.into_iter().collect();
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-6, |m: f64, w| m.max(w.abs()));
    let difference = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs());
    difference.fold(0.0, |m: f64, d| if d.is_finite() { m.max(d) } else { f64::INFINITY }) / largest
}

/// Norm of the difference over the norm of the reference. NaN never passes.
pub fn norm_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(want).map(|(g, w)| square(f64::from(*g) - f64::from(*w))).sum();
    let norm: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
    let e = (difference / norm.max(1e-12)).sqrt();
    if e.is_finite() { e } else { f64::INFINITY }
}

/// Elements of an input whose derivative is taken, of a case that has so many elements in all: larger inputs are sampled, and those of large
/// cases, where a plain loop takes long, less.
fn sampled(elements: usize) -> usize {
    ((1 << 18) / elements.max(1)).clamp(4, 40)
}

/// Forward against the loop, backward against central differences of the loop. Returns what is wrong.
pub fn check(case: &Case, device: &Device, tolerance: f64) -> std::result::Result<(), String> {
    let got = run(case, DType::F32, device).map_err(|e| e.to_string())?;
    let base: Vec<Array> = case.inputs.iter().map(|i| i.array.clone()).collect();
    let want = (case.naive)(&base, &base);
    if got.outputs.len() != want.len() {
        return Err(format!("{} outputs instead of {}", got.outputs.len(), want.len()));
    }
    for (i, (g, w)) in got.outputs.iter().zip(&want).enumerate() {
        if g.len() != w.data.len() {
            return Err(format!("output {i} has {} elements instead of {}", g.len(), w.data.len()));
        }
        let e = error(g, w.data.iter().copied());
        if e > tolerance {
            return Err(format!("output {i} is off by {e:.2e}"));
        }
    }
    let seeds: Vec<Vec<f64>> = want.iter().enumerate().map(|(i, y)| weights(i, y.data.len())).collect();
    let objective = |inputs: &[Array]| -> f64 {
        let outputs = (case.naive)(inputs, &base);
        outputs.iter().zip(&seeds).map(|(y, seed)| seed.iter().zip(&y.data).map(|(w, y)| w * y).sum::<f64>()).sum()
    };
    let samples = sampled(base.iter().chain(&want).map(|a| a.data.len()).sum());
    let mut point = base.clone();
    let mut rng = Rng(7);
    for (i, gradient) in got.gradients.iter().enumerate() {
        let Some(gradient) = gradient else { continue };
        let n = gradient.len();
        let elements: Vec<usize> = if n <= samples { (0..n).collect() } else { (0..samples).map(|_| rng.below(n)).collect() };
        let h = 1e-5;
        let mut slope = |e: usize| {
            let mut at = |x: f64| {
                point[i].data[e] = base[i].data[e] + x;
                objective(&point)
            };
            let slope = (at(h) - at(-h)) / (2.0 * h);
            point[i].data[e] = base[i].data[e];
            slope
        };
        let largest = gradient.iter().fold(1e-4f64, |m, g| m.max(f64::from(g.abs())));
        for e in elements {
            let (g, w) = (f64::from(gradient[e]), slope(e));
            let off = (g - w).abs();
            if off.is_nan() || off > tolerance * largest.max(w.abs()) {
                return Err(format!("gradient of input {i} at {e} is {g:.6e}, differences give {w:.6e}"));
            }
        }
    }
    Ok(())
}

/// A device against the CPU in f32, on the same inputs. Returns what is wrong.
pub fn compare(case: &Case, dtype: DType, device: &Device, tolerance: f64) -> std::result::Result<(), String> {
    let got = run(case, dtype, device).map_err(|e| e.to_string())?;
    let want = run(case, DType::F32, &Device::cpu()).map_err(|e| format!("on the CPU: {e}"))?;
    for (i, (g, w)) in got.outputs.iter().zip(&want.outputs).enumerate() {
        let e = norm_error(g, w);
        if e > tolerance {
            return Err(format!("output {i} differs by {e:.2e}"));
        }
    }
    for (i, (g, w)) in got.gradients.iter().zip(&want.gradients).enumerate() {
        if let (Some(g), Some(w)) = (g, w) {
            let e = norm_error(g, w);
            if e > tolerance {
                return Err(format!("gradient of input {i} differs by {e:.2e}"));
            }
        }
    }
    Ok(())
}
