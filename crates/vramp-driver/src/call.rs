//! The driver calls, by name.

use std::fmt;

/// A driver call: one for each method of [`Driver`](crate::Driver) that can fail.
///
/// Costs, counts and injected failures are keyed by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sim", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "sim", serde(rename_all = "kebab-case"))]
pub enum Call {
    /// Reserve a range of addresses.
    Reserve,
    /// Free a range of addresses.
    FreeAddresses,
    /// Create physical memory.
    Create,
    /// Release physical memory.
    Release,
    /// Map physical memory at an address.
    Map,
    /// Unmap a range of addresses.
    Unmap,
    /// Make a range of addresses accessible to the device.
    SetAccess,
    /// Take a peer's access to a range of addresses.
    RevokeAccess,
    /// Export physical memory to other processes.
    Export,
    /// Import physical memory of another process.
    Import,
    /// Export a range of addresses as a dma-buf.
    ExportDmaBuf,
    /// Allocate device memory.
    AllocMemory,
    /// Free device memory.
    FreeMemory,
    /// Adopt memory that other code allocated.
    AdoptMemory,
    /// Create a stream.
    CreateStream,
    /// Destroy a stream.
    DestroyStream,
    /// Wait on the host until the work of a stream is complete.
    SynchronizeStream,
    /// Create an event.
    CreateEvent,
    /// Destroy an event.
    DestroyEvent,
    /// Read whether a stream is capturing.
    IsCapturing,
    /// Record an event on a stream.
    Record,
    /// Read whether an event is complete.
    Query,
    /// Make a stream wait for an event.
    Wait,
    /// Wait on the host for an event.
    SynchronizeEvent,
    /// Fill device memory.
    Fill,
    /// Copy between device addresses.
    Copy,
    /// Copy between memory of two devices.
    CopyPeer,
    /// Copy from pinned host memory to the device.
    CopyToDevice,
    /// Copy from the device to pinned host memory.
    CopyToHost,
    /// Allocate from the device's own stream-ordered pool.
    MallocAsync,
    /// Free into the device's own stream-ordered pool.
    FreeAsync,
    /// Read the statistics of the device's own stream-ordered pool.
    PoolUsage,
    /// Set how much the device's own stream-ordered pool keeps.
    SetPoolThreshold,
    /// Trim the device's own stream-ordered pool.
    TrimPool,
    /// Allocate pinned host memory.
    AllocHost,
    /// Pin host memory.
    RegisterHost,
    /// Free pinned host memory.
    FreeHost,
    /// Read or write pinned host memory from the host.
    AccessHost,
    /// Read free and total memory.
    MemoryInfo,
    /// Begin a capture on a stream.
    BeginCapture,
    /// End a capture.
    EndCapture,
    /// Read the state of the capture that a stream is part of.
    CaptureInfo,
    /// Read the dependencies of a node.
    NodeDependencies,
    /// Count the nodes of a graph.
    GraphNodes,
    /// Instantiate a graph.
    Instantiate,
    /// Launch a graph.
    LaunchGraph,
    /// Destroy a graph.
    DestroyGraph,
    /// Destroy an instantiated graph.
    DestroyGraphExec,
}

impl Call {
    /// Every call, in declaration order.
    pub const ALL: [Call; 48] = [
        Call::Reserve,
        Call::FreeAddresses,
        Call::Create,
        Call::Release,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::RevokeAccess,
        Call::Export,
        Call::Import,
        Call::ExportDmaBuf,
        Call::AllocMemory,
        Call::FreeMemory,
        Call::AdoptMemory,
        Call::CreateStream,
        Call::DestroyStream,
        Call::SynchronizeStream,
        Call::CreateEvent,
        Call::DestroyEvent,
        Call::IsCapturing,
        Call::Record,
        Call::Query,
        Call::Wait,
        Call::SynchronizeEvent,
        Call::Fill,
        Call::Copy,
        Call::CopyPeer,
        Call::CopyToDevice,
        Call::CopyToHost,
        Call::MallocAsync,
        Call::FreeAsync,
        Call::PoolUsage,
        Call::SetPoolThreshold,
        Call::TrimPool,
        Call::AllocHost,
        Call::RegisterHost,
        Call::FreeHost,
        Call::AccessHost,
        Call::MemoryInfo,
        Call::BeginCapture,
        Call::EndCapture,
        Call::CaptureInfo,
        Call::NodeDependencies,
        Call::GraphNodes,
        Call::Instantiate,
        Call::LaunchGraph,
        Call::DestroyGraph,
        Call::DestroyGraphExec,
    ];

    /// Returns the name used in files and messages: `set-access`.
    pub const fn name(self) -> &'static str {
        match self {
            Call::Reserve => "reserve",
            Call::FreeAddresses => "free-addresses",
            Call::Create => "create",
            Call::Release => "release",
            Call::Map => "map",
            Call::Unmap => "unmap",
            Call::SetAccess => "set-access",
            Call::RevokeAccess => "revoke-access",
            Call::Export => "export",
            Call::Import => "import",
            Call::ExportDmaBuf => "export-dma-buf",
            Call::AllocMemory => "alloc-memory",
            Call::FreeMemory => "free-memory",
            Call::AdoptMemory => "adopt-memory",
            Call::CreateStream => "create-stream",
            Call::DestroyStream => "destroy-stream",
            Call::SynchronizeStream => "synchronize-stream",
            Call::CreateEvent => "create-event",
            Call::DestroyEvent => "destroy-event",
            Call::IsCapturing => "is-capturing",
            Call::Record => "record",
            Call::Query => "query",
            Call::Wait => "wait",
            Call::SynchronizeEvent => "synchronize-event",
            Call::Fill => "fill",
            Call::Copy => "copy",
            Call::CopyPeer => "copy-peer",
            Call::CopyToDevice => "copy-to-device",
            Call::CopyToHost => "copy-to-host",
            Call::MallocAsync => "malloc-async",
            Call::FreeAsync => "free-async",
            Call::PoolUsage => "pool-usage",
            Call::SetPoolThreshold => "set-pool-threshold",
            Call::TrimPool => "trim-pool",
            Call::AllocHost => "alloc-host",
            Call::RegisterHost => "register-host",
            Call::FreeHost => "free-host",
            Call::AccessHost => "access-host",
            Call::MemoryInfo => "memory-info",
            Call::BeginCapture => "begin-capture",
            Call::EndCapture => "end-capture",
            Call::CaptureInfo => "capture-info",
            Call::NodeDependencies => "node-dependencies",
            Call::GraphNodes => "graph-nodes",
            Call::Instantiate => "instantiate",
            Call::LaunchGraph => "launch-graph",
            Call::DestroyGraph => "destroy-graph",
            Call::DestroyGraphExec => "destroy-graph-exec",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_a_name_of_its_own_in_declaration_order() {
        let mut names: Vec<_> = Call::ALL.iter().map(|call| call.name()).collect();
        for (index, call) in Call::ALL.iter().enumerate() {
            assert_eq!(*call as usize, index, "{call}");
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Call::ALL.len());
    }
}
