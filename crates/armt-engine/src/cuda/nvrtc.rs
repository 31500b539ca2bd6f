//! NVRTC: CUDA C++ in, machine code out, without a toolkit.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use super::libraries::{self, c_api};
use crate::error::{Error, Result};

type Program = *mut c_void;

c_api! {
    /// Functions of `libnvrtc`.
    Api {
        fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int;
        fn nvrtcCreateProgram(
            program: *mut Program, source: *const c_char, name: *const c_char, headers: c_int,
            header_sources: *const *const c_char, header_names: *const *const c_char,
        ) -> c_int;
        fn nvrtcDestroyProgram(program: *mut Program) -> c_int;
        fn nvrtcCompileProgram(program: Program, count: c_int, options: *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(program: Program, size: *mut usize) -> c_int;
        fn nvrtcGetProgramLog(program: Program, log: *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(program: Program, size: *mut usize) -> c_int;
        fn nvrtcGetCUBIN(program: Program, code: *mut c_char) -> c_int;
        fn nvrtcGetPTXSize(program: Program, size: *mut usize) -> c_int;
        fn nvrtcGetPTX(program: Program, text: *mut c_char) -> c_int;
        fn nvrtcGetErrorString(code: c_int) -> *const c_char;
    }
}

const COMPILATION_FAILED: c_int = 6;

/// All options of a compilation. `defines` become `-D` options.
pub(super) fn options(arch: &str, defines: &[(String, String)]) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), "-default-device".into()];
    options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// A loaded NVRTC.
pub(super) struct Nvrtc {
    api: Api,
    pub(super) path: PathBuf,
    pub(super) version: (i32, i32),
}

impl Nvrtc {
    /// Loads the newest NVRTC of these major versions.
    pub(super) fn load(majors: &[u32]) -> Result<Self> {
        Self::new(libraries::find("nvrtc", majors)?)
    }

    /// Loads NVRTC from one folder.
    pub(super) fn load_from(folder: &std::path::Path) -> Result<Self> {
        Self::new(libraries::find_in(folder, "nvrtc", &[13, 12])?)
    }

    fn new(loaded: libraries::Loaded) -> Result<Self> {
        libraries::preload_beside(&loaded.path, "libnvrtc-builtins");
        let path = loaded.path.clone();
        let api = Api::load(loaded)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes to two live variables.
        let code = unsafe { (api.nvrtcVersion)(&mut major, &mut minor) };
        let nvrtc = Nvrtc { api, path, version: (major, minor) };
        nvrtc.check("nvrtcVersion", code)?;
        Ok(nvrtc)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for any code.
        let name = unsafe { CStr::from_ptr((self.api.nvrtcGetErrorString)(code)) }.to_string_lossy().into_owned();
        Err(Error::Cuda { call, code, name, text: format!("NVRTC {}.{}", self.version.0, self.version.1) })
    }

    /// Compiles `source` to machine code for an architecture like `sm_90a`, or to PTX for one like `compute_90a`. `file` names it in
    /// messages. Threads may compile at the same time.
    pub(super) fn compile(&self, file: &str, source: &str, arch: &str, defines: &[(String, String)]) -> Result<Vec<u8>> {
        let c_string = |s: String| CString::new(s).map_err(|_| Error::Bug("a zero byte in a kernel's source".into()));
        let options: Vec<CString> = options(arch, defines).into_iter().map(c_string).collect::<Result<_>>()?;
        let option_pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let (source, name) = (c_string(source.into())?, c_string(file.into())?);
        let mut program = std::ptr::null_mut();
        // SAFETY: every pointer is to a live, zero-terminated string or variable; buffers have the sizes that NVRTC asked for.
        unsafe {
            let null = std::ptr::null();
            let code = (self.api.nvrtcCreateProgram)(&mut program, source.as_ptr(), name.as_ptr(), 0, null, null);
            self.check("nvrtcCreateProgram", code)?;
            let owner = Owner { api: &self.api, program };
            let code = (self.api.nvrtcCompileProgram)(program, options.len() as c_int, option_pointers.as_ptr());
            if code == COMPILATION_FAILED {
                let mut size = 0;
                self.check("nvrtcGetProgramLogSize", (self.api.nvrtcGetProgramLogSize)(program, &mut size))?;
                let mut log = vec![0u8; size];
                self.check("nvrtcGetProgramLog", (self.api.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast()))?;
                let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
                return Err(Error::Kernel { file: file.into(), arch: arch.into(), log });
            }
            self.check("nvrtcCompileProgram", code)?;
            let ptx = arch.starts_with("compute_");
            let (get_size, get) = if ptx {
                (self.api.nvrtcGetPTXSize, self.api.nvrtcGetPTX)
            } else {
                (self.api.nvrtcGetCUBINSize, self.api.nvrtcGetCUBIN)
            };
            let mut size = 0;
            self.check("nvrtcGetSize", get_size(program, &mut size))?;
            let mut code = vec![0u8; size];
            self.check("nvrtcGetCode", get(program, code.as_mut_ptr().cast()))?;
            drop(owner);
            Ok(code)
        }
    }
}

struct Owner<'a> {
    api: &'a Api,
    program: Program,
}

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `nvrtcCreateProgram`, destroyed once.
        unsafe { (self.api.nvrtcDestroyProgram)(&mut self.program) };
    }
}
