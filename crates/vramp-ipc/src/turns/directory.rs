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
use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use vramp_host::PrivateFd;

use super::core::entry::Message;
use super::core::entry::{Entry, Key, is_new, new_name};
use super::error::TurnsError;
use super::reach;
use crate::system;

/// File systems on which two kernels may see one pipe: NFS, SMB, FUSE, 9P, Ceph, Lustre, GPFS, AFS.
const REMOTE: [u64; 11] = [
    0x6969,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x6573_5546,
    0x0102_1997,
    0x00c3_6400,
    0x0bd0_0bd0,
    0x4750_4653,
    0x5346_414f,
    0x6b41_4653,
];

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

/// Returns true if `card` can be a part of a file's name.
fn is_card(card: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_:.".contains(&byte);
    (1..=64).contains(&card.len()) && card.bytes().all(is_good)
}

impl CardDirectory {
    /// Opens the directory `turns-CARD` in `base`. Makes both, if they are missing.
    pub fn open(base: &Path, card: &str) -> Result<CardDirectory, TurnsError> {
        if !is_card(card) {
            return Err(TurnsError::Card { card: card.to_owned() });
        }
        drop(open_private(base)?);
        let path = base.join(format!("turns-{card}"));
        let descriptor = open_private(&path)?;
        // Programs that remove old files leave a locked directory alone. Not every file system has locks.
        let _ = rustix::fs::flock(&descriptor, FlockOperation::NonBlockingLockShared);
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
            let is_taken =
                matches!(&error, TurnsError::System { source, .. } if is_not_found(source));
            if !is_taken {
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

/// Returns the directory, which is made if it is missing, after checks of its owner and mode.
fn open_private(path: &Path) -> Result<OwnedFd, TurnsError> {
    match rustix::fs::mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(system_error("make the directory", path, error)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let directory = opened.map_err(|error| system_error("open the directory", path, error))?;
    let check = |error| system_error("check the directory", path, error);
    let stat = rustix::fs::fstat(&directory).map_err(check)?;
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        return Err(TurnsError::OtherUser { path: path.into(), owner: stat.st_uid, user });
    }
    let mode = stat.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        return Err(TurnsError::Mode { path: path.into(), mode });
    }
    let kind = rustix::fs::fstatfs(&directory).map_err(check)?.f_type as u64;
    match REMOTE.contains(&kind) {
        true => Err(TurnsError::Remote { path: path.into(), kind }),
        false => Ok(directory),
    }
}

fn random() -> Result<u64, Errno> {
    let bits = system::random().map_err(errno_of)?;
    Ok(bits.iter().take(8).fold(0, |bits, byte| bits << 8 | u64::from(*byte)))
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn is_not_found(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

pub fn system_error(action: &'static str, path: &Path, error: Errno) -> TurnsError {
    let path = path.to_owned();
    match error {
        Errno::NOSPC | Errno::DQUOT => TurnsError::Full { path },
        Errno::MFILE | Errno::NFILE => {
            TurnsError::TooManyOpenFiles { limit: system::open_file_limit() }
        }
        error => TurnsError::System { action, path, source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_kernel_have_a_meaning() {
        let error = |code| system_error("list", Path::new("/a"), code);
        assert!(matches!(error(Errno::NOSPC), TurnsError::Full { .. }));
        assert!(matches!(error(Errno::DQUOT), TurnsError::Full { .. }));
        assert!(matches!(error(Errno::MFILE), TurnsError::TooManyOpenFiles { .. }));
        assert_eq!(
            error(Errno::ROFS).to_string(),
            "cannot list /a: Read-only file system (os error 30)"
        );
    }

    #[test]
    fn cards_are_parts_of_names() {
        assert!(is_card("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6") && is_card("sim:h200"));
        for bad in ["", "a/b", "a b", &"a".repeat(65), "\u{e4}"] {
            assert!(!is_card(bad), "{bad}");
        }
    }
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
