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

/// Recordings that are kept. One text has few shapes; of many texts powers of two run, with something in their memories or nothing.
const MOST_RECORDED: usize = 16;
/// Each recording has copies of the memories of its texts: all together have at most as many as so many of the largest.
const MOST_LARGEST: usize = 8;

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
                self.make_room(shape)?;
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
    fn make_room(&mut self, new: GroupShape) -> Result<()> {
        let recorded = self.shapes.iter().filter_map(|(shape, recorded)| Some((*shape, recorded.as_ref()?.used)));
        let old = to_forget(recorded.collect(), new);
        if !old.is_empty() {
            // They may still be played.
            self.model.device().synchronize()?;
            old.iter().for_each(|shape| drop(self.shapes.remove(shape)));
        }
        Ok(())
    }

    fn pass(&self, inputs: &Inputs, state: &State) -> Result<State> {
        let tape = Tape::off();
        let pass = Pass { stop: self.stop.as_deref(), ..Pass::forward(&tape, inputs) };
        self.schedule.run(self.model.recurrence(), pass, state, &mut |_, _| Ok(()))
    }
}

/// Which recordings make room for a new one, those first that were not played for longest. Each is given with when it was.
fn to_forget(mut recorded: Vec<(GroupShape, u64)>, new: GroupShape) -> Vec<GroupShape> {
    recorded.sort_by_key(|(_, used)| *used);
    let (most, mut texts) = (recorded.iter().map(|(shape, _)| shape.0).max().unwrap_or(0).max(new.0) * MOST_LARGEST, new.0);
    let mut kept = 1;
    let keep = |((n, ..), _): &&(GroupShape, u64)| {
        (texts, kept) = (texts + n, kept + 1);
        texts <= most && kept <= MOST_RECORDED
    };
    let newest = recorded.iter().rev().take_while(keep).count();
    recorded[..recorded.len() - newest].iter().map(|(shape, _)| *shape).collect()
}

/// Segments of which nothing is wanted but what the state keeps of them.
fn inputs(model: &Model, segments: &[Segment], state: &State) -> Result<Inputs> {
    Ok(model.inputs(segments, state.texts())?.wanting(|_| false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_powers_of_two_stay_recorded_and_many_large_ones_do_not() {
        let of = |texts: &[usize]| -> Vec<(GroupShape, u64)> {
            texts.iter().enumerate().map(|(used, n)| ((*n, 16 + used, false), used as u64)).collect()
        };
        assert_eq!(to_forget(of(&[64, 32, 16, 8, 4, 2, 1, 64, 32, 16, 8, 4, 2]), (1, 16, true)), []);
        assert_eq!(to_forget(of(&[64; 7]), (64, 8, false)), []);
        assert_eq!(to_forget(of(&[64; 8]), (64, 8, false)), [(64, 16, false)]);
        assert_eq!(to_forget(of(&[1, 1, 64, 64]), (64, 8, false)), []);
        assert_eq!(to_forget(of(&[1; 16]), (1, 8, false)).len(), 8 + 1);
    }
}
