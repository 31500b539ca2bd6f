//! What models are trained and judged on.

pub mod asked;
pub mod babi;
pub mod babilong;
pub mod capacity;
pub mod check;
pub mod documents;
pub mod qa;
pub mod retrieval;
pub mod text;
pub mod training;
pub mod words;

use armt::recurrence::Targets;
use armt::segment::Batch;

/// A batch of a task: texts, and what their positions should predict.
#[derive(Clone, Debug)]
pub struct TaskBatch {
    /// The texts.
    pub batch: Batch,
    /// What is asked.
    pub targets: Targets,
}
