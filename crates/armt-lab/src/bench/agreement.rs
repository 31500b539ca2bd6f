//! How far a workload's results are from those of its plain twins: the sequential schedule, and f32.

use armt::State;
use armt::engine::{DType, Device, Tape};
use armt::model::Model;
use armt::reader::Reader;
use armt::schedule::{Backprop, Pass, ScheduleKind};
use armt::segment::Batch;
use serde::{Deserialize, Serialize};

use super::{Work, Workload, model, reading};
use crate::error::Result;

/// Segments that are read for it.
const SEGMENTS: usize = 64;
/// Texts side by side, at most: f32 takes twice the memory.
const BATCH: usize = 8;

/// Norms of differences over norms: of the memory after a reading, and of all parameters' gradients after a training step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Agreement {
    /// Between the diagonal and the sequential schedule.
    pub schedules: f64,
    /// Between the workload's type and f32; nothing if it is f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f32: Option<f64>,
}

/// Measures a workload's agreement, on at most 64 of its segments. Where a value is not finite, so is what is given.
pub fn agreement(workload: &Workload, ids: &[i32], (dtype, device): (DType, &Device)) -> Result<Agreement> {
    let mut part = workload.clone();
    part.segments = part.segments.min(SEGMENTS);
    part.batch = part.batch.min(BATCH);
    let ids = &ids[..part.text_tokens()];
    // A model for each: gradients would add up.
    let values = |dtype, schedule| values(&model(&part, dtype, device)?, &part, ids, schedule);
    let (diagonal, sequential) = (values(dtype, ScheduleKind::Auto)?, values(dtype, ScheduleKind::Sequential)?);
    let exact = (dtype != DType::F32).then(|| values(DType::F32, ScheduleKind::Auto)).transpose()?;
    Ok(Agreement { schedules: difference(&diagonal, &sequential), f32: exact.map(|exact| difference(&diagonal, &exact)) })
}

/// Norm of the difference over the norm of `right`.
fn difference(left: &[f32], right: &[f32]) -> f64 {
    let (mut apart, mut norm) = (0f64, 0f64);
    for (l, r) in left.iter().zip(right) {
        apart += (f64::from(*l) - f64::from(*r)).powi(2);
        norm += f64::from(*r).powi(2);
    }
    (apart / norm).sqrt()
}

/// What a workload leaves: the memory A, or all of a state of another kind, or gradients.
fn values(model: &Model, workload: &Workload, ids: &[i32], schedule: ScheduleKind) -> Result<Vec<f32>> {
    let empty = model.empty(workload.batch)?;
    let batch = Batch { ids: ids.to_vec(), texts: workload.batch, mask: None };
    match (workload.work, schedule) {
        (Work::Read, ScheduleKind::Sequential) => {
            let inputs = model.inputs(&model.segments(&batch)?, workload.batch)?;
            let tape = Tape::off();
            let pass = Pass::forward(&tape, &inputs);
            let plain = schedule.schedule(model.recurrence())?;
            memory(&plain.run(model.recurrence(), pass, &empty, &mut |_, _| Ok(()))?)
        }
        (Work::Read, _) => {
            let mut reader = Reader::new(model, empty)?;
            reading(model, &mut reader, ids, workload.segments * workload.segment)?;
            memory(&reader.state()?)
        }
        (Work::Train, _) => {
            let tape = Tape::new();
            let targets = super::task_batch(workload, ids).targets;
            let (loss, _) = model.loss(&tape, &batch, &targets, &empty, schedule, Backprop::default())?;
            tape.backward(&loss)?;
            let grads = model.params().into_iter().map(|p| p.grad()?.to_vec::<f32>()).collect::<Result<Vec<_>, _>>()?;
            Ok(grads.concat())
        }
    }
}

fn memory(state: &State) -> Result<Vec<f32>> {
    if let Some(a) = state.get("A") {
        return Ok(a.to_vec()?);
    }
    Ok(state.tensors().map(|(_, t)| t.to_f32_vec()).collect::<Result<Vec<_>, _>>()?.concat())
}
