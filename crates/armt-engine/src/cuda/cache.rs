//! Compiled kernels on disk.
//!
//! An entry's name is a hash of everything that decides the code; its content carries a checksum. One that is missing, truncated or altered
//! counts as not there.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names the folder of compiled kernels. Default: `armt/kernels` in `XDG_CACHE_HOME` or `~/.cache`.
pub(super) const CACHE_VARIABLE: &str = "ARMT_CACHE_DIR";

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

/// Entries are `MAGIC, checksum of the code, code`.
pub(super) struct Cache {
    pub(super) folder: Option<PathBuf>,
}

const MAGIC: &[u8; 8] = b"ARMTKRN1";

impl Cache {
    pub(super) fn new() -> Self {
        let named = std::env::var_os(CACHE_VARIABLE).map(PathBuf::from);
        let standard = || {
            let base = std::env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
            base.map(|b| b.join("armt"))
        };
        Cache { folder: named.or_else(standard).map(|f| f.join("kernels")) }
    }

    pub(super) fn get(&self, name: &str) -> Option<Vec<u8>> {
        let entry = std::fs::read(self.folder.as_ref()?.join(name)).ok()?;
        let (head, code) = entry.split_at_checked(16)?;
        let sound = head[..8] == MAGIC[..] && head[8..] == hash(&[code]).to_le_bytes() && !code.is_empty();
        if !sound {
            tracing::warn!("kernel cache entry {name} is damaged; compiling it again");
        }
        sound.then(|| code.to_vec())
    }

    /// Written beside, under a name that no other process or thread has, and renamed: no reader ever sees half an entry, and of several
    /// writers the last one's stays.
    pub(super) fn put(&self, name: &str, code: &[u8]) -> std::io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let Some(folder) = &self.folder else { return Ok(()) };
        std::fs::create_dir_all(folder)?;
        let beside = folder.join(format!("{name}.{}.{}", std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed)));
        let entry = [&MAGIC[..], &hash(&[code]).to_le_bytes(), code].concat();
        std::fs::write(&beside, entry).and_then(|()| std::fs::rename(&beside, folder.join(name))).inspect_err(|_| {
            let _ = std::fs::remove_file(&beside);
        })
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
    fn writers_at_the_same_time_leave_one_whole_entry_and_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(dir.path().join("kernels")) };
        let codes: Vec<Vec<u8>> = (1..=4u8).map(|writer| vec![writer; 100_000 * usize::from(writer)]).collect();
        cache.put("k", &codes[0]).unwrap();
        std::thread::scope(|scope| {
            for code in &codes {
                scope.spawn(|| (0..50).for_each(|_| cache.put("k", code).unwrap()));
            }
            for _ in 0..200 {
                assert!(codes.contains(&cache.get("k").expect("half an entry was seen")));
            }
        });
        assert_eq!(std::fs::read_dir(dir.path().join("kernels")).unwrap().count(), 1);
    }
}
