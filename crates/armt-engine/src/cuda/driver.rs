//! The CUDA driver: one context and one stream per device.
//!
//! Own declarations of the few functions we call rather than a binding crate: they are the same in CUDA 12 and 13, and each missing
//! library or function is an error that can be shown.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::backlog::{AHEAD_VARIABLE, Backlog};
use super::libraries::{self, c_api};
use super::turns::{Turn, Turns};
use crate::error::{Error, Result};

type Handle = *mut c_void;

c_api! {
    /// Functions of `libcuda`, all of CUDA 12.0 or older.
    Driver {
        fn cuInit(flags: c_uint) -> c_int;
        fn cuDriverGetVersion(version: *mut c_int) -> c_int;
        fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int;
        fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int;
        fn cuDeviceGetCount(count: *mut c_int) -> c_int;
        fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int;
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int;
        fn cuDeviceGetPCIBusId(bus: *mut c_char, len: c_int, device: c_int) -> c_int;
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
        fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> c_int;
        fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int;
        fn cuCtxSetCurrent(context: Handle) -> c_int;
        fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> c_int;
        fn cuStreamDestroy_v2(stream: Handle) -> c_int;
        fn cuStreamSynchronize(stream: Handle) -> c_int;
        fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> c_int;
        fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int;
        fn cuMemFree_v2(address: u64) -> c_int;
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
        fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) -> c_int;
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) -> c_int;
        fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) -> c_int;
        fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) -> c_int;
        fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Handle) -> c_int;
        fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> c_int;
        fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> c_int;
        fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) -> c_int;
        fn cuLaunchKernel(
            function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void,
        ) -> c_int;
        fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) -> c_int;
        fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> c_int;
        fn cuGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, flags: u64) -> c_int;
        fn cuGraphLaunch(exec: Handle, stream: Handle) -> c_int;
        fn cuGraphExecDestroy(exec: Handle) -> c_int;
        fn cuGraphDestroy(graph: Handle) -> c_int;
        fn cuEventCreate(event: *mut Handle, flags: c_uint) -> c_int;
        fn cuEventRecord(event: Handle, stream: Handle) -> c_int;
        fn cuEventSynchronize(event: Handle) -> c_int;
        fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) -> c_int;
        fn cuEventDestroy_v2(event: Handle) -> c_int;
    }
}

const OLDEST_DRIVER: c_int = 12000;
const OUT_OF_MEMORY: c_int = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_NO_TIMING: c_uint = 2;
const CAPTURE_RELAXED: c_int = 2;
const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;
const FUNCTION_MAX_DYNAMIC_SHARED: c_int = 8;
/// Bytes from the host of which a copy is made while work waits for a kernel, such as the tokens of a batch; for more, such as weights, it is
/// waited.
const MOST_KEPT: usize = 1 << 20;
/// What a kernel gets without asking for more.
const DEFAULT_SHARED: usize = 48 << 10;

/// Loads and initialises the driver, once; later calls get the first call's answer.
fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let driver = Driver::load(libraries::system(&["libcuda.so.1", "libcuda.so"])?)?;
    // SAFETY: plain calls into the driver with pointers to live variables.
    unsafe {
        driver.check("cuInit", (driver.cuInit)(0)).map_err(|e| Error::NoCuda(e.to_string()))?;
        let mut version = 0;
        driver.check("cuDriverGetVersion", (driver.cuDriverGetVersion)(&mut version))?;
        if version < OLDEST_DRIVER {
            return Err(Error::DriverTooOld { needed: "12.0", got: version_text(version) });
        }
    }
    Ok(DRIVER.get_or_init(|| driver))
}

/// How many devices the driver shows.
pub(super) fn device_count() -> Result<usize> {
    let (driver, mut count) = (driver()?, 0);
    // SAFETY: writes to a live variable.
    driver.check("cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    Ok(count as usize)
}

fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

impl Driver {
    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = |f: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: the driver writes a pointer to a static string, or leaves it null.
            unsafe {
                f(code, &mut text);
                if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
            }
        };
        Err(Error::Cuda { call, code, name: text(self.cuGetErrorName), text: text(self.cuGetErrorString) })
    }
}

/// One device's context and its stream. All work of a device goes through its one stream, in the order in which threads issue it.
pub(crate) struct Context {
    driver: &'static Driver,
    ordinal: usize,
    device: c_int,
    context: Handle,
    stream: Handle,
    turns: Turns,
    backlog: Backlog<Context>,
    /// Seen by the thread that has the turn.
    capturing: AtomicBool,
    /// The device's name.
    pub(crate) name: String,
    /// Compute capability, major and minor.
    pub(crate) capability: (i32, i32),
    /// Number of multiprocessors.
    pub(crate) multiprocessors: usize,
    /// Bytes of its memory.
    pub(crate) bytes: usize,
    /// Newest CUDA version that the driver runs, as `1000 * major + 10 * minor`.
    pub(crate) driver_version: i32,
}

// SAFETY: CUDA contexts and streams may be used from any thread; every method makes the context current on the calling thread first.
unsafe impl Send for Context {}
// SAFETY: as above; `turns` puts calls on the stream in order.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        let (driver, count) = (driver()?, device_count()?);
        if ordinal >= count {
            return Err(Error::NoCuda(format!("device {ordinal} was asked for, but the driver shows {count} device(s)")));
        }
        // SAFETY: plain calls into the initialised driver with pointers to live variables of the declared sizes.
        unsafe {
            let mut device = 0;
            driver.check("cuDeviceGet", (driver.cuDeviceGet)(&mut device, ordinal as c_int))?;
            let attribute = |id| {
                let mut value = 0;
                driver.check("cuDeviceGetAttribute", (driver.cuDeviceGetAttribute)(&mut value, id, device)).map(|()| value)
            };
            let mut name = [0 as c_char; 256];
            driver.check("cuDeviceGetName", (driver.cuDeviceGetName)(name.as_mut_ptr(), 255, device))?;
            let mut driver_version = 0;
            driver.check("cuDriverGetVersion", (driver.cuDriverGetVersion)(&mut driver_version))?;
            let capability = (attribute(ATTRIBUTE_CAPABILITY_MAJOR)?, attribute(ATTRIBUTE_CAPABILITY_MINOR)?);
            if capability < (8, 0) {
                return Err(Error::NoCuda(format!(
                    "device {ordinal} has compute capability {}.{}, but bf16 needs 8.0 or newer",
                    capability.0, capability.1
                )));
            }
            let multiprocessors = attribute(ATTRIBUTE_MULTIPROCESSORS)? as usize;
            let mut context = std::ptr::null_mut();
            driver.check("cuDevicePrimaryCtxRetain", (driver.cuDevicePrimaryCtxRetain)(&mut context, device))?;
            driver.check("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(context))?;
            let (mut free, mut bytes) = (0, 0);
            driver.check("cuMemGetInfo", (driver.cuMemGetInfo_v2)(&mut free, &mut bytes))?;
            let mut stream = std::ptr::null_mut();
            driver.check("cuStreamCreate", (driver.cuStreamCreate)(&mut stream, STREAM_NON_BLOCKING))?;
            Ok(Context {
                driver,
                ordinal,
                device,
                context,
                stream,
                turns: Turns::default(),
                backlog: Backlog::new(std::env::var_os(AHEAD_VARIABLE).is_some_and(|value| value == "off")),
                capturing: AtomicBool::new(false),
                name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
                capability,
                multiprocessors,
                bytes,
                driver_version,
            })
        }
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(crate) fn describe(&self) -> String {
        format!("cuda:{} ({})", self.ordinal, self.name)
    }

    /// The device's PCI address.
    pub(super) fn bus(&self) -> Result<CString> {
        let mut bus = [0 as c_char; 32];
        // SAFETY: the driver writes a C string of at most the given length.
        unsafe {
            self.driver.check("cuDeviceGetPCIBusId", (self.driver.cuDeviceGetPCIBusId)(bus.as_mut_ptr(), 31, self.device))?;
            Ok(CStr::from_ptr(bus.as_ptr()).to_owned())
        }
    }

    pub(crate) fn stream(&self) -> Handle {
        self.stream
    }

    /// Waits for the calling thread's turn to issue work: for work that takes several calls.
    pub(super) fn turn(&self) -> Turn<'_> {
        self.turns.take()
    }

    /// Does work on the stream, in its turn: at once, or after what waits for a kernel. `ready` says that it needs none that is still being
    /// compiled.
    pub(super) fn issue(&self, ready: bool, work: impl FnOnce(&Context) -> Result<()> + Send + 'static) -> Result<()> {
        let _turn = self.turn();
        self.backlog.issue(self, ready, work)
    }

    /// Issues all that waits for a kernel.
    fn catch_up(&self) -> Result<()> {
        let _turn = self.turn();
        self.backlog.catch_up(self)
    }

    /// Drops what waits: the device ends.
    pub(super) fn abandon(&self) {
        self.backlog.clear();
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    /// Makes a driver call with this device's context current.
    fn call(&self, name: &'static str, f: impl FnOnce(&Driver) -> c_int) -> Result<()> {
        // SAFETY: the context was retained at `open` and is released only in `drop`.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.cuCtxSetCurrent)(self.context) })?;
        self.driver.check(name, f(self.driver))
    }

    /// Makes the context current, for libraries that use it.
    pub(crate) fn bind(&self) -> Result<()> {
        self.call("cuCtxSetCurrent", |_| 0)
    }

    /// Device memory, or `None` if there is not enough.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Option<usize>> {
        let mut address = 0;
        // SAFETY: writes the address of a new allocation to a live variable.
        match self.call("cuMemAlloc", |d| unsafe { (d.cuMemAlloc_v2)(&mut address, bytes) }) {
            Ok(()) => Ok(Some(address as usize)),
            Err(Error::Cuda { code: OUT_OF_MEMORY, .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub(crate) fn free(&self, address: usize) {
        // What waits may use it. If that fails, nothing will.
        let _ = self.catch_up();
        // SAFETY: `address` came from `alloc` and no work that uses it can be issued any more. A failure here means that the
        // context is gone, and the memory with it.
        let _ = self.call("cuMemFree", |d| unsafe { (d.cuMemFree_v2)(address as u64) });
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes to two live variables.
        self.call("cuMemGetInfo", |d| unsafe { (d.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((free, total))
    }

    fn refuse_in_capture(&self, what: &'static str) -> Result<()> {
        if self.is_capturing() {
            let message = "copies between host and device, and waiting, cannot be part of a captured graph";
            return Err(Error::Capture { op: what, message });
        }
        Ok(())
    }

    /// Copies host bytes to the device. The slice may be reused when this returns.
    pub(crate) fn upload<T: Copy + Send + 'static>(&self, to: u64, from: &[T]) -> Result<()> {
        let _turn = self.turn();
        self.refuse_in_capture("upload")?;
        let bytes = std::mem::size_of_val(from);
        if bytes > MOST_KEPT {
            self.catch_up()?;
        }
        let copy = move |context: &Context, from: &[T]| {
            // SAFETY: the caller's destination holds `bytes` bytes. The source is pageable memory, which the driver stages before
            // it returns.
            context.call("cuMemcpyHtoD", |d| unsafe { (d.cuMemcpyHtoDAsync_v2)(to, from.as_ptr().cast(), bytes, context.stream) })
        };
        if !self.backlog.waits() {
            return copy(self, from);
        }
        let from = from.to_vec();
        self.issue(true, move |context| copy(context, &from))
    }

    /// Copies device bytes to the host and waits for them.
    pub(crate) fn download<T: Copy>(&self, from: u64, to: &mut [T]) -> Result<()> {
        let _turn = self.turn();
        self.refuse_in_capture("download")?;
        self.catch_up()?;
        let bytes = std::mem::size_of_val(to);
        // SAFETY: the caller's source holds `bytes` bytes; the destination outlives the synchronisation below.
        self.call("cuMemcpyDtoH", |d| unsafe { (d.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, bytes, self.stream) })?;
        self.synchronize()
    }

    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: both are device allocations of at least `bytes` bytes that live until work issued later has been ordered.
        self.issue(true, move |c| c.call("cuMemcpyDtoD", |d| unsafe { (d.cuMemcpyDtoDAsync_v2)(to, from, bytes, c.stream) }))
    }

    pub(crate) fn zero(&self, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: a device allocation of at least `bytes` bytes.
        self.issue(true, move |c| c.call("cuMemsetD8", |d| unsafe { (d.cuMemsetD8Async)(to, 0, bytes, c.stream) }))
    }

    /// Sets `count` 32-bit words.
    pub(crate) fn fill(&self, to: u64, bits: u32, count: usize) -> Result<()> {
        // SAFETY: a device allocation of at least `4 * count` bytes.
        self.issue(true, move |c| c.call("cuMemsetD32", |d| unsafe { (d.cuMemsetD32Async)(to, bits, count, c.stream) }))
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let _turn = self.turn();
        self.refuse_in_capture("synchronize")?;
        self.catch_up()?;
        // SAFETY: the stream lives as long as `self`.
        self.call("cuStreamSynchronize", |d| unsafe { (d.cuStreamSynchronize)(self.stream) })
    }

    /// A kernel of compiled code, which stays loaded as long as the context.
    pub(super) fn load(&self, code: &[u8], name: &CStr) -> Result<Function> {
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the code is a complete cubin.
        self.call("cuModuleLoadData", |d| unsafe { (d.cuModuleLoadData)(&mut module, code.as_ptr().cast()) })?;
        // SAFETY: the module was just loaded.
        self.call("cuModuleGetFunction", |d| unsafe { (d.cuModuleGetFunction)(&mut function, module, name.as_ptr()) })?;
        Ok(Function(function))
    }

    /// Lets a kernel take more than the default 48 KiB of shared memory.
    pub(super) fn allow_shared(&self, function: Function, bytes: usize) -> Result<()> {
        if bytes <= DEFAULT_SHARED {
            return Ok(());
        }
        // SAFETY: the function belongs to a loaded module.
        self.call("cuFuncSetAttribute", |d| unsafe {
            (d.cuFuncSetAttribute)(function.0, FUNCTION_MAX_DYNAMIC_SHARED, bytes as c_int)
        })
    }

    /// Launches a kernel. Each argument is given as the 8 bytes that start with its value.
    pub(super) fn launch(&self, function: Function, grid: (u32, u32, u32), block: u32, shared: usize, args: &[u64]) -> Result<()> {
        let mut pointers: Vec<*mut c_void> = args.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast()).collect();
        let _turn = self.turn();
        // SAFETY: the driver copies the arguments during the call and writes to none, reading as many bytes of each as the kernel declares: at
        // most 8. That number and types agree with the kernel's declaration is checked by running every kernel in the GPU tests.
        self.call("cuLaunchKernel", |d| unsafe {
            let null = std::ptr::null_mut();
            let (x, y, z) = grid;
            (d.cuLaunchKernel)(function.0, x, y, z, block, 1, 1, shared as c_uint, self.stream, pointers.as_mut_ptr(), null)
        })
    }

    /// Records what `f` issues instead of running it. Other threads wait until it is done.
    pub(super) fn capture<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<(GraphHandle, R)> {
        let _turn = self.turn();
        if self.is_capturing() {
            return Err(Error::Capture { op: "capture", message: "a capture is already under way on this device" });
        }
        self.backlog.straight(self, || {
            self.capturing.store(true, Ordering::Relaxed);
            let result = self.capture_at_once(f);
            self.capturing.store(false, Ordering::Relaxed);
            result
        })
    }

    fn capture_at_once<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<(GraphHandle, R)> {
        // SAFETY: the stream lives as long as `self`. Relaxed mode lets the pool allocate meanwhile, which is not stream work.
        self.call("cuStreamBeginCapture", |d| unsafe { (d.cuStreamBeginCapture_v2)(self.stream, CAPTURE_RELAXED) })?;
        let result = f();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, whatever `f` returned.
        let ended = self.call("cuStreamEndCapture", |d| unsafe { (d.cuStreamEndCapture)(self.stream, &mut graph) });
        let graph = GraphOwner { context: self, graph };
        let value = result?;
        ended?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was just captured and is complete.
        self.call("cuGraphInstantiate", |d| unsafe { (d.cuGraphInstantiateWithFlags)(&mut exec, graph.graph, 0) })?;
        Ok((GraphHandle(exec), value))
    }

    pub(super) fn launch_graph(&self, graph: &GraphHandle) -> Result<()> {
        let _turn = self.turn();
        self.catch_up()?;
        // SAFETY: the handle is destroyed only by its owner's `drop`.
        self.call("cuGraphLaunch", |d| unsafe { (d.cuGraphLaunch)(graph.0, self.stream) })
    }

    pub(super) fn destroy_graph(&self, graph: &GraphHandle) {
        // SAFETY: called once, from the owner's `drop`.
        let _ = self.call("cuGraphExecDestroy", |d| unsafe { (d.cuGraphExecDestroy)(graph.0) });
    }

    /// Milliseconds of device time that the work issued by `f` takes. Other threads wait until it is done.
    pub(super) fn time(&self, f: impl FnOnce() -> Result<()>) -> Result<f32> {
        let _turn = self.turn();
        let start = Event::new(self, 0)?;
        let end = Event::new(self, 0)?;
        self.backlog.straight(self, || {
            start.record(self.stream)?;
            f()?;
            end.record(self.stream)
        })?;
        let mut milliseconds = 0.0;
        // SAFETY: both events live and the second has been recorded.
        self.call("cuEventSynchronize", |d| unsafe { (d.cuEventSynchronize)(end.event) })?;
        // SAFETY: as above.
        self.call("cuEventElapsedTime", |d| unsafe { (d.cuEventElapsedTime)(&mut milliseconds, start.event, end.event) })?;
        Ok(milliseconds)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nothing that uses the stream or the context outlives `self`. Failures mean that the context is gone already.
        let _ = self.call("cuStreamDestroy", |d| unsafe { (d.cuStreamDestroy_v2)(self.stream) });
        // SAFETY: as above.
        let _ = self.call("cuDevicePrimaryCtxRelease", |d| unsafe { (d.cuDevicePrimaryCtxRelease_v2)(self.device) });
    }
}

/// A second stream of a device, whose work runs beside the first's. A capture of the first takes in what this one is given between
/// [`SideStream::follow`] and [`SideStream::lead`].
pub(super) struct SideStream {
    context: Arc<Context>,
    stream: Handle,
}

// SAFETY: as of `Context`; all calls are made in the context's turns.
unsafe impl Send for SideStream {}
// SAFETY: as above.
unsafe impl Sync for SideStream {}

impl SideStream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes a handle to a live variable.
        context.call("cuStreamCreate", |d| unsafe { (d.cuStreamCreate)(&mut stream, STREAM_NON_BLOCKING) })?;
        Ok(SideStream { context: context.clone(), stream })
    }

    pub(super) fn handle(&self) -> Handle {
        self.stream
    }

    /// What this stream is given from now on waits for what the device's own has been given so far.
    pub(super) fn follow(&self) -> Result<()> {
        self.order(self.context.stream, self.stream)
    }

    /// What the device's own stream is given from now on waits for what this one has been given so far.
    pub(super) fn lead(&self) -> Result<()> {
        self.order(self.stream, self.context.stream)
    }

    fn order(&self, before: Handle, after: Handle) -> Result<()> {
        let _turn = self.context.turn();
        self.context.catch_up()?;
        let event = Event::new(&self.context, EVENT_NO_TIMING)?;
        event.record(before)?;
        // SAFETY: event and stream live. The driver keeps the event for as long as the stream waits for it.
        self.context.call("cuStreamWaitEvent", |d| unsafe { (d.cuStreamWaitEvent)(after, event.event, 0) })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; the driver lets its work end first.
        let _ = self.context.call("cuStreamDestroy", |d| unsafe { (d.cuStreamDestroy_v2)(self.stream) });
    }
}

/// A kernel.
#[derive(Clone, Copy)]
pub(super) struct Function(Handle);
// SAFETY: an opaque handle that any thread may pass to the driver.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// An instantiated graph.
pub(super) struct GraphHandle(Handle);
// SAFETY: an opaque handle; launches go through the context's one stream.
unsafe impl Send for GraphHandle {}
// SAFETY: as above.
unsafe impl Sync for GraphHandle {}

struct GraphOwner<'a> {
    context: &'a Context,
    graph: Handle,
}

impl Drop for GraphOwner<'_> {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: the captured graph is owned here alone; what was instantiated from it does not need it.
            let _ = self.context.call("cuGraphDestroy", |d| unsafe { (d.cuGraphDestroy)(self.graph) });
        }
    }
}

struct Event<'a> {
    context: &'a Context,
    event: Handle,
}

impl<'a> Event<'a> {
    fn new(context: &'a Context, flags: c_uint) -> Result<Self> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes a handle to a live variable.
        context.call("cuEventCreate", |d| unsafe { (d.cuEventCreate)(&mut event, flags) })?;
        Ok(Event { context, event })
    }

    fn record(&self, stream: Handle) -> Result<()> {
        // SAFETY: event and stream live.
        self.context.call("cuEventRecord", |d| unsafe { (d.cuEventRecord)(self.event, stream) })
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = self.context.call("cuEventDestroy", |d| unsafe { (d.cuEventDestroy_v2)(self.event) });
    }
}
