//! Files of a store: their names, the header in the first block of each, with its owner, and the sweep that
//! removes files which killed processes left.
//!
//! ```text
//! 0   8  "vrampseg"
//! 8   4  version, 1
//! 12  4  process id of the owner
//! 16  8  random number of the owner
//! 24  8  length of the file, header included
//! 32  4  CRC-32 of the bytes 0 to 32
//! ```
//!
//! Numbers are little-endian; the rest of the block is zero.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use vramp_core::Bytes;
use vramp_host::DISK_BLOCK;

const MAGIC: [u8; 8] = *b"vrampseg";
const VERSION: u32 = 1;
const LEN: usize = DISK_BLOCK.count() as usize;

/// Identifies a store: its process and a random number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnerId {
    pub pid: u32,
    pub nonce: u64,
}

/// Contents of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub owner: OwnerId,
    pub len: Bytes,
}

impl Header {
    pub fn encode(&self) -> [u8; LEN] {
        let mut block = [0; LEN];
        block[..8].copy_from_slice(&MAGIC);
        block[8..12].copy_from_slice(&VERSION.to_le_bytes());
        block[12..16].copy_from_slice(&self.owner.pid.to_le_bytes());
        block[16..24].copy_from_slice(&self.owner.nonce.to_le_bytes());
        block[24..32].copy_from_slice(&self.len.count().to_le_bytes());
        let sum = crc32fast::hash(&block[..32]);
        block[32..36].copy_from_slice(&sum.to_le_bytes());
        block
    }

    /// Returns `None` for anything that [`encode`](Header::encode) did not write.
    pub fn decode(block: &[u8]) -> Option<Header> {
        let word = |at: usize| Some(u32::from_le_bytes(block.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(block.get(at..at + 8)?.try_into().ok()?));
        let known = block.get(..8)? == MAGIC && word(8)? == VERSION;
        let header = Header {
            owner: OwnerId { pid: word(12)?, nonce: long(16)? },
            len: Bytes::new(long(24)?),
        };
        (known && word(32)? == crc32fast::hash(&block[..32])).then_some(header)
    }
}

/// Returns the name of the owner's file number `index`.
pub(super) fn file_name(owner: OwnerId, index: u32) -> String {
    format!("vramp-{}-{:016x}-{index}.segment", owner.pid, owner.nonce)
}

/// Returns the owner in a file name, if the name has the form of [`file_name`].
pub(super) fn owner_of(name: &str) -> Option<OwnerId> {
    let mut parts = name.strip_prefix("vramp-")?.strip_suffix(".segment")?.split('-');
    let (pid, nonce, index) = (parts.next()?, parts.next()?, parts.next()?);
    let owner = OwnerId { pid: pid.parse().ok()?, nonce: u64::from_str_radix(nonce, 16).ok()? };
    // A name in another form with the same fields is not accepted.
    (file_name(owner, index.parse().ok()?) == name).then_some(owner)
}

/// What a sweep found in a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Files of dead processes. They were removed.
    pub removed: u64,
    /// Length of the removed files.
    pub bytes: Bytes,
    /// Files of living stores. They stay.
    pub in_use: u64,
    /// Files named like those of a store that have another owner in their header, or cannot be
    /// read. They stay.
    pub foreign: u64,
}

/// Longest wait for files of processes that have ended. The kernel unlocks a file only after the
/// transfers in flight on it.
const UNLOCK_WAIT: Duration = Duration::from_millis(250);

/// Removes files of dead processes: those with a name of this format, without a lock, and with a
/// first block that names the same owner or was never written.
pub(super) fn sweep(dir: &Path) -> std::io::Result<SweepReport> {
    let mut swept = SweepReport::default();
    let mut locked = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(owner_of) else { continue };
        // Opening a named pipe would block.
        match entry.file_type().is_ok_and(|kind| kind.is_file()) {
            true if swept.remove_if_abandoned(&entry.path(), owner) => {
                locked.push((entry.path(), owner))
            }
            true => {}
            false => swept.foreign += 1,
        }
    }
    // A process of another container may look dead here. Its lock still decides.
    locked.retain(|(_, owner)| is_gone(owner.pid));
    let begun = Instant::now();
    while !locked.is_empty() && begun.elapsed() < UNLOCK_WAIT {
        std::thread::sleep(Duration::from_millis(2));
        locked.retain(|(path, owner)| {
            swept.in_use -= 1;
            swept.remove_if_abandoned(path, *owner)
        });
    }
    Ok(swept)
}

/// Only decides whether to wait for a lock.
fn is_gone(pid: u32) -> bool {
    !Path::new("/proc").join(pid.to_string()).exists()
}

impl SweepReport {
    /// Removes the file if it is abandoned. Returns true if it is locked.
    fn remove_if_abandoned(&mut self, path: &Path, owner: OwnerId) -> bool {
        let file = match OpenOptions::new().read(true).open(path) {
            Ok(file) => file,
            // Its store was dropped meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return false,
            Err(_) => {
                self.foreign += 1;
                return false;
            }
        };
        match abandoned(&file, owner) {
            Ok(Abandoned::Yes(len)) if std::fs::remove_file(path).is_ok() => {
                self.removed += 1;
                self.bytes += len;
            }
            Ok(Abandoned::Alive) => {
                self.in_use += 1;
                return true;
            }
            _ => self.foreign += 1,
        }
        false
    }
}

enum Abandoned {
    Yes(Bytes),
    Alive,
    NotOurs,
}

/// The lock taken here is held until `file` is dropped.
fn abandoned(mut file: &File, owner: OwnerId) -> std::io::Result<Abandoned> {
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => return Ok(Abandoned::Alive),
        Err(std::fs::TryLockError::Error(error)) => return Err(error),
    }
    let len = Bytes::new(file.metadata()?.len());
    let mut block = Vec::new();
    Read::by_ref(&mut file).take(DISK_BLOCK.count()).read_to_end(&mut block)?;
    let ours = Header::decode(&block).is_some_and(|header| header.owner == owner);
    let unwritten = block.iter().all(|byte| *byte == 0);
    Ok(if ours || unwritten { Abandoned::Yes(len) } else { Abandoned::NotOurs })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: OwnerId = OwnerId { pid: 4711, nonce: 0xfeed };

    #[test]
    fn a_header_is_read_back_and_any_flipped_bit_is_noticed() {
        let header = Header { owner: OWNER, len: Bytes::gib(1) };
        let block = header.encode();
        assert_eq!(Header::decode(&block), Some(header));
        for bit in 0..36 * 8 {
            let mut block = block;
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&block), None, "bit {bit}");
        }
        assert_eq!(Header::decode(&block[..35]), None);
        assert_eq!(Header::decode(&[]), None);
    }

    #[test]
    fn names_are_read_back_and_others_have_no_owner() {
        assert_eq!(owner_of(&file_name(OWNER, 12)), Some(OWNER));
        for other in [
            "vramp-4711-feed-0.segment",
            "vramp-4711-000000000000feed-0.segment.bak",
            "vramp-04711-000000000000feed-0.segment",
            "vramp-4711-000000000000feed.segment",
            "vramp-4711-000000000000feed-0-0.segment",
            "vramp-.segment",
            "data.bin",
        ] {
            assert_eq!(owner_of(other), None, "{other}");
        }
    }
}
