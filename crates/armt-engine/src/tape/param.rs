//! Parameters: frozen ones, which a model in use has, and trainable ones with what training needs.
//!
//! ```text
//!                 compute f32                       compute bf16
//! frozen          value, 4 bytes an element         value in bf16, 2
//! trainable       f32 value, gradient: 8            f32 master, f32 gradient, bf16 shadow: 10
//! ```
//!
//! A frozen one of a linear layer may be int8, one byte an element, with scales for its columns.

use std::sync::Arc;

use half::bf16;

use crate::cpu::int8;
use crate::error::{Error, Result};
use crate::ops;
use crate::tensor::{DType, Device, Tensor};

struct Inner {
    name: String,
    /// The f32 master of a trainable parameter, or what a frozen one takes part in operations with.
    value: Tensor,
    /// Of a matrix in int8.
    scales: Option<Tensor>,
    training: Option<Training>,
}

/// What a parameter has beside its value in order to be trained.
struct Training {
    grad: Tensor,
    shadow: Option<Tensor>,
}

/// A named tensor of a model. Cheap to clone; clones are the same parameter.
#[derive(Clone)]
pub struct Param(Arc<Inner>);

impl Param {
    /// A trainable parameter with a zero gradient. `value` must be f32. `compute` is the type it takes part in operations with: f32, or
    /// bf16 for a shadow that [`Param::refresh`] and the optimizer keep up to date.
    pub fn new(name: impl Into<String>, value: &Tensor, compute: DType) -> Result<Self> {
        const OP: &str = "Param::new";
        value.expect_dtype(OP, "the value", DType::F32)?;
        expect_compute(OP, compute)?;
        let shadow = match compute {
            DType::F32 => None,
            other => Some(ops::cast(&value.detach(), other)?),
        };
        let grad = Tensor::zeros(value.shape(), DType::F32, value.device())?;
        let value = ops::copy_of(&value.detach())?;
        Ok(Param(Arc::new(Inner { name: name.into(), value, scales: None, training: Some(Training { grad, shadow }) })))
    }

    /// A parameter that is not trained: its value in the type that it takes part in operations with, f32 or bf16, and nothing else. A value
    /// that has that type already is shared and not copied ([`Tensor::from_f32_slice`] makes one from floats on the host).
    pub fn frozen(name: impl Into<String>, value: &Tensor, compute: DType) -> Result<Self> {
        const OP: &str = "Param::frozen";
        value.expect_float(OP, "the value")?;
        expect_compute(OP, compute)?;
        let value = ops::cast(&value.detach(), compute)?;
        Ok(Param(Arc::new(Inner { name: name.into(), value, scales: None, training: None })))
    }

    /// Stacked matrices `[L, in, out]` of linear layers in int8, zero until [`Param::set_values`] rounds some: a byte an element, packed, and two numbers a
    /// column. It takes part in [`Tape::linear_rows`](crate::Tape::linear_rows) on the CPU and in nothing else. `None` for a shape that cannot be packed: `in`
    /// must be a multiple of 4 and `out` of 16.
    pub fn int8(name: impl Into<String>, shape: &[usize]) -> Result<Option<Self>> {
        let [layers, k, n] = *shape else { return Ok(None) };
        if !k.is_multiple_of(int8::LANE) || !n.is_multiple_of(int8::BLOCK) {
            return Ok(None);
        }
        let value = Tensor::zeros(shape, DType::I8, &Device::cpu())?;
        let scales = Some(Tensor::zeros([layers, 2, n], DType::F32, &Device::cpu())?);
        Ok(Some(Param(Arc::new(Inner { name: name.into(), value, scales, training: None }))))
    }

    /// A trainable parameter of its own with this one's name and value. From a bf16 value the master is that value exactly.
    pub fn to_trainable(&self, compute: DType) -> Result<Self> {
        Param::new(self.name(), &ops::cast(&self.0.value, DType::F32)?, compute)
    }

    /// A frozen parameter of its own with this one's name and value.
    pub fn to_frozen(&self, compute: DType) -> Result<Self> {
        let value = ops::cast(&self.0.value, compute)?;
        // A master goes on changing.
        let value = if self.is_trainable() && compute == DType::F32 { ops::copy_of(&value)? } else { value };
        Param::frozen(self.name(), &value, compute)
    }

    /// Its name, unique within a model.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether it can be trained.
    pub fn is_trainable(&self) -> bool {
        self.0.training.is_some()
    }

    /// The value as it is kept: the f32 master of a trainable parameter, or what a frozen one takes part in operations with, which may be
    /// bf16 ([`Tensor::to_f32_vec`] takes either to the host).
    pub fn value(&self) -> &Tensor {
        &self.0.value
    }

    /// The f32 gradient that backward passes add to. An [`Error::Frozen`] where there is none.
    pub fn grad(&self) -> Result<&Tensor> {
        let training = self.0.training.as_ref();
        training.map(|t| &t.grad).ok_or_else(|| Error::Frozen { name: self.0.name.clone() })
    }

    /// The bf16 shadow of a trainable parameter, where there is one.
    pub fn shadow(&self) -> Option<&Tensor> {
        self.0.training.as_ref()?.shadow.as_ref()
    }

    /// The value that takes part in operations, untracked. [`Tape::param`](crate::Tape::param) gives it tracked.
    pub fn compute(&self) -> Tensor {
        self.shadow().unwrap_or(&self.0.value).clone()
    }

    /// Of a matrix in int8 the scales of its columns and what their sums begin at, `[L, 2, out]`.
    pub fn scales(&self) -> Option<&Tensor> {
        self.0.scales.as_ref()
    }

    /// Sets the gradient to zero, where there is one.
    pub fn zero_grad(&self) -> Result<()> {
        self.0.training.as_ref().map_or(Ok(()), |t| t.grad.fill_zero())
    }

    /// Overwrites the value, and the shadow where there is one, with a value of the same shape in f32 or bf16.
    pub fn set(&self, value: &Tensor) -> Result<()> {
        const OP: &str = "Param::set";
        value.expect_shape(OP, "the value", self.0.value.shape())?;
        value.expect_float(OP, "the value")?;
        self.0.value.copy_from(&ops::cast(&value.detach(), self.0.value.dtype())?)?;
        self.refresh()
    }

    /// Overwrites the value, and the shadow where there is one, with numbers of the host, rounded to the value's type, in place.
    pub fn set_values(&self, values: &[f32]) -> Result<()> {
        const OP: &str = "Param::set_values";
        let value = &self.0.value;
        if values.len() != value.elements() {
            return Err(Error::shape(OP, "the value", format!("{} elements", values.len()), value.shape()));
        }
        match &self.0.scales {
            Some(scales) => {
                let (mut packed, mut scales) = (value.write::<i8>(OP)?, scales.write::<f32>(OP)?);
                let (matrix, n) = (value.shape().inner(0), value.shape().last());
                for ((w, packed), scales) in values.chunks(matrix).zip(packed.chunks_mut(matrix)).zip(scales.chunks_mut(2 * n)) {
                    int8::pack(w, n, packed, scales);
                }
            }
            None if value.dtype() == DType::BF16 => {
                value.overwrite(&values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())?
            }
            None => value.overwrite(values)?,
        }
        self.refresh()
    }

    /// Brings the shadow up to date after the master was written.
    pub fn refresh(&self) -> Result<()> {
        match self.shadow() {
            Some(shadow) => ops::cast_into(&self.0.value, shadow),
            None => Ok(()),
        }
    }
}

fn expect_compute(op: &'static str, compute: DType) -> Result<()> {
    if compute.is_float() {
        Ok(())
    } else {
        Err(Error::DType { op, what: "the type to compute with", expected: "f32 or bf16".into(), got: compute })
    }
}

impl std::fmt::Debug for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let frozen = if self.is_trainable() { "" } else { ", frozen" };
        write!(f, "Param({} {}{frozen})", self.name(), self.value().shape())
    }
}
