//! Training: one loop for all tasks, its run folder and its logs.

pub mod tensorboard;
