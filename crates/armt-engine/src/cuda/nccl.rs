//! NCCL: numbers of several processes added up, each process with a GPU of its own.
//!
//! Only what is needed for one communicator of all processes. How they find each other is NCCL's own: `NCCL_COMM_ID=host:port` in the environment of
//! all of them makes `ncclGetUniqueId` give all the same number, and the first listen there. Without it the number is good for one process alone.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use super::libraries::{self, c_api};
use crate::error::{Error, Result};

type Handle = *mut c_void;

/// What NCCL calls a communicator's number.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

c_api! {
    /// Functions of `libnccl`, all of NCCL 2.13 or older.
    Api {
        fn ncclGetVersion(version: *mut c_int) -> c_int;
        fn ncclGetUniqueId(id: *mut UniqueId) -> c_int;
        fn ncclCommInitRank(comm: *mut Handle, world: c_int, id: UniqueId, rank: c_int) -> c_int;
        fn ncclCommGetAsyncError(comm: Handle, error: *mut c_int) -> c_int;
        fn ncclCommAbort(comm: Handle) -> c_int;
        fn ncclCommDestroy(comm: Handle) -> c_int;
        fn ncclGetErrorString(code: c_int) -> *const c_char;
        fn ncclGetLastError(comm: Handle) -> *const c_char;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
        fn ncclAllReduce(
            from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, operation: c_int, comm: Handle, stream: Handle,
        ) -> c_int;
    }
}

const IN_PROGRESS: c_int = 7;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// A loaded NCCL.
pub(super) struct Nccl {
    api: Api,
    path: PathBuf,
    version: c_int,
}

/// A communicator's handle. NCCL takes it from any thread.
#[derive(Clone, Copy)]
pub(super) struct CommHandle(Handle);
// SAFETY: an opaque handle. Work is issued by one thread at a time; to ask for errors and to abort is meant for other threads.
unsafe impl Send for CommHandle {}
// SAFETY: as above.
unsafe impl Sync for CommHandle {}

impl Nccl {
    /// NCCL from wherever CUDA's libraries are searched for, loaded once: its own threads may outlive every communicator, so that it is never unloaded.
    pub(super) fn get() -> Result<&'static Self> {
        static NCCL: OnceLock<Nccl> = OnceLock::new();
        if let Some(nccl) = NCCL.get() {
            return Ok(nccl);
        }
        let nccl = Self::load()?;
        Ok(NCCL.get_or_init(|| nccl))
    }

    fn load() -> Result<Self> {
        let loaded = libraries::find("nccl", &[2]).map_err(|error| match error {
            Error::Library { library, reason, searched } => {
                let reason = format!("{reason}; `pip install nvidia-nccl-cu12`, or nvidia-nccl-cu13 for CUDA 13, has it");
                Error::Library { library, reason, searched }
            }
            other => other,
        })?;
        let path = loaded.path.clone();
        let mut nccl = Nccl { api: Api::load(loaded)?, path, version: 0 };
        // SAFETY: writes one number to a live variable.
        let code = unsafe { (nccl.api.ncclGetVersion)(&mut nccl.version) };
        nccl.check("ncclGetVersion", code)?;
        Ok(nccl)
    }

    /// Where it is and what version.
    pub(super) fn describe(&self) -> String {
        let v = self.version;
        format!("{} (version {}.{}.{})", self.path.display(), v / 10000, v / 100 % 100, v % 100)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both give a string that the library keeps, or null. The last error needs no communicator.
        let texts = unsafe { [(self.api.ncclGetErrorString)(code), (self.api.ncclGetLastError)(std::ptr::null_mut())] };
        let [name, text] = texts.map(|text| match text.is_null() {
            true => String::new(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string(),
        });
        Err(Error::Cuda { call, code, name, text: if text.is_empty() { self.describe() } else { text } })
    }

    /// Becomes one of `world` processes. Waits for all of them, without end; the device's context must be current.
    pub(super) fn join(&self, rank: usize, world: usize) -> Result<CommHandle> {
        let (mut id, mut comm) = (UniqueId([0; 128]), std::ptr::null_mut());
        // SAFETY: both write to live variables of the declared sizes.
        unsafe {
            self.check("ncclGetUniqueId", (self.api.ncclGetUniqueId)(&mut id))?;
            self.check("ncclCommInitRank", (self.api.ncclCommInitRank)(&mut comm, world as c_int, id, rank as c_int))?;
        }
        Ok(CommHandle(comm))
    }

    /// Issues the sums of f32 buffers, each an address and a length, over all processes in place, as one group on a stream.
    pub(super) fn sum(&self, comm: CommHandle, buffers: &[(u64, usize)], stream: Handle) -> Result<()> {
        // SAFETY: the caller's buffers are device memory of at least that length, which lives until the stream has done the work. A group that was
        // begun is ended, also after a failure inside.
        unsafe {
            self.check("ncclGroupStart", (self.api.ncclGroupStart)())?;
            let issued = buffers.iter().try_for_each(|(address, count)| {
                let buffer = *address as usize as *mut c_void;
                self.check("ncclAllReduce", (self.api.ncclAllReduce)(buffer, buffer, *count, FLOAT32, SUM, comm.0, stream))
            });
            let ended = self.check("ncclGroupEnd", (self.api.ncclGroupEnd)());
            issued.and(ended)
        }
    }

    /// What went wrong since, if anything did: another process that is gone, a link that broke.
    pub(super) fn asynchronous_error(&self, comm: CommHandle) -> Result<()> {
        let mut code = 0;
        // SAFETY: the communicator was neither destroyed nor aborted; writes to a live variable.
        self.check("ncclCommGetAsyncError", unsafe { (self.api.ncclCommGetAsyncError)(comm.0, &mut code) })?;
        if code == IN_PROGRESS { Ok(()) } else { self.check("NCCL", code) }
    }

    /// Makes the device end what it does for the communicator, and frees it, which waits for the graphs that it is in. Nothing may use it any more.
    pub(super) fn abort(&self, comm: CommHandle) -> Result<()> {
        // SAFETY: called once, and not after `destroy`.
        self.check("ncclCommAbort", unsafe { (self.api.ncclCommAbort)(comm.0) })
    }

    /// Frees the communicator after its work is done and its graphs are gone. Nothing may use it any more.
    pub(super) fn destroy(&self, comm: CommHandle) -> Result<()> {
        // SAFETY: called once, and not after `abort`.
        self.check("ncclCommDestroy", unsafe { (self.api.ncclCommDestroy)(comm.0) })
    }
}

/// Where NCCL is and what version, with all functions that training on several GPUs needs. An error says what to install.
pub fn nccl_report() -> Result<String> {
    Nccl::get().map(Nccl::describe)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both need no GPU, only NCCL's wheel: `ARMT_CUDA_PATH` can name a folder that has it.
    fn nccl() -> Option<&'static Nccl> {
        match Nccl::get() {
            Ok(nccl) => Some(nccl),
            Err(why) => {
                assert!(why.to_string().contains("pip install nvidia-nccl-cu12"), "{why}");
                println!("skipped: {why}");
                None
            }
        }
    }

    #[test]
    fn every_function_is_in_the_library_and_it_tells_its_version() {
        let Some(nccl) = nccl() else { return };
        assert!(nccl.version > 21300, "{}", nccl.version);
        assert!(nccl.describe().contains("(version 2."), "{}", nccl.describe());
    }

    #[test]
    fn what_nccl_refuses_is_an_error_in_its_words() {
        let Some(nccl) = nccl() else { return };
        let error = nccl.asynchronous_error(CommHandle(std::ptr::null_mut())).unwrap_err();
        assert!(matches!(&error, Error::Cuda { code: 4, .. }), "{error}");
        assert!(error.to_string().contains("invalid argument"), "{error}");
    }
}
