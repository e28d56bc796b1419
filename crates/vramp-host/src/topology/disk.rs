//! Disks: kind, PCI address and mounted filesystems.

use vramp_core::Bytes;

use super::mount::Mount;
use super::path::PciPath;
use super::pci::PciDevice;
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
