//! What the machine could hold: every size that a user or a file can name is checked against it before anything is allocated, so that a
//! number that is far too large is an error with its name and not the end of the program. And in what pages.

use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Where the system does not say how much memory it has.
const UNKNOWN: usize = 1 << 40;

/// Bytes of memory that a program may have here: the machine's and its swap, or the limit of the group of processes that it is in.
pub fn memory() -> usize {
    static MEMORY: OnceLock<usize> = OnceLock::new();
    *MEMORY.get_or_init(|| {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let machine = read("/proc/meminfo").and_then(|text| total(&text)).unwrap_or(UNKNOWN);
        let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        // A group without a limit says "max", or a number above any machine's.
        limits.iter().filter_map(|path| read(path)?.trim().parse::<usize>().ok()).fold(machine, usize::min)
    })
}

/// Memory and swap of `/proc/meminfo`, in bytes.
fn total(text: &str) -> Option<usize> {
    let kib = |key: &str| text.lines().find_map(|l| l.strip_prefix(key))?.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok();
    let memory = kib("MemTotal:")?;
    memory.checked_add(kib("SwapTotal:").unwrap_or(0))?.checked_mul(1024)
}

/// Bytes of a huge page.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Asks the system to hold some memory in huge pages, so that the processor finds the places of more bytes at a time (docs/LOG.md). Where the system has none, nothing
/// changes.
///
/// # Safety
///
/// The memory is the caller's and nothing points to it yet.
pub(crate) unsafe fn prefer_huge_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn madvise(start: *mut u8, bytes: usize, advice: i32) -> i32;
        }
        const MADV_HUGEPAGE: i32 = 14;
        // SAFETY: advice about the caller's own memory changes nothing that it holds.
        let _ = unsafe { madvise(start, bytes, MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Refuses something of so many bytes, the product of `sizes`, if the machine could not hold it. `what` is the name of the size to blame.
pub fn expect_room(what: &str, sizes: &[usize]) -> Result<()> {
    let bytes = sizes.iter().try_fold(1usize, |bytes, size| bytes.checked_mul(*size));
    if bytes.is_some_and(|bytes| bytes <= memory()) || sizes.contains(&0) {
        return Ok(());
    }
    let asked = bytes.map_or_else(|| "more bytes than can be counted".to_string(), |bytes| format!("{bytes} bytes"));
    Err(Error::TooLarge { what: what.into(), asked, memory: memory() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_could_hold_is_taken_and_what_it_could_not_is_refused_by_name() {
        assert_eq!(total("MemTotal:  2 kB\nMemFree: 1 kB\nSwapTotal:   3 kB\n"), Some(5 * 1024));
        assert_eq!((total("MemTotal: x kB"), total("")), (None, None));
        assert!(expect_room("batch", &[1000, 4]).is_ok() && expect_room("batch", &[0, usize::MAX, usize::MAX]).is_ok());
        for sizes in [&[usize::MAX][..], &[1 << 40, 1 << 40], &[memory(), 2]] {
            let error = expect_room("batch", sizes).unwrap_err().to_string();
            assert!(error.contains("batch") && error.contains("bytes"), "{error}");
        }
    }
}
