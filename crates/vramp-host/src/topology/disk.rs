//! Disks: kind, PCI address and mounted filesystems.
//!
//! Mounted filesystems, and the free space of a directory.

use std::io;
use std::path::{Path, PathBuf};

use vramp_core::Bytes;

use super::pci::{PciDevice, PciPath};
use super::tree::Tree;

/// Unit of the sizes in sysfs, whatever the block size of the disk.
const SECTOR: u64 = 512;
/// Maximum number of stacked volume layers that are followed.
const MAX_LAYERS: usize = 8;

/// Kind of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// An NVMe drive.
    Nvme,
    /// A non-rotational drive with another protocol.
    SolidState,
    /// A hard disk.
    Rotational,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Name in the kernel: `nvme0n1`.
    pub name: String,
    /// Kind of the disk, if the kernel reports it.
    pub kind: Option<DiskKind>,
    /// Model name.
    pub model: Option<String>,
    /// Capacity.
    pub capacity: Option<Bytes>,
    /// PCI device of the disk or its controller. `None` for disks on other buses.
    pub pci: Option<PciDevice>,
    /// Filesystems mounted from it, also through volumes that span several disks.
    pub mounts: Vec<Mount>,
}

/// Reads all disks: block devices with hardware.
pub(super) fn read(tree: &mut Tree<'_>, mounts: &[Mount]) -> Vec<Disk> {
    let names = tree.names("sys/block");
    let mut volumes = Volumes::default();
    let mut disks = Vec::new();
    for name in &names {
        let folder = format!("sys/block/{name}");
        if !tree.exists(&format!("{folder}/device")) {
            volumes.read(tree, name);
            continue;
        }
        let path = pci_path(tree, &folder);
        let mut own = vec![name.clone()];
        own.extend(tree.names(&folder).into_iter().filter(|part| {
            part.starts_with(name.as_str()) && tree.exists(&format!("{folder}/{part}/partition"))
        }));
        let devices = own.iter().filter_map(|part| {
            let file =
                if part == name { format!("{folder}/dev") } else { format!("{folder}/{part}/dev") };
            Some((part.clone(), tree.text(&file)?))
        });
        let devices = devices.collect();
        disks.push((
            Disk {
                name: name.clone(),
                kind: kind(tree, name, &folder),
                model: tree.text(&format!("{folder}/device/model")).filter(|text| !text.is_empty()),
                capacity: tree.parsed(&format!("{folder}/size"), sectors),
                pci: path
                    .as_ref()
                    .and_then(PciPath::device)
                    .map(|address| PciDevice::read(tree, address)),
                mounts: Vec::new(),
            },
            devices,
        ));
    }
    disks
        .into_iter()
        .map(|(disk, devices)| {
            let devices = volumes.on_top_of(devices);
            let from =
                mounts.iter().filter(|mount| devices.iter().any(|device| is_on(mount, device)));
            Disk { mounts: from.cloned().collect(), ..disk }
        })
        .collect()
}

/// Name and number of a block device.
type Device = (String, String);

/// Compares by number, and by name, because filesystems of several disks have their own number.
fn is_on(mount: &Mount, (name, number): &Device) -> bool {
    mount.device == *number || mount.source.strip_prefix("/dev/") == Some(name)
}

fn sectors(text: &str) -> Option<Bytes> {
    text.parse::<u64>().ok()?.checked_mul(SECTOR).map(Bytes::new)
}

fn kind(tree: &mut Tree<'_>, name: &str, folder: &str) -> Option<DiskKind> {
    if name.starts_with("nvme") {
        return Some(DiskKind::Nvme);
    }
    tree.parsed(&format!("{folder}/queue/rotational"), |text| match text {
        "0" => Some(DiskKind::SolidState),
        "1" => Some(DiskKind::Rotational),
        _ => None,
    })
}

/// Returns the PCI path of the disk's controller. The link of a multipath disk contains no
/// controller, so the first controller with a PCI path is used.
fn pci_path(tree: &mut Tree<'_>, folder: &str) -> Option<PciPath> {
    let link = tree.link(folder)?;
    if let Some(path) = PciPath::of_link(&link) {
        return Some(path);
    }
    if !link.contains("/nvme-subsystem/") {
        return None;
    }
    let above = format!("{folder}/..");
    let names = tree.names(&above);
    let links = names.iter().filter_map(|name| tree.link(&format!("{above}/{name}")));
    let mut paths = links.filter_map(|link| PciPath::of_link(&link));
    paths.next()
}

/// Block devices on top of other block devices.
#[derive(Default)]
struct Volumes {
    /// Each volume with the names of the devices below it.
    made_of: Vec<(Device, Vec<String>)>,
}

impl Volumes {
    fn read(&mut self, tree: &mut Tree<'_>, name: &str) {
        let parts = tree.names(&format!("sys/block/{name}/slaves"));
        if let (false, Some(number)) =
            (parts.is_empty(), tree.text(&format!("sys/block/{name}/dev")))
        {
            self.made_of.push(((name.to_owned(), number), parts));
        }
    }

    /// Returns these devices and all volumes on top of them.
    fn on_top_of(&self, mut devices: Vec<Device>) -> Vec<Device> {
        for _ in 0..MAX_LAYERS {
            let more = self.made_of.iter().filter(|(volume, parts)| {
                !devices.contains(volume)
                    && parts.iter().any(|part| devices.iter().any(|(name, _)| name == part))
            });
            let more: Vec<Device> = more.map(|(volume, _)| volume.clone()).collect();
            if more.is_empty() {
                break;
            }
            devices.extend(more);
        }
        devices
    }
}

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
pub(super) fn read_mounts(tree: &mut Tree<'_>) -> Vec<Mount> {
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
mod mount_tests {
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
