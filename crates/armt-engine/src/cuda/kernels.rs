//! Our own kernels: `.cu` files in this folder, compiled by NVRTC for the card at hand on first use, and kept on disk.
//!
//! A program is one kernel of a file, for one element type (`typedef T`) and one set of constants. Whoever asks for a kernel that was never
//! compiled gets it at once, and its code later: programs are compiled on all cores (`workers.rs`), and launches wait for them in their
//! order (`backlog.rs`).

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::CudaDevice;
use super::cache::{Cache, hash};
use super::driver::{Context, Function};
use super::nvrtc::{self, Nvrtc};
use super::workers::Workers;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

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
    "gated_scan",
    "memory_tokens",
    "norm",
    "optim",
    "read_lanes",
    "reduce",
    "rotary",
    "selective_scan",
    "selftest",
    "slice",
    "softmax",
    "token_mix",
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
        ("gated_scan", FLOATS),
        ("memory_tokens", BF16),
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
    all.extend([2, 4].map(|mixes| ("token_mix", FLOATS, vec![("C_M", mixes)])));
    all.extend([64, 8].map(|n| ("wkv5", FLOATS, vec![("C_N", n)])));
    all.extend([1, 2, 4].map(|own| ("read_lanes", FLOATS, vec![("C_OWN", own)])));
    for (projected, columns, group) in [0, 1].into_iter().flat_map(|p| [(p, 32, 8), (p, 16, 8), (p, 32, 16), (p, 16, 16)]) {
        // Any shape; then one of which all warps hold as many sums as they have room for, as far as there is one, and one of which they do not.
        let of = |held: usize, dm: usize, tokens: usize| walk_constants([columns, group, held, projected], dm, tokens);
        all.extend([0, 3, 6].map(|held| ("assoc_walk", FLOATS, of(held, 0, 0))));
        let with_queries = |held: usize, queries: usize, dm: usize, tokens: usize| {
            ("assoc_step", FLOATS, [of(held, dm, tokens), vec![("C_QUERIES", queries)]].concat())
        };
        // What `StepCut` never takes is not compiled.
        let steps = [(3, 8), (3, 16), (6, 8), (6, 16)].into_iter().filter(|step| (projected, group, *step) != (1, 16, (6, 16)));
        all.extend(steps.clone().map(|(held, queries)| with_queries(held, queries, 0, 0)));
        let shapes = if columns == 32 { [(3, 32), (6, 64)] } else { [(3, 32), (3, 64)] };
        for (held, dm) in shapes {
            all.push(("assoc_walk", FLOATS, of(held, dm, group)));
            let dtypes = if (held, group) == (6, 16) { BF16 } else { FLOATS };
            let known =
                steps.clone().filter(|step| *step == (held, 16)).map(|(held, queries)| with_queries(held, queries, dm, group));
            all.extend(known.map(|(file, _, constants)| (file, dtypes, constants)));
        }
    }
    // Tokens of half a group in turn.
    for (columns, held, dm) in [(32, 3, 32), (32, 6, 64), (16, 3, 32), (16, 6, 128)] {
        all.extend([8, 16].map(|queries| {
            let constants = walk_constants([columns, 8, held, 2], dm, 4);
            ("assoc_step", FLOATS, [constants, vec![("C_QUERIES", queries)]].concat())
        }));
    }
    all
}

/// Those of a walk over A: of its tiles and warps and, unless dm is 0, of one shape.
fn walk_constants([columns, group, held, projected]: [usize; 4], dm: usize, tokens: usize) -> Vec<(&'static str, usize)> {
    let how = [("C_COLUMNS", columns), ("C_GROUP", group), ("C_HELD", held), ("C_PROJECTED", projected)];
    let shape = [("C_DM", dm), ("C_NU", 3), ("C_D", 128), ("C_TOKENS", tokens), ("C_BUFFERS", 2)];
    how.into_iter().chain(shape.map(|(name, value)| (name, if dm == 0 { 0 } else { value }))).collect()
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

/// The `-D` options of a file for an element type: for one of its kernels, or for all.
pub(super) fn options(dtype: DType, defines: Defines<'_>, kernel: Option<&str>) -> Vec<(String, String)> {
    let element = match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::I32 => "int",
        DType::I8 => "signed char",
    };
    let only = kernel.map_or(("C_ALL".into(), String::new()), |name| (format!("C_ONLY_{name}"), "WANTED".into()));
    let mut options = vec![("C_T".into(), element.into()), only];
    options.extend(defines.iter().map(|(name, value)| (name.to_string(), value.to_string())));
    options
}

/// What turns programs into code.
struct Compiler {
    nvrtc: Nvrtc,
    arch: String,
    cache: Cache,
    warned: AtomicBool,
}

/// One kernel of a file for an element type and constants.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Program {
    file: String,
    dtype: DType,
    defines: Vec<(&'static str, usize)>,
    kernel: String,
}

impl Compiler {
    /// Compiles a program and keeps its code under `entry`. A folder that cannot be written is a warning, once.
    fn compile(&self, file: &str, text: &str, defines: &[(String, String)], entry: &str) -> Result<Vec<u8>> {
        let code = self.nvrtc.compile(&format!("{file}.cu"), text, &self.arch, defines)?;
        if let Err(e) = self.cache.put(entry, &code)
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            let folder = self.cache.folder.as_deref().map(|f| f.display().to_string()).unwrap_or_default();
            tracing::warn!("kernels are compiled anew in each run: the cache folder {folder} cannot be written ({e})");
        }
        Ok(code)
    }
}

/// The name of a program's entry on disk: everything that decides its code.
fn entry_name(program: &Program, text: &str, arch: &str, version: (i32, i32)) -> String {
    let Program { file, dtype, defines, kernel } = program;
    let options = nvrtc::options(arch, &options(*dtype, defines, Some(kernel)));
    let key = hash(&[text.as_bytes(), format!("{options:?} {version:?}").as_bytes()]);
    format!("{file}-{kernel}-{dtype}-{arch}-{key:016x}.cubin")
}

/// A kernel whose code is there, or being compiled.
pub(super) struct Kernel {
    name: CString,
    function: OnceLock<Function>,
    /// What the code will come from, until it is loaded.
    code: Mutex<Option<Receiver<Result<Vec<u8>>>>>,
}

impl Kernel {
    /// Waits for the code, and loads it.
    fn function(&self, context: &Context) -> Result<Function> {
        if let Some(function) = self.function.get() {
            return Ok(*function);
        }
        let mut code = self.code.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have loaded it meanwhile.
        if let Some(function) = self.function.get() {
            return Ok(*function);
        }
        let code = code.take().and_then(|code| code.recv().ok());
        let code = code.ok_or_else(|| Error::Bug(format!("the kernel {:?} could not be compiled or loaded before", self.name)))?;
        let function = context.load(&code?, &self.name)?;
        Ok(*self.function.get_or_init(|| function))
    }
}

/// Every kernel that was asked for.
pub(super) struct Kernels {
    compiler: Arc<Compiler>,
    workers: Workers,
    known: Mutex<HashMap<Program, Arc<Kernel>>>,
}

impl Kernels {
    pub(super) fn new(nvrtc: Nvrtc, capability: (i32, i32)) -> Self {
        let compiler = Compiler { nvrtc, arch: arch_of(capability), cache: Cache::new(), warned: AtomicBool::new(false) };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Kernels { compiler: Arc::new(compiler), workers: Workers::new(cores), known: Mutex::default() }
    }

    pub(super) fn nvrtc(&self) -> &Nvrtc {
        &self.compiler.nvrtc
    }

    pub(super) fn arch(&self) -> &str {
        &self.compiler.arch
    }

    pub(super) fn cache_folder(&self) -> Option<&PathBuf> {
        self.compiler.cache.folder.as_ref()
    }

    fn kernel(&self, context: &Context, program: Program) -> Result<Arc<Kernel>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = known.get(&program) {
            return Ok(kernel.clone());
        }
        let Program { file, dtype, defines, kernel: name } = &program;
        let (compiler, text, defines) = (self.compiler.clone(), source_text(file)?, options(*dtype, defines, Some(name)));
        let entry = entry_name(&program, &text, &compiler.arch, compiler.nvrtc.version);
        let name = CString::new(name.as_str()).map_err(|_| Error::Bug("a zero byte in a kernel's name".into()))?;
        let (function, code) = match compiler.cache.get(&entry) {
            Some(code) => (OnceLock::from(context.load(&code, &name)?), None),
            None => {
                let file = file.clone();
                (OnceLock::new(), Some(self.workers.start(move || compiler.compile(&file, &text, &defines, &entry))))
            }
        };
        let kernel = Arc::new(Kernel { name, function, code: Mutex::new(code) });
        known.insert(program, kernel.clone());
        Ok(kernel)
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
    kernel: Arc<Kernel>,
    grid: (usize, usize, usize),
    block: usize,
    shared: usize,
    args: Vec<u64>,
}

/// A launch with all that it needs.
pub(super) struct Call {
    kernel: Arc<Kernel>,
    grid: (u32, u32, u32),
    block: u32,
    shared: usize,
    args: Vec<u64>,
}

impl Call {
    /// Whether its kernel is there.
    pub(super) fn is_ready(&self) -> bool {
        self.kernel.function.get().is_some()
    }

    /// Makes the launch, once its kernel is compiled.
    pub(super) fn make(&self, context: &Context) -> Result<()> {
        let function = self.kernel.function(context)?;
        context.allow_shared(function, self.shared)?;
        context.launch(function, self.grid, self.block, self.shared, &self.args)
    }
}

impl CudaDevice {
    /// Kernel `name` of `file`.cu for elements of `dtype`.
    pub(crate) fn kernel(&self, file: &str, dtype: DType, name: &str) -> Result<Launch<'_>> {
        self.kernel_with(file, dtype, &[], name)
    }

    /// Kernel `name` of `file`.cu for elements of `dtype`, compiled with constants named `C_...`.
    pub(crate) fn kernel_with(&self, file: &str, dtype: DType, defines: Defines<'_>, name: &str) -> Result<Launch<'_>> {
        let program = Program { file: file.into(), dtype, defines: defines.to_vec(), kernel: name.into() };
        let kernel = self.kernels.kernel(&self.context, program)?;
        Ok(Launch { device: self, kernel, grid: (1, 1, 1), block: 256, shared: 0, args: Vec::with_capacity(16) })
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

    /// The launch as it was constructed; `None` if it has no blocks.
    pub(super) fn call(self) -> Result<Option<Call>> {
        let Launch { kernel, grid: (x, y, z), block, shared, args, .. } = self;
        if x == 0 || y == 0 || z == 0 {
            return Ok(None);
        }
        if x > i32::MAX as usize || y > 65_535 || z > 65_535 {
            return Err(Error::unsupported("kernel launch", format!("a grid of {x} x {y} x {z} blocks is too large")));
        }
        Ok(Some(Call { kernel, grid: (x as u32, y as u32, z as u32), block: block as u32, shared, args }))
    }

    /// Issues the launch on the device's stream.
    pub(crate) fn run(self) -> Result<()> {
        let context = &self.device.context;
        let Some(call) = self.call()? else { return Ok(()) };
        context.issue(call.is_ready(), move |context| call.make(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_decides_the_code_decides_the_name_of_its_entry() {
        let program = Program { file: "norm".into(), dtype: DType::F32, defines: vec![("C_N", 64)], kernel: "norm_wide".into() };
        let name = |program: &Program| entry_name(program, "text", "sm_90a", (13, 0));
        let mut names = vec![
            name(&program),
            name(&Program { dtype: DType::BF16, ..program.clone() }),
            name(&Program { defines: vec![("C_N", 8)], ..program.clone() }),
            name(&Program { kernel: "norm_backward_wide".into(), ..program.clone() }),
            entry_name(&program, "another text", "sm_90a", (13, 0)),
            entry_name(&program, "text", "sm_80", (13, 0)),
            entry_name(&program, "text", "sm_90a", (12, 9)),
        ];
        assert_eq!(names[0], name(&program));
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn hopper_gets_its_own_instructions() {
        assert_eq!(arch_of((9, 0)), "sm_90a");
        assert_eq!(arch_of((8, 6)), "sm_86");
        assert_eq!(arch_of((12, 0)), "sm_120");
    }
}
