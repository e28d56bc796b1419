//! Converts errors of tiers to exceptions.

use std::sync::Arc;

use pyo3::prelude::*;
use vramp_alloc::AllocError;
use vramp_alloc::device::ErrorKind;
use vramp_alloc::error::Unusable;
use vramp_alloc::graph::ArenaError;
use vramp_capi::abi::vramp_status_t::VRAMP_ERROR_OUT_OF_MEMORY;
use vramp_capi::process::Error;
use vramp_core::{Bytes, Inconsistency};
use vramp_defer::error::EvictError;
use vramp_defer::{LeaseRefused, SpillError, TiersError};
use vramp_tiers::ReserveError;
use vramp_tiers::disk::DiskTierError;
use vramp_tiers::movers::MoveError;

use crate::error::{raise, refuse};

/// Why a call of the tiers failed.
#[derive(Debug)]
pub enum Fault {
    /// The object is closed.
    Closed(&'static str),
    Process(Error),
    Forked(Unusable),
    Tiers(TiersError),
    Spill(SpillError),
    Reserve(ReserveError),
    Inconsistent(Inconsistency),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Process(error)
    }
}

impl From<Unusable> for Fault {
    fn from(error: Unusable) -> Fault {
        Fault::Forked(error)
    }
}

impl From<TiersError> for Fault {
    fn from(error: TiersError) -> Fault {
        match error {
            TiersError::Manager(error) => Fault::Spill(error),
            error => Fault::Tiers(error),
        }
    }
}

impl From<SpillError> for Fault {
    fn from(error: SpillError) -> Fault {
        Fault::Spill(error)
    }
}

impl From<ReserveError> for Fault {
    fn from(error: ReserveError) -> Fault {
        Fault::Reserve(error)
    }
}

impl From<Inconsistency> for Fault {
    fn from(error: Inconsistency) -> Fault {
        Fault::Inconsistent(error)
    }
}

impl Fault {
    /// Returns the exception of the failure.
    #[cold]
    pub fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Fault::Closed(what) => {
                let text = match what {
                    "tiers" => "the tiers are closed: open others".to_owned(),
                    what => format!("the tiers of the {what} are closed: make another one"),
                };
                refuse(py, "ClosedError", &text)
            }
            Fault::Process(error) => raise(py, error),
            Fault::Forked(error) => refuse(py, "ForkedError", &error.to_string()),
            Fault::Inconsistent(error) => refuse(py, "InternalError", &error.to_string()),
            Fault::Tiers(error) => {
                let class = match &error {
                    TiersError::Config(_)
                    | TiersError::NoGpu
                    | TiersError::OtherGpu { .. }
                    | TiersError::NoHost
                    | TiersError::TwoDisks
                    | TiersError::Spaces(_) => "OptionError",
                    TiersError::Device(_) => "DeviceError",
                    TiersError::Host(_) => "TierFullError",
                    TiersError::Disk(error) => disk_class(error),
                    _ => "DriverError",
                };
                refuse(py, class, &error.to_string())
            }
            Fault::Spill(error) => raise_spill(py, error),
            Fault::Reserve(error) => raise_reserve(py, &error),
        }
    }
}

fn disk_class(error: &DiskTierError) -> &'static str {
    match error {
        DiskTierError::Full(_) => "TierFullError",
        DiskTierError::Config(_) => "OptionError",
        _ => "FileError",
    }
}

/// Returns a `TierFullError` with its amounts.
fn full(py: Python<'_>, text: &str, needed: Option<Bytes>, capacity: Option<Bytes>) -> PyErr {
    let error = refuse(py, "TierFullError", text);
    let value = error.value(py);
    let set = |name: &str, amount: Option<Bytes>| match amount {
        Some(amount) => value.setattr(name, amount.count()),
        None => Ok(()),
    };
    match set("needed", needed).and_then(|()| set("capacity", capacity)) {
        Ok(()) => error,
        Err(error) => error,
    }
}

fn raise_spill(py: Python<'_>, error: SpillError) -> PyErr {
    let text = error.to_string();
    let class = match error {
        SpillError::Refused(LeaseRefused::TooLarge { needed, capacity }) => {
            return full(py, &text, Some(needed), Some(capacity));
        }
        SpillError::Refused(LeaseRefused::Unknown(_)) => "ClosedError",
        SpillError::Refused(_) => "LeaseTimeoutError",
        SpillError::NothingCanLeave { .. } => return full(py, &text, None, None),
        SpillError::NoMemory { error, .. } => match *error {
            AllocError::OutOfMemory(report) => {
                let status = VRAMP_ERROR_OUT_OF_MEMORY;
                return raise(
                    py,
                    Error { status, text, report: Some(Arc::from(report)), region: None },
                );
            }
            _ => "OutOfMemoryError",
        },
        SpillError::NoBudget { error: full_space, .. } => {
            let refusal = full_space.refusal();
            let limit = refusal.and_then(|refusal| refusal.spaces.first()).map(|space| space.limit);
            let needed = refusal.map(|refusal| refusal.requested);
            return full(py, &text, needed, limit);
        }
        SpillError::Config(_) | SpillError::Settings(_) | SpillError::OtherSpace { .. } => {
            "OptionError"
        }
        SpillError::Add(_) | SpillError::Outside { .. } | SpillError::NotNamed { .. } => {
            "RangeError"
        }
        SpillError::UnknownStream(_) => "UnknownStreamError",
        SpillError::Capturing(_) | SpillError::CaptureInProgress => "CaptureError",
        SpillError::Evict(EvictError::NoRoom { needed, .. }) => {
            return full(py, &text, Some(needed), None);
        }
        SpillError::NotAdoptable { error, .. } if error.kind == ErrorKind::InvalidUse => {
            "UnknownPointerError"
        }
        SpillError::NotAdoptable { .. } => "DriverError",
        SpillError::AddressesOfBuffer(_) => "InUseError",
        SpillError::PinnedMemory { .. } | SpillError::Held(_) | SpillError::Evict(_) => {
            "InUseError"
        }
        SpillError::Addresses(ArenaError::Capacity { .. }) => "RangeError",
        SpillError::NotReadable(_) | SpillError::Addresses(_) | SpillError::MemoryOfPool { .. } => {
            "UnsupportedError"
        }
        SpillError::Move(MoveError::Host(_)) => return full(py, &text, None, None),
        SpillError::Move(MoveError::Disk { error, .. }) => disk_class(&error),
        SpillError::Move(_) | SpillError::NotSpilled(_) | SpillError::Driver(_) => "DriverError",
        _ => "VrampError",
    };
    refuse(py, class, &text)
}

fn raise_reserve(py: Python<'_>, error: &ReserveError) -> PyErr {
    let text = error.to_string();
    match error {
        ReserveError::NoSpace(_) => refuse(py, "RangeError", &text),
        ReserveError::TimedOut(_) | ReserveError::Deadlock { .. } => {
            refuse(py, "LeaseTimeoutError", &text)
        }
        ReserveError::NeverFits(refusal) | ReserveError::NotNow(refusal) => {
            full(py, &text, Some(refusal.requested), Some(refusal.limit()))
        }
        _ => refuse(py, "VrampError", &text),
    }
}
