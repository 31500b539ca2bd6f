//! `armt doctor`: what this machine has and what would be used.

use anyhow::Result;
use armt::engine::{CpuReport, Device, nccl_report};

pub fn run() -> Result<()> {
    let cpu = CpuReport::new();
    crate::say(format_args!("armt      {}", env!("CARGO_PKG_VERSION")))?;
    crate::say(format_args!("cpu       {} threads, vectors {}", cpu.threads, cpu.vectors))?;
    let int8 = if cpu.fast_int8 { "faster than f32 here" } else { "smaller than f32, but slower here: no AVX-512 VNNI" };
    crate::say(format_args!("int8      {int8} (read, ask, eval, serve with --dtype int8)"))?;
    match Device::cuda(0) {
        Ok(Device::Cuda(cuda)) => {
            let r = cuda.report()?;
            let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
            crate::say(format_args!("gpu       {}", r.device))?;
            crate::say(format_args!("memory    {:.1} of {:.1} GiB free", gib(r.memory.0), gib(r.memory.1)))?;
            crate::say(format_args!("kernels   compiled for {}", r.architecture))?;
            crate::say(format_args!("driver    runs up to {}", r.driver))?;
            crate::say(format_args!("cuBLASLt  {}", r.cublaslt))?;
            crate::say(format_args!("NVRTC     {}", r.nvrtc))?;
            crate::say(format_args!("NCCL      {}", nccl_report().unwrap_or_else(|why| format!("for several GPUs only: {why}"))))?;
            crate::say(format_args!("cache     {}", r.cache))?;
            crate::say(format_args!("--device auto would use cuda:0"))?;
        }
        Ok(Device::Cpu) => {}
        Err(why) => {
            crate::say(format_args!("gpu       {why}"))?;
            crate::say(format_args!("--device auto would use cpu"))?;
        }
    }
    Ok(())
}
