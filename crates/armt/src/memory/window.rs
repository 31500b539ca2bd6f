//! No memory: each segment is read on its own, or sees the previous one's keys and values, without gradient.

use std::ops::Range;
use std::sync::Arc;

use armt_engine::{DType, Tape, Tensor, ops};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{keys_of, read};
use super::{Memory, MemoryKind, Settings, Step};
use crate::backbone::{Architecture, Attend, Blocks, Cache, Padding};
use crate::compute::Compute;
use crate::error::Result;
use crate::state::{Begins, Extent, LayerState, PartLayout, PartType, State, StateLayout};
use crate::weights::Maker;

pub(super) const KIND: MemoryKind = MemoryKind { name: "none", settings: read::<Window> };

/// What a transformer without memory sees beyond a segment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Window {
    /// Attend to the previous segment's keys and values, without gradient. Off by default.
    pub sliding_window: bool,
}

impl Settings for Window {
    fn kind(&self) -> &'static str {
        KIND.name
    }

    fn wrapping(&self) -> (&'static str, &'static str) {
        ("", "")
    }

    fn keys(&self) -> Map<String, Value> {
        keys_of(self)
    }

    fn build(&self, make: &mut Maker, a: &Architecture, segment: usize) -> Result<Box<dyn Memory>> {
        if !self.sliding_window {
            return Ok(Box::new(Nothing));
        }
        let packed = (a.heads.query + 2 * a.heads.key) * a.heads.size;
        Ok(Box::new(WindowMemory { layers: a.layers, segment, packed, compute: make.compute().clone() }))
    }
}

/// Keeps nothing.
struct Nothing;

impl Memory for Nothing {
    fn layout(&self) -> StateLayout {
        StateLayout::nothing(KIND.name)
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> Result<(Tensor, LayerState)> {
        Ok((step.block(x)?, memory))
    }
}

/// Keeps the previous segment's packed queries, keys and values before rotation `[L, B, T, ..]`, and which can be seen: `[B, T]` at rest,
/// `[n, B, T]` in steps, where layers are at different segments.
struct WindowMemory {
    layers: usize,
    /// Tokens of a segment.
    segment: usize,
    packed: usize,
    compute: Arc<Compute>,
}

impl Memory for WindowMemory {
    fn layout(&self) -> StateLayout {
        let width = Extent::AtMost(self.segment);
        let keys = vec![Extent::Size(self.layers), Extent::Texts, width, Extent::Size(self.packed)];
        let parts = vec![
            PartLayout { name: "window", shape: keys, dtype: PartType::Computed },
            PartLayout { name: "window_mask", shape: vec![Extent::Texts, width], dtype: PartType::Exactly(DType::I32) },
        ];
        StateLayout { kind: KIND.name, parts, begins: Begins::Absent }
    }

    /// Before the first segment there is none, or one that cannot be seen, so that layers that start run with those that do not.
    fn begin(&self, _: &Tape, state: &State, layers: Range<usize>, room: Option<usize>) -> Result<Vec<Tensor>> {
        let (n, texts, device) = (layers.len(), state.texts(), self.compute.device());
        match (state.get("window").zip(state.get("window_mask")), room) {
            (Some((keys, mask)), _) => {
                let one = ops::reshape(mask, [1, mask.dims()[0], mask.dims()[1]])?;
                Ok(vec![ops::rows(keys, layers)?, ops::concat(&vec![&one; n], 0)?])
            }
            (None, None) => Ok(Vec::new()),
            (None, Some(width)) => Ok(vec![
                Tensor::zeros([n, texts, width, self.packed], self.compute.dtype(), device)?,
                Tensor::zeros([n, texts, width], DType::I32, device)?,
            ]),
        }
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, mut memory: LayerState) -> Result<(Tensor, LayerState)> {
        let (n, texts, t) = (x.dims()[0], x.dims()[1], x.dims()[2]);
        let (rows, layers) = (memory.rows(&step.layers), step.layers.clone());
        let own = match step.padding {
            Some(padding) => padding.clone(),
            None => Padding::none(&self.compute, n, texts, t)?,
        };
        if memory.tensors.is_empty() {
            let (y, qkv) = step.blocks.run(step.tape, layers, x, Attend::Segment(step.padding))?;
            memory.tensors = vec![qkv.detach(), own.mask];
            return Ok((y, memory));
        }
        let (keys, seen) = (ops::rows(&memory.tensors[0], rows.clone())?, ops::rows(&memory.tensors[1], rows.clone())?);
        let (y, qkv) = step.blocks.run(step.tape, layers, x, Attend::Window(&keys, &own.after_window(&seen)?))?;
        memory.replace(&rows, vec![qkv.detach(), own.mask])?;
        Ok((y, memory))
    }

    /// Windows of different widths are no batch.
    fn fits_diagonal(&self, state: &State, width: usize) -> bool {
        state.get("window").is_none_or(|keys| keys.dims()[2] == width)
    }

    /// A window is detached already.
    fn cut(&self, memory: LayerState, _: &Range<usize>) -> Result<LayerState> {
        Ok(memory)
    }

    fn end(&self, _: &Tape, mut tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        if let Some(mask) = tensors.get_mut(1) {
            let (texts, width) = (mask.dims()[1], mask.dims()[2]);
            *mask = ops::reshape(&ops::rows(mask, 0..1)?, [texts, width])?;
        }
        Ok(tensors)
    }

    /// A window's positions are made on the host.
    fn has_fixed_steps(&self) -> bool {
        false
    }

    fn cache(&self, blocks: &Blocks, memory: &LayerState) -> Result<Cache> {
        match memory.tensors.as_slice() {
            [keys, seen] => blocks.window_cache(keys, seen),
            _ => Ok(Cache::default()),
        }
    }
}
