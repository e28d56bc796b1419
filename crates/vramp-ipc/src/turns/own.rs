//! The entry of this process.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use vramp_host::PrivateFd;

use super::core::entry::Entry;
use super::core::message::Message;
use super::directory::CardDirectory;
use super::error::TurnsError;

/// Most bytes of messages that one look takes out of the pipe.
const MOST: usize = 1 << 20;

/// A published entry. Dropping it removes it, and wakes the process behind it in the line.
#[derive(Debug)]
pub struct OwnEntry {
    directory: Arc<CardDirectory>,
    pub entry: Entry,
    pipe: PrivateFd,
    is_removed: bool,
}

impl OwnEntry {
    pub fn create(
        directory: &Arc<CardDirectory>,
        number: u64,
        entry: Entry,
    ) -> Result<OwnEntry, TurnsError> {
        let (entry, pipe) = directory.create(number, entry)?;
        Ok(OwnEntry { directory: Arc::clone(directory), entry, pipe, is_removed: false })
    }

    /// Returns the descriptor that is readable when there are messages.
    pub fn pipe(&self) -> Result<BorrowedFd<'_>, TurnsError> {
        self.pipe.get().ok_or(TurnsError::Forked)
    }

    /// Returns the messages that arrived.
    pub fn receive(&self) -> Result<Vec<Message>, TurnsError> {
        let pipe = self.pipe()?;
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        while bytes.len() < MOST {
            match rustix::io::read(pipe, &mut buffer) {
                Ok(count) => bytes.extend(buffer.iter().take(count)),
                Err(Errno::INTR) => {}
                // Each message is written at once, so what was read ends with a whole one.
                Err(_) => break,
            }
        }
        Ok(Message::decode_all(&bytes))
    }

    /// Removes the entry. An error says that it was gone before.
    pub fn remove(mut self) -> Result<(), TurnsError> {
        self.pipe()?;
        self.is_removed = true;
        match self.directory.remove(&self.entry) {
            true => Ok(()),
            false => Err(TurnsError::Removed { path: self.directory.path.clone() }),
        }
    }
}

impl Drop for OwnEntry {
    fn drop(&mut self) {
        // In a forked child the entry is the parent's.
        if !self.is_removed && self.pipe.get().is_some() {
            self.directory.remove(&self.entry);
        }
    }
}
