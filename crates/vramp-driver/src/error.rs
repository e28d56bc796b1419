//! What a driver call that failed says: which call, which code, and what kind of failure it is.

use std::borrow::Cow;
use std::fmt;

/// The calls a device understands, one for each method of [`crate::Driver`] that can fail.
///
/// Costs, counts and injected failures are all keyed by this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Call {
    /// Reserve a range of addresses.
    Reserve,
    /// Give a range of addresses back.
    FreeAddresses,
    /// Create physical memory.
    Create,
    /// Release physical memory.
    Release,
    /// Map physical memory at an address.
    Map,
    /// Unmap a range of addresses.
    Unmap,
    /// Let the device touch a range of addresses.
    SetAccess,
    /// Create a stream.
    CreateStream,
    /// Destroy a stream.
    DestroyStream,
    /// Wait on the host until a stream is empty.
    SynchronizeStream,
    /// Create an event.
    CreateEvent,
    /// Destroy an event.
    DestroyEvent,
    /// Record an event on a stream.
    Record,
    /// Ask whether an event was reached.
    Query,
    /// Make a stream wait for an event.
    Wait,
    /// Wait on the host for an event.
    SynchronizeEvent,
    /// Fill device memory.
    Fill,
    /// Copy between device addresses.
    Copy,
    /// Copy from pinned host memory to the device.
    CopyToDevice,
    /// Copy from the device to pinned host memory.
    CopyToHost,
    /// Allocate from the device's own stream-ordered pool.
    MallocAsync,
    /// Free into the device's own stream-ordered pool.
    FreeAsync,
    /// Read the size of the device's own stream-ordered pool.
    PoolUsage,
    /// Set how much the device's own stream-ordered pool keeps.
    SetPoolThreshold,
    /// Give memory of the device's own stream-ordered pool back.
    TrimPool,
    /// Allocate pinned host memory.
    AllocHost,
    /// Free pinned host memory.
    FreeHost,
    /// Read or write pinned host memory from the host.
    AccessHost,
    /// Ask how much memory is free.
    MemoryInfo,
}

impl Call {
    /// Every call, in declaration order.
    pub const ALL: [Call; 29] = [
        Call::Reserve,
        Call::FreeAddresses,
        Call::Create,
        Call::Release,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::CreateStream,
        Call::DestroyStream,
        Call::SynchronizeStream,
        Call::CreateEvent,
        Call::DestroyEvent,
        Call::Record,
        Call::Query,
        Call::Wait,
        Call::SynchronizeEvent,
        Call::Fill,
        Call::Copy,
        Call::CopyToDevice,
        Call::CopyToHost,
        Call::MallocAsync,
        Call::FreeAsync,
        Call::PoolUsage,
        Call::SetPoolThreshold,
        Call::TrimPool,
        Call::AllocHost,
        Call::FreeHost,
        Call::AccessHost,
        Call::MemoryInfo,
    ];

    /// The name used in files and messages: `set-access`.
    pub const fn name(self) -> &'static str {
        match self {
            Call::Reserve => "reserve",
            Call::FreeAddresses => "free-addresses",
            Call::Create => "create",
            Call::Release => "release",
            Call::Map => "map",
            Call::Unmap => "unmap",
            Call::SetAccess => "set-access",
            Call::CreateStream => "create-stream",
            Call::DestroyStream => "destroy-stream",
            Call::SynchronizeStream => "synchronize-stream",
            Call::CreateEvent => "create-event",
            Call::DestroyEvent => "destroy-event",
            Call::Record => "record",
            Call::Query => "query",
            Call::Wait => "wait",
            Call::SynchronizeEvent => "synchronize-event",
            Call::Fill => "fill",
            Call::Copy => "copy",
            Call::CopyToDevice => "copy-to-device",
            Call::CopyToHost => "copy-to-host",
            Call::MallocAsync => "malloc-async",
            Call::FreeAsync => "free-async",
            Call::PoolUsage => "pool-usage",
            Call::SetPoolThreshold => "set-pool-threshold",
            Call::TrimPool => "trim-pool",
            Call::AllocHost => "alloc-host",
            Call::FreeHost => "free-host",
            Call::AccessHost => "access-host",
            Call::MemoryInfo => "memory-info",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a failure means for whoever made the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device has no room left. Giving memory back and trying again may help.
    OutOfMemory,
    /// This device or driver cannot do this at all.
    NotSupported,
    /// The arguments were wrong: an unknown id, a bad alignment, a range that is not mapped whole.
    InvalidUse,
    /// The call is refused while a stream captures a graph.
    Capturing,
    /// The device is lost for this process. Sticky: every later call fails the same way.
    DeviceLost,
    /// Anything else the driver reported.
    Other,
}

/// A driver call that failed. The device is as it was before the call, unless the kind is
/// [`ErrorKind::DeviceLost`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("driver call {call} failed: {name} ({code}){}{detail}", if detail.is_empty() { "" } else { ": " })]
pub struct DriverError {
    /// Which call failed.
    pub call: Call,
    /// The driver's own code (a `CUresult` number; the simulator uses the same numbers).
    pub code: i32,
    /// The driver's own name for the code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: Cow<'static, str>,
    /// What the failure means.
    pub kind: ErrorKind,
    /// What was asked, where the code alone does not tell. May be empty.
    pub detail: Cow<'static, str>,
}

impl DriverError {
    /// True if giving memory back and trying again may help.
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == ErrorKind::OutOfMemory
    }

    /// True if every later call on this device will fail too.
    pub fn is_device_lost(&self) -> bool {
        self.kind == ErrorKind::DeviceLost
    }
}
