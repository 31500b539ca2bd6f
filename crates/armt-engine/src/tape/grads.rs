//! Gradients on their way back: one slot a node.

use crate::error::Result;
use crate::ops;
use crate::tensor::{DType, Device, Shape, Tensor};

/// What a node is, which decides where its gradient goes.
pub(super) enum SlotKind {
    /// Made by a record; the gradient is consumed when that record is played.
    Interior,
    /// Asked for by name; the gradient stays.
    Variable,
    /// A parameter, or rows of one: gradients are added to this f32 buffer.
    Leaf(Tensor),
}

pub(super) struct Slot {
    pub(super) kind: SlotKind,
    gradient: Option<Tensor>,
    shape: Shape,
    dtype: DType,
    device: Device,
}

impl Slot {
    pub(super) fn of(tensor: &Tensor, kind: SlotKind) -> Self {
        Slot { kind, gradient: None, shape: tensor.shape(), dtype: tensor.dtype(), device: tensor.device().clone() }
    }

    pub(super) fn gradient(&self) -> Option<&Tensor> {
        self.gradient.as_ref()
    }

    pub(super) fn take(&mut self) -> Option<Tensor> {
        self.gradient.take()
    }

    pub(super) fn put(&mut self, gradient: Option<Tensor>) {
        self.gradient = gradient;
    }

    pub(super) fn clear(&mut self) {
        if matches!(self.kind, SlotKind::Interior) {
            self.gradient = None;
        }
    }

    /// Adds a gradient to what is there.
    pub(super) fn add(&mut self, gradient: Tensor) -> Result<()> {
        debug_assert_eq!(gradient.shape(), self.shape);
        if let SlotKind::Leaf(buffer) = &self.kind {
            return ops::accumulate(buffer, &gradient);
        }
        self.gradient = Some(match self.gradient.take() {
            None => gradient,
            Some(sum) if sum.is_unique() => {
                ops::accumulate(&sum, &gradient)?;
                sum
            }
            // The sum is shared, for instance with the other branch of a residual connection: leave that one alone.
            Some(sum) => ops::sum_of(&sum, &gradient)?,
        });
        Ok(())
    }

    /// A buffer for a kernel that adds by itself.
    fn target(&mut self) -> Result<Target> {
        if let SlotKind::Leaf(buffer) = &self.kind {
            return Ok(Target { tensor: buffer.clone(), accumulate: true });
        }
        let (tensor, accumulate) = match self.gradient.take() {
            Some(sum) if sum.is_unique() => (sum, true),
            Some(sum) => (ops::copy_of(&sum)?, true),
            None => (Tensor::uninit(self.shape, self.dtype, &self.device)?, false),
        };
        self.gradient = Some(tensor.clone());
        Ok(Target { tensor, accumulate })
    }
}

/// A buffer that a kernel adds a gradient to. It is f32 for parameters and of the node's type otherwise.
pub(crate) struct Target {
    /// The buffer.
    pub(crate) tensor: Tensor,
    /// Whether it holds something already; if not, the kernel must write every element.
    pub(crate) accumulate: bool,
}

/// The gradients that one record sees: its outputs' coming in, its inputs' going out.
pub struct Grads<'a> {
    slots: &'a mut [Slot],
    inputs: &'a [Option<usize>],
    outputs: &'a [usize],
}

impl<'a> Grads<'a> {
    pub(super) fn new(slots: &'a mut [Slot], inputs: &'a [Option<usize>], outputs: &'a [usize]) -> Self {
        Grads { slots, inputs, outputs }
    }

    /// The gradient of output `i`; zeros if nothing flowed to it.
    pub fn output(&mut self, i: usize) -> Result<Tensor> {
        let slot = &mut self.slots[self.outputs[i]];
        match slot.take() {
            Some(gradient) => Ok(gradient),
            None => Tensor::zeros(slot.shape, slot.dtype, &slot.device),
        }
    }

    /// The gradient of output `i`, zeros if nothing flowed to it, in a buffer that nothing else uses: for an operation that turns it into an input's gradient in place.
    pub fn output_owned(&mut self, i: usize) -> Result<Tensor> {
        let gradient = self.output(i)?;
        if gradient.is_unique() { Ok(gradient) } else { ops::copy_of(&gradient) }
    }

    /// Whether input `i` is tracked.
    pub fn wants(&self, i: usize) -> bool {
        self.inputs[i].is_some()
    }

    /// Adds `gradient` to input `i`. Does nothing if it is not tracked.
    pub fn give(&mut self, i: usize, gradient: Tensor) -> Result<()> {
        match self.inputs[i] {
            Some(id) => self.slots[id].add(gradient),
            None => Ok(()),
        }
    }

    /// A buffer to add input `i`'s gradient to, or `None` if it is not tracked.
    pub(crate) fn target(&mut self, i: usize) -> Result<Option<Target>> {
        match self.inputs[i] {
            Some(id) => self.slots[id].target().map(Some),
            None => Ok(None),
        }
    }

    /// The node of input `i`.
    pub(super) fn input_id(&self, i: usize) -> Option<usize> {
        self.inputs[i]
    }

    /// The gradient buffer of input `i`, to be added to, if it is a parameter.
    pub(crate) fn input_leaf(&self, i: usize) -> Option<Tensor> {
        match &self.slots[self.inputs[i]?].kind {
            SlotKind::Leaf(buffer) => Some(buffer.clone()),
            _ => None,
        }
    }

    /// The raw slot of input `i`, for regions that continue its sum.
    pub(super) fn input_slot(&mut self, i: usize) -> Option<&mut Slot> {
        self.inputs[i].map(|id| &mut self.slots[id])
    }
}
