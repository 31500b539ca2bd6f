//! TensorBoard event files, written by hand: two small messages do not pay for a protobuf library.
//!
//! ```text
//! file   = record*
//! record = length u64 | masked crc of length u32 | message | masked crc of message u32      (little-endian)
//! mask(c) = ((c >> 15) | (c << 17)) + 0xa282ead8, of CRC32C
//!
//! Event      { 1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary, 7: SessionLog }
//! Summary    { 1: repeated Value { 1: string tag, 2: float simple_value } }
//! SessionLog { 1: enum status, START = 1 }
//! ```
//!
//! A record is one write to the file, so that a reader sees it at once and a crash loses none before it.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};

/// Writes scalars to one event file.
#[derive(Debug)]
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

impl EventWriter {
    /// A new file `events.out.tfevents.<seconds>.armt` in the folder, which is made where it is missing. Files of earlier runs stay:
    /// TensorBoard reads them in the order of their names.
    pub fn create(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.into(), source })?;
        let mut seconds = now() as u64;
        let (file, path) = loop {
            let path = folder.join(format!("events.out.tfevents.{seconds:010}.armt"));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => break (file, path),
                // A run resumed within the second it was begun in.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => seconds += 1,
                Err(source) => return Err(Error::Io { path, source }),
            }
        };
        let mut writer = EventWriter { file, path };
        writer.write(&version_event(now()))?;
        Ok(writer)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Says that a run goes on after `step`: TensorBoard forgets what earlier files hold of later steps.
    pub fn resume_after(&mut self, step: u64) -> Result<()> {
        self.write(&restart_event(now(), step + 1))
    }

    /// Writes values of one step under their names. They are in the file when this returns.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f32)]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        self.write(&scalar_event(now(), step, values))
    }

    fn write(&mut self, event: &[u8]) -> Result<()> {
        self.file.write_all(&record(event)).map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64())
}

fn version_event(time: f64) -> Vec<u8> {
    let mut event = head(time, 0);
    bytes_field(&mut event, 3, b"brain.Event:2");
    event
}

fn restart_event(time: f64, step: u64) -> Vec<u8> {
    let mut event = head(time, step);
    bytes_field(&mut event, 7, &[1 << 3, 1]);
    event
}

fn scalar_event(time: f64, step: u64, values: &[(&str, f32)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, number) in values {
        let mut value = Vec::new();
        bytes_field(&mut value, 1, tag.as_bytes());
        value.push(2 << 3 | FIXED32);
        value.extend(number.to_le_bytes());
        bytes_field(&mut summary, 1, &value);
    }
    let mut event = head(time, step);
    bytes_field(&mut event, 5, &summary);
    event
}

/// Protobuf's kinds of fields.
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// The fields that all events have. As protobuf does, a step of 0 is left out.
fn head(time: f64, step: u64) -> Vec<u8> {
    let mut event = vec![1 << 3 | FIXED64];
    event.extend(time.to_le_bytes());
    if step > 0 {
        event.push(2 << 3);
        varint(&mut event, step);
    }
    event
}

/// A field of bytes: a string or a message.
fn bytes_field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    out.push(number << 3 | BYTES);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// Seven bits a byte, the lowest first; the high bit says that more follow.
fn varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A message with its length and check sums.
fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(message.len() + 16);
    out.extend(length);
    out.extend(masked(crc32c(&length)).to_le_bytes());
    out.extend(message);
    out.extend(masked(crc32c(message)).to_le_bytes());
    out
}

fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC32 with Castagnoli's polynomial, reflected.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    !bytes.iter().fold(!0, |crc, b| TABLE[((crc ^ u32::from(*b)) & 0xff) as usize] ^ (crc >> 8))
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_sums_are_those_of_rfc_3720() {
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    #[test]
    fn a_record_is_framed_as_tensorflow_frames_it() {
        // The first bytes of every file that TensorFlow has written: a message of 24 bytes, the check sum of that length.
        let framed = record(&version_event(0.0));
        assert_eq!(framed[..13], *b"\x18\0\0\0\0\0\0\0\xa3\x7fK\"\x09");
        assert_eq!(framed.len(), 8 + 4 + 24 + 4);
        assert_eq!(framed[21..36], *b"\x1a\x0dbrain.Event:2");
        assert_eq!(framed[36..], masked(crc32c(&framed[12..36])).to_le_bytes());
    }

    #[test]
    fn scalars_are_encoded_as_protobuf_does() {
        let event = scalar_event(1.0, 300, &[("a", 1.0), ("bc", -0.5)]);
        let head = b"\x09\0\0\0\0\0\0\xf0\x3f\x10\xac\x02";
        let values = b"\x2a\x15\x0a\x08\x0a\x01a\x15\0\0\x80\x3f\x0a\x09\x0a\x02bc\x15\0\0\0\xbf";
        assert_eq!(event, [&head[..], &values[..]].concat());
        assert_eq!(restart_event(1.0, 300), [&head[..], b"\x3a\x02\x08\x01"].concat());
    }

    #[test]
    fn a_resumed_run_adds_a_file_of_a_later_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = EventWriter::create(dir.path()).unwrap();
        first.scalars(1, &[("loss", 2.0)]).unwrap();
        let before = std::fs::read(first.path()).unwrap();
        let mut second = EventWriter::create(dir.path()).unwrap();
        second.resume_after(1).unwrap();
        second.scalars(2, &[]).unwrap();
        assert!(second.path() > first.path());
        assert_eq!(std::fs::read(first.path()).unwrap(), before);
        let name = first.path().file_name().unwrap().to_str().unwrap().to_string();
        assert!(name.starts_with("events.out.tfevents.") && name.ends_with(".armt"), "{name}");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let error = EventWriter::create(&dir.path().join("file")).unwrap_err().to_string();
        assert!(error.contains("file"), "{error}");
    }
}
