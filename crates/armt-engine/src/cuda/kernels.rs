//! Our own kernels: `.cu` files in this folder, compiled by NVRTC for the card at hand on first use, and kept on disk.
//!
//! A file is compiled once for each element type (`typedef T`) and set of constants it is used with. The cache entry's name is a hash
//! of everything that decides the code; its content carries a checksum. An entry that is missing, truncated or altered is compiled
//! again; a folder that cannot be written is a warning, once.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::CudaDevice;
use super::driver::{Context, Function, Module};
use super::nvrtc::Nvrtc;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// Names the folder of compiled kernels. Default: `armt/kernels` in `XDG_CACHE_HOME` or `~/.cache`.
pub(super) const CACHE_VARIABLE: &str = "ARMT_CACHE_DIR";

const PRELUDE: &str = include_str!("kernels/prelude.cuh");
/// What the files share whose names begin so, between the prelude and their own text.
const HEADERS: &[(&str, &str)] = &[
    (
        "assoc_",
        concat!(
            include_str!("kernels/assoc_tile.cuh"),
            include_str!("kernels/assoc_products.cuh"),
            include_str!("kernels/assoc_turns.cuh")
        ),
    ),
    ("attention_", include_str!("kernels/attention_tile.cuh")),
];

/// Files with instructions that only Hopper (`sm_90a`) has.
pub(super) const HOPPER_ONLY: &[&str] = &["attention_wgmma"];

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        /// Every kernel file, by name.
        const SOURCES: &[(&str, &str)] = &[$(($name, include_str!(concat!("kernels/", $name, ".cu")))),*];
    };
}
#[rustfmt::skip]
sources!(
    "activation",
    "assoc",
    "assoc_step",
    "assoc_walk",
    "attention",
    "attention_mma",
    "attention_wgmma",
    "cast",
    "causal_conv",
    "cross_entropy",
    "elementwise",
    "embedding",
    "fingerprint",
    "norm",
    "optim",
    "read_lanes",
    "reduce",
    "rotary",
    "selective_scan",
    "selftest",
    "slice",
    "softmax",
    "wkv5",
);

const FLOATS: &[DType] = &[DType::F32, DType::BF16];
const F32: &[DType] = &[DType::F32];
const BF16: &[DType] = &[DType::BF16];

/// A file with the element types and the constants it is used with.
pub(super) type Variant = (&'static str, &'static [DType], Vec<(&'static str, usize)>);

/// Every file as it is used: what the check without a GPU compiles.
pub(super) fn variants() -> Vec<Variant> {
    const PLAIN: &[(&str, &[DType])] = &[
        ("activation", FLOATS),
        ("assoc", FLOATS),
        ("cast", F32),
        ("cross_entropy", FLOATS),
        ("elementwise", FLOATS),
        ("embedding", FLOATS),
        ("fingerprint", F32),
        ("norm", FLOATS),
        ("optim", F32),
        ("reduce", FLOATS),
        ("rotary", FLOATS),
        ("selftest", F32),
        ("slice", FLOATS),
        ("softmax", FLOATS),
    ];
    let mut all: Vec<Variant> = PLAIN.iter().map(|(file, dtypes)| (*file, *dtypes, vec![])).collect();
    all.extend([1, 2, 4, 8].map(|chunks| ("attention", FLOATS, vec![("C_CHUNKS", chunks)])));
    for (file, sizes, warps) in
        [("attention_mma", &[32, 64, 128][..], 1), ("attention_mma", &[32, 64, 128], 4), ("attention_wgmma", &[32, 64], 4)]
    {
        all.extend(sizes.iter().map(|size| (file, BF16, vec![("C_SIZE", *size), ("C_WARPS", warps)])));
    }
    all.extend([2, 4].map(|k| ("causal_conv", FLOATS, vec![("C_K", k)])));
    // States of 16, 32 and 96 numbers a channel, and one of an odd number.
    all.extend(
        [(2, 8), (4, 8), (16, 6), (1, 7)]
            .map(|(lanes, part)| ("selective_scan", FLOATS, vec![("C_LANES", lanes), ("C_PART", part)])),
    );
    all.extend([64, 8].map(|n| ("wkv5", FLOATS, vec![("C_N", n)])));
    all.extend([1, 2, 4].map(|own| ("read_lanes", FLOATS, vec![("C_OWN", own)])));
    for (projected, columns, group) in [0, 1].into_iter().flat_map(|p| [(p, 32, 8), (p, 16, 8), (p, 32, 16), (p, 16, 16)]) {
        let of = |held: usize| vec![("C_COLUMNS", columns), ("C_GROUP", group), ("C_HELD", held), ("C_PROJECTED", projected)];
        all.extend([0, 3, 6].map(|held| ("assoc_walk", FLOATS, of(held))));
        let with_queries = |(held, queries): (usize, usize)| [of(held), vec![("C_QUERIES", queries)]].concat();
        // What `StepCut` never takes is not compiled.
        let steps = [(3, 8), (3, 16), (6, 8), (6, 16)].into_iter().filter(|step| (projected, group, *step) != (1, 16, (6, 16)));
        all.extend(steps.map(|step| ("assoc_step", FLOATS, with_queries(step))));
    }
    all
}

/// The constants that a file is compiled with.
pub(crate) type Defines<'a> = &'a [(&'static str, usize)];

/// A file's text as the compiler sees it.
pub(super) fn source_text(file: &str) -> Result<String> {
    let found = SOURCES.iter().find(|(name, _)| *name == file);
    let shared = HEADERS.iter().find(|(prefix, _)| file.starts_with(prefix)).map_or("", |(_, text)| text);
    found
        .map(|(_, text)| format!("{PRELUDE}\n{shared}\n{text}"))
        .ok_or_else(|| Error::Bug(format!("there is no kernel file {file}.cu")))
}

/// The `-D` options of a file for an element type.
pub(super) fn options(dtype: DType, defines: Defines<'_>) -> Vec<(&'static str, String)> {
    let element = match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::I32 => "int",
    };
    let mut options = vec![("C_T", element.to_string())];
    options.extend(defines.iter().map(|(name, value)| (*name, value.to_string())));
    options
}

/// FNV-1a, 64 bits: stable between builds, which the standard hasher does not promise.
pub(super) fn hash(parts: &[&[u8]]) -> u64 {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    for part in parts {
        for byte in part.iter().chain(&(part.len() as u64).to_le_bytes()) {
            h = (h ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    h
}

/// The disk cache. Entries are `MAGIC, checksum of the code, code`.
struct Cache {
    folder: Option<PathBuf>,
}

const MAGIC: &[u8; 8] = b"ARMTKRN1";

impl Cache {
    fn new() -> Self {
        let named = std::env::var_os(CACHE_VARIABLE).map(PathBuf::from);
        let standard = || {
            let base = std::env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
            base.map(|b| b.join("armt"))
        };
        Cache { folder: named.or_else(standard).map(|f| f.join("kernels")) }
    }

    fn get(&self, name: &str) -> Option<Vec<u8>> {
        let entry = std::fs::read(self.folder.as_ref()?.join(name)).ok()?;
        let (head, code) = entry.split_at_checked(16)?;
        let sound = head[..8] == MAGIC[..] && head[8..] == hash(&[code]).to_le_bytes() && !code.is_empty();
        if !sound {
            tracing::warn!("kernel cache entry {name} is damaged; compiling it again");
        }
        sound.then(|| code.to_vec())
    }

    /// Written beside and renamed, so that no reader ever sees half an entry.
    fn put(&self, name: &str, code: &[u8]) -> std::io::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        std::fs::create_dir_all(folder)?;
        let beside = folder.join(format!("{name}.{}", std::process::id()));
        let entry = [&MAGIC[..], &hash(&[code]).to_le_bytes(), code].concat();
        std::fs::write(&beside, entry).and_then(|()| std::fs::rename(&beside, folder.join(name))).inspect_err(|_| {
            let _ = std::fs::remove_file(&beside);
        })
    }
}

/// The compiler, the disk cache, and what has been loaded.
pub(super) struct Kernels {
    nvrtc: Nvrtc,
    arch: String,
    cache: Cache,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<(String, DType, Vec<(&'static str, usize)>), Arc<Module>>,
    functions: HashMap<(String, DType, Vec<(&'static str, usize)>, String), Function>,
    warned: bool,
}

impl Kernels {
    pub(super) fn new(nvrtc: Nvrtc, capability: (i32, i32)) -> Self {
        Kernels { nvrtc, arch: arch_of(capability), cache: Cache::new(), loaded: Mutex::default() }
    }

    pub(super) fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    pub(super) fn arch(&self) -> &str {
        &self.arch
    }

    pub(super) fn cache_folder(&self) -> Option<&PathBuf> {
        self.cache.folder.as_ref()
    }

    fn code(&self, file: &str, dtype: DType, defines: Defines<'_>, warned: &mut bool) -> Result<Vec<u8>> {
        let text = source_text(file)?;
        let options = options(dtype, defines);
        let version = format!("{:?}", self.nvrtc.version);
        let key = hash(&[text.as_bytes(), format!("{options:?}").as_bytes(), self.arch.as_bytes(), version.as_bytes()]);
        let name = format!("{file}-{dtype}-{}-{key:016x}.cubin", self.arch);
        if let Some(code) = self.cache.get(&name) {
            return Ok(code);
        }
        let code = self.nvrtc.compile(&format!("{file}.cu"), &text, &self.arch, &options)?;
        if let Err(e) = self.cache.put(&name, &code)
            && !std::mem::replace(warned, true)
        {
            let folder = self.cache.folder.as_deref().map(|f| f.display().to_string()).unwrap_or_default();
            tracing::warn!("kernels are compiled anew in each run: the cache folder {folder} cannot be written ({e})");
        }
        Ok(code)
    }

    fn function(&self, context: &Context, file: &str, dtype: DType, defines: Defines<'_>, name: &str) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (file.to_string(), dtype, defines.to_vec());
        let function_key = (key.0.clone(), key.1, key.2.clone(), name.to_string());
        if let Some(function) = loaded.functions.get(&function_key) {
            return Ok(*function);
        }
        let module = match loaded.modules.get(&key) {
            Some(module) => module.clone(),
            None => {
                let code = self.code(file, dtype, defines, &mut loaded.warned)?;
                let module = Arc::new(context.load_module(&code)?);
                loaded.modules.insert(key, module.clone());
                module
            }
        };
        let c_name = CString::new(name).map_err(|_| Error::Bug("a zero byte in a kernel's name".into()))?;
        let function = context.function(&module, &c_name)?;
        loaded.functions.insert(function_key, function);
        Ok(function)
    }
}

/// NVRTC's name of an architecture; Hopper's own instructions need the `a` form.
fn arch_of(capability: (i32, i32)) -> String {
    let suffix = if capability == (9, 0) { "a" } else { "" };
    format!("sm_{}{}{suffix}", capability.0, capability.1)
}

/// A value that can be passed to a kernel. Tensors and `None` are pointers, `usize` is `long long`, `i32` is `int`, `f32` is `float`.
pub(crate) trait Argument {
    fn bits(&self) -> u64;
}

impl Argument for &Tensor {
    fn bits(&self) -> u64 {
        self.ptr()
    }
}
impl Argument for Option<&Tensor> {
    fn bits(&self) -> u64 {
        self.map_or(0, Tensor::ptr)
    }
}
impl Argument for usize {
    fn bits(&self) -> u64 {
        *self as u64
    }
}
impl Argument for i32 {
    fn bits(&self) -> u64 {
        u64::from(*self as u32)
    }
}
impl Argument for bool {
    fn bits(&self) -> u64 {
        u64::from(*self)
    }
}
impl Argument for f32 {
    fn bits(&self) -> u64 {
        u64::from(self.to_bits())
    }
}

/// A launch under construction.
pub(crate) struct Launch<'a> {
    device: &'a CudaDevice,
    function: Function,
    grid: (usize, usize, usize),
    block: usize,
    shared: usize,
    args: Vec<u64>,
}

impl CudaDevice {
    /// Kernel `name` of `file`.cu for elements of `dtype`.
    pub(crate) fn kernel(&self, file: &str, dtype: DType, name: &str) -> Result<Launch<'_>> {
        self.kernel_with(file, dtype, &[], name)
    }

    /// Kernel `name` of `file`.cu for elements of `dtype`, compiled with constants named `C_...`.
    pub(crate) fn kernel_with(&self, file: &str, dtype: DType, defines: Defines<'_>, name: &str) -> Result<Launch<'_>> {
        let function = self.kernels.function(&self.context, file, dtype, defines, name)?;
        Ok(Launch { device: self, function, grid: (1, 1, 1), block: 256, shared: 0, args: Vec::with_capacity(16) })
    }
}

impl Launch<'_> {
    /// Blocks along x, y, z. y and z are at most 65,535.
    pub(crate) fn grid(mut self, x: usize, y: usize, z: usize) -> Self {
        self.grid = (x, y, z);
        self
    }

    /// Enough blocks along x for one thread an element, at most a few waves: kernels loop with the grid's stride.
    pub(crate) fn cover(self, elements: usize) -> Self {
        let most = self.device.context.multiprocessors * 16;
        let x = elements.div_ceil(self.block).clamp(1, most);
        self.grid(x, 1, 1)
    }

    /// Threads a block; 256 unless set. Set before [`Launch::cover`].
    pub(crate) fn block(mut self, threads: usize) -> Self {
        self.block = threads;
        self
    }

    /// Dynamic shared memory in bytes.
    pub(crate) fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes;
        self
    }

    /// The next argument.
    pub(crate) fn arg(mut self, value: impl Argument) -> Self {
        self.args.push(value.bits());
        self
    }

    /// Issues the launch on the device's stream.
    pub(crate) fn run(mut self) -> Result<()> {
        let (x, y, z) = self.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        if x > i32::MAX as usize || y > 65_535 || z > 65_535 {
            return Err(Error::unsupported("kernel launch", format!("a grid of {x} x {y} x {z} blocks is too large")));
        }
        self.device.context.allow_shared(self.function, self.shared)?;
        let grid = (x as u32, y as u32, z as u32);
        self.device.context.launch(self.function, grid, self.block as u32, self.shared, &mut self.args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_cache_entry_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(dir.path().join("kernels")) };
        assert_eq!(cache.get("k"), None);
        cache.put("k", b"code of a kernel").unwrap();
        assert_eq!(cache.get("k").unwrap(), b"code of a kernel");
        let path = dir.path().join("kernels/k");
        let good = std::fs::read(&path).unwrap();
        for damaged in [&good[..good.len() - 1], &good[..10], &[&good[..20], b"X", &good[21..]].concat()[..], b""] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get("k"), None);
        }
    }

    #[test]
    fn an_unwritable_cache_folder_is_an_error_to_warn_about_only() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"").unwrap();
        let cache = Cache { folder: Some(dir.path().join("file/kernels")) };
        assert!(cache.put("k", b"code").is_err());
        assert_eq!(cache.get("k"), None);
    }

    #[test]
    fn hopper_gets_its_own_instructions() {
        assert_eq!(arch_of((9, 0)), "sm_90a");
        assert_eq!(arch_of((8, 6)), "sm_86");
        assert_eq!(arch_of((12, 0)), "sm_120");
    }
}
