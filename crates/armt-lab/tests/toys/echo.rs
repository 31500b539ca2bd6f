//! A memory kind of one's own, whole: `echo`. Each layer keeps its last output row of a segment, and adds it, by a learned share, to every
//! row of the next one.
//!
//! ```text
//! x <- x + g M;   y = block(x);   M <- last row of y
//! ```

use std::ops::Range;
use std::sync::Arc;

use armt::Result;
use armt::backbone::Architecture;
use armt::backbone::block::last_rows;
use armt::engine::{Param, Tape, Tensor, ops};
use armt::memory::{Memory, MemoryKind, Settings, Step};
use armt::state::{Begins, Extent, LayerState, PartLayout, StateLayout};
use armt::weights::{EntryList, Fill, Layout, Maker};
use serde_json::{Map, Value};

/// The line of the registry: `armt::memory::register(echo::KIND)`.
pub const KIND: MemoryKind = MemoryKind { name: "echo", settings: |_| Ok(Arc::new(Echo)) };

/// It has no numbers of its own.
#[derive(Debug)]
pub struct Echo;

impl Settings for Echo {
    fn kind(&self) -> &'static str {
        KIND.name
    }

    fn keys(&self) -> Map<String, Value> {
        Map::new()
    }

    fn build(&self, make: &mut Maker, a: &Architecture, _: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(EchoMemory { share: make.param("echo.share", &[a.layers, 1, 1, a.width], Fill::Value(0.1))? }))
    }
}

struct EchoMemory {
    share: Param, // g [L, 1, 1, d]
}

impl EchoMemory {
    fn added(&self, tape: &Tape, layers: &Range<usize>, x: &Tensor, memory: &LayerState) -> Result<Tensor> {
        let m = ops::rows(&memory.tensors[0], memory.rows(layers))?; // [n, B, 1, d]
        Ok(ops::add(x, &ops::mul(&m, &tape.param_rows(&self.share, layers.clone())?)?)?)
    }
}

impl Memory for EchoMemory {
    fn layout(&self) -> StateLayout {
        let (layers, width) = (self.share.value().dims()[0], self.share.value().dims()[3]);
        let shape = vec![Extent::Size(layers), Extent::Texts, Extent::Size(1), Extent::Size(width)];
        StateLayout { kind: KIND.name, parts: vec![PartLayout::f32("M", shape)], begins: Begins::Zero }
    }

    fn params(&self) -> Vec<&Param> {
        vec![&self.share]
    }

    fn layer_entries<'a>(&'a self, list: &mut EntryList<'a>, prefix: &str, l: usize) {
        list.layer(format!("{prefix}echo"), &self.share, l, vec![1, 1, self.share.value().dims()[3]], Layout::Plain);
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, mut memory: LayerState) -> Result<(Tensor, LayerState)> {
        let y = step.block(&self.added(step.tape, &step.layers, x, &memory)?)?;
        let rows = memory.rows(&step.layers);
        memory.replace(&rows, vec![last_rows(&y, 1)?])?;
        Ok((y, memory))
    }

    fn look(&self, step: &Step<'_>, x: &Tensor, memory: &LayerState, _: usize) -> Result<Tensor> {
        self.added(step.tape, &step.layers, x, memory)
    }
}
