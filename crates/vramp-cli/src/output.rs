//! Where a command writes a file.
//!
//! 1. [`Output::new`] finds out what the path is. Nothing is created or changed.
//! 2. [`Output::write`] writes. A regular file is replaced at the end, atomically: a failure leaves
//!    the old one. Devices, pipes and sockets are written through, as is standard output.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::reading::STANDARD;

/// As many symbolic links in a row as Linux follows.
const LINKS_MAX: u32 = 40;
const BUFFER: usize = 1 << 20;

/// Where the bytes go.
#[derive(Debug)]
pub(crate) enum Output {
    Standard,
    /// A device, a pipe, a socket or an open file, which keeps its name.
    Through(PathBuf),
    /// A regular file that is replaced, or created, behind all symbolic links.
    Replaced(PathBuf),
}

impl Output {
    pub fn new(path: &Path) -> io::Result<Output> {
        if path == Path::new(STANDARD) || path == Path::new("/dev/stdout") {
            return Ok(Output::Standard);
        }
        // Names of open files. To replace them would not change what is open.
        let is_open_file =
            ["/dev/fd", "/dev/stderr", "/proc"].iter().any(|folder| path.starts_with(folder));
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if is_open_file || !found.is_file() => Ok(Output::Through(path.to_owned())),
            // A link may lead to a file that is not there yet.
            Ok(_) => resolve(path).map(Output::Replaced),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let path = resolve(path)?;
                fs::metadata(folder(&path))?;
                Ok(Output::Replaced(path))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns true if the output would replace the file at `input`, by whatever name.
    pub fn is_same_file(&self, input: &Path) -> bool {
        let input = if input == Path::new(STANDARD) { Path::new("/dev/stdin") } else { input };
        let Output::Replaced(output) = self else { return false };
        match (fs::metadata(input), fs::metadata(output)) {
            (Ok(input), Ok(output)) => (input.dev(), input.ino()) == (output.dev(), output.ino()),
            _ => false,
        }
    }

    /// Returns true if both would be written to one file, or both to standard output.
    pub fn is_same_output(&self, other: &Output) -> bool {
        match (self, other) {
            (Output::Standard, Output::Standard) => true,
            (Output::Replaced(one), Output::Replaced(other)) => {
                let place =
                    |path: &Path| fs::canonicalize(folder(path)).map(|it| it.join(name(path)));
                place(one).ok().is_some_and(|one| place(other).is_ok_and(|other| one == other))
            }
            _ => false,
        }
    }

    /// Passes a buffered writer to `write`, and returns the number of bytes. `standard` is standard
    /// output.
    pub fn write(
        &self,
        standard: &mut dyn Write,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<u64> {
        match self {
            Output::Standard => buffered(standard, write),
            Output::Through(path) => {
                if fs::metadata(path)?.file_type().is_socket() {
                    return buffered(UnixStream::connect(path)?, write);
                }
                buffered(OpenOptions::new().write(true).open(path)?, write)
            }
            Output::Replaced(path) => replace(path, write),
        }
    }
}

/// Returns the folder of a file.
fn folder(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

fn name(path: &Path) -> &std::ffi::OsStr {
    path.file_name().unwrap_or_default()
}

fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<u64> {
    // The mask of the process applies to a new file.
    let permissions = fs::Permissions::from_mode(0o666);
    let mut partial = tempfile::Builder::new();
    let partial = partial.prefix(".vramp-").permissions(permissions).tempfile_in(folder(path));
    // Without the name of the temporary file, which the caller does not know.
    let partial = partial.map_err(|error| io::Error::from(error.kind()))?;
    let bytes = buffered(partial.as_file(), write)?;
    if let Ok(old) = fs::metadata(path) {
        keep_owner(partial.as_file(), &old)?;
    }
    partial.persist(path).map_err(|error| error.error)?;
    Ok(bytes)
}

/// Gives the new file the permissions of the old one, and its owner where the process may.
fn keep_owner(new: &File, old: &fs::Metadata) -> io::Result<()> {
    let found = new.metadata()?;
    if (found.uid(), found.gid()) != (old.uid(), old.gid()) {
        // Only root may give files away. The others own what they write.
        let _ = std::os::unix::fs::fchown(new, Some(old.uid()), Some(old.gid()));
    }
    new.set_permissions(old.permissions())
}

fn buffered(
    out: impl Write,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<u64> {
    let mut counted = Counted { out: BufWriter::with_capacity(BUFFER, out), bytes: 0 };
    write(&mut counted)?;
    counted.flush()?;
    Ok(counted.bytes)
}

struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Follows symbolic links. The last may lead to a file that does not exist.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            // Not a link, or nothing there.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::NotFound
                ) =>
            {
                return Ok(path);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("too many symbolic links"))
}
