//! Finding CUDA's libraries at run time.
//!
//! Nothing of CUDA is linked. The driver (`libcuda`) comes from the system. cuBLASLt and NVRTC are taken from the folder that
//! `ARMT_CUDA_PATH` names, if they are there; else the newest version that the driver can run is searched for in `CUDA_HOME`, `CUDA_PATH`
//! and `/usr/local/cuda*`, on the loader's own search path, and in the folders where pip puts NVIDIA's wheels. A named folder may be a
//! CUDA installation, a folder of libraries, or a `site-packages`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Error, Result};

/// Names one folder to search before all others.
pub(super) const PATH_VARIABLE: &str = "ARMT_CUDA_PATH";

/// A library that was loaded, and from where.
pub(super) struct Loaded {
    pub(super) library: Library,
    pub(super) path: PathBuf,
}

/// Declares the functions of a C library as a struct of pointers, loaded together: a missing one is an error by name, not a crash later.
macro_rules! c_api {
    ($(#[$doc:meta])* $name:ident { $(fn $f:ident($($arg:ident: $t:ty),* $(,)?) -> $r:ty;)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(super) struct $name {
            $($f: unsafe extern "C" fn($($arg: $t),*) -> $r,)*
            // Last, so that the pointers never outlive the code they point to.
            _library: libloading::Library,
        }

        impl $name {
            #[allow(non_snake_case)]
            fn load(loaded: $crate::cuda::libraries::Loaded) -> $crate::error::Result<Self> {
                let lib = loaded.library;
                $(
                    // SAFETY: the declared signature is the one of the library's public C header.
                    let $f = unsafe { lib.get::<unsafe extern "C" fn($($arg: $t),*) -> $r>(concat!(stringify!($f), "\0").as_bytes()) }
                        .map(|symbol| *symbol)
                        .map_err(|e| $crate::error::Error::Library {
                            library: loaded.path.display().to_string(),
                            reason: format!("it has no function {}: {e}", stringify!($f)),
                            searched: "this file".into(),
                        })?;
                )*
                Ok($name { $($f,)* _library: lib })
            }
        }
    };
}
pub(super) use c_api;

/// Opens a library by path or by name.
fn open(path: &Path) -> std::result::Result<Library, String> {
    // SAFETY: NVIDIA's libraries run no initialisation code that could break this program's invariants.
    let opened = unsafe { Library::new(path) };
    opened.map_err(|e| std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string))
}

/// Loads a library of the driver, by the first of its names that the loader finds.
pub(super) fn system(names: &[&str]) -> Result<Loaded> {
    let mut reason = String::new();
    for name in names {
        match open(Path::new(name)) {
            Ok(library) => return Ok(Loaded { library, path: name.into() }),
            Err(e) => reason = e,
        }
    }
    Err(Error::NoDriver(reason))
}

/// Loads `lib<stem>.so.<major>`: from the folder that the variable names if it has one of these major versions, else the first version of
/// `majors` that is anywhere.
pub(super) fn find(stem: &str, majors: &[u32]) -> Result<Loaded> {
    if let Some(named) = std::env::var_os(PATH_VARIABLE)
        && let Ok(loaded) = find_in(Path::new(&named), stem, majors)
    {
        return Ok(loaded);
    }
    let folders = folders();
    let mut reason = "not found in any folder".to_string();
    for major in majors {
        let name = format!("lib{stem}.so.{major}");
        for folder in &folders {
            let path = folder.as_ref().map_or_else(|| PathBuf::from(&name), |f| f.join(&name));
            if folder.is_some() && !path.exists() {
                continue;
            }
            match open(&path) {
                Ok(library) => return Ok(Loaded { library, path }),
                Err(e) if folder.is_some() => reason = e,
                Err(_) => {}
            }
        }
    }
    let named = std::env::var_os(PATH_VARIABLE).map(|p| format!("{PATH_VARIABLE}={}", p.display()));
    let searched = folders.iter().map(|f| f.as_ref().map_or("the loader's path".into(), |f| f.display().to_string()));
    let searched: Vec<String> = named.into_iter().chain(searched).collect();
    let majors: Vec<String> = majors.iter().map(u32::to_string).collect();
    Err(Error::Library { library: format!("lib{stem}.so ({})", majors.join(" or ")), reason, searched: searched.join(", ") })
}

/// Loads a library from one folder, laid out like any that [`find`] searches.
pub(super) fn find_in(folder: &Path, stem: &str, majors: &[u32]) -> Result<Loaded> {
    let names = majors.iter().map(|major| format!("lib{stem}.so.{major}"));
    let path = names.flat_map(|name| inside(folder).into_iter().map(move |f| f.join(&name))).find(|p| p.exists());
    let refuse = |reason: String| Error::Library { library: stem.into(), reason, searched: folder.display().to_string() };
    let path = path.ok_or_else(|| refuse("not found".into()))?;
    let library = open(&path).map_err(refuse)?;
    Ok(Loaded { library, path })
}

/// Loads what lies beside a library and that it will later ask the loader for by name alone, as NVRTC does with its built-in functions.
pub(super) fn preload_beside(library: &Path, stem: &str) {
    let Ok(entries) = std::fs::read_dir(library.parent().unwrap_or(Path::new(""))) else { return };
    for path in entries.filter_map(|e| e.ok().map(|e| e.path())) {
        if path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(stem))
            && let Ok(loaded) = open(&path)
        {
            std::mem::forget(loaded); // stays for the life of the program, as the library that needs it does
        }
    }
}

/// Folders that exist, in the order in which they are searched; `None` stands for the loader's own search.
fn folders() -> Vec<Option<PathBuf>> {
    let mut found = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(named) = std::env::var_os(variable) {
            found.extend(inside(Path::new(&named)));
        }
    }
    found.extend(inside(Path::new("/usr/local/cuda")));
    for versioned in children(Path::new("/usr/local"), |name| name.starts_with("cuda-")) {
        found.extend(inside(&versioned));
    }
    let mut folders: Vec<Option<PathBuf>> = found.into_iter().map(Some).collect();
    folders.push(None);
    for packages in site_packages() {
        folders.extend(inside(&packages).into_iter().map(Some));
    }
    folders
}

/// Folders with libraries inside a CUDA installation, a plain folder of libraries, or a `site-packages`.
fn inside(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        ["", "lib64", "lib", "targets/x86_64-linux/lib"].iter().map(|sub| folder.join(sub)).filter(|p| p.is_dir()).collect();
    // pip: nvidia/cu13/lib since CUDA 13, nvidia/cublas/lib and nvidia/cuda_nvrtc/lib before.
    found.extend(children(&folder.join("nvidia"), |_| true).into_iter().map(|p| p.join("lib")).filter(|p| p.is_dir()));
    found
}

/// Sub-folders whose name passes, newest name first.
fn children(folder: &Path, keep: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.is_dir() && p.file_name().and_then(OsStr::to_str).is_some_and(&keep))
        .collect();
    found.sort();
    found.reverse();
    found
}

/// Folders where Python packages are installed: the active environment's, the first `python3`'s on the path, the user's, the system's.
fn site_packages() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    if let Some(path) = std::env::var_os("PATH") {
        // Both the folder on the path and what a link there leads to: a virtual environment's python is a link to the system's.
        for bin in std::env::split_paths(&path).filter(|bin| bin.join("python3").exists()) {
            prefixes.extend(bin.parent().map(Path::to_path_buf));
            let real = bin.join("python3").canonicalize().ok();
            prefixes.extend(real.and_then(|p| p.parent().and_then(Path::parent).map(Path::to_path_buf)));
        }
    }
    prefixes.extend(std::env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut found = Vec::new();
    for prefix in prefixes {
        for python in children(&prefix.join("lib"), |name| name.starts_with("python3")) {
            found.extend(["site-packages", "dist-packages"].map(|p| python.join(p)).into_iter().filter(|p| p.is_dir()));
        }
    }
    found.dedup();
    found
}
