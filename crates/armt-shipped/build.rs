//! Packs what the program carries: the shipped models, recipes and data, deflated, one file after the other.
//!
//! ```text
//! length of the path, path, bytes, deflated bytes, deflated    (lengths as u64, little-endian)
//! ```

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::DeflateEncoder;

/// A model that a clone of the project has and the program does not: with it it would have more than 25 MB.
const LEFT_OUT: &str = "models/babilong";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("shipped");
    let mut files = Vec::new();
    for part in ["models", "recipes", "data"] {
        let folder = root.join(part);
        // Changes below a link are seen where it leads to.
        let real = folder.canonicalize().map_err(|e| format!("{}: {e}", folder.display()))?;
        println!("cargo::rerun-if-changed={}", real.display());
        collect(&folder, Path::new(part), &mut files)?;
    }
    files.sort();
    let mut packed = Vec::new();
    for (name, path) in files {
        let bytes = std::fs::read(&path)?;
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&bytes)?;
        let deflated = encoder.finish()?;
        packed.extend((name.len() as u64).to_le_bytes());
        packed.extend(name.as_bytes());
        packed.extend((bytes.len() as u64).to_le_bytes());
        packed.extend((deflated.len() as u64).to_le_bytes());
        packed.extend(deflated);
    }
    std::fs::write(PathBuf::from(std::env::var("OUT_DIR")?).join("shipped"), packed)?;
    Ok(())
}

/// The files of a folder, by their names from the root with slashes between.
fn collect(folder: &Path, name: &Path, files: &mut Vec<(String, PathBuf)>) -> Result<(), Box<dyn Error>> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = name.join(path.file_name().unwrap_or_default());
        if name == Path::new(LEFT_OUT) {
            continue;
        }
        if path.is_dir() {
            collect(&path, &name, files)?;
        } else {
            let parts: Vec<String> = name.iter().map(|part| part.to_string_lossy().into_owned()).collect();
            files.push((parts.join("/"), path));
        }
    }
    Ok(())
}
