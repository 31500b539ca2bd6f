//! `--device` and `--dtype`, and opening a model folder on what they name.

use std::path::Path;

use anyhow::{Context, Result, bail};
use armt::adapter::Adapter;
use armt::engine::{CpuReport, DType, Device, Error};
use armt::memory::Write;
use armt::{Model, Session};
use clap::{Args, ValueEnum};

use crate::processes::Seat;
use armt_shipped::{find_adapter, find_model};

/// What to do instead where there are no GPUs.
const ON_CPUS: &str = "on CPUs the Python package trains over Gloo: armt.distributed";

#[derive(Args)]
pub struct DeviceArgs {
    /// Where to compute; auto takes the GPU if there is one that works.
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub device: DeviceKind,
    /// Numbers to compute with: bf16 on a GPU and f32 on the CPU if not given. int8 is f32 with the backbone's matrices rounded to eight
    /// bits, on the CPU: faster where the processor has AVX-512 VNNI, and not for training.
    #[arg(long, value_enum)]
    pub dtype: Option<ComputeKind>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ComputeKind {
    F32,
    Bf16,
    Int8,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    Auto,
    Cpu,
    Cuda,
}

/// Numbers of a model's file.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NumberKind {
    F32,
    Bf16,
}

impl NumberKind {
    pub fn dtype(self) -> DType {
        match self {
            NumberKind::F32 => DType::F32,
            NumberKind::Bf16 => DType::BF16,
        }
    }
}

impl DeviceArgs {
    /// Opens the device and says on standard error which one it is where that was left open.
    pub fn open(&self) -> Result<(Device, DType)> {
        let device = match self.device {
            DeviceKind::Cpu => Device::cpu(),
            DeviceKind::Cuda => Device::cuda(0).context("--device cuda")?,
            DeviceKind::Auto => {
                let (device, passed_over) = Device::auto();
                match passed_over {
                    // Nothing is wrong with such a machine, and nothing more is to be said of it.
                    Some(Error::NoDriver(_)) => crate::note(format_args!("device: cpu (no NVIDIA driver)")),
                    Some(why) => crate::note(format_args!("device: cpu ({why})")),
                    None => crate::note(format_args!("device: cuda:0")),
                }
                device
            }
        };
        let dtype = self.dtype_on(&device)?;
        Ok((device, dtype))
    }

    fn dtype_on(&self, device: &Device) -> Result<DType> {
        Ok(match (self.dtype, device.is_cuda()) {
            (Some(ComputeKind::Bf16), false) => bail!("--dtype bf16: expected f32 or int8 on the CPU; bf16 needs a GPU"),
            (Some(ComputeKind::Int8), true) => {
                bail!("--dtype int8: expected bf16 or f32 on a GPU; int8 is for the CPU (--device cpu)")
            }
            (Some(ComputeKind::Int8), false) => {
                if !CpuReport::new().fast_int8 {
                    crate::note(format_args!(
                        "int8: this processor has no AVX-512 VNNI; it saves memory and takes more time than f32"
                    ));
                }
                DType::I8
            }
            (None | Some(ComputeKind::Bf16), true) => DType::BF16,
            (None, false) | (Some(ComputeKind::F32), _) => DType::F32,
        })
    }

    /// Opens the device to train on it.
    pub fn open_to_train(&self) -> Result<(Device, DType)> {
        if self.dtype == Some(ComputeKind::Int8) {
            bail!("--dtype int8: expected f32 or bf16; int8 is for a model that is used (read, ask, eval, serve)");
        }
        self.open()
    }

    /// Refuses the CPU for one of several processes.
    pub fn expect_gpus(&self) -> Result<()> {
        if self.device == DeviceKind::Cpu {
            bail!("--device cpu: expected a GPU for each of several processes; {ON_CPUS}");
        }
        Ok(())
    }

    /// Opens the GPU of one of several processes.
    pub fn open_for(&self, seat: Seat) -> Result<(Device, DType)> {
        let open = || Device::cuda(seat.gpu(Device::cuda_count()?));
        let device = open().with_context(|| format!("expected a GPU for each of several processes; {ON_CPUS}"))?;
        let dtype = self.dtype_on(&device)?;
        Ok((device, dtype))
    }

    /// Opens the device and a named model on it, with an adapter of it where one is named, for tasks whose texts are tokens from the start.
    pub fn open_weights(&self, folder: &Path, adapter: Option<&Path>) -> Result<Model> {
        let (folder, adapter) = (find_model(folder)?, open_adapter(adapter)?);
        let (device, dtype) = self.open()?;
        match adapter {
            Some(adapter) => Ok(adapter.load(&folder, dtype, &device)?),
            None => Ok(Model::load(&folder, dtype, &device)?),
        }
    }

    /// Opens the device, a named model on it, with an adapter of it where one is named, and the model's tokenizer.
    pub fn open_session(&self, folder: &Path, adapter: Option<&Path>) -> Result<Session> {
        let (folder, adapter) = (find_model(folder)?, open_adapter(adapter)?);
        let (device, dtype) = self.open()?;
        match adapter {
            Some(adapter) => Ok(Session::open_adapted(folder, &adapter, dtype, &device)?),
            None => Ok(Session::open_on(folder, dtype, &device)?),
        }
    }

    /// The choice as arguments, for a command that is printed.
    pub fn arguments(&self) -> Vec<String> {
        let name = |v: Option<clap::builder::PossibleValue>| v.map(|v| v.get_name().to_string()).unwrap_or_default();
        let mut arguments = Vec::new();
        if self.device != DeviceKind::Auto {
            arguments.extend(["--device".into(), name(self.device.to_possible_value())]);
        }
        if let Some(dtype) = self.dtype {
            arguments.extend(["--dtype".into(), name(dtype.to_possible_value())]);
        }
        arguments
    }
}

/// Opens the adapter of a folder that is named, if one is: that itself, or a run's.
fn open_adapter(named: Option<&Path>) -> Result<Option<Adapter>> {
    Ok(named.map(|named| Adapter::open(&find_adapter(named))).transpose()?)
}

/// Refuses a path that is no folder of a Hugging Face model before anything slow is done.
pub fn expect_backbone(folder: &Path) -> Result<()> {
    if !folder.join("config.json").is_file() {
        let what = if folder.is_dir() { "this folder has no config.json" } else { "there is no such folder" };
        bail!("{}: {what}; expected a model folder with config.json and model.safetensors", folder.display());
    }
    Ok(())
}

/// How a memory is written, as an argument.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WriteKind {
    /// All tokens of a segment against the old memory.
    Paper,
    /// One after the other; what a token replaces is never more than there was.
    Projected,
}

impl From<WriteKind> for Write {
    fn from(kind: WriteKind) -> Self {
        match kind {
            WriteKind::Paper => Write::Paper,
            WriteKind::Projected => Write::Projected,
        }
    }
}
