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

use self::training::Setting;
use crate::error::{Error, Result};

/// All tasks that a recipe can name.
pub const SETTINGS: &[Setting] = &[retrieval::REMEMBER, retrieval::REWRITE, babilong::SETTING, text::SETTING, qa::SETTING];

/// A task by the name that `task.setting` has for it. Another name is an error that lists them.
pub fn setting(name: &str) -> Result<&'static Setting> {
    let names = || SETTINGS.iter().map(|s| s.name).collect::<Vec<_>>().join(", ");
    let found = SETTINGS.iter().find(|setting| setting.name == name);
    found.ok_or_else(|| Error::config("task.setting", &format!("one of {}", names()), name))
}

/// A batch of a task: texts, and what their positions should predict.
#[derive(Clone, Debug)]
pub struct TaskBatch {
    /// The texts.
    pub batch: Batch,
    /// What is asked.
    pub targets: Targets,
}
