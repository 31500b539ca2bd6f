//! Groups of segments through the model, nothing kept but the memory.
//!
//! On CUDA a group of a shape that comes a second time is recorded as a graph, and from then on replayed: only its tokens and the memory
//! before it are copied to where the graph expects them. A replay gives the bits of a direct run.

use std::collections::HashMap;

use armt_engine::{Graph, Tape, Workspace};

use crate::error::{Error, Result};
use crate::memory::MemoryState;
use crate::model::{Inputs, Model};
use crate::schedule::{Backprop, Schedule};
use crate::segment::Segment;

/// Runs groups of one model.
pub(super) struct Groups<'m> {
    model: &'m Model,
    schedule: &'static dyn Schedule,
    /// `None`: came once.
    shapes: HashMap<Shape, Option<Recorded>>,
    // Dropped after the graphs that live in it.
    workspace: Workspace,
}

/// What two groups must have in common for one recording to serve both: texts, segments, and whether the memory before is empty.
type Shape = (usize, usize, bool);

struct Recorded {
    graph: Graph,
    inputs: Inputs,
    before: MemoryState,
    after: MemoryState,
}

impl<'m> Groups<'m> {
    pub(super) fn new(model: &'m Model, schedule: &'static dyn Schedule) -> Self {
        Groups { model, schedule, shapes: HashMap::new(), workspace: Workspace::new(model.device()) }
    }

    /// The memory after `segments`. On CUDA the work may still be under way.
    pub(super) fn run(&mut self, segments: &[Segment], state: &MemoryState) -> Result<MemoryState> {
        let model = self.model;
        // A short segment comes once, at a text's end.
        let whole = segments.iter().all(|s| s.mask.is_none());
        if !(model.device().is_cuda() && whole && model.has_fixed_steps()) {
            return self.pass(&inputs(model, segments, state)?, state);
        }
        let shape = (state.batch, segments.len(), state.is_empty());
        let recorded = match self.shapes.remove(&shape) {
            None => {
                let inputs = inputs(model, segments, state)?;
                let after = self.workspace.run(|| self.pass(&inputs, state).map_err(Error::into_engine))?;
                self.shapes.insert(shape, None);
                return after.copied();
            }
            Some(None) => {
                let (inputs, before) = (inputs(model, segments, state)?, state.copied()?);
                let (graph, after) = self.workspace.record(|| self.pass(&inputs, &before).map_err(Error::into_engine))?;
                Recorded { graph, inputs, before, after }
            }
            Some(Some(recorded)) => {
                recorded.inputs.fill(model, segments)?;
                recorded.before.overwrite(state)?;
                recorded
            }
        };
        recorded.graph.replay()?;
        let after = recorded.after.copied()?;
        let tokens_read = state.tokens_read + recorded.inputs.tokens();
        self.shapes.insert(shape, Some(recorded));
        Ok(MemoryState { tokens_read, segments_read: state.segments_read + segments.len() as u64, ..after })
    }

    fn pass(&self, inputs: &Inputs, state: &MemoryState) -> Result<MemoryState> {
        self.schedule.run(self.model, &Tape::off(), inputs, state, Backprop::default(), &mut |_, _| Ok(()))
    }
}

/// Segments of which nothing is wanted but what the memory keeps of them.
fn inputs(model: &Model, segments: &[Segment], state: &MemoryState) -> Result<Inputs> {
    Ok(Inputs::new(model, segments, state.batch)?.asking(|_| false))
}
