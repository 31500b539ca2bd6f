//! A model over segments with a state: [`Recurrent`]. Schedules, readers, trainers, generators, files and evaluation see only this.
//!
//! Layer l at segment s takes the outputs of layer l - 1 at s, and what layer l kept of segment s - 1. A recurrence is built from a
//! configuration by the `model_type` of its backbone; a new one is a file here and a line of `KINDS`; [`register`] adds recurrences from
//! outside.
//!
//! ```text
//! transformer   a backbone with a memory
//! mamba         S_t = exp(Delta_t A) o S_(t-1) + Delta_t u_t B_t in every layer
//! rwkv5         S_t = w S_(t-1) + k_t v_t in every head
//! ```

mod inputs;
mod mamba;
mod open;
mod orthogonal;
mod rwkv5;
mod transformer;

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use armt_engine::{Param, Tape, Tensor, ops};
use serde_json::Value;

pub(crate) use inputs::Embedded;
pub use inputs::{BatchShape, DeviceBatch, HostBatch, Inputs, Place, Targets};
pub use open::{OpenSegment, TokenByToken};
pub use transformer::Transformer;

use crate::backbone::families::FAMILIES;
use crate::backbone::{Around, Padding};
use crate::backprop::Backprop;
use crate::compute::Compute;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::memory::Window;
use crate::state::{Count, LayerState, State, StateLayout};
use crate::weights::{Entry, FileTensor, Maker, Purpose, Staged, Tensors};

/// Sizes that every recurrence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Layers.
    pub layers: usize,
    /// Numbers that go from layer to layer for each position.
    pub width: usize,
    /// Tokens.
    pub vocab: usize,
}

/// What a step is given beside its layers and their inputs.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// Where it is recorded.
    pub tape: &'a Tape,
    /// The padding of the segments, one for each layer.
    pub padding: Option<&'a Padding>,
    /// How gradients go back.
    pub backprop: Backprop,
    /// Segments of the whole pass.
    pub segments: usize,
    /// Which of the segments are background, one for each layer, f32 `[n, B, 1]`; `None` where that is not known or does not matter.
    pub background: Option<&'a Tensor>,
}

/// A model over segments.
pub trait Recurrent: Send + Sync {
    /// Where and in what it computes.
    fn compute(&self) -> &Arc<Compute>;

    /// Its sizes.
    fn sizes(&self) -> Sizes;

    /// What its states are made of.
    fn layout(&self) -> StateLayout;

    /// Positions around a segment's own tokens.
    fn around(&self) -> Around {
        Around::default()
    }

    /// Tokens that an open segment can have.
    fn longest_segment(&self) -> usize {
        usize::MAX
    }

    /// The inputs of the first layer, `[n, B, T, d]`, for n segments that are padded alike. `carried` is what came through the top, for
    /// recurrences in which something does, which ask for one segment at a time.
    fn embed(&self, tape: &Tape, inputs: &Inputs, segments: Range<usize>, carried: &[Tensor]) -> Result<Tensor>;

    /// The state of layers `layers` as steps take it, in buffers that steps may change. `room` is the width of the segments where layers that
    /// have read nothing yet run beside others.
    fn begin(&self, tape: &Tape, state: &State, layers: Range<usize>, room: Option<usize>) -> Result<LayerState>;

    /// One step of layers `layers`: x `[n, B, T, d]` of n segments, one for each layer. Other layers of `state` rest. Gives the layers' outputs
    /// and the state after it.
    fn step(&self, context: StepContext<'_>, layers: Range<usize>, x: &Tensor, state: LayerState) -> Result<(Tensor, LayerState)>;

    /// A step where nobody wants the outputs of the last of the layers. Gives the outputs of those before it, if there are any.
    fn step_unheard(
        &self,
        context: StepContext<'_>,
        layers: Range<usize>,
        x: &Tensor,
        state: LayerState,
    ) -> Result<(Option<Tensor>, LayerState)> {
        let (y, state) = self.step(context, layers, x, state)?;
        let before = y.dims()[0] - 1;
        Ok(((before > 0).then(|| ops::rows(&y, 0..before)).transpose()?, state))
    }

    /// The state with nothing waiting to be done.
    fn settle(&self, state: LayerState) -> Result<LayerState> {
        Ok(state)
    }

    /// The state with no gradient going back through layers `layers`.
    fn cut(&self, state: LayerState, layers: &Range<usize>) -> Result<LayerState> {
        state.cut(layers)
    }

    /// The state after the last step of all layers.
    fn end(&self, tape: &Tape, state: LayerState, counts: Vec<Count>) -> Result<State>;

    /// Whether something goes from the last layer to the next segment's first, so that only the sequential schedule can run it. Such a
    /// state is what is carried.
    fn carries_through_top(&self) -> bool {
        false
    }

    /// Whether segments of this width can be run from `state` diagonal by diagonal. Where they cannot, the diagonal schedule gives over to the
    /// sequential one.
    fn fits_diagonal(&self, _state: &State, _width: usize) -> bool {
        true
    }

    /// What goes through the top after a segment, from the last layer's outputs `[B, T, d]` and what came before.
    fn to_top(&self, _tape: &Tape, _h: &Tensor, _carried: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Ok(Vec::new())
    }

    /// The last layer's outputs as the output table takes them.
    fn normed(&self, tape: &Tape, h: &Tensor) -> Result<Tensor>;

    /// The output table `[V, d]`.
    fn output_table(&self) -> &Param;

    /// Every parameter, in a fixed order.
    fn params(&self) -> Vec<&Param>;

    /// Every tensor of a file, with the parameter it belongs to.
    fn entries(&self) -> Vec<Entry<'_>>;

    /// A segment that tokens are added to one after the other; the state stays as it is.
    fn open<'a>(&'a self, state: &State) -> Result<Box<dyn OpenSegment + 'a>>;

    /// The tensors of the plain backbone under Hugging Face's names, without anything of the memory; `None` if there is no such backbone.
    fn plain(&self) -> Option<Vec<FileTensor<'_>>> {
        None
    }

    /// The matrices of the layers that an adapter can change, each with its module's name as Hugging Face has it
    /// (`transformer.h.0.attn.c_attn`); none if there is no such backbone.
    fn projections(&self) -> Vec<(String, Entry<'_>)> {
        Vec::new()
    }

    /// Every tensor of the model's file with the values that it has around a plain backbone: the backbone's, and of the memory those that the model
    /// has. `each` hears them one after the other.
    fn adopted(&self, tensors: &Tensors, _seed: u64, each: &mut dyn FnMut(&Entry<'_>, Vec<f32>) -> Result<()>) -> Result<()> {
        for entry in self.entries() {
            if entry.of_memory {
                each(&entry, entry.export(&entry.param.value().to_f32_vec()?))?;
                continue;
            }
            let (name, shape, data) = tensors.weight(&entry.names().collect::<Vec<_>>())?;
            entry.expect_shape(tensors.path(), &name, &shape)?;
            each(&entry, data)?;
        }
        Ok(())
    }

    /// Takes the tensors of a plain backbone; what those do not have is drawn anew.
    fn adopt(&self, tensors: &Tensors, seed: u64) -> Result<()> {
        let params = self.params();
        let mut staged = Staged::default();
        self.adopted(tensors, seed, &mut |entry, data| {
            if let Some(param) = params.iter().find(|p| p.name() == entry.param.name()) {
                entry.import(&data, staged.values(param));
            }
            Ok(())
        })?;
        staged.set(self.compute().device())
    }

    /// Whether a step of a given shape always issues the same work on the device, so that it can be recorded.
    fn has_fixed_steps(&self) -> bool {
        true
    }
}

/// Makes a recurrence from a configuration.
pub type Build = fn(&Config, &mut Maker) -> Result<Box<dyn Recurrent>>;

/// A recurrence of this library that is no transformer.
struct RecurrenceKind {
    /// `model_type` of its `config.json`.
    model_type: &'static str,
    /// Refuses a configuration, without making anything.
    check: fn(&Config) -> Result<()>,
    build: Build,
    /// The configuration of one made from scratch, from its own keys of a recipe's `[model]`. Unknown keys are an error.
    describe: fn(Value, FreshTokens) -> Result<Value>,
}

const KINDS: [RecurrenceKind; 2] = [mamba::KIND, rwkv5::KIND];

/// Models that are taken for those of [`KINDS`] and are others.
const RELATIVES: [(&str, &str); 5] =
    [("mamba2", "Mamba-2"), ("falcon_mamba", "Falcon Mamba"), ("rwkv", "RWKV-4"), ("rwkv6", "RWKV-6"), ("rwkv7", "RWKV-7")];

static REGISTERED: RwLock<Vec<(&'static str, Build)>> = RwLock::new(Vec::new());

/// Adds a recurrence for backbones of this `model_type`. One that is taken is an error.
pub fn register(model_type: &'static str, build: Build) -> Result<()> {
    if builder(model_type).is_some() {
        return Err(Error::config("backbone.model_type", "one that is not taken", model_type));
    }
    REGISTERED.write().unwrap_or_else(PoisonError::into_inner).push((model_type, build));
    Ok(())
}

fn kind(model_type: &str) -> Option<&'static RecurrenceKind> {
    static ALL: [RecurrenceKind; KINDS.len()] = KINDS;
    ALL.iter().find(|kind| kind.model_type == model_type)
}

/// What builds backbones of a `model_type`.
fn builder(model_type: &str) -> Option<Build> {
    if transformer::knows(model_type) {
        return Some(transformer::build);
    }
    if let Some(kind) = kind(model_type) {
        return Some(kind.build);
    }
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    registered.iter().find(|(name, _)| *name == model_type).map(|(_, build)| *build)
}

/// The error of a `model_type` that nobody builds: it names those that are known, and what it is taken for.
fn unknown(model_type: &str) -> Error {
    let known: Vec<&str> = FAMILIES.iter().map(|f| f.model_type).chain(KINDS.iter().map(|kind| kind.model_type)).collect();
    let relative = RELATIVES.iter().find(|(name, _)| *name == model_type);
    let shown = relative.map_or(model_type.to_string(), |(name, is)| format!("{name}, which is {is}, another model"));
    Error::config("model_type", &format!("one of {}", known.join(", ")), shown)
}

/// Whether models of a `model_type` keep a state of their own, so that they have no memory beside it.
pub fn keeps_its_own(model_type: &str) -> bool {
    kind(model_type).is_some()
}

/// The tokens of a model that is made from scratch.
#[derive(Clone, Copy, Debug)]
pub struct FreshTokens {
    /// How many.
    pub vocab: usize,
    /// The one that ends a text.
    pub end: i32,
}

/// The configuration, as Hugging Face has it, of a recurrence made from scratch that is no transformer, from its own keys (`layers`, `width`, ..).
/// A `model_type` that is none of these, and keys that it does not have, are an error.
pub fn describe(model_type: &str, keys: Value, tokens: FreshTokens) -> Result<Value> {
    (kind(model_type).ok_or_else(|| unknown(model_type))?.describe)(keys, tokens)
}

/// Refuses a configuration whose parts do not fit together, without making anything.
pub fn check(config: &Config) -> Result<()> {
    config.check_segments()?;
    let model_type = config.model_type_of_backbone();
    match (kind(model_type), builder(model_type)) {
        (Some(kind), _) => (kind.check)(config),
        (_, None) => Err(unknown(model_type)),
        _ if transformer::knows(model_type) => config.architecture().map(|_| ()),
        _ => Ok(()),
    }
}

/// Builds the recurrence of a configuration, with parameters for a purpose.
pub fn build(config: &Config, purpose: Purpose, compute: &Arc<Compute>) -> Result<Box<dyn Recurrent>> {
    config.check_segments()?;
    let model_type = config.model_type_of_backbone();
    let build = builder(model_type).ok_or_else(|| unknown(model_type))?;
    build(config, &mut Maker::new(purpose, compute))
}

/// Refuses a memory around a model that keeps a state of its own.
fn expect_no_memory(config: &Config, name: &str) -> Result<()> {
    match config.memory.get::<Window>() {
        Some(Window { sliding_window: false }) => Ok(()),
        _ => Err(Error::config("memory.kind", &format!("none: {name} keeps a state of its own"), config.memory.kind())),
    }
}

/// The state of some layers, of tensors that all begin with an axis of layers.
fn begin_layers(state: &State, layers: Range<usize>) -> Result<LayerState> {
    let tensors = state.tensors().map(|(_, t)| ops::rows(t, layers.clone())).collect::<armt_engine::Result<_>>()?;
    let fresh = state.counts().iter().map(|c| c.segments == 0).collect();
    Ok(LayerState { fresh: vec![fresh; layers.len()], layers, tensors, waiting: None })
}

/// A step of some layers on `inputs` and the mask of tokens that are seen; computed again on the way back where that is asked for.
fn lean<const N: usize>(
    context: StepContext<'_>,
    inputs: &[&Tensor; N],
    run: impl Fn(&Tape, [&Tensor; N], Option<&Tensor>) -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<Vec<Tensor>> {
    let seen = context.padding.map(|padding| padding.mask.clone());
    if !context.backprop.recompute {
        return run(context.tape, *inputs, seen.as_ref());
    }
    Ok(context.tape.recompute(inputs, move |tape, inputs| {
        run(tape, std::array::from_fn(|i| &inputs[i]), seen.as_ref()).map_err(Error::into_engine)
    })?)
}
