//! Parameters of a new model: drawn in the order in which they are asked for, so that equal seeds give equal models, or zero and to be set.

use std::sync::Arc;

use armt_engine::machine::expect_room;
use armt_engine::{DType, Param, Tensor};

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

/// What a model's parameters are made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be used: values in the type of the computation, zero until they are set, and nothing beside them.
    Use,
    /// To be trained, zero until they are set.
    Train,
    /// To be trained from scratch: drawn from this seed.
    TrainFresh(u64),
    /// The memory's to be trained, and those of the backbone with these names, the others in the type of the computation and nothing beside them; all
    /// zero until they are set.
    TrainMemory(Vec<String>),
    /// To be written to a file beside a backbone's own: the memory's are those of [`Purpose::TrainFresh`], the others are never written or read
    /// and take no memory.
    Wrap(u64),
}

/// Makes parameters.
pub struct Maker {
    random: Option<Random>,
    purpose: Purpose,
    compute: Arc<Compute>,
    /// What is asked for belongs to the memory.
    of_memory: bool,
    /// What is asked for takes part in operations in f32.
    in_f32: bool,
    /// What is asked for are matrices of linear layers.
    of_matrices: bool,
}

impl Maker {
    /// Parameters for a purpose.
    pub fn new(purpose: Purpose, compute: &Arc<Compute>) -> Self {
        let random = match purpose {
            Purpose::TrainFresh(seed) | Purpose::Wrap(seed) => Some(Random::new(seed)),
            _ => None,
        };
        Maker { random, purpose, compute: compute.clone(), of_memory: false, in_f32: false, of_matrices: false }
    }

    /// Where the parameters are, and what they compute in.
    pub fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    /// Parameters that belong to the memory and not to the backbone.
    pub fn memory<T>(&mut self, make: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.of_memory = true;
        let made = make(self);
        self.of_memory = false;
        made
    }

    /// Parameters that take part in operations in f32, whatever the type of the computation.
    pub fn in_f32<T>(&mut self, make: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.in_f32 = true;
        let made = make(self);
        self.in_f32 = false;
        made
    }

    /// Matrices `[L, in, out]` of linear layers, which multiply by `Tape::linear_rows`: in int8 where the model is used so.
    pub fn matrices<T>(&mut self, make: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.of_matrices = true;
        let made = make(self);
        self.of_matrices = false;
        made
    }

    /// A parameter.
    pub fn param(&mut self, name: &str, shape: &[usize], fill: Fill) -> Result<Param> {
        let n = shape.iter().product();
        let draws = match fill {
            Fill::Normal(_) => 2,
            Fill::Uniform(_) => 1,
            Fill::Value(_) => 0,
        };
        let fill = move |random: &mut Random| match fill {
            Fill::Normal(deviation) => random.many(n, 2, |r| (deviation * r.normal()) as f32),
            Fill::Uniform(bound) => random.many(n, 1, |r| (bound * (2.0 * r.uniform() - 1.0)) as f32),
            Fill::Value(value) => vec![value; n],
        };
        self.filled(name, shape, draws, |random| Ok(fill(random)))
    }

    /// A parameter whose elements are made one by one from their index, each of `draws` random numbers.
    pub fn made(&mut self, name: &str, shape: &[usize], draws: u64, f: impl Fn(usize, &mut Random) -> f32) -> Result<Param> {
        let n: usize = shape.iter().product();
        self.filled(name, shape, draws, |random| Ok((0..n).map(|i| f(i, random)).collect()))
    }

    /// A parameter whose elements are drawn all at once, of two random numbers each.
    pub fn drawn(&mut self, name: &str, shape: &[usize], f: impl FnOnce(&mut Random) -> Result<Vec<f32>>) -> Result<Param> {
        self.filled(name, shape, 2, f)
    }

    fn filled(
        &mut self,
        name: &str,
        shape: &[usize],
        draws: u64,
        fill: impl FnOnce(&mut Random) -> Result<Vec<f32>>,
    ) -> Result<Param> {
        expect_room(name, &[shape, &[size_of::<f32>()]].concat())?;
        let (n, device) = (shape.iter().product(), self.compute.device());
        let dtype = if self.in_f32 { DType::F32 } else { self.compute.dtype() };
        let Some(random) = &mut self.random else {
            let frozen = match &self.purpose {
                Purpose::Use => true,
                Purpose::TrainMemory(also) => !self.of_memory && !also.iter().any(|own| own == name),
                _ => false,
            };
            if frozen
                && self.of_matrices
                && self.compute.weights() == DType::I8
                && let Some(param) = Param::int8(name, shape)?
            {
                return Ok(param);
            }
            return Ok(match frozen {
                true => Param::frozen(name, &Tensor::zeros(shape, dtype, device)?, dtype)?,
                false => Param::new(name, &Tensor::zeros(shape, DType::F32, device)?, dtype)?,
            });
        };
        if matches!(self.purpose, Purpose::Wrap(_)) && !self.of_memory {
            random.pass_over(n, draws);
            return Ok(Param::frozen(name, &Tensor::uninit(shape, dtype, device)?, dtype)?);
        }
        Ok(Param::new(name, &Tensor::from_slice(&fill(random)?, shape, device)?, dtype)?)
    }
}
