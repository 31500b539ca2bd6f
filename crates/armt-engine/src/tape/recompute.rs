//! Recompute regions (gradient checkpointing): keep a region's inputs, run it again when its gradients are asked for.

use super::grads::SlotKind;
use super::{Backward, Grads, Node, Record, Tape, play, tape_of};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

type Region = dyn Fn(&Tape, &[Tensor]) -> Result<Vec<Tensor>> + Send;

struct Recompute {
    region: Box<Region>,
    inputs: Vec<Tensor>,
}

impl Tape {
    /// Runs `region` on `inputs`, keeping only the inputs; the backward pass runs it again and differentiates it then.
    ///
    /// The region takes parameters from the tape it is given, tracked tensors only through `inputs` (another is refused), and must compute the
    /// same thing both times. Gradients are the same to the bit as without the region.
    pub fn recompute<F>(&self, inputs: &[&Tensor], region: F) -> Result<Vec<Tensor>>
    where
        F: Fn(&Tape, &[Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
    {
        let saved: Vec<Tensor> = inputs.iter().map(|t| t.detach()).collect();
        let records = self.len();
        let outputs = region(&Tape::off(), &saved)?;
        if self.len() != records {
            return Err(Error::Tape("a recompute region used a tracked tensor that is not among its inputs".into()));
        }
        if !self.is_recording() {
            return Ok(outputs);
        }
        if tape_of(inputs).is_some_and(|t| !t.same(self)) {
            return Err(Error::Tape("a recompute region's inputs belong to another tape".into()));
        }
        // Parameters inside may want gradients even if no input does, so the outputs are always tracked.
        let outputs: Vec<Tensor> = outputs.iter().map(|t| self.add_node(t.detach(), SlotKind::Interior)).collect();
        let id = |t: &Tensor| t.node.as_ref().map(|n| n.id);
        let record = Record {
            inputs: inputs.iter().map(|t| id(t)).collect(),
            outputs: outputs.iter().filter_map(id).collect(),
            op: Box::new(Recompute { region: Box::new(region), inputs: saved }),
        };
        self.lock().records.push(record);
        Ok(outputs)
    }
}

impl Backward for Recompute {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let tape = Tape::new();
        // One inner node for each outer node, however often it was passed.
        let mut inputs: Vec<Tensor> = Vec::with_capacity(self.inputs.len());
        for (i, saved) in self.inputs.iter().enumerate() {
            let tracked = match (grads.input_id(i), (0..i).find(|&j| grads.input_id(j) == grads.input_id(i))) {
                (None, _) => saved.detach(),
                (Some(_), Some(earlier)) => inputs[earlier].clone(),
                (Some(_), None) => match grads.input_leaf(i) {
                    Some(buffer) => tape.add_node(saved.detach(), SlotKind::Leaf(buffer)),
                    None => tape.variable(saved),
                },
            };
            inputs.push(tracked);
        }
        let outputs = (self.region)(&tape, &inputs)?;
        let (mut slots, records) = {
            let mut inner = tape.lock();
            (std::mem::take(&mut inner.slots), std::mem::take(&mut inner.records))
        };
        // Continue the sums that other users of the inputs have begun, so that the order of addition is that of a plain tape.
        for (i, input) in inputs.iter().enumerate() {
            if let (Some(outer), Some(Node { id, .. })) = (grads.input_slot(i), &input.node)
                && let Some(sum) = outer.take()
            {
                slots[*id].put(Some(sum));
            }
        }
        for (i, output) in outputs.iter().enumerate() {
            if let Some(Node { id, .. }) = &output.node {
                let gradient = grads.output(i)?;
                slots[*id].add(gradient)?;
            }
        }
        play(records, &mut slots)?;
        for (i, input) in inputs.iter().enumerate() {
            if let (Some(outer), Some(Node { id, .. })) = (grads.input_slot(i), &input.node)
                && let Some(sum) = slots[*id].take()
            {
                outer.put(Some(sum));
            }
        }
        Ok(())
    }

    /// The region takes its parameters when it is run again.
    fn adds_elsewhere(&self) -> bool {
        true
    }
}
