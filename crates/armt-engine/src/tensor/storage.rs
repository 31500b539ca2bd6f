//! The bytes behind tensors.
//!
//! Host memory is reached through [`Read`] and [`Write`] guards: many readers or one writer, checked at run time, so that a tensor
//! which is passed as input and as output is an error and never a data race. Device memory is only ever touched by work on the
//! device's stream, which orders it.

use std::ops::{Deref, DerefMut};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use super::device::Device;
use super::dtype::Element;
use super::pool::Block;
use crate::error::{Error, Result};

pub(crate) struct Storage {
    block: Block,
    device: Device,
    access: RwLock<()>,
}

impl Storage {
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Self> {
        Ok(Storage { block: device.alloc(bytes)?, device: device.clone(), access: RwLock::new(()) })
    }

    /// Bytes in a buffer for values that may outlive the step they are made in.
    pub(crate) fn lasting(device: &Device, bytes: usize) -> Result<Self> {
        Ok(Storage { block: device.alloc_lasting(bytes)?, device: device.clone(), access: RwLock::new(()) })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> usize {
        self.block.address()
    }

    /// `len` elements from element `offset` of host memory, for reading. The caller has checked that they are inside.
    pub(crate) fn read<T: Element>(&self, op: &'static str, offset: usize, len: usize) -> Result<Read<'_, T>> {
        debug_assert!(!self.device.is_cuda());
        let guard = match self.access.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Error::Aliased { op }),
        };
        // SAFETY: tensors are created inside their storage, which is aligned for every element type; any bits are a valid `T`;
        // the guard keeps writers away for as long as the slice lives.
        let slice = unsafe { std::slice::from_raw_parts((self.address() as *const T).add(offset), len) };
        Ok(Read { slice, _guard: guard })
    }

    /// `len` elements from element `offset` of host memory, for writing. The caller has checked that they are inside.
    pub(crate) fn write<T: Element>(&self, op: &'static str, offset: usize, len: usize) -> Result<Write<'_, T>> {
        debug_assert!(!self.device.is_cuda());
        let guard = match self.access.try_write() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Error::Aliased { op }),
        };
        // SAFETY: as in `read`, and the exclusive guard makes this the only slice into the storage.
        let slice = unsafe { std::slice::from_raw_parts_mut((self.address() as *mut T).add(offset), len) };
        Ok(Write { slice, _guard: guard })
    }
}

/// A tensor's host elements, borrowed for reading.
pub(crate) struct Read<'a, T> {
    slice: &'a [T],
    _guard: RwLockReadGuard<'a, ()>,
}

impl<T> Deref for Read<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.slice
    }
}

/// A tensor's host elements, borrowed for writing.
pub(crate) struct Write<'a, T> {
    slice: &'a mut [T],
    _guard: RwLockWriteGuard<'a, ()>,
}

impl<T> Deref for Write<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.slice
    }
}

impl<T> DerefMut for Write<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.slice
    }
}
