//! Mounted filesystems, and the free space of a directory.

use std::io;
use std::path::{Path, PathBuf};

use vramp_core::Bytes;

use super::tree::Tree;

/// A mounted filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Number of the block device, `259:1`. Filesystems of several disks have their own number.
    pub device: String,
    /// Mount point.
    pub point: PathBuf,
    /// Type of the filesystem: `ext4`, `xfs`, `overlay`.
    pub filesystem: String,
    /// Source of the mount: `/dev/nvme0n1p1`.
    pub source: String,
}

/// A directory with its filesystem and free space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    /// Canonical path of the directory.
    pub path: PathBuf,
    /// Capacity of the filesystem.
    pub capacity: Bytes,
    /// Bytes of it that are available to this user.
    pub free: Bytes,
    /// Mount of the filesystem. `None` if the list of mounts does not contain it.
    pub mount: Option<Mount>,
    /// Name of the disk, if the filesystem is on a disk of this machine.
    pub disk: Option<String>,
}

/// A directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("'{}' cannot be used as a directory: {source}; name one that exists", path.display())]
pub struct DirectoryError {
    /// Path of the directory.
    pub path: PathBuf,
    /// Error of the operating system.
    pub source: io::Error,
}

/// Reads all mounts of this process, in the order in which they were made.
pub(super) fn read(tree: &mut Tree<'_>) -> Vec<Mount> {
    const PATH: &str = "proc/self/mountinfo";
    let Some(text) = tree.text(PATH) else { return Vec::new() };
    let mut mounts = Vec::new();
    for line in text.lines() {
        match parse(line) {
            Some(mount) => mounts.push(mount),
            None => tree.malformed(PATH, line),
        }
    }
    mounts
}

/// Parses `36 35 259:1 / /data rw,noatime shared:1 - ext4 /dev/nvme0n1p1 rw`.
fn parse(line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let mut before = before.split(' ').skip(2);
    let device = before.next()?.to_owned();
    let point = PathBuf::from(unescape(before.nth(1)?));
    let mut after = after.split(' ');
    let filesystem = after.next()?.to_owned();
    let source = unescape(after.next()?);
    device.contains(':').then_some(Mount { device, point, filesystem, source })
}

/// Replaces escapes. Spaces, tabs, newlines and backslashes are written as three octal digits.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(u8::is_ascii) {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// Returns the mount that contains a canonical path: the deepest, and of several the last made.
pub(super) fn around<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let above = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    above.max_by_key(|mount| mount.point.components().count())
}

/// Returns the canonical path of a directory, and capacity and free bytes of its filesystem.
pub(super) fn space(path: &Path) -> io::Result<(PathBuf, Bytes, Bytes)> {
    let path = path.canonicalize()?;
    if !path.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let space = rustix::fs::statvfs(&path)?;
    let bytes = |blocks: u64| Bytes::new(blocks.saturating_mul(space.f_frsize));
    Ok((path, bytes(space.f_blocks), bytes(space.f_bavail)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mounts_is_read_with_its_escapes_and_its_optional_fields() {
        let mount =
            parse(r"36 35 259:1 / /my\040disk\134x rw master:1 shared:2 - ext4 /dev/a rw").unwrap();
        assert_eq!(mount.point, Path::new(r"/my disk\x"));
        assert_eq!((mount.device.as_str(), mount.filesystem.as_str()), ("259:1", "ext4"));
        assert!(parse("36 35 0:5 / /x rw - tmpfs none rw").is_some());
        for line in
            ["", "1 2 3", "36 35 259:1 / /x rw", "36 35 259:1 / /x rw - ext4", "a b c d e - f g"]
        {
            assert_eq!(parse(line), None, "{line}");
        }
        assert_eq!(unescape(r"a\9b\0"), r"a\9b\0");
    }

    #[test]
    fn the_deepest_mount_above_a_path_is_the_one_it_lies_in() {
        let line =
            |point: &str| parse(&format!("1 0 8:1 / {point} rw - ext4 {point}-disk rw")).unwrap();
        let mounts = [line("/"), line("/data"), line("/data/fast"), line("/data")];
        let source = |path: &str| around(&mounts, Path::new(path)).unwrap().source.as_str();
        assert_eq!(source("/data/fast/x"), "/data/fast-disk");
        assert_eq!(source("/database"), "/-disk");
        assert_eq!(around(&mounts[1..], Path::new("/etc")), None);
    }
}
