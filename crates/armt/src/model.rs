//! The model: a configuration and a recurrence, immutable in use. Its state goes in and comes out as a value.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use armt_engine::{DType, Device, Param, Tape, Tensor, ops};

use crate::checkpoint;
use crate::compute::Compute;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::make_folder;
use crate::memory::MemoryConfig;
use crate::recurrence::{self, DeviceBatch, HostBatch, Inputs, Recurrent, Sizes, Targets};
use crate::schedule::{Backprop, Pass, ScheduleKind};
use crate::segment::{Alignment, Batch, Segment, segments};
use crate::state::State;
use crate::state::file::{self, Owner};
use crate::weights::{Purpose, Tensors, Writing};

/// A recurrence with its configuration. Cheap to clone; clones share the parameters.
#[derive(Clone)]
pub struct Model {
    config: Arc<Config>,
    recurrence: Arc<dyn Recurrent>,
    /// Of a model that was loaded to be used: its parameters may be rounded, its fingerprint is that of the file.
    loaded: Option<Arc<Owner>>,
}

impl Model {
    /// A model with fresh parameters. `dtype` is the type of the computation: f32, or bf16 on CUDA.
    pub fn fresh(config: Config, seed: u64, dtype: DType, device: &Device) -> Result<Self> {
        Self::build(config, Purpose::TrainFresh(seed), dtype, device)
    }

    /// A model to be trained whose parameters are zero, to be set.
    pub fn blank(config: Config, dtype: DType, device: &Device) -> Result<Self> {
        Self::build(config, Purpose::Train, dtype, device)
    }

    /// A model of which only the memory is to be trained, and those of the backbone's parameters that `also` names, all zero, to be set. The rest
    /// of the backbone has no gradients and is kept in the type of the computation. Where nothing is left to be trained, that is refused.
    pub fn blank_for_memory(config: Config, also: Vec<String>, dtype: DType, device: &Device) -> Result<Self> {
        let model = Self::build(config, Purpose::TrainMemory(also), dtype, device)?;
        match model.params().iter().any(|p| p.is_trainable()) {
            true => Ok(model),
            false => {
                Err(Error::Unsupported(format!("the memory {} has no parameters to be trained alone", model.config.memory.kind())))
            }
        }
    }

    fn build(config: Config, purpose: Purpose, dtype: DType, device: &Device) -> Result<Self> {
        if dtype == DType::I8 && (purpose != Purpose::Use || device.is_cuda()) {
            return Err(Error::Unsupported(
                "int8 is for models that are used, on the CPU; training and GPUs take f32 or bf16".into(),
            ));
        }
        let recurrence = recurrence::build(&config, purpose, &Arc::new(Compute::new(device, dtype)))?;
        Ok(Model { config: Arc::new(config), recurrence: Arc::from(recurrence), loaded: None })
    }

    /// Loads a model folder to be used: nothing is kept but the weights in the type of the computation. A folder of a plain backbone, and a GGUF
    /// file, loads as a model without memory, its whole context one segment. With [`DType::I8`] it computes in f32, and the backbone's matrices are rounded to
    /// int8 as they are read; its states are those of the model in f32, within that rounding, and each reads the other's files.
    pub fn load(folder: &Path, dtype: DType, device: &Device) -> Result<Self> {
        Self::load_for(folder, Purpose::Use, dtype, device)?.loaded_from(folder, |_, _, _| Ok(()))
    }

    /// Loads a model folder to be used as another model of its shape: with another configuration, and with what `change` makes of each parameter's
    /// values.
    pub fn load_changed(
        folder: &Path,
        config: Config,
        (dtype, device): (DType, &Device),
        change: impl FnMut(&Model, &Param, &mut [f32]) -> Result<()>,
    ) -> Result<Self> {
        Self::build(config, Purpose::Use, dtype, device)?.loaded_from(folder, change)
    }

    fn loaded_from(mut self, folder: &Path, mut change: impl FnMut(&Model, &Param, &mut [f32]) -> Result<()>) -> Result<Self> {
        let tensors = Tensors::open(folder)?;
        checkpoint::expect_used(self.recurrence(), &tensors)?;
        let mut hash = checkpoint::Fingerprint::new(&self.config);
        checkpoint::set_weights(self.recurrence(), &tensors, &mut |param, values| {
            change(&self, param, values)?;
            hash.add(values);
            Ok(())
        })?;
        self.loaded = Some(Arc::new(hash.finish()));
        Ok(self)
    }

    /// The parameters of a configuration without values: those of the backbone are never written or read and take no memory.
    pub fn shape(config: Config) -> Result<Self> {
        Self::build(config, Purpose::Wrap(0), DType::F32, &Device::cpu())
    }

    /// Loads a model folder to be trained on.
    pub fn load_trainable(folder: &Path, dtype: DType, device: &Device) -> Result<Self> {
        let model = Self::load_for(folder, Purpose::Train, dtype, device)?;
        checkpoint::set_weights(model.recurrence(), &Tensors::open(folder)?, &mut |_, _| Ok(()))?;
        Ok(model)
    }

    fn load_for(folder: &Path, purpose: Purpose, dtype: DType, device: &Device) -> Result<Self> {
        Self::build(checkpoint::config(folder)?, purpose, dtype, device).map_err(|e| match e {
            Error::Engine(_) => e,
            other if folder.is_file() => Error::file(folder, other),
            other => Error::file(&folder.join("config.json"), other),
        })
    }

    /// The model as it would be loaded to be used: nothing is kept but the values in the type of the computation.
    pub fn for_use(&self) -> Result<Self> {
        self.for_use_in(self.dtype())
    }

    /// The model as it would be loaded to be used with another type.
    pub fn for_use_in(&self, dtype: DType) -> Result<Self> {
        let mut used = Self::build((*self.config).clone(), Purpose::Use, dtype, self.device())?;
        for (to, from) in used.params().into_iter().zip(self.params()) {
            match to.scales() {
                Some(_) => to.set_values(&from.value().to_f32_vec()?)?,
                None => to.set(from.value())?,
            }
        }
        used.loaded = Some(Arc::new(self.owner()?));
        Ok(used)
    }

    /// A backbone of the shape that a Hugging Face folder's `config.json` describes, its weights random, with a fresh memory: to try what is
    /// meant for weights that are not at hand.
    pub fn convert_random(folder: &Path, memory: MemoryConfig, segment_size: usize, seed: u64, device: &Device) -> Result<Self> {
        let backbone = checkpoint::backbone_config(folder)?;
        Model::fresh(Config::new(backbone, memory, segment_size), seed, DType::F32, device)
    }

    /// Wraps the backbone of a Hugging Face folder, or of a GGUF file, with a fresh memory, initialised as the authors do. A tensor that no part of
    /// the backbone is, is an error.
    pub fn convert(folder: &Path, memory: MemoryConfig, segment_size: usize, seed: u64, device: &Device) -> Result<Self> {
        let model = Self::convert_random(folder, memory, segment_size, seed, device)?;
        let tensors = Tensors::open(folder)?;
        checkpoint::expect_used(model.recurrence(), &tensors)?;
        model.recurrence.adopt(&tensors, seed)?;
        Ok(model)
    }

    /// Overwrites all parameters of a model that is trained from a file. A missing, misshapen or non-finite tensor is an error by name, and
    /// nothing is changed.
    pub fn set_weights(&self, tensors: &Tensors) -> Result<()> {
        if self.loaded.is_some() {
            return Err(Error::Unsupported("a model that was loaded to be used keeps its weights".into()));
        }
        // Read twice: what is not finite is known before anything changes.
        checkpoint::expect_weights(self.recurrence(), tensors)?;
        checkpoint::set_weights(self.recurrence(), tensors, &mut |_, _| Ok(()))
    }

    /// Overwrites some parameters of a model that is trained, under the names and shapes of the files; the others stay. What does not fit is an
    /// error by name, and nothing is changed.
    pub fn import(&self, given: &[(String, Vec<usize>, Vec<f32>)]) -> Result<()> {
        if self.loaded.is_some() {
            return Err(Error::Unsupported("a model that was loaded to be used keeps its weights".into()));
        }
        checkpoint::import(self.recurrence(), given)
    }

    /// Every parameter, or what `pick` takes of it (its gradient, say), under the names and shapes of the files.
    pub fn export(&self, pick: impl Fn(&Param) -> armt_engine::Result<&Tensor>) -> Result<Vec<(String, Vec<usize>, Vec<f32>)>> {
        checkpoint::export(self.recurrence(), pick)
    }

    /// Writes the folder: configuration and weights in f32 or bf16. What fails leaves it as it was.
    pub fn save(&self, folder: &Path, dtype: DType) -> Result<()> {
        checkpoint::save(self.recurrence(), &self.config, folder, dtype)
    }

    /// Writes the plain backbone as a folder that Hugging Face's `transformers` opens, in f32 or bf16.
    pub fn save_plain(&self, folder: &Path, dtype: DType) -> Result<()> {
        checkpoint::save_plain(self.recurrence(), &self.config, folder, dtype)
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The recurrence, as schedules take it.
    pub fn recurrence(&self) -> &dyn Recurrent {
        self.recurrence.as_ref()
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        self.recurrence.compute().device()
    }

    /// The type of the computation.
    pub fn dtype(&self) -> DType {
        self.recurrence.compute().dtype()
    }

    /// The type that the backbone's matrices are kept in: that of the computation, or int8.
    pub fn weights_dtype(&self) -> DType {
        self.recurrence.compute().weights()
    }

    /// Layers, width and tokens.
    pub fn sizes(&self) -> Sizes {
        self.recurrence.sizes()
    }

    /// Every parameter, in a fixed order.
    pub fn params(&self) -> Vec<&Param> {
        self.recurrence.params()
    }

    /// A parameter by its name: `assoc.value`, say.
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.params().into_iter().find(|p| p.name() == name)
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.params().iter().map(|p| p.value().elements()).sum()
    }

    /// Number of parameters that belong to the memory and not to the backbone.
    pub fn memory_parameters(&self) -> usize {
        let around = self.recurrence.around();
        let rows = if around.wrapped { around.total() } else { 0 };
        let own = |e: &crate::weights::Entry<'_>| if e.of_memory { e.shape.iter().product() } else { 0 };
        self.recurrence.entries().iter().map(own).sum::<usize>() + rows * self.sizes().width
    }

    /// A number that tells this model from any other: of its configuration and every parameter.
    pub fn fingerprint(&self) -> Result<String> {
        Ok(self.owner()?.first)
    }

    /// What the files of this model's states are told from others by, without a tokenizer.
    pub fn owner(&self) -> Result<Owner> {
        match &self.loaded {
            Some(known) => Ok(known.as_ref().clone()),
            None => checkpoint::fingerprint(self.recurrence(), &self.config),
        }
    }

    /// The state before anything of `texts` texts was read.
    pub fn empty(&self, texts: usize) -> Result<State> {
        self.recurrence.layout().empty(texts, self.device())
    }

    /// Refuses a state of another kind, number of texts or size.
    pub fn expect_state(&self, state: &State, texts: usize) -> Result<()> {
        self.recurrence.layout().expect(state, texts)
    }

    /// A state in the type of this model's computation, whichever it was kept in: a GPU keeps bf16 where the CPU keeps f32. One of another kind,
    /// number of texts or size is refused.
    pub fn take_state(&self, state: State, texts: usize) -> Result<State> {
        self.expect_state(&state, texts)?;
        self.recurrence.layout().computed_in(state, self.dtype())
    }

    /// Writes a state to a file, beside it first and then renamed. A state that holds NaN or infinity is refused: no one could read it back.
    pub fn save_state(&self, state: &State, path: &Path) -> Result<()> {
        file::save(state, path, &self.owner()?)
    }

    /// Reads a state, to the bit where it was kept by a computation of this type, and as [`Model::take_state`] gives it otherwise. Refused with
    /// the reason: a file that is no state, of another model, truncated, altered, or with a number that is not finite.
    pub fn load_state(&self, path: &Path) -> Result<State> {
        let state = file::load(path, &self.recurrence.layout(), &self.owner()?, self.device())?;
        let texts = state.texts();
        self.take_state(state, texts)
    }

    /// Cuts a batch into this model's segments.
    pub fn segments(&self, batch: &Batch) -> Result<Vec<Segment>> {
        self.segments_aligned(batch, self.config.segment_alignment)
    }

    /// Cuts a batch into segments with another alignment than the model's.
    pub fn segments_aligned(&self, batch: &Batch, alignment: Alignment) -> Result<Vec<Segment>> {
        let vocabulary = self.sizes().vocab;
        if let Some(token) = batch.ids.iter().find(|id| **id < 0 || **id as usize >= vocabulary) {
            return Err(Error::Token { token: *token, vocabulary });
        }
        segments(batch, self.config.segment_size, alignment)
    }

    /// Segments on the device.
    pub fn inputs(&self, segments: &[Segment], texts: usize) -> Result<Inputs> {
        Inputs::new(self.recurrence(), segments, texts)
    }

    /// A training example as the host has it: the batch in this model's segments, and the rows that are asked. A batch that asks nothing is
    /// an error.
    pub fn host_batch(&self, batch: &Batch, targets: &Targets) -> Result<HostBatch> {
        HostBatch::new(self.recurrence.around(), self.segments(batch)?, batch, targets)
    }

    /// A training example on the device.
    pub fn device_batch(&self, host: &HostBatch) -> Result<DeviceBatch> {
        DeviceBatch::new(self.recurrence(), host)
    }

    /// Logits `[.., V]` of outputs `[.., d]` of the last layer.
    pub fn logits(&self, tape: &Tape, h: &Tensor) -> Result<Tensor> {
        let h = self.recurrence.normed(tape, h)?;
        let flat = ops::reshape(&h, [h.shape().rows(), h.shape().last()])?;
        let logits = ops::matmul_nt(&flat, &tape.param(self.recurrence.output_table()))?;
        Ok(ops::reshape(&logits, h.shape().with_last(self.sizes().vocab))?)
    }

    /// Reads a batch and gives the logits of its tokens `[B, tokens, V]` in f32 on the host, and the state afterwards. For tests and
    /// short texts: all logits are kept.
    pub fn forward(&self, batch: &Batch, state: &State, schedule: ScheduleKind) -> Result<(Vec<f32>, State)> {
        self.forward_aligned(batch, state, schedule, self.config.segment_alignment)
    }

    /// Reads a batch as [`Model::forward`], cut with another alignment than the model's.
    pub fn forward_aligned(
        &self,
        batch: &Batch,
        state: &State,
        schedule: ScheduleKind,
        alignment: Alignment,
    ) -> Result<(Vec<f32>, State)> {
        let (tokens, vocab) = (batch.tokens(), self.sizes().vocab);
        let mut logits = vec![0f32; batch.texts * tokens * vocab];
        let state = self.each_logits(batch, state, schedule, alignment, &mut |range, values| {
            for (b, row) in values.chunks(range.len() * vocab).enumerate() {
                logits[(b * tokens + range.start) * vocab..][..row.len()].copy_from_slice(row);
            }
            Ok(())
        })?;
        Ok((logits, state))
    }

    /// Reads a batch; `each` hears of every segment its tokens and their logits `[B, tokens of the segment, V]`, which are not kept. Gives the
    /// state afterwards.
    pub(crate) fn each_logits(
        &self,
        batch: &Batch,
        state: &State,
        schedule: ScheduleKind,
        alignment: Alignment,
        each: &mut dyn FnMut(&Range<usize>, Vec<f32>) -> Result<()>,
    ) -> Result<State> {
        self.expect_state(state, batch.texts)?;
        state.expect_closed()?;
        let (segments, before) = (self.segments_aligned(batch, alignment)?, self.recurrence.around().before);
        let (tape, inputs) = (Tape::off(), self.inputs(&segments, batch.texts)?);
        let pass = Pass::forward(&tape, &inputs);
        schedule.schedule(self.recurrence())?.run(self.recurrence(), pass, state, &mut |s, h| {
            let Segment { range, pad, .. } = &segments[s];
            let text = ops::narrow(h, 1, before + pad, range.len())?;
            each(range, self.logits(&tape, &text)?.to_f32_vec()?)
        })
    }

    /// The state after whole segments. Once `stop` is set it is [`Error::Interrupted`], between two steps.
    pub fn absorb(&self, segments: &[Segment], state: &State, stop: Option<&AtomicBool>) -> Result<State> {
        let (tape, inputs) = (Tape::off(), self.inputs(segments, state.texts())?.wanting(|_| false));
        let pass = Pass { stop, ..Pass::forward(&tape, &inputs) };
        ScheduleKind::Auto.schedule(self.recurrence())?.run(self.recurrence(), pass, state, &mut |_, _| Ok(()))
    }

    /// The mean loss of the positions that `targets` ask for, on `tape`, and the state afterwards. Only the rows that are asked for go
    /// through the head.
    pub fn loss(
        &self,
        tape: &Tape,
        batch: &Batch,
        targets: &Targets,
        state: &State,
        schedule: ScheduleKind,
        backprop: Backprop,
    ) -> Result<(Tensor, State)> {
        self.expect_state(state, batch.texts)?;
        state.expect_closed()?;
        let example = self.device_batch(&self.host_batch(batch, targets)?)?;
        self.batch_loss(tape, &example, state, schedule, backprop)
    }

    /// The mean loss of an example that is on the device, and the state afterwards.
    pub fn batch_loss(
        &self,
        tape: &Tape,
        example: &DeviceBatch,
        state: &State,
        schedule: ScheduleKind,
        backprop: Backprop,
    ) -> Result<(Tensor, State)> {
        let mut rows: Vec<Tensor> = Vec::new();
        let pass = Pass { backprop, ..Pass::forward(tape, &example.inputs) };
        let state = schedule.schedule(self.recurrence())?.run(self.recurrence(), pass, state, &mut |s, h| {
            if let Some(asked) = &example.asked[s] {
                let flat = ops::reshape(h, [h.dims()[0] * h.dims()[1], h.dims()[2]])?;
                rows.push(ops::embedding(&flat, asked)?);
            }
            Ok(())
        })?;
        let h = ops::concat(&rows.iter().collect::<Vec<_>>(), 0)?;
        let h = self.recurrence.normed(tape, &h)?;
        Ok((ops::linear_cross_entropy(&h, &tape.param(self.recurrence.output_table()), &example.next, 0)?, state))
    }
}

/// A backbone that is given a memory and written to a folder, without ever being in memory whole: [`Model::convert`] and [`Model::save`] in one,
/// with the same values.
pub struct Conversion {
    /// Its backbone's parameters are never written or read.
    shape: Model,
    tensors: Tensors,
    seed: u64,
}

impl Conversion {
    /// Opens a Hugging Face folder or a GGUF file. A tensor that no part of the backbone is, is an error.
    pub fn open(source: &Path, memory: MemoryConfig, segment_size: usize, seed: u64) -> Result<Self> {
        let config = Config::new(checkpoint::backbone_config(source)?, memory, segment_size);
        let shape = Model::build(config, Purpose::Wrap(seed), DType::F32, &Device::cpu())?;
        let tensors = Tensors::open(source)?;
        checkpoint::expect_used(shape.recurrence(), &tensors)?;
        Ok(Conversion { shape, tensors, seed })
    }

    /// The configuration that the model will have.
    pub fn config(&self) -> &Config {
        self.shape.config()
    }

    /// Layers, width and tokens.
    pub fn sizes(&self) -> Sizes {
        self.shape.sizes()
    }

    /// Number of parameters, and of those that belong to the memory.
    pub fn parameters(&self) -> (usize, usize) {
        (self.shape.parameters(), self.shape.memory_parameters())
    }

    /// Bytes that the state of one text takes in f32.
    pub fn state_bytes(&self) -> usize {
        self.shape.recurrence().layout().bytes(DType::F32)
    }

    /// Bytes in f32 by which the state of one text grows with every segment.
    pub fn state_growth(&self) -> usize {
        self.shape.recurrence().layout().growth(DType::F32)
    }

    /// Writes configuration and weights, in f32 or bf16. What fails, as a source with NaN in it does, leaves the folder as it was.
    pub fn write(&self, folder: &Path, dtype: DType) -> Result<()> {
        let recurrence = self.shape.recurrence();
        make_folder(folder)?;
        let tensors: Vec<(String, Vec<usize>)> = recurrence.entries().into_iter().map(|e| (e.name, e.shape)).collect();
        let mut file = Writing::create(&folder.join(checkpoint::WEIGHTS), &tensors, dtype)?;
        recurrence.adopted(&self.tensors, self.seed, &mut |entry, values| file.put(&entry.name, &values))?;
        checkpoint::finish(file, self.config(), folder)
    }
}
