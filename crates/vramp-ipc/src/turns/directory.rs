//! The directory of a card, with the pipes of its candidates.
//!
//! A pipe gets its name as an entry after it was opened for reading, by a rename. So an entry that
//! cannot be opened for writing has no reader any more: its process ended, or closed it.
//!
//! The entry of this process.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use vramp_host::PrivateFd;

use super::core::entry::Message;
use super::core::entry::{Entry, Key, is_new, new_name};
use super::error::TurnsError;
use super::reach;
use crate::directory::{self, SharedDirectoryError, errno_of, is_name, random};

const PRIVATE_FILE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The open directory of a card.
#[derive(Debug)]
pub struct CardDirectory {
    descriptor: OwnedFd,
    pub path: PathBuf,
}

/// What a directory has.
#[derive(Debug, Default)]
pub struct Listing {
    pub entries: Vec<Entry>,
    /// Pipes that are no entries yet, or whose process was killed before they were.
    unfinished: Vec<String>,
}

impl Listing {
    pub fn keys(&self) -> Vec<Key> {
        self.entries.iter().map(|entry| entry.key).collect()
    }
}

impl CardDirectory {
    /// Opens the directory `turns-CARD` in `base`. Makes both, if they are missing.
    pub fn open(base: &Path, card: &str) -> Result<CardDirectory, TurnsError> {
        if !is_name(card) {
            return Err(TurnsError::Card { card: card.to_owned() });
        }
        let path = base.join(format!("turns-{card}"));
        let descriptor = directory::open(base, &path)?;
        Ok(CardDirectory { descriptor, path })
    }

    fn error(&self, action: &'static str, error: Errno) -> TurnsError {
        let is_removed = rustix::fs::fstat(&self.descriptor).is_ok_and(|stat| stat.st_nlink == 0);
        if error == Errno::NOENT && is_removed {
            return TurnsError::Removed { path: self.path.clone() };
        }
        system_error(action, &self.path, error)
    }

    /// Returns the entries in any order. Other files are not listed.
    pub fn list(&self) -> Result<Listing, TurnsError> {
        let mut listing = Listing::default();
        let directory = match Dir::read_from(&self.descriptor) {
            Ok(directory) => directory,
            Err(error) => return Err(self.error("list", error)),
        };
        for file in directory {
            let file = file.map_err(|error| self.error("list", error))?;
            let Ok(name) = file.file_name().to_str() else { continue };
            match Entry::decode(name) {
                Some(entry) => listing.entries.push(entry),
                None if is_new(name) => listing.unfinished.push(name.to_owned()),
                None => {}
            }
        }
        Ok(listing)
    }

    /// Removes pipes of processes that were killed before they made them entries. One that lives makes
    /// another.
    pub fn remove_unfinished(&self, listing: &Listing) {
        for name in &listing.unfinished {
            if let Err(Errno::NXIO) = self.open_for_writing(name) {
                self.unlink(name);
            }
        }
    }

    /// Makes an entry with `number`.
    pub fn create(&self, number: u64, mut entry: Entry) -> Result<(Entry, PrivateFd), TurnsError> {
        loop {
            let random = random().map_err(|error| self.error("get random bits for", error))?;
            entry.key = Key { number, random };
            let (new, name) = (new_name(random), entry.encode());
            let opened = PrivateFd::open(|| {
                rustix::fs::mkfifoat(&self.descriptor, &new, PRIVATE_FILE)?;
                reach("made");
                let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                Ok(rustix::fs::openat(&self.descriptor, &new, flags, Mode::empty())?)
            });
            reach("opened");
            let named = opened.map_err(errno_of).and_then(|pipe| {
                rustix::fs::renameat(&self.descriptor, &new, &self.descriptor, &name)?;
                Ok(pipe)
            });
            reach("named");
            let error = match named {
                Ok(pipe) => return Ok((entry, pipe)),
                Err(error) => self.error("make a pipe in", error),
            };
            self.unlink(&new);
            // Another process took the pipe for that of a killed one, before it was open.
            if !is_not_found(&error) {
                return Err(error);
            }
        }
    }

    fn open_for_writing(&self, name: &str) -> Result<OwnedFd, Errno> {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        retry(|| rustix::fs::openat(&self.descriptor, name, flags, Mode::empty()))
    }

    /// Returns a descriptor that is in error once the entry's process is gone. `None` if it is; then
    /// the entry is removed.
    pub fn probe(&self, entry: &Entry) -> Result<Option<OwnedFd>, TurnsError> {
        match self.open_for_writing(&entry.encode()) {
            Ok(pipe) => Ok(Some(pipe)),
            Err(Errno::NOENT) => Ok(None),
            Err(Errno::NXIO) => {
                self.remove(entry);
                Ok(None)
            }
            Err(error) => Err(self.error("open an entry of", error)),
        }
    }

    /// Sends a message to the entry's process. Returns false if it is gone.
    pub fn send(&self, entry: &Entry, message: &Message) -> Result<bool, TurnsError> {
        if self.probe(entry)?.is_none() {
            return Ok(false);
        }
        // Writing to a pipe without a reader would raise SIGPIPE, so this is a reader as well.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = PrivateFd::open(|| {
            Ok(rustix::fs::openat(&self.descriptor, entry.encode(), flags, Mode::empty())?)
        });
        let pipe = match opened.map_err(errno_of) {
            Ok(pipe) => pipe,
            Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(self.error("open an entry of", error)),
        };
        if let Some(pipe) = pipe.get() {
            // A full pipe has messages that wake its reader.
            let _ = retry(|| rustix::io::write(pipe, message.encode().as_bytes()));
        }
        Ok(true)
    }

    /// Notes when the entry began to hold the turn. It is information only: without space there is none.
    pub fn mark_held(&self, entry: &Entry, since_ms: u64) {
        let _ =
            rustix::fs::symlinkat(since_ms.to_string(), &self.descriptor, entry.key.held_name());
    }

    /// Returns when the entry began to hold the turn. `None` if it does not hold it.
    pub fn held_since(&self, entry: &Entry) -> Option<u64> {
        let name = entry.key.held_name();
        let text = rustix::fs::readlinkat(&self.descriptor, name, Vec::new()).ok()?;
        text.to_str().ok()?.parse().ok()
    }

    /// Removes the files of an entry. Returns false if it was not there.
    pub fn remove(&self, entry: &Entry) -> bool {
        self.unlink(&entry.key.held_name());
        reach("unmarked");
        let removed = self.unlink(&entry.encode());
        reach("unlisted");
        removed
    }

    fn unlink(&self, name: &str) -> bool {
        rustix::fs::unlinkat(&self.descriptor, name, AtFlags::empty()).is_ok()
    }
}

/// Waits until one of `descriptors` is ready, or for `timeout` (`None` for ever). A signal ends the wait
/// early.
pub fn wait(
    descriptors: &mut [PollFd<'_>],
    timeout: Option<std::time::Duration>,
) -> Result<(), Errno> {
    // A time that the kernel cannot hold is for ever.
    let limit = timeout.and_then(|timeout| timeout.try_into().ok());
    match rustix::event::poll(descriptors, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns true if poll found anything at the descriptor.
pub fn is_ready(descriptor: &PollFd<'_>) -> bool {
    descriptor.revents() != PollFlags::empty()
}

fn is_not_found(error: &TurnsError) -> bool {
    let TurnsError::Directory(SharedDirectoryError::System { source, .. }) = error else {
        return false;
    };
    source.kind() == io::ErrorKind::NotFound
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Returns the error of a system call.
pub fn system_error(action: &'static str, path: &Path, error: Errno) -> TurnsError {
    directory::system_error(action, path, error).into()
}

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
