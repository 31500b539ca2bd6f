//! A transformer with a memory: a backbone, a memory, and the learned memory tokens that stand around a segment.

use std::ops::Range;
use std::sync::Arc;

use armt_engine::{Param, Tape, Tensor, ops};

use super::{Inputs, OpenSegment, Recurrent, Sizes, StepContext};
use crate::backbone::architecture::Positions;
use crate::backbone::families::{FAMILIES, Family};
use crate::backbone::{Around, Attend, Backbone, Blocks, Cache, Embedding, Head};
use crate::backprop::Backprop;
use crate::compute::Compute;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::memory::{Memory, Step};
use crate::random::Random;
use crate::state::{Count, LayerState, State, StateLayout};
use crate::weights::{Entry, EntryList, FileTensor, Fill, Maker, Tensors};

/// Whether a `model_type` is a transformer's.
pub(super) fn knows(model_type: &str) -> bool {
    FAMILIES.iter().any(|f| f.model_type == model_type)
}

/// Backbone and memory of a configuration. Parameters are drawn in a fixed order: tokens, positions, memory tokens, blocks, the memory's
/// own, head.
pub(super) fn build(config: &Config, make: &mut Maker) -> Result<Box<dyn Recurrent>> {
    let family = Family::of(&config.backbone)?;
    let architecture = Arc::new(config.architecture()?);
    let around = config.memory.around();
    let a = architecture.as_ref();
    let embedding = Embedding::new(make, a, around)?;
    // The authors take memory tokens from the embedding's spread.
    let rows = around.before.max(around.after);
    let tokens =
        (rows > 0).then(|| make.memory(|make| make.param("memory", &[rows, a.width], Fill::Normal(a.init)))).transpose()?;
    let blocks = Arc::new(Blocks::new(make, &architecture, config.segment_size + around.total())?);
    let memory = make.memory(|make| config.memory.build(make, a, config.segment_size))?;
    let head = Head::new(make, a)?;
    let compute = make.compute().clone();
    let backbone = Backbone { architecture, embedding, blocks, head };
    Ok(Box::new(Transformer { backbone, memory, tokens, around, family, wrapping: config.memory.wrapping(), compute }))
}

/// A transformer with a memory.
pub struct Transformer {
    backbone: Backbone,
    memory: Box<dyn Memory>,
    /// Learned memory tokens `[m, d]`: the first of them stand before a segment, the first of them after it.
    tokens: Option<Param>,
    around: Around,
    family: &'static Family,
    /// What names in files begin with, and what stands between a layer and its parts.
    wrapping: (&'static str, &'static str),
    compute: Arc<Compute>,
}

impl Transformer {
    /// The learned memory tokens for `texts` texts, `[texts, m, d]`; `None` if there are none.
    fn learned_tokens(&self, tape: &Tape, texts: usize) -> Result<Option<Tensor>> {
        let Some(learned) = &self.tokens else { return Ok(None) };
        let m = learned.value().dims()[0];
        let ids: Vec<i32> = (0..texts * m).map(|i| (i % m) as i32).collect();
        Ok(Some(ops::embedding(&tape.param(learned), &self.compute.constant(&ids, &[texts, m])?)?))
    }

    /// The memory tokens of one segment, `[B, m, d]`: those that came through the top, or the learned ones.
    fn segment_tokens(&self, tape: &Tape, texts: usize, carried: &[Tensor]) -> Result<Option<Tensor>> {
        if carried.is_empty() { self.learned_tokens(tape, texts) } else { Ok(Some(self.memory.tokens_from_top(tape, carried)?)) }
    }

    /// The name that Hugging Face has for a tensor of the backbone.
    fn plain_name(&self, name: &str) -> String {
        let (cell, inside) = self.wrapping;
        let name = name.strip_prefix(cell).unwrap_or(name);
        if inside.is_empty() { name.to_string() } else { name.replacen(&format!(".{inside}"), ".", 1) }
    }

    fn memory_step<'a>(&'a self, context: StepContext<'a>, layers: Range<usize>) -> Step<'a> {
        let StepContext { tape, padding, backprop, segments, background } = context;
        Step { tape, layers, padding, backprop, segments, background, blocks: &self.backbone.blocks }
    }

    /// A layer's state in buffers that it may share with `state`.
    fn look_into(&self, tape: &Tape, state: &State, layers: Range<usize>, room: Option<usize>) -> Result<LayerState> {
        let fresh = vec![state.counts().iter().map(|c| c.segments == 0).collect(); layers.len()];
        let tensors = self.memory.begin(tape, state, layers.clone(), room)?;
        Ok(LayerState { layers, tensors, fresh, waiting: None })
    }
}

impl Recurrent for Transformer {
    fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    fn sizes(&self) -> Sizes {
        let a = &self.backbone.architecture;
        Sizes { layers: a.layers, width: a.width, vocab: a.vocab }
    }

    fn layout(&self) -> StateLayout {
        self.memory.layout()
    }

    fn around(&self) -> Around {
        self.around
    }

    fn longest_segment(&self) -> usize {
        let learned = matches!(self.backbone.architecture.positions, Positions::Learned(_));
        let before = if learned && self.around.wrapped { 0 } else { self.around.before };
        self.backbone.blocks.longest_segment() - before
    }

    /// Memory tokens around the text's, positions added: `[n, B, before + width + after, d]`.
    fn embed(&self, tape: &Tape, inputs: &Inputs, segments: Range<usize>, carried: &[Tensor]) -> Result<Tensor> {
        let (n, texts, embedding) = (segments.len(), inputs.texts(), &self.backbone.embedding);
        let text = embedding.embed(tape, &inputs.ids(segments.clone())?)?; // [n, B, width, d]
        let tokens = if n == 1 { self.segment_tokens(tape, texts, carried)? } else { self.learned_tokens(tape, n * texts)? };
        let x = match tokens {
            None => text,
            Some(m) => {
                let m = ops::reshape(&m, [n, texts, m.dims()[1], m.dims()[2]])?;
                let (before, after) = (ops::narrow(&m, 2, 0, self.around.before)?, ops::narrow(&m, 2, 0, self.around.after)?);
                if self.around.before > 0 { ops::concat(&[&before, &text, &after], 2)? } else { ops::concat(&[&text, &after], 2)? }
            }
        };
        let place = &inputs.places()[segments.start];
        embedding.add_positions(tape, &x, &embedding.segment_positions(place.range.len(), place.pad))
    }

    fn begin(&self, tape: &Tape, state: &State, layers: Range<usize>, room: Option<usize>) -> Result<LayerState> {
        let mut begun = self.look_into(tape, state, layers, room)?;
        begun.tensors = self.memory.own(begun.tensors)?;
        Ok(begun)
    }

    fn step(&self, context: StepContext<'_>, layers: Range<usize>, x: &Tensor, state: LayerState) -> Result<(Tensor, LayerState)> {
        self.memory.step(&self.memory_step(context, layers), x, state)
    }

    fn step_unheard(
        &self,
        context: StepContext<'_>,
        layers: Range<usize>,
        x: &Tensor,
        state: LayerState,
    ) -> Result<(Option<Tensor>, LayerState)> {
        self.memory.step_unheard(&self.memory_step(context, layers), x, state)
    }

    fn settle(&self, state: LayerState) -> Result<LayerState> {
        self.memory.settle(state)
    }

    fn cut(&self, state: LayerState, layers: &Range<usize>) -> Result<LayerState> {
        self.memory.cut(state, layers)
    }

    fn end(&self, tape: &Tape, state: LayerState, counts: Vec<Count>) -> Result<State> {
        let tensors = self.memory.end(tape, self.memory.settle(state)?.tensors)?;
        self.layout().state(tensors, counts)
    }

    fn carries_through_top(&self) -> bool {
        self.memory.through_top()
    }

    fn to_top(&self, tape: &Tape, h: &Tensor, carried: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.memory.to_top(tape, &self.backbone, h, carried)
    }

    fn normed(&self, tape: &Tape, h: &Tensor) -> Result<Tensor> {
        self.backbone.head.normed(tape, &self.backbone.architecture, h)
    }

    fn output_table(&self) -> &Param {
        self.backbone.output_table()
    }

    fn params(&self) -> Vec<&Param> {
        let Backbone { embedding, blocks, head, .. } = &self.backbone;
        let mut all: Vec<&Param> = embedding.params().chain(&self.tokens).collect();
        all.extend(blocks.params());
        all.extend(self.memory.params());
        all.extend(head.params());
        all
    }

    fn entries(&self) -> Vec<Entry<'_>> {
        let (cell, inside) = self.wrapping;
        let mut list = EntryList::new(self.sizes().layers);
        if let Some(tokens) = &self.tokens {
            list.memory(|list| list.whole("memory_cell.memory".into(), tokens));
        }
        list.memory(|list| self.memory.entries(list));
        self.family.embedding_entries(&mut list, cell, &self.backbone);
        for l in 0..self.sizes().layers {
            let layer = format!("{cell}{}", self.family.layer_prefix(l));
            list.memory(|list| self.memory.layer_entries(list, &layer, l));
            self.family.layer_entries(&mut list, &format!("{layer}{inside}"), &self.backbone, l);
        }
        self.family.head_entries(&mut list, cell, &self.backbone);
        list.alias(|name| plain_names(name, cell));
        list.into_entries()
    }

    fn open<'a>(&'a self, state: &State) -> Result<Box<dyn OpenSegment + 'a>> {
        let tape = Tape::off();
        let layer = |l| {
            let memory = self.look_into(&tape, state, l..l + 1, None)?;
            let cache = self.memory.cache(&self.backbone.blocks, &memory)?;
            Ok((memory, cache))
        };
        let carried = if self.carries_through_top() { state.tensors().map(|(_, t)| t.clone()).collect() } else { Vec::new() };
        let layers = (0..self.sizes().layers).map(layer).collect::<Result<_>>()?;
        Ok(Box::new(Open { transformer: self, layers, carried, texts: state.texts() }))
    }

    fn adopted(&self, tensors: &Tensors, seed: u64, each: &mut dyn FnMut(&Entry<'_>, Vec<f32>) -> Result<()>) -> Result<()> {
        let mut random = Random::new(seed ^ 0x6d65_6d6f_7279);
        let (entries, embedding) = (self.entries(), &self.backbone.embedding);
        let mut spread = 0.0;
        for entry in entries.iter().filter(|e| !e.of_memory) {
            let (name, shape, mut data) = tensors.weight(&entry.names().collect::<Vec<_>>())?;
            let positions = embedding.positions.as_ref().is_some_and(|p| p.name() == entry.param.name());
            if positions && shape != entry.shape {
                data = self.wrap_positions(tensors, &data, &shape, entry.shape.iter().product(), &mut random)?;
            } else {
                entry.expect_shape(tensors.path(), &name, &shape)?;
            }
            if entry.param.name() == embedding.tokens.name() {
                spread = deviation(&data);
            }
            each(entry, data)?;
        }
        for entry in entries.iter().filter(|e| e.of_memory) {
            let learned = self.tokens.as_ref().is_some_and(|tokens| tokens.name() == entry.param.name());
            let mut values = entry.export(&entry.param.value().to_f32_vec()?);
            if learned {
                values.iter_mut().for_each(|x| *x = (spread * random.normal()) as f32);
            }
            each(entry, values)?;
        }
        Ok(())
    }

    fn fits_diagonal(&self, state: &State, width: usize) -> bool {
        self.memory.fits_diagonal(state, width)
    }

    fn has_fixed_steps(&self) -> bool {
        self.memory.has_fixed_steps()
    }

    fn projections(&self) -> Vec<(String, Entry<'_>)> {
        // A matrix of each layer: neither the tables nor the norms are.
        let is_projection = |e: &Entry<'_>| !e.of_memory && e.shape.len() == 2 && e.param.value().dims().len() == 3;
        let projections = self.entries().into_iter().filter(is_projection);
        projections.map(|e| (self.plain_name(e.name.trim_end_matches(".weight")), e)).collect()
    }

    fn plain(&self) -> Option<Vec<FileTensor<'_>>> {
        let Around { before, after, wrapped } = self.around;
        let tensors = self.entries().into_iter().filter(|e| !e.of_memory).map(|entry| {
            let mut tensor = FileTensor::whole(entry);
            tensor.name = self.family.head_name(self.plain_name(&tensor.name));
            if wrapped && self.backbone.embedding.positions.as_ref().is_some_and(|p| p.name() == tensor.entry.param.name()) {
                // Rows of memory tokens lie before the others and after them.
                tensor.rows = Some(before..tensor.entry.shape[0] - after);
            }
            tensor
        });
        Some(tensors.collect())
    }
}

impl Transformer {
    /// A backbone's table of positions with new rows, standard normal, for memory tokens: before it for reads, after it for writes.
    fn wrap_positions(
        &self,
        tensors: &Tensors,
        data: &[f32],
        shape: &[usize],
        elements: usize,
        random: &mut Random,
    ) -> Result<Vec<f32>> {
        let (d, Around { before, wrapped, .. }) = (self.sizes().width, self.around);
        let around = if wrapped { self.around.total() } else { 0 };
        if !wrapped || data.len() + around * d != elements {
            let message = format!("the table of positions should be [{}, {d}], but is {shape:?}", elements / d - around);
            return Err(Error::file(tensors.path(), message));
        }
        let mut values: Vec<f32> = (0..elements).map(|_| random.normal() as f32).collect();
        values[before * d..][..data.len()].copy_from_slice(data);
        Ok(values)
    }
}

/// Names without the memory's wrapping, and without the family's prefix, as Hugging Face writes them.
fn plain_names(name: &str, cell: &str) -> Vec<String> {
    let plain = name.strip_prefix(cell).unwrap_or(name).replacen(".layer.", ".", 1);
    let mut names: Vec<String> = ["", "transformer.", "gpt_neox.", "model."]
        .iter()
        .filter_map(|prefix| plain.strip_prefix(prefix).map(str::to_string))
        .collect();
    if plain == "lm_head.weight" {
        names.extend([format!("{cell}embed_out.weight"), "embed_out.weight".into()]);
    }
    names
}

/// Standard deviation of values.
fn deviation(values: &[f32]) -> f64 {
    let n = values.len().max(2) as f64;
    let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    (values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()
}

/// The layers' memories, which stay as they are, and their caches, which grow.
struct Open<'t> {
    transformer: &'t Transformer,
    layers: Vec<(LayerState, Cache)>,
    /// What came through the top, read at the segment's start.
    carried: Vec<Tensor>,
    texts: usize,
}

impl OpenSegment for Open<'_> {
    fn step(&mut self, ids: &[i32], from: usize) -> Result<Tensor> {
        let (model, tape) = (self.transformer, Tape::off());
        let (before, embedding) = (model.around.before, &model.backbone.embedding);
        let ids = Tensor::from_slice(ids, [self.texts, ids.len() / self.texts], model.compute.device())?;
        let text = embedding.embed(&tape, &ids)?;
        // Memory tokens before the text are read at the segment's start.
        let (x, first) = if from == 0 && before > 0 {
            let memory = model.segment_tokens(&tape, self.texts, &self.carried)?;
            (ops::concat(&memory.iter().chain([&text]).collect::<Vec<_>>(), 1)?, 0)
        } else {
            (text, before + from)
        };
        let (n, d) = (x.dims()[1], x.dims()[2]);
        let positions: Vec<i32> = (first..first + n).map(|p| p as i32).collect();
        let x = embedding.add_positions(&tape, &x, &positions)?;
        let mut h = ops::reshape(&x, [1, self.texts, n, d])?;
        let context = StepContext { tape: &tape, padding: None, backprop: Backprop::default(), segments: 1, background: None };
        for (l, (memory, cache)) in self.layers.iter_mut().enumerate() {
            let step = model.memory_step(context, l..l + 1);
            h = model.memory.look(&step, &h, memory, from)?;
            h = step.blocks.run(&tape, l..l + 1, &h, Attend::Cached(cache))?.0;
        }
        Ok(ops::reshape(&ops::narrow(&h, 2, n - 1, 1)?, [self.texts, d])?)
    }
}
