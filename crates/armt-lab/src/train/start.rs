//! The model that a stage begins with where there are weights to begin from, and the adapter that is trained where the backbone stays as it is.

use std::sync::Arc;

use armt::adapter::{Adapter, AdapterTraining, Base};
use armt::config::Config;
use armt::engine::{DType, Device};
use armt::model::Model;
use armt::weights::Tensors;

use super::origin::Origin;
use super::recipe::TrainRecipe;
use super::run_folder::RunFolder;
use crate::error::Result;

/// What a stage begins with.
pub(super) struct Start<'a> {
    /// Which weights are changed.
    pub train: &'a TrainRecipe,
    /// Decides the factors of a new adapter.
    pub seed: u64,
    /// The model's weights, with its adapter merged into them.
    pub weights: Tensors,
    /// At a run's start, where the weights are from; of a run that is under way everything is in its folder.
    pub from: Option<&'a Origin>,
}

impl Start<'_> {
    /// The model, and its adapter where one is trained.
    pub(super) fn model(
        &self,
        config: Config,
        folder: &RunFolder,
        (dtype, device): (DType, &Device),
    ) -> Result<(Model, Option<Arc<AdapterTraining>>)> {
        let lora = self.train.lora.as_ref();
        if let Some(from) = self.from.filter(|_| self.train.adapts()) {
            from.expect_same_write()?;
        }
        let model = match self.train.adapts() {
            true => AdapterTraining::blank(config, lora, dtype, device)?,
            false => Model::blank(config, dtype, device)?,
        };
        model.set_weights(&self.weights)?;
        let adapter = match (self.from, self.given()?) {
            (_, given) if !self.train.adapts() => {
                given.map_or(Ok(()), |given| given.merge_into(&model))?;
                None
            }
            // A run of an earlier version, of the memory alone, has none.
            (None, _) => folder.load_adapter(&model)?,
            (Some(_), Some(given)) => Some(AdapterTraining::begin_from(&given, &model, lora)?),
            (Some(from), None) => Some(AdapterTraining::new(&model, Base::of(from.path())?, lora, self.seed)?),
        };
        Ok((model, adapter.map(Arc::new)))
    }

    /// The recipe's adapter, at a run's start. One of another model is refused.
    fn given(&self) -> Result<Option<Adapter>> {
        let (Some(from), Some(folder)) = (self.from, &self.train.adapter) else { return Ok(None) };
        let adapter = Adapter::open(folder)?;
        adapter.expect_base(&Base::of(from.path())?)?;
        Ok(Some(adapter))
    }
}
