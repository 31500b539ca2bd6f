//! Optimization: AdamW with decoupled weight decay, clipping of gradients, learning-rate schedules.

mod adamw;
mod schedule;

pub use adamw::{AdamW, Clip, Group, Settings};
pub use schedule::{Decay, Schedule};
