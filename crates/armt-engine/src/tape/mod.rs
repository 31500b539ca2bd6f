//! Reverse-mode autodiff.
//!
//! A [`Tape`] is a list. An operation on a tracked tensor appends a record: which nodes went in, which came out, and how to turn the
//! gradients of the latter into gradients of the former. [`Tape::backward`] walks the list from its end, so a graph of any depth needs
//! no recursion, neither to differentiate nor to drop; each record, with what it saved, is freed as soon as it has been played.
//!
//! Gradients of parameters accumulate straight into buffers that the parameters own, in f32 whatever the type of the computation.
//! Taking rows of a stacked parameter `[L, ...]` gives a leaf whose gradient buffer is the same rows of the parameter's: nothing is
//! copied, and the other layers are not touched.
//!
//! The order of accumulation is the reverse of the order of recording, always. A [`Tape::recompute`] region plays its inside in that
//! order too and adds to the gradients that are already there, so that it gives the same bits as the same operations outside one.

mod grads;
mod param;
mod recompute;
mod settled;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use grads::Grads;
pub(crate) use grads::Target;
use grads::{Slot, SlotKind};
pub use param::Param;

use crate::error::{Error, Result};
use crate::ops::{self, Linear};
use crate::tensor::Tensor;

/// How an operation sends gradients back. Implementors hold what the forward pass saved: always detached tensors.
pub trait Backward: Send {
    /// Consumes what was saved, takes the outputs' gradients from `grads` and gives the inputs theirs.
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()>;

    /// Called instead, where no gradient flowed to any output. Only an operation that overwrote an input has something to do here: to put
    /// it back for the records before it.
    fn skipped(self: Box<Self>) -> Result<()> {
        Ok(())
    }

    /// Whether it may add to the gradients of parameters that are not among its inputs.
    fn adds_elsewhere(&self) -> bool {
        false
    }
}

/// A tensor's place on a tape.
#[derive(Clone)]
pub struct Node {
    tape: Tape,
    id: usize,
}

struct Record {
    op: Box<dyn Backward>,
    inputs: Vec<Option<usize>>,
    outputs: Vec<usize>,
}

#[derive(Default)]
struct Inner {
    records: Vec<Record>,
    slots: Vec<Slot>,
    /// Nodes below this one were there when the tape was last played.
    played: usize,
}

struct Shared {
    recording: AtomicBool,
    /// An operation had operands of this tape and of another.
    mixed: AtomicBool,
    inner: Mutex<Inner>,
}

/// A recording of operations. Cheap to clone; clones are the same tape.
#[derive(Clone)]
pub struct Tape(Arc<Shared>);

impl Default for Tape {
    fn default() -> Self {
        Self::new()
    }
}

impl Tape {
    /// An empty tape that records.
    pub fn new() -> Self {
        Tape(Arc::new(Shared { recording: AtomicBool::new(true), mixed: AtomicBool::new(false), inner: Mutex::default() }))
    }

    /// A tape that records nothing: models written for training run on it without keeping anything.
    pub fn off() -> Self {
        let tape = Self::new();
        tape.0.recording.store(false, Ordering::Relaxed);
        tape
    }

    /// Whether operations on this tape's tensors are being recorded.
    pub fn is_recording(&self) -> bool {
        self.0.recording.load(Ordering::Relaxed)
    }

    /// Runs `f` without recording: tensors made inside are untracked.
    pub fn no_grad<R>(&self, f: impl FnOnce() -> R) -> R {
        let before = self.0.recording.swap(false, Ordering::Relaxed);
        let result = f();
        self.0.recording.store(before, Ordering::Relaxed);
        result
    }

    /// Number of records. What a forward pass keeps grows with it.
    pub fn len(&self) -> usize {
        self.lock().records.len()
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn same(&self, other: &Tape) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn add_node(&self, mut tensor: Tensor, kind: SlotKind) -> Tensor {
        let mut inner = self.lock();
        inner.slots.push(Slot::of(&tensor, kind));
        tensor.node = Some(Node { tape: self.clone(), id: inner.slots.len() - 1 });
        tensor
    }

    /// A tracked copy of `tensor` whose gradient can be asked for with [`Tape::grad`] afterwards.
    pub fn variable(&self, tensor: &Tensor) -> Tensor {
        if !self.is_recording() || !tensor.dtype().is_float() {
            return tensor.detach();
        }
        self.add_node(tensor.detach(), SlotKind::Variable)
    }

    /// A parameter's value for the computation, its gradient going to the parameter's buffer. That of a frozen one is not tracked.
    pub fn param(&self, param: &Param) -> Tensor {
        match param.grad() {
            Ok(grad) if self.is_recording() => self.add_node(param.compute(), SlotKind::Leaf(grad.clone())),
            _ => param.compute(),
        }
    }

    /// Rows `range` of the leading axis of a parameter, as [`Tape::param`].
    pub fn param_rows(&self, param: &Param, range: std::ops::Range<usize>) -> Result<Tensor> {
        ops::rows(&self.param(param), range)
    }

    /// A linear layer whose matrices are rows `range` of the leading axis of a parameter, in whatever type it is kept: [`ops::linear`](crate::ops::linear).
    pub fn linear_rows(&self, x: &Tensor, weight: &Param, range: std::ops::Range<usize>, with: Linear<'_>) -> Result<Tensor> {
        let scales = weight.scales().map(|scales| ops::rows(scales, range.clone())).transpose()?;
        ops::linear(x, &self.param_rows(weight, range)?, Linear { scales: scales.as_ref(), ..with })
    }

    /// The gradient that [`Tape::backward`] left at a [`Tape::variable`]; `None` if nothing flowed to it.
    pub fn grad(&self, variable: &Tensor) -> Option<Tensor> {
        let node = variable.node.as_ref().filter(|n| n.tape.same(self))?;
        self.lock().slots[node.id].gradient().cloned()
    }

    /// Counts on the way back as if something were added to the loss whose gradient with respect to `tensor` is `gradient`. Nothing happens for a
    /// tensor that this tape does not track; one that it had when it was played is refused.
    pub fn seed(&self, tensor: &Tensor, gradient: &Tensor) -> Result<()> {
        expect_gradient("seed", tensor, gradient)?;
        let Some(node) = tensor.node.as_ref().filter(|n| n.tape.same(self)) else { return Ok(()) };
        let mut inner = self.lock();
        expect_unplayed(node.id, inner.played)?;
        inner.slots[node.id].add(gradient.detach())
    }

    /// Plays the tape backwards from a scalar, with gradient 1. The records are consumed.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.backward_telling(loss, &[], &mut |_| Ok(()))
    }

    /// Plays the tape backwards from a scalar as [`Tape::backward`] does, and calls `settled` with the number of each group of gradients (of
    /// parameters, or of rows of some) as soon as nothing more will be added to it and to the groups before it. So groups are told in their order,
    /// each once, whatever the tape holds; those that nothing is added to are settled from the start.
    pub fn backward_telling(
        &self,
        loss: &Tensor,
        groups: &[Vec<Tensor>],
        settled: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        if loss.elements() != 1 {
            return Err(Error::shape("backward", "the loss", "one element", loss.shape()));
        }
        let one = crate::ops::cast(&Tensor::full(1.0, loss.shape(), loss.device())?, loss.dtype())?;
        self.play_from(&[(loss, one)], groups, settled)
    }

    /// Plays the tape backwards from tensors with given gradients. The records are consumed.
    pub fn backward_from(&self, seeds: &[(&Tensor, Tensor)]) -> Result<()> {
        self.play_from(seeds, &[], &mut |_| Ok(()))
    }

    fn play_from(
        &self,
        seeds: &[(&Tensor, Tensor)],
        groups: &[Vec<Tensor>],
        settled: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        if self.0.mixed.load(Ordering::Relaxed) {
            return Err(Error::Tape("an operation had operands of this tape and of another".into()));
        }
        let mut inner = self.lock();
        let mut slots = std::mem::take(&mut inner.slots);
        let records = std::mem::take(&mut inner.records);
        let played = std::mem::replace(&mut inner.played, slots.len());
        drop(inner);
        let mut to_settle = settled::ToSettle::new(&records, &slots, groups);
        let result = seeds
            .iter()
            .try_for_each(|(tensor, grad)| {
                let Some(node) = tensor.node.as_ref().filter(|n| n.tape.same(self)) else {
                    return Err(Error::Tape(format!("backward from {tensor:?}, which this tape does not track")));
                };
                expect_gradient("backward", tensor, grad)?;
                expect_unplayed(node.id, played)?;
                slots[node.id].add(grad.detach())
            })
            .and_then(|()| play_telling(records, &mut slots, &mut |left| to_settle.tell(left, settled)));
        self.lock().slots = slots;
        result
    }
}

/// Refuses a gradient that is not of its tensor's shape, type and device, which kernels take it to be.
fn expect_gradient(op: &'static str, tensor: &Tensor, gradient: &Tensor) -> Result<()> {
    gradient.expect_shape(op, "the gradient", tensor.shape())?;
    gradient.expect_dtype(op, "the gradient", tensor.dtype())?;
    gradient.expect_device_of(op, "the gradient", tensor)
}

/// Refuses a node whose records are gone: nothing would flow from it.
fn expect_unplayed(node: usize, played: usize) -> Result<()> {
    if node < played { Err(Error::Tape("this tape was played already".into())) } else { Ok(()) }
}

/// Plays records from the last to the first.
fn play(records: Vec<Record>, slots: &mut [Slot]) -> Result<()> {
    play_telling(records, slots, &mut |_| Ok(()))
}

/// Plays records from the last to the first; `left` hears how many are still to be played, before the first and after each.
fn play_telling(mut records: Vec<Record>, slots: &mut [Slot], left: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
    left(records.len())?;
    while let Some(record) = records.pop() {
        if record.outputs.iter().any(|&o| slots[o].gradient().is_some()) {
            record.op.backward(&mut Grads::new(slots, &record.inputs, &record.outputs))?;
        } else {
            record.op.skipped()?;
        }
        for &o in &record.outputs {
            slots[o].clear();
        }
        left(records.len())?;
    }
    Ok(())
}

/// The tape that an operation on these inputs belongs to; `None` if there is nothing to record.
fn tape_of<'a>(inputs: &[&'a Tensor]) -> Option<&'a Tape> {
    let tape = inputs.iter().find_map(|t| t.node.as_ref().map(|n| &n.tape))?;
    // Said when the tape is played: an operation on tensors of two tapes would send gradients to strangers.
    if inputs.iter().any(|t| t.node.as_ref().is_some_and(|n| !n.tape.same(tape))) {
        tape.0.mixed.store(true, Ordering::Relaxed);
    }
    tape.is_recording().then_some(tape)
}

/// Whether an operation on these inputs will be recorded, and so must save what its backward pass needs.
pub(crate) fn is_recorded(inputs: &[&Tensor]) -> bool {
    tape_of(inputs).is_some()
}

/// Ends an operation with several outputs: tracks them if any input is tracked.
pub(crate) fn record_all<const N: usize, B: Backward + 'static>(
    inputs: &[&Tensor],
    mut outputs: [Tensor; N],
    backward: impl FnOnce() -> B,
) -> [Tensor; N] {
    record_each(inputs, &mut outputs, backward);
    outputs
}

/// Ends an operation with as many outputs as there are: tracks them if any input is tracked.
pub(crate) fn record_each<B: Backward + 'static>(inputs: &[&Tensor], outputs: &mut [Tensor], backward: impl FnOnce() -> B) {
    let Some(tape) = tape_of(inputs) else { return };
    outputs.iter_mut().for_each(|t| *t = tape.add_node(t.detach(), SlotKind::Interior));
    let ids = |t: &Tensor| t.node.as_ref().map(|n| n.id);
    let record = Record {
        op: Box::new(backward()),
        inputs: inputs.iter().map(|t| ids(t)).collect(),
        outputs: outputs.iter().filter_map(ids).collect(),
    };
    tape.lock().records.push(record);
}

/// Ends an operation with one output: tracks it if any input is tracked.
pub(crate) fn record<B: Backward + 'static>(inputs: &[&Tensor], output: Tensor, backward: impl FnOnce() -> B) -> Tensor {
    let [output] = record_all(inputs, [output], backward);
    output
}

/// If `tensor` is a parameter's leaf, tracks `view` (rows `range` of it) as a leaf of its own.
pub(crate) fn leaf_rows(tensor: &Tensor, view: &Tensor, range: std::ops::Range<usize>) -> Option<Tensor> {
    let tape = tape_of(&[tensor])?;
    let id = tensor.node.as_ref()?.id;
    let grad = match &tape.lock().slots[id].kind {
        SlotKind::Leaf(grad) => grad.view_rows(range),
        _ => return None,
    };
    Some(tape.add_node(view.detach(), SlotKind::Leaf(grad)))
}
