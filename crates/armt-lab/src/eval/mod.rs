//! Judging models: exact match, memory capacity, reports and plots.

mod alike;
pub mod babilong;
pub mod heat;
pub mod interval;
pub mod likelihood;
pub mod numbers;
pub mod panels;
pub mod plot;
pub mod qa;
pub mod results;
pub mod retrieval;
mod svg;
pub mod text;

pub use self::svg::is_plot;
