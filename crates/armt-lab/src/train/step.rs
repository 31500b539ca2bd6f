//! One step of training: gradients of all parts of a batch, then the update.
//!
//! On CUDA a step of a shape that comes a second time is recorded as a graph, and from then on replayed: only the texts and the optimizer's
//! few numbers are copied to the device. Graphs of different shapes share their buffers.

use std::collections::HashMap;
use std::sync::Arc;

use armt::State;
use armt::adapter::AdapterTraining;
use armt::engine::optim::AdamW;
use armt::engine::{Graph, Param, Tape, Tensor, Workspace, ops};
use armt::model::Model;
use armt::recurrence::{BatchShape, DeviceBatch, HostBatch, Targets};
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;
use armt::state::Begins;

use super::buckets;
use super::replicas::{Alone, Replicas};
use crate::error::{Error, Result};
use crate::tasks::TaskBatch;

/// Rows that are asked come in so many on CUDA, where a step of a new shape takes far longer than a replayed one.
const ROWS: usize = 64;

/// Makes steps of one model.
pub struct Stepper<'m> {
    model: &'m Model,
    optimizer: AdamW,
    /// What the optimizer's parameters belong to, where the model's own stay as they are.
    adapter: Option<Arc<AdapterTraining>>,
    backprop: Backprop,
    schedule: ScheduleKind,
    /// Who computes the other parts of every batch.
    replicas: &'m dyn Replicas,
    /// The optimizer's gradients, in the order in which they are added up over the GPUs.
    buckets: Vec<Vec<Tensor>>,
    /// The loss of the last step, f32 `[1]`.
    loss: Tensor,
    /// The memory that texts go on from, and the one that they leave.
    memory: Option<State>,
    /// By the shapes of a batch's parts, and what they begin from.
    shapes: HashMap<(Vec<BatchShape>, Begin), RecordedStep>,
    // Dropped after the graphs that live in it.
    workspace: Workspace,
}

/// What the texts of a step begin from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Begin {
    /// An empty memory of their own.
    Empty,
    /// The memory that is carried on, which itself is empty at first.
    Carried { empty: bool },
}

/// What is kept for steps of one shape.
struct RecordedStep {
    batches: Vec<DeviceBatch>,
    /// What each counts in the whole batch, by what it asks: f32 `[1]`.
    shares: Vec<Tensor>,
    graph: Option<Graph>,
}

impl<'m> Stepper<'m> {
    /// Steps of `model` with an optimizer of its parameters.
    pub fn new(model: &'m Model, optimizer: AdamW, backprop: Backprop, schedule: ScheduleKind) -> Result<Self> {
        let device = model.device();
        let (loss, workspace) = (Tensor::from_slice(&[0f32], [1], device)?, Workspace::new(device));
        let buckets = buckets::plan(optimizer.params(), model.recurrence().sizes().layers)?;
        let (replicas, shapes) = (&Alone, HashMap::new());
        Ok(Stepper {
            model,
            optimizer,
            adapter: None,
            backprop,
            schedule,
            replicas,
            buckets,
            loss,
            memory: None,
            shapes,
            workspace,
        })
    }

    /// The steps of one of several processes.
    pub fn among(self, replicas: &'m dyn Replicas) -> Self {
        Stepper { replicas, ..self }
    }

    /// The steps of an adapter, whose parameters the optimizer has.
    pub fn adapting(self, adapter: Option<&Arc<AdapterTraining>>) -> Self {
        Stepper { adapter: adapter.cloned(), ..self }
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// The memory that the last step of [`Stepper::step_onward`] left, or that [`Stepper::go_on_from`] gave.
    pub fn memory(&self) -> Option<&State> {
        self.memory.as_ref()
    }

    /// Gives the memory that the next texts go on from.
    pub fn go_on_from(&mut self, memory: &State) -> Result<()> {
        self.model.expect_state(memory, memory.texts())?;
        // RecordedStep steps have the buffers of the one before.
        self.shapes.retain(|(_, begin), _| *begin == Begin::Empty);
        self.memory = Some(memory.copied()?);
        Ok(())
    }

    /// The next texts of [`Stepper::step_onward`] begin with an empty memory.
    pub fn begin_anew(&mut self) -> Result<()> {
        let Some(memory) = self.memory.take() else { return Ok(()) };
        // In place: recorded steps have these buffers.
        let empty = self.model.empty(memory.texts())?;
        memory.overwrite(&empty)?;
        self.memory = Some(memory.with_counts(empty.counts().to_vec()));
        Ok(())
    }

    /// Of the next texts of [`Stepper::step_onward`] those that `begins` names begin with an empty memory.
    pub fn begin_some_anew(&mut self, begins: &[bool]) -> Result<()> {
        let Some(memory) = self.memory.as_ref() else { return Ok(()) };
        if begins.iter().all(|begins| *begins) {
            return self.begin_anew();
        }
        if !begins.contains(&true) {
            return Ok(());
        }
        let after = emptied(self.model, memory, begins)?;
        // In place: recorded steps have these buffers.
        memory.overwrite(&after)?;
        self.memory = self.memory.take().map(|memory| memory.with_counts(after.counts().to_vec()));
        Ok(())
    }

    /// One step on a batch that is computed in `parts` equal parts, by each of several processes, with learning rate `rate`. Gives the mean loss, after the update: one
    /// that is not finite has spoiled the parameters.
    pub fn step(&mut self, asked: &TaskBatch, parts: usize, rate: f32) -> Result<f32> {
        self.make(asked, parts, rate, Begin::Empty)
    }

    /// One step on texts that go on from the memory that the texts of the last such step left, as far as values go: no gradient goes back
    /// there. So a model meets the memory of a million segments without reading them in one step. Only a state that has its tensors from
    /// the start can be so taken on, and the batch must stay the same.
    pub fn step_onward(&mut self, asked: &TaskBatch, rate: f32) -> Result<f32> {
        let batch = asked.batch.texts;
        if self.memory.is_none() {
            let empty = self.model.empty(batch)?;
            if self.model.recurrence().layout().begins != Begins::Zero {
                return Err(Error::unfit("a state that can be carried from text to text in training", empty.kind()));
            }
            self.memory = Some(empty);
        }
        self.memory.iter().try_for_each(|memory| self.model.expect_state(memory, batch))?;
        let empty = self.memory.as_ref().is_some_and(State::is_empty);
        let loss = self.make(asked, 1, rate, Begin::Carried { empty })?;
        if let Some(memory) = self.memory.take() {
            let tokens = asked.batch.tokens();
            let segments = tokens.div_ceil(self.model.config().segment_size);
            let counts = memory.counts_after(tokens as u64, segments as u64);
            self.memory = Some(memory.with_counts(counts));
        }
        Ok(loss)
    }

    fn make(&mut self, asked: &TaskBatch, parts: usize, rate: f32, begin: Begin) -> Result<f32> {
        let (rank, world) = (self.replicas.rank(), self.replicas.world());
        if !asked.batch.texts.is_multiple_of(parts * world) {
            return Err(Error::input(
                "texts of a batch",
                format!("a multiple of {parts} parts by {world} processes"),
                asked.batch.texts,
            ));
        }
        let hosts = (rank * parts..(rank + 1) * parts).map(|part| {
            let (batch, targets) = slice(asked, part, parts * world);
            let host = self.model.host_batch(&batch, &targets)?;
            Ok(if self.model.device().is_cuda() { host.rounded(ROWS) } else { host })
        });
        let hosts = hosts.collect::<Result<Vec<_>>>()?;
        let all = asks(&asked.targets.next) as f64;
        let of = asked.targets.next.chunks(asked.targets.next.len() / (parts * world)).skip(rank * parts).take(parts);
        let shares: Vec<f32> = of.map(|part| (asks(part) as f64 / all) as f32).collect();
        self.optimizer.prepare(rate)?;
        match self.replicas.communicator() {
            Some(communicator) => communicator.watched(|| self.run(&hosts, &shares, begin)),
            None => self.run(&hosts, &shares, begin),
        }
    }

    /// The step of batches that are on the host; gives the loss.
    fn run(&mut self, hosts: &[HostBatch], shares: &[f32], begin: Begin) -> Result<f32> {
        let key = (hosts.iter().map(HostBatch::shape).collect::<Vec<_>>(), begin);
        let memory = self.memory.as_ref().filter(|_| begin != Begin::Empty);
        let shape = match self.shapes.remove(&key) {
            None => {
                let batches = hosts.iter().map(|host| self.model.device_batch(host)).collect::<armt::Result<_>>()?;
                let device = self.model.device();
                let shares = shares.iter().map(|share| Tensor::from_slice(&[*share], [1], device)).collect::<Result<_, _>>()?;
                RecordedStep { batches, shares, graph: None }
            }
            Some(mut shape) => {
                shape.shares.iter().zip(shares).try_for_each(|(tensor, share)| tensor.overwrite(&[*share]))?;
                shape.batches.iter().zip(hosts).try_for_each(|(batch, host)| batch.fill(host))?;
                if self.model.device().is_cuda() && shape.graph.is_none() && self.model.recurrence().has_fixed_steps() {
                    let body = || self.body(&shape, memory).map_err(armt::Error::into_engine);
                    shape.graph = Some(self.workspace.record(body)?.0);
                }
                shape
            }
        };
        match &shape.graph {
            Some(graph) => graph.replay()?,
            None => self.workspace.run(|| self.body(&shape, memory).map_err(armt::Error::into_engine))?,
        }
        self.shapes.insert(key, shape);
        if self.sums_on_the_host() {
            self.add_up()?;
            self.update()?;
        }
        Ok(self.loss.item()?)
    }

    /// Whether gradients leave the device to be added up, after the way back.
    fn sums_on_the_host(&self) -> bool {
        self.replicas.world() > 1 && self.replicas.communicator().is_none()
    }

    /// Adds up the gradients and the loss over all processes, as one flat vector: those of the parameters in the optimizer's order, then the loss.
    fn add_up(&self) -> Result<()> {
        let params: Vec<&Param> = self.optimizer.params().collect();
        let mut flat = Vec::with_capacity(1 + params.iter().map(|p| p.value().elements()).sum::<usize>());
        for param in &params {
            flat.extend(param.grad()?.to_vec::<f32>()?);
        }
        flat.push(self.loss.item()?);
        self.replicas.add_up(&mut flat)?;
        let mut rest = flat.as_slice();
        for param in &params {
            let own;
            (own, rest) = rest.split_at(param.value().elements());
            param.grad()?.overwrite(own)?;
        }
        Ok(self.loss.overwrite(rest)?)
    }

    /// What a step does on the device: from the batches to the gradients and, unless they are added up on the host, to the updated parameters.
    fn body(&self, step: &RecordedStep, memory: Option<&State>) -> armt::Result<()> {
        let RecordedStep { batches, shares, .. } = step;
        self.optimizer.zero_grad()?;
        self.adapter.as_ref().map_or(Ok(()), |adapter| adapter.zero_grad())?;
        self.loss.fill_zero()?;
        // Costs of the memory are of texts, of which each part has as many.
        let texts = 1.0 / (batches.len() * self.replicas.world()) as f32;
        let Backprop { sparse, background, .. } = self.backprop;
        let backprop = Backprop { sparse: sparse * texts, background: background * texts, ..self.backprop };
        let communicator = self.replicas.communicator();
        // LoRA's gradients are made of those of the matrices, after the way back.
        let sums_beside = communicator.filter(|_| self.adapter.is_none());
        for (number, (batch, share)) in batches.iter().zip(shares).enumerate() {
            let tape = Tape::new();
            // The way back needs the memory that the step began from, so it gets a copy of its own.
            let state = memory.map_or_else(|| self.model.empty(batch.inputs.texts()), State::copied)?;
            let (loss, after) = self.model.batch_loss(&tape, batch, &state, self.schedule, backprop)?;
            // Before the way back, which may unwind it in place.
            memory.map_or(Ok(()), |memory| memory.overwrite(&after))?;
            let loss = ops::mul(&loss, share)?;
            match sums_beside.filter(|_| number + 1 == batches.len()) {
                Some(communicator) => {
                    tape.backward_telling(&loss, &self.buckets, &mut |n| communicator.begin_sums(&self.buckets[n]))?;
                }
                None => tape.backward(&loss)?,
            }
            self.loss.copy_from(&ops::add(&self.loss, &loss.detach())?)?;
        }
        self.adapter.as_ref().map_or(Ok(()), |adapter| adapter.pull())?;
        if let Some(communicator) = communicator {
            if sums_beside.is_none() {
                self.buckets.iter().try_for_each(|bucket| communicator.begin_sums(bucket))?;
            }
            communicator.begin_sums(std::slice::from_ref(&self.loss))?;
            communicator.finish_sums()?;
        }
        if self.sums_on_the_host() { Ok(()) } else { self.update() }
    }

    /// Changes the parameters by their gradients.
    fn update(&self) -> armt::Result<()> {
        self.optimizer.apply()?;
        self.adapter.as_ref().map_or(Ok(()), |adapter| adapter.refresh())
    }
}

/// A memory with those of its texts emptied that begin anew.
pub(super) fn emptied(model: &Model, memory: &State, begins: &[bool]) -> Result<State> {
    if begins.len() != memory.texts() {
        return Err(Error::input("texts", memory.texts(), begins.len()));
    }
    let texts = memory.split()?.into_iter().zip(begins);
    let texts = texts.map(|(text, begins)| if *begins { model.empty(1) } else { Ok(text) });
    Ok(State::stack(&texts.collect::<armt::Result<Vec<_>>>()?)?)
}

/// How many of some targets are asked.
fn asks(next: &[i32]) -> usize {
    next.iter().filter(|next| **next >= 0).count()
}

/// Part `part` of `parts` of a batch.
fn slice(asked: &TaskBatch, part: usize, parts: usize) -> (Batch, Targets) {
    let Batch { ids, texts, mask } = &asked.batch;
    let (rows, width) = (texts / parts, ids.len() / texts);
    let range = part * rows * width..(part + 1) * rows * width;
    let batch = Batch { ids: ids[range.clone()].to_vec(), texts: rows, mask: mask.as_ref().map(|m| m[range.clone()].to_vec()) };
    (batch, Targets { next: asked.targets.next[range].to_vec() })
}
