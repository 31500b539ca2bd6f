//! Fresh parameters, drawn in the order in which they are asked for: equal seeds give equal models.

use std::sync::Arc;

use armt_engine::{Param, Tensor};

use crate::compute::Compute;
use crate::error::Result;
use crate::random::Random;

/// How a fresh parameter is filled.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform within this bound on either side of zero.
    Uniform(f64),
    /// One value everywhere.
    Value(f32),
}

/// Makes parameters.
pub struct Maker {
    random: Option<Random>,
    compute: Arc<Compute>,
}

impl Maker {
    /// Parameters drawn from `seed`; without one all are zero, to be set.
    pub fn new(seed: Option<u64>, compute: &Arc<Compute>) -> Self {
        Maker { random: seed.map(Random::new), compute: compute.clone() }
    }

    /// Where the parameters are, and what they compute in.
    pub fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    /// A parameter.
    pub fn param(&mut self, name: &str, shape: &[usize], fill: Fill) -> Result<Param> {
        let n: usize = shape.iter().product();
        let data: Vec<f32> = match (&mut self.random, fill) {
            (None, _) => vec![0.0; n],
            (Some(random), Fill::Normal(deviation)) => random.many(n, 2, |r| (deviation * r.normal()) as f32),
            (Some(random), Fill::Uniform(bound)) => random.many(n, 1, |r| (bound * (2.0 * r.uniform() - 1.0)) as f32),
            (Some(_), Fill::Value(value)) => vec![value; n],
        };
        Ok(Param::new(name, &Tensor::from_slice(&data, shape, self.compute.device())?, self.compute.dtype())?)
    }
}
