//! Compiles every kernel without a GPU: NVRTC to PTX, `ptxas` to machine code, with its report of registers and spills.

use std::path::Path;
use std::process::Command;

use rayon::prelude::*;

use super::kernels::{HOPPER_ONLY, options, source_text, variants};
use super::nvrtc::Nvrtc;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// What became of one kernel file for one element type and set of constants.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct KernelCheck {
    /// File, element type and constants.
    pub variant: String,
    /// Kernels in the file, with the registers each takes.
    pub kernels: Vec<(String, usize)>,
    /// What is wrong: the compiler's message, or the kernels that spill registers or run warpgroup products one by one.
    pub problem: Option<String>,
}

/// Compiles all kernels for an architecture such as `90a`, with NVRTC from `folder` (a `site-packages` or a library folder) and
/// the given `ptxas`, as many at a time as there are threads; files for Hopper alone are left out elsewhere, and those whose names do not
/// begin with `only`. An error means that the tools could not be used; a kernel's own failure is in its [`KernelCheck`].
pub fn check_kernels(folder: &Path, ptxas: &Path, arch: &str, only: &str) -> Result<Vec<KernelCheck>> {
    let nvrtc = Nvrtc::load_from(folder)?;
    let scratch = std::env::temp_dir().join(format!("armt-kernels-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).map_err(|source| Error::Io { path: scratch.clone(), source })?;
    let all = variants();
    let here = all.iter().filter(|(file, ..)| file.starts_with(only) && (arch == "90a" || !HOPPER_ONLY.contains(file)));
    let variants: Vec<_> =
        here.flat_map(|(file, dtypes, defines)| dtypes.iter().map(move |dtype| (*file, *dtype, defines))).collect();
    let numbered = variants.par_iter().enumerate();
    let checks = numbered.map(|(i, (file, dtype, defines))| {
        let ptx = scratch.join(format!("{i}.ptx"));
        let mut check = check_one(&nvrtc, ptxas, arch, &ptx, file, *dtype, defines)?;
        // One variant of a file says it of all.
        if check.problem.is_none() && variants[..i].iter().all(|(other, ..)| other != file) {
            check.problem = missing_alone(&nvrtc, arch, file, *dtype, defines, &check.kernels)?;
        }
        Ok(check)
    });
    let checks = checks.collect();
    let _ = std::fs::remove_dir_all(&scratch);
    checks
}

fn check_one(
    nvrtc: &Nvrtc,
    ptxas: &Path,
    arch: &str,
    ptx_file: &Path,
    file: &str,
    dtype: DType,
    defines: &[(&'static str, usize)],
) -> Result<KernelCheck> {
    let mut check = KernelCheck { variant: format!("{file} {dtype} {defines:?}"), kernels: Vec::new(), problem: None };
    let compiled =
        nvrtc.compile(&format!("{file}.cu"), &source_text(file)?, &format!("compute_{arch}"), &options(dtype, defines, None));
    let ptx = match compiled {
        Ok(ptx) => ptx,
        Err(Error::Kernel { log, .. }) => {
            check.problem = Some(log);
            return Ok(check);
        }
        Err(e) => return Err(e),
    };
    let text = ptx.strip_suffix(b"\0").unwrap_or(&ptx);
    std::fs::write(ptx_file, text).map_err(|source| Error::Io { path: ptx_file.into(), source })?;
    let output = Command::new(ptxas)
        .args(["-v", &format!("-arch=sm_{arch}"), "-o"])
        .arg(ptx_file.with_extension("cubin"))
        .arg(ptx_file)
        .output()
        .map_err(|source| Error::Io { path: ptxas.into(), source })?;
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        check.problem = Some(report);
        return Ok(check);
    }
    read_report(&report, &mut check);
    Ok(check)
}

/// The first kernel that is not the one of its program where it alone is asked for, as devices do.
fn missing_alone(
    nvrtc: &Nvrtc,
    arch: &str,
    file: &str,
    dtype: DType,
    defines: &[(&'static str, usize)],
    kernels: &[(String, usize)],
) -> Result<Option<String>> {
    for (name, _) in kernels {
        let options = options(dtype, defines, Some(name));
        let ptx = nvrtc.compile(&format!("{file}.cu"), &source_text(file)?, &format!("compute_{arch}"), &options)?;
        let text = String::from_utf8_lossy(&ptx);
        let entries: Vec<&str> = text.split(".entry ").skip(1).map(|rest| rest.split('(').next().unwrap_or_default()).collect();
        if entries != [name] {
            return Ok(Some(format!("{name} alone gives a program of {entries:?}")));
        }
    }
    Ok(None)
}

/// Reads `ptxas -v`: for each kernel a line with its name, one with its stack and spills, one with its registers.
fn read_report(report: &str, check: &mut KernelCheck) {
    let mut name = String::new();
    let mut problems = Vec::new();
    for line in report.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            name = rest.split('\'').next().unwrap_or_default().to_string();
        } else if let Some(at) = line.find("bytes spill stores") {
            let bytes = line[..at].trim_end().rsplit([' ', ',']).next().and_then(|n| n.parse().ok()).unwrap_or(0);
            if bytes > 0 {
                problems.push(format!("{name} spills {bytes} bytes"));
            }
        } else if let Some(at) = line.find(" registers") {
            let registers = line[..at].rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
            check.kernels.push((name.clone(), registers));
        } else if line.contains("wgmma") && line.contains("serialized") {
            problems.push(line.trim().to_string());
        }
    }
    if !problems.is_empty() {
        check.problem = Some(problems.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'quick' for 'sm_90a'
ptxas info    : Function properties for quick
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers
ptxas info    : Compiling entry function 'greedy' for 'sm_90a'
ptxas info    : Function properties for greedy
    96 bytes stack frame, 88 bytes spill stores, 92 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers";

    #[test]
    fn spills_and_registers_are_read_from_the_assembler() {
        let mut check = KernelCheck { variant: String::new(), kernels: Vec::new(), problem: None };
        read_report(REPORT, &mut check);
        assert_eq!(check.kernels, [("quick".to_string(), 24), ("greedy".to_string(), 255)]);
        assert_eq!(check.problem.as_deref(), Some("greedy spills 88 bytes"));
    }

    #[test]
    fn warpgroup_products_that_wait_for_each_other_are_a_problem() {
        let mut check = KernelCheck { variant: String::new(), kernels: Vec::new(), problem: None };
        let report = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...";
        read_report(report, &mut check);
        assert!(check.problem.is_some_and(|p| p.contains("serialized")));
    }
}
