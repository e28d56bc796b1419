//! Converts errors of tiers to exceptions. The C interface classifies them; `error.rs` has the class of each
//! status, and here are the amounts that a full tier tells.

use pyo3::prelude::*;
use vramp_alloc::error::Unusable;
use vramp_capi::abi::vramp_status_t::VRAMP_ERROR_OUT_OF_MEMORY;
use vramp_capi::process::Error;
use vramp_core::{Bytes, Inconsistency};
use vramp_defer::error::EvictError;
use vramp_defer::{LeaseRefused, SpillError, TiersError};
use vramp_tiers::ReserveError;

use crate::error::{raise, refuse};

/// Why a call of the tiers failed.
#[derive(Debug)]
pub enum Fault {
    /// The object is closed.
    Closed(&'static str),
    Process(Error),
    /// A tier has no room.
    Full {
        text: String,
        amounts: Amounts,
    },
}

/// What a request needs at once, and what there is for it, as far as they are known.
#[derive(Debug, Default)]
pub struct Amounts {
    needed: Option<Bytes>,
    capacity: Option<Bytes>,
}

impl Fault {
    /// A failure without a report of the pool is one of a tier, where there is no room.
    fn of(error: Error, amounts: Amounts) -> Fault {
        match error {
            Error { status: VRAMP_ERROR_OUT_OF_MEMORY, text, report: None, .. } => {
                Fault::Full { text, amounts }
            }
            error => Fault::Process(error),
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Process(error)
    }
}

impl From<Unusable> for Fault {
    fn from(error: Unusable) -> Fault {
        Fault::Process(error.into())
    }
}

impl From<Inconsistency> for Fault {
    fn from(error: Inconsistency) -> Fault {
        Fault::Process(error.into())
    }
}

impl From<TiersError> for Fault {
    fn from(error: TiersError) -> Fault {
        match error {
            TiersError::Manager(error) => error.into(),
            error => Fault::of(error.into(), Amounts::default()),
        }
    }
}

impl From<SpillError> for Fault {
    fn from(error: SpillError) -> Fault {
        let amounts = match &error {
            SpillError::Refused(LeaseRefused::TooLarge { needed, capacity }) => {
                Amounts { needed: Some(*needed), capacity: Some(*capacity) }
            }
            SpillError::Evict(EvictError::NoRoom { needed, .. }) => {
                Amounts { needed: Some(*needed), capacity: None }
            }
            SpillError::NoBudget { error, .. } => amounts_of(error),
            _ => Amounts::default(),
        };
        Fault::of(error.into(), amounts)
    }
}

impl From<ReserveError> for Fault {
    fn from(error: ReserveError) -> Fault {
        let amounts = amounts_of(&error);
        match error {
            // In C a request that does not wait has a deadline that is over. Here it has none.
            ReserveError::NotNow(_) => Fault::Full { text: error.to_string(), amounts },
            error => Fault::of(error.into(), amounts),
        }
    }
}

fn amounts_of(error: &ReserveError) -> Amounts {
    let Some(refusal) = error.refusal() else { return Amounts::default() };
    Amounts { needed: Some(refusal.requested), capacity: Some(refusal.limit()) }
}

impl Fault {
    /// Returns the exception of the failure.
    #[cold]
    pub fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Fault::Closed("tiers") => {
                refuse(py, "ClosedError", "the tiers are closed: open others")
            }
            Fault::Closed(what) => {
                let text = format!("the tiers of the {what} are closed: make another one");
                refuse(py, "ClosedError", &text)
            }
            Fault::Process(error) => raise(py, error),
            Fault::Full { text, amounts } => {
                let error = refuse(py, "TierFullError", &text);
                let value = error.value(py);
                let set = |name: &str, amount: Option<Bytes>| match amount {
                    Some(amount) => value.setattr(name, amount.count()),
                    None => Ok(()),
                };
                match set("needed", amounts.needed).and_then(|()| set("capacity", amounts.capacity))
                {
                    Ok(()) => error,
                    Err(error) => error,
                }
            }
        }
    }
}
