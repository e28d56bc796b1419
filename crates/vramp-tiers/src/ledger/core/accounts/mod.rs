//! What is reserved in each space, and what is allocated from it.

mod census;
mod charging;
mod errors;
mod ledger;
mod overrun;
mod pressure;
mod record;
mod space_account;

pub use census::{SpaceCensus, TagCensus};
pub use errors::{
    Bound, ChargeError, GrowError, Holder, LedgerError, LedgerReserveError, MergeError,
    SpaceRefusal, SplitError, StaleReservation, UnchargeError, UnknownSpace, UnknownTag,
    UnreservedError,
};
pub use ledger::{Ledger, Merge, Reserved};
pub use overrun::{
    Charged, FactorError, GrowthFactor, LimitPolicy, Overrun, OverrunAction, OverrunOutcome,
};
pub use pressure::{CrossingCursor, Pressure};
pub use record::{Owner, ReservationId, ReservationRecord, Tag};
pub use space_account::{Crossing, SpaceCounters};
