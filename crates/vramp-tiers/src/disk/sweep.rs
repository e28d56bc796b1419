//! What killed processes left in a directory.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use vramp_core::Bytes;
use vramp_host::DISK_BLOCK;

use super::header::{Header, OwnerId, owner_of};

/// What a sweep met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Files of dead processes, now removed.
    pub removed: u64,
    /// The lengths of those.
    pub bytes: Bytes,
    /// Files of stores that live.
    pub in_use: u64,
    /// Files with a name like ours that are not ours, or that could not be looked at. They stay.
    pub foreign: u64,
}

/// How long files of processes that are gone are waited for: the kernel lets go of a file only
/// when the transfers that were under way in it have ended.
const LETTING_GO: Duration = Duration::from_millis(250);

/// Removes what dead processes left. A file goes only if its name is one of ours, nobody holds its
/// lock, and its first block is that of the owner in its name, or was never written.
pub(super) fn sweep(dir: &Path) -> std::io::Result<SweepReport> {
    let mut swept = SweepReport::default();
    let mut held = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(owner_of) else { continue };
        // A pipe of that name would block whoever opens it.
        match entry.file_type().is_ok_and(|kind| kind.is_file()) {
            true if swept.meet(&entry.path(), owner) => held.push((entry.path(), owner)),
            true => {}
            false => swept.foreign += 1,
        }
    }
    // Seen from another container a living process may seem gone: its lock decides all the same.
    held.retain(|(_, owner)| is_gone(owner.pid));
    let begun = Instant::now();
    while !held.is_empty() && begun.elapsed() < LETTING_GO {
        std::thread::sleep(Duration::from_millis(2));
        held.retain(|(path, owner)| {
            swept.in_use -= 1;
            swept.meet(path, *owner)
        });
    }
    Ok(swept)
}

/// Nothing is decided by it but whether to wait a little.
fn is_gone(pid: u32) -> bool {
    !Path::new("/proc").join(pid.to_string()).exists()
}

impl SweepReport {
    /// Removes the file if it is abandoned. True if it is locked.
    fn meet(&mut self, path: &Path, owner: OwnerId) -> bool {
        let file = match OpenOptions::new().read(true).open(path) {
            Ok(file) => file,
            // Its owner ended properly just now.
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

/// The lock that this takes is held until `file` is dropped.
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
