//! What one does with the models of [`armt`] to learn something about them: [`tasks`] are what they are trained and judged on, [`eval`]
//! judges, reports and plots, [`train`] runs recipes, and [`mod@bench`] times workloads. [`carried`] is what a program brings along.
//!
//! Dependencies go up this list only: carried, tasks, eval, train, bench.

pub mod bench;
pub mod carried;
mod error;
pub mod eval;
pub mod tasks;
pub mod train;

pub use error::{Error, Result};
