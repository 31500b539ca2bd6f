//! A recurrence of one's own, whole: `decay`. No attention; each layer has a state that fades and takes in what comes, token by token.
//!
//! ```text
//! h_t = a h_(t-1) + W x_t;   y_t = x_t + gelu(h_t)
//! ```

use std::ops::Range;
use std::sync::Arc;

use armt::compute::Compute;
use armt::engine::ops::{self, Linear};
use armt::engine::{Param, Tape, Tensor};
use armt::recurrence::{Inputs, OpenSegment, Recurrent, Sizes, StepContext, TokenByToken};
use armt::state::{Begins, Count, Extent, LayerState, PartLayout, State, StateLayout};
use armt::weights::{Entry, EntryList, Fill, Layout, Maker};
use armt::{Config, Error, Result};
use serde_json::Value;

/// The line of the registry: `armt::recurrence::register(decay::MODEL_TYPE, decay::build)`.
pub const MODEL_TYPE: &str = "decay";

/// How much of a state is left after a token.
const LEFT: f32 = 0.9;

struct Decay {
    embed: Param,  // [V, d]
    weight: Param, // W [L, d, d]
    sizes: Sizes,
    compute: Arc<Compute>,
}

/// From `{"model_type": "decay", "vocab_size": .., "layers": .., "width": ..}`.
pub fn build(config: &Config, make: &mut Maker) -> Result<Box<dyn Recurrent>> {
    let size = |key: &str| {
        let value = config.backbone.get(key).and_then(Value::as_u64).filter(|n| *n > 0);
        value.map(|n| n as usize).ok_or_else(|| Error::config(key, "a positive integer", "something else"))
    };
    let sizes = Sizes { layers: size("layers")?, width: size("width")?, vocab: config.vocab()? };
    let embed = make.param("embed", &[sizes.vocab, sizes.width], Fill::Normal(0.3))?;
    let weight = make.param("weight", &[sizes.layers, sizes.width, sizes.width], Fill::Normal(0.3))?;
    Ok(Box::new(Decay { embed, weight, sizes, compute: make.compute().clone() }))
}

impl Recurrent for Decay {
    fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn layout(&self) -> StateLayout {
        let shape = vec![Extent::Size(self.sizes.layers), Extent::Texts, Extent::Size(1), Extent::Size(self.sizes.width)];
        StateLayout { kind: MODEL_TYPE, parts: vec![PartLayout::f32("h", shape)], begins: Begins::Zero }
    }

    fn embed(&self, tape: &Tape, inputs: &Inputs, segments: Range<usize>, _: &[Tensor]) -> Result<Tensor> {
        Ok(ops::embedding(&tape.param(&self.embed), &inputs.ids(segments)?)?)
    }

    fn begin(&self, _: &Tape, state: &State, layers: Range<usize>, _: Option<usize>) -> Result<LayerState> {
        let tensors = state.tensors().map(|(_, t)| ops::rows(t, layers.clone())).collect::<armt::engine::Result<_>>()?;
        Ok(LayerState { fresh: vec![vec![state.is_empty(); state.texts()]; layers.len()], layers, tensors, waiting: None })
    }

    fn step(
        &self,
        context: StepContext<'_>,
        layers: Range<usize>,
        x: &Tensor,
        mut state: LayerState,
    ) -> Result<(Tensor, LayerState)> {
        let rows = state.rows(&layers);
        let drive = ops::linear(x, &context.tape.param_rows(&self.weight, layers)?, Linear::default())?; // [n, B, T, d]
        let mut h = ops::rows(&state.tensors[0], rows.clone())?; // [n, B, 1, d]
        let mut all = Vec::new();
        for t in 0..x.dims()[2] {
            let next = ops::add(&ops::scale(&h, LEFT)?, &ops::narrow(&drive, 2, t, 1)?)?;
            // Padding leaves the state as it is.
            h = match context.padding {
                None => next,
                Some(padding) => {
                    let seen: Vec<i32> = ops::narrow(&padding.mask, 2, t, 1)?.to_vec()?;
                    let seen: Vec<f32> = seen.iter().map(|s| *s as f32).collect();
                    let seen = Tensor::from_slice(&seen, [x.dims()[0], x.dims()[1], 1, 1], self.compute.device())?;
                    ops::add(&h, &ops::mul(&ops::sub(&next, &h)?, &seen)?)?
                }
            };
            all.push(h.clone());
        }
        state.replace(&rows, vec![h])?;
        Ok((ops::add(x, &ops::gelu(&ops::concat(&all.iter().collect::<Vec<_>>(), 2)?)?)?, state))
    }

    fn end(&self, _: &Tape, state: LayerState, counts: Vec<Count>) -> Result<State> {
        self.layout().state(state.tensors, counts)
    }

    fn normed(&self, _: &Tape, h: &Tensor) -> Result<Tensor> {
        Ok(h.clone())
    }

    fn output_table(&self) -> &Param {
        &self.embed
    }

    fn params(&self) -> Vec<&Param> {
        vec![&self.embed, &self.weight]
    }

    fn entries(&self) -> Vec<Entry<'_>> {
        let mut list = EntryList::new(self.sizes.layers);
        list.whole("embed".into(), &self.embed);
        for l in 0..self.sizes.layers {
            list.layer(format!("layers.{l}.weight"), &self.weight, l, vec![self.sizes.width; 2], Layout::Plain);
        }
        list.into_entries()
    }

    fn open<'a>(&'a self, state: &State) -> Result<Box<dyn OpenSegment + 'a>> {
        Ok(Box::new(TokenByToken::new(self, state)?))
    }

    /// The mask of a short segment is read on the host.
    fn has_fixed_steps(&self) -> bool {
        false
    }
}
