//! What a device is, what it can do, and what it has left.
//!
//! What physical memory is: where it lies, and how other processes and devices can reach it.

use std::os::fd::OwnedFd;

use vramp_core::Bytes;

/// Identity, limits and capabilities of a device. Constant for the life of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the card, such as `NVIDIA H200`.
    pub name: String,
    /// Short name used in options and results: `sim:h200`, `cuda:0`.
    pub id: String,
    /// Version of the driver as the driver prints it, or what the simulator models.
    pub driver: String,
    /// True if no card is behind this device.
    pub simulated: bool,
    /// PCI address of the card, `0000:3b:00.0`. `None` for a simulated card, and where the driver
    /// does not report it.
    pub pci: Option<String>,
    /// UUID of the card, `GPU-8932f937-...`. `None` as for `pci`.
    pub uuid: Option<String>,
    /// NUMA node of the host that is nearest to the card. `None` as for `pci`.
    pub host_numa: Option<u32>,
    /// Number of the device among those of its process, as the driver counts them.
    pub ordinal: u32,
    /// Ordinals of the other devices that this one can be granted access to, and that can be granted
    /// access to its memory, in ascending order.
    pub peers: Vec<u32>,
    /// Sizes and granularities.
    pub limits: Limits,
    /// Groups of calls that work on this device.
    pub capabilities: Capabilities,
}

impl DeviceInfo {
    /// Returns a sentence for tables of driver times: where the times come from, and what they depend
    /// on.
    pub fn time_note(&self) -> &'static str {
        match self.simulated {
            true => {
                "Driver times are modelled, with costs that follow the host they were measured on: \
                 a machine with slow cores took 2.3 times as long, for every allocator alike."
            }
            false => {
                "Driver times are measured and follow this machine's host: slow cores take 2.3 times \
                 as long as those of the H200's table, for every allocator alike."
            }
        }
    }
}

/// Sizes and granularities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory on the card. A process can use less: see [`MemoryInfo::free`].
    pub memory: Bytes,
    /// Granularity of physical memory: handles and mappings are multiples of it.
    pub page: Bytes,
    /// Granularity that the driver recommends. Equal to `page` on every card measured so far.
    pub recommended_page: Bytes,
    /// Address space that one process can reserve in total, where known.
    pub address_space: Option<Bytes>,
    /// Amount by which the device's own stream-ordered pool grows. Measured on an H200; the driver
    /// does not report it.
    pub pool_step: Bytes,
}

/// Groups of calls that work on a device. A call of a group that is off fails with
/// [`ErrorKind::NotSupported`](crate::ErrorKind::NotSupported).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Reserve, create, map, unmap, set-access.
    pub virtual_memory: bool,
    /// The device's own stream-ordered pool.
    pub stream_ordered_pool: bool,
    /// Physical memory on a host NUMA node, mapped for the device.
    pub host_numa: bool,
    /// Pinned host memory.
    pub pinned_host: bool,
    /// Mappings may change while kernels access other ranges. False below compute capability 8.0,
    /// where this has faulted (kvcached issue 465).
    pub remap_beside_kernels: bool,
    /// Stream capture and graphs.
    pub graphs: bool,
    /// Memory that is exported as a file descriptor.
    pub posix_fd: bool,
    /// Memory that is exported as a fabric handle. Reported by the card; to create such memory also
    /// needs the IMEX service.
    pub fabric: bool,
    /// Memory that network cards can access.
    pub rdma: bool,
    /// Memory that is exported as a dma-buf.
    pub dma_buf: bool,
}

/// Memory of the card as the driver counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes not allocated by any process.
    pub free: Bytes,
    /// Bytes on the card.
    pub total: Bytes,
}

/// Statistics of the device's own stream-ordered pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Physical memory that the pool has reserved.
    pub reserved: Bytes,
    /// High-water mark of `reserved`.
    pub reserved_peak: Bytes,
    /// Bytes allocated from the pool.
    pub used: Bytes,
}

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
