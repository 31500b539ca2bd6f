//! `armt doctor`: what this machine has and what would be used.

use anyhow::Result;
use armt::engine::{CpuReport, Device};

pub fn run() -> Result<()> {
    let cpu = CpuReport::new();
    println!("armt      {}", env!("CARGO_PKG_VERSION"));
    println!("cpu       {} threads, vectors {}", cpu.threads, cpu.vectors);
    match Device::cuda(0) {
        Ok(Device::Cuda(cuda)) => {
            let r = cuda.report()?;
            let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
            println!("gpu       {}", r.device);
            println!("memory    {:.1} of {:.1} GiB free", gib(r.memory.0), gib(r.memory.1));
            println!("kernels   compiled for {}", r.architecture);
            println!("driver    runs up to {}", r.driver);
            println!("cuBLASLt  {}", r.cublaslt);
            println!("NVRTC     {}", r.nvrtc);
            println!("cache     {}", r.cache);
            println!("--device auto would use cuda:0");
        }
        Ok(Device::Cpu) => {}
        Err(why) => {
            println!("gpu       {why}");
            println!("--device auto would use cpu");
        }
    }
    Ok(())
}
