//! Groups of segments through the model, nothing kept but the memory.
//!
//! On CUDA a group of a shape that comes a second time is recorded as a graph, and from then on replayed: only its tokens and the memory
//! before it are copied to where the graph expects them. A replay gives the bits of a direct run.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use armt_engine::{Graph, Tape, Workspace};

use crate::error::{Error, Result};
use crate::model::Model;
use crate::recurrence::Inputs;
use crate::schedule::{Pass, Schedule};
use crate::segment::Segment;
use crate::state::State;

/// Recordings that are kept. One text has few shapes; of many texts powers of two run, each recording with copies of their memory.
const MOST_RECORDED: usize = 8;

/// Runs groups of one model.
pub(super) struct Groups {
    model: Model,
    schedule: &'static dyn Schedule,
    /// `None`: came once.
    shapes: HashMap<GroupShape, Option<Recorded>>,
    /// Groups so far.
    runs: u64,
    /// Ends a group that is under way, where it is not recorded.
    pub(super) stop: Option<Arc<AtomicBool>>,
    // Dropped after the graphs that live in it.
    workspace: Workspace,
}

/// What two groups must have in common for one recording to serve both: texts, segments, and whether the memory before is empty.
type GroupShape = (usize, usize, bool);

struct Recorded {
    /// The last group that it was played for.
    used: u64,
    graph: Graph,
    inputs: Inputs,
    before: State,
    after: State,
}

impl Groups {
    pub(super) fn new(model: Model, schedule: &'static dyn Schedule) -> Self {
        let workspace = Workspace::new(model.device());
        Groups { model, schedule, shapes: HashMap::new(), runs: 0, stop: None, workspace }
    }

    /// The memory after `segments`. On CUDA the work may still be under way.
    pub(super) fn run(&mut self, segments: &[Segment], state: &State) -> Result<State> {
        let model = &self.model.clone();
        // A short segment comes once, at a text's end.
        let whole = segments.iter().all(|s| s.mask.is_none());
        if !(model.device().is_cuda() && whole && model.recurrence().has_fixed_steps()) {
            return self.pass(&inputs(model, segments, state)?, state);
        }
        let shape = (state.texts(), segments.len(), state.is_empty());
        self.runs += 1;
        let mut recorded = match self.shapes.remove(&shape) {
            None => {
                let inputs = inputs(model, segments, state)?;
                let after = self.workspace.run(|| self.pass(&inputs, state).map_err(Error::into_engine))?;
                self.shapes.insert(shape, None);
                return after.copied();
            }
            Some(None) => {
                self.forget_oldest()?;
                let (inputs, before) = (inputs(model, segments, state)?, state.copied()?);
                let (graph, after) = self.workspace.record(|| self.pass(&inputs, &before).map_err(Error::into_engine))?;
                Recorded { used: self.runs, graph, inputs, before, after }
            }
            Some(Some(recorded)) => {
                recorded.inputs.fill(segments)?;
                recorded.before.overwrite(state)?;
                recorded
            }
        };
        recorded.used = self.runs;
        recorded.graph.replay()?;
        let after = recorded.after.copied()?;
        let counts = state.counts_after(recorded.inputs.tokens(), segments.len() as u64);
        self.shapes.insert(shape, Some(recorded));
        Ok(after.with_counts(counts))
    }

    /// Makes room for a recording.
    fn forget_oldest(&mut self) -> Result<()> {
        let recorded = || self.shapes.iter().filter_map(|(shape, recorded)| Some((*shape, recorded.as_ref()?.used)));
        if recorded().count() >= MOST_RECORDED
            && let Some((oldest, _)) = recorded().min_by_key(|(_, used)| *used)
        {
            // It may still be played.
            self.model.device().synchronize()?;
            self.shapes.remove(&oldest);
        }
        Ok(())
    }

    fn pass(&self, inputs: &Inputs, state: &State) -> Result<State> {
        let tape = Tape::off();
        let pass = Pass { stop: self.stop.as_deref(), ..Pass::forward(&tape, inputs) };
        self.schedule.run(self.model.recurrence(), pass, state, &mut |_, _| Ok(()))
    }
}

/// Segments of which nothing is wanted but what the state keeps of them.
fn inputs(model: &Model, segments: &[Segment], state: &State) -> Result<Inputs> {
    Ok(model.inputs(segments, state.texts())?.wanting(|_| false))
}
