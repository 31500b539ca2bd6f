//! A small training problem with everything a step has.

use armt_engine::ops::{self, Activation, AssocWrite, Linear, WriteRule};
use armt_engine::optim::{AdamW, Clip, Group, Settings};
use armt_engine::{DType, Device, Graph, Param, Result, Tape, Tensor, Workspace};

use super::Rng;

pub struct Problem {
    pub x: Tensor,
    pub params: Vec<Param>,
    pub optimizer: AdamW,
}

fn random(rng: &mut Rng, shape: &[usize], size: f64, device: &Device) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let data: Vec<f32> = (0..n).map(|_| (size * rng.normal()) as f32).collect();
    Tensor::from_slice(&data, shape, device)
}

impl Problem {
    pub fn new(device: &Device, dtype: DType) -> Result<Self> {
        Self::seeded(device, dtype, 5)
    }

    pub fn seeded(device: &Device, dtype: DType, seed: u64) -> Result<Self> {
        let mut rng = Rng(seed);
        let params = [("w1", vec![3, 64, 128], 0.1), ("b1", vec![3, 128], 0.1), ("w2", vec![3, 128, 64], 0.1)]
            .into_iter()
            .map(|(name, shape, size)| Param::new(name, &random(&mut rng, &shape, size, device)?, dtype))
            .collect::<Result<Vec<_>>>()?;
        let x = ops::cast(&random(&mut rng, &[3, 40, 64], 1.0, device)?, dtype)?;
        let group = Group { params: params.clone(), weight_decay: 0.01, rate: 1.0 };
        let optimizer = AdamW::new(vec![group], Settings { clip: Clip::Norm(0.5), ..Settings::default() })?;
        Ok(Problem { x, params, optimizer })
    }

    /// Forward, backward and the capturable half of the update; gives the loss.
    pub fn step(&self, recompute: bool) -> Result<Tensor> {
        self.optimizer.zero_grad()?;
        let tape = Tape::new();
        let mut h = tape.variable(&self.x);
        for _ in 0..3 {
            let params = self.params.clone();
            let layer = move |tape: &Tape, t: &[Tensor]| {
                let bias = tape.param(&params[1]);
                let with = Linear { bias: Some(&bias), activation: Activation::Gelu, ..Linear::default() };
                let u = ops::linear(&t[0], &tape.param(&params[0]), with)?;
                let with = Linear { residual: Some(&t[0]), ..Linear::default() };
                Ok(vec![ops::linear(&u, &tape.param(&params[2]), with)?])
            };
            h = if recompute { tape.recompute(&[&h], layer)?.remove(0) } else { layer(&tape, &[h])?.remove(0) };
        }
        let loss = ops::mean(&ops::mul(&h, &h)?)?;
        tape.backward(&loss)?;
        self.optimizer.apply()?;
        Ok(loss)
    }

    pub fn values(&self) -> Result<Vec<u32>> {
        let mut bits = Vec::new();
        for p in &self.params {
            bits.extend(p.value().to_vec::<f32>()?.iter().map(|x| x.to_bits()));
            bits.extend(p.compute().to_f32_vec()?.iter().map(|x| x.to_bits()));
        }
        Ok(bits)
    }
}

/// Trains for some steps and writes and reads a memory between them, as graphs where the device has them. Gives the bits of all that came out.
pub fn train(device: &Device, seed: u64) -> Result<Vec<u32>> {
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let mut problem = Problem::seeded(device, dtype, seed)?;
    let mut memory = Steps::new(device, seed)?;
    let mut bits = Vec::new();
    problem.optimizer.prepare(0.01)?;
    let workspace = Workspace::new(device);
    let loss = Tensor::zeros([1], DType::F32, device)?;
    let step = |problem: &Problem| loss.copy_from(&problem.step(true)?);
    workspace.run(|| step(&problem))?;
    let graph: Option<Graph> = if device.is_cuda() { Some(workspace.record(|| step(&problem))?.0) } else { None };
    for _ in 0..8 {
        bits.push(loss.item()?.to_bits());
        bits.extend(memory.next()?.iter().map(|x| x.to_bits()));
        problem.optimizer.prepare(0.01)?;
        match &graph {
            Some(graph) => graph.replay()?,
            None => workspace.run(|| step(&problem))?,
        }
    }
    bits.extend(problem.values()?);
    Ok(bits)
}

/// A memory that is written to and read from, one operation after the other.
struct Steps {
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    a: Tensor,
    z: Tensor,
}

impl Steps {
    fn new(device: &Device, seed: u64) -> Result<Self> {
        let mut rng = Rng(100 + seed);
        let mut make = |shape: &[usize], size: f64| random(&mut rng, shape, size, device);
        let (k, v, beta) = (make(&[3, 4, 16], 1.0)?, make(&[3, 4, 32], 1.0)?, make(&[3, 4], 0.1)?);
        let (a, z) = (Tensor::zeros([3, 96, 32], DType::F32, device)?, Tensor::full(0.5, [3, 96], device)?);
        Ok(Steps { k, v, beta, a, z })
    }

    fn next(&mut self) -> Result<Vec<f32>> {
        let Steps { k, v, beta, a, z } = self;
        let w = AssocWrite { k, v, beta, a, z, first: None, correction: true, nu: 3, rule: WriteRule::Projected };
        let (a, z) = ops::assoc_write(w)?;
        let y = ops::assoc_read(k, &a, &z, 3, None)?;
        (self.a, self.z) = (a, z);
        y.to_vec()
    }
}
