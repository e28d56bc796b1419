//! Errors of the simulated device, before the driver call is attached.
//!
//! What is left of a device's objects, and why it was lost.

use vramp_core::Bytes;
use vramp_host::MapError;

/// A driver code and its explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub code: i32,
    pub detail: String,
}

pub(super) type Outcome<T> = std::result::Result<T, Refusal>;

impl Refusal {
    /// An argument is wrong.
    pub fn invalid(detail: impl Into<String>) -> Refusal {
        Refusal { code: 1, detail: detail.into() }
    }

    /// An id that is stale, foreign, or of a destroyed object.
    pub fn unknown(what: &str, number: u64) -> Refusal {
        Refusal { code: 400, detail: format!("{what} {number:#x} does not exist") }
    }

    /// A stream is capturing.
    pub fn capturing(detail: impl Into<String>) -> Refusal {
        Refusal { code: 900, detail: detail.into() }
    }

    /// No memory or addresses are left.
    pub fn out_of_memory(detail: impl Into<String>) -> Refusal {
        Refusal { code: 2, detail: detail.into() }
    }

    /// The device does not support the call.
    pub fn not_supported(detail: impl Into<String>) -> Refusal {
        Refusal { code: 801, detail: detail.into() }
    }
}

/// The host has no memory or addresses for what the card has.
impl From<MapError> for Refusal {
    fn from(error: MapError) -> Refusal {
        Refusal::out_of_memory(error.to_string())
    }
}

/// Counts and bytes of live objects. Equal values before and after mean that nothing leaked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveObjects {
    /// Address reservations.
    pub reservations: usize,
    /// Bytes of addresses in reservations.
    pub reserved_addresses: Bytes,
    /// Physical handles not released.
    pub handles: usize,
    /// Released handles that a mapping keeps alive.
    pub handles_released_but_mapped: usize,
    /// Released handles without a mapping that an exported descriptor or an imported handle keeps.
    pub handles_released_but_exported: usize,
    /// Mappings.
    pub mappings: usize,
    /// Device memory in handles, plain allocations and the device's own pool.
    pub device_bytes: Bytes,
    /// Streams not destroyed.
    pub streams: usize,
    /// Events not destroyed.
    pub events: usize,
    /// Captures not ended.
    pub captures: usize,
    /// Graphs not destroyed.
    pub graphs: usize,
    /// Instantiated graphs not destroyed.
    pub graph_execs: usize,
    /// Pinned host buffers.
    pub host_buffers: usize,
    /// Bytes in pinned host buffers.
    pub host_bytes: Bytes,
    /// Plain allocations, also of other code. They count neither as handles nor as mappings.
    pub allocations: usize,
    /// Adopted ranges.
    pub adoptions: usize,
    /// Allocations from the device's own pool.
    pub pool_allocations: usize,
    /// Bytes allocated from the device's own pool.
    pub pool_bytes: Bytes,
}

/// Why the device was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLoss {
    /// Code of the driver, such as 700.
    pub code: i32,
    /// Work and address that caused the loss, and the rule that was broken.
    pub explanation: String,
}
