//! Compiles every CUDA kernel without a GPU and fails on errors and on register spills. `scripts/check-kernels` fetches the compilers and
//! runs it: `check_kernels FOLDER_WITH_NVRTC PTXAS [ARCHITECTURE...] [BEGINNING_OF_FILES]`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, ptxas, architectures @ ..] = args.as_slice() else {
        eprintln!("usage: check_kernels FOLDER_WITH_NVRTC PTXAS [ARCHITECTURE...] [BEGINNING_OF_FILES]");
        return ExitCode::from(2);
    };
    // An architecture begins with a digit, a file with a letter.
    let (architectures, only) = match architectures {
        [before @ .., last] if last.starts_with(|c: char| c.is_ascii_lowercase()) => (before, last.as_str()),
        all => (all, ""),
    };
    let architectures = if architectures.is_empty() { &["90a".to_string()][..] } else { architectures };
    let (mut passed, mut failed) = (0, 0);
    for arch in architectures {
        let checks = match armt_engine::check_kernels(Path::new(folder), Path::new(ptxas), arch, only) {
            Ok(checks) => checks,
            Err(e) => {
                eprintln!("{e}");
                return ExitCode::from(2);
            }
        };
        for check in checks {
            match check.problem {
                None => {
                    let kernels: Vec<String> =
                        check.kernels.iter().map(|(name, registers)| format!("{name} {registers}")).collect();
                    println!("sm_{arch} {}: registers {}", check.variant, kernels.join(", "));
                    passed += 1;
                }
                Some(problem) => {
                    println!("sm_{arch} {}: FAILED\n{problem}", check.variant);
                    failed += 1;
                }
            }
        }
    }
    println!("kernels: {passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
