//! Disks: what they are, where they are plugged in, and what is mounted from them.

use vramp_core::Bytes;

use super::mount::Mount;
use super::path::PciPath;
use super::pci::PciDevice;
use super::tree::Tree;

/// Blocks of this many bytes are what the kernel counts, whatever the disk's own are.
const SECTOR: u64 = 512;
/// How many layers of volumes upon volumes are looked through.
const DEEPEST: usize = 8;

/// What a disk is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// Flash, spoken to by NVMe.
    Nvme,
    /// Flash behind another protocol, or what claims to be.
    SolidState,
    /// Turning plates.
    Rotational,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name for it: `nvme0n1`.
    pub name: String,
    /// What it is made of, where the kernel says.
    pub kind: Option<DiskKind>,
    /// What its maker calls it.
    pub model: Option<String>,
    /// What it holds.
    pub capacity: Option<Bytes>,
    /// Where it, or its controller, is plugged in. `None` for disks behind other buses.
    pub pci: Option<PciDevice>,
    /// The file systems that are mounted from it, also through volumes of several disks.
    pub mounts: Vec<Mount>,
}

/// All disks: block devices with hardware behind them.
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
            let devices = volumes.upon(devices);
            let from =
                mounts.iter().filter(|mount| devices.iter().any(|device| is_on(mount, device)));
            Disk { mounts: from.cloned().collect(), ..disk }
        })
        .collect()
}

/// A block device by name and number.
type Device = (String, String);

/// By number; by name where a file system of several disks has a number of its own.
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

/// Where the disk's controller is. A disk with several ways to it shows none of them in its own
/// path; the first that is plugged in counts.
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

/// Block devices that are made of others.
#[derive(Default)]
struct Volumes {
    /// A volume, and the names of what it is made of.
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

    /// These devices, and all volumes that have a part of them.
    fn upon(&self, mut devices: Vec<Device>) -> Vec<Device> {
        for _ in 0..DEEPEST {
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
