//! What this machine has: cards, NUMA nodes, disks, network cards, and what lies between them.
//!
//! All of it is read from the kernel's files below a root, without a driver and without a library:
//!
//! 1. The bus lists its devices; NVIDIA's display controllers among them are the cards. NVIDIA's
//!    kernel module adds names and UUIDs.
//! 2. Nodes, disks, mounts and network cards come from their own folders.
//! 3. Where a device sits in the tree of bridges is read off its link in sysfs, and from that
//!    follows what lies between two devices.
//! 4. What cannot be read is `None`, and what cannot be understood is remarked on. A machine
//!    without cards is a machine.
//!
//! ```
//! use vramp_host::topology::Topology;
//! let machine = Topology::discover()?;
//! for gpu in &machine.gpus {
//!     println!("{} {:?} at node {:?}", gpu.pci.address, gpu.model, gpu.pci.numa);
//! }
//! # Ok::<(), vramp_host::topology::TopologyError>(())
//! ```
//!
//! Deliberately absent: environment variables ([`VisibleDevices`] takes the text of one), the
//! driver and NVML (and so the parts of a card split by MIG), links between cards other than PCIe,
//! hotplug: what was read stays as it was read.

mod cpus;
mod disk;
mod gpu;
mod mount;
mod nic;
mod node;
mod path;
mod pci;
mod tree;
mod visible;

use std::path::{Path, PathBuf};

pub use cpus::{CpuSet, ParseCpuSetError};
pub use disk::{Disk, DiskKind};
pub use gpu::Gpu;
pub use mount::{Directory, DirectoryError, Mount};
pub use nic::{Nic, NicCheck};
pub use node::NodeInfo;
pub use path::{PathType, PciPath};
pub use pci::{LinkState, ParsePciAddressError, PciAddress, PciDevice, PciLink};
pub use tree::{Problem, Warning};
pub use visible::{IgnoreReason, Ignored, MigId, ParseMigIdError, VisibleDevice, VisibleDevices};

use crate::NumaNode;
use tree::Tree;

/// What a machine has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// The cards, in the order of their addresses on the bus. CUDA numbers them so under
    /// `CUDA_DEVICE_ORDER=PCI_BUS_ID`, and otherwise the fastest first.
    pub gpus: Vec<Gpu>,
    /// The NUMA nodes, by number.
    pub nodes: Vec<NodeInfo>,
    /// The disks, by name.
    pub disks: Vec<Disk>,
    /// The network cards, by name; those without an interface last.
    pub nics: Vec<Nic>,
    /// The mounted file systems.
    pub mounts: Vec<Mount>,
    /// What was there and could not be made sense of.
    pub warnings: Vec<Warning>,
}

/// Why nothing is known of a machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// None of the kernel's folders is there.
    #[error(
        "nothing of this machine can be read below '{}': mount sysfs at sys and procfs at proc",
        root.display()
    )]
    NothingRead {
        /// Where was looked.
        root: PathBuf,
    },
}

impl Topology {
    /// This machine's. Some hundred small files are read.
    ///
    /// # Errors
    /// Nothing at all can be read.
    pub fn discover() -> Result<Topology, TopologyError> {
        Topology::read(Path::new("/"))
    }

    /// That of the machine whose `sys`, `proc` and `dev` lie below `root`.
    ///
    /// # Errors
    /// Nothing at all can be read.
    pub fn read(root: &Path) -> Result<Topology, TopologyError> {
        let mut tree = Tree::new(root);
        let mounts = mount::read(&mut tree);
        let topology = Topology {
            gpus: gpu::read(&mut tree),
            nodes: node::read(&mut tree),
            disks: disk::read(&mut tree, &mounts),
            nics: nic::read(&mut tree),
            mounts,
            warnings: tree.warnings,
        };
        let Topology { gpus, nodes, disks, nics, mounts, warnings: _ } = &topology;
        if gpus.is_empty()
            && nodes.is_empty()
            && disks.is_empty()
            && nics.is_empty()
            && mounts.is_empty()
        {
            return Err(TopologyError::NothingRead { root: root.to_owned() });
        }
        Ok(topology)
    }

    /// What lies between two devices of this machine. O(bridges).
    pub fn path(&self, one: &PciDevice, other: &PciDevice) -> PathType {
        if one.address == other.address {
            return PathType::Same;
        }
        // With one node there is no other to be far away at.
        let near = self.nodes.len() == 1 || one.numa.is_some() && one.numa == other.numa;
        PathType::between(one.path.as_ref(), other.path.as_ref(), near)
    }

    /// The card with this address.
    pub fn gpu_at(&self, address: PciAddress) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.pci.address == address)
    }

    /// What is known of a NUMA node.
    pub fn node(&self, node: NumaNode) -> Option<&NodeInfo> {
        self.nodes.iter().find(|info| info.node == node)
    }

    /// The nodes with memory of the host's own: not those that are a card's memory.
    pub fn host_nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.iter().filter(|node| !node.is_device_memory())
    }

    /// The network cards that pass a check, the nearest to a device first.
    pub fn nics_near(&self, device: &PciDevice, check: NicCheck) -> Vec<(&Nic, PathType)> {
        let mut near: Vec<(&Nic, PathType)> = self
            .nics
            .iter()
            .filter(|nic| nic.passes(check))
            .map(|nic| {
                let path = nic.pci.as_ref().map(|pci| self.path(device, pci));
                (nic, path.unwrap_or(PathType::Sys))
            })
            .collect();
        near.sort_by_key(|(_, path)| *path);
        near
    }

    /// What is known of a directory and the room in it, now. The directory is this machine's,
    /// wherever the topology was read.
    ///
    /// # Errors
    /// There is no such directory, or it may not be looked at.
    pub fn directory(&self, path: &Path) -> Result<Directory, DirectoryError> {
        let fail = |source| DirectoryError { path: path.to_owned(), source };
        let (path, capacity, free) = mount::room(path).map_err(fail)?;
        let mount = mount::around(&self.mounts, &path).cloned();
        let disk = mount.as_ref().and_then(|mount| {
            let on = |disk: &&Disk| disk.mounts.contains(mount);
            self.disks.iter().find(on).map(|disk| disk.name.clone())
        });
        Ok(Directory { path, capacity, free, mount, disk })
    }

    /// Which cards CUDA would show for this text of `CUDA_VISIBLE_DEVICES`, if it numbers them as
    /// they are listed here.
    pub fn visible(&self, variable: Option<&str>) -> VisibleDevices {
        let uuids: Vec<Option<&str>> = self.gpus.iter().map(|gpu| gpu.uuid.as_deref()).collect();
        VisibleDevices::parse(variable, &uuids)
    }
}
