//! What physical memory is: where it lies, and how other processes and devices can reach it.

use std::os::fd::OwnedFd;

/// Where physical memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryLocation {
    /// On the card.
    Device,
    /// In host memory of this NUMA node. Kernels access it through device addresses.
    /// Needs [`Capabilities::host_numa`](crate::Capabilities::host_numa).
    HostNuma(u32),
    /// On the card with this ordinal, which this one reaches over the link between them. Needs an
    /// entry in [`DeviceInfo::peers`](crate::DeviceInfo::peers).
    Peer(u32),
}

/// How a handle can be exported to other processes. Fixed when its memory is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HandleType {
    /// Not at all.
    #[default]
    None,
    /// As a file descriptor, for processes of this machine
    /// (`CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`). Costs nothing on an H200.
    PosixFd,
    /// As 64 bytes, also for other machines of an NVLink domain (`CU_MEM_HANDLE_TYPE_FABRIC`). Needs
    /// the IMEX service; a card may report it and still refuse to create such memory.
    Fabric,
}

impl HandleType {
    /// Returns the name used in options and results: `posix-fd`.
    pub const fn name(self) -> &'static str {
        match self {
            HandleType::None => "none",
            HandleType::PosixFd => "posix-fd",
            HandleType::Fabric => "fabric",
        }
    }
}

/// What physical memory is created as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryProperties {
    /// Where it is allocated.
    pub location: MemoryLocation,
    /// How it can be exported. Host memory cannot.
    pub handle_type: HandleType,
    /// True if network cards can access it (`gpuDirectRDMACapable`). Each map and each unmap takes
    /// about 8 us longer on an H200.
    pub rdma: bool,
}

impl MemoryProperties {
    /// Memory on the card that is not exported.
    pub const DEVICE: MemoryProperties = MemoryProperties::at(MemoryLocation::Device);

    /// Returns the properties of memory at `location` that is not exported.
    pub const fn at(location: MemoryLocation) -> MemoryProperties {
        MemoryProperties { location, handle_type: HandleType::None, rdma: false }
    }
}

/// A handle outside its process.
#[derive(Debug)]
pub enum ExportedHandle {
    /// A descriptor. It keeps the memory alive until it and all its duplicates are closed, also after
    /// the exporter released its handle.
    PosixFd(OwnedFd),
    /// Bytes that any process of the NVLink domain can import. They keep nothing alive.
    Fabric([u8; 64]),
}
