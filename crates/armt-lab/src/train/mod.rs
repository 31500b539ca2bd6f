//! Training: one loop for all tasks, its run folder and its logs.

mod buckets;
mod event;
pub mod first;
pub mod meter;
pub mod origin;
pub mod recipe;
pub mod replicas;
pub mod run_folder;
mod start;
pub mod step;
pub mod tensorboard;
pub mod trainer;
mod validation;

pub use meter::Meter;
pub use origin::Origin;
pub use run_folder::RunFolder;
pub use step::Stepper;
pub use tensorboard::EventWriter;
