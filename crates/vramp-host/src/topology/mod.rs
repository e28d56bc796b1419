//! The topology of the machine: GPUs, NUMA nodes, disks, network cards and the paths between them.
//!
//! All of it is read from sysfs and procfs, without a driver or a library:
//!
//! 1. GPUs are NVIDIA's display controllers on the PCI bus. NVIDIA's kernel module adds names and
//!    UUIDs.
//! 2. Nodes, disks, mounts and network cards come from their own directories.
//! 3. The link of a device in sysfs contains the bridges above it. The path between two devices
//!    follows from the bridges that they share.
//! 4. A value that cannot be read is `None`. A value that cannot be parsed adds a [`Warning`]. A
//!    machine without GPUs is no error.
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
//! Deliberately absent: environment variables ([`VisibleDevices`] takes the value as an argument),
//! the driver and NVML (and therefore MIG devices), NVLink, and hotplug.

mod cards;
mod disk;
mod node;
mod pci;
mod tree;
mod visible;

use std::path::{Path, PathBuf};

pub use cards::{Gpu, Nic, NicCheck};
pub use disk::{Directory, DirectoryError, Disk, DiskKind, Mount};

pub use node::{CpuSet, NodeInfo, ParseCpuSetError};
pub use pci::{LinkState, ParsePciAddressError, PathType, PciAddress, PciDevice, PciLink, PciPath};
pub use tree::{Problem, Warning};
pub use visible::{IgnoreReason, Ignored, MigId, ParseMigIdError, VisibleDevice, VisibleDevices};

use crate::NumaNode;
use tree::Tree;

/// The devices of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// GPUs in the order of their PCI addresses. CUDA uses this order with
    /// `CUDA_DEVICE_ORDER=PCI_BUS_ID`; by default it puts the fastest first.
    pub gpus: Vec<Gpu>,
    /// NUMA nodes, by number.
    pub nodes: Vec<NodeInfo>,
    /// Disks, by name.
    pub disks: Vec<Disk>,
    /// Network cards, by name. Those without an interface come last.
    pub nics: Vec<Nic>,
    /// Mounted filesystems.
    pub mounts: Vec<Mount>,
    /// Files that could not be read or parsed.
    pub warnings: Vec<Warning>,
}

/// Why the topology could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// No directory of sysfs or procfs exists.
    #[error(
        "no sysfs or procfs found below '{}': mount sysfs at sys and procfs at proc",
        root.display()
    )]
    NothingRead {
        /// Directory that was searched.
        root: PathBuf,
    },
}

impl Topology {
    /// Reads the topology of this machine: a few hundred small files.
    ///
    /// # Errors
    /// Nothing can be read.
    pub fn discover() -> Result<Topology, TopologyError> {
        Topology::read(Path::new("/"))
    }

    /// Reads the topology of a machine whose `sys`, `proc` and `dev` are below `root`.
    ///
    /// # Errors
    /// Nothing can be read.
    pub fn read(root: &Path) -> Result<Topology, TopologyError> {
        let mut tree = Tree::new(root);
        let mounts = disk::read_mounts(&mut tree);
        let topology = Topology {
            gpus: cards::read_gpus(&mut tree),
            nodes: node::read(&mut tree),
            disks: disk::read(&mut tree, &mounts),
            nics: cards::read_nics(&mut tree),
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

    /// Returns the type of the path between two devices. O(bridges).
    pub fn path(&self, one: &PciDevice, other: &PciDevice) -> PathType {
        if one.address == other.address {
            return PathType::Same;
        }
        // A machine with one node has no path between nodes.
        let near = self.nodes.len() == 1 || one.numa.is_some() && one.numa == other.numa;
        PathType::between(one.path.as_ref(), other.path.as_ref(), near)
    }

    /// Returns the GPU with this PCI address.
    pub fn gpu_at(&self, address: PciAddress) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.pci.address == address)
    }

    /// Returns a NUMA node by number.
    pub fn node(&self, node: NumaNode) -> Option<&NodeInfo> {
        self.nodes.iter().find(|info| info.node == node)
    }

    /// Returns the nodes with host memory, without those that expose device memory.
    pub fn host_nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.iter().filter(|node| !node.is_device_memory())
    }

    /// Returns the filesystem, the disk and the free space of a directory. The directory is on this
    /// machine, even if the topology was read below another root.
    ///
    /// # Errors
    /// The directory does not exist or cannot be accessed.
    pub fn directory(&self, path: &Path) -> Result<Directory, DirectoryError> {
        let fail = |source| DirectoryError { path: path.to_owned(), source };
        let (path, capacity, free) = disk::space(path).map_err(fail)?;
        let mount = disk::around(&self.mounts, &path).cloned();
        let disk = mount.as_ref().and_then(|mount| {
            let on = |disk: &&Disk| disk.mounts.contains(mount);
            self.disks.iter().find(on).map(|disk| disk.name.clone())
        });
        Ok(Directory { path, capacity, free, mount, disk })
    }

    /// Returns the devices that CUDA shows for this value of `CUDA_VISIBLE_DEVICES`, if CUDA
    /// numbers GPUs in the order of [`Topology::gpus`].
    pub fn visible(&self, variable: Option<&str>) -> VisibleDevices {
        let uuids: Vec<Option<&str>> = self.gpus.iter().map(|gpu| gpu.uuid.as_deref()).collect();
        VisibleDevices::parse(variable, &uuids)
    }
}
