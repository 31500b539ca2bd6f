//! Tensors: a shape, an element type, and a contiguous piece of a pooled buffer on one device.
//!
//! A tensor is a value: operations make new ones. Cloning shares the buffer. The few things that write into an existing buffer say
//! so by name ([`Tensor::overwrite`], [`Tensor::copy_from`], gradients accumulating into parameters, the optimizer).
//! Copies between host and device happen only in [`Tensor::from_slice`], [`Tensor::overwrite`], [`Tensor::to_vec`] and
//! [`Tensor::to_device`].

mod device;
mod dtype;
pub(crate) mod pool;
mod shape;
mod storage;

use std::ops::Range;
use std::sync::Arc;

pub use device::Device;
pub use dtype::{DType, Element};
use half::bf16;
pub use pool::PoolStats;
pub use shape::{MAX_RANK, Shape};
pub(crate) use storage::{Read, Storage, Write};

use crate::cpu::elementwise;
use crate::error::{Error, Result};
use crate::tape::Node;

/// An n-dimensional array on one device, contiguous and row-major, possibly tracked by a [`Tape`](crate::Tape).
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    /// First element, counted in elements of `dtype`.
    offset: usize,
    shape: Shape,
    dtype: DType,
    pub(crate) node: Option<Node>,
}

impl Tensor {
    /// A tensor whose elements are whatever the pool's buffer last held. For outputs that a kernel fills completely.
    pub fn uninit(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        let storage = Arc::new(Storage::new(device, shape.elements().saturating_mul(dtype.size()))?);
        Ok(Tensor { storage, offset: 0, shape, dtype, node: None })
    }

    /// A tensor of zeros.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let t = Self::uninit(shape, dtype, device)?;
        t.fill_zero()?;
        Ok(t)
    }

    /// A tensor with a host slice's elements. The slice must hold exactly the shape's number of elements.
    pub fn from_slice<T: Element>(data: &[T], shape: impl Into<Shape>, device: &Device) -> Result<Self> {
        let shape = shape.into();
        let storage = Arc::new(Storage::lasting(device, shape.elements().saturating_mul(T::DTYPE.size()))?);
        let t = Tensor { storage, offset: 0, shape, dtype: T::DTYPE, node: None };
        t.overwrite(data)?;
        Ok(t)
    }

    /// A tensor of f32 or bf16 from floats on the host, which are rounded there: the device never has both.
    pub fn from_f32_slice(data: &[f32], shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        match dtype {
            DType::F32 => Self::from_slice(data, shape, device),
            DType::BF16 => {
                let mut rounded = vec![bf16::ZERO; data.len()];
                elementwise::map(data, &mut rounded, elementwise::round_bf16);
                Self::from_slice(&rounded, shape, device)
            }
            DType::I32 | DType::I8 => {
                let (op, what) = ("from_f32_slice", "the type of the tensor");
                Err(Error::DType { op, what, expected: "f32 or bf16".into(), got: dtype })
            }
        }
    }

    /// An f32 tensor filled with one value.
    pub fn full(value: f32, shape: impl Into<Shape>, device: &Device) -> Result<Self> {
        let t = Self::uninit(shape, DType::F32, device)?;
        match device {
            Device::Cpu => t.write::<f32>("full")?.fill(value),
            Device::Cuda(cuda) => cuda.fill(t.ptr(), value, t.elements())?,
        }
        Ok(t)
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The axes of the shape.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.elements()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.storage.device()
    }

    /// Whether gradients flow back to it.
    pub fn is_tracked(&self) -> bool {
        self.node.is_some()
    }

    /// This tensor cut off from the tape. Shares the buffer.
    pub fn detach(&self) -> Self {
        Tensor { node: None, ..self.clone() }
    }

    /// Whether no other tensor shares the buffer.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.storage) == 1
    }

    /// Copies a host slice over this tensor's elements, in place.
    pub fn overwrite<T: Element>(&self, data: &[T]) -> Result<()> {
        self.expect_dtype("overwrite", "the tensor", T::DTYPE)?;
        if data.len() != self.elements() {
            return Err(Error::shape("overwrite", "the tensor", format!("{} elements", data.len()), self.shape));
        }
        match self.device() {
            Device::Cpu => self.write::<T>("overwrite")?.copy_from_slice(data),
            Device::Cuda(cuda) => cuda.upload(self.ptr(), data)?,
        }
        Ok(())
    }

    /// Copies another tensor's elements over this one's, in place. Same shape, type and device.
    pub fn copy_from(&self, other: &Tensor) -> Result<()> {
        const OP: &str = "copy_from";
        other.expect_shape(OP, "the source", self.shape)?;
        other.expect_dtype(OP, "the source", self.dtype)?;
        self.expect_device_of(OP, "the destination", other)?;
        match self.device() {
            Device::Cpu => match self.dtype {
                DType::F32 => elementwise::map(&other.read::<f32>(OP)?, &mut self.write::<f32>(OP)?, |x| x),
                DType::BF16 => self.write::<bf16>(OP)?.copy_from_slice(&other.read::<bf16>(OP)?),
                DType::I32 => self.write::<i32>(OP)?.copy_from_slice(&other.read::<i32>(OP)?),
                DType::I8 => self.write::<i8>(OP)?.copy_from_slice(&other.read::<i8>(OP)?),
            },
            Device::Cuda(cuda) => cuda.copy(self.ptr(), other.ptr(), self.bytes())?,
        }
        Ok(())
    }

    /// Sets every element to zero, in place.
    pub fn fill_zero(&self) -> Result<()> {
        match self.device() {
            Device::Cpu => match self.dtype {
                DType::F32 => self.write::<f32>("fill_zero")?.fill(0.0),
                DType::BF16 => self.write::<bf16>("fill_zero")?.fill(bf16::ZERO),
                DType::I32 => self.write::<i32>("fill_zero")?.fill(0),
                DType::I8 => self.write::<i8>("fill_zero")?.fill(0),
            },
            Device::Cuda(cuda) => cuda.zero(self.ptr(), self.bytes())?,
        }
        Ok(())
    }

    /// Copies the elements to the host. Waits for the device.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype("to_vec", "the tensor", T::DTYPE)?;
        match self.device() {
            Device::Cpu => Ok(self.read::<T>("to_vec")?.to_vec()),
            Device::Cuda(cuda) => {
                let mut out = vec![T::default(); self.elements()];
                cuda.download(self.ptr(), &mut out)?;
                Ok(out)
            }
        }
    }

    /// Copies float elements to the host as f32, whichever float type they have.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        match self.dtype {
            DType::BF16 => Ok(self.to_vec::<bf16>()?.into_iter().map(bf16::to_f32).collect()),
            _ => self.to_vec::<f32>(),
        }
    }

    /// The value of a one-element f32 tensor.
    pub fn item(&self) -> Result<f32> {
        if self.elements() != 1 {
            return Err(Error::shape("item", "the tensor", "one element", self.shape));
        }
        Ok(self.to_f32_vec()?[0])
    }

    /// This tensor's values on another device, untracked. Shares the buffer if it is there already.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.device() == device {
            return Ok(self.detach());
        }
        match self.dtype {
            DType::F32 => Self::from_slice(&self.to_vec::<f32>()?, self.shape, device),
            DType::BF16 => Self::from_slice(&self.to_vec::<bf16>()?, self.shape, device),
            DType::I32 => Self::from_slice(&self.to_vec::<i32>()?, self.shape, device),
            DType::I8 => Self::from_slice(&self.to_vec::<i8>()?, self.shape, device),
        }
    }

    /// An untracked view with another shape of the same number of elements.
    pub(crate) fn view(&self, shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        // What is read of the buffer depends on it.
        assert_eq!(shape.elements(), self.elements(), "a view of {self:?} as {shape:?}");
        Tensor { shape, node: None, ..self.clone() }
    }

    /// An untracked view of rows `range` of the leading axis.
    pub(crate) fn view_rows(&self, range: Range<usize>) -> Self {
        let inner = self.shape.inner(0);
        debug_assert!(range.start <= range.end && range.end <= self.shape[0]);
        Tensor { offset: self.offset + range.start * inner, shape: self.shape.with(0, range.len()), node: None, ..self.clone() }
    }

    /// This tensor with `rows` more rows in front, of whatever is there, if the buffer has them and no other tensor shares it.
    pub(crate) fn with_front(&self, rows: usize) -> Option<Self> {
        let offset = self.offset.checked_sub(rows * self.shape.inner(0)).filter(|_| self.is_unique())?;
        Some(Tensor { offset, shape: self.shape.with(0, rows + self.shape[0]), node: None, ..self.clone() })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Host elements for reading.
    pub(crate) fn read<T: Element>(&self, op: &'static str) -> Result<Read<'_, T>> {
        self.expect_dtype(op, "an operand", T::DTYPE)?;
        self.storage.read(op, self.offset, self.elements())
    }

    /// Host elements for writing.
    pub(crate) fn write<T: Element>(&self, op: &'static str) -> Result<Write<'_, T>> {
        self.expect_dtype(op, "an output", T::DTYPE)?;
        self.storage.write(op, self.offset, self.elements())
    }

    /// Device address of the first element.
    pub(crate) fn ptr(&self) -> u64 {
        (self.storage.address() + self.offset * self.dtype.size()) as u64
    }

    pub(crate) fn expect_shape(&self, op: &'static str, what: &'static str, expected: impl Into<Shape>) -> Result<()> {
        let expected = expected.into();
        if self.shape == expected { Ok(()) } else { Err(Error::shape(op, what, expected, self.shape)) }
    }

    pub(crate) fn expect_rank(&self, op: &'static str, what: &'static str, rank: usize) -> Result<()> {
        if self.shape.rank() == rank { Ok(()) } else { Err(Error::shape(op, what, format!("{rank} axes"), self.shape)) }
    }

    pub(crate) fn expect_dtype(&self, op: &'static str, what: &'static str, expected: DType) -> Result<()> {
        if self.dtype == expected {
            Ok(())
        } else {
            Err(Error::DType { op, what, expected: expected.to_string(), got: self.dtype })
        }
    }

    pub(crate) fn expect_float(&self, op: &'static str, what: &'static str) -> Result<()> {
        if self.dtype.is_float() { Ok(()) } else { Err(Error::DType { op, what, expected: "f32 or bf16".into(), got: self.dtype }) }
    }

    /// This tensor must be on the device of `first`.
    pub(crate) fn expect_device_of(&self, op: &'static str, what: &'static str, first: &Tensor) -> Result<()> {
        if self.device() == first.device() {
            Ok(())
        } else {
            Err(Error::Device { op, what, expected: first.device().to_string(), got: self.device().to_string() })
        }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tracked = if self.is_tracked() { ", tracked" } else { "" };
        write!(f, "Tensor({} {} on {}{tracked})", self.dtype, self.shape, self.device())
    }
}
