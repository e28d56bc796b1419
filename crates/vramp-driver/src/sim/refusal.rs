//! Errors of the simulated device, before the driver call is attached.

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
