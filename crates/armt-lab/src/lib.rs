//! What one does with the models of [`armt`] to learn something about them: [`tasks`] are what they are trained and judged on, [`eval`]
//! judges, reports and plots, [`train`] runs recipes, and [`mod@bench`] times workloads.
//!
//! Dependencies go up this list only: tasks, eval, train, bench.

pub mod bench;
mod error;
pub mod eval;
pub mod tasks;
pub mod train;

pub use error::{Error, Result};
