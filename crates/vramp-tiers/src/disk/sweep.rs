//! Removes files that killed processes left in a directory.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use vramp_core::Bytes;
use vramp_host::DISK_BLOCK;

use super::header::{Header, OwnerId, owner_of};

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
