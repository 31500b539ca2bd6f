//! Parameters and the tensors of files: how fresh ones are drawn, and which tensor of a file is which part of which parameter.

mod entry;
pub mod gguf;
mod llama_cpp;
mod maker;
mod tensors;

pub use entry::{Entry, EntryList, FileTensor, Layout};
pub use maker::{Fill, Maker, Purpose};
pub use tensors::{Found, Tensors, Writing};

use armt_engine::{Device, Param, Tensor};

use crate::error::Result;

/// Values that were gathered for parameters, set all at once so that a failure changes nothing.
#[derive(Default)]
pub struct Staged<'p>(Vec<(&'p Param, Vec<f32>)>);

impl<'p> Staged<'p> {
    /// The values gathered for a parameter so far, zeros at first.
    pub fn values(&mut self, param: &'p Param) -> &mut Vec<f32> {
        let at = match self.0.iter().rposition(|(p, _)| p.name() == param.name()) {
            Some(at) => at,
            None => {
                self.0.push((param, vec![0.0; param.value().elements()]));
                self.0.len() - 1
            }
        };
        &mut self.0[at].1
    }

    /// Overwrites the parameters.
    pub fn set(self, device: &Device) -> Result<()> {
        for (param, values) in self.0 {
            param.set(&Tensor::from_slice(&values, param.value().shape(), device)?)?;
        }
        Ok(())
    }
}
