//! What a driver call that failed says: which call, which code, and what kind of failure it is.

use std::borrow::Cow;
use std::fmt;

/// The calls a device understands, one for each method of [`crate::Driver`] that can fail.
///
/// Costs, counts and injected failures are all keyed by this.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Deserialize, serde::Serialize,
)]
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
    /// Allocate device memory.
    AllocMemory,
    /// Free device memory.
    FreeMemory,
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
    /// Ask whether a stream captures a graph.
    IsCapturing,
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
    /// Pin host memory.
    RegisterHost,
    /// Free pinned host memory.
    FreeHost,
    /// Read or write pinned host memory from the host.
    AccessHost,
    /// Ask how much memory is free.
    MemoryInfo,
    /// Let a stream capture a graph.
    BeginCapture,
    /// End a capture.
    EndCapture,
    /// Ask where in its capture a stream is.
    CaptureInfo,
    /// Ask which nodes a node comes behind.
    NodeDependencies,
    /// Count the nodes of a graph.
    GraphNodes,
    /// Make a graph ready to launch.
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
    pub const ALL: [Call; 42] = [
        Call::Reserve,
        Call::FreeAddresses,
        Call::Create,
        Call::Release,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::AllocMemory,
        Call::FreeMemory,
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
            Call::AllocMemory => "alloc-memory",
            Call::FreeMemory => "free-memory",
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
/// [`ErrorKind::DeviceLost`], or [`ErrorKind::Capturing`]: such a refusal may have spoilt a capture,
/// and one that is spoilt or not joined is over once its end was refused.
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

/// The codes worth telling apart: number, name, and what it means for the caller.
///
/// The numbers are those of `CUresult` in the CUDA driver interface, which keeps them stable.
const CODES: &[(i32, &str, ErrorKind)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE", ErrorKind::InvalidUse),
    (2, "CUDA_ERROR_OUT_OF_MEMORY", ErrorKind::OutOfMemory),
    (3, "CUDA_ERROR_NOT_INITIALIZED", ErrorKind::Other),
    (4, "CUDA_ERROR_DEINITIALIZED", ErrorKind::DeviceLost),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", ErrorKind::Other),
    (100, "CUDA_ERROR_NO_DEVICE", ErrorKind::DeviceLost),
    (101, "CUDA_ERROR_INVALID_DEVICE", ErrorKind::InvalidUse),
    (200, "CUDA_ERROR_INVALID_IMAGE", ErrorKind::Other),
    (201, "CUDA_ERROR_INVALID_CONTEXT", ErrorKind::DeviceLost),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE", ErrorKind::DeviceLost),
    (304, "CUDA_ERROR_OPERATING_SYSTEM", ErrorKind::Other),
    (400, "CUDA_ERROR_INVALID_HANDLE", ErrorKind::InvalidUse),
    (401, "CUDA_ERROR_ILLEGAL_STATE", ErrorKind::InvalidUse),
    (600, "CUDA_ERROR_NOT_READY", ErrorKind::Other),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", ErrorKind::DeviceLost),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT", ErrorKind::DeviceLost),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", ErrorKind::DeviceLost),
    (710, "CUDA_ERROR_ASSERT", ErrorKind::DeviceLost),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR", ErrorKind::DeviceLost),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", ErrorKind::DeviceLost),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", ErrorKind::DeviceLost),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", ErrorKind::DeviceLost),
    (718, "CUDA_ERROR_INVALID_PC", ErrorKind::DeviceLost),
    (719, "CUDA_ERROR_LAUNCH_FAILED", ErrorKind::DeviceLost),
    (800, "CUDA_ERROR_NOT_PERMITTED", ErrorKind::InvalidUse),
    (801, "CUDA_ERROR_NOT_SUPPORTED", ErrorKind::NotSupported),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY", ErrorKind::Other),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ErrorKind::Other),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", ErrorKind::Capturing),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", ErrorKind::Capturing),
    (902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", ErrorKind::Capturing),
    (903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", ErrorKind::Capturing),
    (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", ErrorKind::Capturing),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", ErrorKind::Capturing),
    (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", ErrorKind::Capturing),
    (907, "CUDA_ERROR_CAPTURED_EVENT", ErrorKind::Capturing),
    (908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", ErrorKind::Capturing),
    (999, "CUDA_ERROR_UNKNOWN", ErrorKind::DeviceLost),
];

impl DriverError {
    /// The error with the driver's own number `code`, named and sorted by what it means.
    ///
    /// An unlisted number keeps its value, is named `CUDA_ERROR_<number>` and is of kind
    /// [`ErrorKind::Other`].
    ///
    /// ```
    /// use vramp_driver::{Call, DriverError};
    /// let error = DriverError::from_code(Call::Create, 2, "2.00 MiB asked, 0 B free");
    /// assert!(error.is_out_of_memory());
    /// assert_eq!(
    ///     error.to_string(),
    ///     "driver call create failed: CUDA_ERROR_OUT_OF_MEMORY (2): 2.00 MiB asked, 0 B free",
    /// );
    /// ```
    pub fn from_code(call: Call, code: i32, detail: impl Into<Cow<'static, str>>) -> DriverError {
        let (name, kind) = match CODES.iter().find(|(listed, ..)| *listed == code) {
            Some((_, name, kind)) => (Cow::Borrowed(*name), *kind),
            None => (Cow::Owned(format!("CUDA_ERROR_{code}")), ErrorKind::Other),
        };
        DriverError { call, code, name, kind, detail: detail.into() }
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

    #[test]
    fn codes_are_sorted_by_what_they_mean() {
        for (code, kind) in [
            (1, ErrorKind::InvalidUse),
            (2, ErrorKind::OutOfMemory),
            (700, ErrorKind::DeviceLost),
            (801, ErrorKind::NotSupported),
            (900, ErrorKind::Capturing),
            (999, ErrorKind::DeviceLost),
            (12345, ErrorKind::Other),
        ] {
            assert_eq!(DriverError::from_code(Call::Map, code, "").kind, kind, "{code}");
        }
        assert_eq!(DriverError::from_code(Call::Map, 12345, "").name, "CUDA_ERROR_12345");
    }
}
