//! NVIDIA's management library, where the system has it: how fast the clocks run while the device works.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::libraries::{self, c_api};

type Handle = *mut c_void;

c_api! {
    /// Functions of `libnvidia-ml`, which comes with the driver.
    Api {
        fn nvmlInit_v2() -> c_int;
        fn nvmlShutdown() -> c_int;
        fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, device: *mut Handle) -> c_int;
        fn nvmlDeviceGetClockInfo(device: Handle, clock: c_int, mhz: *mut c_uint) -> c_int;
        fn nvmlDeviceGetPowerUsage(device: Handle, milliwatts: *mut c_uint) -> c_int;
    }
}

const CLOCK_SM: c_int = 1;
const CLOCK_MEMORY: c_int = 2;

/// A device's clocks and power at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clocks {
    /// Of the multiprocessors, in MHz.
    pub sm_mhz: u32,
    /// Of the memory, in MHz.
    pub memory_mhz: u32,
    /// Power that is drawn.
    pub watts: f32,
}

/// The library with one device found.
pub(super) struct Nvml {
    api: Api,
    device: Handle,
}

// SAFETY: NVML may be called from any thread, and the handle is only a name for the device.
unsafe impl Send for Nvml {}
// SAFETY: as above.
unsafe impl Sync for Nvml {}

impl Nvml {
    /// The device at a PCI address; `None` where the library or the device is not there.
    pub(super) fn find(bus: &CStr) -> Option<Self> {
        let api = Api::load(libraries::system(&["libnvidia-ml.so.1", "libnvidia-ml.so"]).ok()?).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: the library is initialised before it is asked; the address is a C string, the handle a live variable.
        unsafe {
            if (api.nvmlInit_v2)() != 0 {
                return None;
            }
            if (api.nvmlDeviceGetHandleByPciBusId_v2)(bus.as_ptr(), &mut device) != 0 {
                (api.nvmlShutdown)();
                return None;
            }
        }
        Some(Nvml { api, device })
    }

    /// Clocks now; `None` where the system does not show them.
    pub(super) fn clocks(&self) -> Option<Clocks> {
        let ask = |f: &dyn Fn(*mut c_uint) -> c_int| {
            let mut value = 0;
            (f(&mut value) == 0).then_some(value)
        };
        let (api, device) = (&self.api, self.device);
        // SAFETY: the device was found by this library; each call writes one number to a live variable.
        let clock = |kind| ask(&|value| unsafe { (api.nvmlDeviceGetClockInfo)(device, kind, value) });
        // SAFETY: as above.
        let power = ask(&|value| unsafe { (api.nvmlDeviceGetPowerUsage)(device, value) })?;
        Some(Clocks { sm_mhz: clock(CLOCK_SM)?, memory_mhz: clock(CLOCK_MEMORY)?, watts: power as f32 / 1e3 })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: undoes the initialisation in `find`.
        unsafe { (self.api.nvmlShutdown)() };
    }
}
