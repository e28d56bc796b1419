//! What killed processes left in a directory.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;

use vramp_core::Bytes;
use vramp_host::DISK_BLOCK;

use super::header::{Header, owner_of};

/// What a sweep met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Files of dead processes, now removed.
    pub removed: u64,
    /// The lengths of those.
    pub bytes: Bytes,
    /// Files of stores that live.
    pub alive: u64,
    /// Files with a name like ours that are not ours, or that could not be looked at. They stay.
    pub strange: u64,
}

/// Removes what dead processes left. A file goes only if its name is one of ours, nobody holds its
/// lock, and its first block is that of the owner in its name, or was never written.
pub(super) fn sweep(dir: &Path) -> std::io::Result<Swept> {
    let mut swept = Swept::default();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(owner_of) else { continue };
        // A pipe of that name would block whoever opens it.
        if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            swept.strange += 1;
            continue;
        }
        let path = entry.path();
        match OpenOptions::new().read(true).open(&path) {
            Ok(file) => match abandoned(&file, owner) {
                Ok(Abandoned::Yes(len)) if std::fs::remove_file(&path).is_ok() => {
                    swept.removed += 1;
                    swept.bytes += len;
                }
                Ok(Abandoned::Alive) => swept.alive += 1,
                _ => swept.strange += 1,
            },
            // Its owner ended properly just now.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(_) => swept.strange += 1,
        }
    }
    Ok(swept)
}

enum Abandoned {
    Yes(Bytes),
    Alive,
    NotOurs,
}

/// The lock that this takes is held until `file` is dropped.
fn abandoned(mut file: &File, owner: super::header::OwnerId) -> std::io::Result<Abandoned> {
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
