//! What a transformer keeps between segments. A kind of memory is a file here, whole (its settings, parameters, state, and what happens
//! before and after a block), and a line of [`KINDS`]; [`register`] adds kinds from outside.
//!
//! ```text
//! associative: x <- x + A^T phi(W_Q x) / (z . phi(W_Q x));  y = block(x);  A, z <- write(last m rows of y)   (equations 1-4)
//! prmt:        first and last m rows of x <- M;             y = block(x);  M <- last m rows of y
//! rmt:         the last layer's last m rows, normed, are the memory tokens around the next segment
//! rmt_r:       as rmt, with what is found among the memory tokens of all segments before it
//! none:        nothing, or a window: y = block(x seeing the previous segment's keys and values, without gradient)
//! ```

mod associative;
mod config;
mod prmt;
mod rmt;
mod rmt_r;
mod window;

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use armt_engine::{Param, Tape, Tensor, ops};
pub use associative::{Associative, Write};
pub use config::{MemoryConfig, Settings};
pub use prmt::Prmt;
pub use rmt::Rmt;
pub use rmt_r::RmtR;
use serde_json::{Map, Value};
pub use window::Window;

use crate::backbone::{Backbone, Blocks, Cache, Padding};
use crate::backprop::Backprop;
use crate::error::{Error, Result};
use crate::state::{LayerState, State, StateLayout};
use crate::weights::EntryList;

/// A kind of memory by its name in `config.json`.
#[derive(Clone, Copy)]
pub struct MemoryKind {
    /// `memory.kind`.
    pub name: &'static str,
    /// Reads the other keys. Unknown ones are an error.
    pub settings: fn(Map<String, Value>) -> Result<Arc<dyn Settings>>,
}

/// The kinds that come with the library.
pub const KINDS: [MemoryKind; 5] = [associative::KIND, rmt::KIND, prmt::KIND, rmt_r::KIND, window::KIND];

static REGISTERED: RwLock<Vec<MemoryKind>> = RwLock::new(Vec::new());

/// Adds a kind of memory to those that configurations may name. A name that is taken is an error.
pub fn register(kind: MemoryKind) -> Result<()> {
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if KINDS.iter().chain(registered.iter()).any(|k| k.name == kind.name) {
        return Err(Error::config("memory.kind", "a name that is not taken", kind.name));
    }
    registered.push(kind);
    Ok(())
}

/// The kind of a name. One that is not known is an error that names those that are.
fn kind(name: &str) -> Result<MemoryKind> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    let mut all = KINDS.iter().chain(registered.iter());
    let found = all.clone().find(|k| k.name == name).copied();
    found.ok_or_else(|| {
        let known: Vec<&str> = all.by_ref().map(|k| k.name).collect();
        Error::config("memory.kind", &format!("one of {}", known.join(", ")), name)
    })
}

/// One step of some layers, as a memory sees it.
pub struct Step<'a> {
    /// Where it is recorded.
    pub tape: &'a Tape,
    /// Which layers run, n of them, each with a segment of its own.
    pub layers: Range<usize>,
    /// The padding of the n segments.
    pub padding: Option<&'a Padding>,
    /// How gradients go back.
    pub backprop: Backprop,
    /// Segments of the whole pass.
    pub segments: usize,
    /// Which of the n segments are background, f32 `[n, B, 1]`, where that is known and matters.
    pub background: Option<&'a Tensor>,
    /// The transformer's blocks.
    pub blocks: &'a Arc<Blocks>,
}

impl Step<'_> {
    /// The blocks of these layers on x `[n, B, T, d]`, within the segment.
    pub fn block(&self, x: &Tensor) -> Result<Tensor> {
        match self.backprop.recompute {
            true => self.blocks.segment_lean(self.tape, &self.layers, x, self.padding),
            false => self.blocks.segment(self.tape, &self.layers, x, self.padding),
        }
    }
}

/// A memory in use: its parameters, and what it does around a block.
pub trait Memory: Send + Sync {
    /// What its states are made of.
    fn layout(&self) -> StateLayout;

    /// Its parameters, in a fixed order, the transformer's memory tokens not counted.
    fn params(&self) -> Vec<&Param> {
        Vec::new()
    }

    /// Lists the tensors of a file that are no layer's.
    fn entries<'a>(&'a self, _list: &mut EntryList<'a>) {}

    /// Lists the tensors of layer l of a file, whose names begin with `prefix`.
    fn layer_entries<'a>(&'a self, _list: &mut EntryList<'a>, _prefix: &str, _l: usize) {}

    /// The tensors of layers `layers` of a state, as steps take them. They may share the state's buffers. `room` is the width of the segments
    /// where layers that have read nothing yet run beside others.
    fn begin(&self, _tape: &Tape, state: &State, layers: Range<usize>, _room: Option<usize>) -> Result<Vec<Tensor>> {
        Ok(state.tensors().map(|(_, t)| ops::rows(t, layers.clone())).collect::<armt_engine::Result<_>>()?)
    }

    /// Gives tensors of [`Memory::begin`] buffers of their own where steps change them in place.
    fn own(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Ok(tensors)
    }

    /// One step: reads the layers' memory, runs their blocks, writes their memory. x is `[n, B, T, d]` of n segments; other layers of
    /// `memory` rest. Gives the layers' outputs and the memory after it.
    fn step(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> Result<(Tensor, LayerState)>;

    /// A step where nobody wants the outputs of the last of the layers. Gives the outputs of those before it, if there are any.
    fn step_unheard(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> Result<(Option<Tensor>, LayerState)> {
        let (y, memory) = self.step(step, x, memory)?;
        let before = y.dims()[0] - 1;
        Ok(((before > 0).then(|| ops::rows(&y, 0..before)).transpose()?, memory))
    }

    /// The memory with nothing waiting to be done.
    fn settle(&self, memory: LayerState) -> Result<LayerState> {
        Ok(memory)
    }

    /// The memory with no gradient going back through layers `layers`.
    fn cut(&self, memory: LayerState, layers: &Range<usize>) -> Result<LayerState> {
        memory.cut(layers)
    }

    /// The tensors of a state from those of all layers after the last step.
    fn end(&self, _tape: &Tape, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Ok(tensors)
    }

    /// Whether something goes from the last layer to the next segment's first, so that segments cannot overlap.
    fn through_top(&self) -> bool {
        false
    }

    /// Whether layers at different segments of this width, some of which have `state`, can be one batch.
    fn fits_diagonal(&self, _state: &State, _width: usize) -> bool {
        true
    }

    /// The memory tokens `[B, m, d]` of a segment from what came through the top, which is not empty: as many as stand before it or after it,
    /// whichever are more.
    fn tokens_from_top(&self, _tape: &Tape, carried: &[Tensor]) -> Result<Tensor> {
        carried.first().cloned().ok_or_else(|| Error::Unsupported("nothing goes through the top of this memory".into()))
    }

    /// What goes through the top after a segment, from the last layer's outputs `[B, T, d]` and what came before.
    fn to_top(&self, _tape: &Tape, _backbone: &Backbone, _h: &Tensor, _carried: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Ok(Vec::new())
    }

    /// Whether a step of a given shape always issues the same work on the device, so that it can be recorded.
    fn has_fixed_steps(&self) -> bool {
        true
    }

    /// In generation: what the layers' memory changes of x before the blocks, without being written. `from` is the place in the segment of
    /// x's first row.
    fn look(&self, _step: &Step<'_>, x: &Tensor, _memory: &LayerState, _from: usize) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// In generation: a layer's keys and values before the segment's first token.
    fn cache(&self, _blocks: &Blocks, _memory: &LayerState) -> Result<Cache> {
        Ok(Cache::default())
    }
}
