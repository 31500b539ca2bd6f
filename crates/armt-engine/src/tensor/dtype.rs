//! Element types. f32 and bf16 carry numbers, i32 carries token ids and masks, i8 the matrices of linear layers that only multiply.

use half::bf16;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float: parameters, memory, everything on the CPU.
    F32,
    /// bfloat16: activations and weights in compute on CUDA. On the CPU it is a storage type: operations go through f32.
    BF16,
    /// 32-bit integer: token ids, masks, flags. Never differentiated.
    I32,
    /// 8-bit integer: matrices of linear layers in use on the CPU, packed, with a scale for each column ([`Param::int8`](crate::Param::int8)).
    I8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::BF16 => 2,
            DType::I8 => 1,
        }
    }

    /// Whether gradients can flow through it.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I8 => "int8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for i32 {}
    impl Sealed for i8 {}
}

/// A Rust type that a tensor can hold. Every bit pattern is a valid value, which the storage relies on.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    /// The matching [`DType`].
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for i8 {
    const DTYPE: DType = DType::I8;
}
