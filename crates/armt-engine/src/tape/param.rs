//! Parameters: an f32 master value, its gradient, and where the computation is in bf16 a shadow that follows the master.

use std::sync::Arc;

use crate::error::Result;
use crate::ops;
use crate::tensor::{DType, Tensor};

struct Inner {
    name: String,
    value: Tensor,
    grad: Tensor,
    shadow: Option<Tensor>,
}

/// A trainable tensor. Cheap to clone; clones are the same parameter.
#[derive(Clone)]
pub struct Param(Arc<Inner>);

impl Param {
    /// A parameter with a zero gradient. `value` must be f32. `compute` is the type it takes part in operations with: f32, or bf16
    /// for a shadow that [`Param::refresh`] and the optimizer keep up to date.
    pub fn new(name: impl Into<String>, value: &Tensor, compute: DType) -> Result<Self> {
        value.expect_dtype("Param::new", "the value", DType::F32)?;
        let shadow = match compute {
            DType::F32 => None,
            other => Some(ops::cast(&value.detach(), other)?),
        };
        Ok(Param(Arc::new(Inner {
            name: name.into(),
            value: ops::copy_of(&value.detach())?,
            grad: Tensor::zeros(value.shape(), DType::F32, value.device())?,
            shadow,
        })))
    }

    /// Its name, unique within a model.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The f32 master.
    pub fn value(&self) -> &Tensor {
        &self.0.value
    }

    /// The f32 gradient that backward passes add to.
    pub fn grad(&self) -> &Tensor {
        &self.0.grad
    }

    /// The bf16 shadow, where there is one.
    pub fn shadow(&self) -> Option<&Tensor> {
        self.0.shadow.as_ref()
    }

    /// The value that takes part in operations, untracked. [`Tape::param`](crate::Tape::param) gives it tracked.
    pub fn compute(&self) -> Tensor {
        self.0.shadow.as_ref().unwrap_or(&self.0.value).clone()
    }

    /// Sets the gradient to zero.
    pub fn zero_grad(&self) -> Result<()> {
        self.0.grad.fill_zero()
    }

    /// Overwrites the value and its shadow.
    pub fn set(&self, value: &Tensor) -> Result<()> {
        self.0.value.copy_from(value)?;
        self.refresh()
    }

    /// Brings the shadow up to date after the master was written.
    pub fn refresh(&self) -> Result<()> {
        match &self.0.shadow {
            Some(shadow) => ops::cast_into(&self.0.value, shadow),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Param({} {})", self.name(), self.value().shape())
    }
}
